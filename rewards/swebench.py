"""SWE-bench's grader: it runs a task's eval script, and swebench judges the log.

Failing or endless tests and a log that makes no sense are unresolved. swebench's search of the log for signs of a
broken environment is not used, because the tested code could print such signs to escape a reward of 0.

The tests run in the same process as the code that they test, as in every SWE-bench set, so code that is written to
deceive its own test run can print test results. This module catches marker lines that the eval script did not print,
results that contradict the exit status of the test command or each other (`rewards.contradiction`), and an eval script
that was killed. `rewards.statuses` has what swebench leaves open. `rewards.second` asks whether the tests can fail at
all; `rewards.rules` keeps hooks of the test runner out and flags the rest; docs/rewards.md has the whole table.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import re
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rewards import second, statuses
from rewards.apart import apart
from rewards.contradiction import contradicted, readable
from rewards.graders import Grader
from rewards.grading import TAIL, Grading, RefusedError
from rewards.patch import FileDiff, PatchError, split
from rewards.task import Task
from rewards.verdict import Reason, Verdict
from rollout.sandbox import ExecResult

# A longer log, in characters, or one for another parser is read in a process of its own, for as long at most: a pattern
# of sympy's takes time by the cube of a line.
_LONG, _LONGEST_S = 1 << 14, 90.0
_QUICK = {f"parse_log_{name}" for name in ("pytest", "pytest_v2", "django", "seaborn", "matplotlib")}
_PARTS = tuple(f"swebench.harness.{part}" for part in ("constants", "grading", "log_parsers", "utils"))
_MOST_LINES = 1_000_000  # of a log that are parsed, which takes a minute at most; the rest is cut out of its middle


class SweBench(Grader):
    """It grades tasks of the SWE-bench v5 schema, whose columns `Task.from_row` checks."""

    second_opinion = True

    async def judge(self, grading: Grading) -> Verdict:
        """See Grader."""
        await asyncio.to_thread(warm_up)
        from swebench.harness.log_parsers import PARSER_REGISTRY
        from swebench.harness.utils import make_test_spec

        task = grading.task
        if task.log_parser not in PARSER_REGISTRY:
            return Verdict(Reason.TASK_INVALID, f"swebench has no parser {task.log_parser!r}")
        # swebench's markers go to stderr (they are lines of the shell's trace) and the results to stdout; in one
        # stream they stay in order.
        script = make_test_spec(task.to_row()).eval_script.replace("\n", "\nexec 2>&1\n", 1)
        rewriting = second.Rewriting(task)
        if not grading.second_opinion or not rewriting.possible:
            verdict = (await _run(grading, script, "")).verdict
            if verdict.reason is None and grading.second_opinion:
                return grading.alone(verdict, "the tests are no functions of Python files")
            return verdict
        script = rewriting.script(script)
        verdict = (await _run(grading, script, rewriting.program(wrong=False))).verdict
        if verdict.reason is not None:
            return verdict
        wrong = rewriting.program(wrong=True)
        run, gold = await _run(grading, script, wrong), None
        if rewriting.changed(run.log) and second.suspicious(rewriting, run) and task.patch:
            with contextlib.suppress(PatchError):  # a gold patch that cannot be read was never applied
                gold = await _run(grading, script, wrong, split(task.patch.encode()))
        disagrees, alone = second.compared(rewriting, run, gold)
        if disagrees or alone:
            return disagrees or grading.alone(verdict, alone)
        return replace(verdict, flags=(second.PARTIAL,)) if rewriting.unchanged(run.log, gold) else verdict


def warm_up() -> None:
    """Import swebench, which takes seconds; call this in a thread before the first grading."""
    for part in _PARTS:
        importlib.import_module(part)


async def _run(grading: Grading, script: str, program: str, files: Sequence[FileDiff] | None = None) -> second.SuiteRun:
    """Run the tests once, with these files instead of the patch's if there are any."""
    from swebench.harness.log_parsers import PARSER_REGISTRY

    try:
        run = await grading.run(script, program, files)
    except RefusedError as error:
        return second.SuiteRun(error.verdict, "", ())
    log = run.stdout.decode(errors="replace")
    log = log.replace("\r\n", "\n").replace("\r", "\n")  # as swebench reads a file: nothing may hide behind a "\r"
    what = grading.task, script, replace(run, stdout=b"", stderr=b""), log, grading.timeout_s
    here = len(log) <= _LONG and PARSER_REGISTRY[grading.task.log_parser].__name__ in _QUICK
    try:
        judge: Any = _judge if here else functools.partial(apart, _LONGEST_S, _PARTS, _judge)
        verdict, passed = await asyncio.to_thread(judge, *what)
    except TimeoutError as error:
        verdict, passed = Verdict(Reason.LOG_UNPARSABLE, f"reading the log: {error}", log_tail=log[-TAIL:]), set()
    return second.SuiteRun(verdict, log, passed)


def _judge(task: Task, script: str, run: ExecResult, log: str, timeout_s: float) -> tuple[Verdict, set[str]]:
    """Return the verdict on a log, and the tests in it that did not fail."""
    from swebench.harness.constants import END_TEST_OUTPUT, START_TEST_OUTPUT, TEST_EXIT_CODE
    from swebench.harness.grading import get_eval_report, get_logs_eval
    from swebench.harness.log_parsers import PARSER_REGISTRY
    from swebench.harness.utils import make_test_spec

    spec = make_test_spec(task.to_row())
    tail = log[-TAIL:]
    if run.timed_out:
        return Verdict(Reason.TEST_TIMEOUT, f"the tests did not end within {timeout_s:.0f} s", log_tail=tail), set()
    if (run.returncode or 0) > 128:  # 128 itself is a status of git, which may be the script's last command
        detail = f"the eval script was killed (signal {(run.returncode or 0) - 128})"
        return Verdict(Reason.LOG_UNPARSABLE, detail, log_tail=tail), set()
    for marker in (START_TEST_OUTPUT, END_TEST_OUTPUT, TEST_EXIT_CODE):
        if log.count(marker) > _prints(script, marker):
            detail = f"the eval script does not print {marker!r} so often"
            return Verdict(Reason.LOG_FORGED, detail, log_tail=tail), set()
    expected = (*spec.FAIL_TO_PASS, *spec.PASS_TO_PASS)
    parse = functools.lru_cache(1)(functools.partial(PARSER_REGISTRY[spec.log_parser], test_spec=spec))
    log = readable(statuses.shortened(log, _MOST_LINES), parse)
    if torn := contradicted(log, expected, parse):
        return Verdict(Reason.RESULTS_DISAGREE, f"{torn} failed and passed", log_tail=tail), set()
    with tempfile.NamedTemporaryFile("w", suffix=".log", errors="replace") as file:
        file.write(log)
        file.flush()
        prediction = {"instance_id": spec.instance_id, "model_name_or_path": "", "model_patch": "-"}
        report = get_eval_report(spec, prediction, file.name, True)[spec.instance_id]
        found, _ = get_logs_eval(spec, file.name)
    if not report["patch_successfully_applied"]:  # swebench's name for "the log has test results"
        detail = "the log was cut at the output limit" if run.truncated else ""
        return Verdict(Reason.LOG_UNPARSABLE, detail, log_tail=tail), set()
    tests = {name: report["tests_status"][name] for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    passed = {name for name, status in found.items() if status == "PASSED"}
    odd: list[str] = []
    if spec.eval_type == "pass_and_fail":
        tests, odd = statuses.without_skipped(tests, passed, task.not_passing)
    passed = {name for name, status in found.items() if status not in ("FAILED", "ERROR")}
    verdict = Verdict(None, tests=tests, log_tail=tail, not_passing=odd)
    if report["resolved"] and not any(kind["failure"] for kind in tests.values()):
        if spec.eval_type == "pass_and_fail" or statuses.something_passed(log):
            return verdict, passed
        return replace(verdict, reason=Reason.TESTS_FAILED, detail="no test passed: all were skipped"), passed
    failed = sum(len(kind["failure"]) for kind in tests.values())
    total = failed + sum(len(kind["success"]) for kind in tests.values())
    return replace(verdict, reason=Reason.TESTS_FAILED, detail=f"{failed} of {total} tests failed"), passed


def _prints(script: str, marker: str) -> int:
    """Count how often an honest run prints the marker: once for each line that has it if the script is traced (set -x),
    and once more for each `echo` of it."""
    traced = re.search(r"^set -[a-z]*x", script, re.MULTILINE) is not None
    lines = [line.strip() for line in script.splitlines() if marker in line]
    return sum(traced + line.startswith("echo") for line in lines)
