"""This module tests the HTTP server, with real connections over TCP and unix sockets."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import os
import re
import sys
import weakref
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollout.proxy import connections
from rollout.proxy.engine import Completion, EngineError
from rollout.proxy.server import ProxyServer
from rollout.proxy.session import Session
from rollout.proxy.wire import decode_request
from tests.kit import HELLO, QueueEngine, char_policy

LONG = 60  # seconds to wait for what takes milliseconds on an idle machine


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


class Gate(QueueEngine):
    """Answers when ``open`` is set, or raises ``error`` then if there is one."""

    def __init__(self, *replies: str, error: Exception | None = None) -> None:
        super().__init__(*replies)
        self.open, self.error = asyncio.Event(), error
        self.asked, self.aborted = asyncio.Event(), asyncio.Event()

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Completion:
        self.asked.set()
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.aborted.set()
            raise
        if self.error:
            raise self.error
        return await super().generate(request_id, prompt_ids, sampling)


async def hang_up(asking: Coroutine[Any, Any, Any], engine: Gate) -> None:
    """Send a request, and hang up while the engine is sampling."""
    task = asyncio.create_task(asking)
    await asyncio.wait_for(engine.asked.wait(), LONG)
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


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


async def trained(http: aiohttp.ClientSession, session: Session) -> int:
    """The number of training rows when the client has closed its connections, which shows what it has read."""
    await http.close()
    session.settle()
    return len(session.tree.sequences())


async def test_a_reply_and_its_usage(proxy: ProxyServer, http: aiohttp.ClientSession) -> None:
    session = await proxy.open_session("e", char_policy(QueueEngine("hello")))
    status, reply, _ = await post(http, proxy, session, HELLO)
    assert status == 200
    assert (reply["content"], reply["stop_reason"]) == ([{"type": "text", "text": "hello"}], "end_turn")
    assert reply["usage"] == {"input_tokens": (session.tree.tokens - session.tree.sampled_tokens()), "output_tokens": 6}
    assert await trained(http, session) == 1
    assert session.counters.overhead_s > 0


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


async def test_a_session_has_a_unix_socket_which_is_removed_with_it(proxy: ProxyServer, tmp_path: Path) -> None:
    session = await proxy.open_session("e", char_policy(QueueEngine("hello")), tmp_path / "s")
    connector = aiohttp.UnixConnector(str(tmp_path / "s"))
    async with aiohttp.ClientSession(connector=connector) as http:
        async with http.post("http://x/v1/messages", json=HELLO, headers={"x-api-key": session.secret}) as response:
            assert response.status == 200
        async with http.post("http://x/v1/messages", json=HELLO, headers={"x-api-key": "guess"}) as response:
            assert response.status == 401
    await proxy.close_session(session)
    assert not (tmp_path / "s").exists()


async def test_the_secret_selects_the_session(proxy: ProxyServer, http: aiohttp.ClientSession) -> None:
    one = await proxy.open_session("1", char_policy(QueueEngine("one")))
    two = await proxy.open_session("2", char_policy(QueueEngine("two")))
    assert (await post(http, proxy, two, HELLO))[1]["content"][0]["text"] == "two"
    assert one.tree.nodes == []
    mac = one.secret.partition(".")[2]
    forged = f"{two.secret.partition('.')[0]}.{mac}"
    for secret in ("", "guess", "guess.", f".{mac}", forged, one.secret[:-1], one.secret + "0", "\udcff." + mac):
        status, error, _ = await post(http, proxy, secret, HELLO)
        assert (status, error["error"]["type"]) == (401, "authentication_error"), secret
    assert one.tree.nodes == []
    await proxy.close_session(one)
    status, error, _ = await post(http, proxy, one, HELLO)
    assert (status, error["type"]) == (410, "error") and "closed" in error["error"]["message"]


async def test_a_socket_gives_access_to_its_own_session_only(proxy: ProxyServer, tmp_path: Path) -> None:
    one = await proxy.open_session("1", char_policy(QueueEngine("one", "more")), tmp_path / "1")
    two = await proxy.open_session("2", char_policy(QueueEngine("two")), tmp_path / "2")
    with pytest.raises(FileExistsError):
        await proxy.open_session("3", char_policy(QueueEngine()), tmp_path / "1")
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(tmp_path / "1"))) as http:

        async def ask(secret: str) -> int:
            async with http.post("http://x/v1/messages", json=HELLO, headers={"x-api-key": secret}) as response:
                await response.read()
                return response.status

        assert [await ask(two.secret), await ask(one.secret)] == [401, 200]
        assert two.tree.nodes == []
        await proxy.close_session(two)
        assert [await ask(two.secret), await ask(one.secret)] == [410, 200]


async def test_closing_a_session_closes_the_connections_to_its_socket(proxy: ProxyServer, tmp_path: Path) -> None:
    session = await proxy.open_session("e", char_policy(QueueEngine()), tmp_path / "s")
    reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b"404" in await reader.readline()
    await proxy.close_session(session)
    await asyncio.wait_for(reader.read(), LONG)  # returns when the kept-alive connection is closed
    writer.close()


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


async def test_no_such_endpoint_and_no_such_method(proxy: ProxyServer, http: aiohttp.ClientSession) -> None:
    status, error, _ = await post(http, proxy, "x", HELLO, path="/v1/complete")
    assert (status, error["error"]["type"]) == (404, "not_found_error")
    async with http.get(f"http://127.0.0.1:{proxy.port}/v1/messages") as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")
        assert (await response.json())["type"] == "error"


async def test_a_failing_engine_is_a_529_to_retry(proxy: ProxyServer, http: aiohttp.ClientSession) -> None:
    engine = Gate("hello", error=EngineError("down"))
    engine.open.set()
    session = await proxy.open_session("e", char_policy(engine))
    for stream in (False, True):
        status, error, headers = await post(http, proxy, session, {**HELLO, "stream": stream})
        assert (status, error["error"]["type"], headers["Retry-After"]) == (529, "overloaded_error", "1")
    engine.error = None
    status, _, _ = await post(http, proxy, session, HELLO, **{"x-stainless-retry-count": "1"})
    assert status == 200 and await trained(http, session) == 1


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
    assert await trained(http, session) == 2


async def test_a_client_that_hangs_up_finds_its_reply_later(proxy: ProxyServer, http: aiohttp.ClientSession) -> None:
    engine = Gate("hello", "other")
    session = await proxy.open_session("e", char_policy(engine))
    await hang_up(post(http, proxy, session, {**HELLO, "stream": True}), engine)
    waiting = asyncio.create_task(post(http, proxy, session, HELLO, **{"x-stainless-retry-count": "1"}))
    await asyncio.sleep(0.1)
    engine.open.set()
    assert (await waiting)[1]["content"][0]["text"] == "hello"
    assert engine.replies == ["other"] and await trained(http, session) == 1


async def test_an_undelivered_reply_is_not_trained(proxy: ProxyServer, http: aiohttp.ClientSession) -> None:
    engine = Gate("hello")
    session = await proxy.open_session("e", char_policy(engine))
    await hang_up(post(http, proxy, session, {**HELLO, "stream": True}), engine)
    engine.open.set()
    async with asyncio.timeout(LONG):
        while session.tree.sampled_tokens() < 6:
            await asyncio.sleep(0.01)
    assert session.tree.sampled_tokens() == 6 and session.tree.sequences() == []


async def test_the_agent_can_only_tighten_max_tokens(proxy: ProxyServer, http: aiohttp.ClientSession) -> None:
    engine = QueueEngine("abcdef", "abcdef")
    session = await proxy.open_session("e", char_policy(engine, max_tokens=4))
    reply = (await post(http, proxy, session, HELLO))[1]
    assert (reply["content"][0]["text"], reply["stop_reason"]) == ("abcd", "max_tokens")
    other = {**HELLO, "max_tokens": 2, "messages": [{"role": "user", "content": "other"}]}
    assert (await post(http, proxy, session, other))[1]["content"][0]["text"] == "ab"


async def test_a_full_context_has_the_error_on_which_claude_code_compacts(
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


async def chunks(size: int) -> AsyncIterator[bytes]:
    for _ in range(size // 1000):
        yield b" " * 1000


async def test_an_oversized_body_is_a_413() -> None:
    server = ProxyServer(max_body=10_000)
    await server.start()
    session = await server.open_session("e", char_policy(QueueEngine("hello")))
    auth = {"x-api-key": session.secret}
    async with aiohttp.ClientSession(f"http://127.0.0.1:{server.port}", headers=auth) as http:
        async with http.post("/v1/messages", data=chunks(11_000)) as response:
            assert response.status == 411  # whose end nobody knows
        async with http.post("/v1/messages", data=json.dumps(HELLO).encode().ljust(10_000)) as response:
            assert response.status == 200
    # A body with a length is refused before any of it is sent, even if the client does not ask first.
    for extra in ("", "Expect: 100-continue\r\n"):
        head = f"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 10001\r\n{extra}"
        reply = await raw(server.port, f"{head}x-api-key: {session.secret}\r\n\r\n".encode())
        assert reply.startswith(b"HTTP/1.1 413 ") and b"request_too_large" in reply
    await server.stop()


async def raw(port: int, data: bytes) -> bytes:
    """Send ``data`` as it is; return the response, with the 100 Continue before it if there is one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    async with asyncio.timeout(LONG):
        out = await reader.readuntil(b"\r\n\r\n")
        if out.startswith(b"HTTP/1.1 100"):
            out += await reader.readuntil(b"\r\n\r\n")
        size = re.search(rb"Content-Length: (\d+)", out)
        assert size is not None
        out += await reader.readexactly(int(size[1]))
    writer.close()
    return out


async def test_a_client_that_asks_before_it_sends_the_body(proxy: ProxyServer) -> None:
    session = await proxy.open_session("e", char_policy(QueueEngine("hello")))
    body = json.dumps(HELLO).encode()
    head = f"POST /v1/messages HTTP/1.1\r\nHost: x\r\nx-api-key: {session.secret}\r\nContent-Length: {len(body)}\r\n"
    reply = await raw(proxy.port, head.encode() + b"Expect: 100-continue\r\n\r\n" + body)
    assert reply.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n") and b"hello" in reply
    reply = await raw(proxy.port, head.encode() + b"Expect: miracles\r\n\r\n" + body)
    assert reply.startswith(b"HTTP/1.1 417 ") and b"invalid_request_error" in reply


@pytest.mark.parametrize("secret", ["its own", "wrong"])
async def test_a_compressed_body_is_refused_and_never_unpacked(
    proxy: ProxyServer, http: aiohttp.ClientSession, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 MB of zeros in 8 KB: unpacked on the event loop, a few of them held up all sessions for seconds."""
    unpacked: list[Any] = []
    monkeypatch.setattr("aiohttp.http_parser.ZLibDecompressor", lambda **how: unpacked.append(how))
    session = await proxy.open_session("e", char_policy(QueueEngine()))
    bomb = gzip.compress(bytes(8_000_000))
    for coding in ("gzip", "deflate", "GZIP", "br", "zstd", "gzip, gzip"):
        headers = {"Content-Encoding": coding} | ({"x-api-key": "wrong"} if secret == "wrong" else {})
        status, error, _ = await post(http, proxy, session, bomb, **headers)
        assert (status, error["type"]) == (401 if secret == "wrong" else 415, "error"), coding
    assert not unpacked


async def test_a_client_that_does_not_read_delays_nobody_and_is_cut(
    proxy: ProxyServer,
    http: aiohttp.ClientSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(connections, "TAKE_S", 2)
    engine = QueueEngine("x" * 1_000_000, "quick")  # more than a unix socket's buffer holds
    session = await proxy.open_session("e", char_policy(engine, max_tokens=1 << 20), tmp_path / "s")
    body = json.dumps({**HELLO, "max_tokens": 1 << 20, "stream": True}).encode()
    head = (
        f"POST /v1/messages HTTP/1.1\r\nHost: x\r\nx-api-key: {session.secret}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"), limit=1024)
    writer.write(head.encode() + body)
    await reader.readline()
    # The whole reply is sampled and its first line is read, but not the rest.
    other = {**HELLO, "messages": [{"role": "user", "content": "other"}]}
    assert (await post(http, proxy, session, other))[1]["content"][0]["text"] == "quick"
    assert "did not read its reply" not in caplog.text  # the proxy still waits for it
    slow = session.tree.children(session.tree.roots[0])[0]
    assert len(slow.ids) > 1_000_000
    async with asyncio.timeout(LONG):
        while "did not read its reply" not in caplog.text:
            await asyncio.sleep(0.01)
    assert len(await reader.read()) < 1_000_000  # the connection was closed before its end
    assert not slow.delivered
    writer.close()


async def test_a_client_that_hangs_up_ends_the_generation(proxy: ProxyServer, http: aiohttp.ClientSession) -> None:
    for stream in (False, True):
        engine = Gate("never")
        session = await proxy.open_session("e", char_policy(engine))
        asking = asyncio.create_task(post(http, proxy, session, {**HELLO, "stream": stream}))
        await asyncio.wait_for(engine.asked.wait(), LONG)
        asking.cancel()
        await asyncio.wait_for(engine.aborted.wait(), LONG)
        assert session.counters.aborted == 1 and session.tree.sampled_tokens() == 0


async def test_requests_in_progress_may_end_when_the_proxy_stops(http: aiohttp.ClientSession) -> None:
    server = ProxyServer()
    await server.start()
    engine, never = Gate("late"), Gate("never")
    session = await server.open_session("e", char_policy(engine))
    waiting = asyncio.create_task(post(http, server, session, HELLO))
    await asyncio.wait_for(engine.asked.wait(), LONG)
    stopping = asyncio.create_task(server.stop(grace_s=10 * LONG))
    await asyncio.sleep(0.05)
    with pytest.raises(aiohttp.ClientConnectorError):
        await post(http, server, session, HELLO)
    engine.open.set()
    assert (await waiting)[0] == 200
    await asyncio.wait_for(stopping, LONG)  # long before the grace is over
    server = ProxyServer()
    await server.start()
    session = await server.open_session("e", char_policy(never))
    waiting = asyncio.create_task(post(http, server, session, HELLO))
    await asyncio.wait_for(never.asked.wait(), LONG)
    await asyncio.wait_for(server.stop(grace_s=0.2), LONG)
    assert (await waiting)[0] == 529


async def test_thousands_of_sessions_leave_no_memory(proxy: ProxyServer) -> None:
    policy = char_policy(QueueEngine())
    body = json.dumps({**HELLO, "messages": [{"role": "user", "content": "x" * 100}]}).encode()
    alive: weakref.WeakSet[Session] = weakref.WeakSet()

    async def play(n: int) -> int:
        for i in range(n):
            policy.engine.replies.append("hello")
            session = await proxy.open_session(f"{i}", policy)
            alive.add(session)
            node = await session.prepare(decode_request(body), False).reply()
            assert node.ids
            await proxy.close_session(session)
        policy.engine.prompts.clear()
        gc.collect()
        return sys.getallocatedblocks()

    before = await play(500)
    after = await play(3000)
    assert after - before < 1000  # a single object that stayed per session would be three times that
    assert proxy.sessions == {} and not alive


async def test_closed_sessions_leave_no_files_and_sockets(proxy: ProxyServer, tmp_path: Path) -> None:
    policy = char_policy(QueueEngine(*["hello"] * 50))
    before = set(os.listdir("/proc/self/fd"))
    for i in range(50):
        session = await proxy.open_session(f"{i}", policy, tmp_path / "s")
        connector = aiohttp.UnixConnector(str(tmp_path / "s"))
        async with (
            aiohttp.ClientSession(connector=connector) as http,
            http.post("http://x/v1/messages", json=HELLO, headers={"x-api-key": session.secret}) as response,
        ):
            assert response.status == 200
        await proxy.close_session(session)
    async with asyncio.timeout(LONG):
        while set(os.listdir("/proc/self/fd")) != before:
            await asyncio.sleep(0.01)
    assert os.listdir(tmp_path) == []
    assert proxy._sockets == {} and proxy.sessions == {}


async def test_closing_a_session_ends_its_generation(proxy: ProxyServer, http: aiohttp.ClientSession) -> None:
    engine = Gate("never")
    session = await proxy.open_session("e", char_policy(engine))
    waiting = asyncio.create_task(post(http, proxy, session, HELLO))
    await asyncio.wait_for(engine.asked.wait(), LONG)
    await proxy.close_session(session)
    assert (await asyncio.wait_for(waiting, LONG))[0] == 410


async def test_only_so_many_calls_are_answered(proxy: ProxyServer, http: aiohttp.ClientSession) -> None:
    """A command in the box that calls again and again gets errors, and so does the agent itself."""
    session = await proxy.open_session("e", replace(char_policy(QueueEngine(*"abcd")), max_calls=3))
    other = await proxy.open_session("f", replace(char_policy(QueueEngine(*"abcd")), max_calls=3))
    answers = [
        await post(http, proxy, session, {**HELLO, "messages": [{"role": "user", "content": f"{n}"}]}) for n in range(5)
    ]
    assert [status for status, _, _ in answers] == [200, 200, 200, 403, 403]
    assert answers[3][1]["error"] == {"type": "permission_error", "message": "this session may make at most 3 calls"}
    assert (session.counters.calls, session.counters.refused_calls) == (3, 2)
    assert (await post(http, proxy, other, HELLO))[0] == 200
    assert await trained(http, session) == 3


async def test_counts_of_tokens_are_calls_and_so_are_broken_requests(
    proxy: ProxyServer, http: aiohttp.ClientSession
) -> None:
    """A command in the box had prompts encoded without end, which costs as much as a call does before it is sampled."""
    session = await proxy.open_session("e", replace(char_policy(QueueEngine("a")), max_calls=3))
    call, count = "/v1/messages", "/v1/messages/count_tokens"
    asked = [(HELLO, count), ({}, call), (HELLO, count), (HELLO, count), (HELLO, call)]
    statuses = [(await post(http, proxy, session, *one))[0] for one in asked]
    assert statuses == [200, 400, 200, 403, 403]
    assert (session.counters.calls, session.counters.refused_calls) == (0, 2)
