"""Rollouts in simulated time: how long a step waits for its groups, and how many are played for it.

The unit of time is the mean episode. Episodes take a lognormal time and wait for one of the boxes of their worker, in
the order in which they were started; a group has ended when its last episode has. The rules that start groups are those
of a run: rl.train.groups where steps wait for all groups, verl's where they do not. All is seeded: a config has one
result.
"""

from __future__ import annotations

import functools
import heapq
import random
from collections import deque
from typing import NamedTuple

from rl.run.pacing import in_flight

STEPS = 40  # simulated steps; with ten times as many the means change by 3 % or less


class Boxes(NamedTuple):
    """Boxes play episodes: each of the ``workers`` plays ``each`` at the same time. The logarithm of an episode's
    duration has the standard deviation ``spread``; no episode takes more than ``longest``. A share of
    them ``hangs`` until its ``limit``."""

    workers: int
    each: int
    spread: float
    longest: float
    hangs: float = 0.0
    limit: float = 0.0


class Simulation:
    """A simulation plays groups of ``size`` episodes in boxes; a ``share`` of the groups has equal rewards. ``now`` is
    the time, ``running`` and ``played`` count groups."""

    def __init__(self, boxes: Boxes, size: int, share: float, random: random.Random) -> None:
        self.boxes, self.size, self.share, self.random = boxes, size, share, random
        self.now, self.running, self.played = 0.0, 0, 0
        self._free = [boxes.each] * boxes.workers
        self._waiting: list[deque[int]] = [deque() for _ in range(boxes.workers)]
        self._ends: list[tuple[float, int, int]] = []  # of episodes: time, worker, group
        self._left: dict[int, int] = {}  # episodes of a group that have not ended

    def place(self, count: int) -> list[int]:
        """Return the workers that play the next ``count`` groups: in turn (rl.train.groups.SpreadManager)."""
        return [number % self.boxes.workers for number in range(self.played, self.played + count)]

    def start(self, count: int) -> None:
        """Start so many groups."""
        for worker in self.place(count):
            self._left[self.played] = self.size
            self._waiting[worker].extend([self.played] * self.size)
            self._fill(worker)
            self.played += 1
            self.running += 1

    def finish(self) -> tuple[int, bool]:
        """Play until a group has ended. Return its number and whether its rewards differ."""
        while True:
            self.now, worker, group = heapq.heappop(self._ends)
            self._free[worker] += 1
            self._fill(worker)
            self._left[group] -= 1
            if not self._left[group]:
                self.running -= 1
                return group, self.random.random() >= self.share

    def _fill(self, worker: int) -> None:
        spread, longest, hangs = self.boxes.spread, self.boxes.longest, self.boxes.hangs
        while self._free[worker] and self._waiting[worker]:
            self._free[worker] -= 1
            duration = min(longest, self.random.lognormvariate(-spread * spread / 2, spread))
            if hangs and self.random.random() < hangs:
                duration = self.boxes.limit
            heapq.heappush(self._ends, (self.now + duration, worker, self._waiting[worker].popleft()))


class Rollout(NamedTuple):
    """A Rollout is that of a mean step: its time in mean episodes, and the groups that were played for it."""

    time: float
    played: float


def play(step: Simulation, groups: int, most: int) -> None:
    """Play one step that waits for all groups which it has started, at most ``most`` at a time."""
    missing = groups
    step.start(in_flight(missing, step.share, most))
    while step.running:
        missing -= step.finish()[1]
        if missing > 0:
            step.start(max(0, in_flight(missing, step.share, most) - step.running))


@functools.cache
def whole(boxes: Boxes, groups: int, size: int, share: float = 0.0, most: int | None = None) -> Rollout:
    """Return the rollout of steps that wait for all groups which they have started (``play``)."""
    time, played, rng = 0.0, 0, random.Random(1)
    for _ in range(STEPS):
        step = Simulation(boxes, size, share, rng)
        play(step, groups, most or groups)
        time, played = time + step.now, played + step.played
    return Rollout(time / STEPS, played / STEPS)


@functools.cache
def flowing(boxes: Boxes, groups: int, size: int, ahead: float, share: float = 0.0) -> Rollout:
    """Return the rollout of steps that take the groups which have ended while others go on. Before the first step,
    ``ahead`` times a step's groups are started in addition; verl starts one group for each that it replaces."""
    flow, usable, begin = Simulation(boxes, size, share, random.Random(1)), 0, (0.0, 0)
    flow.start(int(ahead * groups))
    for step in range(STEPS + 10):
        if step == 10:  # from here on the groups' ages are mixed
            begin = (flow.now, flow.played)
        flow.start(groups)
        while usable < groups:
            if flow.finish()[1]:
                usable += 1
            else:
                flow.start(1)
        usable -= groups
    return Rollout((flow.now - begin[0]) / STEPS, (flow.played - begin[1]) / STEPS)
