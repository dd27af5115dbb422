"""On-policy distillation runs with verl's own teacher, a second engine that scores what the policy samples.

The same run logs to wandb online.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rl import dashboard
from tests.integration.train_kit import TINY, WarmStart, start
from tests.wandb_kit import KEY, Wandb, wandb_server


@pytest.mark.long
@pytest.mark.claude
@pytest.mark.engine
@pytest.mark.timeout(2400)
async def test_a_teacher_that_is_the_policy_itself_differs_in_no_token(warm_start: WarmStart, tmp_path: Path) -> None:
    """So its log-probabilities are those of the right tokens: in the first step, before which the weights are equal."""
    own = [argument for argument in TINY if not argument.startswith("quickstart.")]
    given = warm_start.given()
    (path,) = [argument.partition("=")[2] for argument in given if argument.startswith("actor_rollout_ref.model.path=")]
    changed = ["trainer.total_training_steps=2", "trainer.val_before_train=false", "trainer.test_freq=-1"]
    changed += ["trainer.save_freq=-1", "ray_kwargs.ray_init.num_gpus=2", f"run.dir={tmp_path}"]
    changed += ["actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.actor.ppo_epochs=1"]
    teacher = f"distillation.teacher_models.teacher_model.model_path={path}"
    async with wandb_server() as server:
        online = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        process = start("+experiment=quickstart", "+distill=on_policy", *own, *given, *changed, teacher, **online)
        text, _ = await asyncio.to_thread(process.communicate)
    assert process.returncode == 0, text
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert metrics[0]["actor/distillation/abs_loss"] < 1e-4
    assert metrics[0]["response_length/mean"] > 0 and metrics[0]["episode/count"] == 8
    check_arrived(server, tmp_path.name, metrics)


def check_arrived(server: Wandb, name: str, metrics: list[dict[str, Any]]) -> None:
    """Check that wandb has each figure of metrics.jsonl once, at its step, and a table of episodes."""
    assert server.unknown == [] and server.refused == []
    run = server.runs.pop(name)
    assert server.runs == {} and run.ended == [0]
    assert run.config["trainer"]["value"]["total_training_steps"] == 2
    assert [row["_step"] for row in run.rows] == [record["step"] for record in metrics] == [1, 2]
    for row, record in zip(run.rows, metrics, strict=True):
        logged = {key: value for key, value in record.items() if key not in ("step", "time") and value is not None}
        assert {key: row.get(key) for key in logged} == logged
    tables = [row[dashboard.SAMPLES] for row in run.rows if dashboard.SAMPLES in row]
    stored = [json.loads(server.stored[f"{name}/{table['path']}"]) for table in tables]
    assert stored and all(one["data"] and "reward" in one["columns"] for one in stored)
