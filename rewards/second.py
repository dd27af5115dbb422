"""This module asks for a second opinion on a resolved task: would its tests also pass if they were wrong?

The tested code can do to its own test run whatever its process can: print results and exit, patch the runner's reports,
return objects that are equal to everything. No event, channel or secret of that process is out of its reach. But the
code does not know which answers are right. So the tests are run again in another fresh box, after `rewards.falsify` has
made the FAIL_TO_PASS tests wrong there. With honest code, every one of them now fails. If one still passes, it would
pass whatever the code does, and the first results prove nothing.

This works for tests that are functions in Python files and are named as pytest names them. docs/rewards.md says which
attacks it stops, and which it does not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from rewards.task import MARKERS
from rewards.verdict import Reason, Verdict

_PROGRAM = Path(__file__).with_name("falsify.py").read_text()
# The test's own interpreter may be too old, or not be on the path; any Python in the image will do. Without one, the
# tests stay as they are, and none of them is reported as made wrong.
_RUN = """\
( for python in python3 python /opt/miniconda3/bin/python3 /opt/conda/bin/python3 /usr/bin/python3; do
"$python" -I -c 'import sys; sys.exit(sys.version_info < (3, 8))' </dev/null 2>/dev/null && break
done; "$python" -I - ) <<'{word}' || :
{program}
main({word!r}, {wanted!r})
{word}
"""


def falsifying(script: str, tests: Iterable[str], word: str) -> str:
    """Return the eval script that makes these tests wrong before it runs them; "" if none of them is a function.

    word: a secret that begins the lines in which the script reports what it has changed.
    """
    wanted: dict[str, list[str]] = {}
    for test in tests:
        if function := _function(test):
            path, name = function.split("::")
            wanted.setdefault(path, []).append(name)
    lines = script.splitlines(keepends=True)
    if not wanted:
        return ""
    at = next(number for number, line in enumerate(lines) if MARKERS[0] in line)
    run = _RUN.format(word=word, program=_PROGRAM, wanted=wanted)
    return "".join([*lines[:at], run, *lines[at:]])


def compared(verdict: Verdict, control: Verdict, log: str, word: str) -> Verdict:
    """Return the verdict on a resolved task after the second run, whose own verdict and log are `control` and `log`."""
    wrong = set(re.findall(rf"^{word} (.+)$", log, re.MULTILINE))
    if not wrong and control.reason in (None, Reason.TESTS_FAILED):
        return replace(verdict, detail="no second opinion: no test could be made wrong")
    if control.reason is Reason.TEST_TIMEOUT:
        return control
    if control.reason is not Reason.TESTS_FAILED:
        found = control.reason.value if control.reason else "resolved"
        return _disagree(control, f"with wrong tests the result is {found}")
    passed = [test for test in control.tests["FAIL_TO_PASS"]["success"] if _function(test) in wrong]
    return _disagree(control, f"{passed[0]} passes although it was made wrong") if passed else verdict


def _disagree(control: Verdict, detail: str) -> Verdict:
    return Verdict(Reason.RESULTS_DISAGREE, detail, log_tail=control.log_tail)


def _function(test: str) -> str:
    """Return "FILE::FUNCTION" of a pytest test ("FILE::CLASS::FUNCTION[PARAMETERS]"); "" for other names."""
    path, *names = test.partition("[")[0].split("::")
    return f"{path}::{names[-1]}" if path.endswith(".py") and names and names[-1].isidentifier() else ""
