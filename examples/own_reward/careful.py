"""A reward that prefers short work and distrusts suspicious patches."""

from rewards.shape import Effort
from rewards.task import Task
from rewards.verdict import Outcome, Verdict


def reward(verdict: Verdict, task: Task, effort: Effort) -> float:
    """Return 1 for a resolved task, less 0.01 per turn (at most 0.2), and half of that if the patch was flagged."""
    if verdict.outcome is not Outcome.RESOLVED:
        return 0.0
    value = 1.0 - min(0.01 * effort.turns, 0.2)
    return value / 2 if verdict.flags else value
