"""This module tests estimates, intervals and p-values, checked against counting, root finding and simulation."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from fractions import Fraction
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.evaluate.statistics import LEVEL, difference, estimate, pass_at_k, sign_flip_p, wilson

Z = NormalDist().inv_cdf(0.5 + LEVEL / 2)
COUNTS = st.lists(
    st.integers(1, 6).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), min_size=1, max_size=30
)


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_success(case: tuple[int, int, int]) -> None:
    n, c, k = case
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize(("n", "c", "k"), [(4, 2, 5), (4, 5, 1), (4, 2, 0)])
def test_pass_at_k_rejects_impossible_counts(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError):
        pass_at_k(n, c, k)


def root(function: Callable[[float], float], low: float, high: float) -> float:
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if function(low) * function(middle) > 0 else (low, middle)
    return low


@given(st.integers(1, 2000).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))))
def test_wilsons_interval_ends_where_the_score_test_begins_to_reject(case: tuple[int, int]) -> None:
    n, c = case
    share = c / n
    low, high = wilson(share, n)

    def score(p: float) -> float:
        return (share - p) ** 2 * n - Z * Z * p * (1 - p)

    assert low == pytest.approx(0.0 if c == 0 else root(score, 1e-15, min(share, 1 - 1e-12)), abs=1e-9)
    assert high == pytest.approx(1.0 if c == n else root(score, max(share, 1e-12), 1 - 1e-15), abs=1e-9)


@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_one_episode_per_task_is_wilson_over_tasks(resolved: list[bool]) -> None:
    found = estimate([(1, int(one)) for one in resolved])
    assert found is not None and found.tasks == len(resolved)
    assert found.value == pytest.approx(sum(resolved) / len(resolved))
    assert (found.low, found.high) == pytest.approx(wilson(found.value, len(resolved)))


@given(COUNTS, st.integers(1, 6))
def test_an_interval_contains_its_estimate_and_is_as_wide_as_the_episodes_require(
    counts: list[tuple[int, int]], k: int
) -> None:
    found = estimate(counts, k)
    enough = [(n, c) for n, c in counts if n >= k]
    if found is None:
        assert not enough
        return
    assert found.tasks == len(enough)
    assert found.value == pytest.approx(sum(pass_at_k(n, c, k) for n, c in enough) / len(enough))
    assert 0 <= found.low <= found.value <= found.high <= 1 and found.low < found.high
    widest, narrowest = wilson(found.value, len(enough)), wilson(found.value, sum(n // k for n, _ in enough))
    assert widest[0] - 1e-9 <= found.low <= narrowest[0] + 1e-9
    assert narrowest[1] - 1e-9 <= found.high <= widest[1] + 1e-9


@given(st.lists(st.booleans(), min_size=2, max_size=20), st.integers(2, 5))
def test_episodes_that_always_end_alike_do_not_narrow_the_interval(resolved: list[bool], n: int) -> None:
    once, often = estimate([(1, int(r)) for r in resolved]), estimate([(n, n * r) for r in resolved])
    assert once is not None and often is not None
    assert (often.low, often.high) == pytest.approx((once.low, once.high))


def test_intervals_cover_the_true_value_in_95_of_100_simulations() -> None:
    """60 tasks of very different difficulty with 4 episodes each; and pairs of policies on the same tasks."""
    dice, rounds = random.Random(1), 1500
    held = held_pair = 0
    for _ in range(rounds):
        chances = [dice.betavariate(0.4, 0.6) for _ in range(60)]
        counts = [(4, sum(dice.random() < p for _ in range(4))) for p in chances]
        found = estimate(counts)
        assert found is not None
        held += found.low <= 0.4 <= found.high
        # The other policy also resolves one in five of the episodes that fail.
        other = [sum(dice.random() < p + (1 - p) / 5 for _ in range(4)) for p in chances]
        gap = difference([Fraction(b - a, 4) for (_, a), b in zip(counts, other, strict=True)])
        held_pair += gap.low <= 0.6 / 5 <= gap.high
    assert 0.93 <= held / rounds <= 0.975
    assert 0.93 <= held_pair / rounds <= 0.975


FEW = st.lists(
    st.integers(1, 4).flatmap(lambda n: st.integers(-n, n).map(lambda d: Fraction(d, n))), min_size=1, max_size=9
)


@given(FEW)
def test_the_p_value_is_the_share_of_all_swaps(pairs: list[Fraction]) -> None:
    sums = [
        abs(sum(s * p for s, p in zip(signs, pairs, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(pairs))
    ]
    assert sign_flip_p(pairs) == pytest.approx(sum(s >= abs(sum(pairs)) for s in sums) / len(sums))


@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 50))
def test_single_episodes_give_mcnemars_exact_test(only_a: int, only_b: int, same: int) -> None:
    pairs = [Fraction(1)] * only_a + [Fraction(-1)] * only_b + [Fraction(0)] * same
    n = only_a + only_b
    tail = sum(math.comb(n, i) for i in range(min(only_a, only_b) + 1))
    assert sign_flip_p(pairs) == pytest.approx(min(1.0, float(Fraction(2 * tail, 2**n))))


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 60))
def test_single_episodes_give_agresti_and_mins_interval(only_a: int, only_b: int, same: int) -> None:
    pairs = [Fraction(1)] * only_a + [Fraction(-1)] * only_b + [Fraction(0)] * same
    if not pairs:
        return
    # Their own formula: half an observation is added to each of the four cells.
    n, b, c = len(pairs) + 2, only_a + 0.5, only_b + 0.5
    middle, half = (b - c) / n, Z * math.sqrt((b + c) - (b - c) ** 2 / n) / n
    found = difference(pairs)
    assert found.value == pytest.approx((only_a - only_b) / len(pairs))
    assert found.low == pytest.approx(max(-1, min(found.value, middle - half)))
    assert found.high == pytest.approx(min(1, max(found.value, middle + half)))
    assert -1 <= found.low <= found.value <= found.high <= 1


def test_differences_without_a_common_denominator_are_rounded() -> None:
    dice = random.Random(2)
    pairs = [Fraction(dice.randint(-n, n), n) for n in range(1, 40) for _ in range(15)]
    assert 0 < sign_flip_p(pairs) <= 1
    assert sign_flip_p([abs(pair) for pair in pairs]) < 1e-30
