"""Make the tasks of one package: try candidates in order until there are as many tasks as were asked for.

Candidates are tried in waves, several at a time. What becomes of each is decided in their order, so the result depends
on the seed only and not on how fast boxes are. Every trial and every task is in the journal before it counts.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rewards.rules import Rules
from rl.data.make import edits
from rl.data.make.candidates import NAMES, Candidate, Survivor, combinations, parsed, singles
from rl.data.make.prepare import PreparedPackage
from rl.data.make.sources import Package
from rl.data.make.tasks import task_id
from rl.data.make.trials import MOST_BROKEN, Trial, TrialOutcome, Workshop
from rl.run.journal import Journal, run_all

_Piece = TypeVar("_Piece")
_Made = TypeVar("_Made")
_WAVE = 12  # candidates; it decides results, so it does not depend on the machine
_SHARE = 0.25  # of a package's tasks are combined edits, as far as there are any


@dataclass(frozen=True)
class Order:
    """An order says what to make. limit: tasks per package. seed: of all randomness. makers: their names. jobs: boxes
    at a time. rules: what of a patch is graded in training; files that they drop are not edited."""

    limit: int
    seed: int
    makers: Sequence[str] = NAMES
    jobs: int = 1
    rules: Rules = Rules()  # noqa: RUF009  has no state


def editable(package: Package, rules: Rules) -> dict[str, str]:
    """Return the texts of the package's files that may be edited, by path. rules: see ``Order``."""
    texts = {}
    for path in package.sources():
        if not rules.drops(path):
            try:
                texts[path] = (package.tree / path).read_bytes().decode()
            except UnicodeDecodeError:
                continue
    return texts


class TaskMaker:
    """A task maker makes the tasks of one prepared package. It calls ``tell(tasks, trials)`` after each of them."""

    def __init__(
        self,
        prepared: PreparedPackage,
        repositories: Path,
        order: Order,
        journal: Journal,
        tell: Callable[[int, int], None] = lambda kept, tried: None,
        first: Callable[[Mapping[str, str]], Iterator[Candidate]] = lambda sources: iter(()),
    ) -> None:
        """first: returns candidates that are tried before all others, given the texts of files that may be edited."""
        sources = editable(prepared.package, order.rules)
        self._prepared, self._sources, self._order, self._journal = prepared, sources, order, journal
        package, versions = prepared.package, json.dumps(prepared.versions, sort_keys=True)
        self._key = f"{package.label} {hashlib.sha256(f'{package.sha256} {versions}'.encode()).hexdigest()[:16]}"
        self._first = first
        self._workshop = Workshop(prepared, sources, repositories, order.rules)
        self._repositories = repositories
        self._tell = tell
        mine = [record for record in journal.records if record["package"] == self._key]
        self._tried = {record["id"]: record for record in mine if record["phase"] == "tried"}
        self._made = {record["id"]: record for record in mine if record["phase"] == "made"}
        self._signatures: set[str] = set()
        self._so_far = [0, 0]  # tasks, trials
        self.records: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []

    @property
    def seconds(self) -> float:
        """Return how long boxes have worked for this package, in this session and in earlier ones."""
        mine = [record for record in self._journal.records if record["package"] == self._key]
        return sum(record["seconds"] if record["phase"] == "made" else record["trial"]["seconds"] for record in mine)

    async def run(self) -> list[dict[str, Any]]:
        """Return the rows of the tasks. Raises SandboxError, MakeError, JournalError, OSError."""
        files = await asyncio.to_thread(parsed, self._sources, self._prepared.lines)
        seed = f"{self._order.seed}:{self._prepared.package.label}"
        kept: list[Survivor] = []
        combined = any(name.startswith("combine") for name in self._order.makers)
        quota = self._order.limit - int(self._order.limit * _SHARE) * combined
        stream = chain(self._first(self._sources), singles(files, seed, self._order.makers))
        await self._until(stream, quota, kept)
        await self._until(combinations(list(kept), seed, MOST_BROKEN, self._order.makers), self._order.limit, [])
        await self._until(stream, self._order.limit, kept)  # if combinations did not give enough
        return self.rows

    async def _until(self, stream: Iterator[Candidate], limit: int, kept: list[Survivor]) -> None:
        """Try candidates until there are `limit` tasks, and add those that became tasks to `kept`."""
        while len(self.rows) < limit and (wave := await asyncio.to_thread(lambda: list(islice(stream, _WAVE)))):
            new = []
            for candidate, trial in zip(wave, await self._of_all(wave, self._trial), strict=True):
                equal = trial.outcome is TrialOutcome.KEPT and trial.signature() in self._signatures
                self._signatures.add(trial.signature())
                if trial.outcome is not TrialOutcome.KEPT or equal:
                    self._count(candidate, TrialOutcome.EQUAL if equal else trial.outcome)
                else:
                    new.append((candidate, trial))
            while new and (room := limit - len(self.rows)) > 0:
                now, new = new[:room], new[room:]
                for (candidate, trial), (outcome, made) in zip(now, await self._of_all(now, self._task), strict=True):
                    self._count(candidate, outcome)
                    if outcome is TrialOutcome.KEPT:
                        self.rows.append(made)
                        kept.append((candidate, trial.failed))

    async def _of_all(self, pieces: Sequence[_Piece], work: Callable[[_Piece], Awaitable[_Made]]) -> list[_Made]:
        """Return what ``work`` makes of each piece, in their order; as many at a time as there are boxes."""
        made: dict[int, _Made] = {}

        async def one(piece: tuple[int, _Piece]) -> None:
            made[piece[0]] = await work(piece[1])

        await run_all(enumerate(pieces), self._order.jobs, one)
        return [made[number] for number in range(len(pieces))]

    async def _trial(self, candidate: Candidate) -> Trial:
        name = task_id(self._prepared.package, candidate.edit)
        if name in self._tried:
            trial = msgspec.convert(self._tried[name]["trial"], Trial)
        else:
            trial = await self._workshop.tried(candidate)
            self._append(name, "tried", candidate, {"trial": asdict(trial)})
        self._moved(0, 1)
        return trial

    async def _task(self, piece: tuple[Candidate, Trial]) -> tuple[TrialOutcome, Any]:
        candidate, trial = piece
        name = task_id(self._prepared.package, candidate.edit)
        record = self._made.get(name)
        if record and (record["outcome"] != TrialOutcome.KEPT or (self._repositories / name).is_dir()):
            outcome, made = TrialOutcome(record["outcome"]), record["made"]
        else:
            began = time.monotonic()
            outcome, made = await self._workshop.made(candidate, trial)
            more = {"outcome": outcome, "made": made, "seconds": round(time.monotonic() - began, 2)}
            self._append(name, "made", candidate, more)
        self._moved(outcome is TrialOutcome.KEPT, 0)
        return outcome, made

    def _append(self, name: str, phase: str, candidate: Candidate, more: Mapping[str, Any]) -> None:
        base = {"package": self._key, "id": name, "phase": phase, "maker": candidate.maker, "infra": False}
        edit = {"edit": edits.to_json(candidate.edit)} if phase == "tried" else {}
        self._journal.append({**base, **edit, **more})

    def _moved(self, tasks: int, trials: int) -> None:
        self._so_far = [self._so_far[0] + tasks, self._so_far[1] + trials]
        self._tell(*self._so_far)

    def _count(self, candidate: Candidate, outcome: TrialOutcome) -> None:
        self.records.append({"maker": candidate.maker, "outcome": str(outcome)})
