"""The quickstart's tasks, graded in real sandboxes: the right edit resolves a task, and nothing else does."""

from __future__ import annotations

import collections
import functools
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rewards.grade import grade
from rewards.task import Task, load_tasks
from rewards.verdict import HOW_GRADED, Outcome, Reason
from rl.quickstart.tasks import CANDIDATES, FUNCTIONS, MODULES, _puzzles, make_tasks
from rollout.sandbox.local.box import Isolation, boot_local
from tests.sandboxes import BWRAP, ISOLATIONS, make_snapshot, sh


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tasks") / "made"
    make_tasks(out, seed=5, n_train=4, n_heldout=2)
    return out


def tasks_of(data: Path) -> list[Task]:
    return [*load_tasks(data / "train.parquet"), *load_tasks(data / "heldout.parquet")]


def module_of(task: Task) -> Path:
    return next(task.snapshot.glob("*.py"))


def cue_of(task: Task) -> str:
    found = re.fullmatch(r"(\w+)\(a, b\) in (\w+)\.py must return the (\w+) of a and b\.", task.problem_statement)
    assert found
    return found[3]


def replacing(task: Task, new: str) -> bytes:
    """Return a patch of the module's second line, written independently of the generator."""
    name, (head, old) = module_of(task).name, module_of(task).read_text().splitlines()
    return f"--- a/{name}\n+++ b/{name}\n@@ -1,2 +1,2 @@\n {head}\n-{old}\n+{new}\n".encode()


async def reason_of(task: Task, patch: bytes, isolation: Isolation, timeout_s: float = 60) -> Reason | None:
    boot = functools.partial(boot_local, task.snapshot, isolation=isolation)
    verdict = await grade(task, patch, boot, timeout_s=timeout_s, second_opinion=True)
    assert not HOW_GRADED.intersection(verdict.flags), verdict
    assert verdict.reward == (None if verdict.is_infra else float(verdict.outcome is Outcome.RESOLVED))
    return verdict.reason


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_only_the_right_expression_resolves(data: Path, isolation: Isolation) -> None:
    # The verdicts do not depend on the isolation, so one task is enough for one of the two.
    for task in tasks_of(data)[: None if isolation == "bwrap" else 1]:
        assert task.patch is not None
        assert await reason_of(task, task.patch.encode(), isolation) is None
        assert await reason_of(task, b"", isolation) is Reason.EMPTY_PATCH
        bug = module_of(task).read_text().split("return ")[1].strip()
        for cue, expression in CANDIDATES.items():
            if expression != bug:
                found = await reason_of(task, replacing(task, f"    return {expression}"), isolation)
                assert found is (None if cue == cue_of(task) else Reason.TESTS_FAILED), (task, expression)
        comment = replacing(task, f"    return {bug}  # no change")
        assert await reason_of(task, comment, isolation) is Reason.TESTS_FAILED


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_bad_patches_and_bad_code_do_not_resolve(data: Path, isolation: Isolation) -> None:
    task = tasks_of(data)[0]
    name = module_of(task).name
    wrong_context = f"--- a/{name}\n+++ b/{name}\n@@ -1,1 +1,1 @@\n-something else\n+x\n".encode()
    outside = b"--- /dev/null\n+++ b/../x\n@@ -0,0 +1 @@\n+x\n"
    for patch in (wrong_context, outside, b"no patch at all"):
        assert await reason_of(task, patch, isolation) is Reason.PATCH_APPLY_FAILED
    for code in ("    return (", "    raise SystemExit(0)", "    import os; os._exit(0)"):
        reason = await reason_of(task, replacing(task, code), isolation)
        assert reason in (Reason.TESTS_FAILED, Reason.LOG_UNPARSABLE), code
    endless = replacing(task, "    while True: pass")
    assert await reason_of(task, endless, isolation, timeout_s=2) is Reason.TEST_TIMEOUT
    # A file that shadows the standard library's unittest is not graded.
    shadow = b"--- /dev/null\n+++ b/unittest.py\n@@ -0,0 +1 @@\n+raise SystemExit('shadowed')\n"
    assert await reason_of(task, shadow, isolation) is Reason.FORBIDDEN_PATH_ONLY


async def test_a_missing_snapshot_is_an_infrastructure_failure(data: Path, tmp_path: Path) -> None:
    shutil.copy(data / "train.parquet", tmp_path)
    task = load_tasks(tmp_path / "train.parquet")[0]
    assert await reason_of(task, replacing(tasks_of(data)[0], "    return 1"), "none") is Reason.MISSING_SNAPSHOT


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_an_agents_edit_resolves_and_its_box_shows_no_hidden_test(data: Path, isolation: Isolation) -> None:
    """The edit is made in one box, and its diff is graded in another."""
    task = tasks_of(data)[0]
    box = await boot_local(task.snapshot, isolation=isolation)
    try:
        shown = await sh(box, "ls -A; cat *; git log --format=%H; git status --short")
        head = shown.stdout.decode()
        assert task.base_commit in head and not any(test in head for test in task.FAIL_TO_PASS)
        assert sorted(head.split("\n")[:4]) == sorted([".git", ".gitignore", "README.md", module_of(task).name])
        await sh(box, f"sed -i 's/return .*/return {CANDIDATES[cue_of(task)]}/' *.py && python3 -m compileall .")
        patch = await box.diff()
    finally:
        await box.close()
    assert await reason_of(task, patch, isolation) is None


@pytest.mark.parametrize("isolation", [BWRAP])
async def test_a_script_in_swebenchs_format(tmp_path: Path, isolation: Isolation) -> None:
    """The script changes to /testbed, applies a test patch, prints pytest's summary and resets the tree at the end."""
    snapshot = make_snapshot(tmp_path / "snapshot")
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=snapshot, text=True).strip()
    script = f"""#!/bin/bash
set -uxo pipefail
cd /testbed
git config --global --add safe.directory /testbed
git status
git apply -v - <<'EOF_114329324912'
diff --git a/test_mod.py b/test_mod.py
new file mode 100644
--- /dev/null
+++ b/test_mod.py
@@ -0,0 +1,5 @@
+from pkg import mod
+def test_new():
+    assert mod.f() == 2
+def test_old():
+    assert callable(mod.f)
EOF_114329324912
: '>>>>> Start Test Output'
PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 python -m pytest -rA -p no:cacheprovider test_mod.py
: '>>>>> End Test Output'
git checkout {commit} -- .
"""
    row = {
        "instance_id": "swe__form-1",
        "image": "dir:snapshot",
        "repo": "swe/form",
        "version": "1",
        "FAIL_TO_PASS": ["test_mod.py::test_new"],
        "PASS_TO_PASS": ["test_mod.py::test_old"],
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
        "eval_script": script,
        "problem_statement": "f must return 2.",
        "base_commit": commit,
    }
    task = Task.from_row(row, tmp_path)
    change = "--- a/pkg/mod.py\n+++ b/pkg/mod.py\n@@ -1,2 +1,2 @@\n def f():\n-    return 1\n+    return {}\n"
    assert await reason_of(task, change.format(2).encode(), isolation) is None
    assert await reason_of(task, change.format(3).encode(), isolation) is Reason.TESTS_FAILED


# --- what is generated


def test_the_shape_of_a_task(data: Path) -> None:
    expressions = "|".join(map(re.escape, CANDIDATES.values()))
    for task in tasks_of(data):
        module = module_of(task)
        assert sorted(path.name for path in task.snapshot.iterdir()) == sorted(
            [".git", ".gitignore", "README.md", module.name]
        )
        assert re.fullmatch(rf"def (\w+)\(a, b\):\n    return ({expressions})\n", module.read_text())
        assert len((task.snapshot / "README.md").read_text().splitlines()) == 1
        assert re.fullmatch(rf"quickstart__{module.stem}-\d{{4}}", task.instance_id)
        assert len(task.FAIL_TO_PASS) == 2 and len(task.PASS_TO_PASS) == 1
        assert "-" in "".join(task.FAIL_TO_PASS)
        status = subprocess.check_output(["git", "status", "--short"], cwd=task.snapshot)
        assert status == b""


def test_the_same_seed_gives_the_same_bytes(data: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rl.quickstart.tasks", "--out", str(tmp_path), "--seed", "5"]
    root = Path(__file__).resolve().parents[3]
    subprocess.run([*command, "--train", "4", "--heldout", "2"], check=True, cwd=root)
    for again in (False, True):
        if again:
            make_tasks(tmp_path, seed=5, n_train=4, n_heldout=2)  # replaces the files
        for name in ("train.parquet", "heldout.parquet"):
            assert (tmp_path / name).read_bytes() == (data / name).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["heldout.parquet", "repos", "train.parquet"]
    assert len(list((tmp_path / "repos").iterdir())) == 6


@pytest.mark.parametrize("seed", range(5))
def test_splits_are_balanced_and_disjoint(seed: int) -> None:
    train, heldout = _puzzles(random.Random(seed), 64, 32)
    for split in (train, heldout):
        counts = collections.Counter((puzzle.gold, puzzle.bug) for puzzle in split)
        assert len(counts) == 12 and max(counts.values()) - min(counts.values()) == 1
    names = [(puzzle.module, puzzle.function) for puzzle in [*train, *heldout]]
    assert len(set(names)) == 96 and len({puzzle.instance_id for puzzle in [*train, *heldout]}) == 96
    for puzzle in [*train, *heldout]:
        for expression in CANDIDATES.values():
            values = [eval(expression, {"a": case.a, "b": case.b}) for case in puzzle.failing]
            right = [value == case.expected for value, case in zip(values, puzzle.failing, strict=True)]
            assert all(right) if expression == puzzle.gold else not all(right)
            assert expression != puzzle.bug or not any(right)
        for expression in (puzzle.gold, puzzle.bug):
            case = puzzle.passing
            assert eval(expression, {"a": case.a, "b": case.b}) == case.expected


def test_names_are_distinct_and_not_in_the_standard_library(data: Path) -> None:
    assert (len(set(MODULES)), len(set(FUNCTIONS))) == (8, 24)
    assert not set(MODULES) & sys.stdlib_module_names
    with pytest.raises(ValueError):
        make_tasks(data.parent / "many", 0, 500, 100)
