"""This module tests calls that are forwarded to another endpoint, which a second proxy plays, so that both ends are
real.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
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
    """The agent's proxy (``front``), and the one that plays the endpoints "large" and "small" (``back``).

    The front has a policy of its own and forwards side calls, or is a PassThrough if the model is ``hosted``.
    """

    async def open(self, hosted: bool) -> None:
        self.back = ProxyServer()
        await self.back.start()
        self.large, large = await self._endpoint("large")
        self.small, self.side = await self._endpoint("small")
        self.front: Any = PassThrough(large, self.side) if hosted else ProxyServer()
        await self.front.start()
        own = replace(char_policy(QueueEngine("own", "own")), side_endpoint=self.side)
        self.session: Session = await self.front.open_session("e", self.front.policy if hosted else own)

    async def _endpoint(self, model: str) -> tuple[Session, SideEndpoint]:
        policy = char_policy(QueueEngine(*[f"said by {model}"] * 9), max_context=300)
        session = await self.back.open_session(model, policy)
        return session, SideEndpoint(f"http://127.0.0.1:{self.back.port}", model, session.secret)

    async def close(self) -> None:
        await self.front.stop()
        await self.side.close()
        await self.back.stop()

    async def post(self, path: str = "/v1/messages", **more: Any) -> tuple[int, str, str]:
        """Send a request of the agent; return status, content type and body."""
        url, headers = f"http://127.0.0.1:{self.front.port}{path}", {"x-api-key": self.session.secret}
        async with (
            aiohttp.ClientSession() as http,
            http.post(url, json={**HELLO, **more}, headers=headers) as reply,
        ):
            return reply.status, reply.content_type, await reply.text()


@pytest.fixture
async def ends(request: pytest.FixtureRequest) -> AsyncIterator[Ends]:
    ends = Ends()
    await ends.open(hosted=request.param == "hosted")
    yield ends
    await ends.close()


side_calls = pytest.mark.parametrize("ends", ["side calls"], indirect=True)
hosted = pytest.mark.parametrize("ends", ["hosted"], indirect=True)
streamed = pytest.mark.parametrize("stream", [False, True])


@side_calls
@streamed
async def test_only_side_calls_are_forwarded_and_they_leave_no_trace_in_the_tree(ends: Ends, stream: bool) -> None:
    status, kind, text = await ends.post(model=SIDE_MODEL, stream=stream)
    assert status == 200 and "said by small" in text and '"model":"small"' in text
    assert kind == ("text/event-stream" if stream else "application/json")
    assert not ends.session.tree.nodes and ends.session.counters.side_calls == 1
    status, _, text = await ends.post(stream=stream)
    assert status == 200 and "own" in text
    assert len(ends.session.tree.sequences()) == 1 and ends.small.counters.calls == 1


@pytest.mark.parametrize("ends", ["side calls", "hosted"], indirect=True)
async def test_calls_that_are_forwarded_are_limited_too(ends: Ends) -> None:
    ends.session.policy = replace(ends.session.policy, max_calls=2)
    statuses = [(await ends.post(model=SIDE_MODEL))[0] for _ in range(4)]
    assert statuses == [200, 200, 403, 403]
    assert (await ends.post("/v1/messages/count_tokens"))[0] == 403
    assert (ends.small.counters.calls, ends.session.counters.refused_calls) == (2, 3)


@side_calls
async def test_the_endpoints_own_errors_come_through_and_its_absence_is_a_529(ends: Ends) -> None:
    status, _, text = await ends.post(model=SIDE_MODEL, max_tokens="many")
    assert status == 400 and "max_tokens" in text
    await ends.back.stop()
    status, _, text = await ends.post(model=SIDE_MODEL)
    assert status == 529 and "overloaded_error" in text
    assert ends.session.secret not in text and ends.small.secret not in text


@hosted
@streamed
async def test_all_calls_go_to_their_endpoint_with_its_key_and_leave_only_counts(ends: Ends, stream: bool) -> None:
    status, _, text = await ends.post(stream=stream)
    assert status == 200 and "said by large" in text and '"model":"large"' in text
    status, _, text = await ends.post(model=SIDE_MODEL, stream=stream)
    assert status == 200 and "said by small" in text and '"model":"small"' in text
    status, _, text = await ends.post("/v1/messages/count_tokens")
    assert status == 200 and "input_tokens" in text
    assert (ends.session.counters.calls, ends.session.counters.side_calls) == (2, 1)
    assert not ends.session.tree.nodes and not ends.session.counters.engine_errors
    for session in (ends.large, ends.small):
        assert session.counters.calls == 1 and session.secret not in text


@hosted
async def test_the_endpoints_refusals_are_counted_until_it_answers_again(ends: Ends) -> None:
    ends.front.endpoint.key = "wrong"
    status, _, text = await ends.post()
    assert status == 401 and "authentication_error" in text and ends.session.counters.engine_errors == 1
    await ends.post()
    assert ends.session.counters.engine_errors == 2
    ends.front.endpoint.key = ends.large.secret
    assert (await ends.post())[0] == 200
    assert ends.session.counters.engine_errors == 0


@hosted
async def test_a_full_context_is_no_failure_of_the_endpoint(ends: Ends) -> None:
    status, _, text = await ends.post(messages=[{"role": "user", "content": "long " * 100}])
    assert status == 400 and "prompt is too long" in text
    assert (ends.session.counters.context_full, ends.session.counters.engine_errors) == (1, 0)


@hosted
async def test_if_the_endpoint_breaks_off_so_does_the_reply_and_its_absence_is_a_529(ends: Ends) -> None:
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
    status, _, text = await ends.post(stream=True)
    assert status == 529 and "overloaded_error" in text and ends.session.counters.engine_errors == 2
