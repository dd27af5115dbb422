"""Our agent loop with a look at the engine before each step's first episode, for scripts/gpu_ladder.py.

A look is a line in looks.jsonl in the run directory: ``step``, and ``ids`` and ``logprobs`` of the reply to a fixed
prompt with a fixed seed, which change when other weights reach the engine. Before the first one a long reply is
cancelled: ``running`` is how many requests the engine counted during it, ``left`` how many afterwards. For that, the
engine must count (actor_rollout_ref.rollout.disable_log_stats=false), and there must be one agent loop worker.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import ray

from rl.train import agent_loop
from rl.train.engine import VerlEngine

PROMPT = list(range(300, 364))
PATIENCE_S = 60.0
_UNDER_WAY = re.compile(r"^vllm:num_requests_(?:running|waiting)\{[^}]*\} (\S+)$", re.MULTILINE)
_looked: set[int] = set()
_looking = asyncio.Lock()


class Loop(agent_loop.ClaudeCodeAgentLoop):
    """An agent loop looks at the engine before the first episode of a step; all other episodes wait."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[Any]:  # ty: ignore
        """Look, if this is a step's first episode, and play the episode."""
        step = int(row["global_steps"])
        async with _looking:
            if step not in _looked:
                seen = await look(VerlEngine(self.server_manager), sampling_params, first=not _looked)
                _looked.add(step)
                with open(Path(self.config.run.dir) / "looks.jsonl", "a") as file:
                    file.write(json.dumps({"step": step, **seen}) + "\n")
        return await super().run(sampling_params, **row)


async def look(engine: VerlEngine, sampling: dict[str, Any], first: bool) -> dict[str, Any]:
    """Return the reply to the fixed prompt; if this is the ``first`` look, cancel a reply before."""
    found = {}
    if first:
        asking = asyncio.create_task(engine.generate("cancelled", PROMPT, _reply(sampling, 3500)))
        found["running"] = await _until(lambda requests: requests > 0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await engine.generate("after", PROMPT, _reply(sampling, 1))  # an engine that does nothing counts nothing
        found["left"] = await _until(lambda requests: requests == 0)
    done = await engine.generate("look", PROMPT, _reply(sampling, 8))
    return {**found, "ids": done.ids, "logprobs": done.logprobs}


def _reply(sampling: dict[str, Any], tokens: int) -> dict[str, Any]:
    return {**sampling, "seed": 7, "max_tokens": tokens, "ignore_eos": True}


async def _until(wanted: Callable[[int], bool]) -> int:
    """Return how many requests the engine counts, as soon as it is as ``wanted`` or when ``PATIENCE_S`` are over."""
    (server,) = [name for name in ray.util.list_named_actors() if name.startswith("vllm_server")]
    host, port = await ray.get_actor(server).get_server_address.remote()
    end = time.monotonic() + PATIENCE_S
    async with aiohttp.ClientSession() as http:
        while True:
            async with http.get(f"http://{host}:{port}/metrics") as response:
                text = await response.text()
            requests = int(sum(float(count) for count in _UNDER_WAY.findall(text)))
            if wanted(requests) or time.monotonic() > end:
                return requests
            await asyncio.sleep(0.05)
