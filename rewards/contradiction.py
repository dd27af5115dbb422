"""Contradictions in a test log: tests that it reports both as passed and as failed.

When a log has several lines about a test, swebench takes the last one, but the tested code may print lines of its own
after the test runner's, or among them. A failure that a log reports therefore counts, wherever in the log it stands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from rewards.statuses import has

Parse = Callable[[str], Mapping[str, str]]
_UNREAD: Mapping[str, str] = {}  # of what a parser cannot read

_PASSED, _FAILED = ("PASSED", "XFAIL"), ("FAILED", "ERROR")
_PYTEST = re.compile(r"^(FAILED|ERROR) (\S+)", re.MULTILINE)
# The header of a failure in the report at the end of unittest's output, and the line after it, which may be the test's
# docstring. For a subtest, further parentheses follow the name.
_UNITTEST = re.compile(r"^(?:FAIL|ERROR): ((\S+) \(([\w.]+)\)).*\n(.*)", re.MULTILINE)
_SYMPY = re.compile(r"^_+ .*\.py:(\w+) _+$", re.MULTILINE)


def readable(log: str, parse: Parse) -> str:
    """Return a log without the lines that make its parser raise; "" if it raises without them, too.

    swebench's for Django takes the second word of a line "FAIL: ..." for a test's name, whoever prints the line.
    """
    if _parsed(parse, log) is not _UNREAD:
        return log
    kept = "\n".join(line for line in log.split("\n") if _parsed(parse, line) is not _UNREAD)
    return "" if _parsed(parse, kept) is _UNREAD else kept


def contradicted(log: str, tests: Iterable[str], parse: Parse) -> str:
    """Return one of the tests that the log reports as passed and as failed; "" if there is none.

    parse: the task's log parser, which returns test -> status. (pytest reports a test that passes and whose teardown
    fails as PASSED and as ERROR.)
    """
    passed = {name for name, status in _parsed(parse, log).items() if status not in _FAILED}
    failed, groups = _reported(log, parse), set()
    for status, name in _PYTEST.findall(log):
        if "::" not in name:  # a file that could not be collected has failed with all its tests
            groups.add(name)
        elif status == "FAILED":
            failed.add(name)
    for name, what, where, docstring in _UNITTEST.findall(log):
        failed.update((name, docstring.strip()))
        if what in ("setUpClass", "setUpModule"):  # the set-up failed, and with it all tests of its class or module
            groups.add(where)
        elif where.startswith("unittest.loader."):
            groups.add(what)
    failed.update(_SYMPY.findall(log))
    return next((test for test in tests if has(passed, test) and (has(failed, test) or groups & _around(test))), "")


def _around(test: str) -> set[str]:
    """Return what a test is part of: pytest's file (FILE::NAME), unittest's modules and class (NAME (MODULE.CLASS)).

    Rust's modules (MODULE::NAME) are none of it.
    """
    file, within, _ = test.partition("::")
    inside = re.search(r" \(([\w.]+)\)$", test)
    words = inside[1].split(".") if inside else []
    return {file} if within and "." in file else {".".join(words[: length + 1]) for length in range(len(words))}


def _reported(log: str, parse: Parse) -> set[str]:
    """Return the tests that the parser reports as failed when it reads each line alone, or all lines without a pass.

    Reading several lines is for names that are put together from them (a suite's and a test's).
    """
    lines = log.split("\n")
    told = {line: found for line in set(lines) if (found := _parsed(parse, line))}
    passes = {line for line, found in told.items() if any(status in _PASSED for status in found.values())}
    rest = _parsed(parse, "\n".join(line for line in lines if line not in passes))
    return {name for found in (*told.values(), rest) for name, status in found.items() if status in _FAILED}


def _parsed(parse: Parse, text: str) -> Mapping[str, str]:
    try:
        return parse(text)
    except Exception:  # a parser that reads a log as a whole, like JSON, raises for a part of it
        return _UNREAD
