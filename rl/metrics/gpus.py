"""How busy the GPUs of a run are, by NVIDIA's own counters (NVML). Nothing is measured where there is none.

One small Ray actor per node with GPUs asks NVML once a second for the share of time in which any kernel ran: an upper
bound of how well a GPU is used, and a sure sign when it is not.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_EVERY_S = 1.0
_WAIT_S = 10.0


class GpuMeter:
    """Of one node. ``take`` gives the busy share of each of its GPUs since the last call, 0 to 1."""

    def __init__(self) -> None:
        import pynvml

        self._nvml = pynvml
        self._lock = threading.Lock()
        try:
            pynvml.nvmlInit()
            self._gpus = self._visible()
        except pynvml.NVMLError:
            self._gpus = []
        self._sums, self._count = [0.0] * len(self._gpus), 0
        if self._gpus:
            threading.Thread(target=self._run, daemon=True).start()

    def _visible(self) -> list[Any]:
        """The GPUs that this job may use: on a shared node NVML may see others too."""
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        if not named:
            return [self._nvml.nvmlDeviceGetHandleByIndex(i) for i in range(self._nvml.nvmlDeviceGetCount())]
        names = [name.strip() for name in named.split(",")]
        by_index, by_uuid = self._nvml.nvmlDeviceGetHandleByIndex, self._nvml.nvmlDeviceGetHandleByUUID
        return [by_index(int(name)) if name.isdigit() else by_uuid(name) for name in names]

    def _run(self) -> None:
        while True:
            time.sleep(_EVERY_S)
            self.measure()

    def measure(self) -> None:
        busy = [self._nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100 for gpu in self._gpus]
        with self._lock:
            self._sums = [total + share for total, share in zip(self._sums, busy, strict=True)]
            self._count += 1

    def take(self) -> list[float]:
        with self._lock:
            shares = [total / self._count for total in self._sums] if self._count else []
            self._sums, self._count = [0.0] * len(self._gpus), 0
        return shares


class Gpus:
    """The meters of all nodes of the Ray cluster."""

    def __init__(self) -> None:
        remote = ray.remote(num_cpus=0)(GpuMeter)
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")]
        self._meters = [
            remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True)).remote()
            for node in nodes
        ]

    def take(self) -> dict[str, float]:
        """``gpu/busy``: mean over the GPUs since the last call; ``gpu/busy_min``: of the idlest. Empty without NVML; a
        node that does not answer is left out from then on."""
        shares: list[float] = []
        for meter in list(self._meters):
            try:
                shares += ray.get(meter.take.remote(), timeout=_WAIT_S)
            except ray.exceptions.RayError:
                self._meters.remove(meter)
        return {"gpu/busy": sum(shares) / len(shares), "gpu/busy_min": min(shares)} if shares else {}
