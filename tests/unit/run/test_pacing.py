"""An episode of training that takes many times as long as others is ended; held-out ones have their whole time."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.run import pacing as deadline
from rl.run.pacing import LEAST, SHORTEST_S, Deadline
from rollout.agent import Status, run_agent
from rollout.agent.claude_code import ClaudeCode
from rollout.episode import Setup
from rollout.sandbox import ExecResult
from tests.kit import QueueEngine, char_policy

HOUR = 3600.0
AGENT = ClaudeCode(Path("/bin/claude"), 3, HOUR, 2000)


@given(st.floats(1, 10), st.lists(st.floats(0, 5000), max_size=300))
def test_a_deadline_is_never_longer_than_the_time_limit_nor_shorter_than_most_episodes(
    times: float, seconds: list[float]
) -> None:
    made = Deadline(times, HOUR)
    for each in seconds:
        made.note(each)
    assert min(HOUR, SHORTEST_S) <= made.seconds <= HOUR
    assert len(seconds) >= LEAST or made.seconds == HOUR
    last = [each for each in seconds[-128:] if each <= made.seconds]
    assert 2 * len(last) >= len(seconds[-128:]) or made.seconds == HOUR


@given(st.lists(st.floats(0, 5000), max_size=20))
def test_without_a_number_there_is_only_the_time_limit(seconds: list[float]) -> None:
    made = Deadline(None, HOUR)
    for each in seconds:
        made.note(each)
    assert made.seconds == HOUR


class Box:
    """A box whose program takes a scripted time, or all that it is given."""

    home = "/home/agent"

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def exec(self, argv: Any, *, timeout_s: float, **_: Any) -> ExecResult:
        await asyncio.sleep(min(self.seconds, timeout_s))
        return ExecResult(None if self.seconds > timeout_s else 0, b"", b"", self.seconds > timeout_s, False, 0.0)


async def test_a_step_does_not_wait_for_an_episode_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second step of a worker has one that would take an hour; it is ended after three times the median."""
    from rl.train.agent_loop import Worker

    monkeypatch.setattr(deadline, "SHORTEST_S", 0.0)
    setup: Any = Setup(char_policy(QueueEngine()), None, None, AGENT)  # ty: ignore[invalid-argument-type]
    worker: Any = object.__new__(Worker)
    worker.setup, worker.deadlines = setup, {"": Deadline(3.0, AGENT.timeout_s)}

    async def episode(seconds: float, split: str) -> Status:
        agent = worker.setting({}, split, None, 1).agent
        began, box = time.monotonic(), Box(seconds)
        run = await run_agent(box, agent, "fix it", "secret", Path("/s"), lambda: 1)  # ty: ignore[invalid-argument-type]
        worker.deadlines[""].note(time.monotonic() - began)
        return run.status

    async def step(*seconds: float) -> list[Status]:
        return await asyncio.wait_for(asyncio.gather(*(episode(each, "train") for each in seconds)), 20)

    await step(*[0.1] * LEAST)
    assert 0.25 < worker.deadlines[""].seconds < 3
    statuses = await step(*[0.1] * (LEAST - 1), HOUR)
    assert statuses[-1] is Status.TIMEOUT and Status.TIMEOUT not in statuses[:-1]
    assert worker.setting({}, "val", None, 1).agent.timeout_s == HOUR
