"""This module tests a teacher for on-policy distillation: it scores all rows of an episode, and has the policy's
tokenizer.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.v1 import agent_loop_tq

from rl.checks.model import check_teacher
from rl.config.compose import ConfigError, compose
from rl.train.distillation import scored, worker_class


def row(*response: int) -> AgentLoopOutput:
    metrics = AgentLoopMetrics(generate_sequences=0.0, compute_score=0.0, num_preempted=-1)
    return AgentLoopOutput(
        prompt_ids=[1, 2],
        response_ids=[*response],
        response_mask=[1] * len(response),
        reward_score=1.0,
        metrics=metrics,
        extra_fields={"reward_extra_info": {"resolved": 1.0}},
    )


def test_the_teacher_scores_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's own worker, which scores the last row, would leave the others without the column."""
    stored: dict[str, list[Any]] = {}

    async def put(keys: list[str], fields: Any, tags: Any, partition_id: str) -> None:
        stored.update(zip(keys, fields["teacher_logprobs"].unbind(0), strict=True))

    monkeypatch.setattr(agent_loop_tq.tq, "async_kv_batch_put", put)

    async def scores(sequence_ids: list[int], **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([[number] for number in sequence_ids]), torch.tensor([[-0.5 * n] for n in sequence_ids])

    cls: Any = scored()
    worker = cls.__new__(cls)
    worker.distillation_enabled, worker.teacher_key = True, "data_source"
    worker.teacher_server_manager = SimpleNamespace(compute_teacher_logprobs_single=scores)
    worker.reward_loop_worker_handles = None
    worker._compute_multi_modal_inputs = lambda *_: {}
    worker._compute_position_ids = lambda ids, *_: torch.arange(ids.shape[1])[None]
    rows = [row(3), row(4, 5), row(6)]
    given = {"uid": "u", "session_id": 0, "global_steps": 1, "partition_id": "train"}
    asyncio.run(worker._agent_loop_postprocess(rows, False, **given))
    assert [[x for (x,) in scored.tolist()] for scored in stored.values()] == [
        [-0.5, -1.0, -1.5],
        [-0.5, -1.0, -2.0, -2.5],
        [-0.5, -1.0, -3.0],
    ]


def test_without_a_teacher_the_worker_is_verls() -> None:
    assert worker_class(compose(["+experiment=quickstart"])) is None


def model(directory: Path, **vocabulary: int) -> str:
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "qwen3"}')
    tokenizer = {"model": {"vocab": vocabulary}, "added_tokens": [{"content": "<|im_end|>", "id": 7}]}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return str(directory)


def test_a_teacher_is_there_and_gives_tokens_the_same_ids(tmp_path: Path) -> None:
    policy, same = model(tmp_path / "policy", a=1), model(tmp_path / "same", a=1)
    config = compose(["+experiment=quickstart", "+distill=on_policy", f"actor_rollout_ref.model.path={policy}"])
    teacher = config.distillation.teacher_models.teacher_model
    with pytest.raises(ConfigError, match=r"teacher_model\.model_path is not set"):
        check_teacher(config)
    teacher.model_path = same
    check_teacher(config)
    for path, said in ((model(tmp_path / "other", a=2), "has another tokenizer"), ("/no/model", "no model directory")):
        teacher.model_path = path
        with pytest.raises(ConfigError, match=said):
            check_teacher(config)
    OmegaConf.update(config, "distillation.enabled", False)
    check_teacher(config)
