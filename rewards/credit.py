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


Credit = Callable[[Sequence[CreditRow], float], Sequence[float]]


def divided(credit: Credit, rows: Sequence[CreditRow], reward: float) -> list[float]:
    """Return the reward of each row. Raises whatever the function does, and ValueError for what is no such list."""
    given = [float(one) for one in credit(rows, reward)]
    if len(given) != len(rows) or not all(map(math.isfinite, given)):
        raise ValueError(f"returned {given} for {len(rows)} rows")
    return given
