"""This module asks endpoints about all states of a file, and keeps each answer in a journal as soon as it is there.

A run that is killed goes on where it was: at most the answers under way are asked for again. Each endpoint is asked by
itself, so a slow one holds up no other, and one that is dead ends alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from rl.batch import Journal, JournalError, Progress, run_all
from rl.ingest.endpoints import BusyError, DeadError, Endpoint, RefusedError
from rl.ingest.states import State, read_states
from rl.screen import Screen
from rollout import files

_LOST_IN_A_ROW = 5  # states that an endpoint does not answer before it is taken for dead
_TYPICAL = 300  # tokens of a reply, for the estimate
_BYTES = 4  # per token of a prompt, for the estimate; what is reserved assumes half as many
Wanted = Callable[[Endpoint, State], bool]


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


class Survey(msgspec.Struct):
    """A survey is what is known of a states file before any endpoint is asked: ``models`` counts the states by source
    model, ``asked`` those that each endpoint will be asked about, and ``bytes`` is the size of these."""

    models: dict[str, int]
    asked: dict[str, int]
    bytes: dict[str, int]

    @classmethod
    def of(cls, source: Path, endpoints: Sequence[Endpoint], wanted: Wanted, limit: int | None) -> Survey:
        """Read a states file. Raises StatesError and OSError."""
        survey = cls({}, {one.name: 0 for one in endpoints}, {one.name: 0 for one in endpoints})
        for state in limited(source, limit):
            survey.models[state.source_model] = survey.models.get(state.source_model, 0) + 1
            size = size_of(state)
            for endpoint in endpoints:
                if wanted(endpoint, state):
                    survey.asked[endpoint.name] += 1
                    survey.bytes[endpoint.name] += size
        return survey

    def estimate(self, endpoint: Endpoint) -> tuple[float, float]:
        """Return what asking an endpoint costs in dollars: an estimate, and an upper bound as far as sizes give one."""
        count, size = self.asked[endpoint.name], self.bytes[endpoint.name]
        about = endpoint.cost(size // _BYTES, count * min(_TYPICAL, endpoint.max_tokens))
        return about, endpoint.cost(2 * size // _BYTES, count * endpoint.max_tokens)


def size_of(state: State) -> int:
    """Return the bytes of a state's messages and tools as JSON."""
    return len(msgspec.json.encode(state.messages)) + len(msgspec.json.encode(state.tools))


def limited(source: Path, limit: int | None) -> Iterator[State]:
    """Yield the states of a file, the first ``limit`` of them."""
    for number, state in enumerate(read_states(source)):
        if limit is not None and number >= limit:
            return
        yield state


def identify(source: Path, directory: Path, endpoints: Sequence[Endpoint]) -> None:
    """Note for which states and endpoints a directory has answers. Raises ValueError if it has others, and OSError."""
    digest = hashlib.sha256()
    with open(source, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    mine: dict[str, Any] = {"states": digest.hexdigest()}
    for one in endpoints:
        about = {"url": one.url, "model": one.model, "protocol": one.protocol, "temperature": one.temperature}
        mine[f"endpoint {one.name}"] = about | {"max_tokens": one.max_tokens}
    known = directory / "asked.json"
    old: dict[str, Any] = json.loads(known.read_text()) if known.exists() else {}
    for name, value in mine.items():
        if old.get(name, value) != value:
            raise ValueError(
                f"{directory} has answers to other questions ({name} was {old[name]}); choose another --out"
            )
    directory.mkdir(parents=True, exist_ok=True)
    files.write(known, json.dumps(old | mine, indent=1), synced=True)


def key_of(variable: str | None) -> str | None:
    """Return the value of an environment variable. Raises ValueError if it is not set."""
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise ValueError(f"the environment variable {variable}, which was named for a key, is not set")
    return os.environ[variable]


async def ask_all(
    source: Path,
    endpoints: Sequence[Endpoint],
    journal: Journal,
    budget: Budget,
    wanted: Wanted,
    limit: int | None,
    screen: Screen,
    total: int,
) -> dict[str, str]:
    """Ask every endpoint about all states that are wanted of it; return why endpoints were given up, by name.

    Raises JournalError and StatesError.
    """
    done = journal.finished("state", "endpoint")
    progress = Progress(screen, "answers", total)
    gone: dict[str, str] = {}

    async def one(endpoint: Endpoint) -> None:
        lost = 0
        timeout = aiohttp.ClientTimeout(total=endpoint.patience_s)
        connector = aiohttp.TCPConnector(limit=endpoint.concurrency)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as client:

            async def ask(state: State) -> None:
                nonlocal lost
                if budget.reached:
                    return
                most = endpoint.cost(2 * size_of(state) // _BYTES, endpoint.max_tokens)
                if not await budget.reserve(most):
                    return
                line: dict[str, Any] = {"state": state.state_id, "endpoint": endpoint.name, "infra": False, "cost": 0.0}
                try:
                    answer = await endpoint.ask(client, state)
                    line |= msgspec.structs.asdict(answer)
                    line["cost"] = endpoint.cost(answer.input_tokens, answer.output_tokens)
                    lost = 0
                except RefusedError as error:
                    line["refused"] = str(error)
                except BusyError as error:
                    line |= {"infra": True, "error": str(error)}
                    lost += 1
                finally:
                    await budget.settle(most, line["cost"])
                journal.append(line)
                said = "lost" if line["infra"] else "refused" if "refused" in line else "answered"
                progress.count(said, final=not line["infra"])
                if lost >= _LOST_IN_A_ROW:
                    raise DeadError(f"{endpoint.name}: {lost} states in a row without an answer; {line['error']}")

            states = limited(source, limit)
            mine = (s for s in states if (s.state_id, endpoint.name) not in done and wanted(endpoint, s))
            try:
                await run_all(mine, endpoint.concurrency, ask)
            except DeadError as error:
                gone[endpoint.name] = str(error)
                screen.say(f"given up: {error}")

    await asyncio.gather(*map(one, endpoints))
    if budget.reached:
        screen.say(f"the cap of ${budget.most:g} is reached; with a higher one, the same command goes on")
    return gone


def answers_of(journal: Journal) -> dict[tuple[str, str], Mapping[str, Any]]:
    """Return the answers of a journal by state and endpoint; refusals are not among them."""
    return {(one["state"], one["endpoint"]): one for one in journal.records if "action" in one}


def opened(directory: Path) -> Journal:
    """Open the journal of a directory. Raises JournalError, with one line, also for one that has other lines."""
    journal = Journal(directory / "answers.jsonl")
    for number, line in enumerate(journal.records, 1):
        if not {"state", "endpoint", "infra", "cost"} <= line.keys():
            journal.close()
            raise JournalError(f"{directory}/answers.jsonl: line {number} is no answer; delete the file to start over")
    return journal
