"""This module tests tasks of functions: exchanges that undo themselves, functions that stand alone, puzzles."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.task import Task
from rl.data.make.functions import Function, alone
from rl.data.make.puzzles import FILE, FunctionPuzzle, apart, puzzle_of
from rl.data.make.swaps import Swap, swaps
from rl.traces.collect.expert import Edit, _command

SOURCE = """\
def clamp(x, low=0, high=10):
    if not x > low:
        return low
    for y in (0, True):
        x += y - 1
    if y is None or x in (3,):
        return
    return min(x, high * 2)
"""


def test_what_is_exchanged():
    found = {(swap.line + 1, swap.old, swap.new, swap.after) for swap in swaps(SOURCE)}
    assert found == {
        (2, "if not ", "if ", "x"),
        (2, " > ", " >= ", "low"),
        (4, "True", "False", "):"),
        (5, " += ", " -= ", "y"),
        (5, " - ", " + ", "1"),
        (6, "if ", "if not ", "y"),
        (6, " is ", " is not ", "None"),
        (6, " or ", " and ", "x"),
        (6, "3", "2", ",):"),
        (8, "min", "max", "(x"),
        (8, "2", "3", ")"),
    }


def test_what_is_there_twice_is_left():
    lines = [
        "    a = b + c + d",
        "    a[1] = b[0]",
        "    a = b[0] - c",
        "    a = x - c",
        "    f(*a)",
        "    if a < -b.c:",
    ]
    found = [(swap.line, swap.old, swap.after) for swap in swaps("\n".join(lines))]
    assert found == [(0, " + ", "c"), (0, " + ", "d"), (1, "1", "]"), (5, "if ", "a"), (5, "-", "b")]


@pytest.mark.parametrize("swap", swaps(SOURCE), ids=str)
def test_sed_exchanges_what_is_meant(swap: Swap, tmp_path: Path):
    changed = swap.applied(SOURCE)
    ast.parse(changed)
    (back,) = [one for one in swaps(changed) if one.applied(changed) == SOURCE]
    file = tmp_path / "module.py"
    file.write_text(SOURCE)
    for one, text in ((swap, changed), (back, SOURCE)):
        command = _command(Edit("module.py", one.line + 1, *one.texts))
        assert command.startswith("sed ")
        subprocess.run(command, shell=True, check=True, cwd=tmp_path)
        assert file.read_text() == text


@given(st.text(st.sampled_from("if not x<>=+-*is\n    0True'\"\\()#\té],:")))
def test_any_text_has_exchanges_or_none(text: str):
    for swap in swaps(text):
        changed = swap.applied(text)
        assert changed != text
        assert changed == text.replace(*swap.texts)


MODULE = '''
from __future__ import annotations
import os, json
from typing import Any
from .near import helper
LIMIT: int = 3
A = B = 1
A = 2

def small(x: int, *, most: "Any" = LIMIT) -> int:
    """Say it."""
    y: int = inner(x)
    return min(y, most)

def inner(x):  # a comment
    return len(json.dumps(x))

def uses_near(x): return helper(x)
def uses_twice(x): return x + A
@decorated
def has_decorator(x): return x
def uses_class(x): return Thing(x)
class Thing: pass
'''


def test_a_function_comes_with_what_it_needs_and_nothing_else():
    text = alone(ast.parse(MODULE), "small")
    assert text is not None
    assert text.split("\n")[:2] == ["import json", "LIMIT = 3"]
    assert '"""' not in text and "#" not in text and "int" not in text and "os, " not in text
    names: dict = {}
    exec(text, names)
    assert names["small"]("abc") == 3 and names["small"]("") == 2


@pytest.mark.parametrize("name", ["uses_near", "uses_twice", "uses_class", "has_decorator", "missing"])
def test_what_cannot_stand_alone_is_left_out(name: str):
    assert alone(ast.parse(MODULE), name) is None


BROKEN = SOURCE.replace("x > low", "x >= low")
CASES = (("clamp(0)", "0"), ("clamp(0, 0)", "0"), ("clamp(5)", "4"), ("clamp(-3)", "0"))
GOT = ["-1", "-1", "4", "0"]
FUNCTION = Function("thing-1.0", "MIT", "thing.py", "clamp", SOURCE, CASES)
(FIX,) = [one for one in swaps(BROKEN) if one.applied(BROKEN) == SOURCE]


@pytest.fixture
def puzzle() -> FunctionPuzzle:
    found = puzzle_of(FUNCTION, BROKEN, FIX, GOT, [["0", "0", "5", "0"], None])
    assert found is not None
    return found


REPORT = """\
`clamp()` gives a wrong result.

```python
from module import clamp
clamp(0)
```

Observed: returns `-1`
Expected: returns `0`"""


def test_a_puzzle_reports_one_call_and_hides_others(puzzle: FunctionPuzzle, tmp_path: Path):
    assert puzzle.statement == REPORT
    assert (puzzle.failing, puzzle.passing) == ((("clamp(0, 0)", "0"),), (("clamp(5)", "4"),))
    assert puzzle.visible == (("clamp(-3)", "0"),)
    assert puzzle.files()[FILE] == BROKEN
    task = Task.from_row({**puzzle.row("function__0003", "0" * 40), "image": "dir:repos/function__0003"}, tmp_path)
    assert (task.instance_id, task.repo, task.version) == ("function__0003", "pypi/thing", "1.0")
    assert "clamp(0)" not in task.eval_script and "clamp(-3)" not in task.eval_script
    assert "self.assertEqual(value('clamp(0, 0)'), 0)" in task.eval_script and '"""clamp 1"""' in task.eval_script
    assert (task.FAIL_TO_PASS, task.PASS_TO_PASS) == (("clamp 0",), ("clamp 1",))
    assert "-    if not x >= low:\n+    if not x > low:\n" in (task.patch or "")


def test_an_error_is_reported_as_one():
    found = puzzle_of(FUNCTION, BROKEN, FIX, ["raises TypeError", "raises TypeError", "4", "0"], [])
    assert found is not None and found.statement.endswith("Observed: raises `TypeError`\nExpected: returns `0`")


def test_each_repair_that_can_be_told_from_the_right_one_fails_a_hidden_call():
    """The call that tells it is hidden even if there are enough others."""
    cases = tuple((f"clamp({n})", str(n)) for n in range(12))
    got = [str(n + (n < 2)) for n in range(12)]
    other = [str(n + (n == 11)) for n in range(12)]
    few, more = (
        puzzle_of(Function("a-1", "MIT", "a.py", "clamp", SOURCE, cases), BROKEN, FIX, got, others)
        for others in ([], [other])
    )
    assert few is not None and more is not None
    assert ("clamp(11)", "11") not in few.passing and more.passing == (*few.passing, ("clamp(11)", "11"))


def test_results_that_the_hidden_tests_take_for_equal_show_no_bug():
    assert puzzle_of(FUNCTION, BROKEN, FIX, ["0.0", "False", "4", "0"], []) is None
    found = puzzle_of(FUNCTION, BROKEN, FIX, ["2", "False", "4.0", "1"], [])
    assert found is not None and "clamp(0)\n```\n\nObserved: returns `2`\n" in found.statement
    assert found.failing == (("clamp(-3)", "0"),)


@pytest.mark.parametrize(
    ("source", "status", "said"),
    [
        (SOURCE, 0, "ok"),
        (BROKEN, 1, "clamp(0) gives -1, not 0"),
        (SOURCE.replace("return low", "return high"), 1, "clamp(0) gives 10, not 0"),
        (SOURCE.replace("return low", "return missing"), 1, "clamp(0) gives NameError, not 0"),
        (SOURCE.replace("return low", "return low + (x < -2)"), 1, "clamp(-3) gives 1, not 0"),
    ],
)
def test_the_check_says_which_call_is_wrong(
    source: str, status: int, said: str, puzzle: FunctionPuzzle, tmp_path: Path
):
    for name, text in {**puzzle.files(), FILE: source}.items():
        (tmp_path / name).write_text(text)
    command = [sys.executable, "check.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, (done.stdout + done.stderr).strip()) == (status, said)


def test_what_is_held_out_is_not_trained_on(puzzle: FunctionPuzzle):
    """Neither a function of the same name or source, nor a change or a report that is nearly the same."""
    cases = tuple((call.replace("clamp", "limit"), want) for call, want in CASES)
    near = Function("other-1", "MIT", "a.py", "limit", SOURCE.replace("clamp", "limit"), cases)
    text = "def far(a, b):\n    return a + b\n"
    far = Function("other-1", "MIT", "b.py", "far", text, (("far(1, 1)", "2"), ("far(2, 3)", "5"), ("far(0, 0)", "0")))
    named = Function("other-1", "MIT", "c.py", "clamp", text.replace("far", "clamp"), far.cases)
    puzzles = [
        puzzle_of(near, BROKEN.replace("clamp", "limit"), FIX, GOT, []),
        puzzle_of(far, text.replace("+", "-"), Swap(1, 12, " - ", " + ", "b"), ["0", "-1", "0"], []),
        puzzle_of(named, named.source.replace("+", "-"), Swap(1, 12, " - ", " + ", "b"), ["0", "-1", "0"], []),
    ]
    training = [one for one in puzzles if one is not None]
    assert len(training) == 3
    assert [one.function.name for one in apart(training, [puzzle])] == ["far"]
