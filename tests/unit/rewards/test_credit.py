"""This module tests what a credit function may return."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rewards.credit import CreditRow, divided

ROWS = [CreditRow("subagent/Explore", [], 3), CreditRow("main", [[{"type": "text", "text": "done"}]], 4)]


def test_each_row_gets_a_reward() -> None:
    def half(rows: Any, reward: float) -> list[float]:
        return [reward / 2 if row.role != "main" else reward for row in rows]

    assert divided(half, ROWS, 1.0) == [0.5, 1.0]


@pytest.mark.parametrize("given", [[1.0], [1.0, math.nan], [math.inf, 0.0], 1.0, ["x", 0.0], None])
def test_anything_else_is_an_error(given: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        divided(lambda rows, reward: given, ROWS, 1.0)
