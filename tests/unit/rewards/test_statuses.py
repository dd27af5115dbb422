"""This module tests what is made of tests that neither pass nor fail, and that verdicts are swebench's otherwise."""

from __future__ import annotations

import itertools
import json
import random
import tempfile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.harbor import nothing_passed
from rewards.statuses import shortened, something_passed, without_skipped
from rewards.task import Task
from rewards.verdict import Reason
from tests.unit.rewards.test_grade import CODE, END, START, ScriptedBox, graded, task

# How the runner of each parser prints one test's result: (name, a line per status).
FORMATS: dict[str, tuple[str, dict[str, str]]] = {
    "pytest": ("t.py::{}", {"passed": "PASSED {}", "failed": "FAILED {} - x", "error": "ERROR {} - x",
                            "skipped": "SKIPPED {}", "xfailed": "XFAIL {}"}),
    "pytest_v2": ("t.py::{}", {"passed": "PASSED {}", "failed": "FAILED {} - x", "error": "ERROR {}",
                               "skipped": "SKIPPED {}", "xfailed": "XFAIL {}"}),
    "pytest_options": ("t.py::{}[/a]", {"passed": "PASSED {}", "failed": "FAILED {}", "error": "ERROR {}"}),
    "seaborn": ("t.py::{}", {"passed": "PASSED {}", "failed": "FAILED {}"}),
    "matplotlib": ("t.py::{}", {"passed": "PASSED {}", "failed": "FAILED {}", "error": "ERROR {}"}),
    "django": ("{} (a.tests.T)", {"passed": "{} ... ok", "failed": "{} ... FAIL", "error": "{} ... ERROR",
                                  "skipped": "{} ... skipped 'no'"}),
    "sympy": ("{}", {"passed": "{} ok", "failed": "{} F", "error": "{} E"}),
}  # fmt: skip
STATUSES = ("passed", "failed", "error", "skipped", "xfailed", "missing")


def row_of(parser: str, **changes: str) -> tuple[Task, list[str]]:
    form, _ = FORMATS[parser]
    names = [form.format(name) for name in ("test_new", "test_old")]
    fields = {"FAIL_TO_PASS": json.dumps(names[:1]), "PASS_TO_PASS": json.dumps(names[1:])}
    return task(log_parser=f"parse_log_{parser}", **fields, **changes), names


def log_of(parser: str, names: list[str], statuses: tuple[str, ...]) -> str:
    lines = FORMATS[parser][1]
    results = [lines[status].format(name) for name, status in zip(names, statuses, strict=True) if status in lines]
    bad = not {"failed", "error"}.isdisjoint(statuses)
    return START + "".join(f"{line}\n" for line in results) + END + CODE.format(int(bad))


@pytest.mark.parametrize("parser", FORMATS)
async def test_verdicts_are_swebenchs_own(parser: str) -> None:
    """They are the same where every test passes, fails or is missing, and where one is skipped or fails as expected
    besides one that passes."""
    from swebench.harness.grading import get_eval_report
    from swebench.harness.utils import make_test_spec

    row, names = row_of(parser)
    for statuses in itertools.product(STATUSES, repeat=2):
        log = log_of(parser, names, statuses)
        verdict = await graded(ScriptedBox(log), of=row)
        with tempfile.NamedTemporaryFile("w", suffix=".log") as file:
            file.write(log)
            file.flush()
            prediction = {"instance_id": row.instance_id, "model_name_or_path": "", "model_patch": "-"}
            report = get_eval_report(make_test_spec(row.to_row()), prediction, file.name, True)[row.instance_id]
        passed = statuses[0] == "passed"  # where the test that must be fixed is expected to fail, ours is stricter
        assert (verdict.reason is None) is (report["resolved"] and passed), (parser, statuses, verdict, report)


@pytest.mark.parametrize("parser", ["pytest", "pytest_v2", "django"])
async def test_what_passed_with_the_gold_patch_is_neither_skipped_nor_expected_to_fail(parser: str) -> None:
    for status in ("skipped", "xfailed"):
        if status not in FORMATS[parser][1]:
            continue
        row, names = row_of(parser)
        log = log_of(parser, names, ("passed", status))
        verdict = await graded(ScriptedBox(log), of=row)  # nobody knows what the gold patch does
        assert (verdict.reason, verdict.not_passing) == (None, [names[1]])
        row, _ = row_of(parser, not_passing=json.dumps([]))
        verdict = await graded(ScriptedBox(log), of=row)
        assert (verdict.reason, verdict.tests["PASS_TO_PASS"]["failure"]) == (Reason.TESTS_FAILED, [names[1]])
        row, _ = row_of(parser, not_passing=json.dumps([names[1]]))
        assert (await graded(ScriptedBox(log), of=row)).reason is None
        assert Task.from_row(row.to_row(), row.base_dir) == row


@pytest.mark.parametrize("parser", FORMATS)
@pytest.mark.parametrize("status", ["skipped", "xfailed"])
async def test_a_run_without_a_test_that_passes_never_resolves(parser: str, status: str) -> None:
    for known in ({}, {"not_passing": json.dumps(row_of(parser)[1])}):
        row, names = row_of(parser, **known)
        assert (await graded(ScriptedBox(log_of(parser, names, (status, status))), of=row)).reason is not None


@pytest.mark.parametrize(
    ("said", "ran"),
    [
        ("Executed 3 of 5 (skipped 2) SUCCESS", True), ("Executed 0 of 5 (skipped 5) SUCCESS", False),
        ("TOTAL: 3 SUCCESS", True), ("  3 passing (2ms)\n  1 pending", True), ("  0 passing\n  5 pending", False),
        ("Tests:       1 skipped, 2 passed, 3 total", True), ("Tests:       3 skipped, 3 total", False),
        ("# tests 4\n# pass 3\n# skip 1", True), ("# tests 4\n# pass 0\n# skip 4", False),
        ("5 specs, 0 failures", True), ("5 specs, 0 failures, 5 pending specs", False),
        ("5 specs, 0 failures, 2 pending specs", True), ("case': ok", True), ("ok 1 a # SKIP\nok 2 b # SKIP", False),
    ],
)  # fmt: skip
async def test_a_runner_of_failures_only_must_have_run_something(said: str, ran: bool) -> None:
    assert something_passed(said) is ran
    row: dict[str, Any] = {"FAIL_TO_PASS": '["a > b"]', "PASS_TO_PASS": "[]", "eval_type": "fail_only"}
    verdict = await graded(ScriptedBox(f"{START}{said}\n{END}{CODE.format(0)}"), of=task(log_parser=FAIL_ONLY, **row))
    assert (verdict.reason is None) is ran, verdict


FAIL_ONLY = "parse_log_chart_js"


@given(st.lists(st.sampled_from(STATUSES[:1] + STATUSES[3:5]), min_size=1, max_size=6), st.randoms())
def test_only_tests_that_pass_are_successes_beyond_those_that_are_known(said: list[str], draw: random.Random) -> None:
    names = [str(number) for number in range(len(said))]
    passed = {name for name, status in zip(names, said, strict=True) if status == "passed"}
    known = draw.sample(names, draw.randrange(len(names) + 1))
    tests = {
        "FAIL_TO_PASS": {"success": names[:1], "failure": []},
        "PASS_TO_PASS": {"success": names[1:], "failure": ["x"]},
    }
    found, odd = without_skipped(tests, passed, known)
    right = passed | set(known) if passed else set()
    assert {name for kind in found.values() for name in kind["success"]} == right
    assert {name for kind in found.values() for name in kind["failure"]} == {*names, "x"} - right
    assert set(odd) == set(names) - passed


def test_a_long_log_loses_its_middle() -> None:
    assert shortened("a\nb\nc\n", 5) == "a\nb\nc\n"
    assert shortened("\n".join("abcdefgh"), 4) == "a\nb\ng\nh"


_MANY = "9" * 5000  # more digits than Python reads


@pytest.mark.parametrize("log", [f"{_MANY} specs, 0 failures", f"Ran {_MANY} tests in 1s\n\nOK (skipped=1)"])
def test_numbers_without_end_say_nothing(log: str) -> None:
    assert not something_passed(log) and not nothing_passed(log)


@pytest.mark.parametrize("log", ["1" * 400_000, "Ran 1 test in 0.1s\n\nOK (" + "skipped=1 " * 100_000, "1 a" * 200_000])
def test_what_is_searched_takes_linear_time(log: str) -> None:
    """Any quadratic step takes minutes and runs into the limit."""
    assert not something_passed(log) and not nothing_passed(log)
