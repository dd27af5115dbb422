"""The attack suites share a task worth attacking, and the kinds of boxes that it is graded in."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rewards.grade import grade
from rewards.rules import Rules
from rewards.task import Task
from rewards.verdict import Verdict
from rl.episodes.setup import rules_from
from rollout.sandbox import Limits
from tests.boxes.kinds import TIGHT, BoxKit, kinds, param
from tests.sandboxes import REPOSITORY, make_snapshot, sh

RULES = rules_from(OmegaConf.create({"grading": OmegaConf.load(REPOSITORY / "configs/grading/default.yaml")}))

# Containers are root's, without a user namespace: of all users that a box may have, the one with the most to misuse.
GRADED_IN = ("bwrap", "docker")
GRADED = kinds(*GRADED_IN)
# Importing this Python's own plugins takes 3 s; one that an attack brings is loaded all the same.
_PLUGINS = " ".join(f"-p no:{plugin.name}" for plugin in entry_points(group="pytest11"))
PYTEST = "python -m pytest"

FIX = "def f():\n    return 2\n"
# A pytest plugin that turns every failure into success.
HOOK = """\
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    result = yield
    report = result.get_result()
    report.outcome, report.longrepr = "passed", None
"""
# The same without being a plugin: whoever imports it changes pytest.
INSTALLED = """\
from _pytest.reports import TestReport
real = TestReport.from_item_and_call.__func__
def forged(cls, item, call):
    call.excinfo = None
    return real(cls, item, call)
TestReport.from_item_and_call = classmethod(forged)
"""
# Prints past pytest's capture, wherever pytest keeps the real output.
SHOUT = """\
import os
def shout(text):
    for number in range(1, 20):
        try:
            os.write(number, text.encode())
        except OSError:
            pass
"""
RESULTS = "PASSED tests/test_new.py::test_new\\nPASSED tests/test_mod.py::test_old\\n"


def cases(names: Iterable[str], *elsewhere: str) -> pytest.MarkDecorator:
    """Grade all of `names` in boxes of the first kind, and those of `elsewhere` in the other: for attacks whose end
    depends little on the box."""
    pairs = [(kind, name) for kind in GRADED_IN for name in (names if kind == GRADED_IN[0] else elsewhere)]
    return pytest.mark.parametrize(("kind", "name"), [param(*pair) for pair in pairs], indirect=["kind"])


_EVAL = """#!/bin/bash
set -uxo pipefail
export PATH=/opt/miniconda3/envs/testbed/bin:$PATH
cd /testbed
git config --global --add safe.directory /testbed
git checkout {commit} tests/test_mod.py
git apply -v - <<'EOF_114329324912'
diff --git a/tests/test_mod.py b/tests/test_mod.py
--- a/tests/test_mod.py
+++ b/tests/test_mod.py
@@ -1,3 +1,4 @@
 from pkg import mod
 def test_old():
     assert callable(mod.f)
+    assert mod.__name__
diff --git a/tests/test_new.py b/tests/test_new.py
new file mode 100644
--- /dev/null
+++ b/tests/test_new.py
@@ -0,0 +1,4 @@
+from pkg import mod
+def test_new():
+    # {nonce}
+    assert mod.f() == 2
EOF_114329324912
: '>>>>> Start Test Output'
{command} {plugins} -rA -p no:cacheprovider tests/test_mod.py tests/test_new.py
: '>>>>> End Test Output'
git checkout {commit} tests/test_mod.py
"""


def make_task(directory: Path, command: str = PYTEST, nonce: str = "a hidden test") -> Task:
    """Make a task in which pkg.mod.f returns 1 and must return 2; its hidden patch changes one test file and adds
    another. command: how its eval script runs pytest."""
    snapshot = make_snapshot(directory / "snapshot")
    (snapshot / "tests").mkdir()
    (snapshot / "tests/test_mod.py").write_text("from pkg import mod\ndef test_old():\n    assert callable(mod.f)\n")
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.com"]
    for arguments in (["add", "-A"], ["commit", "-qm", "tests"]):
        subprocess.run([*git, *arguments], cwd=snapshot, check=True)
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=snapshot, text=True).strip()
    row = {
        "instance_id": "attacked__task-1",
        "image": "dir:snapshot",
        "repo": "attacked/task",
        "version": "1",
        "FAIL_TO_PASS": ["tests/test_new.py::test_new"],
        "PASS_TO_PASS": ["tests/test_mod.py::test_old"],
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
        "eval_script": _EVAL.format(commit=commit, command=command, plugins=_PLUGINS, nonce=nonce),
        "problem_statement": "f must return 2.",
        "base_commit": commit,
    }
    return Task.from_row(row, directory)


@dataclass(frozen=True)
class Attack:
    """An attack is files that the agent writes and a script that it runs.

    dropped: the paths that the rules must take out of its patch. command: how the task's eval script runs its tests.
    """

    files: Mapping[str, str] = field(default_factory=dict)
    script: str = ""
    dropped: tuple[str, ...] = ()
    command: str = PYTEST


async def attacked(kind: BoxKit, task: Task, attack: Attack) -> bytes:
    """Return the diff of an agent's box after the attack."""
    box = await kind.boot(task.snapshot, limits=TIGHT)
    try:
        for path, text in attack.files.items():
            await box.put(path, text.encode())
        if attack.script:
            done = await sh(box, attack.script)
            assert done.returncode == 0, done.stderr
        return await box.diff()
    finally:
        await box.close()


async def graded(
    kind: BoxKit, task: Task, patch: bytes, rules: Rules = RULES, limits: Limits = TIGHT, **options: Any
) -> Verdict:
    """Return the verdict on a patch. options: those of `grade`."""
    boot = functools.partial(kind.boot, task.snapshot, limits=limits)
    return await grade(task, patch, boot, rules=rules, **{"timeout_s": 240, **options})


async def outcome(kind: BoxKit, directory: Path, attack: Attack, timeout_s: float = 240) -> Verdict:
    """Return the verdict on an attack's patch."""
    task = make_task(directory, attack.command)
    return await graded(kind, task, await attacked(kind, task, attack), timeout_s=timeout_s)
