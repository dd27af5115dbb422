"""Clients that open sockets and send whatever they like: nobody else notices, and they gain nothing by it."""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import logging
import os
import re
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp.streams import StreamReader
from hypothesis import given
from hypothesis import strategies as st

from rollout.proxy import server, standalone
from rollout.proxy.messages import RequestError, conversation
from rollout.proxy.server import ProxyServer
from rollout.proxy.session import Session
from rollout.proxy.standalone import ProxyOptions, StandAlone
from rollout.proxy.wire import decode_request, takes_long
from tests.kit import HELLO, QueueEngine, char_policy

LONG = 60  # seconds to wait for what takes milliseconds on an idle machine


class Client:
    """A connection that sends bytes as they are."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @property
    def socket(self) -> socket.socket:
        return self.writer.get_extra_info("socket")

    async def answer(self) -> tuple[int, bytes]:
        """Return the status and the body of one response that has a Content-Length."""
        async with asyncio.timeout(LONG):
            head = await self.reader.readuntil(b"\r\n\r\n")
            size = re.search(rb"Content-Length: (\d+)", head)
            return int(head[9:12]), await self.reader.readexactly(int(size[1])) if size else b""

    async def ask(self, data: bytes) -> tuple[int, bytes]:
        self.writer.write(data)
        return await self.answer()

    def stuff(self, data: bytes) -> int:
        """Send data again and again until the other side takes no more for a while; return how many bytes it took."""
        end, taken = socket.fromfd(self.socket.fileno(), socket.AF_UNIX, socket.SOCK_STREAM), 0
        end.settimeout(0.3)
        with end, contextlib.suppress(TimeoutError, ConnectionError):
            while taken < 64 << 20:
                taken += end.send(data)
        return taken


Connect = Callable[[Path | int], Any]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    async with AsyncExitStack() as stack:

        async def connect(where: Path | int) -> Client:
            opening = asyncio.open_unix_connection(str(where)) if isinstance(where, Path) else None
            client = Client(*await (opening or asyncio.open_connection("127.0.0.1", int(str(where)))))
            stack.callback(lambda: client.writer.transport.abort())
            return client

        yield connect


def post(session: Session | str, body: Any = HELLO, path: str = "/v1/messages", more: str = "") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    secret = session if isinstance(session, str) else session.secret
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nx-api-key: {secret}\r\n{more}Content-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def hanging() -> QueueEngine:
    engine = QueueEngine()
    engine.hangs = True
    return engine


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONG):
        while not true():
            await asyncio.sleep(0.01)


# --- what is kept of a request

ATOMS = [b'"a"', b'"\xff\xfe"', b'"\xed\xa0\x80"', b'"\\ud800"', b"1e999", b"1" * 400, b"-0", b"[" * 300 + b"]" * 300]
ATOMS += [b"NaN", b"01", b'"\\x"', b'"\x01"', b"18446744073709551616", b"{}", b'1,"\xff":1', b'1,"role":"assistant"']
FORMS = [
    b'{"messages":[{"role":"user","content":"q","x":%b}]}',
    b'{"messages":[{"role":"user","content":[{"type":"text","text":"q","x":%b}]}]}',
    b'{"messages":[{"role":"user","content":"q"}],"tools":[{"name":"a","x":%b}]}',
    b'{"messages":[{"role":"user","content":"q"}],"system":[{"type":"text","text":"s","x":%b}]}',
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("atom", ATOMS)
def test_what_is_kept_of_a_request_can_be_read_later(form: bytes, atom: bytes) -> None:
    """A field that nobody uses could be no UTF-8: the record was whole and sealed, but no trace could be made of it."""
    with contextlib.suppress(RequestError):
        request = decode_request(form.replace(b"%b", atom))
        spans = conversation(request).spans
        for raw in (request.system, request.tools, *(raw for span in spans for raw in span.wire())):
            msgspec.json.decode(raw)


PARTS = [b"a", b"\\\\", b"\\n", b"\\ud83d", b"\\ude00", b"\\uD83D\\uDE00", b"\\u00e9", b"x" * 5000, b"u", b"\\u1234"]
ONE = re.compile(rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(u[dD][89a-fA-F]..)|.)", re.DOTALL)


@given(st.lists(st.sampled_from(PARTS), max_size=30).map(b"".join))
def test_halves_of_pairs_are_replaced_in_long_steps_as_they_are_one_by_one(text: bytes) -> None:
    """A megabyte of escapes had kept all others waiting for 0.25 s, and 16 MB had taken 3.7 s and 0.5 GB."""
    body = b'{"messages":[{"role":"user","content":"%b"}],"model":"%b"}' % (text, text)
    wanted = ONE.sub(lambda found: b"\\ufffd" if found[1] else found[0], body)
    assert decode_request(body).body == wanted


def test_what_takes_long_is_decoded_in_a_thread() -> None:
    assert not takes_long(b"x" * (1 << 17)) and not takes_long(b"x" * 60_000 + b"\\ud800")
    assert takes_long(b"x" * (1 << 16) + b"\\ud800") and takes_long(b"x" * (2 << 20))


def test_a_request_has_at_most_so_many_tools() -> None:
    """vLLM's parser looked at each of 5,500 for 0.8 s, on the event loop."""
    with pytest.raises(RequestError, match="tools: at most 1000 are possible"):
        conversation(decode_request(json.dumps({**HELLO, "tools": [{"name": "a"}] * 1001}).encode()))


# --- what is read of one


async def test_a_session_has_only_so_many_bytes_of_bodies(
    proxy: ProxyServer, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 calls with 16 MB each, in a field that nobody uses, had held 1 GB as long as the engine took."""
    monkeypatch.setattr(server, "_SESSION_BODIES", 3 << 20)
    session = await proxy.open_session("e", char_policy(hanging()), tmp_path / "s")
    large = [HELLO | {"metadata": "x" * (5 << 18), "max_tokens": number} for number in range(1, 4)]
    clients = [await connect(tmp_path / "s") for _ in large]
    for number in range(2):
        clients[number].writer.write(post(session, large[number]))
        await until(lambda count=number + 1: session.counters.calls == count)
    status, said = await clients[2].ask(post(session, large[2]))
    assert status == 429 and b"rate_limit_error" in said
    assert (await (await connect(tmp_path / "s")).ask(post(session, path="/v1/messages/count_tokens")))[0] == 200
    for client in clients:
        client.writer.transport.abort()
    await until(lambda: session.held == 0)


async def test_a_session_that_may_call_no_more_has_no_body_read(proxy: ProxyServer, connect: Connect) -> None:
    session = await proxy.open_session("e", replace(char_policy(QueueEngine()), max_calls=0))
    head = post(session).replace(b"Content-Length: ", b"Content-Length: 1000")
    assert (await (await connect(proxy.port)).ask(head[:-10]))[0] == 403


@pytest.mark.parametrize("path", ["/v1/messages", "/nowhere"])
async def test_what_comes_after_a_refusal_is_not_parsed(
    proxy: ProxyServer, connect: Connect, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight connections with chunks of one byte had kept another session waiting for 5 s."""
    session = await proxy.open_session("e", char_policy(QueueEngine()), tmp_path / "s")
    client, fed, feed = await connect(tmp_path / "s"), list[int](), StreamReader.feed_data
    monkeypatch.setattr(StreamReader, "feed_data", lambda self, data: fed.append(len(data)) or feed(self, data))
    head = post(session, path=path).split(b"Content-Length")[0] + b"Transfer-Encoding: chunked\r\n\r\n"
    assert (await client.ask(head))[0] == (411 if path == "/v1/messages" else 404)
    fed.clear()
    assert await asyncio.to_thread(client.stuff, b"1\r\na\r\n" * 10_000) > 1 << 20 and sum(fed) < 100


FLOODS = {
    "requests": "",
    "a socket for the web": "Connection: Upgrade\r\nUpgrade: websocket\r\n",
}


@pytest.mark.parametrize("flood", FLOODS)
async def test_what_waits_behind_a_call_is_bounded(
    proxy: ProxyServer, connect: Connect, flood: str, tmp_path: Path
) -> None:
    session = await proxy.open_session("e", char_policy(hanging()), tmp_path / "s")
    client = await connect(tmp_path / "s")
    client.writer.write(post(session, more=FLOODS[flood]))
    await until(lambda: session.counters.calls == 1)
    assert await asyncio.to_thread(client.stuff, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 1000) < 4 << 20


async def test_a_session_that_ends_leaves_no_connection_of_who_does_not_read(
    proxy: ProxyServer, connect: Connect, tmp_path: Path
) -> None:
    session = await proxy.open_session("e", char_policy(QueueEngine()), tmp_path / "s")
    client = await connect(tmp_path / "s")
    client.writer.transport.pause_reading()
    async with asyncio.timeout(LONG):
        while not any(one.get_write_buffer_size() for one in proxy._connections._owners if one is not None):
            await asyncio.to_thread(client.stuff, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
    await proxy.close_session(session)
    await until(lambda: not proxy._connections._owners)


async def test_descriptors_that_come_with_a_message_are_closed(
    proxy: ProxyServer, connect: Connect, tmp_path: Path
) -> None:
    session = await proxy.open_session("e", char_policy(QueueEngine("hello")), tmp_path / "s")
    client, files = await connect(tmp_path / "s"), len(os.listdir("/proc/self/fd"))
    with open(os.devnull) as null, socket.fromfd(client.socket.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end:
        many = array.array("i", [null.fileno()] * 100)
        end.sendmsg([post(session)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, many)])
        assert (await client.answer())[0] == 200
    assert len(os.listdir("/proc/self/fd")) <= files + 1


async def test_clients_that_hang_up_in_every_way_leave_nothing(
    proxy: ProxyServer, connect: Connect, tmp_path: Path
) -> None:
    """Half a request, half a connection, and a reset in the middle of a stream."""
    session = await proxy.open_session("e", char_policy(hanging()), tmp_path / "s")
    tasks = len(asyncio.all_tasks())
    for number in range(120):
        client = await connect((tmp_path / "s") if number % 2 else proxy.port)
        asked = post(session, HELLO | {"stream": True, "max_tokens": number + 1})
        client.writer.write(asked[: [30, 100, -1, None][number % 4]])
        await asyncio.sleep(0.06 if number > 110 else 0)
        if number % 3 == 0:
            client.writer.write_eof()
        elif number % 3 == 1:
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.writer.transport.abort()
    held = proxy._connections
    await until(lambda: not (held._owners or held._silent or held.busy or session._generations))
    await until(lambda: len(asyncio.all_tasks()) <= tasks)
    assert session.counters.engine_errors == 0 and not session.tree.sequences()


async def test_64_streams_that_nobody_reads_keep_nobody_waiting(
    proxy: ProxyServer, connect: Connect, tmp_path: Path
) -> None:
    bad = await proxy.open_session("bad", char_policy(QueueEngine(*["x" * 9999] * 64)), tmp_path / "bad")
    good = await proxy.open_session("good", char_policy(QueueEngine("hello")), tmp_path / "good")
    for number in range(64):
        client = await connect(tmp_path / "bad")
        client.writer.transport.pause_reading()
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        client.writer.write(post(bad, HELLO | {"stream": True, "max_tokens": 9000 + number}))
    await until(lambda: bad.counters.calls == 64)
    assert (await (await connect(tmp_path / "good")).ask(post(good)))[0] == 200
    bad.settle()
    assert not bad.tree.sequences()  # nobody has read them


# --- whose request it is


async def test_no_request_is_smuggled_in_another(proxy: ProxyServer, connect: Connect, tmp_path: Path) -> None:
    session = await proxy.open_session("e", char_policy(QueueEngine()), tmp_path / "s")
    inner, head = post(session), b"POST /v1/messages HTTP/1.1\r\nHost: x\r\n"
    for raw in [
        head + b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" % (5 + len(inner)),
        head + b"Transfer-Encoding : chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        head + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
        head + b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        head.replace(b"\r", b"") + b"Content-Length: 0\n\n",
        head + b"X: a\rContent-Length: 9\r\n\r\n",
        head + b"X: a\r\n Content-Length: 9\r\n\r\n",
        *(
            head + b"Content-Length: %b\r\n\r\nabcde" % length
            for length in (b"+5", b"5_", b"0x5", b"5, 5", b"5 5", b"")
        ),
        head + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nabcde",
        *(head + b"Transfer-Encoding: chunked\r\n\r\n%b" % chunk for chunk in (b"0\n\n", b"-1\r\n", b"0;\n\r\n")),
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(inner),
    ]:
        client = await connect(tmp_path / "s")
        client.writer.write(raw + inner)
        client.writer.write_eof()
        answers = await asyncio.wait_for(client.reader.read(), LONG)
        assert answers.count(b"HTTP/1.1 ") <= 1 and b" 200 " not in answers, raw
    assert session._admitted == 0


async def test_only_its_own_secret_opens_a_session(proxy: ProxyServer, connect: Connect, tmp_path: Path) -> None:
    own = await proxy.open_session("own", char_policy(QueueEngine("a")), tmp_path / "own")
    other = await proxy.open_session("other", char_policy(QueueEngine()))
    last = "0" if own.secret[-1] != "0" else "1"
    for secret, path, more in [
        (own.secret[:-1] + last, "", ""),
        (own.secret + "0", "", ""),
        (f"{own.secret},{other.secret}", "", ""),
        (other.secret, "", f"x-api-key: {own.secret}\r\n"),
        (other.secret, f"?x-api-key={own.secret}", f"Authorization: Bearer {own.secret}\r\nCookie: k={own.secret}\r\n"),
        ("", f"?token={own.secret}", ""),
    ]:
        client = await connect(tmp_path / "own")
        assert (await client.ask(post(secret, path=f"/v1/messages{path}", more=more)))[0] == 401, secret
    assert (own._admitted, other._admitted) == (0, 0)


async def test_no_client_writes_control_characters_into_the_log(
    proxy: ProxyServer, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "rollout")
    session = await proxy.open_session("e", char_policy(QueueEngine()))
    for path in ("/\x1b[31m", "/%0a%0dERROR%20x", "/%1b]0;x%07", "/" + "A" * 8000, "http://[x/%00", "//x", "/\u202e"):
        for method in ("GET", "POST", "X" * 100):
            client = await connect(proxy.port)
            client.writer.write(post(session, b"{", path, "X-A: \x1b[31m\r\n").replace(b"POST", method.encode()))
            assert (await client.answer())[0] in (400, 404, 405)
    assert not [record for record in caplog.records if record.name.startswith("rollout")]


VALUES: list[Any] = [None, True, -1, 1.5, 1e308, 10**30, "", "\0", [], [[]], {}, {"type": "text"}]
VALUES += [[{"type": kind}] for kind in ("", "tool_reference", "redacted_thinking", "image", "document", "x", None)]
VALUES += [[{"type": "image", "source": []}], [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "x"}]}]]


async def test_no_value_of_any_field_is_a_bug(
    proxy: ProxyServer, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    session = await proxy.open_session("e", char_policy(QueueEngine(*["hello"] * 999)))
    bodies = [{"messages": [{"role": "user", "content": "x"}], field: value} for value in VALUES for field in FIELDS]
    bodies += [
        {"messages": [{"role": role, "content": value}, {"role": "user", "content": [RESULT | {"is_error": value}]}]}
        for value in VALUES
        for role in ("user", "assistant", "system", value)
    ]
    client = await connect(proxy.port)
    statuses = {(await client.ask(post(session, body)))[0] for body in bodies}
    assert statuses == {200, 400} and not caplog.records


FIELDS = ("system", "tools", "stop_sequences", "tool_choice", "stream", "model", "max_tokens", "metadata")
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "x"}


# --- the stand-alone program, where anybody opens sessions


async def test_sessions_and_calls_of_strangers_are_bounded(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standalone, "_SESSION_CALLS", 5)
    monkeypatch.setattr(standalone, "_BODIES", 2 << 20)
    proxy, kept = StandAlone(ProxyOptions("http://127.0.0.1:9", "m", "hermes", max_sessions=3)), list[Session]()
    proxy._keep = kept.append
    proxy.policy = char_policy(QueueEngine(*["hello"] * 99))
    await proxy.start()
    client = await connect(proxy.port)
    names = [*(f"n{number}" for number in range(20)), "../../x", "a/b", "-rf", ".", "x" * 999]
    for name in names:
        assert (await client.ask(post("t", more=f"X-Claude-Code-Session-Id: {name}\r\n")))[0] == 200
    assert len(proxy.sessions) == len(proxy._keys) == len(proxy._used) == 3 and not proxy._in_use
    for name in ["same"] * 12:
        assert (await client.ask(post("t", more=f"X-Claude-Code-Session-Id: {name}\r\n")))[0] == 200
    await until(lambda: any(session.episode_id == "same" for session in kept))
    assert [session.counters.calls for session in kept if session.episode_id == "same"] == [6]
    assert all(re.fullmatch(r"[\w-]+", session.episode_id) for session in kept)
    slow = await connect(proxy.port)
    slow.writer.write(post("t", b"x" * (3 << 19))[:-1])
    await until(lambda: proxy.held > 0)
    status, _ = await client.ask(post("t", b"x" * (3 << 19)))
    assert status == 429
    slow.writer.transport.abort()
    await until(lambda: proxy.held == 0)
    await proxy.stop()
