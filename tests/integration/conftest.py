"""This module has fixtures that cost more than one test should pay: a task, a vLLM server, a warm-started policy."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

from rewards.task import Task, load_tasks
from rl.quickstart.policy import make_policy
from rl.quickstart.tasks import make_tasks
from rl.run.vllm_server import vllm_server
from tests.integration.make_kit import write_wheels
from tests.integration.train_kit import ONE_PROCESS, UNCOMPILED, WarmStart
from tests.slurm_kit import Slurm, slurm


@dataclass
class Running:
    """A vLLM server: its API process (the leader of its process group), its address and its model."""

    process: subprocess.Popen[bytes]
    url: str
    model_dir: Path


@pytest.fixture
def offline_pip(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pip install pytest from wheels of what is installed here: no test needs a package index."""
    directory = tmp_path_factory.mktemp("wheels")
    write_wheels(directory)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    """A small repair task with its repository."""
    out = tmp_path_factory.mktemp("tasks")
    make_tasks(out, seed=5, n_train=1, n_heldout=1)
    return load_tasks(out / "train.parquet")[0]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A real SLURM of two nodes, whose jobs must leave no process."""
    with slurm(tmp_path_factory.mktemp("slurm")) as made:
        yield made
    left = [process.cmdline()[:4] for process in made.processes()]
    assert left == [], "jobs have left processes"


@pytest.fixture(scope="session")
def warm_start(tmp_path_factory: pytest.TempPathFactory) -> WarmStart:
    """The one warm start of a test session. The first worker that wants it makes it, the others wait."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with FileLock(shared / "warm.lock"):
        return WarmStart.make(shared / "warm")


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The one plain vLLM server of a test session, with the quickstart's policy and random weights. Tests that use it
    are in the xdist group "vllm"."""
    directory = tmp_path_factory.mktemp("vllm")
    model_dir, left = directory / "model", directory / "left"
    left.mkdir()  # for what it leaves behind
    make_policy(model_dir, seed=1)
    arguments = ["--dtype", "float32", "--max-model-len", "16384", "--max-num-seqs", "4", "--enforce-eager"]
    arguments += ["--logprobs-mode", "processed_logprobs", "--enable-prompt-tokens-details"]
    arguments += ["--enable-auto-tool-choice", "--tool-call-parser", "qwen3_coder", *ONE_PROCESS]
    environment = {"TMPDIR": str(left), "HF_HUB_OFFLINE": "1", **UNCOMPILED}
    log = directory / "server.log"
    with vllm_server(str(model_dir), log, *arguments, environment=environment, timeout_s=600) as running:
        yield Running(running.process, running.url, model_dir)
