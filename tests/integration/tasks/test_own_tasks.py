"""The task source and the grader of another package that docs/data.md shows, as the page has them."""

from __future__ import annotations

import functools
import importlib
import json
import re
import shlex
import sys
import textwrap
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from rewards import graders
from rewards.grade import grade
from rewards.grading import Grading
from rewards.rules import Rules
from rewards.second import NONE
from rewards.swebench import SweBench
from rewards.task import Task, TaskError, load_tasks
from rewards.verdict import Reason, Verdict
from rl.config.compose import compose
from rl.data import admit, convert
from rl.data.sets import TaskSource
from rl.episodes.boxes import kind_of
from rl.episodes.setup import agent_from
from rollout.episode import Setup, run_episode
from rollout.proxy.server import ProxyServer
from rollout.sandbox.local.box import boot_local
from tests.integration.claude_kit import call, check_record, in_turn, scripted
from tests.kit import char_policy
from tests.packages_kit import install
from tests.sandboxes import make_snapshot

ROOT = Path(__file__).parents[3]
FIX = "diff --git a/README.md b/README.md\n--- a/README.md\n+++ b/README.md\n@@ -1 +1 @@\n-hello\n+bye\n"


@pytest.fixture(autouse=True)
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the package of the page, as it is there, and let it be importable."""
    section = (ROOT / "docs" / "data.md").read_text().partition("## A source and a grader of your own\n")[2]
    (text,) = re.findall(r"^`checked_tasks.py`, [^\n]*\n\n((?:    [^\n]*\n|\n)+?)(?=Then)", section, re.M)
    (tmp_path / "checked").mkdir()
    (tmp_path / "checked" / "checked_tasks.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path / "checked")
    monkeypatch.delitem(sys.modules, "checked_tasks", raising=False)
    graders.named.cache_clear()


def make(place: Path, name: str, script: str, statement: str = "README.md must say bye.", fix: str = FIX) -> None:
    make_snapshot(place / name / "repo")
    for file, text in {"check.sh": script, "statement.md": statement, "fix.patch": fix}.items():
        (place / name / file).write_text(text)


def made(tmp_path: Path, script: str = "grep bye README.md\n") -> Task:
    """Return one task after the page's source has converted it."""
    make(tmp_path / "all", "one", script)
    assert convert.main(["checked_tasks:SOURCE", str(tmp_path / "all"), "--out", str(tmp_path / "t.parquet")]) == 0
    (task,) = load_tasks(tmp_path / "t.parquet")
    return task


def test_tasks_are_converted_and_admitted_by_their_grader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place, out = tmp_path / "all", tmp_path / "t.parquet"
    make(place, "good", "grep -q bye README.md\n")
    make(place, "solved", "true\n")
    make(place, "no_fix", "grep -q bye README.md\n", fix=FIX.replace("+bye", "+3"))
    make(place, "nothing_said", "true\n", statement=" ")
    assert convert.main(["checked_tasks:SOURCE", str(place), "--out", str(out)]) == 0
    (refused,) = json.loads(out.with_name("t.convert.json").read_text())["rows"]
    assert refused["why"] == "no_problem_statement"
    tasks = load_tasks(out)
    assert [(task.instance_id, task.grader) for task in tasks] == [
        (name, "checked_tasks:Check") for name in ("good", "no_fix", "solved")
    ]
    assert tasks[0] == Task.from_row(tasks[0].to_row(), tmp_path)
    good = tmp_path / "good.parquet"
    assert admit.main([str(out), "--out", str(good), "--tries", "1", "grading.second_opinion=false"]) == 0
    assert [task.instance_id for task in load_tasks(good)] == ["good"]
    told = capsys.readouterr().out
    assert "1 pass" in told and "2 broken" in told


async def test_what_a_script_says_is_the_verdict(tmp_path: Path) -> None:
    task = made(tmp_path, "echo said; test -e slow && sleep 60; grep bye README.md; exit $?\n")
    boot = functools.partial(boot_local, task.snapshot)
    graded = functools.partial(grade, task, boot=boot, timeout_s=2)
    verdict = await graded(FIX.encode())
    assert verdict.reason is None and verdict.log_tail == "said\nbye\n" and not verdict.flags
    verdict = await graded(FIX.replace("+bye", "+3").encode())
    assert (verdict.reason, verdict.detail) == (Reason.TESTS_FAILED, "exit status 1")
    new = "diff --git a/slow b/slow\nnew file mode 100644\nindex 0000000..e69de29\n"
    assert (await graded(new.encode())).reason is Reason.TEST_TIMEOUT
    assert (await graded(b"no patch")).reason is Reason.PATCH_APPLY_FAILED
    assert (await graded(FIX.replace("-hello", "-5").encode())).reason is Reason.PATCH_APPLY_FAILED
    # It has no second opinion: the task counts, and is flagged, or does not, if grading needs one.
    assert (await graded(FIX.encode(), second_opinion=True)).flags == (NONE,)
    verdict = await graded(FIX.encode(), second_opinion=True, rules=Rules(needs_second_opinion=True))
    assert verdict.reason is Reason.NO_SECOND_OPINION


async def test_a_grader_that_fails_is_no_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = made(tmp_path)
    boot = functools.partial(boot_local, task.snapshot)
    for error, reason in ((KeyError("x"), Reason.GRADER_CRASHED), (NotImplementedError(), Reason.GRADER_CRASHED)):

        async def judge(self: object, grading: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(type(graders.named(task.grader)), "judge", judge)
        assert (await grade(task, FIX.encode(), boot, timeout_s=5)).reason is reason


def test_what_a_source_raises_refuses_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "all", "good", "grep -q bye README.md\n")
    make(tmp_path / "all", "late", "x" * 3)
    module = importlib.import_module("checked_tasks")
    made = module.SOURCE.convert

    def convert_(row: dict[str, str], options: object) -> object:
        return made(row, options) if row["id"] == "good" else row["no such field"]

    monkeypatch.setattr(module, "SOURCE", TaskSource(convert_, rows=module.rows))
    out = tmp_path / "t.parquet"
    assert convert.main(["checked_tasks:SOURCE", str(tmp_path / "all"), "--out", str(out)]) == 0
    (refused,) = json.loads(out.with_name("t.convert.json").read_text())["rows"]
    assert refused == {"number": 1, "instance_id": "", "why": "invalid_row", "detail": "KeyError: 'no such field'"}


class Twice(SweBench):
    """SWE-bench's grader, for tasks that count only if they resolve twice."""

    async def judge(self, grading: Grading) -> Verdict:
        first = await super().judge(grading)
        return first if first.reason is not None else await super().judge(grading)


async def test_a_grader_may_extend_swe_benchs(task: Task) -> None:
    row = task.to_row() | {"grader": f"{__name__}:Twice", "grading": "{}"}
    own = Task.from_row(row, task.base_dir)
    assert own.patch is not None and own.to_row() | {"grader": None, "grading": None} == task.to_row()
    boot = functools.partial(boot_local, own.snapshot)
    verdict = await grade(own, own.patch.encode(), boot, timeout_s=60, second_opinion=True)
    assert verdict.reason is None and verdict.grader == f"{__name__}:Twice"
    assert (verdict.detail, verdict.flags) == ("", ())


def test_what_is_wrong_is_said_of_the_row(tmp_path: Path) -> None:
    row = made(tmp_path).to_row()
    for changes, said in (
        ({"grading": "{}"}, "one: grading: it has no script"),
        ({"grading": "[1]"}, "one: grading: is no JSON object"),
        ({"grading": None}, "one: grading: is missing"),
        ({"grader": "pytest"}, "one: grader: 'pytest' is no grader; it must be one of swebench, harbor, or module:"),
        ({"grader": "checked_tasks:Nobody"}, "one: grader: 'checked_tasks:Nobody' cannot be imported: AttributeError"),
        ({"grader": "checked_tasks:SOURCE"}, "one: grader: 'checked_tasks:SOURCE' cannot be made: TypeError"),
        ({"grader": "pathlib:Path"}, "one: grader: 'pathlib:Path' is no subclass of rewards.graders.Grader"),
        ({"grader": None}, "one: log_parser: is empty"),
        ({"image": ""}, "one: image: is empty"),
    ):
        with pytest.raises(TaskError) as caught:
            Task.from_row(row | changes, tmp_path)
        assert str(caught.value).startswith(said), caught.value


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["swe-bentch"], "SET is 'swe-bentch'; it must be one of swe-bench, "),
        (["checked_tasks:SOURCE"], "SOURCE is missing: checked_tasks:SOURCE is not on the hub"),
        (["checked_tasks:Check", "x"], "SET is 'checked_tasks:Check', which is no rl.data.sets.TaskSource"),
        (["checked_tasks:SOURCE", "nowhere"], "nowhere: no directory in it has a check.sh"),
    ],
)
def test_a_wrong_source_is_one_line(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = convert.main([*arguments, "--out", str(tmp_path / "t.parquet")])
    except SystemExit as ended:
        status = ended.code
    assert status == 2 and said in capsys.readouterr().err


async def test_a_file_that_mixes_graders_is_played(task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(ROOT / "examples" / "own_agent", tmp_path / "agent", monkeypatch)
    other, mixed = made(tmp_path), task.base_dir / "mixed.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([task.to_row(), other.to_row()]), mixed)
    config = compose(["agent=shell", "sandbox=local"], "evaluate")
    agent = agent_from(config, max_tokens=5000, max_context=50_000)
    for each in load_tasks(mixed):
        assert each.patch is not None
        script = in_turn(call("Bash", command=f"printf %s {shlex.quote(each.patch)} | git apply"), "Done.")
        proxy = ProxyServer()
        await proxy.start()
        try:
            setup = Setup(char_policy(scripted(script)), proxy, kind_of(config.sandbox).boot(agent), agent)
            episode = await run_episode(setup, each, each.instance_id)
        finally:
            await proxy.stop()
        assert episode.verdict.reason is None, episode.verdict
        check_record(episode, tmp_path / each.instance_id)
