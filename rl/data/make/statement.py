"""The problem statement of a task: what goes wrong, as somebody reports it who has only seen it happen.

Everything in a statement was observed: what short programs give with the bug and without it. The edit that made the bug
is used for one thing only: to check that nothing of it is said.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rl.data.make.runs import Bench, Failure
from rl.data.make.snippet import Snippet, snippets

LEVELS = (1, 2, 3)
"""How much help a statement gives: 1 what should be, 2 what is instead, 3 more cases and where errors come from."""

_AT_ONCE = 8  # programs that are tried together, the shortest first, until each bug has enough of them
_MOST_SHOWN = 4  # of each bug
_LINES = 6  # of a gold patch, for each of which there is one more program
_LONGEST = 30  # lines of a gold patch, for each bug; what more of them do cannot be shown by a few programs
_TIMEOUT_S = 20.0
_ADDRESS = re.compile(r" at 0x[0-9a-f]+|/testbed|/tmp/")
_AROUND = ("list", "dict", "str", "repr", "len", "tuple", "set", "sorted")  # of a call that is meant
_LONG_ENOUGH = 12  # characters of a line of code that nobody writes by chance
_T = TypeVar("_T")


@dataclass(frozen=True)
class ShownFailure:
    """A ShownFailure is one that a program shows. observed, expected: ``returns VALUE`` or ``raises ERROR``. bug: which
    one of a combination it is, from 0. test: the function whose code the program is, a name without parameters."""

    snippet: Snippet
    observed: str
    expected: str
    bug: int = 0
    test: str = ""


async def show(
    bench: Bench,
    broken: Mapping[str, str],
    mended: Sequence[Mapping[str, str]],
    failures: Sequence[Failure],
    tests: Mapping[str, str],
) -> list[ShownFailure]:
    """Return programs that show one bug each: they answer as without any bug if this one is mended, and only then.

    broken: the files with all bugs. mended: for each bug, the files with all the others. tests: the sources of the
    tests' files. Programs that do not always answer the same are left out. Raises SandboxError, MakeError.
    """
    found: dict[str, tuple[str, Snippet]] = {}
    for failure in failures:
        path = failure.test.partition("::")[0]
        for one in snippets(tests[path], failure) if path in tests else ():
            found.setdefault(one.text, (failure.test.partition("[")[0], one))
    left = in_turn(sorted(found.values(), key=lambda one: len(one[1].text)), lambda one: one[0])
    shown: list[ShownFailure] = []
    counts = [0] * len(mended)
    while left and min(counts) < _MOST_SHOWN:
        now, left = left[:_AT_ONCE], left[_AT_ONCE:]
        programs = [one.program() for _, one in now]
        trees = (broken, broken, {}, *mended)
        answers = [await bench.scripts(files, programs, timeout_s=_TIMEOUT_S) for files in trees]
        for (test, one), *said in zip(now, *answers, strict=True):
            observed, again, expected, *others = (text.rstrip("\n").rpartition("\n")[2] for text in said)
            mends = [bug for bug, answer in enumerate(others) if answer == expected]
            told = (
                observed
                and expected
                and observed == again != expected
                and not _ADDRESS.search(f"{one.text} {observed} {expected}")
            )
            if told and len(mends) == 1 and counts[mends[0]] < _MOST_SHOWN:
                counts[mends[0]] += 1
                shown.append(ShownFailure(one, observed, expected, mends[0], test))
    return shown


def statements(
    shown: Sequence[ShownFailure],
    bugs: int,
    failures: Sequence[Failure],
    sources: Sequence[str],
    tests: Sequence[str],
    gold: str,
) -> dict[int, str]:
    """Return the statement of each level, which has a program for each bug; {} if there is one that none shows.

    bugs: how many there are. sources: the package's own files. tests, gold: what must not be said: no statement has a
    program that would tell the answer or name a test. The more lines are to be written, the more programs there are,
    each of another test as long as there are others: what no program shows is not told.
    """
    safe = [one for one in shown if not leaks(f"{_brief(one)}\n{_example(one, 2)}", tests, gold)]
    lines = sum(line.startswith("+") and not line.startswith("+++") for line in gold.split("\n"))
    most = min(_MOST_SHOWN, 1 + lines // (_LINES * bugs))
    safe.sort(key=lambda one: one.expected == "returns None")  # which tells least
    by_bug = [in_turn([one for one in safe if one.bug == bug], lambda one: one.test) for bug in range(bugs)]
    needed = 1 if bugs > 1 else max(1, min(most, len({test.partition("[")[0] for test in tests})))
    if min(len({one.test for one in some}) for some in by_bug) < needed or lines > _LONGEST * bugs:
        return {}
    levels: dict[int, str] = {}
    where = _where(failures, sources)
    for level in LEVELS:
        parts = [f"{bugs} things go wrong, each by itself."] if bugs > 1 else []
        for some in by_bug:
            parts += [_brief(some[0]), *(_example(one, level) for one in some[: _MOST_SHOWN if level > 2 else most])]
        if level > 2:
            if len(failures) > 1:
                parts.append(f"{len(failures)} checks of the test suite fail because of it.")
            if where:
                parts.append(where)
        levels[level] = "\n\n".join(part for part in parts if not leaks(part, tests, gold))
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


def in_turn(items: Sequence[_T], key: Callable[[_T], str]) -> list[_T]:
    """Return the first item of each key, then the second ones, and so on."""
    seen: Counter[str] = Counter()
    ranks = []
    for item in items:
        ranks.append(seen[key(item)])
        seen[key(item)] += 1
    return [items[at] for at in sorted(range(len(items)), key=ranks.__getitem__)]


def _callee(snippet: Snippet) -> str:
    """Return the function of the package that a program calls at its end, as it is written; "" if it calls none."""
    node = ast.parse(snippet.expression, mode="eval").body
    while isinstance(node, ast.Call) and ast.unparse(node.func) in _AROUND and len(node.args) == 1:
        node = node.args[0]
    name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    imported = re.search(rf"import .*\b{re.escape(name.partition('.')[0])}\b", snippet.before)
    return name if imported and len(name) < 60 and name.replace(".", "").isidentifier() else ""


def _brief(one: ShownFailure) -> str:
    name = _callee(one.snippet)
    subject = f"`{name}()`" if name else "This program"
    raised = re.match(r"raises (\w+)", one.observed)
    wanted = re.match(r"raises (\w+)", one.expected)
    if raised and wanted:
        what = "with a wrong message" if raised[1] == wanted[1] else f"where it should raise `{wanted[1]}`"
        return f"{subject} raises `{raised[1]}` {what}."
    if raised:
        return f"{subject} raises `{raised[1]}` where it should return a result."
    if wanted:
        return f"{subject} returns a result where it should raise `{wanted[1]}`."
    return f"{subject} gives a wrong result."


def _example(one: ShownFailure, level: int) -> str:
    observed = f"Observed: {_said(one.observed)}\n" if level > 1 else ""
    return f"```python\n{one.snippet.text}\n```\n\n{observed}Expected: {_said(one.expected)}"


def _said(outcome: str) -> str:
    kind, _, value = outcome.partition(" ")
    fence = "``" if "`" in value else "`"
    return f"{kind} {fence}{value}{fence}"


def _where(failures: Sequence[Failure], sources: Sequence[str]) -> str:
    """Return where in the package an error came from, as its traceback says."""
    for failure in failures:
        if failure.frames and failure.frames[-1][0] in sources:
            path, _, function = failure.frames[-1]
            return f"The traceback of the `{failure.type}` ends in `{function}` (`{path}`)."
    return ""
