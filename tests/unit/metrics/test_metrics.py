"""Records become the figures of episodes, and these become metrics of steps, a line, a table and a curve."""

import functools
import json
import statistics
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from rewards.task import Task
from rewards.verdict import Reason, Verdict
from rl.metrics import episodes as metrics
from rl.metrics import report
from rl.metrics.panels import Panel
from rl.run.progress import step_line
from rollout.agent import AgentRun, Status
from rollout.episode import Episode
from rollout.figures import line
from rollout.proxy.session import Session
from rollout.proxy.wire import decode_request
from rollout.records import NodeRecord, Record, record_of
from rollout.sandbox.docker import warm
from tests.kit import QueueEngine, char_policy, empty_record
from tests.unit.rewards.test_task import row


def episode(**changes: Any) -> metrics.Line:
    record = empty_record(repo="acme/calc", counters={"calls": 1, "overhead_s": 0.002})
    return line(record) | {"reason": None, "rows": 1} | changes


async def test_figures_of_an_episode_come_from_its_record() -> None:
    """Two calls; the first reply is trained in the row of the second, and a third one was never delivered."""
    session = Session("e", char_policy(QueueEngine("one", "three", "lost")))
    talk: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    prompts = sampled = 0
    for said in ("one", "three", "lost"):
        body = json.dumps({"model": "policy", "max_tokens": 50, "messages": talk}).encode()
        node = await session.prepare(decode_request(body), retry=False).reply()
        node.delivered = said != "lost"
        talk += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
        prompts, sampled = prompts + node.reply.input_tokens, sampled + len(said) + 1
    session.counters.overhead_s, session.counters.cache_queries = 0.006, 4
    task = Task.from_row(row(difficulty="easy"), Path())
    verdict = Verdict(Reason.TESTS_FAILED, dropped=["a", "b"], flags=["exit"])
    timing = {"total": 4.0, "boot": 0.5, "agent": 2.0, "grade": 1.0}
    run = AgentRun(Status.MAX_TURNS, 2, "", [])
    played = Episode("train-7-x", task, 1, 9.0, verdict, session, run, b"+x", session.tree.sequences(), timing)
    record = record_of(played, "train", 7, "m", "kit")
    wanted = {
        "episode": "train-7-x", "task": task.instance_id, "repo": task.repo, "difficulty": "easy", "split": "train",
        "step": 7, "resolved": False, "infra": False, "reason": "tests_failed", "reward": 0.0, "dropped": 2,
        "flags": ["exit"], "rows": 1, "tokens_sampled": sampled, "tokens_context": session.tree.tokens - sampled,
        "tokens_trained": sampled - len("lost "), "tokens_in": prompts, "turns": 2, "calls": 3, "malformed_calls": 0,
        "refused_calls": 0, "foreign_calls": 0, "unread_replies": 0, "cut_replies": 0, "overlong": True,
        "no_call": True, "cache_queries": 4, "cache_hits": 0, "wall_s": 4.0, "boot_s": 0.5,
        "agent_s": 2.0, "grade_s": 1.0, "proxy_overhead_ms": pytest.approx(2.0), "record": "",
    }  # fmt: skip
    assert line(record) == wanted
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=Record)
    assert line(read) == wanted and json.dumps(line(read)) == json.dumps(line(record))


def test_figures_without_a_session_and_of_a_model_elsewhere() -> None:
    task, verdict = Task.from_row(row(), Path()), Verdict(Reason.NO_SPACE)
    lost = line(record_of(Episode("e", task, 0, 0.0, verdict, None, None, b"", [], {}), "val", 0, "m", ""))
    assert (lost["infra"], lost["reward"], lost["calls"], lost["turns"]) == (True, None, 0, 0)
    assert (lost["tokens_sampled"], lost["wall_s"], lost["proxy_overhead_ms"]) == (0, 0.0, None)
    used = {"inputTokens": 3, "cacheReadInputTokens": 40, "cacheCreationInputTokens": 500, "outputTokens": 7}
    events = [{"type": "result", "modelUsage": {"policy": used, "policy-side": {"inputTokens": 1000}}}]
    hosted = line(empty_record(events=events))
    assert (hosted["tokens_in"], hosted["tokens_sampled"], hosted["tokens_context"]) == (1543, 7, 0)


def test_an_episode_without_a_call_is_told_from_one_with() -> None:
    def said(*kinds: str) -> Record:
        blocks = [{"type": kind, "text": "x"} for kind in kinds]
        return empty_record(nodes=[NodeRecord(-1, b""), NodeRecord(0, b"", logprobs=b"", blocks=blocks)])

    assert line(said("text"))["no_call"] and not line(said("text", "tool_use"))["no_call"]
    elsewhere = [line(empty_record(agent={"turns": turns}))["no_call"] for turns in (0, 1, 2)]
    assert elsewhere == [True, True, False]


def test_infrastructure_failures_count_but_do_not_average():
    records = [
        episode(resolved=True, reward=1.0, rows=3),
        episode(reason="no_patch"),
        episode(infra=True, reason="sandbox_boot", reward=None, rows=0, proxy_overhead_ms=None),
    ]
    folded = metrics.fold(records, "episode")
    assert folded["episode/resolve_rate"] == 0.5
    assert folded["episode/rows"] == 2.0
    assert folded["episode/count"] == 2
    assert folded["infra/failures"] == 1
    assert folded["infra/sandbox_boot"] == 1
    assert folded["failure/no_patch"] == 1
    assert folded["proxy/overhead_ms"] == 2.0


def test_warm_boots_are_those_of_all_attempts():
    """A process tells with each attempt what it has booted since the last one, whichever episodes that was for."""
    warm.told()  # what other tests have booted
    for seconds, hit in ((0.5, False), (0.1, True), (0.0, True)):
        warm._boots.append((hit, seconds))
    told = warm.told()
    assert told == {"boots": 3, "warm_boots": 2, "booting_s": pytest.approx(0.6)} and warm.told() == {}
    lost = episode(infra=True, reason="docker", reward=None, boots=1, warm_boots=0, booting_s=0.2)
    folded = metrics.fold([episode(**told), episode(), lost], "val")
    assert (folded["val/boxes/warm_hits"], folded["val/boxes/boot_s"]) == (0.5, pytest.approx(0.2))
    assert not any("boxes/" in key for key in metrics.fold([episode()], "val"))


def test_all_lost_to_infrastructure_has_no_resolve_rate():
    folded = metrics.fold([episode(infra=True, reason="docker", reward=None)], "episode")
    assert folded == {"episode/count": 0, "infra/failures": 1, "infra/docker": 1}


def test_a_few_figures_are_split_by_agent_where_several_have_played():
    one = [episode(resolved=True, agent_kind="codex", turns=4), episode(agent_kind="codex", turns=2)]
    lost = episode(infra=True, reason="docker", reward=None, agent_kind="opencode")
    assert not any("agent/" in key for key in metrics.fold([*one, lost], "episode"))
    folded = metrics.fold([*one, lost, episode(rows=3, agent_kind="a:B.of")], "val")
    assert {key: value for key, value in folded.items() if "agent/" in key and "tokens" not in key} == {
        "val/agent/codex/count": 2, "val/agent/codex/resolve_rate": 0.5, "val/agent/codex/turns": 3.0,
        "val/agent/codex/rows": 1.0, "val/agent/a_B.of/count": 1, "val/agent/a_B.of/resolve_rate": 0.0,
        "val/agent/a_B.of/turns": 0.0, "val/agent/a_B.of/rows": 3.0,
    }  # fmt: skip


def test_the_record_names_the_agent() -> None:
    task, run = Task.from_row(row(), Path()), AgentRun(Status.FINISHED, 2, "", [])
    for ended in (run, None):
        played = Episode("e", task, 0, 0.0, Verdict(Reason.NO_SPACE), None, ended, b"", [], {}, played_by="codex")
        record = record_of(played, "train", 1, "m", "")
        assert record.agent["kind"] == line(record)["agent_kind"] == "codex"


def test_flags_and_dropped_paths_are_counted():
    records = [
        episode(resolved=True, reward=1.0, flags=["exit", "results"], dropped=2),
        episode(flags=["exit"]),
        episode(resolved=True, reward=1.0, flags=["no_second_opinion"], dropped=1),
        episode(infra=True, reason="no_git", reward=None, flags=["exit"]),
    ]
    for prefix, outer in (("episode", ""), ("val", "val/")):
        folded = metrics.fold(records, prefix)
        found = {key: folded[key] for key in folded if key.removeprefix(outer).startswith(("flag", "dropped"))}
        assert found == {
            f"{outer}flags/exit": 2,
            f"{outer}flags/results": 1,
            f"{outer}flags/no_second_opinion": 1,
            f"{outer}flagged/episodes": 2,
            f"{outer}flagged/resolved": 1,
            f"{outer}dropped/episodes": 2,
        }
    assert not any("flag" in key for key in metrics.fold([episode()], "episode"))


def test_resolve_rates_by_label():
    records = [
        episode(resolved=True, difficulty="<15 min fix"),
        episode(difficulty="<15 min fix"),
        episode(difficulty=">4 hours", repo="acme/other"),
        episode(infra=True, reason="docker", reward=None, difficulty=">4 hours"),
        episode(resolved=True),
    ]
    folded = metrics.fold(records, "val", ["difficulty", "repo"])
    assert {key: value for key, value in folded.items() if "/difficulty/" in key or "/repo/" in key} == {
        "val/difficulty/under_15_min_fix/resolve_rate": 0.5,
        "val/difficulty/over_4_hours/resolve_rate": 0.0,
        "val/repo/acme/calc/resolve_rate": 2 / 3,
        "val/repo/acme/other/resolve_rate": 0.0,
    }
    assert not any("/repo/" in key for key in metrics.fold(records, "val"))


def test_wall_times_and_cache_hits():
    records = [episode(wall_s=float(n), cache_queries=100, cache_hits=n) for n in range(1, 101)]
    folded = metrics.fold([*records, episode(wall_s=1.0, proxy_overhead_ms=None)], "episode")
    assert [folded[f"episode/wall_s_p{p}"] for p in (50, 90, 99)] == [50.0, 90.0, 99.0]
    assert folded["engine/prefix_cache_hit_rate"] == 0.505
    assert "engine/prefix_cache_hit_rate" not in metrics.fold([episode()], "episode")


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.integers(0, 100))
@example([524289.0, -524288.9999999999], 50)
def test_percentiles_are_numpys_and_the_50th_is_the_median(values, percent):
    # Where large values cancel out, both sides round: each by a few units in the last place of the largest.
    close = functools.partial(pytest.approx, rel=1e-6, abs=1e-12 + 2e-15 * max(map(abs, values)))
    assert metrics.percentile(values, percent) == close(float(numpy.percentile(values, percent)))
    assert metrics.percentile(values, 50) == close(statistics.median(values))


def test_a_curve_that_hardly_moves_looks_flat(tmp_path: Path):
    panel = Panel("Engine and trainer", "", {"training/rollout_actor_probs_pearson_corr": "correlation"})
    axes = Figure().subplots()
    steps = [{"step": n, "training/rollout_actor_probs_pearson_corr": 1 - n / 1e7} for n in range(5)]
    report.draw(axes, panel, {"": steps})
    low, high = axes.get_ylim()
    assert high - low > 0.019 and low < 1 < high


def test_groups_that_teach_nothing_are_counted():
    groups = {
        "a": [(1.0, True), (1.0, True)],
        "b": [(0.0, False), (0.0, False), (0.0, False)],
        "c": [(1.0, True), (0.0, False)],
        "d": [(0.25, False), (0.5, False)],  # a shaped reward
    }
    assert metrics.group_metrics(groups) == {
        "group/played": 4,
        "group/used": 4,
        "group/alone": 0,
        "group/episodes": 2.25,
        "group/all_equal": 0.5,
        "group/all_resolved": 0.25,
        "group/none_resolved": 0.5,
    }
    assert metrics.group_metrics({}) == {}


def test_groups_that_were_filtered_out_were_played():
    mixed = [(1.0, True), (0.0, False)]
    found = metrics.group_metrics({"a": mixed, "b": mixed}, {0.0: 3, 1.0: 1}, surplus=2, alone=1)
    assert (found["group/played"], found["group/used"], found["group/alone"]) == (9, 2, 1)
    # Of the eight whose rewards could be compared.
    assert (found["group/all_equal"], found["group/all_resolved"], found["group/none_resolved"]) == (
        4 / 8,
        1 / 8,
        3 / 8,
    )


def test_held_out_metrics_do_not_mix_with_training():
    folded = metrics.fold([episode(split="val", reason="tests")], "val")
    assert all(key.startswith("val/") for key in folded)


def test_the_reader_returns_each_line_once_and_by_split(tmp_path):
    log = metrics.EpisodeLog(tmp_path)
    log.append(episode(task="old"))
    reader = metrics.EpisodeReader(tmp_path)
    log.append(episode(task="a"))
    log.append(episode(task="b", split="val"))
    assert [r["task"] for r in reader.take("val")] == ["b"]
    assert [r["task"] for r in reader.take("train")] == ["a"]
    with open(log.path, "a") as f:
        f.write('{"split": "train", "ta')  # being written
    assert reader.take("train") == []


def test_episodes_that_an_interrupted_step_has_left_count_in_the_resumed_one(tmp_path):
    log = metrics.EpisodeLog(tmp_path)
    for step, session in ((2, "g_0"), (3, "g_0"), (3, "g_1"), (3, "h_0"), (3, None)):
        log.append(episode(step=step, task=f"{step} {session}", **({"session": session} if session else {})))
    metrics.append_step(tmp_path, 3, 0.0, {})
    metrics.rewind(tmp_path, 2, lambda session: session in ("g_0", "h_0"))
    reader = metrics.EpisodeReader(tmp_path, after=2)
    log.append(episode(step=3, task="new"))
    assert [one["task"] for one in reader.take("train")] == ["3 g_0", "3 h_0", "new"]
    assert metrics.EpisodeReader(tmp_path).take("train") == [] == metrics.read_jsonl(tmp_path / "metrics.jsonl")


def test_rewind_drops_lines_after_the_checkpoint(tmp_path):
    for step in range(4):
        metrics.append_step(tmp_path, step, 0.0, {"a": step, "b": float("nan"), "c": "text"})
    log = metrics.EpisodeLog(tmp_path)
    for step in (1, 3):
        log.append(episode(step=step))
    with open(tmp_path / "metrics.jsonl", "a") as f:
        f.write('{"step": 4, "torn')
    metrics.rewind(tmp_path, 2)
    records = metrics.read_jsonl(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in records] == [0, 1, 2]
    assert records[1] == {"step": 1, "time": 0.0, "a": 1.0, "b": None}
    assert [json.loads(line)["step"] for line in log.path.read_text().splitlines()] == [1]


@pytest.mark.parametrize(("recorded", "a"), [([0, 1, 2, 3], 2.0), ([0, 1], 0.5), ([0, 1, 3], 0.5), ([], 0.5)])
def test_a_step_that_has_a_checkpoint_has_its_record(recorded, a, tmp_path):
    """A kill between checkpoint and record left 0, 1, 3, ... in metrics.jsonl."""
    for step in recorded:
        metrics.append_step(tmp_path, step, 0.0, {"a": step})
    metrics.keep_step(tmp_path, 2, 0.0, {"a": 0.5})
    for _ in range(2):  # a second start finds the record
        metrics.rewind(tmp_path, 2)
        records = metrics.read_jsonl(tmp_path / "metrics.jsonl")
        assert [r["step"] for r in records] == [step for step in recorded if step < 2] + [2]
        assert records[-1] == {"step": 2, "time": 0.0, "a": a}
    metrics.rewind(tmp_path, 1)  # an earlier checkpoint: the later one could not be used
    assert all(r["step"] < 2 for r in metrics.read_jsonl(tmp_path / "metrics.jsonl"))


STEP = {
    "step": 2,
    "timing_s/step": 11.0,
    "timing_s/gen": 6.0,
    "episode/resolve_rate": 0.25,
    "episode/rows": 1.5,
    "episode/tokens_context": 800.0,
    "episode/tokens_sampled": 90.0,
    "episode/reward_mean": 0.25,
    "critic/score/mean": 0.625,  # of the used groups only
    "group/used": 3,
    "group/played": 7,
    "training/rollout_actor_probs_pearson_corr": 0.9991,
    "infra/failures": 1.0,
    "val/resolve_rate": 0.5,
}


def test_step_line_and_summary(tmp_path):
    line = step_line(STEP, 20)
    for part in (
        "step 2/20",
        "resolved 25.0 %",
        "reward 0.250",
        "groups 3 of 7",
        "rows/ep 1.50",
        "800+90",
        "pearson 0.9991",
        "infra 1",
        "50.0 %",
    ):
        assert part in line
    before = {"step": 0, "val/resolve_rate": 0.1}
    table = dict(report.summary([before, STEP]))
    assert table["held-out resolved, step 0"] == "10.0 %"
    assert table["held-out resolved, step 2"] == "50.0 %"
    assert table["lowest rollout/trainer correlation"] == "0.9991"
    report.curve([before, STEP], tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_summary_of_a_run_without_steps():
    assert report.summary([]) == [("steps", "0")]


def test_roles_are_averaged_over_all_episodes_also_those_without_the_role() -> None:
    """By default there are no such metrics."""
    assert not [name for name in metrics.fold([episode(reward=1.0)], "episode") if "role/" in name]
    main = {"calls": 2, "turns": 2, "tokens": 9, "rows": 1, "credit": 0.5}
    lines = [episode(reward=1.0, roles={"main": main, "subagent/own:x": {"calls": 4}}), episode(roles={"main": main})]
    lines[1]["reward"] = 0.0
    found = metrics.fold(lines, "val")
    assert found["val/role/main/credit"] == 0.5 and found["val/role/main/rows"] == 1
    assert found["val/role/subagent/own_x/calls"] == 2
