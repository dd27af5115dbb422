"""A second opinion on a resolved task: would its tests also pass if they were wrong?

The tested code can do to its own test run whatever its process can: print results and exit, patch the runner's reports,
return objects that are equal to everything. No event, channel or secret of that process is out of its reach. But the
code does not know which answers are right. So the tests are run again in another fresh box, after `rewards.falsify` has
made some of them wrong there. With honest code, those now fail. If one still passes, and with the gold patch it does
not, it would pass whatever the code does, and the first results prove nothing. In the first run, the same program does
the same and writes the files as they are, so that the two runs differ in nothing but what the tests expect.

This works for tests that are functions in Python files. docs/rewards.md says which attacks it stops, and which not.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from rewards.falsify import cut
from rewards.patch import patched_by
from rewards.task import MARKERS, Task
from rewards.verdict import Reason, Verdict

NONE = "no_second_opinion"
"""The flag of a resolved task of which no test could be made wrong."""

PARTIAL = "partial_second_opinion"
"""The flag of a resolved task of which some tests of FAIL_TO_PASS could not be made wrong."""

_PARTS = ("literals", "mutation", "falsify")
_HEAD = re.compile(r"^from (?:__future__|rewards\.\w+) import .*\n", re.MULTILINE)
_PROGRAM = "from __future__ import annotations\n" + "".join(
    _HEAD.sub("", Path(__file__).with_name(f"{name}.py").read_text()) for name in _PARTS
)
# The test's own interpreter may be too old, or not be on the path; any Python in the image will do. The program is in a
# variable of the shell that runs the script (see `rewards.grade`), and is gone from there before the tests begin.
_STEP = """\
( for python in python3 python /opt/miniconda3/bin/python3 /opt/conda/bin/python3 /usr/bin/python3; do
"$python" -I -S -c 'import sys; sys.exit(sys.version_info < (3, 8))' </dev/null 2>/dev/null && break
done; "$python" -I -S - ) <<<"$rewriting" || :
unset rewriting
"""
# FILE.py::NAME of pytest, NAME (MODULE.CLASS) of unittest.
_PYTHON = re.compile(r"[^:]+\.py::|\w+ \([\w.]+\)$")
_PARSERS = ("parse_log_django", "parse_log_sympy")


@dataclass(frozen=True)
class Rewriting:
    """A rewriting is what both runs of one grading's tests share.

    word: a secret that begins the lines in which the program reports what it has changed. seed: what it changes
    follows from it.
    """

    task: Task
    word: str = field(default_factory=lambda: secrets.token_hex(8))
    seed: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def possible(self) -> bool:
        """Tell whether the task's tests may be functions in Python files."""
        parser = self.task.log_parser in _PARSERS
        return parser or any(_PYTHON.match(test) for test in self.task.FAIL_TO_PASS)

    def script(self, script: str) -> str:
        """Return the eval script that runs the program before the tests."""
        lines = script.splitlines(keepends=True)
        at = next(number for number, line in enumerate(lines) if MARKERS[0] in line)
        return "".join([*lines[:at], _STEP, *lines[at:]])

    def program(self, wrong: bool) -> str:
        """Return the program that rewrites the tests: as they are, or so that they must fail.

        Without a gold patch, which tells what a change decides, only changes are made that are sure to decide.
        """
        task, lines = self.task, self.task.eval_script.splitlines()
        begin, end = (next(n for n, line in enumerate(lines) if marker in line) for marker in MARKERS)
        named = [word for line in lines[begin:end] for word in re.findall(r"[\w./-]+\.py", line)]
        files = sorted({*patched_by(task.eval_script), *named})
        call = (self.word, int(wrong), not task.patch, self.seed, [*task.FAIL_TO_PASS], [*task.PASS_TO_PASS], files)
        return f"{_PROGRAM}\nmain{call!r}\n"

    def changed(self, log: str) -> set[str]:
        """Return the tests, without their parameters, that the program says were made wrong."""
        return set(re.findall(rf"^{self.word} (.+?)\s*$", log, re.MULTILINE))

    def unchanged(self, log: str, gold: SuiteRun | None) -> set[str]:
        """Return the tests of FAIL_TO_PASS, without their parameters, that the program cannot make wrong, and those
        that pass with the gold patch although it has."""
        decide_nothing = {cut(test) for test in gold.passed} & self.changed(log) & self.fixed if gold else set()
        return decide_nothing.union(re.findall(rf"^{self.word}= (.+?)\s*$", log, re.MULTILINE))

    @property
    def fixed(self) -> set[str]:
        """Return the tests of FAIL_TO_PASS without their parameters."""
        return {cut(test) for test in self.task.FAIL_TO_PASS}

    def lost(self, run: SuiteRun) -> set[str]:
        """Return the tests of FAIL_TO_PASS that failed in a run with wrong tests although they were as they are. It
        takes the gold patch to tell whether they hang on one that is wrong, so without it there are none."""
        if not self.task.patch:
            return set()
        touched = set(re.findall(rf"^{self.word}-? (.+?)\s*$", run.log, re.MULTILINE))
        return {test for test in self.task.FAIL_TO_PASS if cut(test) not in touched} - {*run.passed}


@dataclass(frozen=True)
class SuiteRun:
    """A run of tests has a verdict, its log, and the names of the tests that did not fail."""

    verdict: Verdict
    log: str
    passed: Collection[str]


def suspicious(rewriting: Rewriting, run: SuiteRun) -> str:
    """Return why the run of wrong tests is not what honest code gives; "" if it is."""
    if run.verdict.reason is not Reason.TESTS_FAILED:
        return f"with wrong tests the result is {run.verdict.reason.value if run.verdict.reason else 'resolved'}"
    return _why(rewriting.changed(run.log) & {cut(test) for test in run.passed}, rewriting.lost(run))


def _why(passed: set[str], lost: set[str]) -> str:
    if passed:
        return f"{min(passed)} passes although it was made wrong"
    return f"{min(lost)} fails among wrong tests, although it is as it was" if lost else ""


def compared(rewriting: Rewriting, run: SuiteRun, gold: SuiteRun | None) -> tuple[Verdict | None, str]:
    """Return the verdict of the run with wrong tests, None if it agrees, and why there is no second opinion.

    gold: the same run with the gold patch, if there was a reason to make it. What passes there proves nothing.
    """
    wrong = rewriting.changed(run.log)
    if not wrong and run.verdict.reason in (None, Reason.TESTS_FAILED):
        return None, "no test could be made wrong"
    why = suspicious(rewriting, run)
    if why and gold is not None:
        same = gold.verdict.reason is run.verdict.reason
        if same and run.verdict.reason is not Reason.TESTS_FAILED:
            return None, "the wrong tests do not fail with the gold patch either"
        if same:
            wrong -= {cut(test) for test in gold.passed}
            why = _why(wrong & {cut(test) for test in run.passed}, rewriting.lost(run) - rewriting.lost(gold))
            if not why and not wrong:
                return None, "the wrong tests pass with the gold patch, too"
    if not why:
        return None, "" if wrong & rewriting.fixed else "no test of FAIL_TO_PASS could be made wrong"
    if run.verdict.reason is Reason.TEST_TIMEOUT:
        return run.verdict, ""
    return Verdict(Reason.RESULTS_DISAGREE, why, log_tail=run.verdict.log_tail), ""
