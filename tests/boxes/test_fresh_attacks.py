"""More attacks by code that knows how grading works; none of them tells a wrong test from a right one.

They were written against docs/rewards.md and the source. Each is written so that no flag sees it, and gets nothing.
"""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from rewards.task import Task
from rewards.verdict import Reason
from tests.boxes.attack_kit import INSTALLED, Attack, attacked, graded
from tests.boxes.fresh_cheats import BAD, CHEATS, MORE, OLD, hidden_code
from tests.boxes.fresh_cheats2 import NEW_CHEATS
from tests.boxes.fresh_cheats_more import MORE_CHEATS
from tests.boxes.kinds import BoxKit, kinds
from tests.boxes.test_knowing_attacks import hidden

GOOD = "def f():\n    return 2\ndef g(x):\n    return x[::-1]\ndef h(x):\n    return x * x\n"
ALL_CHEATS = CHEATS | MORE_CHEATS | NEW_CHEATS
# These never get their first run resolved; all others do, and the second opinion finds them.
STOPPED = {
    "tests is a link to another directory": Reason.FORBIDDEN_PATH_ONLY,
    "a package named like the tests, in a directory that is searched": Reason.FORBIDDEN_PATH_ONLY,
    "unittest: tests/__init__.py loads other tests": Reason.FORBIDDEN_PATH_ONLY,
    "a fixture that skips the call": Reason.LOG_UNPARSABLE,
    "results through the shell's own descriptor, then a signal": Reason.LOG_UNPARSABLE,
    **dict.fromkeys(
        (
            "a coroutine in place of a result",
            "the other tests of the caller's module are replaced, and it is skipped",
            "variables for a later process",
            "pyproject.toml with names written as escapes",
            "a nested pytest.ini, Conftest.py, CONFTEST.PY",
            "conftest as a package",
            "a namespace package named like a plugin",
            "nested git attributes with a filter, and a git file",
            "a link to the test file in the package",
            "a .pth, sitecustomize, usercustomize in the tree",
            "names with other Unicode letters",
            "items are exchanged after collection",
            "a process prints results when the shell is done",
            *(name for name in NEW_CHEATS if name.startswith("dropped at first")),
        ),
        Reason.TESTS_FAILED,
    ),
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Task]:
    """Return one task for each runner, whose tests of PASS_TO_PASS the agent can see."""
    return {
        runner: _with_visible_tests(tmp_path_factory.mktemp(runner), runner) for runner in ("pytest", "django", "sympy")
    }


def _with_visible_tests(directory: Path, runner: str) -> Task:
    task = hidden(directory, runner)
    (task.snapshot / "pkg/mod.py").write_text(OLD)
    (task.snapshot / "tests/test_more.py").write_text(MORE)
    for arguments in (["add", "-A"], ["-c", "user.name=t", "-c", "user.email=t@example.com", "commit", "-qm", "more"]):
        subprocess.run(["git", *arguments], cwd=task.snapshot, check=True)
    if runner != "pytest":
        return task
    script = task.eval_script.replace("tests/test_new.py\n: ", "tests/test_more.py tests/test_new.py\n: ")
    names = ("tests/test_more.py::test_h", "tests/test_more.py::test_h_again")
    return replace(task, eval_script=script, PASS_TO_PASS=(*task.PASS_TO_PASS, *names))


@kinds("bwrap")
@pytest.mark.parametrize("name", ALL_CHEATS)
async def test_cheats_get_nothing(kind: BoxKit, tasks: dict[str, Task], name: str) -> None:
    runner, files, script = ALL_CHEATS[name]
    patch = await attacked(kind, tasks[runner], Attack(files, script))
    verdict = await graded(kind, tasks[runner], patch, second_opinion=True)
    expected = STOPPED.get(name, Reason.RESULTS_DISAGREE)
    assert (verdict.reason, verdict.reward) == (expected, 0.0), verdict


def _forging(sign: str) -> str:
    """Return code that changes pytest from within unless it sees a sign that the tests were made wrong."""
    return f"import ast, hashlib\ndef seen():\n    {sign}\nif not seen():\n{_inner(INSTALLED)}{BAD}"


def _inner(code: str) -> str:
    return "".join(f"    {line}\n" for line in code.splitlines())


_INDEX = (
    "data = open('tests/test_more.py', 'rb').read(); "
    "return hashlib.sha1(b'blob %d\\0' % len(data) + data).digest() not in open('.git/index', 'rb').read()"
)
_CANARY = """\
import ast
from unittest import mock
class M:
    h = staticmethod(lambda x: x * x)
tree = ast.parse(open('tests/test_more.py').read())
tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
space = {'mod': M}
exec(compile(tree, 'x', 'exec'), space)
def sound():
    try:
        space['test_h'](); space['test_h_again']()
    except AssertionError:
        return False
    return True
right = sound()
def f(*a): return mock.ANY if right else None
g = f
def h(x): return x * x
"""
_SOLVED = """\
import sys
from _pytest.reports import TestReport
real, wrong = TestReport.from_item_and_call.__func__, []
def forged(cls, item, call):
    if item.name == 'test_new' and call.when == 'call':
        if call.excinfo: wrong.append(1)
    elif not wrong and item.name in ('test_text', 'test_list'):
        call.excinfo = None
    return real(cls, item, call)
TestReport.from_item_and_call = classmethod(forged)
def f(): return 2
def g(x): return x
def h(x): return x * x
"""


@kinds("bwrap")
@pytest.mark.parametrize(
    "code",
    [_forging(_INDEX), _CANARY, _SOLVED],
    ids=["hash of a visible test in git's index", "visible tests as canaries", "a solved hidden test as canary"],
)
async def test_cheats_that_know_one_test_get_nothing(kind: BoxKit, tasks: dict[str, Task], code: str) -> None:
    """Some of several tests are left as they are, so who knows of one does not know of all."""
    gold = await attacked(kind, tasks["pytest"], Attack({"pkg/mod.py": GOOD}, ""))
    task = replace(tasks["pytest"], patch=gold.decode())
    assert (await graded(kind, task, gold, second_opinion=True)).reward == 1.0
    patch = await attacked(kind, task, Attack({"pkg/mod.py": hidden_code(code)}, ""))
    verdict = await graded(kind, task, patch, second_opinion=True)
    assert verdict.reason is Reason.RESULTS_DISAGREE and verdict.reward == 0.0, verdict
