"""This module tests admission: the journal, the judgement of a task by its records, and the whole command on the
quickstart's tasks.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import itertools
import json
import os
import re
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
from rl.data import images, probe
from rl.data.admit import AdmissionPlan, findings, grade_tasks, main
from rl.data.verdicts import Judgement, finding, to_markdown
from rl.quickstart.tasks import make_tasks
from rl.run.array_job import Shard
from rl.run.journal import Journal, JournalError, Losses, LostError, estimate
from rollout.sandbox import Sandbox, SandboxError
from rollout.sandbox.local.box import boot_local
from rollout.sandbox.sealing import configuring
from tests.sandboxes import make_snapshot

REPOSITORY = Path(__file__).parents[3]


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


def test_a_journal_on_a_disk_without_flock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process is kept out by a file that names the one which has it open, and that one may be killed."""

    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    path, mark = tmp_path / "j", tmp_path / "j.open"
    journal = Journal(path)
    with pytest.raises(JournalError, match=r"this disk has no flock \(Function not implemented\), and .*/j.open says"):
        Journal(path)
    journal.append({"a": 1})
    journal.close()
    assert not mark.exists()
    name = "from rollout.sandbox.owner import me; print(me(), end='')"
    child = subprocess.run([sys.executable, "-c", name], capture_output=True, text=True)
    mark.write_text(child.stdout)  # of a process that is gone
    journal = Journal(path)
    assert journal.records == [{"a": 1}]
    journal.close()
    mark.write_text("elsewhere" + child.stdout[child.stdout.index("/") :])  # on another machine, nobody can say
    with pytest.raises(JournalError, match="if it is gone, delete it"):
        Journal(path)


def test_a_shard_has_whole_groups_and_all_shards_have_everything() -> None:
    pieces = [(image, number) for image in "abcdefgh" for number in range(1 + ord(image) % 3)]
    parts = [Shard(number, 3).of(pieces, lambda piece: piece[0]) for number in (1, 2, 3)]
    assert sorted(itertools.chain(*parts)) == pieces and all(part == sorted(part) for part in parts)
    for one, other in itertools.combinations(parts, 2):
        assert not {image for image, _ in one} & {image for image, _ in other}
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert Shard(9, 9).of(pieces, lambda piece: piece[0]) == []  # more shards than groups
    assert Shard.parse("3/16") == Shard(3, 16)
    for wrong in ("0/4", "5/4", "3", "3/", "a/b", "-1/4", ""):
        with pytest.raises(ValueError, match="is no shard"):
            Shard.parse(wrong)


def test_losses_in_a_row_for_one_cause_end_a_batch() -> None:
    losses = Losses(3, apart=["missing_image"])
    for cause in ("no_engine", "no_engine", None, "no_engine", "no_engine", "no_space", "no_engine", "no_engine"):
        losses.count(cause)
    with pytest.raises(LostError, match="last 3 attempts were lost for one cause, no_engine: it does not answer"):
        losses.count("no_engine", "it does\nnot answer")
    for _ in range(59):
        losses.count("missing_image")
    with pytest.raises(LostError, match=r"last 60 .* missing_image"):
        losses.count("missing_image")


def test_an_estimate_is_pieces_times_seconds() -> None:
    assert estimate(14_628, 40, 16) == "about 10.2 h: 14628 x 40 s, 16 at a time"
    assert estimate(8, 1, 2) == "about 4 s: 8 x 1 s, 2 at a time"
    assert estimate(60, 10, 2) == "about 5 min: 60 x 10 s, 2 at a time"


GOOD = [record("gold", None), record("empty", "tests_failed")]


@pytest.mark.parametrize(
    ("records", "status", "why"),
    [
        ([*GOOD, *GOOD], Judgement.PASS, ""),
        ([*GOOD, record("gold", None), record("empty", "log_unparsable")], Judgement.PASS, ""),
        ([*GOOD, record("gold", "tests_failed"), record("empty", "tests_failed")], Judgement.FLAKY, "gold patch"),
        ([*GOOD, record("gold", None), record("empty", None)], Judgement.FLAKY, "no patch"),
        (
            [record("gold", "test_timeout")] * 2 + [record("empty", "tests_failed")] * 2,
            Judgement.BROKEN,
            "test_timeout 2x (d)",
        ),
        (
            [record("gold", "tests_failed", log_tail="E  ModuleNotFoundError: No module named 'numpy.linalg'\n")],
            Judgement.BROKEN,
            "tests_failed 1x; the box has no numpy.linalg: a task brings the packages that it needs",
        ),
        ([record("gold", None), record("empty", None)] * 2, Judgement.BROKEN, "pass without a patch"),
        (GOOD, Judgement.UNDECIDED, "not graded"),
        ([*GOOD, record("gold", None), record("empty", "no_space", infra=True)], Judgement.UNDECIDED, "no_space: d"),
        # An infrastructure failure does not hide what is certain without it.
        ([record("gold", "tests_failed"), record("gold", "no_space", infra=True)], Judgement.BROKEN, "tests_failed 1x"),
        ([*GOOD, *GOOD, record("empty", "no_space", infra=True)], Judgement.PASS, ""),
    ],
)
def test_a_task_is_judged_by_its_records(records: list[dict[str, Any]], status: Judgement, why: str) -> None:
    found = finding("t", records, tries=2)
    assert found.status is status and why in found.why
    assert sum(found.failures.values()) == sum(r["infra"] for r in records)


def test_the_report_names_what_a_local_work_tree_carries_for_an_agent(tmp_path: Path) -> None:
    tree = make_snapshot(tmp_path / "tree")
    assert configuring(tree) == () == configuring(tmp_path)
    paths = (".claude/settings.json", ".mcp.json", "AGENTS.md", "pkg/.claude/skills/x/SKILL.md", "pkg/CLAUDE.local.md")
    for path in (*paths, "pkg/claude.md"):
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text("x")
    subprocess.run(["git", "add", "-A"], cwd=tree, check=True)
    assert configuring(tree) == paths
    found = replace(finding("t", GOOD, tries=1), configures=configuring(tree))
    assert "| t | .claude/settings.json, .mcp.json, AGENTS.md, " in to_markdown("s", 1, [found], 0.0)


def test_a_task_without_gold_patch_is_broken() -> None:
    assert finding("t", [], tries=1, no_gold=True).status is Judgement.BROKEN


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("admission") / "made"
    make_tasks(out, seed=5, n_train=4, n_heldout=1)
    return out


# The flaky task counts the runs of its tests.
ONE_RUN = ["sandbox.isolation=none", "grading.second_opinion=false"]


def spoilt(made: Path, shared: Path) -> list[Task]:
    """Return the training tasks: a good one, a broken one, a flaky one, and one that passes without a patch."""
    good, broken, flaky, easy = load_tasks(made / "train.parquet")
    # The second run with a patch applied fails, like a test that depends on something outside.
    second = f'[ -n "$(git status --porcelain)" ] && ! mkdir {shared}/first 2>&- && mkdir {shared}/second 2>&-'
    second += " && git checkout --quiet ."
    return [
        good,
        replace(broken, patch=broken_patch(broken)),
        replace(flaky, eval_script=flaky.eval_script.replace("set -uxo pipefail\n", f"set -uxo pipefail\n{second}\n")),
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


def journal_of(out: Path, missing_ok: bool = False) -> list[dict[str, Any]]:
    path = out.with_name(f"{out.stem}.admission.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() or not missing_ok else []


def test_the_command_admits_tasks_and_grades_only_what_is_missing(
    made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tasks = spoilt(made, tmp_path)
    source, out = write(tmp_path / "tasks.parquet", tasks), tmp_path / "sub" / "admitted.parquet"
    command = [str(source), "--out", str(out), "--tries", "2", "--jobs", "2", *ONE_RUN]
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
    assert (tasks[0].not_passing, admitted[0].not_passing) == (None, ())  # no test is skipped with the gold patch
    begun, *_, longest, counts, why, train = capfd.readouterr().out.splitlines()
    assert begun.endswith("16 gradings of 4 tasks, 2 at a time")
    assert re.search(r" s\] at most about \d+ s: \d+ x \d+ s, 2 at a time$", longest), longest
    assert counts == "1 pass, 1 flaky, 2 broken, 0 undecided"
    assert why.startswith("why ") and why.endswith("less " + str(out.with_name("admitted.admission.md")))
    assert train.startswith("train on them ") and f"data.train_files=[{out}]" in train
    # The log is kept of unexpected gradings only, and after one of them a task is not graded any more (those that were
    # already running end).
    graded = Counter((entry["task"], bool(entry["log_tail"])) for entry in journal_of(out))
    assert [graded[task.instance_id, True] for task in tasks][:3] == [0, 1, 1]
    assert 1 <= graded[tasks[3].instance_id, True] <= 2
    assert [graded[task.instance_id, False] for task in tasks][:2] == [4, 0]
    # The same command grades nothing again, not even with fewer tasks; with one more try it grades each kind once more.
    # What only changes how fast boxes are counts for nothing.
    before = journal_of(out)
    assert main([*command, "sandbox.concurrency=3"]) == 0 and journal_of(out) == before
    write(source, tasks[:1])
    command[command.index("2")] = "3"
    assert main(command) == 0 and len(journal_of(out)) == len(before) + 2
    # A changed row is another task.
    write(source, [replace(tasks[0], problem_statement="Other words.")])
    assert main(command) == 0 and len(journal_of(out)) == len(before) + 2 + 6


def test_shards_grade_all_tasks_and_a_merge_judges_them(
    made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tasks = spoilt(made, tmp_path)
    source, out = write(tmp_path / "tasks.parquet", tasks), tmp_path / "admitted.parquet"
    command = [str(source), "--out", str(out), "--tries", "2", "--jobs", "2", *ONE_RUN]
    assert main([*command, "--shard", "1/2"]) == 0
    assert capfd.readouterr().out.splitlines()[-1].endswith("0 undecided")
    assert not out.exists() and not journal_of(out, missing_ok=True)
    main([*command, "--merge"])  # what the second shard has is undecided
    assert capfd.readouterr().out.splitlines()[0].endswith("2 undecided")
    assert main([*command, "--shard", "2/2"]) == 0
    graded = [one for part in ("1-of-2", "2-of-2") for one in journal_of(tmp_path / f"admitted.{part}.parquet")]
    assert len({(one["task"], one["kind"], one["number"]) for one in graded}) == len(graded)
    assert main([*command, "--merge"]) == 0
    report = json.loads((tmp_path / "admitted.admission.json").read_text())
    assert [task["status"] for task in report["tasks"]] == ["pass", "broken", "flaky", "broken"]
    assert [task.instance_id for task in load_tasks(out)] == [tasks[0].instance_id]
    # Neither other shards nor the whole command grade anything again.
    for more in (["--shard", "2/3"], []):
        assert main([*command, *more]) == 0
    assert journal_of(out) == [] and journal_of(tmp_path / "admitted.2-of-3.parquet") == []
    with pytest.raises(SystemExit):
        main([*command, "--shard", "3/2"])
    assert "--shard: '3/2' is no shard" in capfd.readouterr().err


def test_nothing_is_graded_without_an_engine(made: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rl.data.admit", str(made / "train.parquet"), "--out", str(tmp_path / "a.parquet")]
    environment = {**os.environ, "DOCKER_HOST": f"unix://{tmp_path}/no.sock"}
    done = subprocess.run([*command, "sandbox=docker"], cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("config: sandbox=docker: no_engine: no container engine answers at unix://")
    assert not [*tmp_path.glob("a.*")]


async def test_an_engine_that_ends_on_the_way_ends_the_admission(made: Path, tmp_path: Path) -> None:
    """The admission of 12 tasks with 60 gradings each ends after 9 attempts without an engine."""
    some = load_tasks(made / "train.parquet")
    tasks = [replace(task, instance_id=f"{task.instance_id}-{twin}") for twin in range(3) for task in some]
    boots = 0

    async def boot(task: Task, socket_dir: Path | None) -> Sandbox:
        nonlocal boots
        boots += 1
        if boots > 2:
            raise SandboxError("no_engine", "no container engine answers")
        return await boot_local(task.snapshot, isolation="none")

    journal = Journal(tmp_path / "j")
    plan = AdmissionPlan(boot, tries=30, jobs=1, timeout_s=60, infra_retries=0)
    with pytest.raises(LostError, match="last 9 attempts were lost for one cause, no_engine: no container engine"):
        await grade_tasks(tasks, plan, journal)
    assert boots == 11 and [one["infra"] for one in journal.records] == [False] * 2 + [True] * 9
    assert {found.status for found in findings(tasks, plan, journal.records)} == {Judgement.UNDECIDED}
    journal.close()


async def test_tasks_of_an_image_follow_each_other_and_a_wrong_one_is_graded_once(made: Path, tmp_path: Path) -> None:
    first, second, third, fourth = load_tasks(made / "train.parquet")
    wrong = replace(second, patch=broken_patch(second))
    twin = replace(fourth, instance_id="twin")  # its image is the last task's
    booted: list[str] = []

    async def boot(task: Task, socket_dir: Path | None) -> Sandbox:
        booted.append(task.instance_id)
        return await boot_local(task.snapshot, isolation="none")

    journal = Journal(tmp_path / "j")
    plan = AdmissionPlan(boot, tries=2, jobs=1, timeout_s=60, infra_retries=0)
    await grade_tasks([twin, first, wrong, third, fourth], plan, journal)
    journal.close()
    order = ["twin", fourth.instance_id, first.instance_id, wrong.instance_id, third.instance_id]
    assert booted == [name for name in order for _ in range(1 if name == wrong.instance_id else 4)]


def test_the_command_fails_if_it_admits_nothing(made: Path, tmp_path: Path) -> None:
    task = load_tasks(made / "heldout.parquet")[0]
    source, out = write(tmp_path / "t.parquet", [replace(task, patch=None)]), tmp_path / "a.parquet"
    out.write_text("an older one")
    assert main([str(source), "--out", str(out)]) == 1 and not out.exists()
    assert journal_of(out) == []


@pytest.mark.parametrize("bad", [["nothing=1"], ["sandbox=nowhere"], ["sandbox.cpu_s=abc"]])
def test_a_wrong_config_is_reported_in_one_line(bad: list[str], made: Path, tmp_path: Path, capsys: Any) -> None:
    assert main([str(made / "train.parquet"), "--out", str(tmp_path / "a.parquet"), *bad]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("command", [main, images.main, probe.main])
def test_tasks_are_never_overwritten_by_some_of_them(command: Any, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "t.parquet").write_text("tasks")
    with pytest.raises(SystemExit):
        command([str(tmp_path / "t.parquet"), "--out", str(tmp_path / "." / "t.parquet")])
    assert "--out would overwrite the tasks" in capsys.readouterr().err


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
    plan = AdmissionPlan(boot, tries=1, jobs=3, timeout_s=60, infra_retries=2)
    await grade_tasks(tasks, plan, journal)
    first, second = findings(tasks, plan, journal.records)
    assert first.status is Judgement.PASS and sum(first.failures.values()) == 2
    assert second.status is Judgement.UNDECIDED and "no_space" in second.why and second.gold == second.empty == {}
    assert boots[tasks[1].instance_id] == 3  # its other grading was not tried
    # The next run grades only what is undecided.
    before = boots[tasks[0].instance_id]
    await grade_tasks(tasks, plan, journal)
    assert boots[tasks[1].instance_id] == 2 * 3 and boots[tasks[0].instance_id] == before
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
