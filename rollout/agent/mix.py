"""A mix of agents says which of them plays a group of episodes.

GRPO compares the episodes of a group, so all of them have the same agent. Which one depends on nothing but the seed,
the task and the step: a resumed run, and an episode that is played again, have the same one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Mix:
    """A mix has several agents by name. weights: how often each one is drawn, relative to the others; 0: it only plays
    tasks that name it. seed: of the draws. Raises ValueError if the weights are none."""

    weights: Mapping[str, float]
    seed: int = 0

    def __post_init__(self) -> None:
        weights = self.weights
        if not isinstance(weights, Mapping) or not weights or not all(map(_is_weight, weights.values())):
            wanted = "it must say how often each agent plays, such as {claude_code: 0.6, codex: 0.4}"
            raise ValueError(f"agent.mix is {weights!r}; {wanted}")

    def draw(self, task: str, step: int, named: str | None = None) -> str:
        """Return the name of the agent that plays ``task`` in ``step``: the one that the task has ``named``, or else
        one by weight. Raises ValueError if there is none."""
        if named:
            if named not in self.weights:
                raise ValueError(f"{named!r} is not in agent.mix, which has {', '.join(self.weights)}")
            return named
        drawn = [
            (random.Random(repr((self.seed, step, task, name))).expovariate(weight), name)
            for name, weight in self.weights.items()
            if weight
        ]
        if not drawn:
            raise ValueError("the task names no agent, and all weights of agent.mix are 0")
        return min(drawn)[1]  # the first of several waiting times: by weight, in whatever order they are listed


def _is_weight(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
