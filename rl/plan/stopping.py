"""The grace of a run (``run.grace_s``): what has to fit between a scheduler's warning and its end (``rl.run.stop``)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from omegaconf import DictConfig

from rl.plan.doubt import Doubts, bounds, doubts
from rl.plan.host import checkpoint_bytes
from rl.plan.layout import Layout, select
from rl.plan.memory import GIB
from rl.plan.model import ModelShape
from rl.plan.throughput import Pace

SLOW = 0.75  # of plan.save_gbs, in the bad case
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

    def warning_s(self, grace_s: float) -> int:
        """Return how long before its time limit a job has to be warned."""
        return math.ceil(grace_s) + REQUEUE_S


def stopping(config: DictConfig, shape: ModelShape, layout: Layout, pace: Pace) -> Stopping:
    """Return what ending takes. A synchronous rollout, and validation in that mode, are left at once; in the other
    modes the step or the validation that runs has to end."""
    size = checkpoint_bytes(config, shape, layout.trainer)
    whole = select(config, "trainer.v1.trainer_mode", "sync") != "sync"
    return Stopping(_rest(pace, whole), size / (config.plan.save_gbs * 1e9), size, whole)


def _rest(pace: Pace, whole: bool) -> float:
    step = sum(seconds for phase, seconds in pace.seconds.items() if phase != "validation")
    return max(step, pace.validation_s) if whole else step - pace.seconds["rollout"]


def grace(found: Stopping, pace: Pace, doubted: Doubts) -> int:
    """Return the grace that fits the bad case, too, in whole minutes."""
    rest = bounds(pace, doubted, lambda other: _rest(other, found.whole))[1]
    return 60 * math.ceil((rest + found.save / SLOW) / 60)


def problem(config: DictConfig, shape: ModelShape, layout: Layout, pace: Pace, found: Stopping) -> list[str]:
    """Return a line if ``run.grace_s`` is too short for the mean case."""
    now = config.run.grace_s
    if now >= found.needed_s:
        return []
    rest = "a whole step (this mode cannot leave a rollout)" if found.whole else "the rest of a step"
    parts = f"{rest} takes {found.rest:.0f} s and its checkpoint {found.save:.0f} s"
    disk = f"{found.size / GIB:.0f} GiB at plan.save_gbs={config.plan.save_gbs:g}"
    fits = grace(found, pace, doubts(config, shape, layout))
    wanted = f"set run.grace_s={fits} and sbatch --signal=B:USR1@{found.warning_s(fits)}, which fit the bad case, too"
    return [f"run.grace_s={now:g} is too short: after a warning {parts} ({disk}); {wanted}"]
