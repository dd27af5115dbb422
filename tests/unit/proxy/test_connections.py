"""One client cannot take what all share: connections, time, and lines of the log."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

from rollout.proxy import connections, server
from rollout.proxy.connections import EACH, Tally
from rollout.proxy.server import ProxyServer
from rollout.proxy.session import Session
from rollout.proxy.standalone import ProxyOptions, StandAlone
from tests.kit import HELLO, QueueEngine, char_policy

LONG = 60  # seconds to wait for what takes milliseconds on an idle machine
HALF = b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nX-Half: "


async def ask(path: Path | int, session: Session) -> int:
    """Ask once, over a connection of one's own to a socket or a port; return the status."""
    connector = aiohttp.UnixConnector(str(path)) if isinstance(path, Path) else None
    url = "http://x" if connector else f"http://127.0.0.1:{path}"
    async with (
        aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(LONG)) as http,
        http.post(f"{url}/v1/messages", json=HELLO, headers={"x-api-key": session.secret}) as response,
    ):
        await response.read()
        return response.status


def _abort(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def half_open(where: Path | int, count: int, stack: AsyncExitStack) -> list[asyncio.StreamReader]:
    """Open connections that send half a head and no more."""
    readers = []
    for _ in range(count):
        opening = asyncio.open_unix_connection(str(where)) if isinstance(where, Path) else None
        reader, writer = await (opening or asyncio.open_connection("127.0.0.1", int(str(where))))
        writer.write(HALF)
        stack.callback(_abort, writer)  # which keeps the writer: without one, a connection is closed
        readers.append(reader)
    return readers


async def test_600_half_open_connections_of_one_box_keep_nobody_out(
    proxy: ProxyServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They had used up the process's descriptors, so that no other session was answered, and 5 MB of log."""
    bad = await proxy.open_session("bad", char_policy(QueueEngine("own")), tmp_path / "bad")
    good = await proxy.open_session("good", char_policy(QueueEngine("hello", "again")), tmp_path / "good")
    files = len(os.listdir("/proc/self/fd"))
    async with AsyncExitStack() as stack:
        readers = await half_open(tmp_path / "bad", 600, stack)
        assert await ask(tmp_path / "good", good) == 200
        assert await ask(tmp_path / "bad", bad) == 200
        async with asyncio.timeout(LONG):
            await asyncio.gather(*(reader.read() for reader in readers[: 600 - EACH]))  # all of these were cut
        assert len(os.listdir("/proc/self/fd")) - files <= 600 + EACH + 4  # 600 are the test's own ends
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3 and lines[-1].endswith("(100 times by now)")
    assert await ask(tmp_path / "good", good) == 200


async def test_half_open_connections_to_the_port_keep_nobody_out(proxy: ProxyServer, tmp_path: Path) -> None:
    proxy._connections.most = 20
    session = await proxy.open_session("e", char_policy(QueueEngine("a", "b")), tmp_path / "s")
    async with AsyncExitStack() as stack:
        await half_open(proxy.port, 100, stack)
        assert [await ask(tmp_path / "s", session), await ask(proxy.port, session)] == [200, 200]
        assert len(proxy._connections._owners) <= 20


async def test_a_connection_that_is_answering_is_cut_last(proxy: ProxyServer, tmp_path: Path) -> None:
    engine = QueueEngine(*["late"] * EACH)
    go = asyncio.Event()

    class Gate:
        async def generate(self, *args: object) -> object:
            await go.wait()
            return await engine.generate(*args)  # ty: ignore[invalid-argument-type]

    session = await proxy.open_session("e", char_policy(Gate()), tmp_path / "s")
    asking = [asyncio.create_task(ask(tmp_path / "s", session)) for _ in range(EACH)]
    async with asyncio.timeout(LONG):
        while session.counters.calls < EACH:
            await asyncio.sleep(0.01)
    with pytest.raises(aiohttp.ClientError):  # there is no room for it, and nobody has to go for it
        await ask(tmp_path / "s", session)
    go.set()
    assert await asyncio.gather(*asking) == [200] * EACH


async def test_whoever_has_most_connections_loses_one_even_if_all_are_answering(
    proxy: ProxyServer, tmp_path: Path
) -> None:
    proxy._connections.most = 4
    hanging, quick = QueueEngine(), QueueEngine("hello")
    hanging.hangs = True
    greedy = await proxy.open_session("greedy", char_policy(hanging), tmp_path / "greedy")
    modest = await proxy.open_session("modest", char_policy(quick), tmp_path / "modest")
    asking = [asyncio.create_task(ask(tmp_path / "greedy", greedy)) for _ in range(4)]
    async with asyncio.timeout(LONG):
        while greedy.counters.calls < 4:
            await asyncio.sleep(0.01)
    assert await ask(tmp_path / "modest", modest) == 200
    await proxy.close_session(greedy)
    ends = await asyncio.gather(*asking, return_exceptions=True)
    assert [isinstance(end, aiohttp.ClientError) for end in ends].count(True) == 1


async def test_a_head_and_a_body_must_arrive_in_time(proxy: ProxyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_HEAD_S", 0.1)
    monkeypatch.setattr(server, "BODY_S", 0.1)
    session = await proxy.open_session("e", char_policy(QueueEngine()))
    async with AsyncExitStack() as stack:
        (reader,) = await half_open(proxy.port, 1, stack)
        assert await asyncio.wait_for(reader.read(), LONG) == b""
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        stack.callback(_abort, writer)
        writer.write(b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nx-api-key: %b\r\n" % session.secret.encode())
        writer.write(b"Content-Length: 100\r\n\r\n{")
        assert (await asyncio.wait_for(reader.readline(), LONG)).startswith(b"HTTP/1.1 408 ")
        assert b"invalid_request_error" in await asyncio.wait_for(reader.readuntil(b"}"), LONG)


async def test_a_connection_without_requests_is_closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(server, "IDLE_S", 0.2)
    proxy = ProxyServer()
    await proxy.start()
    await proxy.open_session("e", char_policy(QueueEngine()), tmp_path / "s")
    reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
    for _ in range(2):  # its second request is still answered
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 404 " in await reader.readline()
        await reader.readuntil(b"}}")
    assert await asyncio.wait_for(reader.read(), LONG) == b""
    writer.close()
    await proxy.stop()


async def test_connections_that_end_leave_nothing(proxy: ProxyServer, tmp_path: Path) -> None:
    session = await proxy.open_session("e", char_policy(QueueEngine(*["hello"] * 5)), tmp_path / "s")
    for _ in range(5):
        assert await ask(tmp_path / "s", session) == 200
        async with AsyncExitStack() as stack:
            await half_open(tmp_path / "s", 3, stack)
    held = proxy._connections
    async with asyncio.timeout(LONG):
        while held._owners or held._of or held._silent or held.busy:
            await asyncio.sleep(0.01)


POST = b"POST /v1/messages HTTP/1.1\r\nHost: x\r\n"
GARBAGE = [
    b"",
    b"\r\n" * 50,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),  # the hello of TLS
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"SSH-2.0-OpenSSH_9.6\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET http://[::1 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n" + b"\x00" * 999,
    b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n" + b"\xff" * 999,
    b"GET /%ff%00 HTTP/1.1\r\nHost: \xff\r\nCookie: \x80=\xff\r\n\r\n",
    POST[:-9],
    POST + b"X-Half: ",
    POST + b"X" * 100_000,
    POST + b"X-Long: " + b"x" * 100_000 + b"\r\n\r\n",
    POST + b"X: y\r\n" * 10_000 + b"\r\n",
    POST + b": no name\r\n\r\n",
    POST + b"X: a\x00b\r\n\r\n",
    POST + b"Content-Length: -1\r\n\r\n",
    POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    POST + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffffff\r\nx",
    POST + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabcdefgh\r\n",
    POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    POST + b"Expect: miracles\r\nContent-Length: 9\r\n\r\n",
    POST + b"Expect: 100-continue\r\nContent-Length: 9\r\n\r\n{",
    POST + b"Content-Length: 1000\r\n\r\n{",  # a body that never comes
    (POST + b"Content-Length: 2\r\n\r\n{}") * 300,  # many at once
    (POST + b"Content-Length: 2\r\n\r\n{}") * 3 + b"\x00" * 99,
]


async def test_whatever_bytes_come_without_a_token_make_no_line_of_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """aiohttp had written a stack trace for every head that is not HTTP; anybody who reaches the port can send some."""
    monkeypatch.setattr(connections, "_HEAD_S", 0.3)
    told = list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    proxy = StandAlone(ProxyOptions("http://127.0.0.1:9", "m", "hermes", token="right"))
    proxy.policy = char_policy(QueueEngine("hello"))
    await proxy.start()
    answers = await asyncio.gather(
        *(_throw(proxy.port, bytes_, leave) for bytes_ in GARBAGE for leave in (False, True))
    )
    assert {answer[9:12] for answer in answers} >= {b"", b"400", b"401", b"404"}
    assert not any(b"Traceback" in answer or b" 500 " in answer for answer in answers)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(LONG)) as http:
        url, key = f"http://127.0.0.1:{proxy.port}/v1/messages", {"x-api-key": "right"}
        async with http.post(url, json=HELLO, headers=key) as response:
            assert response.status == 200
    assert len(proxy._connections._owners) <= 2 * len(GARBAGE)
    await proxy.stop()
    assert [record.getMessage() for record in caplog.records] == [] == told


async def _throw(port: int, data: bytes, leave: bool) -> bytes:
    """Send bytes; return what is answered until the end or, if there is more to come, for a little while."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    with contextlib.suppress(ConnectionError, TimeoutError):
        writer.write(data)
        if leave:
            writer.write_eof()
        async with asyncio.timeout(0.6):
            while more := await reader.read(1 << 16):
                answer += more
    writer.transport.abort()
    return answer


def test_a_tally_writes_the_first_the_tenth_and_the_hundredth(caplog: pytest.LogCaptureFixture) -> None:
    tally = Tally(logging.getLogger("test"))
    for number in range(150):
        tally.warning("client %d did it", number)
    assert [record.getMessage() for record in caplog.records] == [
        "client 0 did it",
        "client 9 did it (10 times by now)",
        "client 99 did it (100 times by now)",
    ]


def test_a_tally_tells_exceptions_of_other_places_apart(caplog: pytest.LogCaptureFixture) -> None:
    tally = Tally(logging.getLogger("test"))
    for text in ["{", "[", "{"]:
        for wrong in (lambda text=text: json.loads(text), lambda: 1 / 0):
            try:
                wrong()
            except Exception as error:
                tally.error("failed", exc_info=error)
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [
        json.JSONDecodeError,
        ZeroDivisionError,
        json.JSONDecodeError,
    ]
