"""A plan says how sure it is: ranges hold the planned figure, and a worse assumption never makes a step shorter."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from rl.plan import Plan, plan
from rl.plan.doubt import UNSURE, Doubts, bounds, doubts
from tests.unit.plan.test_plan import config


@functools.cache
def made(experiment: str) -> tuple[Plan, Doubts]:
    found = config(experiment)
    planned = plan(found)
    return planned, doubts(found, planned.shape, planned.layout)


@pytest.mark.parametrize("experiment", ["qwen3_4b", "qwen3_coder_30b"])
def test_a_range_holds_the_figure_and_what_each_assumption_alone_does_to_it(experiment: str) -> None:
    planned, doubted = made(experiment)
    low, high = bounds(planned.pace, doubted, lambda pace: pace.step_s)
    assert doubted.keys() == UNSURE.keys() and low < planned.pace.step_s < high
    for good, bad in doubted.values():
        assert low <= good.step_s <= planned.pace.step_s <= bad.step_s <= high
    assert bounds(planned.pace, doubted, lambda pace: 0.0) == (0.0, 0.0)


def test_the_sentence_about_how_sure_a_step_is() -> None:
    planned, doubted = made("qwen3_coder_30b")
    steps = planned.pace.step_s, *bounds(planned.pace, doubted, lambda pace: pace.step_s)
    steps += tuple(pace.step_s for pace in doubted["turns"])
    step, low, high, few, many = (round(seconds / 60) for seconds in steps)
    said = f"takes {step} minutes, {low} to {high}; with 20 to 100 turns by themselves, {few} to {many}."
    assert said in (Path(__file__).parents[3] / "docs/planning.md").read_text()


def test_groups_are_no_doubt_where_none_is_replaced() -> None:
    found = config("qwen3_4b", "algorithm.filter_groups.enable=false")
    planned = plan(found)
    assert "groups with equal rewards" not in doubts(found, planned.shape, planned.layout)


def test_an_episode_that_the_plan_shortens_is_a_note() -> None:
    planned = plan(config("qwen3_8b", "plan.turns=80"))
    assert planned.pace.cut and not planned.problems
    assert any(line.startswith("an episode of plan.turns=80 is planned with 31") for line in planned.warnings)
    assert not plan(config("qwen3_8b", "plan.turns=20")).pace.cut


def test_cores_bound_a_rollout() -> None:
    """However fast the engine is, tests and Claude Code need CPU seconds."""
    slow = plan(config("qwen3_coder_30b", "cluster.cores=1")).pace
    assert slow.seconds["rollout"] == pytest.approx(slow.played * 8 * 60.85 / 4)
