"""This project's proxy: ``python gateway_ours.py ENGINE MODEL``."""

from __future__ import annotations

import asyncio
import sys

from talk import answer, row

from rollout import POLICY_MODEL
from rollout.proxy.server import ProxyServer
from rollout.proxy.session import Session
from rollout.proxy.standalone import ProxyOptions, load_policy
from rollout.proxy.vllm_http import VllmHttpEngine


async def main(engine: str, model: str) -> None:
    """Serve sessions over TCP; the rows are those of their trees."""
    policy = load_policy(ProxyOptions(engine, model, "hermes", "qwen3"))(VllmHttpEngine(engine, POLICY_MODEL), 65_536)
    server, sessions = ProxyServer(), list[Session]()
    await server.start()

    async def opened() -> list[str]:
        sessions.append(await server.open_session("episode", policy))
        return [f"http://127.0.0.1:{server.port}", sessions[-1].secret]

    async def rows() -> list:
        async with asyncio.timeout(10):  # it may take a moment until the agent's end is noticed
            while any(node.pending for node in sessions[-1].tree.nodes):
                await asyncio.sleep(0.05)
        made = [(one, [0] * len(one.prompt_ids)) for one in sessions[-1].tree.sequences()]
        return [row(one.prompt_ids + one.response_ids, read + one.mask, read + one.logprobs) for one, read in made]

    await answer(opened, rows)


asyncio.run(main(*sys.argv[1:]))
