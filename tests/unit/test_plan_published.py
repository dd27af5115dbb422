"""rl.plan's seconds stand beside those of published runs, and most of them are near."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from rl.plan.throughput import forward
from tests.unit.test_plan import dense, moe

ROOT = Path(__file__).parents[2]
SPEEDS = OmegaConf.create({"plan": {"mfu_attention": 0.55}, "cluster": {"tflops": 989}})


def test_the_table_is_the_calculation_and_says_why_a_run_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """At least eight runs are within a quarter; each other one has its reason."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    script = importlib.import_module("compare_plan")
    lines = script.table()
    assert "\n".join(lines) in (ROOT / "docs/planning.md").read_text()
    near = [abs(script.planned(run) / run.seconds - 1) <= 0.25 for run in script.RUNS]
    assert [bool(run.why) for run in script.RUNS] == [not close for close in near]
    assert sum(near) >= 8


@given(st.floats(1, 1e6), st.floats(1, 1e6), st.sampled_from([moe, dense]))
def test_attention_has_a_rate_of_its_own(context: float, more: float, made: object) -> None:
    """Longer contexts cost more, and what they add does not depend on the rate of matrices."""
    shape = made()  # ty: ignore[call-non-callable]
    slow, fast = (
        forward(SPEEDS, shape, context + more, share) - forward(SPEEDS, shape, context, share) for share in (0.1, 0.4)
    )
    assert 0 < slow == pytest.approx(fast, rel=1e-3, abs=1e-15)
