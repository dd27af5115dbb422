"""The GPUs that this job may use, as NVIDIA's management library (NVML) reports them."""

from __future__ import annotations

import os
from typing import Any, NamedTuple


class Card(NamedTuple):
    """A card is a GPU: its name, its memory in GiB, and the major number of its compute capability (9: Hopper)."""

    name: str
    gib: float
    generation: int


def visible(nvml: Any) -> list[Any]:
    """Return the handles of the GPUs that this job may use: on a shared node NVML may see others too."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not named:
        return [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    names = [name.strip() for name in named.split(",")]
    by_index, by_uuid = nvml.nvmlDeviceGetHandleByIndex, nvml.nvmlDeviceGetHandleByUUID
    return [by_index(int(name)) if name.isdigit() else by_uuid(name) for name in names]


def cards() -> list[Card]:
    """Return the GPUs that this job may use; none where NVML cannot be used."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return [
            Card(
                str(pynvml.nvmlDeviceGetName(gpu)),
                int(pynvml.nvmlDeviceGetMemoryInfo(gpu).total) / 2**30,
                pynvml.nvmlDeviceGetCudaComputeCapability(gpu)[0],
            )
            for gpu in visible(pynvml)
        ]
    except pynvml.NVMLError:
        return []
