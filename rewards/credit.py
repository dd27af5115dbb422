"""Credit: rewards of an episode's training rows, where they are not all the episode's own.

A function of another package is given the rows and the episode's reward. What it returns moves the advantages of the
rows apart; groups are still compared by the episodes' rewards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CreditRow:
    """A CreditRow is what a credit function is told of a training row.

    role: main, subagent/TYPE or side. replies: those that it trains on, in order, each a list of content blocks of the
    Messages API. tokens: how many tokens they have.
    """

    role: str
    replies: Sequence[Sequence[Mapping[str, Any]]]
    tokens: int


@dataclass(frozen=True)
class Credit:
    """Credit divides an episode's reward among its rows. name: "module:function"; function: what
    that is (`rewards.shape.load`)."""

    name: str
    function: Callable[[Sequence[CreditRow], float], Sequence[float]]

    def __call__(self, rows: Sequence[CreditRow], reward: float) -> list[float]:
        """Return the reward of each row. Raises whatever the function does, and ValueError for what is no such list."""
        given = [float(one) for one in self.function(rows, reward)]
        if len(given) != len(rows):
            raise ValueError(f"returned {len(given)} rewards for {len(rows)} rows")
        if wrong := [one for one in given if not math.isfinite(one)]:
            raise ValueError(f"returned {wrong[0]}")
        return given
