"""The attack suites share a task worth attacking, and the kinds of boxes that it is graded in."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rewards.task import Task
from rl.setup import rules_from
from tests.boxes.kinds import param
from tests.sandboxes import REPOSITORY, make_snapshot

RULES = rules_from(OmegaConf.create({"grading": OmegaConf.load(REPOSITORY / "configs/grading/default.yaml")}))

# Containers are root's, without a user namespace: of all users that a box may have, the one with the most to misuse.
GRADED_IN = ("bwrap", "docker")
# Importing this Python's own plugins takes 3 s; one that an attack brings is loaded all the same.
_PLUGINS = " ".join(f"-p no:{plugin.name}" for plugin in entry_points(group="pytest11"))
PYTEST = "python -m pytest"


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
