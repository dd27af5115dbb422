"""This module tests realcode: exchanges that undo themselves, functions that stand alone, an expert that tries, tasks
of puzzles.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers
from transformers import AutoModelForCausalLM

from rl.quickstart.realcode.drills import Drills
from rl.quickstart.realcode.functions import Function, alone
from rl.quickstart.realcode.policy import PIECES, make
from rl.quickstart.realcode.script import DONE, STOPS, TRIES, TryingScript
from rl.quickstart.realcode.swaps import Swap, swaps
from rl.quickstart.realcode.tasks import Puzzle, _puzzle, task_of

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
def test_tokens_are_cut_alike_in_the_file_and_in_the_command(swap: Swap):
    cut = pre_tokenizers.Split(Regex(PIECES), "isolated").pre_tokenize_str
    place = [piece for piece, _ in cut(swap.old + swap.after)]
    for text in (SOURCE, swap.command("module.py")):
        pieces = [piece for piece, _ in cut(text)]
        assert any(pieces[at : at + len(place)] == place for at in range(len(pieces)))


@pytest.mark.parametrize("swap", swaps(SOURCE), ids=str)
def test_sed_exchanges_what_is_meant(swap: Swap, tmp_path: Path):
    changed = swap.applied(SOURCE)
    ast.parse(changed)
    (back,) = [one for one in swaps(changed) if one.applied(changed) == SOURCE]
    file = tmp_path / "module.py"
    file.write_text(SOURCE)
    for one, text in ((swap, changed), (back, SOURCE)):
        subprocess.run(one.command("module.py"), shell=True, check=True, cwd=tmp_path)
        assert file.read_text() == text


@given(st.text(st.sampled_from("if not x<>=+-*is\n    0True'\"\\()#\té],:")))
def test_any_text_has_exchanges_or_none(text: str):
    for swap in swaps(text):
        changed = swap.applied(text)
        assert changed != text
        assert changed == text.replace(swap.old + swap.after, swap.new + swap.after)


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


@pytest.fixture
def puzzle() -> Puzzle:
    function = Function("thing-1.0", "MIT", "thing.py", "clamp", SOURCE, CASES)
    (fix,) = [one for one in swaps(BROKEN) if one.applied(BROKEN) == SOURCE]
    found = _puzzle(function, BROKEN, fix, GOT, [["0", "0", "5", "0"], None])
    assert found is not None
    return found


def test_a_puzzle_shows_one_call_and_hides_others(puzzle: Puzzle, tmp_path: Path):
    assert puzzle.statement == "clamp(0) gives -1, not 0."
    assert puzzle.failing == (("clamp(0, 0)", "0"),)
    assert set(puzzle.passing) == {("clamp(5)", "4"), ("clamp(-3)", "0")}
    task = task_of(puzzle, 3, "0" * 40, tmp_path)
    assert "clamp(0)" not in task.eval_script and task.repo == "pypi/thing" and task.version == "1.0"


def test_results_that_the_hidden_tests_take_for_equal_show_no_bug():
    function = Function("thing-1.0", "MIT", "thing.py", "clamp", SOURCE, CASES)
    (fix,) = [one for one in swaps(BROKEN) if one.applied(BROKEN) == SOURCE]
    assert _puzzle(function, BROKEN, fix, ["0.0", "False", "4", "0"], []) is None
    found = _puzzle(function, BROKEN, fix, ["2", "False", "4.0", "1"], [])
    assert found is not None and found.statement == "clamp(0) gives 2, not 0."
    assert found.failing == (("clamp(-3)", "0"),)


@pytest.mark.parametrize(("source", "status", "said"), [(SOURCE, 0, "ok"), (BROKEN, 1, "clamp(0) gives -1")])
def test_the_check_runs_the_call_that_is_shown(source: str, status: int, said: str, puzzle: Puzzle, tmp_path: Path):
    for name, text in {**puzzle.files(), "module.py": source}.items():
        (tmp_path / name).write_text(text)
    done = subprocess.run([sys.executable, "check.py"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, (done.stdout + done.stderr).strip()) == (status, said)


CALL = re.compile(r"<function=(\w+)>\n(.*?)</function>", re.DOTALL)
SED = re.compile(r"(git checkout -q module\.py; )?sed -i 's/([^/]+)/([^/]+)/' module\.py")
PARAMETER = re.compile(r"<parameter=(\w+)>\n(.*?)\n</parameter>\n", re.DOTALL)


def play(seed: str, statement: str, right: str, stops: float = STOPS) -> tuple[list[str], str]:
    """Answer a script's calls as Claude Code does; return the names of its calls, and the file at the end."""
    script, prompt, text, calls = TryingScript(seed, stops), f"<|im_start|>user\n{statement}", BROKEN, []
    while found := CALL.search(reply := script(prompt)):
        given = dict(PARAMETER.findall(found[2]))
        calls.append(found[1])
        if found[1] == "Read":
            result = "\n".join(f"{number}\t{line}" for number, line in enumerate(text.split("\n"), 1))
        elif edit := SED.fullmatch(given["command"]):
            text = BROKEN if edit[1] else text
            assert text.count(edit[2]) == 1 and edit[2] != edit[3]
            text, result = text.replace(edit[2], edit[3]), "(Bash completed with no output)"
            calls[-1] = "sed"
        else:
            assert given == {"command": "python3 check.py"}
            result = "ok" if text == right else "Exit code 1\nclamp(0) gives -1"
        prompt += f"{reply}<tool_response>\n{result}\n</tool_response>"
    assert reply == DONE
    return calls, text


def test_the_expert_tries_and_makes_mistakes(puzzle: Puzzle):
    played = [play(str(seed), puzzle.statement, SOURCE) for seed in range(300)]
    assert play("7", puzzle.statement, SOURCE) == played[7]
    repaired = sum(text == SOURCE for _, text in played)
    assert 0.05 < repaired / 300 < 0.4  # there are a dozen places
    assert {calls[0] for calls, _ in played} == {"Read"}
    assert max(play(str(seed), puzzle.statement, "", 0.0)[0].count("sed") for seed in range(20)) == TRIES
    assert min(len(calls) for calls, _ in played) == 2  # an edit that is not checked


def test_the_expert_ends_where_it_cannot_go_on():
    script = TryingScript("1")
    assert script("<|im_start|>user\nHello") == DONE
    start = "<|im_start|>user\nclamp(0) gives -1, not 0."
    assert script(start + "<tool_response>\nFile does not exist.\n</tool_response>") == DONE


def test_drills_are_read_and_exchanged_as_the_expert_does():
    drills = Drills([SOURCE, MODULE])
    chat = drills.exchanges("1")
    assert chat == drills.exchanges("1") != drills.exchanges("2")
    text = "\n".join(line.partition("\t")[2] for line in chat[3]["content"].split("\n"))
    steps = re.findall(r"s/([^/]+)/([^/]+)/", chat[4]["content"])
    places = {(one.old + one.after, one.new + one.after) for one in swaps(text)}
    assert len(places) >= 3 and set(steps) == places and len(steps) == len(places)
    assert f"sed -i 's/{steps[0][0]}/" in chat[4]["content"]
    sed = [SED.search(str(one["content"])) for number in range(20) for one in drills.messages(str(number))]
    assert sum(one is not None for one in sed) > 20


def test_the_policy_repeats_what_it_has_read_before_it_is_trained(tmp_path: Path):
    make(tmp_path / "policy", 1, [SOURCE, MODULE])
    make(tmp_path / "same", 1, [SOURCE, MODULE])
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("policy", "same")]
    assert weights[0] == weights[1]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    words = torch.randint(0, model.config.vocab_size, (8, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        said = model(torch.cat([words, words], dim=1)).logits[:, 64:-1].argmax(-1)
    assert (said == words[:, 1:]).float().mean() > 0.5  # by chance: 0.002
