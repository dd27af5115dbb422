"""Play the schedules of verl's three trainer modes in simulated time, and print a row for each.

    python -m rl.plan.schedules [--median MINUTES] [--tail RATIO] [--training MINUTES] ...

What is drawn is how long an episode takes while the engine has room for it: lognormal, with this median and this ratio
of the 99th percentile to it. Printed is, for each mode, how long a step takes, which share of all GPU time does
nothing, how many weight updates lie between an episode's start and its training, how many groups are dropped for that,
and how long trained episodes are, relative to all that were started: below 1, the policy learns more from short ones.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any

from rollout import program

_INSTANT = 1e-9  # minutes
_Z99 = 2.3263  # of a normal distribution
MODES = ("sync", "colocate_async", "separate_async")


def _size(default: float, what: str) -> Any:
    return field(default=default, metadata={"help": f"{what} (default: {default})"})


@dataclass(frozen=True)
class ScheduleSetting:
    """A setting is a run's sizes. Times are in minutes.

    room: more episodes are slower in proportion. limit: verl's ``max_off_policy_threshold``, so lags are less. updates:
    in separate_async, the two halves of the GPUs train and generate all the time.
    """

    median: float = _size(45.0, "minutes of an episode")
    tail: float = _size(3.0, "the 99th percentile, as a multiple of the median")
    groups: int = _size(32, "of a step")
    n: int = _size(8, "episodes of a group")
    room: int = _size(256, "episodes that all GPUs together serve at full speed")
    training: float = _size(12.0, "minutes of a step's log-probabilities and updates on all GPUs")
    ahead: int = _size(1, "batches that are started before the first step's own")
    limit: int = _size(4, "weight versions that a group may see; one that began so many updates ago is dropped")
    updates: int = _size(4, "of a step of separate_async")


@dataclass
class ScheduleResult:
    """This is what some steps were: minutes of each, the share of the GPUs' time in which they did nothing, the
    lags of trained groups, in updates, how many groups were dropped, and the lengths of episodes."""

    minutes: list[float] = field(default_factory=list)
    idle: float = 0.0
    lags: list[int] = field(default_factory=list)
    dropped: int = 0
    lengths: list[list[float]] = field(default_factory=list)  # of each step's episodes


@dataclass(order=True)
class _SimulatedGroup:
    ends: float  # on the engine's own clock, which all episodes share
    version: int = field(compare=False)
    lengths: list[float] = field(compare=False)


class _Engine:
    """An engine serves all episodes at the same speed. Its clock stands still while it does not serve."""

    def __init__(self, room: float) -> None:
        self.room, self.clock, self.used = room, 0.0, 0.0
        self._ends: list[float] = []  # of single episodes
        self.groups: list[_SimulatedGroup] = []
        self.done: list[_SimulatedGroup] = []

    def start(self, version: int, lengths: list[float]) -> None:
        for length in lengths:
            heapq.heappush(self._ends, self.clock + length)
        heapq.heappush(self.groups, _SimulatedGroup(self.clock + max(lengths), version, lengths))

    def serve(self, minutes: float = math.inf, until: int = 0) -> float:
        """Serve for some minutes, or until so many groups are done. Return how many minutes that took."""
        spent = 0.0
        while minutes - spent > _INSTANT and self._ends and not (until and len(self.done) >= until):
            speed = min(1.0, self.room / len(self._ends))
            now = min(minutes - spent, (self._ends[0] - self.clock) / speed)
            self.used += now * min(len(self._ends), self.room)
            self.clock, spent = self.clock + now * speed, spent + now
            while self._ends and self._ends[0] <= self.clock + _INSTANT:
                heapq.heappop(self._ends)
            while self.groups and self.groups[0].ends <= self.clock + _INSTANT:
                self.done.append(heapq.heappop(self.groups))
        return spent


def play(mode: str, setting: ScheduleSetting, steps: int, seed: int = 0) -> ScheduleResult:
    """Play some steps. Episodes that run at the end of a step go on in the next one, except in `sync`."""
    draw = random.Random(seed)
    sigma = math.log(setting.tail) / _Z99
    separate = mode == "separate_async"
    engine = _Engine(setting.room / 2 if separate else setting.room)
    played = ScheduleResult()
    trained_minutes = 0.0

    def start(groups: int, version: int) -> None:
        for _ in range(groups):
            engine.start(version, [draw.lognormvariate(math.log(setting.median), sigma) for _ in range(setting.n)])

    def take(groups: int, version: int) -> tuple[list[_SimulatedGroup], float]:
        """Wait until so many groups that are not too old are done; the oldest come first."""
        waited = 0.0
        while True:
            old = [one for one in engine.done if version - one.version >= setting.limit]
            if mode != "sync" and old:
                engine.done = [one for one in engine.done if version - one.version < setting.limit]
                played.dropped += len(old)
                start(len(old), version)
            if len(engine.done) >= groups:
                engine.done.sort(key=lambda one: one.version)
                taken, engine.done = engine.done[:groups], engine.done[groups:]
                return taken, waited
            waited += engine.serve(until=min(groups, len(engine.done) + 1))

    if mode != "sync":
        start(setting.ahead * setting.groups, 0)
    for version in range(steps):
        start(setting.groups, version)
        parts = setting.updates if separate else 1
        minutes, lengths = 0.0, list[float]()
        for _ in range(parts):
            taken, waited = take(setting.groups // parts, version)
            training = setting.training * (2 if separate else 1) / parts
            minutes += waited + training
            trained_minutes += training / (2 if separate else 1)
            if separate:
                engine.serve(training)
            played.lags += [version - one.version for one in taken]
            lengths += [length for one in taken for length in one.lengths]
        played.minutes.append(minutes)
        played.lengths.append(lengths)
    whole = sum(played.minutes)
    played.idle = 1 - (engine.used / setting.room + trained_minutes) / whole
    return played


def main() -> None:
    """Print a row for each mode."""
    parser = program.parser("python -m rl.plan.schedules", __doc__)
    for size in fields(ScheduleSetting):
        parser.add_argument(f"--{size.name}", type=type(size.default), default=size.default, **size.metadata)
    parser.add_argument("--steps", type=int, default=60, help="how many are played (default: 60)")
    options = vars(parser.parse_args())
    steps = options.pop("steps")
    setting = ScheduleSetting(**options)
    if setting.groups % setting.updates:
        parser.error(f"--groups {setting.groups} is no multiple of --updates {setting.updates}")
    print(setting)
    mean = setting.median * math.exp((math.log(setting.tail) / _Z99) ** 2 / 2)
    print(
        "| mode | minutes a step | GPUs idle | lag: mean, most | dropped | lengths: first step, steps 2 to 4, later |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for mode in MODES:
        found = play(mode, setting, steps)
        parts = found.lengths[:1], found.lengths[1:4], found.lengths[4:]
        lengths = ", ".join(f"{statistics.fmean(chain(*some)) / mean:.2f}" for some in parts if some)
        dropped = found.dropped / (found.dropped + len(found.lags))
        lag = f"{statistics.fmean(found.lags):.1f}, {max(found.lags)}"
        minutes = statistics.fmean(found.minutes)
        print(f"| `{mode}` | {minutes:.0f} | {abs(found.idle):.0%} | {lag} | {dropped:.1%} | {lengths} |")


if __name__ == "__main__":
    program.end(main)
