"""rl.plan's engine: what stays in its cache while tools run, and how many episodes it serves at a time."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.plan import plan
from rl.plan.engine import kept
from tests.unit.test_plan import config

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("compare_cache")


@pytest.mark.parametrize("tool_s", [2.0, 8.0, 20.0])
@pytest.mark.parametrize("size", [1.2, 0.9, 0.7, 0.5, 0.3])
def test_the_formula_is_near_a_simulation_of_vllms_cache(script: ModuleType, tool_s: float, size: float) -> None:
    """A cache keeps, for conversations whose tools run, what requests in the engine do not take of it."""
    setting = script.Setting(tool_s=tool_s)
    seen = script.Cache(setting, script.blocks_of(setting, size), 1 / 8000, 0.03).play(4 * 32 * 16)
    assert script.hits(setting, kept(32 * size, 32, seen.inside)) == pytest.approx(seen.hits, abs=0.15)
    if tool_s > 2:  # else nearly all are in the engine, and a little decides
        assert script.hits(setting, kept(32 * size, 32, seen.inside)) == pytest.approx(seen.hits, abs=0.07)


def test_a_simulated_cache_that_holds_all_reads_only_what_is_new(script: ModuleType) -> None:
    setting = script.Setting(count=4)
    seen = script.Cache(setting, 4 * script.blocks_of(setting, 2.0), 1 / 8000, 0.03).play(4 * 16 * 4)
    assert seen.hits == pytest.approx(script.hits(setting, 1.0), abs=0.02) and 0 < seen.inside < 4


@given(st.floats(0, 200), st.floats(1, 100), st.floats(0, 1), st.floats(0, 50))
def test_more_room_keeps_more_and_more_requests_keep_less(held: float, asked: float, busy: float, more: float) -> None:
    inside = busy * asked
    share = kept(held, asked, inside)
    assert 0 <= share <= 1 and kept(held + more, asked, inside) >= share
    assert kept(asked + more, asked, inside) == 1
    assert kept(held, asked, min(asked, inside + more)) <= share or held >= asked
    assert kept(inside / 2, asked, inside) == 0 or not inside


def test_a_cache_that_is_a_little_too_small_keeps_nearly_nothing_where_tools_are_quick() -> None:
    """Of 100 turns with tools of 2 s nine tenths are read again, though four contexts of five fit."""
    made = plan(config("qwen3_coder_30b_lora", "plan.turns=100", "plan.tool_s=2", "sandbox.concurrency=11"))
    load = made.pace.load
    assert load.held / load.asked == pytest.approx(0.83, abs=0.01) and load.stays < 0.1
    assert load.running <= load.held and load.running + load.waiting <= load.asked
    assert any(line.startswith("KV cache of each 4 GPUs holds 37 contexts; of 44 ep") for line in made.warnings)


def test_the_first_prompt_is_in_the_cache_once() -> None:
    longer = plan(config("qwen3_coder_30b", "plan.first_prompt=20000", "plan.turns=31")).pace.load
    assert longer.held == pytest.approx(plan(config("qwen3_coder_30b", "plan.turns=31")).pace.load.held, rel=0.4)
