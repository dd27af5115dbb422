"""verifiers' interception server with its client for training: ``python gateway_verifiers.py ENGINE MODEL``, in the
environment that setup.sh made.

The renderer is the one that it has for Qwen3. A row is a branch of the trace, as it says itself, and its trainer
prime-rl (commit 559b447, ``trace_to_samples``) trains on what branches share in the first one only.
"""

from __future__ import annotations

import asyncio
import sys

from renderers import Qwen3RendererConfig
from talk import answer, row
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.interception import InterceptionServer
from verifiers.v1.session import RolloutSession
from verifiers.v1.task import TaskData
from verifiers.v1.trace import AgentInfo, Trace, TraceTask
from verifiers.v1.types import Sampling


async def main(engine: str, model: str) -> None:
    """Serve rollouts, each of which has a secret."""
    client = TrainClientConfig(base_url=f"{engine}/v1", renderer=Qwen3RendererConfig(), renderer_model_name=model)
    context = ModelContext("policy", client, Sampling(temperature=1.0, max_tokens=2000))
    task, sessions = TraceTask(type="Task", data=TaskData(prompt="task")), list[RolloutSession]()
    async with InterceptionServer() as server:

        async def opened() -> list[str]:
            sessions.append(RolloutSession(ctx=context, trace=Trace(task=task, agent=AgentInfo(config=AgentConfig()))))
            return [server.base_url, server.register(sessions[-1])[0]]

        async def rows() -> list:
            found, seen = [], set[int]()
            for branch in sessions[-1].trace.branches:
                mask = [said and id(node) not in seen for node in branch.nodes for said in node.mask]
                seen |= {id(node) for node in branch.nodes}
                if any(mask):
                    found.append(row(branch.token_ids, mask, branch.logprobs))
            return found

        await answer(opened, rows)


asyncio.run(main(*sys.argv[1:]))
