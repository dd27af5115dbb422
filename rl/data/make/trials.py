"""Try an edit: see that it breaks a few tests, each time, and that it makes a task that is graded right."""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rewards.grade import grade
from rewards.rules import Rules
from rewards.task import Task
from rewards.verdict import Verdict
from rl.data.make import edits
from rl.data.make.candidates import COMBINED, FEATURE, FIX, WRITTEN, Candidate
from rl.data.make.prepare import PreparedPackage
from rl.data.make.runs import Bench, Failure, NoResultError, slow
from rl.data.make.statement import LEVELS, show, statements
from rl.data.make.tasks import CannotHideError, eval_script, hide, logged, task_id, write_snapshot
from rollout.sandbox import SandboxError
from rollout.sandbox.local.box import boot_local

MOST_BROKEN = 20
"""A task's edit breaks at most so many tests."""


class TrialOutcome(StrEnum):
    """Each member is what became of a candidate. docs/data.md explains them."""

    KEPT = "kept"
    NO_FAILURE = "no_failure"
    TOO_MANY = "too_many"
    COLLECTION = "collection"  # something cannot be imported or collected any more
    NO_RESULT = "no_result"  # the tests hang or are killed
    EQUAL = "equal"  # fails as an earlier one does
    FLAKY = "flaky"
    NOT_HIDDEN = "not_hidden"
    NOT_SHOWN = "not_shown"  # there is no program for a statement
    MISGRADED = "misgraded"


@dataclass(frozen=True)
class Trial:
    """A trial is what an edit did to the tests that run it. outcome: KEPT if it is worth a task."""

    outcome: TrialOutcome
    failed: tuple[str, ...] = ()
    failures: tuple[Failure, ...] = ()
    seconds: float = 0.0

    def signature(self) -> str:
        """Return a digest that is equal for edits that fail alike: the same tests, with the same messages."""
        said = sorted((one.test, one.type, one.message) for one in self.failures)
        return hashlib.sha256(json.dumps([sorted(self.failed), said]).encode()).hexdigest()


class Workshop:
    """A workshop tries edits of one package, and makes tasks of them below a directory."""

    def __init__(self, prepared: PreparedPackage, sources: Mapping[str, str], repositories: Path, rules: Rules) -> None:
        """Take sources: texts of the package's files by path; and rules: what of a patch is graded in training."""
        self.prepared, self.sources = prepared, sources
        self._bench = Bench(prepared.package.tree, prepared.venv)
        self._repositories, self._rules = repositories, rules
        self._timeout_s = slow(prepared.seconds)

    async def tried(self, candidate: Candidate) -> Trial:
        """Run the tests that run the edit. Raises SandboxError, MakeError."""
        began = time.monotonic()

        def ended(outcome: TrialOutcome, failed: Sequence[str] = (), failures: Sequence[Failure] = ()) -> Trial:
            return Trial(outcome, tuple(failed), tuple(failures), round(time.monotonic() - began, 2))

        only = self.prepared.names(candidate.tests)
        broken = edits.applied(candidate.edit, self.sources)
        try:
            run = await self._bench.tests(broken, only=only, most=MOST_BROKEN + 1, timeout_s=self._timeout_s)
        except NoResultError:
            return ended(TrialOutcome.NO_RESULT)
        if run.broken:
            return ended(TrialOutcome.COLLECTION)
        if candidate.files.isdisjoint(test.partition("::")[0] for test in run.failed) and candidate.files:
            return ended(TrialOutcome.NO_FAILURE)
        if not run.failed or len(run.failed) > MOST_BROKEN:
            return ended(TrialOutcome.TOO_MANY if run.failed else TrialOutcome.NO_FAILURE)
        return ended(TrialOutcome.KEPT, sorted(run.failed), sorted(run.failures, key=lambda one: one.test))

    async def made(self, candidate: Candidate, trial: Trial) -> tuple[TrialOutcome, dict[str, Any] | str]:
        """Repeat the failure and write the task; returns its row, or why there is none.

        Raises SandboxError, MakeError, OSError, subprocess.CalledProcessError.
        """
        broken = edits.applied(candidate.edit, self.sources)
        only = self.prepared.names(candidate.tests)
        try:
            run = await self._bench.tests(broken, only=only, timeout_s=self._timeout_s)
        except NoResultError as error:
            return TrialOutcome.FLAKY, str(error)
        if run.failed != set(trial.failed):
            return TrialOutcome.FLAKY, f"{len(run.failed)} tests failed, {len(trial.failed)} before"
        try:
            return await self._task(candidate, trial, broken)
        except CannotHideError as error:
            return TrialOutcome.NOT_HIDDEN, str(error)

    async def _task(
        self, candidate: Candidate, trial: Trial, broken: Mapping[str, str]
    ) -> tuple[TrialOutcome, dict[str, Any] | str]:
        package, tree = self.prepared.package, self.prepared.package.tree
        hidden = hide(tree, trial.failed)
        test_files = {test.partition("::")[0] for test in [*trial.failed, *self.prepared.names(candidate.tests)]}
        names = logged(test for test in self.prepared.order if test.partition("::")[0] in test_files)
        failing = [names[test] for test in trial.failed if test in names]
        if not failing:
            return TrialOutcome.NOT_HIDDEN, "the names of the failing tests cannot be read from a log"
        passing = [names[test] for test in names if test in self.prepared.stable - set(trial.failed)]
        gold = edits.patch(broken, {path: self.sources[path] for path in broken})
        parts = candidate.parts or (candidate.edit,)
        others = [[change for other in parts if other is not part for change in other] for part in parts]
        mended = [edits.applied(other, self.sources) for other in others]
        shown = await show(self._bench, broken, mended, trial.failures, hidden.whole)
        texts = statements(shown, len(parts), trial.failures, package.sources(), trial.failed, gold)
        if not texts:
            return TrialOutcome.NOT_SHOWN, f"{len(parts)} bugs, {len({one.bug for one in shown})} shown by programs"
        name = task_id(package, candidate.edit)
        commit = write_snapshot(package, self.prepared.venv, broken, hidden, self._repositories / name)
        row: dict[str, Any] = {
            "instance_id": name,
            "image": f"dir:{self._repositories.name}/{name}",
            "repo": f"pypi/{package.name}",
            "version": package.version,
            "base_commit": commit,
            "problem_statement": texts[LEVELS[1]],
            "FAIL_TO_PASS": failing,
            "PASS_TO_PASS": passing,
            "log_parser": "parse_log_pytest",
            "eval_type": "pass_and_fail",
            "eval_script": eval_script(hidden, test_files),
            "patch": gold,
            "difficulty": _difficulty(candidate),
            "set": "made",
            "maker": candidate.maker,
            "licence": package.licence,
            **{f"statement_{number}": text for number, text in texts.items()},
            "shown": str(len(shown)),
        }
        if wrong := await self._misgraded(Task.from_row(row, self._repositories.parent)):
            return TrialOutcome.MISGRADED, wrong
        return TrialOutcome.KEPT, row

    async def _misgraded(self, task: Task) -> str:
        """Return what is wrong with how a task is graded, "" if nothing. (The tests fail for the third time here.)"""
        boot = functools.partial(boot_local, task.snapshot, isolation="bwrap")
        graded = functools.partial(grade, task, boot=boot, timeout_s=self._timeout_s * 2, rules=self._rules)
        gold = _judged(await graded(patch=(task.patch or "").encode(), second_opinion=True))
        if gold.reason is not None:
            return f"the gold patch: {_reason(gold)}"
        empty = _judged(await graded(patch=None))
        tests = empty.tests
        passed = [*tests.get("FAIL_TO_PASS", {}).get("success", ()), *tests.get("PASS_TO_PASS", {}).get("failure", ())]
        if empty.reason is None or passed or not empty.tests:
            return f"no patch: {_reason(empty)}{f', {passed[0]} is not as expected' if passed else ''}"
        return ""


def _judged(verdict: Verdict) -> Verdict:
    """Return a verdict on a patch. Raises SandboxError if it is one on the infrastructure."""
    if verdict.is_infra and verdict.reason is not None:
        raise SandboxError(verdict.reason.value, verdict.detail)
    return verdict


def _reason(verdict: Verdict) -> str:
    return f"{verdict.reason or 'resolved'}: {verdict.detail}"[:300]


def _difficulty(candidate: Candidate) -> str:
    """Return the kind of edit, in few words, because metrics are split by it."""
    if candidate.maker in COMBINED:
        return f"{COMBINED.index(candidate.maker) + 2} edits"
    if candidate.maker in (FIX, WRITTEN):
        return "commit" if candidate.maker == FIX else "written"
    return "function" if candidate.maker in (FEATURE, "drop_function") else "1 edit"


def at_level(row: Mapping[str, Any], level: int) -> dict[str, Any]:
    """Return a row with the statement of another level."""
    return {**row, "problem_statement": row[f"statement_{level}"]}
