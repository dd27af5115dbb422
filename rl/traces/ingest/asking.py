"""Ask endpoints about all states of a file, within a budget, and keep each answer in a journal as soon as it is there.

A run that is killed goes on where it was: at most the answers under way are asked for again. Each endpoint is asked by
itself, so a slow one holds up no other, and one that is dead ends alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rl.run.journal import Journal, JournalError, Progress, run_all
from rl.run.screen import Screen
from rl.traces.ingest.agreement import unknown
from rl.traces.ingest.endpoints import BusyError, DeadError, Endpoint, RefusedError
from rl.traces.ingest.states import State, read_states
from rollout import files

_LOST_IN_A_ROW = 5  # states that an endpoint does not answer before it is taken for dead
_TYPICAL = 300  # tokens of a reply, for the estimate
_BYTES = 4  # per token of a prompt, for the estimate; what is reserved assumes half as many
Key = tuple[str, str]  # a state's id, an endpoint's name
Wants = Callable[[Endpoint, State], bool]


class Budget:
    """A budget lets a request begin only if what is spent and reserved then fits ``most`` dollars; None: no limit."""

    def __init__(self, most: float | None, spent: float) -> None:
        self.most, self.spent, self.reached = most, spent, False
        self._reserved = 0.0
        self._changed = asyncio.Condition()

    async def reserve(self, dollars: float) -> bool:
        """Reserve what a request may cost at most; wait for those under way if need be. False: the cap is reached."""
        async with self._changed:
            while self.most is not None and self.spent + self._reserved + dollars > self.most:
                if self._reserved == 0 or self.spent + dollars > self.most:
                    self.reached = True
                    return False
                await self._changed.wait()
            self._reserved += dollars
            return True

    async def settle(self, reserved: float, cost: float) -> None:
        """Replace what was reserved by what it has cost."""
        async with self._changed:
            self._reserved -= reserved
            if self._reserved < 1e-12:
                self._reserved = 0.0
            self.spent += cost
            self._changed.notify_all()


@dataclass
class AskingResult:
    """This is what endpoints said, in all runs of a command: ``answers`` and refusals by state and endpoint; of this
    run, ``given_up``: why endpoints were, by name. ``left``: how many answers are missing; ``cost``: dollars in all."""

    answers: dict[Key, dict[str, Any]]
    refused: set[Key]
    left: int
    cost: float
    cap_reached: bool
    given_up: dict[str, str]


class Survey:
    """A survey is what is known of a states file before any endpoint is asked: ``models`` counts the states by source
    model, ``wanted`` has the ids of those that each endpoint is asked about, and ``bytes`` is the size of these;
    ``unknown`` counts the states that nobody is asked about, by what is not known of them.

    limit: only the first states. wants: whether an endpoint is asked about a state. Raises StatesError and OSError.
    """

    def __init__(
        self, source: Path, endpoints: Sequence[Endpoint], limit: int | None = None, wants: Wants = lambda *_: True
    ) -> None:
        self.source, self.endpoints, self.limit = source, endpoints, limit
        self.models, self.bytes, self.unknown = Counter[str](), Counter[str](), Counter[str]()
        self.wanted: dict[str, set[str]] = {one.name: set() for one in endpoints}
        for state in limited(source, limit, self.unknown):
            self.models[state.source_model] += 1
            size = size_of(state)
            for endpoint in endpoints:
                if wants(endpoint, state):
                    self.wanted[endpoint.name].add(state.state_id)
                    self.bytes[endpoint.name] += size

    def estimate(self, endpoint: Endpoint) -> tuple[float, float]:
        """Return what asking an endpoint costs in dollars: an estimate, and an upper bound as far as sizes give one."""
        count, size = len(self.wanted[endpoint.name]), self.bytes[endpoint.name]
        about = endpoint.cost(size // _BYTES, count * min(_TYPICAL, endpoint.max_tokens))
        return about, endpoint.cost(2 * size // _BYTES, count * endpoint.max_tokens)

    def tell(self, screen: Screen) -> None:
        """Say which states were left out."""
        for what, count in self.unknown.items():
            screen.say(f"{count} {what}")

    def ask(self, directory: Path, most: float | None, screen: Screen) -> AskingResult:
        """Ask for the answers that are not yet in a directory, and return all. most: dollars, earlier runs included.

        Raises ValueError (StatesError and JournalError among them), and OSError.
        """
        identify(self.source, directory, self.endpoints)
        wanted = {(state, name) for name, states in self.wanted.items() for state in states}
        with contextlib.closing(Journal(directory / "answers.jsonl")) as journal:
            _check(journal, directory)
            left = wanted - journal.finished("state", "endpoint")
            budget = Budget(most, sum(one["cost"] for one in journal.records))
            there = f"{len(wanted) - len(left)} are there, which have cost ${budget.spent:.4f}"
            screen.say(f"{len(left)} answers to ask for, {there}")
            given_up = asyncio.run(self._ask(left, journal, budget, screen))
            left -= journal.finished("state", "endpoint")
        known = {(one["state"], one["endpoint"]): one for one in journal.records}
        answers = {key: one for key, one in known.items() if key in wanted and "action" in one}
        return AskingResult(answers, wanted - left - answers.keys(), len(left), budget.spent, budget.reached, given_up)

    async def _ask(self, left: Set[Key], journal: Journal, budget: Budget, screen: Screen) -> dict[str, str]:
        """Ask every endpoint about its states; return why endpoints were given up, by name."""
        progress = Progress(screen, "answers", len(left))
        given_up: dict[str, str] = {}

        async def one(endpoint: Endpoint) -> None:
            lost = 0

            async def ask(state: State) -> None:
                nonlocal lost
                most = endpoint.cost(2 * size_of(state) // _BYTES, endpoint.max_tokens)
                if budget.reached or not await budget.reserve(most):
                    return
                line: dict[str, Any] = {"state": state.state_id, "endpoint": endpoint.name, "infra": False, "cost": 0.0}
                said = "answered"
                try:
                    answer = await endpoint.ask(client, state)
                    line |= msgspec.structs.asdict(answer)
                    line["cost"] = endpoint.cost(answer.input_tokens, answer.output_tokens)
                    lost = 0
                except RefusedError as error:
                    said, line["refused"] = "refused", str(error)
                except BusyError as error:
                    said, lost = "lost", lost + 1
                    line |= {"infra": True, "error": str(error)}
                finally:
                    await budget.settle(most, line["cost"])
                journal.append(line)
                progress.count(said, final=not line["infra"])
                if lost >= _LOST_IN_A_ROW:
                    raise DeadError(f"{endpoint.name}: {lost} states in a row without an answer; {line['error']}")

            mine = (one for one in limited(self.source, self.limit) if (one.state_id, endpoint.name) in left)
            try:
                async with endpoint.connected() as client:
                    await run_all(mine, endpoint.concurrency, ask)
            except DeadError as error:
                given_up[endpoint.name] = str(error)
                screen.say(f"given up: {error}")

        await asyncio.gather(*map(one, self.endpoints))
        if budget.reached:
            screen.say(f"the cap of ${budget.most:g} is reached; with a higher one, the same command goes on")
        return given_up


def size_of(state: State) -> int:
    """Return the bytes of a state's messages and tools as JSON."""
    return len(msgspec.json.encode(state.messages)) + len(msgspec.json.encode(state.tools))


def limited(source: Path, limit: int | None, left: Counter[str] | None = None) -> Iterator[State]:
    """Yield the states of a file, the first ``limit`` of them, of which enough is known. left: counts the others."""
    for number, state in enumerate(read_states(source)):
        if limit is not None and number >= limit:
            return
        if not (why := unknown(state)):
            yield state
        elif left is not None:
            left[f"states left out, {why}"] += 1


def identify(source: Path, directory: Path, endpoints: Sequence[Endpoint]) -> None:
    """Note for which states and endpoints a directory has answers. Raises ValueError if it has others, and OSError."""
    with open(source, "rb") as file:
        mine: dict[str, Any] = {"states": hashlib.file_digest(file, "sha256").hexdigest()}
    for one in endpoints:
        names = ("url", "model", "protocol", "temperature", "max_tokens")
        mine[f"endpoint {one.name}"] = {name: getattr(one, name) for name in names}
    known = directory / "asked.json"
    old: dict[str, Any] = json.loads(known.read_text()) if known.exists() else {}
    if other := [f"{name} was {old[name]}" for name, value in mine.items() if old.get(name, value) != value]:
        raise ValueError(f"{directory} has answers to other questions ({other[0]}); choose another --out")
    directory.mkdir(parents=True, exist_ok=True)
    files.write(known, json.dumps(old | mine, indent=1), synced=True)


def key_of(variable: str | None) -> str | None:
    """Return the value of an environment variable. Raises ValueError if it is not set."""
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise ValueError(f"the environment variable {variable}, which was named for a key, is not set")
    return os.environ[variable]


def _check(journal: Journal, directory: Path) -> None:
    for number, line in enumerate(journal.records, 1):
        if not {"state", "endpoint", "infra", "cost"} <= line.keys():
            raise JournalError(f"{directory}/answers.jsonl: line {number} is no answer; delete the file to start over")
