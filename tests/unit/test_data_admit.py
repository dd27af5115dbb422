"""Admission: the journal, the judgement of a task by its records, and the whole command on the quickstart's tasks."""

from __future__ import annotations

import functools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rewards.task import Task, load_tasks
from rl.batch import Journal, JournalError
from rl.data.admit import Plan, findings, grade_tasks, main
from rl.data.findings import Status, finding
from rl.quickstart.tasks import make_tasks
from rollout.sandbox import Sandbox, SandboxError
from rollout.sandbox.local.box import boot_local

REPOSITORY = Path(__file__).parents[2]


def record(kind: str, reason: str | None, number: int = 0, infra: bool = False, **changes: Any) -> dict[str, Any]:
    base = {"task": "t", "key": "k", "kind": kind, "number": number, "reason": reason, "detail": "d", "infra": infra}
    return {**base, "seconds": 1.0, "log_tail": ""} | changes


def test_the_journal_keeps_its_records_and_its_lock(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = Journal(path)
    journal.append({"a": 1})
    journal.append({"b": "\n"})
    with pytest.raises(JournalError, match="another process"):
        Journal(path)
    journal.close()
    again = Journal(path)
    assert again.records == [{"a": 1}, {"b": "\n"}]
    again.close()


def test_an_incomplete_last_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "j"
    whole = b'{"a": 1}\n{"b": 2}\n'
    for cut in range(len(b'{"b": 2}\n')):
        path.write_bytes(whole[: len(b'{"a": 1}\n') + cut])
        journal = Journal(path)
        assert journal.records == [{"a": 1}]
        journal.append({"c": 3})
        journal.close()
        assert path.read_bytes() == b'{"a": 1}\n{"c": 3}\n'


def test_a_damaged_line_before_the_end_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_bytes(b'{"a": 1\n{"b": 2}\n')
    for _ in range(2):  # the error releases the lock
        with pytest.raises(JournalError, match="line 1 is damaged"):
            Journal(path)


GOOD = [record("gold", None), record("empty", "tests_failed")]


@pytest.mark.parametrize(
    ("records", "status", "why"),
    [
        ([*GOOD, *GOOD], Status.PASS, ""),
        ([*GOOD, record("gold", None), record("empty", "log_unparsable")], Status.PASS, ""),
        ([*GOOD, record("gold", "tests_failed"), record("empty", "tests_failed")], Status.FLAKY, "gold patch"),
        ([*GOOD, record("gold", None), record("empty", None)], Status.FLAKY, "no patch"),
        (
            [record("gold", "test_timeout")] * 2 + [record("empty", "tests_failed")] * 2,
            Status.BROKEN,
            "test_timeout 2x",
        ),
        ([record("gold", None), record("empty", None)] * 2, Status.BROKEN, "pass without a patch"),
        (GOOD, Status.UNDECIDED, "not graded"),
        ([*GOOD, record("gold", None), record("empty", "no_space", infra=True)], Status.UNDECIDED, "no_space: d"),
        # An infrastructure failure does not hide what is certain without it.
        ([record("gold", "tests_failed"), record("gold", "no_space", infra=True)], Status.BROKEN, "tests_failed 1x"),
        ([*GOOD, *GOOD, record("empty", "no_space", infra=True)], Status.PASS, ""),
    ],
)
def test_a_task_is_judged_by_its_records(records: list[dict[str, Any]], status: Status, why: str) -> None:
    found = finding("t", records, tries=2)
    assert found.status is status and why in found.why
    assert sum(found.failures.values()) == sum(r["infra"] for r in records)


def test_a_task_without_gold_patch_is_broken() -> None:
    assert finding("t", [], tries=1, no_gold=True).status is Status.BROKEN


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("admission") / "made"
    make_tasks(out, seed=5, n_train=4, n_heldout=1)
    return out


def spoilt(made: Path, shared: Path) -> list[Task]:
    """Return the training tasks: a good one, a broken one, a flaky one, and one that passes without a patch."""
    good, broken, flaky, easy = load_tasks(made / "train.parquet")
    # The first run with a patch applied fails, like a test that depends on something outside.
    first = f'[ -n "$(git status --porcelain)" ] && mkdir {shared}/first && git checkout --quiet .'
    return [
        good,
        replace(broken, patch=broken_patch(broken)),
        replace(flaky, eval_script=flaky.eval_script.replace("set -uxo pipefail\n", f"set -uxo pipefail\n{first}\n")),
        replace(easy, FAIL_TO_PASS=easy.PASS_TO_PASS),
    ]


def broken_patch(task: Task) -> str:
    """Return the gold patch with a wrong expression."""
    assert task.patch is not None
    head, _, expression = task.patch.rpartition("+    return ")
    return f"{head}+    return 100 + ({expression.strip()})\n"


def write(path: Path, tasks: list[Task]) -> Path:
    rows = [task.to_row() | {"image": f"dir:{task.snapshot}", "extra": "kept"} for task in tasks]
    schema = pyarrow.schema([(name, pyarrow.string()) for name in rows[0]])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), path)
    return path


def journal_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.with_name(f"{out.stem}.admission.jsonl").read_text().splitlines()]


def test_the_command_admits_tasks_and_grades_only_what_is_missing(
    made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tasks = spoilt(made, tmp_path)
    source, out = write(tmp_path / "tasks.parquet", tasks), tmp_path / "sub" / "admitted.parquet"
    command = [str(source), "--out", str(out), "--tries", "2", "--jobs", "2", "sandbox.isolation=none"]
    assert main(command) == 0
    report = json.loads((tmp_path / "sub/admitted.admission.json").read_text())
    assert [task["status"] for task in report["tasks"]] == ["pass", "broken", "flaky", "broken"]
    assert report["counts"] == {"pass": 1, "flaky": 1, "broken": 2, "undecided": 0}
    assert report["tasks"][0]["gold"] == {"resolved": 2} and report["tasks"][0]["empty"] == {"tests_failed": 2}
    assert report["tasks"][3]["why"] == "the tests pass without a patch"
    assert all(task["seconds"] > 0 for task in report["tasks"])
    text = (tmp_path / "sub/admitted.admission.md").read_text()
    assert f"| {tasks[2].instance_id} | gold patch: " in text and "## Broken" in text
    admitted = load_tasks(out)
    assert [task.instance_id for task in admitted] == [tasks[0].instance_id]
    assert admitted[0].image.startswith("dir:../") and admitted[0].snapshot == tasks[0].snapshot
    assert pyarrow.parquet.read_table(out).column("extra").to_pylist() == ["kept"]
    begun, *_, counts, why, train = capfd.readouterr().out.splitlines()
    assert begun.endswith("16 gradings of 4 tasks, 2 at a time")
    assert counts == "1 pass, 1 flaky, 2 broken, 0 undecided"
    assert why.startswith("why ") and why.endswith("less " + str(out.with_name("admitted.admission.md")))
    assert train.startswith("train on them ") and f"data.train_files=[{out}]" in train
    assert sum(bool(entry["log_tail"]) for entry in journal_of(out)) == 2 + 1 + 2  # only of unexpected gradings
    # The same command grades nothing again, not even with fewer tasks; with one more try it grades each kind once more.
    before = journal_of(out)
    assert main(command) == 0 and journal_of(out) == before
    write(source, tasks[:1])
    command[command.index("2")] = "3"
    assert main(command) == 0 and len(journal_of(out)) == len(before) + 2
    # A changed row is another task.
    write(source, [replace(tasks[0], problem_statement="Other words.")])
    assert main(command) == 0 and len(journal_of(out)) == len(before) + 2 + 6


def test_the_command_fails_if_it_admits_nothing(made: Path, tmp_path: Path) -> None:
    task = load_tasks(made / "heldout.parquet")[0]
    source, out = write(tmp_path / "t.parquet", [replace(task, patch=None)]), tmp_path / "a.parquet"
    out.write_text("an older one")
    assert main([str(source), "--out", str(out)]) == 1 and not out.exists()
    assert journal_of(out) == []


@pytest.mark.parametrize("bad", [["nothing=1"], ["sandbox=nowhere"]])
def test_a_wrong_config_is_reported_in_one_line(bad: list[str], made: Path, tmp_path: Path, capsys: Any) -> None:
    assert main([str(made / "train.parquet"), "--out", str(tmp_path / "a.parquet"), *bad]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_missing_file_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "gone.parquet"), "--out", str(tmp_path / "a.parquet")]) == 2
    assert "gone.parquet" in capsys.readouterr().err


async def test_infrastructure_failures_are_retried_and_say_nothing_about_a_task(made: Path, tmp_path: Path) -> None:
    """The first task's boxes fail to boot twice, the second task's always."""
    tasks = load_tasks(made / "train.parquet")[:2]
    boots: Counter[str] = Counter()

    async def boot(task: Task, socket_dir: Path | None) -> Sandbox:
        assert socket_dir is None
        boots[task.instance_id] += 1
        if task is tasks[1] or boots[task.instance_id] <= 2:
            raise SandboxError("no_space", "full")
        return await boot_local(task.snapshot, isolation="none")

    journal = Journal(tmp_path / "j")
    plan = Plan(boot, tries=1, jobs=3, timeout_s=60, infra_retries=2)
    await grade_tasks(tasks, plan, journal)
    first, second = findings(tasks, plan, journal)
    assert first.status is Status.PASS and sum(first.failures.values()) == 2
    assert second.status is Status.UNDECIDED and "no_space" in second.why and second.gold == second.empty == {}
    assert boots[tasks[1].instance_id] == 2 * 3
    # The next run grades only what is undecided.
    before = boots[tasks[0].instance_id]
    await grade_tasks(tasks, plan, journal)
    assert boots[tasks[1].instance_id] == 4 * 3 and boots[tasks[0].instance_id] == before
    journal.close()


def test_the_same_command_continues_one_that_was_killed_or_interrupted(made: Path, tmp_path: Path) -> None:
    tasks = load_tasks(made / "train.parquet")[:3]
    source, out = write(tmp_path / "t.parquet", tasks), tmp_path / "a.parquet"
    journal = tmp_path / "a.admission.jsonl"
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-m", "rl.data.admit", str(source), "--out", str(out), "--tries", "2", "--jobs", "2"]
    options: dict[str, Any] = {"cwd": REPOSITORY, "env": {**os.environ, "TMPDIR": str(scratch)}}
    process = subprocess.Popen(command, start_new_session=True, **options)
    try:
        while not journal.exists() or journal.read_bytes().count(b"\n") < 3:
            assert process.poll() is None
            time.sleep(0.01)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not out.exists()
    kept = journal.read_bytes()
    kept = kept[: kept.rfind(b"\n") + 1]
    journal.write_bytes(kept + b'{"task": "torn')  # as if it was killed while it wrote
    # A background job of a shell script ignores SIGINT, and so would what it starts.
    options["preexec_fn"] = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    interrupted = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
    assert interrupted.stdout is not None and " gradings of 3 tasks" in interrupted.stdout.readline()
    interrupted.send_signal(signal.SIGINT)
    told, _ = interrupted.communicate()
    assert interrupted.returncode == 130
    assert told.splitlines()[-1] == f"continue  {shlex.join(command)}"
    subprocess.run(command, check=True, capture_output=True, **options)
    assert journal.read_bytes().startswith(kept)
    done = Counter((entry["task"], entry["kind"], entry["number"]) for entry in journal_of(out))
    assert set(done.values()) == {1} and len(done) == 3 * 2 * 2
    assert [task.instance_id for task in load_tasks(out)] == [task.instance_id for task in tasks]
    assert not list(scratch.glob("code-rl-sandboxes-*"))
