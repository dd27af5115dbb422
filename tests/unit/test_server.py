"""The HTTP surface, with real connections over TCP and unix sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollout.proxy.engine import Completion, EngineError
from rollout.proxy.server import ProxyServer
from rollout.proxy.session import Session
from tests.kit import QueueEngine, char_policy

HELLO = {"model": "m", "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def proxy() -> AsyncIterator[ProxyServer]:
    server = ProxyServer(ping_s=0.05)
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


class Gate(QueueEngine):
    """Answers when it is opened; raises ``error`` instead if there is one."""

    def __init__(self, *replies: str, error: Exception | None = None) -> None:
        super().__init__(*replies)
        self.open, self.error = asyncio.Event(), error

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Completion:
        await self.open.wait()
        if self.error:
            raise self.error
        return await super().generate(request_id, prompt_ids, sampling)


async def post(
    http: aiohttp.ClientSession,
    proxy: ProxyServer,
    session: Session | str,
    body: Any,
    path: str = "/v1/messages",
    **headers: str,
) -> tuple[int, Any, Any]:
    secret = session if isinstance(session, str) else session.secret
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    url = f"http://127.0.0.1:{proxy.port}{path}"
    async with http.post(url, data=data, headers={"Authorization": f"Bearer {secret}", **headers}) as response:
        raw = await response.read()
        return (
            response.status,
            json.loads(raw) if response.content_type == "application/json" else raw,
            response.headers,
        )


async def test_a_reply_and_its_usage(proxy: ProxyServer, http: aiohttp.ClientSession) -> None:
    session = await proxy.open_session("e", char_policy(QueueEngine("hello")))
    status, reply, _ = await post(http, proxy, session, HELLO)
    assert status == 200
    assert (reply["content"], reply["stop_reason"]) == ([{"type": "text", "text": "hello"}], "end_turn")
    assert reply["usage"] == {"input_tokens": session.tree.encoded_tokens(), "output_tokens": 6}
    assert [node.delivered for node in session.tree.nodes if node.sampled] == [True]
    assert session.overhead_ms > 0


async def test_a_streamed_reply_is_the_same_reply(proxy: ProxyServer, http: aiohttp.ClientSession) -> None:
    session = await proxy.open_session("e", char_policy(QueueEngine("hello")))
    status, raw, headers = await post(http, proxy, session, {**HELLO, "stream": True})
    assert status == 200 and headers["Content-Type"] == "text/event-stream"
    events = [json.loads(line[6:]) for line in raw.decode().splitlines() if line.startswith("data: ")]
    assert [e["type"] for e in events if e["type"].startswith("message")] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"]["id"] == session.tree.nodes[1].reply.id


async def test_pings_bridge_a_slow_engine(proxy: ProxyServer, http: aiohttp.ClientSession) -> None:
    engine = Gate("late")
    session = await proxy.open_session("e", char_policy(engine))
    asyncio.get_running_loop().call_later(0.3, engine.open.set)
    _, raw, _ = await post(http, proxy, session, {**HELLO, "stream": True})
    kinds = [json.loads(line[6:])["type"] for line in raw.decode().splitlines() if line.startswith("data: ")]
    assert kinds[0] == "message_start" and kinds.count("ping") >= 2 and kinds[-1] == "message_stop"


async def test_a_unix_socket_is_another_way_in_and_goes_with_the_session(proxy: ProxyServer, tmp_path: Path) -> None:
    session = await proxy.open_session("e", char_policy(QueueEngine("hello")), tmp_path / "s")
    connector = aiohttp.UnixConnector(str(tmp_path / "s"))
    async with aiohttp.ClientSession(connector=connector) as http:
        async with http.post("http://x/v1/messages", json=HELLO, headers={"x-api-key": session.secret}) as response:
            assert response.status == 200
        async with http.post("http://x/v1/messages", json=HELLO, headers={"x-api-key": "guess"}) as response:
            assert response.status == 401
    await proxy.close_session(session)
    assert not (tmp_path / "s").exists()


async def test_secrets_pick_the_session(proxy: ProxyServer, http: aiohttp.ClientSession) -> None:
    one = await proxy.open_session("1", char_policy(QueueEngine("one")))
    two = await proxy.open_session("2", char_policy(QueueEngine("two")))
    assert (await post(http, proxy, two, HELLO))[1]["content"][0]["text"] == "two"
    assert one.tree.nodes == []
    await proxy.close_session(one)
    for secret in ("", "guess", one.secret):
        status, error, _ = await post(http, proxy, secret, HELLO)
        assert (status, error["error"]["type"]) == (401, "authentication_error")


@pytest.mark.parametrize(
    "body, says", [(b"{", "truncated"), (b"{}", "messages"), ({"messages": [{"role": "x", "content": ""}]}, "role")]
)
async def test_bad_requests_get_anthropics_error(
    proxy: ProxyServer, http: aiohttp.ClientSession, body: Any, says: str
) -> None:
    session = await proxy.open_session("e", char_policy(QueueEngine()))
    status, error, _ = await post(http, proxy, session, body)
    assert (status, error["type"], error["error"]["type"]) == (400, "error", "invalid_request_error")
    assert says in error["error"]["message"]


async def test_no_such_endpoint(proxy: ProxyServer, http: aiohttp.ClientSession) -> None:
    assert (await post(http, proxy, "x", HELLO, path="/v1/complete"))[0] == 404


async def test_a_failing_engine_is_a_529_to_retry(proxy: ProxyServer, http: aiohttp.ClientSession) -> None:
    engine = Gate("hello", error=EngineError("down"))
    engine.open.set()
    session = await proxy.open_session("e", char_policy(engine))
    for stream in (False, True):
        status, error, headers = await post(http, proxy, session, {**HELLO, "stream": stream})
        assert (status, error["error"]["type"], headers["Retry-After"]) == (529, "overloaded_error", "1")
    engine.error = None
    status, _, _ = await post(http, proxy, session, HELLO, **{"x-stainless-retry-count": "1"})
    assert status == 200 and len(session.tree.sequences()) == 1


async def test_a_bug_is_a_500_without_its_text(proxy: ProxyServer, http: aiohttp.ClientSession) -> None:
    engine = Gate(error=ZeroDivisionError("secret detail"))
    engine.open.set()
    session = await proxy.open_session("e", char_policy(engine))
    status, error, _ = await post(http, proxy, session, HELLO)
    assert status == 500 and "secret" not in json.dumps(error)


async def test_a_retry_gets_the_same_reply(proxy: ProxyServer, http: aiohttp.ClientSession) -> None:
    session = await proxy.open_session("e", char_policy(QueueEngine("one", "two")))
    first = (await post(http, proxy, session, HELLO))[1]
    again = (await post(http, proxy, session, HELLO, **{"x-stainless-retry-count": "2"}))[1]
    assert again == first
    fresh = (await post(http, proxy, session, HELLO))[1]
    assert fresh["content"][0]["text"] == "two" and fresh["id"] != first["id"]
    assert len(session.tree.sequences()) == 2


async def test_a_client_that_hangs_up_finds_its_reply_later(proxy: ProxyServer, http: aiohttp.ClientSession) -> None:
    engine = Gate("hello", "other")
    session = await proxy.open_session("e", char_policy(engine))
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(post(http, proxy, session, {**HELLO, "stream": True}), 0.2)
    waiting = asyncio.create_task(post(http, proxy, session, HELLO, **{"x-stainless-retry-count": "1"}))
    await asyncio.sleep(0.1)
    engine.open.set()
    assert (await waiting)[1]["content"][0]["text"] == "hello"
    assert engine.replies == ["other"] and len(session.tree.sequences()) == 1


async def test_an_undelivered_reply_is_not_trained(proxy: ProxyServer, http: aiohttp.ClientSession) -> None:
    engine = Gate("hello")
    session = await proxy.open_session("e", char_policy(engine))
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(post(http, proxy, session, {**HELLO, "stream": True}), 0.2)
    engine.open.set()
    await asyncio.sleep(0.1)
    assert session.tree.sampled_tokens() == 6 and session.tree.sequences() == []


async def test_the_agent_can_only_tighten_max_tokens(proxy: ProxyServer, http: aiohttp.ClientSession) -> None:
    engine = QueueEngine("abcdef", "abcdef")
    session = await proxy.open_session("e", char_policy(engine, max_tokens=4))
    reply = (await post(http, proxy, session, HELLO))[1]
    assert (reply["content"][0]["text"], reply["stop_reason"]) == ("abcd", "max_tokens")
    other = {**HELLO, "max_tokens": 2, "messages": [{"role": "user", "content": "other"}]}
    assert (await post(http, proxy, session, other))[1]["content"][0]["text"] == "ab"


async def test_a_full_context_is_said_in_the_form_that_makes_claude_code_compact(
    proxy: ProxyServer, http: aiohttp.ClientSession
) -> None:
    session = await proxy.open_session("e", char_policy(QueueEngine("x"), max_context=10))
    status, error, _ = await post(http, proxy, session, HELLO)
    assert status == 400 and error["error"]["message"].startswith("prompt is too long: ")


async def test_count_tokens_adds_nothing(proxy: ProxyServer, http: aiohttp.ClientSession) -> None:
    session = await proxy.open_session("e", char_policy(QueueEngine("hello")))
    _, count, _ = await post(http, proxy, session, HELLO, path="/v1/messages/count_tokens")
    assert session.tree.nodes == []
    reply = (await post(http, proxy, session, HELLO))[1]
    assert count == {"input_tokens": reply["usage"]["input_tokens"]}


async def test_an_oversized_body_is_a_413(proxy: ProxyServer, http: aiohttp.ClientSession) -> None:
    session = await proxy.open_session("e", char_policy(QueueEngine()))
    status, error, _ = await post(http, proxy, session, b" " * ((64 << 20) + 1))
    assert (status, error["error"]["type"]) == (413, "request_too_large")


async def test_closing_a_session_ends_its_generation(proxy: ProxyServer, http: aiohttp.ClientSession) -> None:
    session = await proxy.open_session("e", char_policy(Gate("never")))
    waiting = asyncio.create_task(post(http, proxy, session, HELLO))
    await asyncio.sleep(0.1)
    await proxy.close_session(session)
    assert (await asyncio.wait_for(waiting, 2))[0] == 410
