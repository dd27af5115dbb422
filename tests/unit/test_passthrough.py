"""A proxy whose policy is an endpoint: a second proxy plays the endpoint, so that both ends speak the real format."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from rollout import SIDE_MODEL
from rollout.proxy.forward import SideEndpoint
from rollout.proxy.passthrough import PassThrough
from rollout.proxy.server import ProxyServer
from rollout.proxy.session import Session
from tests.kit import QueueEngine, char_policy

HELLO: dict[str, Any] = {"model": "policy", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}


class Ends:
    """The agent's proxy and the endpoints behind it. ``max_context``: of the endpoint's model, in tokens."""

    async def open(self) -> None:
        self.back = ProxyServer()
        await self.back.start()
        self.main = await self._session("main", QueueEngine(*["main"] * 9))
        self.side = await self._session("side", QueueEngine(*["side"] * 9))
        url = f"http://127.0.0.1:{self.back.port}"
        self.front = PassThrough(
            SideEndpoint(url, "large", self.main.secret), SideEndpoint(url, "small", self.side.secret)
        )
        await self.front.start()
        self.session = await self.front.open_session("e", self.front.policy)

    async def _session(self, name: str, engine: QueueEngine) -> Session:
        return await self.back.open_session(name, char_policy(engine, max_context=300))

    async def close(self) -> None:
        await self.front.stop()
        await self.back.stop()

    async def post(self, path: str = "/v1/messages", **more: Any) -> tuple[int, str]:
        url, headers = f"http://127.0.0.1:{self.front.port}{path}", {"x-api-key": self.session.secret}
        async with (
            aiohttp.ClientSession() as http,
            http.post(url, json={**HELLO, **more}, headers=headers) as reply,
        ):
            return reply.status, await reply.text()


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    ends = Ends()
    await ends.open()
    yield ends
    await ends.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_go_to_their_endpoint_with_its_key_and_leave_only_counts(ends: Ends, stream: bool) -> None:
    status, text = await ends.post(stream=stream)
    assert status == 200 and "main" in text and '"large"' in text
    status, text = await ends.post(model=SIDE_MODEL, stream=stream)
    assert status == 200 and "side" in text and '"small"' in text
    status, text = await ends.post("/v1/messages/count_tokens")
    assert status == 200 and "input_tokens" in text
    assert (ends.session.counters.calls, ends.session.counters.side_calls) == (2, 1)
    assert not ends.session.tree.nodes and not ends.session.counters.engine_errors
    for session in (ends.main, ends.side):
        assert session.counters.calls == 1 and session.secret not in text


async def test_the_endpoints_refusals_are_counted_until_it_answers_again(ends: Ends) -> None:
    ends.front.endpoint.key = "wrong"
    status, text = await ends.post()
    assert status == 401 and "authentication_error" in text and ends.session.counters.engine_errors == 1
    await ends.post()
    assert ends.session.counters.engine_errors == 2
    ends.front.endpoint.key = ends.main.secret
    assert (await ends.post())[0] == 200
    assert ends.session.counters.engine_errors == 0


async def test_a_full_context_is_no_failure_of_the_endpoint(ends: Ends) -> None:
    status, text = await ends.post(messages=[{"role": "user", "content": "long " * 100}])
    assert status == 400 and "prompt is too long" in text
    assert (ends.session.counters.context_full, ends.session.counters.engine_errors) == (1, 0)


async def test_an_absent_endpoint_is_a_529_and_one_that_breaks_off_breaks_off(ends: Ends) -> None:
    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 1000\r\n\r\nevent: ")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(half, "127.0.0.1", 0)
    ends.front.endpoint.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    with pytest.raises(aiohttp.ClientError):
        await ends.post(stream=True)
    assert ends.session.counters.engine_errors == 1
    server.close()
    await server.wait_closed()
    status, text = await ends.post(stream=True)
    assert status == 529 and "overloaded_error" in text and ends.session.counters.engine_errors == 2
