"""Resolve rates with confidence intervals, pass@k, and the comparison of two policies on the same tasks.

The tasks are the sample: episodes of one task are alike, so every interval is over tasks. All functions are closed
forms or exact counts; none draws random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import NormalDist

import numpy

LEVEL = 0.95
_Z = NormalDist().inv_cdf(0.5 + LEVEL / 2)
# With up to ten episodes per task, every share is a multiple of 1/2520.
_FINEST = math.lcm(*range(1, 11))


@dataclass(frozen=True)
class Estimate:
    """An estimate is a value with its confidence interval at LEVEL and the number of tasks behind it."""

    value: float
    low: float
    high: float
    tasks: int


def wilson(share: float, n: float) -> tuple[float, float]:
    """Return Wilson's score interval (low, high) at LEVEL of a proportion: `share` of `n` > 0 independent trials.

    n need not be a whole number.
    """
    middle = (share + _Z * _Z / (2 * n)) / (1 + _Z * _Z / n)
    half = _Z / (1 + _Z * _Z / n) * math.sqrt(share * (1 - share) / n + _Z * _Z / (4 * n * n))
    # Exactly 0 and 1 at the ends, where rounding would leave 1e-17.
    return 0.0 if share == 0 else max(0.0, middle - half), 1.0 if share == 1 else min(1.0, middle + half)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Estimate the probability that at least one of k episodes resolves a task, without bias (Chen et al. 2021).

    Of n >= k episodes, c resolved it; the estimate is one minus the share of k-subsets with none of them. Raises
    ValueError for impossible counts.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {c} in {n} episodes")
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def estimate(counts: Sequence[tuple[int, int]], k: int = 1) -> Estimate | None:
    """Estimate pass@k over tasks from each task's (episodes, resolved episodes).

    Tasks with fewer than k episodes are left out; returns None if no task is left. The interval is Wilson's for an
    effective number of independent trials: the number of trials whose mean would vary as much as the mean over tasks
    does. That is the number of tasks if the episodes of a task always end alike, and up to the number of all episodes
    if they vary as much within a task as between tasks. With one episode per task it is Wilson's interval itself.
    """
    counts = [(n, c) for n, c in counts if n >= k]
    if not counts:
        return None
    tasks, trials = len(counts), sum(n // k for n, _ in counts)
    values = [pass_at_k(n, c, k) for n, c in counts]
    mean = math.fsum(values) / tasks
    spread = math.fsum((value - mean) ** 2 for value in values)
    effective = mean * (1 - mean) * tasks * (tasks - 1) / spread if spread > 1e-12 else math.inf
    low, high = wilson(mean, min(max(effective, tasks), trials) if 0 < mean < 1 else tasks)
    return Estimate(mean, low, high, tasks)


def difference(pairs: Sequence[Fraction]) -> Estimate:
    """Estimate the mean of paired differences in [-1, 1], one per task.

    The interval generalizes Agresti and Min's (2005) for matched proportions to any differences: half a task is added
    for each way in which a pair of single episodes can end (1, -1, and twice 0), then the usual interval of a mean is
    taken. It always has a width, and with one episode per task it is Agresti and Min's interval.
    """
    values = [float(pair) for pair in pairs]
    tasks = len(values)
    middle = math.fsum(values) / (tasks + 2)
    square = (math.fsum(value * value for value in values) + 1) / (tasks + 2)
    half = _Z * math.sqrt((square - middle * middle) / (tasks + 2))
    mean = math.fsum(values) / tasks
    return Estimate(mean, max(-1.0, min(mean, middle - half)), min(1.0, max(mean, middle + half)), tasks)


def sign_flip_p(pairs: Sequence[Fraction]) -> float:
    """Return the two-sided p-value of the hypothesis that neither policy is better, from one difference per task.

    It is the share of all ways to swap the two policies within tasks whose summed difference is at least as far from
    zero. With one episode per task this is McNemar's exact test. It is exact if the differences have a common
    denominator up to 2520, as they do with up to ten episodes per task; otherwise they are rounded to 1/2520.
    """
    scale = min(_FINEST, math.lcm(*(pair.denominator for pair in pairs)))
    steps = [step for pair in pairs if (step := round(pair * scale))]
    # chance[i] is the probability that the steps so far add up to 2 i - reach, with equally likely signs.
    chance, reach = numpy.ones(1), 0
    for step in map(abs, steps):
        chance = (numpy.pad(chance, (0, step)) + numpy.pad(chance, (step, 0))) / 2
        reach += step
    far = numpy.abs(2 * numpy.arange(reach + 1) - reach) >= abs(sum(steps))
    return min(1.0, float(chance[far].sum()))
