"""This module tests ``python -m rl.data.probe`` with the real Claude Code and an endpoint that solves what it is known
to solve.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pyarrow.parquet
import pytest

from rewards.task import load_tasks
from rl.evaluate.statistics import wilson
from rl.quickstart.tasks import make_tasks
from rollout.proxy.server import ProxyServer
from tests.integration.claude_kit import answers, scripted
from tests.integration.programs_kit import AGENT, STATEMENT, gold, start
from tests.kit import char_policy


@pytest.mark.claude
async def test_rates_are_written_into_the_rows(tmp_path: Path) -> None:
    await asyncio.to_thread(make_tasks, tmp_path / "made", seed=4, n_train=3, n_heldout=1)
    source, out = tmp_path / "made" / "train.parquet", tmp_path / "rated" / "tasks.parquet"
    always, never, sometimes = load_tasks(source)
    begun = itertools.count()

    def script(prompt: str) -> str:
        asked = STATEMENT.search(prompt)
        tasks = (always, never, sometimes)
        task = next((one for one in tasks if asked and asked[0] in one.problem_statement), None)
        if task is never:
            return "It cannot be done."
        if task is sometimes and answers(prompt) == 0 and next(begun):
            return "It cannot be done any more."
        return gold(prompt)

    endpoint = ProxyServer()
    await endpoint.start()
    session = await endpoint.open_session("gold", char_policy(scripted(script)))
    command = [str(source), "--out", str(out), f"endpoint=http://127.0.0.1:{endpoint.port}", "protocol=messages"]
    command += ["model=gold", "key_env=GOLD", *AGENT]
    try:
        for episodes in (2, 3):  # the second one goes on where the first one has ended
            program = start(*command, "--episodes", str(episodes), program="rl.data.probe", GOLD=session.secret)
            text, _ = await asyncio.to_thread(program.communicate)
            assert program.returncode == 0, text
            assert "3 of 3 tasks have a rate; 1 were resolved sometimes, not always" in text
            assert f"{3 if episodes == 3 else 6} episodes to play" in text
    finally:
        await endpoint.stop()
    rows = {row["instance_id"]: row for row in pyarrow.parquet.read_table(out).to_pylist()}
    found = [(rows[one.instance_id]["resolve_rate"], rows[one.instance_id]["episodes"]) for one in load_tasks(source)]
    assert found == [(1.0, 3), (0.0, 3), (pytest.approx(1 / 3), 3)]
    one = rows[sometimes.instance_id]
    assert (one["resolve_rate_low"], one["resolve_rate_high"]) == pytest.approx(wilson(1 / 3, 3))
    assert all(task.snapshot.is_dir() for task in load_tasks(out))
    told = start(*command, "samples=2", program="rl.data.probe", GOLD=session.secret)
    text, _ = await asyncio.to_thread(told.communicate)
    assert told.returncode == 2 and "config: samples=2: leave it out" in text
