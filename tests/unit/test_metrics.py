"""Episode records become step metrics, a line, a table and a curve."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl import report
from rl.metrics import episodes as metrics
from rl.run.progress import step_line


def episode(**changes) -> dict:
    record = dict.fromkeys(metrics.EPISODE_KEYS, 0) | {
        "split": "train",
        "reward": 0.0,
        "resolved": False,
        "failure": None,
        "infra": False,
        "proxy_overhead_ms": 2.0,
        "rows": 1,
        "flags": [],
        "repo": "acme/calc",
        "difficulty": None,
    }
    return record | changes


def test_infrastructure_failures_count_but_do_not_average():
    records = [
        episode(resolved=True, reward=1.0, rows=3),
        episode(failure="no_patch"),
        episode(infra=True, failure="sandbox_boot", reward=None, rows=0, proxy_overhead_ms=None),
    ]
    folded = metrics.fold(records, "episode")
    assert folded["episode/resolve_rate"] == 0.5
    assert folded["episode/rows"] == 2.0
    assert folded["episode/count"] == 2
    assert folded["infra/failures"] == 1
    assert folded["infra/sandbox_boot"] == 1
    assert folded["failure/no_patch"] == 1
    assert folded["proxy/overhead_ms"] == 2.0


def test_all_lost_to_infrastructure_has_no_resolve_rate():
    folded = metrics.fold([episode(infra=True, failure="docker", reward=None)], "episode")
    assert folded == {"episode/count": 0, "infra/failures": 1, "infra/docker": 1}


def test_what_the_rules_found_is_counted():
    records = [
        episode(resolved=True, reward=1.0, flags=["exit", "results"], dropped=2),
        episode(flags=["exit"]),
        episode(dropped=1),
        episode(infra=True, failure="no_git", reward=None, flags=["exit"]),
    ]
    for prefix, outer in (("episode", ""), ("val", "val/")):
        folded = metrics.fold(records, prefix)
        found = {key: folded[key] for key in folded if key.removeprefix(outer).startswith(("flag", "dropped"))}
        assert found == {
            f"{outer}flags/exit": 2,
            f"{outer}flags/results": 1,
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
        episode(infra=True, failure="docker", reward=None, difficulty=">4 hours"),
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


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.integers(1, 100))
def test_a_percentile_is_a_value_that_so_many_do_not_exceed(values, percent):
    found = metrics.percentile(values, percent)
    assert found in values
    assert sum(value <= found for value in values) >= percent / 100 * len(values)
    assert sum(value < found for value in values) < percent / 100 * len(values)


def test_groups_that_teach_nothing_are_counted():
    groups = {
        "a": [(1.0, True), (1.0, True)],
        "b": [(0.0, False), (0.0, False), (0.0, False)],
        "c": [(1.0, True), (0.0, False)],
        "d": [(0.25, False), (0.5, False)],  # a shaped reward
    }
    assert metrics.group_metrics(groups) == {
        "group/count": 4,
        "group/episodes": 2.25,
        "group/all_equal": 0.5,
        "group/all_resolved": 0.25,
        "group/none_resolved": 0.5,
    }
    assert metrics.group_metrics({}) == {}


def test_held_out_metrics_do_not_mix_with_training():
    folded = metrics.fold([episode(split="val", failure="tests")], "val")
    assert all(key.startswith("val/") for key in folded)


def test_reader_gives_each_record_once_and_by_split(tmp_path):
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


def test_log_refuses_other_keys(tmp_path):
    with pytest.raises(KeyError, match="colour"):
        metrics.EpisodeLog(tmp_path).append(episode(colour="red"))


def test_rewind_drops_what_comes_after_the_checkpoint(tmp_path):
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


STEP = {
    "step": 2,
    "timing_s/step": 11.0,
    "timing_s/gen": 6.0,
    "episode/resolve_rate": 0.25,
    "episode/rows": 1.5,
    "episode/tokens_context": 800.0,
    "episode/tokens_sampled": 90.0,
    "critic/score/mean": 0.25,
    "training/rollout_actor_probs_pearson_corr": 0.9991,
    "infra/failures": 1.0,
    "val/resolve_rate": 0.5,
}


def test_step_line_and_summary(tmp_path):
    line = step_line(STEP, 20)
    for part in ("step 2/20", "resolved 25.0 %", "rows/ep 1.50", "800+90", "pearson 0.9991", "infra 1", "50.0 %"):
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
