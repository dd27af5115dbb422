"""``python -m rl.plan from=RUN`` fits the plan's constants to what a run did."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from rl.config.compose import ConfigError
from rl.plan import plan
from rl.plan.__main__ import main
from rl.plan.engine import traffic
from rl.plan.fit import apply, fitted, own_config
from rl.plan.layout import layout_of
from rollout.records import NodeRecord, Record, pack_floats, pack_ids
from tests.kit import empty_record
from tests.store_kit import write
from tests.unit.plan.test_plan import config


def episode(number: int, first: int, turns: list[tuple[int, int]], **changes: Any) -> Record:
    """An episode whose first prompt has ``first`` tokens, and each turn so many sampled and then read ones. A side call
    comes before all."""
    nodes = [NodeRecord(-1, pack_ids([1] * 7)), NodeRecord(0, pack_ids([1]), pack_floats([0.0]), side=True)]
    nodes.append(NodeRecord(-1, pack_ids([1] * first)))
    for sampled, read in turns:
        nodes.append(NodeRecord(len(nodes) - 1, pack_ids([1] * sampled), pack_floats([0.0] * sampled)))
        nodes.append(NodeRecord(len(nodes) - 1, pack_ids([1] * read)))
    told: dict[str, Any] = {
        "episode": f"e{number}",
        "nodes": nodes,
        "agent": {"turns": len(turns), "status": "finished"},
        "counters": {"calls": len(turns), "engine_s": 3.0, "overhead_s": 1.0},
        "timing": {"boot": 0.5, "agent": 4.0 + 2.0 * len(turns), "grade": 6.0, "total": 20.0 + number},
    }
    return empty_record(**told | changes)


def steps(run: Path, *lines: dict[str, float]) -> None:
    told = [json.dumps({"step": number, "timing_s/step": 1.0} | line) for number, line in enumerate(lines, 1)]
    (run / "metrics.jsonl").write_text("\n".join([*told, '{"step": 9, "timi']))  # as it is torn by a kill


def values(run: Path) -> dict[str, float]:
    return {one.key: one.value for one in fitted(run)}


def test_what_episodes_did(tmp_path: Path) -> None:
    """Held-out episodes, and those that the infrastructure failed, are left out."""
    played = [episode(n, 1000, [(50, 150)] * (4 + n % 3)) for n in range(9)]
    played[8].agent["status"] = "timeout"
    failed = {"outcome": "infra_failure", "reason": "boot", "reward": None, "detail": ""}
    others = [episode(10, 9, [(9, 9)], split="val"), episode(11, 9, [(9, 9)], verdict=failed)]
    run = write(played + others, tmp_path)
    found = {one.key: one for one in fitted(run)}
    assert found["first_prompt"][1:] == (1000, 1000, 1000, 9, "episodes")
    assert found["turns"][1:4] == (5, 4, 6) and found["timeouts"].value == pytest.approx(1 / 9)
    assert found["sampled"].value == pytest.approx((9 + 50 * 45) / 45)  # the side calls' tokens, too
    assert (found["tool_s"].value, found["boot_s"].value, found["grade_s"].value) == (2, 0.5, 6)
    assert found["spread"].low < found["spread"].value < found["spread"].high


lengths = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 900)), min_size=1, max_size=20)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4000), lengths), min_size=1, max_size=6))
def test_a_plan_with_fitted_constants_has_the_runs_mean_row(played: list[tuple[int, Any]]) -> None:
    """All tokens of all episodes are in the plan's mean episode, each once."""
    records = [episode(number, *one) for number, one in enumerate(played)]
    mean = sum(node.length for record in records for node in record.nodes) / len(records)
    made = config("qwen3_coder_30b")
    with tempfile.TemporaryDirectory() as place:
        apply(made, fitted(write(records, Path(place))))
    assert traffic(made, layout_of(made)).row == pytest.approx(mean, abs=1)


@pytest.mark.parametrize(("experiment", "key"), [("qwen3_4b", "mfu_dense"), ("qwen3_coder_30b", "mfu_moe")])
def test_speeds_are_those_that_the_plan_would_need(experiment: str, key: str, tmp_path: Path) -> None:
    made = config(experiment, f"plan.{key}=0.123", "plan.sync_gbs=7", "plan.save_gbs=3")
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(made, resolve=True))
    found = plan(made)
    line = {
        "perf/total_num_tokens": found.pace.tokens,
        "timing_s/update_actor": found.pace.seconds["update"],
        "timing_s/update_weights": found.pace.seconds["weight sync"],
        "timing_s/save_checkpoint": found.stopping.save,
        "group/all_equal": 1.0,
    }
    steps(tmp_path, line, line)
    told = values(tmp_path)
    assert told == pytest.approx({key: 0.123, "sync_gbs": 7, "save_gbs": 3, "all_equal_groups": 0.95}, rel=1e-3)


def test_a_run_without_episodes_tells_what_its_steps_mean(tmp_path: Path) -> None:
    one = {"episode/turns": 5, "episode/tokens_sampled": 100, "episode/rows": 1, "episode/boot_s": 2}
    steps(tmp_path, one | {"episode/grade_s": 3}, one | {"episode/grade_s": 5})
    assert values(tmp_path) == {"sampled": 20, "turns": 5, "rows": 1, "boot_s": 2, "grade_s": 4}


def test_the_command_plans_with_what_a_run_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without other words it is the run's own config, here one of before plan.cpu_gflops."""
    made = config("qwen3_4b")
    del made.plan.cpu_gflops
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(made, resolve=True))
    write([episode(n, 1000, [(50, 150)] * 10) for n in range(8)], tmp_path)
    assert own_config(tmp_path).plan.cpu_gflops
    for words in (["+experiment=qwen3_4b"], []):
        monkeypatch.setattr(sys, "argv", ["rl.plan", f"from={tmp_path}", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr().out
        assert ended.value.code == 0 and f"fitted to {tmp_path.name}" in shown
        assert "1,000 to 1,000" in shown and "It fits" in shown


@pytest.mark.parametrize("made", [False, True])
def test_a_run_that_tells_nothing_is_one_line(made: bool, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such run" if not made else "neither episodes"):
        fitted(tmp_path if made else tmp_path / "none")
    with pytest.raises(ConfigError, match=r"its config\.yaml cannot be read"):
        own_config(tmp_path)
