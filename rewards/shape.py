"""Reward shaping: rewards other than "1 if resolved, else 0". By default it is off, and `Shape.of` returns None.

A shape sets the `shaped` reward of a verdict. It never changes the outcome, and an infrastructure failure never gets a
reward.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rewards.task import Task
from rewards.verdict import Outcome, Reason, Verdict
from rollout.dotted import attribute


@dataclass(frozen=True)
class Effort:
    """An Effort is what an episode took, and what came of it.

    turns: calls of the main thread; tokens: sampled tokens of all threads; patch: the agent's, before the rules.
    """

    turns: int
    tokens: int
    patch: bytes = b""


Function = Callable[[Verdict, Task, Effort], float]


@dataclass(frozen=True)
class Shape:
    """A Shape computes the reward of a verdict.

    fail_to_pass: the reward of an unresolved episode is this times the share of its FAIL_TO_PASS tests that pass, and
    0 if a PASS_TO_PASS test fails. turn_penalty, token_penalty: subtracted from the reward of a resolved episode for
    each turn and for each 1000 sampled tokens. max_penalty: the most that is subtracted. function: used instead of all
    of these; it is called for every verdict except infrastructure failures and returns a finite number.

    Making one raises ValueError for values that are out of range or could reward an unresolved episode as much as a
    resolved one.
    """

    fail_to_pass: float = 0.0
    turn_penalty: float = 0.0
    token_penalty: float = 0.0
    max_penalty: float = 0.5
    function: Function | None = None

    def __post_init__(self) -> None:
        for name in ("fail_to_pass", "turn_penalty", "token_penalty", "max_penalty"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value!r}; it must be a number that is 0 or more")
        numbers = self.fail_to_pass or self.turn_penalty or self.token_penalty
        if numbers and self.function is not None:
            raise ValueError("function replaces the other shapes; set them to 0 or function to null")
        penalty = self.max_penalty if self.turn_penalty or self.token_penalty else 0.0
        if self.fail_to_pass and self.fail_to_pass + penalty >= 1:
            raise ValueError(
                f"fail_to_pass is {self.fail_to_pass} and penalties go up to {penalty}, so an unresolved episode "
                "could be worth as much as a resolved one; keep their sum below 1"
            )
        if penalty >= 1:
            raise ValueError(f"max_penalty is {penalty}, so a resolved episode could be worth nothing; keep it below 1")

    @classmethod
    def of(cls, function: str | None, **numbers: float) -> Shape | None:
        """Make a shape from a config's values; return None if all of them are off. Raises ValueError."""
        shape = cls(**numbers, function=load(function) if function else None)
        return shape if shape.function or shape.fail_to_pass or shape.turn_penalty or shape.token_penalty else None

    def __call__(self, verdict: Verdict, task: Task, effort: Effort) -> Verdict:
        """Return the verdict with its shaped reward; it becomes REWARD_FAILED if the function fails."""
        if verdict.is_infra:
            return verdict
        if self.function is None:
            return replace(verdict, shaped=self._reward(verdict, effort))
        try:
            reward = float(self.function(verdict, task, effort))
            if not math.isfinite(reward):
                raise ValueError(f"returned {reward}")
        except Exception as error:  # the function is the user's code; the policy is not to blame for its errors
            return replace(verdict, reason=Reason.REWARD_FAILED, detail=f"{type(error).__name__}: {error}")
        return replace(verdict, shaped=reward)

    def _reward(self, verdict: Verdict, effort: Effort) -> float:
        if verdict.outcome is Outcome.RESOLVED:
            penalty = self.turn_penalty * effort.turns + self.token_penalty * effort.tokens / 1000
            return 1.0 - min(penalty, self.max_penalty)
        new, old = verdict.tests.get("FAIL_TO_PASS", {}), verdict.tests.get("PASS_TO_PASS", {})
        passed, failed = len(new.get("success", ())), len(new.get("failure", ()))
        if not passed or old.get("failure"):
            return 0.0
        return self.fail_to_pass * passed / (passed + failed)


def load(name: str) -> Callable[..., Any]:
    """Import the callable that "module:function" names. Raises ValueError, which says why that is not possible."""
    try:
        function = attribute(name)
    except ValueError as error:
        raise ValueError(f"{name!r} {error}") from error
    if not callable(function):
        raise ValueError(f"{name!r} is a {type(function).__name__}, not a function")
    return function
