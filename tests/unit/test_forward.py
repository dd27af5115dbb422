"""Side calls to another endpoint: a second proxy plays it, so that both ends speak the real format."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from rollout import SIDE_MODEL
from rollout.proxy.forward import SideEndpoint
from rollout.proxy.server import ProxyServer
from rollout.proxy.session import Session
from tests.kit import QueueEngine, char_policy


def body(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}], **more}


class Ends:
    """The agent's proxy and the endpoint behind it."""

    def __init__(self) -> None:
        self.front, self.back = ProxyServer(), ProxyServer()
        self.policy_engine, self.side_engine = QueueEngine("policy", "policy"), QueueEngine("side", "side")

    async def open(self) -> None:
        await self.front.start()
        await self.back.start()
        self.side: Session = await self.back.open_session("side", char_policy(self.side_engine))
        self.endpoint = SideEndpoint(f"http://127.0.0.1:{self.back.port}", "small", self.side.secret)
        policy = replace(char_policy(self.policy_engine), side_endpoint=self.endpoint)
        self.session = await self.front.open_session("e", policy)

    async def close(self) -> None:
        await self.endpoint.close()
        await self.front.stop()
        await self.back.stop()

    async def post(self, request: dict[str, Any]) -> tuple[int, str, str]:
        headers = {"x-api-key": self.session.secret}
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"http://127.0.0.1:{self.front.port}/v1/messages", json=request, headers=headers) as reply,
        ):
            return reply.status, reply.content_type, await reply.text()


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    ends = Ends()
    await ends.open()
    yield ends
    await ends.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_only_the_small_slot_is_forwarded_and_leaves_no_trace_in_the_tree(ends: Ends, stream: bool) -> None:
    status, kind, text = await ends.post(body(SIDE_MODEL, stream=stream))
    assert status == 200 and "side" in text and '"small"' in text
    assert kind == ("text/event-stream" if stream else "application/json")
    assert not ends.session.tree.nodes and ends.session.counters.side_calls == 1
    status, _, text = await ends.post(body("policy", stream=stream))
    assert status == 200 and "policy" in text
    assert len(ends.session.tree.sequences()) == 1 and not ends.side_engine.replies[1:]


async def test_the_endpoints_own_errors_come_through_and_its_absence_is_a_529(ends: Ends) -> None:
    status, _, text = await ends.post(body(SIDE_MODEL, max_tokens="many"))
    assert status == 400 and "max_tokens" in text
    await ends.back.stop()
    status, _, text = await ends.post(body(SIDE_MODEL))
    assert status == 529 and "overloaded_error" in text
    assert ends.session.secret not in text and ends.side.secret not in text
