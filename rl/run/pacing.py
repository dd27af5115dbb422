"""The pace of a step: the groups that are played at a time, and the time after which no episode is waited for."""

from __future__ import annotations

import math
import statistics
from collections import deque

LEAST = 8  # durations from which a median is taken
SHORTEST_S = 60.0  # no deadline is shorter: short episodes differ by what the machine does meanwhile


class Deadline:
    """A deadline is ``times`` the median of the last episodes' seconds, and ``most_s`` at most: the time limit of an
    agent. None, or fewer than ``LEAST`` episodes: ``most_s``. Each agent loop worker has its own, so the first step of
    a process has none. Half of the episodes would have to meet it before it moved the median."""

    def __init__(self, times: float | None, most_s: float) -> None:
        self.times, self.most_s = times, most_s
        self._seconds: deque[float] = deque(maxlen=128)

    def note(self, seconds: float) -> None:
        """Take the duration of an agent's run that has ended, whatever ended it."""
        self._seconds.append(seconds)

    @property
    def seconds(self) -> float:
        """Return the time that an episode that starts now may take."""
        if self.times is None or len(self._seconds) < LEAST:
            return self.most_s
        return min(self.most_s, max(SHORTEST_S, self.times * statistics.median(self._seconds)))


def in_flight(missing: int, lost: float, most: int) -> int:
    """Return how many groups should be played at a time so that about ``missing`` of them can be used.

    Args:
        missing: groups that a step still needs.
        lost: share of groups that cannot be used, below 1.
        most: limit of the result.
    """
    return min(most, math.ceil(missing / (1 - lost) - 1e-9))  # a rounding error of the quotient must not start a group
