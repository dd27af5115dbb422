"""This module tests what tasks are exported as. Their verifier judges logs here; test_harbor.py has the containers."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rewards.task import MARKERS, Task, load_tasks
from rl.data import convert, export
from rl.quickstart.tasks import make_tasks


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Task, Path]]:
    """A task of the quickstart, and what it is exported as."""
    place = tmp_path_factory.mktemp("made")
    make_tasks(place / "tasks", 0, n_train=2, n_heldout=1)
    file = place / "tasks" / "train.parquet"
    assert export.main([str(file), "--base", "python-git:3", "--out", str(place / "out")]) == 0
    task = load_tasks(file)[0]
    yield task, place / "out" / task.instance_id


def judged(directory: Path, log: str, status: int = 0) -> str:
    """Return what the exported verifier makes of a log."""
    argv = [sys.executable, "-I", "-B", str(directory / "tests" / "judge.py"), str(status)]
    return subprocess.run(argv, input=log, capture_output=True, text=True, check=True).stdout


def test_the_snapshot_has_no_hidden_tests(made: tuple[Task, Path]) -> None:
    task, directory = made
    packed = directory / "environment" / "snapshot.tar.gz"
    with tarfile.open(packed) as tar:
        texts = {one.name: file.read() for one in tar if (file := tar.extractfile(one))}
        assert {(one.uid, one.gid, one.mtime) for one in tar} == {(0, 0, 0)}
    assert {"./README.md", "./.git/HEAD"} <= set(texts)
    hidden = [name.encode() for name in task.FAIL_TO_PASS]
    assert not [name for name, text in texts.items() if any(test in text for test in hidden)]
    assert {path.name for path in (directory / "environment").iterdir()} == {"Dockerfile", "snapshot.tar.gz"}
    assert all(name in (directory / "tests" / "eval.sh").read_text() for name in task.FAIL_TO_PASS)
    assert (directory / "environment" / "Dockerfile").read_text().startswith("FROM python-git:3\nUSER root\n")
    before = packed.read_bytes()
    export._pack(task.snapshot, packed)
    assert packed.read_bytes() == before


def test_the_solution_is_judged_as_here(made: tuple[Task, Path], tmp_path: Path) -> None:
    task, directory = made
    work = tmp_path / "work"
    subprocess.run(["git", "clone", "--quiet", str(task.snapshot), str(work)], check=True)
    script = (directory / "tests" / "eval.sh").read_text()

    def log() -> str:
        run = subprocess.run(["bash", "-c", script], cwd=work, stdout=-1, stderr=subprocess.STDOUT, text=True)
        return run.stdout

    failing = log()
    subprocess.run(["git", "apply", directory / "solution" / "gold.patch"], cwd=work, check=True)
    passing = log()
    assert (judged(directory, failing), judged(directory, passing)) == ("0\n", "1\n")
    assert judged(directory, passing, status=137) == "0\n"
    assert judged(directory, "") == "0\n"
    assert judged(directory, passing.replace(MARKERS[1], "")) == "0\n"
    assert judged(directory, f"{failing}{passing}") == "0\n"  # markers that the script did not print
    for run, reward in ((failing, "0\n"), (passing, "1\n")):  # lines that the parser cannot read, whoever prints them
        assert judged(directory, run.replace(MARKERS[0], f"{MARKERS[0]}\nFAIL:\nERROR:root:boom\n")) == reward
    name = task.FAIL_TO_PASS[0]
    assert judged(directory, passing.replace(f"{name} ... ok", f"{name} ... skipped 'x'")) == "0\n"
    assert judged(directory, passing.replace(f"{name} ... ok", f"{name} ... FAIL\n{name} ... ok")) == "0\n"


def test_harbors_verifier_has_the_history_and_the_environment_of_the_image(
    made: tuple[Task, Path], tmp_path: Path
) -> None:
    """It replaces the work tree of its box by the artifacts, which are without them."""
    task, _ = made
    snapshot, directory, work = tmp_path / "snapshot", tmp_path / "one", tmp_path / "work"
    shutil.copytree(task.snapshot, snapshot)
    (snapshot / ".venv" / "bin").mkdir(parents=True)
    (snapshot / ".venv" / "bin" / "python3.11").symlink_to(sys.executable)
    script = task.eval_script.replace("python3 ", ".venv/bin/python3.11 ")
    changed = replace(task, image=f"dir:{snapshot}", log_parser="parse_log_django", eval_script=script)
    export.write_task(changed, {}, "b", directory)

    def here(text: str) -> str:
        places = {"/testbed": work, "/kept.tar": tmp_path / "kept.tar", "/logs/verifier": tmp_path}
        for place, path in (places | {"/tests": directory / "tests"}).items():
            text = text.replace(place, str(path))
        return text

    def run(text: str) -> None:
        subprocess.run(["bash", "-c", here(text)], cwd=work, check=True, capture_output=True)

    with tarfile.open(directory / "environment" / "snapshot.tar.gz") as tar:
        tar.extractall(work, filter="tar")
    run((directory / "environment" / "Dockerfile").read_text().rpartition("RUN ")[2])
    run(f"git apply {directory}/solution/gold.patch; rm -r .git .venv; mkdir .git; echo mine >.git/config")
    run((directory / "tests" / "test.sh").read_text())
    assert (tmp_path / "reward.txt").read_text() == "1\n"
    assert "mine" not in (work / ".git" / "config").read_text()


def test_tasks_are_read_back(made: tuple[Task, Path], tmp_path: Path) -> None:
    task, directory = made
    assert convert.main(["harbor", str(directory.parent), "--out", str(tmp_path / "back.parquet")]) == 0
    back = {one.instance_id: one for one in load_tasks(tmp_path / "back.parquet")}[task.instance_id]
    assert (back.problem_statement, back.grader) == (task.problem_statement, "harbor")
    assert (back.asked["mode"], back.asked["network"], back.asked["solution"]) == ("separate", "", True)
    about = tomllib.loads((directory / "task.toml").read_text())
    assert about["metadata"] == {"repo": task.repo, "version": "1", "base_commit": task.base_commit}


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("quickstart__a-1", "quickstart/a-1"),
        ("plain", "claude-code-rl/plain"),
        ("pkg__init__", "claude-code-rl/pkg__init__"),
        ("-pkg___private..x", "pkg_/private.x"),
        ("_", "claude-code-rl/task"),
    ],
)
def test_names_are_what_harbor_accepts(name: str, theirs: str) -> None:
    assert export._name(name) == theirs


def test_what_cannot_be_exported_says_why(made: tuple[Task, Path], tmp_path: Path) -> None:
    task, _ = made
    for changed, why in (
        ({"grader": "harbor"}, "judged by harbor"),
        ({"eval_type": "fail_only"}, "judged by swebench, fail_only"),
        ({"image": "some:image"}, "it has an image"),
        ({"log_parser": "parse_log_gotest"}, "parse_log_gotest is none"),
        ({"eval_script": task.eval_script * 2}, "each marker once"),
        ({"image": "dir:."}, "no repository"),
    ):
        with pytest.raises(ValueError, match=why):
            export.write_task(replace(task, **changed), {}, "base", tmp_path / "one")
    assert not (tmp_path / "one").exists()


def test_an_environment_gets_the_python_of_the_base(made: tuple[Task, Path], tmp_path: Path) -> None:
    task, _ = made
    snapshot = tmp_path / "snapshot"
    for name in (".git", ".venv/bin"):
        (snapshot / name).mkdir(parents=True)
    (snapshot / ".venv" / "bin" / "python3.11").symlink_to("/somewhere/python3.11")
    export.write_task(replace(task, image=f"dir:{snapshot}", log_parser="parse_log_flask"), {}, "b", tmp_path / "one")
    assert "command -v python3.11" in (tmp_path / "one" / "environment" / "Dockerfile").read_text()


def test_directories_are_not_replaced(made: tuple[Task, Path], capsys: pytest.CaptureFixture[str]) -> None:
    task, directory = made
    file = task.base_dir / "train.parquet"
    assert export.main([str(file), "--base", "b", "--out", str(directory.parent)]) == 2
    assert export.main([str(directory), "--base", "b", "--out", "x"]) == 2
    assert "is there already" in capsys.readouterr().err


@pytest.mark.skipif(not importlib.util.find_spec("harbor"), reason="harbor is not installed")
def test_harbors_own_models_read_them(made: tuple[Task, Path]) -> None:
    from harbor.models.task.task import Task as Theirs  # ty: ignore[unresolved-import]

    task, directory = made
    assert Theirs.is_valid_dir(directory)
    theirs = Theirs(directory)
    assert theirs.name == task.instance_id.replace("__", "/") and theirs.instruction == task.problem_statement
    assert theirs.paths.solve_path.is_file()
