"""This module calculates what has to fit between a scheduler's warning and the end of a run (``rl.run.stop``)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from omegaconf import DictConfig

from rl.plan.host import checkpoint_bytes
from rl.plan.layout import Layout, select
from rl.plan.memory import GIB
from rl.plan.model import ModelShape
from rl.plan.throughput import Pace

SPARE = 1.5  # of calculated seconds, because the speeds are assumed
REQUEUE_S = 300  # from the grace's end to the job's: Ray's end, the script that requeues, a warning that is late


@dataclass(frozen=True)
class Stopping:
    """A Stopping is the most that ending a run takes, in seconds: ``rest`` for what must still be done after a warning,
    ``save`` for a checkpoint of ``size`` bytes. ``whole``: the rest is a whole step (or validation), because its
    rollout cannot be left."""

    rest: float
    save: float
    size: int
    whole: bool

    @property
    def needed_s(self) -> float:
        """Return the least grace, in seconds."""
        return self.rest + self.save

    @property
    def grace_s(self) -> int:
        """Return the grace that fits, in whole minutes."""
        return 60 * math.ceil(SPARE * self.needed_s / 60)

    def warning_s(self, grace_s: float) -> int:
        """Return how long before its time limit a job has to be warned."""
        return math.ceil(grace_s) + REQUEUE_S


def stopping(config: DictConfig, shape: ModelShape, layout: Layout, pace: Pace) -> Stopping:
    """Return what ending takes. A synchronous rollout, and validation in that mode, are left at once; in the other
    modes the step or the validation that runs has to end."""
    size = checkpoint_bytes(config, shape, layout.trainer)
    save = size / (config.plan.save_gbs * 1e9)
    whole = select(config, "trainer.v1.trainer_mode", "sync") != "sync"
    step = sum(seconds for phase, seconds in pace.seconds.items() if phase != "validation")
    rest = max(step, pace.validation_s) if whole else step - pace.seconds["rollout"]
    return Stopping(rest, save, size, whole)


def problem(config: DictConfig, found: Stopping) -> list[str]:
    """Return a line if ``run.grace_s`` is too short."""
    grace = config.run.grace_s
    if grace >= found.needed_s:
        return []
    rest = "a whole step (this mode cannot leave a rollout)" if found.whole else "the rest of a step"
    parts = f"{rest} takes {found.rest:.0f} s and its checkpoint {found.save:.0f} s"
    disk = f"{found.size / GIB:.0f} GiB at plan.save_gbs={config.plan.save_gbs:g}"
    wanted = f"set run.grace_s={found.grace_s} and sbatch --signal=B:USR1@{found.warning_s(found.grace_s)}"
    return [f"run.grace_s={grace:g} is too short: after a warning {parts} ({disk}); {wanted}"]
