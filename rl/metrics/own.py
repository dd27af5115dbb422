"""Figures of one's own: functions of other packages, which are called with the record of each episode of training."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping

from rewards import shape
from rl.config.compose import refuse
from rollout.records import Record

log = logging.getLogger(__name__)

Function = Callable[[Record], float | None]


def load(named: Mapping[str, str]) -> dict[str, Function]:
    """Import the functions that ``episode.figures`` names, "module:function" by figure. Raises ConfigError."""
    found: dict[str, Function] = {}
    wrong = []
    for name, place in named.items():
        try:
            found[name] = shape.load(str(place))
        except ValueError as error:
            wrong.append(f"episode.figures.{name}={place}: {error}")
    refuse(wrong)
    return found


def figures(functions: Mapping[str, Function], record: Record) -> dict[str, float]:
    """Return the figures of an episode. One whose function raises, or returns None or no finite number, is left out:
    no episode is lost to it."""
    found: dict[str, float] = {}
    for name, function in functions.items():
        try:
            if (value := function(record)) is not None and math.isfinite(number := float(value)):
                found[name] = number
        except Exception as error:
            log.warning("episode.figures.%s: %s: %s: %s", name, record.episode, type(error).__name__, error)
    return found
