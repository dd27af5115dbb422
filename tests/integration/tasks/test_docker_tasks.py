"""This module tests tasks in containers from the config to the verdict: grading, and whole episodes with the real
Claude Code.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import transformers
from omegaconf import DictConfig

from rewards.grade import grade
from rewards.task import Task, load_tasks
from rewards.verdict import Reason
from rl.cluster.member import log_directory, prepare_node
from rl.config.compose import compose
from rl.episodes.boxes import kind_of, prepare_images
from rollout.agent.claude_code import ClaudeCode, find_binary
from rollout.episode import Episode, Setup, play, run_episode
from rollout.proxy.server import ProxyServer
from rollout.records.reading import Reader
from rollout.sandbox.docker.engine import PROJECT, get_engine
from tests.docker_kit import base_image, left, made, task_images
from tests.integration.claude_kit import call, check_record, in_turn, scripted
from tests.integration.programs_kit import start
from tests.kit import char_policy
from tests.sandboxes import REPOSITORY

# The first test of all may have to make the base image.
pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]


def packages(count: int) -> list[Task]:
    """Return the first tasks of scripts/task_images.py; makes the images that are not there."""
    kit = task_images()

    async def make() -> list[Task]:
        await asyncio.to_thread(base_image)
        return [await kit.make_task(get_engine(), recipe) for recipe in kit.RECIPES[:count]]

    return made(asyncio.run, make())


@pytest.fixture(scope="module")
def tasks() -> Iterator[list[Task]]:
    yield packages(2)
    assert left(get_engine()) == []


@pytest.fixture(scope="module")
def config() -> DictConfig:
    return compose(["sandbox=docker", f"sandbox.base_image={base_image()}"])


def test_admission_takes_the_tasks_that_grade_right(tmp_path: Path) -> None:
    """The command admits tasks that their gold patch resolves and no patch does not. A task whose image changes between
    two gradings is flaky; one whose patch repairs nothing is broken."""
    count = 6
    tasks = packages(count)
    client, changing = get_engine().client, f"{PROJECT}/test-flaky:1"
    note = "diff --git a/NOTE b/NOTE\nnew file mode 100644\n--- /dev/null\n+++ b/NOTE\n@@ -0,0 +1 @@\n+note\n"
    others = [
        dataclasses.replace(tasks[0], instance_id="flaky", image=changing),
        dataclasses.replace(tasks[1], instance_id="broken", patch=note),
    ]
    source, out = tmp_path / "tasks.parquet", tmp_path / "admitted.parquet"
    task_images().write_tasks(source, [*tasks, *others])

    def admit(tries: int) -> list[str]:
        command = [sys.executable, "-m", "rl.data.admit", str(source), "--out", str(out), "--tries", str(tries)]
        done = subprocess.run([*command, "sandbox=docker"], cwd=REPOSITORY, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    try:
        client.tag(tasks[0].image, *changing.split(":"))
        assert f"{count + 1} pass, 0 flaky, 1 broken, 0 undecided" in admit(1)
        client.tag(tasks[1].image, *changing.split(":"))
        assert f"{count} pass, 1 flaky, 1 broken, 0 undecided" in admit(2)
    finally:
        client.remove_image(changing)
    assert [task.instance_id for task in load_tasks(out)] == [task.instance_id for task in tasks]
    report = json.loads(out.with_name("admitted.admission.json").read_text())
    *found, flaky, broken = report["tasks"]
    assert len(found) == count and all(task["seconds"] > 0 and not task["failures"] for task in found)
    assert [task["gold"] for task in found] == [{"resolved": 2}] * count
    assert [task["empty"] for task in found] == [{"tests_failed": 2}] * count
    assert (flaky["status"], flaky["gold"]) == ("flaky", {"resolved": 1, "patch_apply_failed": 1})
    assert (broken["status"], broken["gold"]) == ("broken", {"tests_failed": 1})  # not asked again


async def test_nothing_goes_wrong_that_a_verdict_hides(tasks: list[Task], config: DictConfig) -> None:
    task = tasks[0]
    assert task.patch is not None and task.FAIL_TO_PASS and task.PASS_TO_PASS
    boot = functools.partial(kind_of(config.sandbox).boot(), task, None)
    gold = await grade(task, task.patch.encode(), boot, timeout_s=120)
    none = await grade(task, None, boot, timeout_s=120)
    assert (gold.reward, none.reason, none.reward) == (1.0, Reason.TESTS_FAILED, 0.0), (gold, none)
    assert set(none.tests["FAIL_TO_PASS"]["failure"]) == set(task.FAIL_TO_PASS)
    assert set(gold.tests["PASS_TO_PASS"]["success"]) == set(task.PASS_TO_PASS)
    for complaint in ("command not found", "fatal:", "patch does not apply"):
        assert complaint not in gold.log_tail


def test_images_are_ready_before_a_run(tasks: list[Task], config: DictConfig, tmp_path: Path) -> None:
    said: list[str] = []
    prepare_images(config.sandbox, tmp_path, tasks, said.append)
    report = json.loads((tmp_path / "images.json").read_text())
    assert [report[task.instance_id]["residue"] for task in tasks] == [[]] * len(tasks)
    assert said[-1] == "images: 2 of 2 ready"


async def test_each_node_of_a_job_prepares_its_images(tasks: list[Task], tmp_path: Path) -> None:
    """Two nodes at once, which are the same machine here: checked, the images made, a report for each."""
    # Nodes are processes; two threads can neither load this at once nor share a config.
    assert transformers.AutoConfig
    model, train, held_out = tmp_path / "model", tmp_path / "train.parquet", tmp_path / "held_out.parquet"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen3"}')
    for path, part in ((train, tasks[:1]), (held_out, tasks[1:])):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([task.to_row() for task in part]), path)
    keys = [
        f"run.dir={tmp_path / 'run'}",
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={train}",
        f"data.val_files={held_out}",
        "allow_overlap=[repo,diff,statement]",
        "data.train_batch_size=1",
        f"cluster.stage_dir={tmp_path / 'local'}",
    ]
    configs = [compose(["sandbox=docker", *keys]) for _ in range(2)]
    nodes = [log_directory(tmp_path / "run", node) for node in ("n1", "n2")]
    said: list[str] = []
    first, second = await asyncio.gather(
        *(
            asyncio.to_thread(prepare_node, config, True, logs, said.append)
            for config, logs in zip(configs, nodes, strict=True)
        )
    )
    assert first == second and Path(first["actor_rollout_ref.model.path"]).parent == tmp_path / "local"
    for logs in nodes:
        assert set(json.loads((logs / "images.json").read_text())) == {task.instance_id for task in tasks}
    assert said.count("images: 2 of 2 ready") == 2 and not (tmp_path / "run" / "images.json").exists()


# --- the real Claude Code


@pytest.fixture
async def proxy() -> AsyncIterator[ProxyServer]:
    server = ProxyServer(ping_s=0.3)
    await server.start()
    yield server
    await server.stop()


def setup(proxy: ProxyServer, config: DictConfig, engine: Any) -> Setup:
    tools = ("Edit", "Read", "Bash")
    agent = ClaudeCode(find_binary(None), 8, 90, 2000, system_prompt="Repair the code.", tools=tools, bare=True)
    return Setup(char_policy(engine), proxy, kind_of(config.sandbox).boot(agent), agent, grade_timeout_s=120)


@pytest.mark.claude
async def test_claude_code_repairs_a_task(
    proxy: ProxyServer, tasks: list[Task], config: DictConfig, tmp_path: Path
) -> None:
    recipe = task_images().RECIPES[0]
    file = f"/testbed/{recipe.file}"
    look = "git log --all --oneline | wc -l; id -u; tail -n +3 /proc/net/dev | wc -l; ls /home; (setsid sleep 300 &)"
    script = in_turn(
        call("Bash", command=look),
        call("Read", file_path=file),
        call("Edit", file_path=file, old_string=recipe.wrong, new_string=recipe.right),
        "Done.",
    )
    episode = await run_episode(setup(proxy, config, scripted(script)), tasks[0], "e")
    assert episode.verdict.outcome == "resolved", (episode.verdict, episode.agent)
    assert episode.agent is not None and episode.agent.status == "finished" and len(episode.rows) == 1
    assert episode.patch.count(b"diff --git") == 1
    record = check_record(episode, tmp_path)
    assert "1\\n0\\n1\\nagent" in json.dumps(record.events).replace("\\\\n", "\\n")
    assert proxy.sessions == {} and left(get_engine()) == []


@pytest.mark.claude
async def test_episodes_of_local_snapshots(proxy: ProxyServer, config: DictConfig, task: Task) -> None:
    """The quickstart's tasks, in containers."""
    assert task.patch is not None
    old, new = (line[1:] for line in task.patch.splitlines() if line[:1] in "-+" and line[:3] not in ("---", "+++"))
    (file,) = (path for path in task.snapshot.glob("*.py"))
    script = in_turn(
        call("Read", file_path=file.name), call("Edit", file_path=file.name, old_string=old, new_string=new), "Done."
    )
    episodes = await asyncio.gather(
        *(run_episode(setup(proxy, config, scripted(script)), task, f"e{number}") for number in range(2))
    )
    assert [episode.verdict.outcome for episode in episodes] == ["resolved"] * 2, [e.verdict for e in episodes]
    assert left(get_engine()) == []


async def test_infrastructure_failures_have_their_cause(
    proxy: ProxyServer, tasks: list[Task], config: DictConfig
) -> None:
    kept: list[Episode] = []
    lost = dataclasses.replace(tasks[0], image="localhost:1/no/such:1")
    once = dataclasses.replace(setup(proxy, config, scripted(in_turn("Done."))), infra_retries=1)
    episode = await play(once, lost, "e", kept.append)
    assert (episode.verdict.reason, episode.verdict.reward, list(episode.rows)) == (Reason.MISSING_IMAGE, None, [])
    assert [attempt.id for attempt in kept] == ["e", "e.1"]
    assert proxy.sessions == {} and left(get_engine()) == []


@pytest.mark.claude
async def test_a_collection_keeps_what_containers_leave_and_no_secret(tasks: list[Task], tmp_path: Path) -> None:
    """The agent prints the secret of its session, which is then in its session file, stream and log."""
    source, out = tmp_path / "tasks.parquet", tmp_path / "out"
    task_images().write_tasks(source, tasks)
    tells = call("Bash", command='echo "the key is $ANTHROPIC_AUTH_TOKEN"; echo hi > NOTE')
    api = ProxyServer()
    await api.start()
    session = await api.open_session("e", char_policy(scripted(in_turn(tells, "Done."))))
    what = ["anthropic", f"endpoint=http://127.0.0.1:{api.port}", "models.high=opus-5", "models.low=haiku-5"]
    what += [f"data={source}", f"out={out}", "sandbox=docker", f"sandbox.base_image={base_image()}"]
    what += ["agent.bare=true", "agent.tools=[Bash]", "agent.system_prompt=Repair.", "sandbox.concurrency=2"]
    try:
        process = start(*what, program="rollout.collect", ANTHROPIC_API_KEY=session.secret)
        text, _ = await asyncio.to_thread(process.communicate)
        assert process.returncode == 0, text
    finally:
        await api.stop()
    records = {record.task: record for record in Reader(out)}
    assert records.keys() == {task.instance_id for task in tasks}
    assert all(record.missing == [] and record.verdict["outcome"] == "unresolved" for record in records.values()), text
    for name, record in records.items():
        told = re.search(rb"the key is ([\w-]{8,})", b"".join(record.parts))  # a record is exact
        assert told is not None
        place = out / "traces" / name / "epoch_0"
        (own,) = place.glob("sessions/**/*.jsonl")
        for file in (own, place / "stream.jsonl"):
            assert "the key is [redacted]" in file.read_text(), file
        files = {file.name: file.read_bytes() for file in place.rglob("*") if file.is_file()}
        assert not any(told[1] in data for data in files.values())
        assert b"+hi" in files["patch.diff"] and files["grading.log"] and "agent.log" in files
    assert not any(session.secret.encode() in file.read_bytes() for file in out.rglob("*") if file.is_file())
    assert left(get_engine()) == []
