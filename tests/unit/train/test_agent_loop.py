"""An episode becomes the training rows that verl is given."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rewards.verdict import Reason, Verdict
from rl.run import errors
from rollout.agent import AgentRun, Status
from rollout.episode import Episode
from rollout.proxy.session import Session
from rollout.proxy.tree import TrainingSequence
from tests.kit import QueueEngine, char_policy

ROUTING = (np.full((2, 4, 2), 5), np.full((2, 4, 2), 6))
ROW = TrainingSequence([1, 2], [3, 4, 5], [1, 0, 1], [-0.5, 0.0, -0.25], (1,), (3, 4), ROUTING)


def episode(status: str = "finished", verdict: Verdict | None = None, **counters: int) -> Episode:
    session = Session("e", char_policy(QueueEngine()))
    for name, value in counters.items():
        setattr(session.counters, name, value)
    run = AgentRun(Status(status), 2, "", [])
    task: Any = None  # not used here
    return Episode("e", task, 0, 0.0, verdict or Verdict(None), session, run, b"", [ROW], {})


def test_rows_have_the_form_that_verl_stores() -> None:
    from rl.train.agent_loop import outputs

    (output,) = outputs(episode())
    row = output.as_dict()
    assert row["response_mask"].tolist() == [1, 0, 1] and row["rm_scores"].tolist() == [0, 0, 1]
    # One entry per token but the last, whose routing nobody needs; verl pads with 0.
    assert row["routed_experts"].shape == (5, 4, 2) and row["routed_experts"][:, 0, 0].tolist() == [5, 5, 6, 6, 0]
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (3, 4)


def test_a_rows_own_reward_is_told_beside_its_episodes() -> None:
    from rl.train.agent_loop import outputs

    played = replace(episode(), rows=[ROW, ROW], credit=[0.25, 1.0])
    assert [(one.reward_score, one.extra_fields["credit"]) for one in outputs(played)] == [(1.0, -0.75), (1.0, 0.0)]
    assert "credit" not in outputs(episode())[0].extra_fields


def test_an_infrastructure_failure_has_no_rows() -> None:
    from rl.train.agent_loop import outputs

    assert outputs(episode(verdict=Verdict(Reason.NO_SPACE))) == []


@pytest.mark.parametrize(
    ("status", "counters", "overlong"),
    [
        ("finished", {}, False),
        ("finished", {"cut_replies": 1, "context_full": 1}, False),  # it went on, and ended by itself
        ("max_turns", {}, True),
        ("timeout", {}, True),
        ("error", {"context_full": 1}, True),
        ("error", {"cut_replies": 4}, True),
        ("error", {}, False),
        ("crashed", {}, False),
    ],
)
def test_an_episode_is_overlong_if_a_limit_ended_it(status: str, counters: dict[str, int], overlong: bool) -> None:
    from rl.train.agent_loop import outputs

    ended = episode(status, **counters)
    assert ended.overlong is overlong
    assert len(outputs(ended)) == 1 and len(outputs(ended, mask_overlong=True)) == (not overlong)


def test_an_episode_that_is_kept_is_not_played_again() -> None:
    from rl.train.agent_loop import ClaudeCodeAgentLoop

    loop = object.__new__(ClaudeCodeAgentLoop)  # it has no worker, engine or tasks: nothing else may be asked for
    assert asyncio.run(loop.run({}, session_id=2, kept="0 2")) == []
    for kept in ("", "0 12"):
        with pytest.raises(AttributeError):
            asyncio.run(loop.run({}, session_id=2, kept=kept))


def test_what_raises_is_noted_for_the_trainer(tmp_path: Path) -> None:
    from rl.train.agent_loop import ClaudeCodeAgentLoop

    async def worker() -> None:
        raise KeyError("tool_parser")

    loop: Any = object.__new__(ClaudeCodeAgentLoop)
    loop.config, loop._worker = SimpleNamespace(run=SimpleNamespace(dir=str(tmp_path))), worker
    with pytest.raises(KeyError):
        asyncio.run(loop.run({}, session_id=0))
    assert errors.last(tmp_path) == "KeyError: 'tool_parser'"
