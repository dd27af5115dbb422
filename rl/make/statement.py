"""This module states the problem of a task: what goes wrong, as it is reported by somebody who has only seen it happen.

Everything in a statement was observed: what a short program gives with the bug and without it, or the words of a failed
assertion. The edit that made the bug is used for one thing only: to check that nothing of it is said.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl.make.runs import Bench, Failure
from rl.make.snippet import Snippet, snippet

LEVELS = (1, 2, 3)
"""How much help a statement gives: 1 says what fails, 2 shows how, 3 shows more cases and where errors come from."""

_MOST_TRIED = 6  # failures for which a program is looked for
_MOST_SHOWN = 4
_TIMEOUT_S = 20.0
_MOST_SAID = 12  # lines of an assertion's message
_ADDRESS = re.compile(r" at 0x[0-9a-f]+|/testbed|/tmp/")
_LONG_ENOUGH = 12  # characters of a line of code that nobody writes by chance


@dataclass(frozen=True)
class Shown:
    """A Shown is a failure that a program shows. observed, expected: ``returns VALUE`` or ``raises ERROR``."""

    snippet: Snippet
    observed: str
    expected: str


async def show(
    bench: Bench, broken: Mapping[str, str], failures: Sequence[Failure], tests: Mapping[str, str]
) -> list[Shown]:
    """Return programs that answer differently with the bug and without it, the shortest first.

    broken: the files with the bug. tests: the sources of the tests' files. Raises SandboxError, MakeError.
    """
    found = {}
    for failure in failures[: 4 * _MOST_TRIED]:
        path = failure.test.partition("::")[0]
        if path in tests and (one := snippet(tests[path], failure)):
            found.setdefault(one.text, one)
    tried = sorted(found.values(), key=lambda one: len(one.text))[:_MOST_TRIED]
    programs = [one.program() for one in tried]
    answers = [await bench.scripts(files, programs, timeout_s=_TIMEOUT_S) for files in (broken, {})] if tried else []
    shown = []
    for one, *said in zip(tried, *answers, strict=True) if tried else ():
        observed, expected = (text.rstrip("\n").rpartition("\n")[2] for text in said)
        if observed and expected and observed != expected and not _ADDRESS.search(observed + expected):
            shown.append(Shown(one, observed, expected))
    return shown[:_MOST_SHOWN]


def statements(
    shown: Sequence[Shown],
    failures: Sequence[Failure],
    sources: Sequence[str],
    tests: Sequence[str],
    gold: str,
) -> dict[int, str]:
    """Return the statement of each level. sources: the package's own files. tests, gold: what must not be said.

    A part that would tell the answer or name a test is left out; if no part is left, the statement is a general one.
    """
    levels: dict[int, str] = {}
    safe = [one for one in shown if not leaks(_example(one), tests, gold)]
    where = _where(failures, sources)
    for level in LEVELS:
        parts = [_brief(safe[0]) if safe else _general(failures)]
        if level > 1:
            parts += [_example(safe[0])] if safe else _words(failures, tests, gold)
        if level > 2:
            parts += [_example(one) for one in safe[1:]]
            if len(failures) > 1:
                parts.append(f"{len(failures)} checks of the test suite fail because of it.")
            if where:
                parts.append(where)
        text = "\n\n".join(part for part in parts if not leaks(part, tests, gold))
        levels[level] = text or "A function of this package no longer does what its documentation says."
    return levels


def leaks(text: str, tests: Sequence[str], gold: str) -> list[str]:
    """Return what a statement tells that it must not: names of hidden tests and their files, lines of the gold patch.

    tests: pytest's names. gold: the patch.
    """
    found = []
    for test in tests:
        path, *names = test.partition("[")[0].split("::")
        secret = {path, path.rpartition("/")[2], *names} | {path.rpartition("/")[2].removesuffix(".py")}
        found += [name for name in sorted(secret) if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)]
    said = re.sub(r"\s+", "", text)
    for line in gold.split("\n"):
        code = re.sub(r"\s+", "", line[1:])
        if line.startswith("+") and not line.startswith("+++") and len(code) >= _LONG_ENOUGH and code in said:
            found.append(line[1:].strip())
    return list(dict.fromkeys(found))


def _callee(expression: str) -> str:
    """Return the function that an expression calls, as it is written; "" if it calls none."""
    calls = [node for node in ast.walk(ast.parse(expression, mode="eval")) if isinstance(node, ast.Call)]
    names = [ast.unparse(node.func) for node in calls if isinstance(node.func, ast.Name | ast.Attribute)]
    names = [name for name in names if name not in ("list", "dict", "str", "repr", "len", "tuple", "set", "sorted")]
    return names[0] if names and len(names[0]) < 60 and names[0].replace(".", "").isidentifier() else ""


def _brief(one: Shown) -> str:
    name = _callee(one.snippet.expression)
    subject = f"`{name}()`" if name else f"`{one.snippet.expression}`" if len(one.snippet.expression) < 80 else "A call"
    raised = re.match(r"raises (\w+)", one.observed)
    wanted = re.match(r"raises (\w+)", one.expected)
    if raised and wanted:
        return f"{subject} raises `{raised[1]}` with a message or of a type that is not the right one."
    if raised:
        return f"{subject} raises `{raised[1]}` where it should return a result."
    if wanted:
        return f"{subject} returns a result where it should raise `{wanted[1]}`."
    return f"{subject} gives a wrong result."


def _example(one: Shown) -> str:
    return f"```python\n{one.snippet.text}\n```\n\nObserved: {_said(one.observed)}\nExpected: {_said(one.expected)}"


def _said(outcome: str) -> str:
    kind, _, value = outcome.partition(" ")
    fence = "``" if "`" in value else "`"
    return f"{kind} {fence}{value}{fence}"


def _general(failures: Sequence[Failure]) -> str:
    kinds = list(dict.fromkeys(failure.type for failure in failures if failure.type.isidentifier()))
    errors = [kind for kind in kinds if kind not in ("AssertionError", "Failed")]
    if errors:
        return f"Something that this package should do ends with `{errors[0]}`."
    return "This package gives a wrong result."


def _words(failures: Sequence[Failure], tests: Sequence[str], gold: str) -> list[str]:
    """Return what the failed assertions say of themselves, as far as it may be told."""
    for failure in failures:
        lines = [line for line in failure.message.split("\n") if not _ADDRESS.search(line)][:_MOST_SAID]
        text = "\n".join(lines).strip()
        if text and not leaks(text, tests, gold):
            if failure.type in ("AssertionError", "Failed"):
                return [f"This does not hold, but should:\n\n```\n{text}\n```"]
            return [f"The error is:\n\n```\n{failure.type}: {text}\n```"]
    return []


def _where(failures: Sequence[Failure], sources: Sequence[str]) -> str:
    """Return where in the package an error came from, as its traceback says."""
    for failure in failures:
        if failure.frames and failure.frames[-1][0] in sources:
            path, _, function = failure.frames[-1]
            return f"The traceback of the `{failure.type}` ends in `{function}` (`{path}`)."
    return ""
