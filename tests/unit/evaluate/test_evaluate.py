"""This module tests evaluations without an engine: config and checks, settings from runs, the directory, results and
comparisons.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from omegaconf import OmegaConf

from rewards.task import Task, load_tasks
from rewards.verdict import Reason, Verdict
from rl.config.compose import ConfigError, compose
from rl.episodes import asking
from rl.episodes.setup import mix_from
from rl.evaluate import compare, config, player, results, serve, setup
from rl.evaluate.__main__ import main
from rl.evaluate.player import LostError, Player
from rl.quickstart.tasks import make_tasks
from rl.run.journal import JournalError
from rl.run.weights import Weights, find_weights
from rollout.agent import AgentRun, Status
from rollout.agent.mix import Mix
from rollout.episode import Episode
from rollout.figures import journal_line
from rollout.proxy.forward import SideEndpoint
from rollout.proxy.server import ProxyServer
from rollout.records import RecordWriter, record_of
from tests.evaluate_kit import HOSTED
from tests.kit import QueueEngine, char_policy, empty_record


@pytest.fixture(scope="module")
def tasks_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tasks")
    make_tasks(out, seed=3, n_train=4, n_heldout=2)
    return out / "train.parquet"


@pytest.fixture
def tasks(tasks_file: Path) -> list[Task]:
    return load_tasks(tasks_file)


# --- what answers


@asynccontextmanager
async def vllm(**models: int) -> AsyncIterator[str]:
    """Answer like a vLLM server with these models and context lengths. ``slow`` never replies, ``silent`` cannot, the
    logprobs of ``sure`` are those of what it samples from."""
    over = asyncio.Event()

    async def listed(_: web.Request) -> web.Response:
        data = [{"id": name, "root": f"/models/{name}", "max_model_len": length} for name, length in models.items()]
        return web.json_response({"data": data})

    async def generate(_: web.Request) -> web.Response:
        if "slow" in models:
            await over.wait()
        choice = {
            "token_ids": [1],
            "logprobs": {"content": [{"logprob": -1.0 + ("sure" in models)}]},
            "finish_reason": "length",
        }
        return web.json_response({"choices": [choice]})

    app = web.Application()
    app.router.add_get("/v1/models", listed)
    if "silent" not in models:
        app.router.add_post("/inference/v1/generate", generate)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    over.set()
    await runner.cleanup()


async def test_a_vllm_server_is_asked_for_its_models_and_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    async with vllm(one=512) as url:
        assert await serve.ask_server(url, None, None) == serve.ServedModel("one", "/models/one", 512, False)
        with pytest.raises(ConfigError, match=r"model: http.* has no 'two'; it serves 'one'"):
            await serve.ask_server(url, "two", None)
    async with vllm(sure=512) as url:
        assert (await serve.ask_server(url, None, None)).processed
    async with vllm(one=512, two=1024) as url:
        assert (await serve.ask_server(url, "two", "key")).max_context == 1024
        with pytest.raises(ConfigError, match=r"serves 'one', 'two'; set model=NAME"):
            await serve.ask_server(url, None, None)
    async with vllm(silent=1) as url:
        with pytest.raises(ConfigError, match=r"endpoint: .* status 404"):
            await serve.ask_server(url, None, None)
    monkeypatch.setattr(serve, "ASK_S", 0.3)
    async with vllm(slow=1) as url:
        with pytest.raises(ConfigError, match=r"endpoint: http.* gives no reply in 0.3 s"):
            await serve.ask_server(url, None, None)


async def test_an_endpoint_is_asked_for_a_token() -> None:
    back = ProxyServer()
    await back.start()
    session = await back.open_session("e", char_policy(QueueEngine("x")))
    url = f"http://127.0.0.1:{back.port}"
    await asking.ask_endpoint(SideEndpoint(url, "m", session.secret))
    with pytest.raises(ConfigError, match="status 401; it does not accept the key in key_env"):
        await asking.ask_endpoint(SideEndpoint(url, "m", "wrong"))
    with pytest.raises(ConfigError, match="status 401; it needs a key; set key_env=VARIABLE"):
        await asking.ask_endpoint(SideEndpoint(url, "m"))
    with pytest.raises(ConfigError, match="is no vLLM server"):
        await serve.ask_server(url, None, None)
    await back.stop()
    async with vllm(one=1) as other:
        with pytest.raises(ConfigError, match="does not answer as 'm': status 404"):
            await asking.ask_endpoint(SideEndpoint(other, "m", "k"))


# --- what is evaluated


def checkpoint(run: Path, step: int, *files: str) -> Path:
    actor = run / "checkpoints" / f"global_step_{step}" / "actor"
    for file in ("fsdp_config.json", "model_world_size_1_rank_0.pt", "huggingface/config.json", "../complete", *files):
        (actor / "huggingface").mkdir(parents=True, exist_ok=True)
        (actor / file).parent.mkdir(exist_ok=True)
        if not (actor / file).exists():
            (actor / file).write_text(file)
    return actor


def a_run(directory: Path, tasks_file: Path, *overrides: str) -> Path:
    trained = compose(["+experiment=quickstart", f"data.val_files={tasks_file}", *overrides])
    directory.mkdir(parents=True)
    trained.run.dir = str(directory)
    OmegaConf.save(trained, directory / "config.yaml", resolve=True)
    return directory


def test_a_policy_is_a_model_a_run_or_a_checkpoint(tmp_path: Path, tasks_file: Path) -> None:
    run = a_run(tmp_path / "quickstart" / "today", tasks_file)
    with pytest.raises(ConfigError, match="neither a model directory nor a run"):
        find_weights(str(run))
    for step in (9, 10):
        actor = checkpoint(run, step)
    found = find_weights(str(run))
    assert found == Weights(str(actor / "merged"), actor, run, 10)
    assert found.name == "quickstart-today-step10"
    assert find_weights(str(actor)) == find_weights(str(actor.parent)) == found
    assert find_weights(str(run / "checkpoints" / "global_step_9")).step == 9
    (checkpoint(run, 11).parent / "complete").unlink()  # still being written
    assert find_weights(str(run)) == found
    before = found.stamps()
    checkpoint(run, 10, "merged/model.safetensors", "merged/config.json")
    merged = find_weights(str(run))
    assert merged == replace(found, sharded=None) and merged.stamps() == before
    os.utime(actor / "model_world_size_1_rank_0.pt", (1, 1))  # trained again
    assert merged.stamps() != before
    # The trainer may have saved whole weights itself.
    checkpoint(run, 9, "huggingface/model.safetensors")
    assert find_weights(str(run / "checkpoints" / "global_step_9")).model.endswith("huggingface")
    assert find_weights("Qwen/Qwen3-8B").name == "Qwen__Qwen3-8B"
    plain = tmp_path / "model"
    plain.mkdir()
    (plain / "config.json").touch()
    with pytest.raises(ConfigError, match="no weights"):
        find_weights(str(plain))
    (plain / "model.safetensors").touch()
    assert find_weights(str(plain)) == Weights(str(plain))


def test_a_run_passes_on_its_settings_and_the_command_line_takes_precedence(tmp_path: Path, tasks_file: Path) -> None:
    run = a_run(tmp_path / "quickstart" / "today", tasks_file, "proxy.max_tokens=null", "agent.max_turns=7")
    checkpoint(run, 1)
    composed, _ = config.compose_evaluation([f"policy={run}"])
    assert composed.agent.max_turns == 7 and composed.agent.bare and list(composed.agent.tools) == ["Edit", "Read"]
    assert (composed.max_context, composed.proxy.max_tokens, composed.sampling.temperature) == (4096, 2048, 1.0)
    assert (composed.serve.dtype, composed.serve.enforce_eager, composed.tasks) == ("float32", True, str(tasks_file))
    said = ["agent.max_turns=3", "sandbox=docker", "sampling.top_p=0.8", "max_context=1000", "tasks=other.parquet"]
    composed, _ = config.compose_evaluation([f"policy={run}", *said])
    assert (composed.agent.max_turns, composed.agent.timeout_s) == (3, 60)
    assert (composed.sandbox.kind, composed.sandbox.concurrency) == (
        "docker",
        compose(["sandbox=docker"]).sandbox.concurrency,
    )
    assert (composed.sampling.top_p, composed.sampling.temperature) == (0.8, 1.0)
    assert (composed.max_context, composed.tasks) == (1000, "other.parquet")
    with pytest.raises(Exception, match="max_truns"):
        config.compose_evaluation([f"policy={run}", "agent.max_truns=3"])
    for other in ("codex", "opencode"):  # the run's own settings are for the agent that it was trained in
        composed, _ = config.compose_evaluation([f"policy={run}", f"agent={other}", "agent.timeout_s=77"])
        assert composed.agent == compose([f"agent={other}", "agent.timeout_s=77"], "evaluate").agent
        assert (composed.max_context, composed.proxy.max_tokens, composed.tasks) == (4096, 2048, str(tasks_file))
        config._check_values(composed, "evaluate")
    mixed = a_run(tmp_path / "quickstart" / "mixed", tasks_file, "seed=7", "agent=mixed", "agent.mix={codex:1}")
    checkpoint(mixed, 1)
    composed, _ = config.compose_evaluation([f"policy={mixed}"])
    assert mix_from(composed) == Mix({"codex": 1}, 7)  # held-out tasks have the same agents
    with pytest.raises(ConfigError, match="which has its own config"):
        config.compose_evaluation([f"policy={run}", "+experiment=qwen3_8b"])


def test_an_experiment_passes_on_its_settings_and_its_model() -> None:
    trained = compose(["+experiment=qwen3_8b"])
    new = "+grading.flags.mine={command: abc}"
    given = ["+experiment=qwen3_8b", "agent.max_turns=9", "tasks=t.parquet", new]
    composed, weights = config.compose_evaluation(given)
    assert composed.grading.flags.mine == {"command": "abc"} and composed.grading.flags.exit
    assert weights == Weights(trained.actor_rollout_ref.model.path)
    assert (composed.agent.max_turns, composed.agent.timeout_s, composed.sandbox) == (
        9,
        trained.agent.timeout_s,
        trained.sandbox,
    )
    assert (composed.max_context, composed.tasks) == (trained.actor_rollout_ref.rollout.max_model_len, "t.parquet")
    assert composed.proxy.tool_parser == trained.proxy.tool_parser
    composed, weights = config.compose_evaluation(["+experiment=qwen3_8b", "endpoint=http://127.0.0.1:1"])
    assert weights is None and composed.policy is None and composed.tasks == trained.data.val_files


def test_the_identity_has_only_what_decides_how_an_episode_ends(tasks_file: Path, tasks: list[Task]) -> None:
    composed, weights = config.compose_evaluation([*HOSTED, f"tasks={tasks_file}"])

    def identity(*changes: str) -> dict[str, Any]:
        changed: Any = OmegaConf.merge(composed, OmegaConf.from_dotlist([*changes]))
        return config.identity_of(changed, weights, tasks)

    same = identity()
    for free in ("sandbox.concurrency=1", "episode.infra_retries=9", "samples=4", "limit=1", "root=other", "name=n"):
        assert identity(free) == same, free
    for deciding in ("agent.max_turns=2", "sandbox.cpu_s=1", "model=n", "sampling.top_p=0.1", "grading.timeout_s=1"):
        assert identity(deciding) != same, deciding
    composed, weights = config.compose_evaluation([*HOSTED, f"tasks={tasks_file}", "sandbox=docker"])
    assert identity() != same
    composed, weights = config.compose_evaluation(
        [*HOSTED, f"tasks={tasks_file}", "agent=mixed", "agent.mix={claude_code:1,codex:1}"]
    )
    same = identity()
    assert identity("agent.claude_code.binary=/elsewhere/claude") == same
    for deciding in ("agent.mix.codex=2", "agent.seed=9", "agent.codex.timeout_s=9"):
        assert identity(deciding) != same, deciding
    composed, weights = config.compose_evaluation([*HOSTED, f"tasks={tasks_file}", "sandbox=docker"])
    images = ("pull_parallel=1", "image_budget_gb=1", "registry_mirror=m", "pull_patience_s=1")
    assert {json.dumps(identity(f"sandbox.{free}")) for free in images} == {json.dumps(identity())}


# --- the directory


def an_episode(task: Task, name: str, verdict: Verdict) -> Episode:
    run = AgentRun(Status.FINISHED, 2, "", [])
    return Episode(name, task, 0, 1.0, verdict, None, run, b"a patch", [], {"total": 2.0, "agent": 1.5})


RESOLVED = Verdict(None)
FAILED = Verdict(Reason.TESTS_FAILED, "1 of 2 tests failed")
LOST = Verdict.infra("no_space", "disk full")


class Script:
    """A script stands in for rollout.episode.play: ``verdict`` gives the verdict of each (task, sample)."""

    def __init__(self, verdict: Callable[[Task, int], Verdict]) -> None:
        self.verdict, self.played = verdict, []

    async def __call__(self, setup: Any, task: Task, name: str, keep: Callable[[Episode], Awaitable[None]]) -> Episode:
        sample = int(name.split("-")[1])
        self.played.append((task.instance_id, sample))
        episode = an_episode(task, name, self.verdict(task, sample))
        await keep(episode)
        return episode


async def go(evaluation: Player, tasks: list[Task], samples: int, concurrency: int = 2) -> list[player.Line]:
    seen: list[player.Line] = []
    setup: Any = SimpleNamespace(policy=SimpleNamespace(parser=SimpleNamespace(spec="kit")))
    wanted = evaluation.wanted(tasks, samples)
    await evaluation.play(setup, wanted, concurrency=concurrency, step=3, model="m", done=seen.append)
    return seen


async def test_only_episodes_without_a_verdict_are_played(
    tmp_path: Path, tasks: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(lambda task, sample: LOST if task is tasks[1] else RESOLVED)
    monkeypatch.setattr(player, "play", script)
    evaluation = Player(tmp_path, {"a": 1})
    with pytest.raises(JournalError, match="another process"):
        Player(tmp_path, {"a": 1})
    await go(evaluation, tasks, 1)
    evaluation.close()
    assert [task for task, _ in script.played] == [task.instance_id for task in tasks]
    evaluation = Player(tmp_path, {"a": 1})
    assert evaluation.wanted(tasks, 1) == [(tasks[1], 0)]
    assert len(evaluation.wanted(tasks, 2)) == 5 and evaluation.wanted(tasks, 2)[0] == (tasks[1], 0)
    script.verdict = lambda task, sample: FAILED
    assert [line["reason"] for line in await go(evaluation, tasks, 1)] == ["tests_failed"]
    assert not evaluation.wanted(tasks, 1) and len(evaluation.lines) == 5
    evaluation.close()


def test_shards_play_all_tasks_and_a_merge_sums_them_up(
    tmp_path: Path, tasks_file: Path, tasks: list[Task], monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """Two parts, each in a process of its own on a cluster; what the second has lost, the whole command plays."""
    script = Script(lambda task, sample: RESOLVED if task.instance_id != tasks[0].instance_id else FAILED)

    async def ask(_: Any) -> serve.ServedModel:
        return serve.ServedModel("m", "", 1000)

    monkeypatch.setattr(player, "play", script)
    monkeypatch.setattr(setup, "ask", ask)
    binary = tmp_path / "claude"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    command = [*HOSTED, f"tasks={tasks_file}", f"root={tmp_path}/root", f"agent.binary={binary}", "samples=2"]
    command.append("sandbox.concurrency=2")
    assert main([*command, "shard=1/2"]) == 0
    out = capfd.readouterr().out
    assert " x 2 s, 2 at a time" in out and "/shards/1-of-2" in out
    assert main([*command, "merge=true"]) == 1  # not all have a verdict
    first = len(script.played)
    assert main([*command, "shard=2/2"]) == 0
    assert sorted(script.played) == sorted((task.instance_id, n) for task in tasks for n in (0, 1)) and 0 < first < 8
    assert main([*command, "merge=true"]) == 0 and main(command) == 0
    assert len(script.played) == 8
    [directory] = (tmp_path / "root").iterdir()
    found = json.loads((directory / "results.json").read_text())
    assert (found["complete"], found["episodes"], found["resolved"]) == (True, 8, 6)
    assert len(json.loads((directory / "preds.json").read_text())) == 4
    # Parts of another evaluation are not mixed in.
    capfd.readouterr()
    assert main([*command, f"out={directory}", "agent.max_turns=3", "merge=true"]) == 2
    assert "belongs to another evaluation (agent.max_turns is" in capfd.readouterr().err


async def test_a_line_that_was_not_written_is_derived_from_its_record(tmp_path: Path, tasks: list[Task]) -> None:
    evaluation = Player(tmp_path, {})
    evaluation.close()
    writer = RecordWriter(tmp_path / "episodes", "w")
    for number, task in enumerate(tasks[:2]):
        episode = an_episode(task, f"eval-0-{task.instance_id}-{number}", RESOLVED)
        writer.append(record := record_of(episode, "eval", 3, "m", "kit"))
    writer.close()
    # As if the process was killed while it wrote the second line.
    first = json.dumps(
        journal_line(
            record_of(an_episode(tasks[0], f"eval-0-{tasks[0].instance_id}-0", RESOLVED), "eval", 3, "m", "kit")
        )
    )
    (tmp_path / "journal.jsonl").write_text(first + "\n" + json.dumps(journal_line(record))[:30])
    evaluation = Player(tmp_path, {})
    assert evaluation.wanted(tasks, 1) == [(task, 0) for task in tasks[2:]]
    assert evaluation.lines == [json.loads(first), journal_line(record)]
    evaluation.close()
    assert len((tmp_path / "journal.jsonl").read_text().splitlines()) == 2


def test_another_evaluation_is_refused_with_the_keys_that_differ(tmp_path: Path) -> None:
    identity = {"sandbox": {"kind": "local", "cpu_s": 10}, "tasks": {"a": "1", "b": "2"}}
    Player(tmp_path, {**identity, "tasks": {}}).close()
    Player(tmp_path, identity).close()  # nothing was played: the directory is still free
    (tmp_path / "journal.jsonl").write_text(json.dumps(lines_of(a="l")[0]) + "\n")
    with pytest.raises(ConfigError, match=r"belongs to another evaluation \(sandbox.cpu_s is 10 there and 20 here\)"):
        Player(tmp_path, {**identity, "sandbox": {"kind": "local", "cpu_s": 20}})
    with pytest.raises(ConfigError, match="2 tasks have other rows or are in only one of them"):
        Player(tmp_path, {**identity, "tasks": {"a": "3", "b": "2", "c": "1"}})
    Player(tmp_path, identity).close()


async def test_an_evaluation_stops_when_no_episode_gets_a_verdict(
    tmp_path: Path, tasks: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(player, "play", Script(lambda task, sample: LOST))
    evaluation = Player(tmp_path, {})
    with pytest.raises(LostError, match="the last 9 episodes had no verdict; the last one: no_space: disk full"):
        await go(evaluation, tasks, 10)
    assert 9 <= len(evaluation.lines) < 20
    evaluation.close()


def test_a_line_has_its_sample_and_its_patch(tasks: list[Task]) -> None:
    line = journal_line(record_of(an_episode(tasks[0], "eval-2-x-1", FAILED), "eval", 3, "m", "kit"))
    assert (line["sample"], line["attempt"], line["started"], line["agent"]) == (2, 0, 1.0, "finished")
    assert (line["reason"], line["detail"], line["patch"]) == ("tests_failed", "1 of 2 tests failed", "a patch")
    assert (line["turns"], line["wall_s"], line["agent_s"]) == (2, 2.0, 1.5)


# --- results and comparisons


def lines_of(**outcomes: str) -> list[player.Line]:
    """Return the lines of several tasks; a character per episode tells if it is r(esolved), f(ailed) or l(ost)."""
    verdicts = {"r": RESOLVED, "f": FAILED, "l": LOST}
    rest: dict[str, Any] = {"agent": {"status": "finished", "turns": 2}, "patch": b"a patch"}
    return [
        journal_line(
            empty_record(episode=f"eval-{sample}-{name}-0", task=name, verdict=verdicts[one].to_dict(), **rest)
        )
        for name, said in outcomes.items()
        for sample, one in enumerate(said)
    ]


def rows(*names: str, **difficulty: str) -> dict[str, dict[str, Any]]:
    return {name: {"row": name, "repo": f"r/{name[0]}", "difficulty": difficulty.get(name)} for name in names}


def test_infrastructure_failures_are_counted_separately() -> None:
    lines = lines_of(a1="rr", a2="fl", b1="lr", b2="ll", c9="rr")
    found = results.results("n", rows("a1", "a2", "b1", "b2", a1="easy", a2="hard"), 2, lines)
    assert (found["tasks"], found["episodes"], found["resolved"], found["complete"]) == (4, 4, 3, False)
    assert found["infra"] == {"episodes": 4, "attempts": {"no_space": 4}}
    assert found["verdicts"] == {"resolved": 3, "tests_failed": 1}
    # pass@1 is the mean over the graded tasks (1, 0 and 1); pass@2 needs two graded episodes.
    assert found["pass_at_1"]["value"] == pytest.approx(2 / 3) and found["pass_at_1"]["tasks"] == 3
    assert found["pass_at_k"]["2"]["value"] == 1.0 and found["pass_at_k"]["2"]["tasks"] == 1
    assert found["by_repo"]["r/a"]["pass_at_1"]["value"] == 0.5 and found["by_repo"]["r/b"]["episodes"] == 1
    assert {name: one["resolved"] for name, one in found["by_difficulty"].items()} == {"easy": 2, "hard": 0}
    assert found["by_task"]["b2"]["episodes"] == 0
    assert found["spread"]["turns"]["sum"] == 8
    json.dumps(found)
    assert len(results.tables(found)) == 3


def test_a_lost_sample_is_complete_once_it_is_graded() -> None:
    found = results.results("n", rows("a"), 1, lines_of(a="l") + lines_of(a="f"))
    assert found["complete"] and found["infra"] == {"episodes": 0, "attempts": {"no_space": 1}}
    nothing = results.results("n", rows("a"), 1, lines_of(a="l"))
    assert nothing["pass_at_1"] is None and len(results.tables(nothing)) == 1


def test_swebench_reads_the_predictions(tmp_path: Path) -> None:
    from swebench.harness.utils import get_predictions_from_file

    lines = lines_of(a="rf", b="fl", c="lr")
    results.write_all(tmp_path, results.results("org/m", rows("a", "b", "c"), 2, lines), lines)
    for file, ids in (("preds.json", ["a", "b"]), ("preds.1.json", ["a", "c"])):
        read = get_predictions_from_file(str(tmp_path / file), "", "test")
        assert [one["instance_id"] for one in read] == ids
        assert all(
            one == {"instance_id": one["instance_id"], "model_name_or_path": "org/m", "model_patch": "a patch"}
            for one in read
        )


def test_a_comparison_is_paired(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    names = [f"t{i}" for i in range(12)]
    old = {name: "r" if i < 3 else "f" for i, name in enumerate(names)}
    new = {name: "r" if i >= 1 and i != 11 else "f" for i, name in enumerate(names)}
    for name, outcomes in (("old", old), ("new", new)):
        (tmp_path / name).mkdir()
        lines = lines_of(**outcomes)
        results.write_all(tmp_path / name, results.results(name, rows(*names), 1, lines), lines)
    a, b = (compare.load(tmp_path / name) for name in ("old", "new"))
    found = compare.compare(a, b, common=False)
    assert found["test"] == "McNemar, exact"
    assert (found["only_a"], found["only_b"]) == (["t0"], [f"t{i}" for i in (10, 3, 4, 5, 6, 7, 8, 9)])
    assert (found["both"], found["neither"]) == (2, 1)
    assert found["difference"]["value"] == pytest.approx(7 / 12)
    assert found["p"] == pytest.approx(2 * (1 + 9) / 2**9)
    assert compare.compare(a, a, common=False)["p"] == 1.0
    command = ["compare", str(tmp_path / "old"), str(tmp_path / "new"), "--json"]
    closed = subprocess.Popen(
        [sys.executable, "-m", "rl.evaluate", *command, tmp_path / "closed.json"], stdout=subprocess.PIPE
    )
    assert closed.stdout is not None
    closed.stdout.close()  # as `| head` does
    closed.wait(timeout=120)
    assert main([*command, str(tmp_path / "c.json")]) == 0
    assert (tmp_path / "closed.json").read_text() == (tmp_path / "c.json").read_text()
    out = capfd.readouterr().out
    assert "+0.583" in out and "p = 0.03906" in out and "solved by A only, 1: t0" in out
    assert json.loads((tmp_path / "c.json").read_text()) == found


def test_only_tasks_that_are_the_same_are_compared() -> None:
    one = results.results("a", rows("t1", "t2", "t3"), 2, lines_of(t1="rr", t2="rf", t3="ll"))
    changed = rows("t1", "t2", "t3", "t4")
    changed["t1"]["row"] = "another"
    two = results.results("b", changed, 2, lines_of(t1="rr", t2="rr", t3="ff", t4="ff"))
    with pytest.raises(ConfigError, match="2 tasks are the same, 2 are in only one or have other rows; --common"):
        compare.compare(one, two, common=False)
    found = compare.compare(one, two, common=True)
    assert found["tasks"] == 1 and found["left_out"] == {"other_tasks": 2, "without_verdict": 1}
    assert found["test"] == "permutation over tasks, exact" and found["gap_by_task"] == {"t2": 0.5}
    with pytest.raises(ConfigError, match="no task was graded in both"):
        compare.compare(one, results.results("b", rows("t3"), 1, lines_of(t3="r")), common=True)
