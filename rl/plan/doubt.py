"""The uncertainty of a plan's seconds: what they would be if an assumption of ``plan.*`` were different.

Assumptions are varied one at a time and taken to be independent: the logarithms of what they do to a figure add up like
standard deviations. The ranges are judgement; docs/planning.md#how-sure says where they come from.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping, Sequence

from omegaconf import DictConfig

from rl.plan.layout import Layout, filters
from rl.plan.model import ModelShape
from rl.plan.throughput import Pace, pace

SPEEDS = ("mfu_dense", "mfu_moe", "mfu_attention", "mfu_prefill", "bandwidth", "sync_gbs", "offload_gbs", "save_gbs")
# What is varied together: keys of plan.*, and the factors of the good case and of the bad one.
UNSURE = {
    "turns": (("turns",), 0.5, 2.5),
    "tokens of a turn": (("sampled", "read"), 0.5, 2.0),
    "seconds of tools and tests": (("tool_s", "grade_s"), 0.5, 3.0),
    "speeds": (SPEEDS, 1 / 0.75, 0.75),
    "groups with equal rewards": (("all_equal_groups",), 0.4, 1.4),
}
MOST_EQUAL = 0.95  # the largest share of groups with equal rewards that can be played

Doubts = Mapping[str, Sequence[Pace]]
"""The paces of the good case and of the bad case of each assumption."""


def changed(config: DictConfig, what: str, bad: bool) -> DictConfig:
    """Return a copy of a config in which one of the assumptions of ``UNSURE`` is at its end."""
    keys, *factors = UNSURE[what]
    copy = pickle.loads(pickle.dumps(config))  # several times faster than copy.deepcopy
    for key in keys:
        most = MOST_EQUAL if key == "all_equal_groups" else math.inf
        copy.plan[key] = min(most, config.plan[key] * factors[bad])
    return copy


def doubts(config: DictConfig, shape: ModelShape, layout: Layout) -> Doubts:
    """Return the paces at both ends of each assumption that the config depends on."""
    used = [what for what in UNSURE if what != "groups with equal rewards" or filters(config)]
    return {what: [pace(changed(config, what, bad), shape, layout) for bad in (False, True)] for what in used}


def bounds(middle: Pace, found: Doubts, figure: Callable[[Pace], float]) -> tuple[float, float]:
    """Return the range of a figure of a pace. It holds ``figure(middle)``."""
    value = figure(middle)
    if value <= 0:
        return value, value
    logs = [[math.log(max(figure(end), 1e-9) / value) for end in ends] for ends in found.values()]
    down = math.hypot(*(min(0.0, *pair) for pair in logs))
    up = math.hypot(*(max(0.0, *pair) for pair in logs))
    return value * math.exp(-down), value * math.exp(up)


def says(what: str, config: DictConfig) -> str:
    """Return an assumption with its values at both ends, in words."""
    keys = UNSURE[what][0]
    if len(keys) > 3:
        return f"{what} of 133 to 75 %"
    ends = [changed(config, what, bad).plan for bad in (False, True)]
    return ", ".join(f"plan.{key} {ends[0][key]:g} to {ends[1][key]:g}" for key in keys)
