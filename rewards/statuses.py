"""Skipped tests and others that neither pass nor fail, and logs that are too long: what swebench leaves open."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

# Signs that a test passed, of the runners whose parsers report nothing but failures.
_PASSED = re.compile(
    r"\b[1-9]\d* pass(?:ing|ed)\b|^# pass +[1-9]|TOTAL: [1-9]\d* SUCCESS|Executed [1-9]\d* of \d+|': ok$"
    r"|^ok \d+(?!.*# SKIP)",
    re.MULTILINE,
)
_SPECS = re.compile(r"(?<!\d)(\d{1,9}) specs?, \d+ failures?(?:, (\d{1,9}) pending)?")

Tests = Mapping[str, Mapping[str, list[str]]]


def without_skipped(tests: Tests, passed: Collection[str], not_passing: Collection[str] | None) -> tuple[Tests, list]:
    """Return the tests, with those as failures that did not pass, and which of them did not fail either.

    tests: as swebench reports them, which counts a test that fails as expected as a success, and a skipped one of
    PASS_TO_PASS. not_passing: those that do the same with the gold patch; None if that is not known, and then a test of
    FAIL_TO_PASS must pass, and one of PASS_TO_PASS may not fail. If no test passed, all are failures.
    """
    odd = sorted({test for kind in tests.values() for test in kind["success"] if not has(passed, test)})
    alone = len(odd) == sum(len(kind["success"]) for kind in tests.values())
    known = tests["PASS_TO_PASS"]["success"] if not_passing is None else not_passing
    bad = set(odd) if alone else set(odd) - set(known)
    if not bad:
        return tests, odd
    return {
        name: {
            "success": [test for test in kind["success"] if test not in bad],
            "failure": [*kind["failure"], *(test for test in kind["success"] if test in bad)],
        }
        for name, kind in tests.items()
    }, odd


def something_passed(log: str) -> bool:
    """Tell whether a log without failures says that a test passed, and not only that tests were skipped."""
    specs = any(int(ran) > int(pending or 0) for ran, pending in _SPECS.findall(log))
    return specs or bool(_PASSED.search(log))


def shortened(log: str, most: int) -> str:
    """Return a log with at most so many lines: the first and the last ones."""
    if log.count("\n") <= most:
        return log
    lines = log.split("\n")
    return "\n".join([*lines[: most // 2], *lines[-(most // 2) :]])


def has(names: Collection[str], test: str) -> bool:
    """Tell whether a test is among the names. In some rows, a name is cut off within its parameters."""
    cut = test.count("[") > test.count("]")
    return test in names or (cut and any(name.startswith(test) for name in names))
