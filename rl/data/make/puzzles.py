"""Repair tasks of functions, in each of which one word or operator is exchanged for its counterpart (``swaps``).

The repository of such a task is ``module.py`` and ``check.py``, which makes a few calls and says which of them is
wrong. The hidden tests are other calls, chosen so that every exchange after which one of these calls is wrong fails one
of them. Only reading the file tells which exchanges there are, and only understanding or trying tells which is right.
"""

from __future__ import annotations

import ast
import asyncio
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.checks.alike import overlaps
from rl.data.make import edits
from rl.data.make.functions import Function, harvest, observed
from rl.data.make.hidden import eval_script
from rl.data.make.prepare import prepare
from rl.data.make.runs import Bench
from rl.data.make.snippet import Snippet
from rl.data.make.statement import ShownFailure, statements
from rl.data.make.swaps import Swap, swaps

FILE = "module.py"
"""The file with the function, of each task."""

_FEWEST_SWAPS, _MOST_SWAPS = 2, 16
_OF_A_FUNCTION = 8  # tasks
_LONGEST_SHOWN = 160  # characters of a call, and of a result
_VISIBLE = 2  # calls that pass, in check.py
_HIDDEN = 3  # failing calls, and as many passing ones, as far as there are

_CHECK_FILE = """\
import module

CALLS = {calls}

for call, wanted in CALLS.items():
    try:
        given = repr(eval(call, vars(module)))
    except Exception as error:
        given = type(error).__name__
    if given != wanted:
        raise SystemExit(f"{{call}} gives {{given}}, not {{wanted}}")
print("ok")
"""

Case = tuple[str, str]
"""A call and what it returns, as source."""


@dataclass(frozen=True)
class FunctionPuzzle:
    """A puzzle of a function is one task before it is written.

    ``fix``: the swap of ``source`` that repairs it. ``shown``: the case of the statement, and what the call gives
    instead (``returns VALUE`` or ``raises ERROR``). ``visible``: more cases of check.py. ``failing``, ``passing``:
    hidden cases that the bug fails and passes.
    """

    function: Function
    source: str
    fix: Swap
    shown: tuple[Case, str]
    visible: tuple[Case, ...]
    failing: tuple[Case, ...]
    passing: tuple[Case, ...]

    @property
    def statement(self) -> str:
        """Return what the agent is told: the bug as somebody reports it who has seen it; "" if that tells all."""
        (call, want), got = self.shown
        example = ShownFailure(Snippet(f"from module import {self.function.name}", call), got, f"returns {want}")
        return statements([example], 1, (), (), (), self.patch()).get(2, "")

    def files(self) -> dict[str, str]:
        """Return the texts of the repository's files, by name."""
        calls = "".join(f"    {call!r}: {want!r},\n" for call, want in (self.shown[0], *self.visible))
        return {FILE: self.source, "check.py": _CHECK_FILE.format(calls=f"{{\n{calls}}}")}

    def patch(self) -> str:
        """Return the git patch that repairs it."""
        return edits.patch({FILE: self.source}, {FILE: self.fix.applied(self.source)})

    def row(self, name: str, commit: str) -> dict[str, Any]:
        """Return the task ``name`` without its column ``image``. commit: of its repository."""
        package, _, version = self.function.package.rpartition("-")
        cases = [*self.failing, *self.passing]
        names = [f"{self.function.name} {number}" for number in range(len(cases))]
        tests = ((test, call, want) for test, (call, want) in zip(names, cases, strict=True))
        return {
            "instance_id": name,
            "repo": f"pypi/{package}",
            "version": version,
            "base_commit": commit,
            "problem_statement": self.statement,
            "FAIL_TO_PASS": names[: len(self.failing)],
            "PASS_TO_PASS": names[len(self.failing) :],
            "log_parser": "parse_log_django",
            "eval_type": "pass_and_fail",
            "eval_script": eval_script(FILE.removesuffix(".py"), tests),
            "patch": self.patch(),
            "difficulty": next(f"up to {most} places" for most in (4, 8, 99) if len(swaps(self.source)) <= most),
            "licence": self.function.licence,
        }


def puzzles(spec: str, directory: Path, seed: int) -> list[FunctionPuzzle]:
    """Return the puzzles of NAME==VERSION. directory: keeps packages. Raises MakeError, SandboxError."""
    prepared = prepare(spec, directory, copies=True)
    bench = Bench(prepared.package.tree, prepared.venv)
    rng = random.Random(f"{seed}:{spec}")

    async def all_of() -> list[FunctionPuzzle]:
        return [puzzle for one in await harvest(prepared, bench) for puzzle in await puzzles_of(one, bench, rng)]

    return asyncio.run(all_of())


async def puzzles_of(function: Function, bench: Bench, rng: random.Random) -> list[FunctionPuzzle]:
    """Return the puzzles of a function. bench: boxes to run it in. Raises SandboxError."""
    places = swaps(function.source)
    if not _FEWEST_SWAPS <= len(places) <= _MOST_SWAPS:
        return []
    rng.shuffle(places)
    calls = [call for call, _ in function.cases]
    wrong = {swap: swap.applied(function.source) for swap in places}
    repairs = {swap: [(one, one.applied(source)) for one in swaps(source)] for swap, source in wrong.items()}
    sources = [source for swap in places for source in (wrong[swap], *(text for _, text in repairs[swap]))]
    answers = dict(zip(sources, (await observed(bench, [(sources, calls)]))[0], strict=True))
    found: list[FunctionPuzzle] = []
    for swap in places:
        others = [answers[text] for _, text in repairs[swap] if text != function.source]
        fix = [one for one, text in repairs[swap] if text == function.source]
        got = answers[wrong[swap]]
        if got is not None and len(fix) == 1 and (one := puzzle_of(function, wrong[swap], fix[0], got, others)):
            found.append(one)
    return found[:_OF_A_FUNCTION]


def puzzle_of(
    function: Function, source: str, fix: Swap, got: Sequence[str], others: Sequence[Sequence[str] | None]
) -> FunctionPuzzle | None:
    """Return the puzzle with cases that tell the right repair from the others, None if there are none.

    got: what the function with the bug gives. others: what it gives after each other repair; None: it does not run.
    """
    cases = sorted(range(len(function.cases)), key=lambda n: (sum(map(len, function.cases[n])) + len(got[n]), n))
    failing = [n for n in cases if not _equal(got[n], function.cases[n][1])]
    passing = [n for n in cases if n not in failing]
    if len(failing) < 2 or max(map(len, (*function.cases[failing[0]], got[failing[0]]))) > _LONGEST_SHOWN:
        return None
    shown, *hidden = failing
    visible = passing[1::2][:_VISIBLE]  # every second one, so that the hidden ones are of the same kind
    left = [n for n in passing if n not in visible]
    chosen = dict.fromkeys([*hidden[:_HIDDEN], *left[:_HIDDEN]])
    for answers in others:
        if answers is None:
            continue
        telling = [n for n in cases if n not in (shown, *visible) and not _equal(answers[n], function.cases[n][1])]
        if telling and not chosen.keys() & set(telling):  # else this repair is as good as the right one
            chosen[telling[0]] = None
    of = function.cases
    said = got[shown] if got[shown].startswith("raises ") else f"returns {got[shown]}"
    puzzle = FunctionPuzzle(
        function,
        source,
        fix,
        (of[shown], said),
        tuple(of[n] for n in visible),
        tuple(of[n] for n in chosen if n in failing),
        tuple(of[n] for n in chosen if n not in failing),
    )
    return puzzle if puzzle.statement else None


def _equal(one: str, other: str) -> bool:
    """Tell whether two results, as source, are equal for the hidden tests: so are 1, 1.0 and True."""
    if one == other:
        return True
    try:
        return bool(ast.literal_eval(one) == ast.literal_eval(other))
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return False


def apart(train: Sequence[FunctionPuzzle], heldout: Sequence[FunctionPuzzle]) -> list[FunctionPuzzle]:
    """Return the training puzzles that are not nearly the same as a held-out one."""

    def rows(puzzles: Iterable[FunctionPuzzle]) -> list[dict[str, str]]:
        return [
            {
                "instance_id": str(number),
                "repo": one.function.package,
                "patch": one.patch(),
                "problem_statement": one.statement,
            }
            for number, one in enumerate(puzzles)
        ]

    held = {text for one in heldout for text in (one.function.source, one.function.name)}
    near = {one.instance_id for one in overlaps(rows(train), rows(heldout)) if one.kind in ("diff", "statement")}
    return [
        one
        for n, one in enumerate(train)
        if str(n) not in near and held.isdisjoint((one.function.source, one.function.name))
    ]
