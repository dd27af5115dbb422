"""This module tests how scripts/exactness/bench.py tells what became of sampled tokens."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

# Prompt, reply, log-probabilities: a conversation of two calls.
FIRST, SECOND = ([1, 2], [10, 11], [-0.1, -0.2]), ([1, 2, 10, 11, 3], [12, 13], [-0.3, -0.4])
WHOLE = ([1, 2, 10, 11, 3, 12, 13], [0, 0, 1, 1, 0, 1, 1], [-0.1, -0.2, -0.3, -0.4])
ONE = ([1, 2, 10, 11], [0, 0, 1, 1], [-0.1, -0.2])


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend("scripts/exactness")
    return importlib.import_module("bench").compare


@pytest.mark.parametrize(
    ("sampled", "rows", "counts"),
    [
        ([FIRST, SECOND], [WHOLE], {"once": 4, "logprobs": 4}),
        ([FIRST, SECOND], [ONE], {"once": 2, "logprobs": 2, "lost": 2}),
        ([FIRST, SECOND], [ONE, WHOLE], {"once": 2, "logprobs": 2, "twice": 2}),
        ([FIRST], [([1, 4, 10, 11], *ONE[1:])], {"altered": 2}),
        ([FIRST], [([1, 2, 10, 9], *ONE[1:])], {"lost": 2, "made up": 2}),
        ([FIRST], [(*ONE[:2], [])], {"once": 2}),
        ([FIRST, (FIRST[0], [14], [-0.5])], [ONE], {"once": 2, "logprobs": 2, "unread": 2, "lost": 1}),
        ([(FIRST[0], [14], [-0.5]), FIRST], [ONE], {"once": 2, "logprobs": 2, "resampled": 1}),
    ],
)
def test_each_sampled_token_has_one_fate(compare: Any, sampled: list, rows: list, counts: dict) -> None:
    found = {name: count for name, count in compare(sampled, rows).items() if count}
    assert found == {**counts, "sampled": sum(len(said) for _, said, _ in sampled), "rows": len(rows)}
