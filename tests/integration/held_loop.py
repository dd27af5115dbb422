"""This is our agent loop, with one episode that is sure to outlive a weight update: the first that makes a
second call waits with it until the first step is on record, and with it all episodes of later steps, so that the next
step trains on it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl.metrics.episodes import read_jsonl
from rl.train import agent_loop
from rollout.episode import Episode
from rollout.proxy.engine import Completion, Engine

_over = asyncio.Event()


class Held:
    """An engine that holds that call."""

    def __init__(self, engine: Engine, run_dir: Path) -> None:
        self.engine, self.run_dir = engine, run_dir
        self.calls: Counter[str] = Counter()
        self.episode: str | None = None

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Completion:
        self.calls[request_id] += 1
        if self.calls[request_id] == 2 and self.episode is None:
            self.episode = request_id
            while not read_jsonl(self.run_dir / "metrics.jsonl"):
                await asyncio.sleep(0.1)
        return await self.engine.generate(request_id, prompt_ids, sampling)


class Worker(agent_loop.Worker):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.held = Held(self.setup.policy.engine, Path(self.config.run.dir))
        # The episode waits for a whole step.
        agent = replace(self.setup.agent, timeout_s=600)
        self.setup = replace(self.setup, agent=agent, policy=replace(self.setup.policy, engine=self.held))

    def keep(self, episode: Episode, split: str, step: int, session: str) -> None:
        super().keep(episode, split, step, session)
        if episode.id == self.held.episode:
            _over.set()


agent_loop.Worker = Worker  # what the loop makes


class Loop(agent_loop.ClaudeCodeAgentLoop):
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[Any]:
        if int(row["global_steps"]) > 1:
            await _over.wait()
        return await super().run(sampling_params, **row)
