"""Hypothesis makes up requests and sends them to a proxy over real sockets.

Whatever comes in, an answer goes out in time, and it is never the server's fault: the only 5xx is the 529 of an engine
that is down.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rollout.proxy.engine import Completion, EngineError
from rollout.proxy.server import ProxyServer
from rollout.proxy.session import Session
from tests.kit import END, CharTokenizer, char_policy

STATUSES = {200, 400, 401, 404, 405, 410, 411, 413, 415, 417, 529}
ANSWER_S = 5.0  # the longest time that an answer may take, in seconds; most take a millisecond
BATCH = 25  # requests that are sent at the same time
GONE = 4  # requests of clients that go without reading, sent after them

TOOL = {"name": "Edit", "description": "d", "input_schema": {"type": "object", "properties": {"a": {"type": "string"}}}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "Edit", "input": {"a": "b"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "done"}]}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
BODIES: list[dict[str, Any]] = [
    {"model": "m", "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]},
    {
        "model": "m",
        "max_tokens": 100,
        "stream": True,
        "system": [{"type": "text", "text": "sys", "cache_control": {"type": "ephemeral"}}],
        "tools": [TOOL],
        "tool_choice": {"type": "auto"},
        "stop_sequences": ["x"],
        "metadata": {"user_id": "u"},
        "thinking": {"type": "adaptive"},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "s"}, CALL]},
            {"role": "system", "content": "note"},
            {"role": "user", "content": [RESULT, {"type": "text", "text": "<system-reminder>r</system-reminder>"}]},
        ],
    },
    {
        "model": "policy-side",
        "max_tokens": 9.0,
        "stream": None,
        "stop_sequences": None,
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "hello"},
            {"role": "assistant", "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": "more"}]},
            {"role": "user", "content": "b"},
        ],
    },
]
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 3),
    st.sampled_from([2**31, 2**63, -(2**63) - 1, 10**400, 1e308, float("inf"), float("nan"), 0.5]),
    st.text(max_size=8),
    st.sampled_from(["\ud800", "\0", "user", "assistant", "tool_result", "text", "none", "x" * 3000, "toolu_1"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["type", "text", "content", "id", "role", "input"]), inner, max_size=3),
    ),
    max_leaves=5,
)


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Draw a valid body of which parts, and then perhaps bytes, are replaced, removed or doubled."""
    body = json.loads(json.dumps(draw(st.sampled_from(BODIES))))
    for _ in range(draw(st.sampled_from([0, 0, 1, 1, 2, 3]))):
        place, key = draw(st.sampled_from(list(_places(body))))
        change = draw(st.sampled_from(["replace", "remove", "double", "wrap"]))
        if change == "remove":
            del place[key]
        elif change == "double" and isinstance(place, list):
            place.append(place[key])
        else:
            place[key] = [place[key]] if change == "wrap" else draw(values)
        if not body:
            break
    data = json.dumps(body).encode("utf-8", "surrogatepass")
    if draw(st.sampled_from([True, *[False] * 5])):
        at = draw(st.integers(0, len(data)))
        junk = draw(st.sampled_from([b"", b"\xff", b"\x00", b"{", b'"', b"[" * 5000, b'{"a":' * 5000, b"\xed\xa0\x80"]))
        data = data[:at] + junk + data[at + draw(st.sampled_from([0, 1, 10, 10_000])) :]
    return data


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from _places(inner)


@dataclass
class Shot:
    """One request as bytes. ``whole``: everything that it announces is there, so it must be answered."""

    data: bytes
    whole: bool


HEADERS = [
    b"x-stainless-retry-count: 1",
    b"x-stainless-retry-count: \xff",
    b"Expect: 100-continue",
    b"Expect: miracles",
    b"Content-Type: text/\xe2\x98\x83",
    b"Accept-Encoding: br;q=x, *",
    b"Connection: close",
    b"Connection: Upgrade\r\nUpgrade: h2c",
    b"Cookie: a=\x80; \xff",
    b"X-Long: " + b"x" * 5000,
    b"Range: bytes=5-1",
]
heads = st.one_of(st.just([]), st.lists(st.sampled_from(HEADERS), max_size=2, unique=True))
ODD_PATHS = [b"/", b"/v1/messages/", b"/v1/%ff", b"/..//x", b"*", b"/" + b"a" * 999]
paths = st.sampled_from(
    [b"/v1/messages"] * 30 + [b"/v1/messages?beta=true"] * 10 + [b"/v1/messages/count_tokens"] * 10 + ODD_PATHS
)
methods = st.sampled_from([b"POST"] * 60 + [b"GET", b"HEAD", b"PUT", b"DELETE", b"OPTIONS", b"PATCH", b"BREW"])
SECRETS = [b"", b"guess", b"\xff\xfe", b"a.b", b"." * 300]


@st.composite
def shots(draw: st.DrawFn) -> Any:
    """Draw a function that makes a request for a session's secret."""
    method, path, extra, body = draw(methods), draw(paths), draw(heads), draw(bodies())
    wrong = draw(st.sampled_from([None] * 40 + SECRETS))
    scheme = draw(st.sampled_from([b"x-api-key: ", b"Authorization: Bearer ", b"authorization: bearer  "]))
    framing = draw(
        st.sampled_from(
            ["length"] * 25
            + ["chunked", "chunked", "bad chunk", "none", "short", "long", "gzip", "not gzip", "two", "huge", "minus"]
        )
    )
    cut = draw(st.integers(1, 4000)) if draw(st.sampled_from([True, *[False] * 24])) else None

    def make(secret: bytes) -> Shot:
        lines = [b"%s %s HTTP/1.1" % (method, path), b"Host: x", scheme + (secret if wrong is None else wrong), *extra]
        data, whole, size = body, True, len(body)
        if framing in ("gzip", "not gzip"):
            data = gzip.compress(body, 1) if framing == "gzip" else body
            lines.append(b"Content-Encoding: gzip")
            size = len(data)
        if framing in ("chunked", "bad chunk"):
            lines.append(b"Transfer-Encoding: chunked")
            data = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
            if framing == "bad chunk":
                data, whole = b"zz\r\n" + body, True
        elif framing == "huge":
            lines.append(b"Content-Length: 99999999999999999999")
            whole = False
        elif framing == "minus":
            lines.append(b"Content-Length: -1")
        elif framing == "two":
            lines += [b"Content-Length: %d" % size, b"Content-Length: %d" % (size + 1)]
        elif framing != "none":
            lines.append(b"Content-Length: %d" % max(0, size + {"short": -5, "long": 5}.get(framing, 0)))
            whole = framing != "long"
        out = b"\r\n".join(lines) + b"\r\n\r\n" + data
        return Shot(out[:cut], False) if cut is not None else Shot(out, whole)

    return make


class Engine:
    """Replies at once, in turn with text, with a call, with nothing, and with a failure."""

    def __init__(self) -> None:
        self.calls = 0

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Completion:
        self.calls += 1
        said = ("hello", '[[Edit {"a": "b"}]]', "", None)[self.calls % 4]
        if said is None:
            raise EngineError("down")
        ids = [*CharTokenizer().encode(said), END][: sampling["max_tokens"]]
        return Completion(ids, [-1.0] * len(ids))


@dataclass
class Range:
    loop: asyncio.AbstractEventLoop
    server: ProxyServer
    requests: int = 0
    unread: int = 0  # replies to clients that had gone
    answers: Counter[int] = field(default_factory=Counter)


@pytest.fixture
def shooting() -> Iterator[Range]:
    loop = asyncio.new_event_loop()
    server = ProxyServer(max_body=20_000, ping_s=0.05)
    loop.run_until_complete(server.start())
    yield Range(loop, server)
    loop.run_until_complete(server.stop())
    loop.close()


@pytest.mark.timeout(600)
def test_every_request_is_answered(shooting: Range, caplog: pytest.LogCaptureFixture) -> None:
    """tests/integration/faults/test_many_requests.py has more volleys."""
    fire(shooting, 80, caplog)


def fire(shooting: Range, volleys: int, caplog: pytest.LogCaptureFixture) -> None:
    @settings(
        max_examples=volleys,
        database=None,
        derandomize=True,
        phases=[Phase.generate],  # a failure shows the request; shrinking a volley would take minutes
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(shots(), min_size=BATCH, max_size=BATCH))
    def shoot(makers: list[Any]) -> None:
        shooting.loop.run_until_complete(_volley(shooting, makers))

    shoot()
    # The engine is down again and again, and a request that is not HTTP is not worth a line.
    assert all(record.getMessage().startswith("engine: down") for record in caplog.records)
    assert shooting.requests == volleys * (BATCH + GONE + 1)
    assert shooting.unread > volleys  # the kernel had taken their replies
    assert min(shooting.answers[200], shooting.answers[400]) > shooting.requests / 15  # neither too wild nor too tame
    assert {401, 404, 405, 413, 415, 529} <= set(shooting.answers)
    assert shooting.server.sessions == {}


async def _volley(shooting: Range, makers: list[Any]) -> None:
    server = shooting.server
    session = await server.open_session("e", char_policy(Engine()))
    closed = await server.open_session("closed", char_policy(Engine()))
    await server.close_session(closed)
    secrets = [session.secret] * 9 + [closed.secret]
    made = [make(secrets[i % 10].encode()) for i, make in enumerate(makers)]
    async with asyncio.timeout(4 * ANSWER_S):
        answers = await asyncio.gather(*(_fire(server.port, shot) for shot in made))
        # The server is alive: a good request gets a good answer.
        status, _ = await _fire(server.port, _good(session, "alive?", "/count_tokens"))
        await asyncio.gather(*(_leave(server.port, _good(session, f"gone {number}")) for number in range(GONE)))
        while server._busy:
            await asyncio.sleep(0.001)
    assert status == 200
    for shot, (status, said) in zip(made, answers, strict=True):
        assert status is not None or not shot.whole, shot.data[:2000]
        if status is not None:
            assert status in STATUSES, (status, said, shot.data[:2000])
            assert b"Traceback" not in said
        shooting.answers[status or 0] += 1
    shooting.requests += len(made) + GONE + 1
    await server.close_session(session)
    replies = [
        node for node in session.tree.nodes if node.sampled and b"gone" in bytes(i % 256 for i in node.parent.ids)
    ]
    assert not any(node.delivered for node in replies)
    shooting.unread += sum(node.sent for node in replies)


def _good(session: Session, text: str, path: str = "") -> Shot:
    body = json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 50}).encode()
    head = f"POST /v1/messages{path} HTTP/1.1\r\nHost: x\r\nx-api-key: {session.secret}\r\nContent-Length: {len(body)}"
    return Shot(head.encode() + b"\r\n\r\n" + body, True)


async def _leave(port: int, shot: Shot) -> None:
    """Send a request and go, in order, without reading anything."""
    end = socket.create_connection(("127.0.0.1", port))
    end.sendall(shot.data)
    await asyncio.sleep(0.005)
    end.close()


async def _fire(port: int, shot: Shot) -> tuple[int | None, bytes]:
    """Send a request; return the status and the rest of the answer, or None if the server waits for more of it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(shot.data)
        line = b""
        try:
            async with asyncio.timeout(ANSWER_S if shot.whole else 0.02):
                while not line.strip() or line.startswith(b"HTTP/1.1 100"):
                    line = await reader.readline()
                    if not line:
                        return None, b""
                said = await reader.read(65536)
        except (TimeoutError, ConnectionError):
            return None, b""
        found = re.match(rb"HTTP/1\.[01] (\d{3}) ", line)
        assert found, line
        return int(found[1]), said
    finally:
        writer.transport.abort()
