"""This module tests on-policy distillation with verl's own teacher: a second engine that scores what the policy
samples.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.train_kit import TINY, WarmStart, start


@pytest.mark.long
@pytest.mark.claude
@pytest.mark.engine
@pytest.mark.timeout(2400)
@pytest.mark.xdist_group("trainers-2")
def test_a_teacher_that_is_the_policy_itself_differs_in_no_token(warm_start: WarmStart, tmp_path: Path) -> None:
    """So its log-probabilities are those of the right tokens. One update, before which the weights are equal."""
    own = [argument for argument in TINY if not argument.startswith("quickstart.")]
    given = warm_start.given()
    (path,) = [argument.partition("=")[2] for argument in given if argument.startswith("actor_rollout_ref.model.path=")]
    changed = ["trainer.total_training_steps=1", "trainer.val_before_train=false", "trainer.test_freq=-1"]
    changed += ["trainer.save_freq=-1", "ray_kwargs.ray_init.num_gpus=2", f"run.dir={tmp_path}"]
    changed += ["actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.actor.ppo_epochs=1"]
    teacher = f"distillation.teacher_models.teacher_model.model_path={path}"
    process = start("+experiment=quickstart", "+distill=on_policy", *own, *given, *changed, teacher)
    text, _ = process.communicate()
    assert process.returncode == 0, text
    (metrics,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert metrics["actor/distillation/abs_loss"] < 1e-4
    assert metrics["response_length/mean"] > 0 and metrics["episode/count"] == 8
