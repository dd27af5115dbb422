"""Groups of tests: what they depend on, when they are stale, and which of them continuous integration runs."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import inputs, reads, runner
from tests.lacks import LACKS
from tests.runner import GROUPS, MAKE_TEST, Reports, Session, Tally


def test_every_test_is_in_one_group() -> None:
    files = [str(path.relative_to(runner.ROOT)) for path in (runner.ROOT / "tests").rglob("test_*.py")]
    plain = [name for name in GROUPS if not GROUPS[name].overlay]
    assert [file for file in files if sum(runner.group_of(file, [name]) != "" for name in plain) != 1] == []
    assert set(MAKE_TEST) < set(plain)
    file, _, test = runner.ALWAYS.partition("::")
    assert f"def {test}(" in (runner.ROOT / file).read_text() and runner.group_of(file, plain) == "cluster"


# The colons keep these from being names of files in this file, too.
@pytest.mark.parametrize(
    ("name", "has", "lacks"),
    [
        (
            "training",
            ":rl/train/trainer.py :rl/train/agent_loop.py :rl/cpu/platform.py :configs/train.yaml",
            ":docs/status.md",
        ),
        ("training", ":rollout/sandbox/seal.sh :rl/quickstart/template.jinja", ":rl/view/server.py"),
        ("proxy", ":rollout/proxy/session.py :tests/integration/conftest.py", ":rl/train/trainer.py"),
        ("browser", ":rl/view/static/view.js :tests/vendor/axe.min.js", ":rl/train/trainer.py"),
        ("cluster", ":scripts/slurm/train.sbatch :rl/cluster/probe.py", ":rl/view/server.py"),
        ("traces", ":constraints/llamafactory.txt :constraints/trainers.txt", ":docs/traces.md"),
        ("gpu-pins", ":constraints/gpu.txt :rl/train/trainer.py", ":docs/status.md"),
        ("tasks", ":examples/proxy_alone/start.sh :rl/data/make/trials.py", ":rl/train/trainer.py"),
    ],
)
def test_what_a_group_depends_on(name: str, has: str, lacks: str) -> None:
    found = {f":{path}" for path in runner.inputs_of(name)}
    assert set(has.split()) <= found and not set(lacks.split()) & found


SOURCE = '''
"""See docs/metrics.md and `python -m rl.view`."""
from __future__ import annotations
from typing import TYPE_CHECKING
import rl.data, json
from rollout import audit
if TYPE_CHECKING:
    from rl.train import trainer
def f(name):
    """This names rl.report."""
    import rewards.task
    start("-m", "rl.evaluate")
    read(ROOT / "configs" / "agent" / name, ROOT / "tests" / "kit.py")
    return f"{name}: see docs/metrics.md" if name else "pkg://rl.train.dataset"
'''


def test_what_python_leads_to() -> None:
    found = set(inputs._by_python("rl/made.py", ast.parse(SOURCE)))
    assert {path for path in found if not path.startswith("configs/agent/")} == {
        *("rl/data/__init__.py", "rollout/audit/__init__.py", "rewards/task.py", "tests/kit.py", "rl/train/dataset.py"),
        *("rl/evaluate/__init__.py", "rl/evaluate/__main__.py"),
    }
    assert "configs/agent/claude_code.yaml" in found


def test_commands_stand_in_strings_of_tests() -> None:
    tree = ast.parse("run('timeout 5 python -m rl.plan X; bash scripts/slurm/common.sh')")
    assert list(inputs._by_python("rl/made.py", tree)) == []
    found = set(inputs._by_python("tests/made.py", tree))
    assert found == {"rl/plan/__init__.py", "rl/plan/__main__.py", "scripts/slurm/common.sh"}


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository in which the groups a, b and c depend on a file each."""
    for name in "abc":
        (tmp_path / name).write_text("1")
    (tmp_path / "tests").mkdir()
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):  # as in a hook of git's
        monkeypatch.delenv(name, raising=False)
    for words in ("init -q", "config user.name x", "config user.email x@x", "add -A", "commit -qm first"):
        subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    monkeypatch.setattr(runner, "PASSED", tmp_path / "tests" / "passed.json")
    monkeypatch.setattr(runner, "GROUPS", {name: runner.Group("", (f"tests/{name}",)) for name in "abc"})
    monkeypatch.setattr(runner, "inputs_of", lambda name: frozenset([name]))
    runner._before.cache_clear()
    yield tmp_path
    runner._before.cache_clear()


def passes(clone: Path, name: str) -> None:
    """Let a group pass, and commit it."""
    runner.remember(name, runner.digest(name), 10)
    known = json.loads(runner.PASSED.read_text())
    known[name]["when"] = f"{len(known)}{known[name]['when']}"  # minutes apart
    known[name]["cpu_s"] += len(runner._git("log", "--format=%H").split())  # each time another line
    runner.PASSED.write_text(json.dumps(known))
    for words in (["add", "-A"], ["commit", "-qm", name]):
        subprocess.run(["git", *words], cwd=clone, check=True)
    runner._before.cache_clear()


def test_a_group_is_stale_while_its_inputs_are_not_those_that_passed(clone: Path) -> None:
    assert runner.stale("a") and runner.why("a") == "has never passed"
    passes(clone, "a")
    assert not runner.stale("a") and runner.why("a") == ""
    (clone / "a").write_text("2")
    (clone / "b").write_text("2")
    assert runner.stale("a") and runner.why("a") == "changed: a"
    (clone / "a").write_text("1")
    assert not runner.stale("a")


def test_a_group_that_has_not_run_for_ten_commits_is_due(clone: Path) -> None:
    passes(clone, "b")
    for number in range(10):
        assert not runner.due("b"), number
        passes(clone, "a")
    assert runner.due("b") and runner.why("b") == "not run for 10 commits of passed.json" and not runner.due("a")
    assert runner.choose(["a", "b", "c"], room_s=0, rate=1) == ["c", "b"]  # c has never passed
    assert runner.choose(["a", "b", "c"], room_s=0, rate=3) == ["b"]  # c takes 30 minutes
    passes(clone, "b")
    assert not runner.due("b")


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2000)), max_size=8), st.integers(-100, 3000))
def test_stale_groups_run_oldest_first_while_there_is_room(groups: list[tuple[bool, int]], room: int) -> None:
    known = {str(n): {"when": f"{99 - n}", "cpu_s": cost} for n, (_, cost) in enumerate(groups)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "passed", lambda: known)
        patch.setattr(runner, "stale", lambda name: groups[int(name)][0])
        patch.setattr(runner, "due", lambda name: False)
        chosen = runner.choose(known, room, rate=0.5)
    assert chosen == sorted(chosen, key=int, reverse=True) and all(groups[int(name)][0] for name in chosen)
    spent = sum(known[name]["cpu_s"] / 2 for name in chosen)
    assert not chosen or spent <= room
    for name in set(known) - set(chosen):
        older = sum(known[one]["cpu_s"] / 2 for one in chosen if int(one) > int(name))
        assert not groups[int(name)][0] or older + known[name]["cpu_s"] / 2 > room


def told(test: str, when: str, outcome: str, **more: Any) -> Any:
    more = {"longrepr": ("file", 1, f"Skipped: {more.get('why', '')}"), **more}
    outcomes = {one: one == outcome for one in ("passed", "failed", "skipped")}
    return types.SimpleNamespace(nodeid=test, when=when, **outcomes, **more)


def test_outcomes(tmp_path: Path) -> None:
    reports = Reports(str(tmp_path / "out"))
    for report in (
        told("good", "setup", "passed"), told("good", "call", "passed"), told("good", "teardown", "passed"),
        told("late", "call", "passed"), told("late", "teardown", "failed"),
        told("known", "call", "skipped", wasxfail="as expected"),
        told("without", "setup", "skipped", why="no NVIDIA GPU"),
        told("gone", "???", "failed"),  # its worker crashed
    ):  # fmt: skip
        reports.pytest_runtest_logreport(report)
    for report in (
        told("a", "", "passed"),
        told("not imported", "", "failed"),
        told("not here", "", "skipped", why="x"),
    ):
        reports.pytest_collectreport(report)
    reports.pytest_sessionfinish()
    assert json.loads((tmp_path / "out").read_text()) == {
        "good": "passed", "late": "failed", "known": "passed", "without": "Skipped: no NVIDIA GPU", "gone": "failed",
        "not imported": "failed", "not here": "Skipped: x",
    }  # fmt: skip


def test_only_what_passes_whole_is_remembered(clone: Path) -> None:
    def problem(unforeseen: tuple[str, ...] = (), **outcomes: str) -> str:
        other = Tally({"of no group": outcomes.pop("other", "passed")})
        session = Session(0, 1.0, {"a": Tally(outcomes), "": other}, unforeseen=list(unforeseen))
        return runner._problem("a", before, session)

    before = runner.digest("a")
    assert problem(x="passed", y="Skipped: no NVIDIA GPU") == ""
    assert problem(x="passed", y="failed") == "1 failed, 1 passed"
    assert problem(y="Skipped: no NVIDIA GPU") == "0 failed, 0 passed"
    assert problem(x="passed", other="failed") == "of no group failed"
    assert LACKS in problem(x="passed", y=f"Skipped: {LACKS}podman")
    assert "docs/none.md" in problem(("docs/none.md",), x="passed")
    (clone / "a").write_text("2")
    assert "meanwhile" in problem(x="passed")


def test_what_was_read_is_seen(clone: Path) -> None:
    for name, text in (("untracked", ""), (".gitignore", "ignored"), ("ignored", "")):
        (clone / name).write_text(text)
    try:
        reads.forget(clone)
    except reads.UnknownError as error:
        pytest.skip(str(error))
    assert reads.read(clone) == {".gitignore"}  # by git
    for name in ("b", "untracked", "ignored"):
        (clone / name).read_text()
    assert reads.read(clone) == {"b", "untracked", ".gitignore"}
    reads.forget(clone)
    subprocess.run(["cat", clone / "c"], stdout=subprocess.DEVNULL, check=True)
    assert reads.read(clone) == {"c", ".gitignore"}


def test_where_reads_are_not_known_nothing_is_remembered(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_pytest", lambda *_: Session(0, 1.0, {"a": Tally({"x": "passed"})}))
    shutil.rmtree(clone / ".git")
    with pytest.raises(reads.UnknownError):
        reads.forget(clone)
    assert runner.run(["a"]).status == 0 and not runner.passed()


def test_an_environment_that_cannot_be_made_fails_its_group(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "GROUPS", {"a": runner.Group("", ("tests/a",), scripts=("false",))})
    (failed,) = runner.run(["a"]).groups.values()
    assert failed.outcomes == {"false": "failed"}


def test_paths_among_arguments() -> None:
    here = f"tests/unit/commands/{Path(__file__).name}"
    given = ["-k", "tests", "--deselect", here, f"{here}::x", f"./{here}", "tests", "rl", "-q"]
    assert runner._paths(given) == [here, here, "tests"]


def test_what_git_ignores_is_no_input() -> None:
    ignored = inputs.ROOT / "scripts" / "slurm" / "site.sh"
    assert str(ignored.relative_to(inputs.ROOT)) not in inputs._files("scripts") and inputs._files("scripts")
