"""The seed alone decides which edits become tasks: not how many boxes there are, nor where one was killed."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import tempfile
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rewards.verdict import Reason, Verdict
from rl.data.make import edits, trials, work
from rl.data.make.candidates import Candidate
from rl.data.make.prepare import PreparedPackage
from rl.data.make.runs import Failure
from rl.data.make.sources import Package
from rl.data.make.tasks import task_id
from rl.data.make.trials import Trial, TrialOutcome
from rl.data.make.work import Order, TaskMaker
from rl.run.journal import Journal
from rollout.sandbox import SandboxError

SOURCE = """\
def f(a, b):
    if a < b:
        a += 1
    return a - b


def g(a, b=2):
    return f(a, b) * (a + b)
"""


class Killed(Exception): ...


class Workshop:
    """A workshop in which a hash decides what an edit does. `trials`: how often each edit was tried, in all lives."""

    trials: ClassVar[Counter[str]] = Counter()
    life = 10**9

    def __init__(self, prepared: PreparedPackage, _: Any, repositories: Path, __: Any) -> None:
        self.package, self.repositories = prepared.package, repositories

    def _digest(self, candidate: Candidate) -> int:
        return hashlib.sha256(task_id(self.package, candidate.edit).encode()).digest()[0]

    async def _step(self) -> None:
        await asyncio.sleep(0)
        Workshop.life -= 1
        if Workshop.life < 0:
            raise Killed

    async def tried(self, candidate: Candidate) -> Trial:
        await self._step()
        Workshop.trials[task_id(self.package, candidate.edit)] += 1
        digest = self._digest(candidate)
        if digest % 3 == 0:
            return Trial(TrialOutcome.NO_FAILURE, seconds=1.0)
        message = f"assert {digest % 7} == 7"  # several fail alike
        return Trial(TrialOutcome.KEPT, ("t.py::t",), (Failure("t.py::t", "call", "AssertionError", message),), 1.0)

    async def made(self, candidate: Candidate, trial: Trial) -> tuple[TrialOutcome, Mapping[str, Any] | str]:
        await self._step()
        if self._digest(candidate) % 5 == 0:
            return TrialOutcome.FLAKY, "now and then"
        name = task_id(self.package, candidate.edit)
        (self.repositories / name).mkdir(parents=True, exist_ok=True)
        return TrialOutcome.KEPT, {"instance_id": name, "failed": trial.failures[0].message}


def prepared(directory: Path) -> PreparedPackage:
    (directory / "m.py").write_text(SOURCE)
    package = Package("m", "1", directory, "0" * 64, "MIT", ".", ("m",), (), "")
    lines = {"m.py": dict.fromkeys(range(1, 10), 1)}
    return PreparedPackage(package, directory, ("t.py::t",), frozenset(("t.py::t",)), (), lines, 1.0, (), {}, {})


def rows(directory: Path, jobs: int = 1, limit: int = 6) -> list[dict[str, Any]]:
    journal = Journal(directory / "journal.jsonl")
    try:
        maker = TaskMaker(prepared(directory), directory / "repos", Order(limit, 0, jobs=jobs), journal)
        found = asyncio.run(maker.run())
        assert sum(record["outcome"] == "kept" for record in maker.records) == len(found)
        return found
    finally:
        journal.close()


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "Workshop", Workshop)
    Workshop.trials, Workshop.life = Counter(), 10**9


def test_equal_failures_are_one_task(tmp_path: Path) -> None:
    found = rows(tmp_path)
    assert 3 < len({row["failed"] for row in found}) == len(found) <= 6


def test_progress_moves_with_every_trial_and_every_task(tmp_path: Path) -> None:
    told = []
    with contextlib.closing(Journal(tmp_path / "journal.jsonl")) as journal:
        maker = TaskMaker(prepared(tmp_path), tmp_path / "repos", Order(4, 0), journal, lambda *far: told.append(far))
        asyncio.run(maker.run())
    steps = [(one[0] - before[0], one[1] - before[1]) for before, one in pairwise([(0, 0), *told])]
    assert set(steps) <= {(0, 1), (1, 0), (0, 0)} and told[-1][0] == len(maker.rows) == 4
    assert sum(tries for _, tries in steps) == sum(Workshop.trials.values())


def test_edits_from_elsewhere_are_tried_first(tmp_path: Path) -> None:
    """A bug of a model or of a repository's history comes before the makers' own."""
    first = Candidate("written", edits.between("m.py", SOURCE, SOURCE.replace("a - b", "a - 7")), 1)
    with contextlib.closing(Journal(tmp_path / "journal.jsonl")) as journal:
        maker = TaskMaker(
            prepared(tmp_path), tmp_path / "repos", Order(4, 0), journal, first=lambda sources: iter([first])
        )
        asyncio.run(maker.run())
        assert journal.records[0]["maker"] == "written"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(jobs=st.integers(1, 5), lives=st.lists(st.integers(0, 40), max_size=3))
def test_killed_and_continued_with_any_number_of_boxes_it_makes_the_same(jobs: int, lives: list[int]) -> None:
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        Workshop.life = 10**9
        expected = rows(Path(one))
        Workshop.trials = Counter()
        for life in lives:
            Workshop.life = life
            with contextlib.suppress(Killed):
                rows(Path(other), jobs)
        Workshop.life = 10**9
        assert rows(Path(other), jobs) == expected
        assert set(Workshop.trials.values()) == {1}
        before = (Path(other) / "journal.jsonl").read_bytes()
        assert rows(Path(other), 1) == expected
        assert (Path(other) / "journal.jsonl").read_bytes() == before


async def test_what_the_infrastructure_fails_is_not_misgraded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate that is called misgraded is never tried again."""

    async def grade(*_: Any, **__: Any) -> Verdict:
        return Verdict(Reason.NO_SPACE, "No space left on device")

    monkeypatch.setattr(trials, "grade", grade)
    made: Any = SimpleNamespace(_timeout_s=1, _rules=None)
    with pytest.raises(SandboxError, match="no_space: No space left"):
        await trials.Workshop._misgraded(made, SimpleNamespace(snapshot=None, patch=""))  # type: ignore[arg-type]
