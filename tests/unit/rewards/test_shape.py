"""This module tests rewards other than the outcome's: their values, what is refused, and that they are off by
default.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rewards.shape import Effort, Shape
from rewards.task import Task
from rewards.verdict import Outcome, Reason, Verdict
from rl.checks.episodes import _check_grading
from rl.config.compose import ConfigError
from rl.episodes.setup import shape_from
from tests.unit.rewards.test_grade import task

RESOLVED = Verdict(None, tests={"FAIL_TO_PASS": {"success": ["a"], "failure": []}})
OFF: dict[str, Any] = {
    "fail_to_pass": 0.0, "turn_penalty": 0.0, "token_penalty": 0.0, "max_penalty": 0.5, "function": None
}  # fmt: skip


def failed(new: tuple[int, int], old: tuple[int, int] = (0, 0)) -> Verdict:
    """Return a verdict with these numbers of passed and failed tests."""
    kinds = {"FAIL_TO_PASS": new, "PASS_TO_PASS": old}
    tests = {kind: {"success": ["s"] * good, "failure": ["f"] * bad} for kind, (good, bad) in kinds.items()}
    return Verdict(Reason.TESTS_FAILED, tests=tests)


def test_the_default_is_off() -> None:
    config = OmegaConf.create({"grading": OmegaConf.load(Path("configs/grading/default.yaml"))})
    assert dict(config.grading.reward) == OFF
    assert shape_from(config) is None


@pytest.mark.parametrize(
    ("verdict", "reward"),
    [
        (RESOLVED, 1.0),
        (failed((1, 3)), 0.1),
        (failed((3, 1), (9, 0)), 0.3),
        (failed((3, 1), (9, 1)), 0.0),  # something else was broken
        (failed((4, 0), (0, 1)), 0.0),
        (failed((0, 4)), 0.0),
        (failed((0, 0), (1, 0)), 0.0),
        (Verdict(Reason.EMPTY_PATCH), 0.0),
        (Verdict(Reason.LOG_FORGED), 0.0),
    ],
)
def test_an_unresolved_episode_may_get_the_share_of_tests_that_pass(verdict: Verdict, reward: float) -> None:
    shaped = Shape.of(**{**OFF, "fail_to_pass": 0.4})(verdict, task(), Effort(5, 5000))
    assert shaped.reward == pytest.approx(reward)
    assert replace(shaped, shaped=None) == verdict and shaped.outcome is verdict.outcome
    assert shaped.to_dict()["outcome"] == verdict.outcome and shaped.to_dict()["reward"] == shaped.reward


def test_penalties_are_for_resolved_episodes_only_and_bounded() -> None:
    shape = Shape.of(**{**OFF, "turn_penalty": 0.01, "token_penalty": 0.02, "max_penalty": 0.3})
    assert shape(RESOLVED, task(), Effort(4, 3000)).reward == pytest.approx(0.9)
    assert shape(RESOLVED, task(), Effort(400, 3000)).reward == pytest.approx(0.7)
    assert shape(failed((3, 1)), task(), Effort(4, 3000)).reward == 0.0


def test_infrastructure_failures_get_no_reward() -> None:
    lost = Verdict(Reason.NO_SPACE)
    for shape in (Shape(fail_to_pass=0.4), Shape(turn_penalty=0.1), Shape(function=lambda *_: 1.0)):
        assert shape(lost, task(), Effort(1, 1)) == lost and lost.reward is None


# --- functions of the user


def halved(verdict: Verdict, of: Task, effort: Effort) -> float:
    assert of.instance_id == "a__b-1"
    return (verdict.outcome is Outcome.RESOLVED) / 2 + effort.turns + effort.tokens / 1000


def broken(verdict: Verdict, of: Task, effort: Effort) -> float:
    return {"inf": math.inf, "nan": math.nan}.get(verdict.detail) or float(verdict.detail)


def test_a_function_replaces_the_other_shapes() -> None:
    shape = Shape.of(**{**OFF, "function": f"{__name__}:halved"})
    assert shape(RESOLVED, task(), Effort(1, 250)).reward == 1.75
    assert shape(failed((1, 1)), task(), Effort(0, 0)).reward == 0.0


@pytest.mark.parametrize("what", ["inf", "nan", "no number"])
def test_a_function_that_fails_is_an_infrastructure_failure(what: str) -> None:
    shape = Shape.of(**{**OFF, "function": f"{__name__}:broken"})
    verdict = replace(RESOLVED, detail=what, flags=("exit",))
    shaped = shape(verdict, task(), Effort(1, 1))
    assert (shaped.reason, shaped.reward, shaped.flags) == (Reason.REWARD_FAILED, None, ("exit",))
    assert "ValueError" in shaped.detail


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fail_to_pass": -0.1}, "fail_to_pass is -0.1"),
        ({"turn_penalty": math.nan}, "turn_penalty is nan"),
        ({"token_penalty": "1"}, "token_penalty is '1'"),
        ({"max_penalty": True}, "max_penalty is True"),
        ({"fail_to_pass": 1.0}, "below 1"),
        ({"fail_to_pass": 0.5, "turn_penalty": 0.1}, "below 1"),
        ({"turn_penalty": 0.1, "max_penalty": 1.0}, "worth nothing"),
        ({"function": "halved"}, "not of the form module:attribute"),
        ({"function": "no.such.module:f"}, "ModuleNotFoundError"),
        ({"function": f"{__name__}:no_such"}, "AttributeError"),
        ({"function": f"{__name__}:OFF"}, "is a dict, not a function"),
        ({"function": f"{__name__}:halved", "fail_to_pass": 0.1}, "replaces the other"),
    ],
)
def test_what_is_refused_at_the_start(changes: dict[str, Any], message: str) -> None:
    config = OmegaConf.create({"grading": {"drop": [], "flags": {}, "reward": OFF | changes}})
    with pytest.raises(ConfigError, match=r"grading\.reward: ") as failure:
        _check_grading(config)
    assert message in str(failure.value) and "\n" not in str(failure.value)


def test_flags_that_cannot_be_read_are_refused_at_the_start() -> None:
    config = OmegaConf.create({"grading": {"drop": [], "flags": {"mine": {"added": "("}}, "reward": OFF}})
    with pytest.raises(ConfigError, match=r"grading\.flags: flag mine"):
        _check_grading(config)
