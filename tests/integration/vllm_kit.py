"""This module has the vLLM server that tests share, and how tests start others."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rl.quickstart.policy import make_policy
from rl.run.vllm_server import vllm_server

# Arguments of a vLLM server whose engine has no process for its worker, as in configs/cpu.yaml.
ONE_PROCESS = ["--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"]
# The variable of a vLLM server that compiles no function for the first reply that it samples (12 s).
UNCOMPILED = {"TORCHDYNAMO_DISABLE": "1"}


@dataclass
class Running:
    """A vLLM server: its API process (the leader of its process group), its address and its model."""

    process: subprocess.Popen[bytes]
    url: str
    model_dir: Path


@contextlib.contextmanager
def serving(model: Path, directory: Path, *arguments: str) -> Iterator[Running]:
    """A vLLM server of a model, whose log is in ``directory``; what it leaves behind is, too."""
    left = directory / "left"
    left.mkdir()
    given = [
        "--max-num-seqs",
        "4",
        "--enforce-eager",
        "--logprobs-mode",
        "processed_logprobs",
        *ONE_PROCESS,
        *arguments,
    ]
    environment = {"TMPDIR": str(left), "HF_HUB_OFFLINE": "1", **UNCOMPILED}
    with vllm_server(str(model), directory / "server.log", *given, environment=environment, timeout_s=600) as running:
        yield Running(running.process, running.url, model)


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The one plain vLLM server of a test session, with the quickstart's policy and random weights. Tests that use it
    are in the xdist group "vllm"."""
    directory = tmp_path_factory.mktemp("vllm")
    make_policy(directory / "model", seed=1)
    arguments = ["--dtype", "float32", "--max-model-len", "16384", "--enable-prompt-tokens-details"]
    arguments += ["--enable-auto-tool-choice", "--tool-call-parser", "qwen3_coder"]
    with serving(directory / "model", directory, *arguments) as running:
        yield running
