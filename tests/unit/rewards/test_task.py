from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
import pytest

from rewards.task import Task, TaskError, load_tasks

SCRIPT = "#!/bin/bash\n: '>>>>> Start Test Output'\npytest\n: '>>>>> End Test Output'\n"


def row(**changes: Any) -> dict[str, Any]:
    return {
        "instance_id": "a__b-1",
        "image": "dir:repos/a",
        "repo": "a/b",
        "version": "1.0",
        "FAIL_TO_PASS": ["t1", "t2"],
        "PASS_TO_PASS": json.dumps(["t3"]),
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
        "eval_script": SCRIPT,
        "problem_statement": "Fix it.",
        "base_commit": "0" * 40,
        "patch": "diff",
        "hints_text": "not used",
    } | changes


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_load(tmp_path: Path) -> None:
    tasks = load_tasks(write(tmp_path / "t.parquet", [row(), row(instance_id="a__b-2")]))
    assert [task.instance_id for task in tasks] == ["a__b-1", "a__b-2"]
    assert (tasks[0].FAIL_TO_PASS, tasks[0].PASS_TO_PASS) == (("t1", "t2"), ("t3",))
    assert tasks[0].snapshot == (tmp_path / "repos/a").resolve()


@pytest.mark.parametrize("value", [["x"], ("x",), '["x"]', numpy.array(["x"], dtype=object)])
def test_test_lists_come_in_many_forms(value: Any, tmp_path: Path) -> None:
    assert Task.from_row(row(FAIL_TO_PASS=value), tmp_path).FAIL_TO_PASS == ("x",)


def test_a_row_survives_the_way_there_and_back(tmp_path: Path) -> None:
    task = Task.from_row(row(), tmp_path)
    assert Task.from_row(task.to_row(), tmp_path) == task
    assert load_tasks(write(tmp_path / "t.parquet", [task.to_row()])) == [task]


def test_the_patch_is_optional(tmp_path: Path) -> None:
    without = row()
    del without["patch"]
    assert load_tasks(write(tmp_path / "t.parquet", [without]))[0].patch is None


def test_setup_patch_and_hidden_paths(tmp_path: Path) -> None:
    plain = Task.from_row(row(), tmp_path)
    assert plain.setup_patch is None and plain.hidden_paths == ()
    task = Task.from_row(row(setup_patch="diff", hidden_paths='["/r2e_tests", "tests/a.py"]'), tmp_path)
    assert task.setup_patch == "diff" and task.hidden_paths == ("/r2e_tests", "tests/a.py")
    for prepared in ({"setup_patch": "diff"}, {"hidden_paths": ["tests/a.py"]}, {"workdir": "/app"}):
        with pytest.raises(TaskError, match="need a container image"):
            Task.from_row(row(**prepared), tmp_path).snapshot  # noqa: B018
    assert load_tasks(write(tmp_path / "t.parquet", [task.to_row()])) == [task]


def test_a_work_tree_may_be_elsewhere(tmp_path: Path) -> None:
    task = Task.from_row(row(workdir="/node_redis.js"), tmp_path)
    assert load_tasks(write(tmp_path / "t.parquet", [task.to_row()])) == [task] and task.workdir == "/node_redis.js"
    assert not {"workdir", "agent"} & Task.from_row(row(), tmp_path).to_row().keys()


def test_difficulty_becomes_text(tmp_path: Path) -> None:
    for value, wanted in ((None, None), ("1-4 hours", "1-4 hours"), (3, "3")):
        task = Task.from_row(row(difficulty=value), tmp_path)
        assert task.difficulty == wanted and Task.from_row(task.to_row(), tmp_path) == task


def test_hidden_parts_are_not_printed(tmp_path: Path) -> None:
    shown = repr(Task.from_row(row(patch="GOLD", eval_script=f"{SCRIPT}SECRET", FAIL_TO_PASS=["HIDDEN"]), tmp_path))
    assert not any(word in shown for word in ("GOLD", "SECRET", "HIDDEN"))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"FAIL_TO_PASS": [], "PASS_TO_PASS": "[]"}, "FAIL_TO_PASS"),
        ({"FAIL_TO_PASS": "not json"}, "FAIL_TO_PASS"),
        ({"FAIL_TO_PASS": '{"a": 1}'}, "FAIL_TO_PASS"),
        ({"PASS_TO_PASS": [1, 2]}, "PASS_TO_PASS"),
        ({"PASS_TO_PASS": None}, "PASS_TO_PASS"),
        ({"log_parser": "parse_log_nothing"}, "log_parser"),
        ({"eval_type": "guess"}, "eval_type"),
        ({"instance_id": ""}, "instance_id"),
        ({"eval_script": None}, "eval_script"),
        ({"eval_script": " "}, "eval_script"),
        # Rows that reward nothing, or any patch, or punish every one.
        ({"FAIL_TO_PASS": []}, "FAIL_TO_PASS"),
        ({"eval_script": "#!/bin/bash\npytest\n"}, "eval_script"),
        ({"eval_script": SCRIPT.replace("End", "end")}, "eval_script"),
        ({"eval_script": SCRIPT.replace("\n", "\r\n")}, "eval_script"),
        ({"eval_type": "fail_only"}, "eval_type"),
        ({"eval_type": "fail_only", "log_parser": "parse_log_django"}, "eval_type"),
        ({"version": 5}, "version"),
        ({"patch": 5}, "patch"),
        ({"setup_patch": 5}, "setup_patch"),
        ({"hidden_paths": "tests"}, "hidden_paths"),
        ({"hidden_paths": ["/"]}, "hidden_paths"),
        ({"hidden_paths": ["tests/../.."]}, "hidden_paths"),
        *(({"workdir": path}, "workdir") for path in ("", "app", "/", "/..", "/a/../b", "/a b", "/tmp/x", "/home")),
    ],
)
def test_a_bad_row_is_named_in_one_line(changes: dict[str, Any], field: str, tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", [row(**changes)])
    with pytest.raises(TaskError) as failure:
        load_tasks(path)
    message = str(failure.value)
    assert message.startswith(f"{path}: row 0: ") and f": {field}: " in message and "\n" not in message
    assert (changes.get("instance_id", "a__b-1") or "no instance_id") in message


def test_fail_only_needs_a_parser_that_reports_failures_only(tmp_path: Path) -> None:
    """With any other, a test that never ran would have passed, also under the names that swebench gives a parser."""
    from swebench.harness.constants import FAIL_ONLY_REPOS
    from swebench.harness.log_parsers import PARSER_REGISTRY
    from swebench.harness.log_parsers.javascript import MAP_REPO_TO_PARSER_JS

    accepted = set()
    for parser in PARSER_REGISTRY:
        with contextlib.suppress(TaskError):
            accepted.add(Task.from_row(row(eval_type="fail_only", log_parser=parser), tmp_path).log_parser)
    assert accepted == {MAP_REPO_TO_PARSER_JS[repo].__name__ for repo in FAIL_ONLY_REPOS}


def test_bad_files(tmp_path: Path) -> None:
    broken = tmp_path / "broken.parquet"
    broken.write_text("no parquet")
    short = row()
    del short["eval_script"], short["repo"]
    for path, words in (
        (tmp_path / "missing.parquet", "cannot be read"),
        (broken, "cannot be read"),
        (write(tmp_path / "short.parquet", [short]), "no column repo, eval_script"),
        (write(tmp_path / "twice.parquet", [row(), row()]), "row 1: a__b-1: instance_id: also in row 0"),
    ):
        with pytest.raises(TaskError) as failure:
            load_tasks(path)
        assert str(path) in str(failure.value) and words in str(failure.value)
        assert "\n" not in str(failure.value)


def test_only_a_directory_has_a_snapshot(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="not a local snapshot"):
        Task.from_row(row(image="swebench/x:latest"), tmp_path).snapshot  # noqa: B018


def test_parser_names_are_known_without_the_import() -> None:
    """Runs in a process of its own, because another test may have imported swebench's harness in this one."""
    program = (
        "import sys; from rewards.task import log_parsers; assert 'parse_log_django' in log_parsers();"
        "assert 'swebench.harness' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[3])
