"""Play episodes on several replicas of an engine in simulated time, and print a row for each way to choose a replica.

    python -m rl.plan.routing [RUN...] [--replicas N] [--room TOKENS] ...

With RUNs, the episodes are recorded ones: their calls, the tokens of each, and the seconds between them are those of
the records. Without, they are drawn: prompts begin with a head that all episodes share and the task's statement, and
the number of calls is lognormal. Each replica keeps what it has read or sampled in blocks, and drops those that were
used least recently when it needs room. A call waits for room; a replica reads prompts one after another, and samples
for all of its calls at a time while it reads none.

Printed is, for each way, which share of the prompts' tokens was in the cache, which share was read again (that is:
some replica had read it before), the seconds until the last episode has ended, and how many calls the busiest replica
had beside the mean one, averaged over time.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollout import program
from rollout.records import NodeRecord, Reader, path_of

_HELP = {
    "replicas": "of the engine",
    "room": "tokens of a replica's cache",
    "boxes": "episodes that are played at a time",
    "block": "tokens of a block of the cache",
    "read": "prompt tokens that a replica reads in a second",
    "step_ms": "milliseconds of a sampled token",
    "each_ms": "more of them for each call that samples beside it",
}
_Z99 = 2.3263  # of a normal distribution


@dataclass(frozen=True)
class RoutingSetting:
    """A setting is the sizes and speeds of an engine's replicas; ``_HELP`` says what each field is."""

    replicas: int = 8
    room: int = 1_750_000
    boxes: int = 256
    block: int = 256
    read: float = 60_000.0
    step_ms: float = 5.0
    each_ms: float = 0.3


@dataclass(frozen=True)
class SimulatedCall:
    """A simulated call comes ``after`` seconds: since the episode's last reply, or since its start. ``blocks``: names
    of the full blocks of prompt and reply, of which the first ``asked`` are the prompt's. Equal blocks after equal
    blocks have equal names. ``prompt`` and ``sampled`` are tokens."""

    after: float
    blocks: Sequence[Hashable]
    asked: int
    prompt: int
    sampled: int


@dataclass(eq=False)
class SimulatedEpisode:
    """An episode to play: its group and its calls, one after another."""

    group: str
    calls: list[SimulatedCall]
    replica: int = -1  # where its last call was sent


class Replica:
    """A replica keeps blocks, reads prompts and samples replies. Its times are in seconds since the start."""

    def __init__(self, setting: RoutingSetting) -> None:
        self.setting = setting
        self.clock = self.spoken = 0.0  # spoken: tokens that a call has sampled that was there from the start
        self.unused: OrderedDict[Hashable, None] = OrderedDict()  # blocks that no call holds, the least recent first
        self.held: Counter[Hashable] = Counter()
        self.waiting: deque[SimulatedEpisode] = deque()
        self.reading: deque[list] = deque()  # [tokens left, episode]
        self.sampling: list[tuple[float, int, SimulatedEpisode]] = []
        self.calls: dict[SimulatedEpisode, SimulatedCall] = {}  # those that are here
        self.hits = self.episodes = self.read = 0

    @property
    def running(self) -> int:
        """Return the calls that are there, those that wait included."""
        return len(self.calls)

    def cached(self, call: SimulatedCall) -> int:
        """Return how many of a prompt's first blocks are here."""
        low, high = 0, call.asked  # what is dropped first is the end of a row of blocks, so no block follows a gap
        while low < high:
            middle = (low + high + 1) // 2
            name = call.blocks[middle - 1]
            low, high = (middle, high) if name in self.unused or name in self.held else (low, middle - 1)
        return low

    def send(self, one: SimulatedEpisode, call: SimulatedCall) -> None:
        """Take a call of an episode."""
        self.calls[one] = call
        self.waiting.append(one)
        self._begin()

    def _begin(self) -> None:
        """Begin to read the prompts of calls for which there is room, in the order in which they came."""
        room = self.setting.room // self.setting.block
        while self.waiting:
            call = self.calls[self.waiting[0]]
            if self.held and len(self.held) + sum(name not in self.held for name in call.blocks) > room:
                return  # a call that is alone is always served
            found = self.cached(call)
            for name in call.blocks:
                self.unused.pop(name, None)
                self.held[name] += 1
            while self.unused and len(self.held) + len(self.unused) > room:
                self.unused.popitem(last=False)
            hit = min(found * self.setting.block, call.prompt)
            self.hits += hit
            self.reading.append([call.prompt - hit, self.waiting.popleft()])

    def due(self) -> float:
        """Return when this replica will have read a prompt or sampled a reply, if nothing else is sent."""
        if self.reading:
            return self.clock + self.reading[0][0] / self.setting.read
        return self.clock + (self.sampling[0][0] - self.spoken) * self._pace() if self.sampling else math.inf

    def _pace(self) -> float:
        return (self.setting.step_ms + self.setting.each_ms * len(self.sampling)) / 1e3

    def advance(self, time: float) -> Iterator[SimulatedEpisode]:
        """Go on to a time, which is not after ``due``; yield episodes whose replies are sampled then."""
        due, spent, self.clock = self.due(), time - self.clock, time
        if self.reading:
            self.reading[0][0] -= spent * self.setting.read
            if time >= due:
                _, one = self.reading.popleft()
                self.read += 1
                heapq.heappush(self.sampling, (self.spoken + self.calls[one].sampled, self.read, one))
            return
        if self.sampling:
            self.spoken += spent / self._pace()
        if time >= due:
            self.spoken, _, one = heapq.heappop(self.sampling)
            for name in reversed(self.calls.pop(one).blocks):  # so that the end of a row is dropped first
                self.held[name] -= 1
                if not self.held[name]:
                    del self.held[name]
                    self.unused[name] = None
            self._begin()
            yield one


class Router:
    """A router knows what is under way, and chooses replicas; each of its methods is a way to do that."""

    def __init__(self, replicas: list[Replica], seed: int) -> None:
        self.replicas, self.draw = replicas, random.Random(seed)
        self.homes: dict[str, int] = {}  # of groups

    def anywhere(self, one: SimulatedEpisode, call: SimulatedCall) -> int:
        """Choose at random."""
        return self.draw.randrange(len(self.replicas))

    def fewest_calls(self, one: SimulatedEpisode, call: SimulatedCall) -> int:
        """Choose the replica that has the fewest calls."""
        return self._least([replica.running for replica in self.replicas])

    def fewest_episodes(self, one: SimulatedEpisode, call: SimulatedCall) -> int:
        """Choose the replica that has the fewest episodes, those that run their tools included."""
        return self._least([replica.episodes for replica in self.replicas])

    def longest_prefix(self, one: SimulatedEpisode, call: SimulatedCall) -> int:
        """Choose the replica that has most of the prompt, of those that do not have many calls."""
        free = self._not_busy([replica.running for replica in self.replicas])
        return min(free, key=lambda i: (-self.replicas[i].cached(call), self.replicas[i].running))

    def together(self, one: SimulatedEpisode, call: SimulatedCall) -> int:
        """Choose the replica of the group's first episode, unless it has many."""
        home = self.homes.setdefault(one.group, self.fewest_episodes(one, call))
        free = self._not_busy([replica.episodes for replica in self.replicas])
        return home if home in free else self.fewest_episodes(one, call)

    def _least(self, values: Sequence[float]) -> int:
        return self.draw.choice([i for i, value in enumerate(values) if value == min(values)])

    def _not_busy(self, values: Sequence[float]) -> list[int]:
        """Return those that have at most a quarter more than the mean one, and one."""
        return [i for i, value in enumerate(values) if value <= 1.25 * statistics.fmean(values) + 1]


@dataclass(frozen=True)
class Way:
    """A way to choose a replica for a call. ``sticky``: only for an episode's first one; the others follow it."""

    choose: Callable[[Router, SimulatedEpisode, SimulatedCall], int]
    sticky: bool


WAYS = {
    "at random": Way(Router.anywhere, False),
    "fewest calls": Way(Router.fewest_calls, False),
    "longest prefix": Way(Router.longest_prefix, False),
    "the episode's, at first fewest calls (verl)": Way(Router.fewest_calls, True),
    "the episode's, at first fewest episodes": Way(Router.fewest_episodes, True),
    "the episode's, at first its group's": Way(Router.together, True),
}


@dataclass
class RoutingResult:
    """A result is shares of the prompts' tokens, seconds, and calls of the busiest replica by the mean one's."""

    cached: float
    again: float
    seconds: float
    busiest: float


def play(episodes: Sequence[SimulatedEpisode], way: str, setting: RoutingSetting, seed: int = 0) -> RoutingResult:
    """Play episodes, so many at a time as there are boxes, in the given order."""
    replicas = [Replica(setting) for _ in range(setting.replicas)]
    router = Router(replicas, seed)
    queue = deque(SimulatedEpisode(one.group, one.calls) for one in episodes if one.calls)
    asks: list[tuple[float, int, SimulatedEpisode, int]] = []  # time, a number, episode, its next call
    prompts = new = number = 0
    known, running = set[Hashable](), dict[SimulatedEpisode, int]()
    clock = peak = whole = 0.0

    def start(time: float) -> None:
        nonlocal number
        if queue:
            one, number = queue.popleft(), number + 1
            heapq.heappush(asks, (time + one.calls[0].after, number, one, 0))

    for _ in range(setting.boxes):
        start(0.0)
    while asks or any(replica.running for replica in replicas):
        time = min(asks[0][0] if asks else math.inf, *(replica.due() for replica in replicas))
        counts = [replica.running for replica in replicas]
        peak, whole = peak + max(counts) * (time - clock), whole + statistics.fmean(counts) * (time - clock)
        clock = time
        for replica in replicas:
            for one in list(replica.advance(time)):
                if (at := running.pop(one) + 1) < len(one.calls):
                    number += 1
                    heapq.heappush(asks, (time + one.calls[at].after, number, one, at))
                else:
                    replica.episodes -= 1
                    start(time)
        while asks and asks[0][0] <= time:
            _, _, one, at = heapq.heappop(asks)
            call = one.calls[at]
            fresh = sum(name not in known for name in call.blocks[: call.asked]) * setting.block
            rest = call.prompt - call.asked * setting.block  # the last tokens fill no block, so nobody keeps them
            prompts, new = prompts + call.prompt, new + fresh + rest
            known.update(call.blocks)
            before = one.replica
            if before < 0 or not WAYS[way].sticky:
                one.replica = WAYS[way].choose(router, one, call)
            if before != one.replica:
                replicas[one.replica].episodes += 1
                if before >= 0:
                    replicas[before].episodes -= 1
            running[one] = at
            replicas[one.replica].send(one, call)
    hits = sum(replica.hits for replica in replicas)
    return RoutingResult(hits / prompts, 1 - (hits + new) / prompts, clock, peak / whole if whole else 1.0)


def drawn(
    groups: int, n: int, setting: RoutingSetting, calls: float = 40, tail: float = 3, head: int = 11_700,
    task: int = 1_500, read: int = 700, sampled: int = 250, tool_s: float = 2, seed: int = 0,
) -> list[SimulatedEpisode]:  # fmt: skip
    """Draw episodes: ``calls`` is the median, and ``tail`` how many times as many the 99th percentile has."""
    draw, block, sigma, out = random.Random(seed), setting.block, math.log(tail) / _Z99, list[SimulatedEpisode]()
    for group in range(groups):
        for episode in range(n):
            count = max(1, round(draw.lognormvariate(math.log(calls), sigma)))
            names: list[Hashable] = [("head", i) for i in range(head // block)]
            names += [(group, i) for i in range(len(names), (head + task) // block)]
            made, prompt = list[SimulatedCall](), head + task
            for _ in range(count):
                says = max(1, round(draw.expovariate(1 / sampled)))
                asked, whole = prompt // block, (prompt + says) // block
                names += [(group, episode, i) for i in range(len(names), whole)]
                made.append(SimulatedCall(draw.expovariate(1 / tool_s), names[:whole], asked, prompt, says))
                prompt += says + max(1, round(draw.expovariate(1 / read)))
            out.append(SimulatedEpisode(str(group), made))
    return out


def recorded(run: Path, setting: RoutingSetting) -> Iterator[SimulatedEpisode]:
    """Yield a run's episodes as they were recorded, in the order of their starts."""
    for record in sorted(Reader(run), key=lambda record: record.started):
        nodes = record.nodes
        replies = sorted((i for i, node in enumerate(nodes) if node.logprobs), key=lambda i: nodes[i].started)
        calls, before = list[SimulatedCall](), record.started
        for leaf in replies:
            path = path_of(nodes, leaf)
            sampled = nodes[leaf].length
            prompt = sum(nodes[i].length for i in path) - sampled
            names = _names([nodes[i] for i in path], setting.block)
            gap = max(0.0, nodes[leaf].started - before)
            calls.append(SimulatedCall(gap, names, prompt // setting.block, prompt, sampled))
            before = nodes[leaf].started + nodes[leaf].seconds
        yield SimulatedEpisode(record.task, calls)


def _names(path: Sequence[NodeRecord], block: int) -> list[Hashable]:
    """Return names of the full blocks of a path: hashes over their ids and those before."""
    data, name, out = b"".join(node.ids for node in path), 0, list[Hashable]()
    for start in range(0, len(data) - 4 * block + 1, 4 * block):
        name = hash((name, data[start : start + 4 * block]))
        out.append(name)
    return out


def main() -> None:
    """Print a row for each way."""
    parser = program.parser("python -m rl.plan.routing", __doc__)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="directories of runs with records")
    for name, value in vars(RoutingSetting()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"{_HELP[name]} (default: {value})")
    parser.add_argument("--groups", type=int, default=32, help="that are drawn (default: 32)")
    parser.add_argument("--n", type=int, default=8, help="episodes of a drawn group (default: 8)")
    options = vars(parser.parse_args())
    runs, groups, n = options.pop("runs"), options.pop("groups"), options.pop("n")
    setting = RoutingSetting(**options)
    episodes = [one for run in runs for one in recorded(run, setting)] or drawn(groups, n, setting)
    print(f"{len(episodes)} episodes, {sum(len(one.calls) for one in episodes)} calls; {setting}")
    print("| replica of a call | cached | read again | seconds | busiest replica |")
    print("| --- | --- | --- | --- | --- |")
    for way in WAYS:
        found = play(episodes, way, setting)
        print(f"| {way} | {found.cached:.1%} | {found.again:.1%} | {found.seconds:,.0f} | {found.busiest:.2f} |")


if __name__ == "__main__":
    program.end(main)
