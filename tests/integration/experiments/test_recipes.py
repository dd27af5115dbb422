"""This module tests that recipes train: two steps each at toy size, from one warm start.

A recipe takes over a minute, so these are tried: one that weighs whole rows, one that filters groups, and one with a
reference model. `RECIPES=all` tries all of them.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from rl.config.compose import CONFIGS
from rl.config.overrides import options
from rollout import audit
from tests.integration import train_kit
from tests.integration.train_kit import WarmStart

pytestmark = [pytest.mark.claude, pytest.mark.engine, pytest.mark.timeout(2400)]
ALL = [name for name in options("recipe", [CONFIGS]) if name != "grpo"]
RECIPES = ALL if os.environ.get("RECIPES") == "all" else ["gspo", "dapo", "lego_rl"]


@pytest.fixture(scope="module")
def root(warm_start: WarmStart, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """run.root of all recipes: one policy serves them."""
    made = tmp_path_factory.mktemp("recipes")
    warm_start.lend_to(made, "+experiment=qwen3_coder_30b", "scale=tiny")
    return made


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_takes_two_steps(root: Path, recipe: str) -> None:
    """Losses, estimators and filters are verl's, the weights of rows ours: each step has an update, and its rows are
    those that were sampled."""
    run = root / recipe
    process = train_kit.start(
        "+experiment=qwen3_coder_30b",
        f"recipe={recipe}",
        "scale=tiny",
        "trainer.save_freq=-1",
        f"run.root={root}",
        f"run.dir={run}",
    )
    said, _ = process.communicate()
    assert process.returncode == 0, said
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        assert math.isfinite(record["actor/grad_norm"]) and math.isfinite(record["actor/pg_loss"])
        assert record["training/rollout_actor_probs_pearson_corr"] >= 0.999
    assert audit.main([str(run)]) == 0
