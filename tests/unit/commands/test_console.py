"""The command ccrl starts every program that is for users, and completes what people type."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl.config.compose import CONFIGS
from rl.config.overrides import options
from rl.console import USES, completions
from tests.unit.commands.test_help import PROGRAMS

ROOT = Path(__file__).parents[3]
# Steps of an experiment's preparation, and a simulation that docs name.
ELSEWHERE = {
    "rl.quickstart.policy",
    "rl.quickstart.prepare",
    "rl.quickstart.tasks",
    "rl.plan.schedules",
}


def ccrl(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from rl.console import main; main()", *words]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)


def test_no_program_is_hidden() -> None:
    modules = [use.module for use in USES.values()]
    assert len(set(modules)) == len(modules) and all(map(importlib.util.find_spec, modules))
    own = {path.removesuffix(".py").removesuffix("/__main__").replace("/", ".") for path in PROGRAMS}
    own = {module for module in own if not module.startswith(("scripts.", "examples."))}
    assert own - ELSEWHERE | {"rollout.audit"} == set(modules)


def test_a_use_is_the_program() -> None:
    for words in (["plan"], ["tasks", "overlap"], ["teach", "bugs"]):
        module = USES[" ".join(words)].module
        program = subprocess.run([sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True)
        assert ccrl(*words, "--help").stdout == program.stdout != ""


def test_what_is_no_use_is_told() -> None:
    shown, wrong = ccrl(), ccrl("tasks", "mak", "x")
    assert shown.returncode == 0 and all(f"  {name} " in shown.stdout for name in USES)
    assert len(shown.stdout.splitlines()) < 45
    assert wrong.returncode == 2 and wrong.stderr.startswith("ccrl: there is no use 'tasks'; did you mean tasks make?")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("ccrl tas", ["tasks"]),
        ("ccrl tasks a", ["admit"]),
        ("ccrl teach ", ["bugs", "restate"]),
        ("ccrl train sandb", [f"sandbox={one}" for one in options("sandbox", [CONFIGS])]),
        ("ccrl train +experiment=", options("experiment", [CONFIGS])),
        ("ccrl evaluate policy=x scale=", options("scale", [CONFIGS])),
        ("ccrl nothing ", []),
    ],
)
def test_words_are_completed(line: str, found: list[str]) -> None:
    assert completions(line) == found
    assert ccrl("completion", "ccrl", "", "", COMP_LINE=line).stdout.split() == found
