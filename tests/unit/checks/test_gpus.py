"""A run's GPUs are compared with those of its plan, by a stand-in for NVML: this was not run on a GPU."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import pytest

from rl.checks.gpus import MOE_BACKEND, card_notes
from tests.check_kit import composed
from tests.unit.metrics.test_gpus import stand_in

H100, H200, B200 = ("NVIDIA H100 80GB HBM3", 79.6, 9), ("NVIDIA H200", 140.4, 9), ("NVIDIA B200", 178.4, 10)

A100 = ("NVIDIA A100-SXM4-80GB", 80.0, 8)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    def has(*found: tuple[str, float, int], works: bool = True) -> None:
        nvml = stand_in(*(0 for _ in found), works=works)
        nvml.nvmlDeviceGetName = lambda gpu: found[gpu][0]
        nvml.nvmlDeviceGetMemoryInfo = lambda gpu: SimpleNamespace(total=found[gpu][1] * 2**30)
        nvml.nvmlDeviceGetCudaComputeCapability = lambda gpu: (found[gpu][2], 0)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return has


@pytest.mark.parametrize(
    ("found", "keys", "said"),
    [
        ((H100, H100), [], "2 x NVIDIA H100 80GB HBM3 with 80 GiB, as planned"),
        ((H200,), ["cluster=h200"], "1 x NVIDIA H200 with 140 GiB, as planned"),
        ((H200,), [], "1 x NVIDIA H200 with 140 GiB, but the plan is of H100 SXM 80GB with 79 GiB; set cluster=h200"),
        ((A100,), [], "1 x NVIDIA A100-SXM4-80GB with 80 GiB, but .*; set cluster=a100"),
        ((("NVIDIA H100 NVL", 93.6, 9), H100), ["cluster=h200"], "2 x .* 80 GiB, but .* 139 GiB; set cluster=h100"),
        (
            (("NVIDIA A100-SXM4-40GB", 39.6, 8),),
            ["cluster=a100"],
            "1 x .*, but .*; set cluster.gpu_gb=40, cluster.tflops, cluster.memory_gbs and cluster.gpu",
        ),
    ],
)
def test_cards_are_compared_with_the_plans_in_one_line(machine, found, keys, said) -> None:
    machine(*found)
    (line,) = card_notes(composed("+experiment=qwen3_4b", *keys))
    assert re.fullmatch(f"GPUs: {said}", line)


def test_blackwells_known_failure_is_named_for_models_with_experts(machine) -> None:
    machine(B200)
    (_, line) = card_notes(composed("+experiment=qwen3_coder_30b"))
    assert "sm_100" in line and "verl issue 7978" in line and line.endswith(f"set +{MOE_BACKEND}=triton")
    assert len(card_notes(composed("+experiment=qwen3_4b"))) == 1
    assert len(card_notes(composed("+experiment=qwen3_coder_30b", f"+{MOE_BACKEND}=triton"))) == 1
    machine(("NVIDIA GeForce RTX 5090", 31.8, 12))
    assert "sm_120" in card_notes(composed("+experiment=qwen3_5_35b_a3b"))[1]


def test_nothing_is_said_where_there_is_no_gpu(machine) -> None:
    machine(H100, works=False)
    assert card_notes(composed("+experiment=qwen3_4b")) == []
    machine(H100)
    assert card_notes(composed("+experiment=quickstart")) == []
