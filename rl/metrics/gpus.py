"""GPU utilization of a run, by NVIDIA's own counters (NVML); none on machines without them.

One small Ray actor per node with GPUs asks NVML once a second for the share of time in which any kernel ran. That is an
upper bound of how well a GPU is used: a low value always means that it is idle.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rl.metrics.nvml import visible

_EVERY_S = 1.0
_WAIT_S = 10.0


class GpuMeter:
    """A meter measures the GPUs of one node. Where NVML cannot be used, it measures none."""

    def __init__(self) -> None:
        import pynvml

        self._nvml = pynvml
        self._lock = threading.Lock()
        try:
            pynvml.nvmlInit()
            self._gpus = visible(pynvml)
        except pynvml.NVMLError:
            self._gpus = []
        self._sums, self._count = [0.0] * len(self._gpus), 0
        if self._gpus:
            threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(_EVERY_S)
            self.measure()

    def measure(self) -> None:
        """Read the counters once."""
        busy = [self._nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100 for gpu in self._gpus]
        with self._lock:
            self._sums = [total + share for total, share in zip(self._sums, busy, strict=True)]
            self._count += 1

    def take(self) -> list[float]:
        """Return the busy share (0 to 1) of each GPU since the last call; [] if nothing was measured since."""
        with self._lock:
            shares = [total / self._count for total in self._sums] if self._count else []
            self._sums, self._count = [0.0] * len(self._gpus), 0
        return shares


class Gpus:
    """This object holds the meters of all nodes of the Ray cluster."""

    def __init__(self) -> None:
        remote = ray.remote(num_cpus=0)(GpuMeter)
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")]
        places = [NodeAffinitySchedulingStrategy(node, soft=True) for node in nodes]
        self._meters: list[Any] = [remote.options(scheduling_strategy=place).remote() for place in places]

    def take(self) -> dict[str, float]:
        """Return the busy share since the last call: ``gpu/busy``, the mean over the GPUs, and ``gpu/busy_min``, the
        idlest one's. Empty without NVML. A node that does not answer is left out from then on."""
        shares: list[float] = []
        for meter in list(self._meters):
            try:
                shares += ray.get(meter.take.remote(), timeout=_WAIT_S)
            except RayError:
                self._meters.remove(meter)
        return {"gpu/busy": sum(shares) / len(shares), "gpu/busy_min": min(shares)} if shares else {}
