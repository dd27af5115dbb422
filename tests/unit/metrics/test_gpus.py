"""This module tests how busy GPUs are: the arithmetic with a stand-in for NVML, and NVML itself where there is a
GPU.
"""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import pytest

from rl.metrics.gpus import GpuMeter


class NvmlError(Exception):
    pass


def stand_in(*shares: int, works: bool = True) -> SimpleNamespace:
    """NVML with a GPU for each of ``shares`` (percent)."""

    def init() -> None:
        if not works:
            raise NvmlError("Driver Not Loaded")

    return SimpleNamespace(
        NVMLError=NvmlError,
        nvmlInit=init,
        nvmlDeviceGetCount=lambda: len(shares),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID=lambda uuid: int(uuid.removeprefix("GPU-")),
        nvmlDeviceGetUtilizationRates=lambda gpu: SimpleNamespace(gpu=shares[gpu]),
    )


@pytest.fixture(autouse=True)
def no_thread(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "gpu" not in request.keywords:
        monkeypatch.setattr("rl.metrics.gpus.GpuMeter._run", lambda self: None)


@pytest.mark.parametrize(
    ("visible", "wanted"), [(None, [0.9, 0.5, 0.1]), ("2,0", [0.1, 0.9]), ("GPU-1", [0.5]), ("", [0.9, 0.5, 0.1])]
)
def test_busy_shares_of_the_gpus_of_this_job(
    visible: str | None, wanted: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", stand_in(90, 50, 10))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    meter = GpuMeter()
    assert meter.take() == []  # nothing was measured yet
    meter.measure()
    meter.measure()
    assert meter.take() == pytest.approx(wanted)
    assert meter.take() == []


def test_without_a_driver_there_is_no_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", stand_in(90, works=False))
    meter = GpuMeter()
    meter.measure()
    assert meter.take() == []


@pytest.mark.gpu
def test_a_real_gpu() -> None:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        pytest.skip(f"no NVIDIA GPU: {error}")
    meter = GpuMeter()
    time.sleep(2.5)
    shares = meter.take()
    assert shares and all(0 <= share <= 1 for share in shares)
