"""This module tests what counts as delivered: what a client has read, not what the kernel has taken for it."""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from rollout.proxy.server import ProxyServer
from rollout.proxy.session import Session
from rollout.proxy.tree import Node
from rollout.proxy.wire import decode_request
from tests.kit import QueueEngine, char_policy

LONG = 60  # seconds to wait for what takes milliseconds on an idle machine
Case = Callable[["Place"], Awaitable[None]]


class Place:
    """A proxy with one session, and raw connections to it over TCP or its unix socket."""

    def __init__(self, server: ProxyServer, session: Session, path: Path, kind: str) -> None:
        self.server, self.session, self.path, self.kind = server, session, path, kind
        self.loop = asyncio.get_running_loop()

    async def connect(self) -> socket.socket:
        family, address = (
            (socket.AF_UNIX, str(self.path))
            if self.kind == "unix"
            else (socket.AF_INET, ("127.0.0.1", self.server.port))
        )
        end = socket.socket(family)
        end.setblocking(False)
        await self.loop.sock_connect(end, address)
        return end

    def request(self, *said: str, stream: bool = False, **headers: str) -> bytes:
        messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(said)]
        body = json.dumps({"model": "m", "messages": messages, "stream": stream}).encode()
        lines = ["POST /v1/messages HTTP/1.1", "Host: x", f"x-api-key: {self.session.secret}"]
        lines += [f"{name}: {value}" for name, value in {**headers, "Content-Length": len(body)}.items()]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body

    async def ask(self, end: socket.socket, *said: str, **options: Any) -> Node:
        """Send a request and wait until its whole reply is with the kernel; nobody has read it yet."""
        before = self.sampled
        await self.loop.sock_sendall(end, self.request(*said, **options))
        async with asyncio.timeout(LONG):
            while len(self.sampled) == len(before) or not self.sampled[-1].sent:
                await asyncio.sleep(0.001)
        return self.sampled[-1]

    @property
    def sampled(self) -> list[Node]:
        return [node for node in self.session.tree.nodes if node.sampled]

    async def read(self, end: socket.socket) -> bytes:
        """Read all that there is; at least something is on its way."""
        out = await self.loop.sock_recv(end, 1 << 20)
        end.setblocking(False)
        while True:
            try:
                out += end.recv(1 << 20)
            except BlockingIOError:
                return out

    async def until(self, done: Callable[[], Any]) -> None:
        async with asyncio.timeout(LONG):
            while not done():
                await asyncio.sleep(0.001)

    async def close(self) -> None:
        await self.server.close_session(self.session)


@asynccontextmanager
async def place(kind: str, *replies: str) -> AsyncIterator[Place]:
    server = ProxyServer(ping_s=0.05)
    await server.start()
    with tempfile.TemporaryDirectory() as home:
        path = Path(home, "s")
        session = await server.open_session("e", char_policy(QueueEngine(*replies)), path)
        yield Place(server, session, path, kind)
        await server.stop()
    assert not server._deliveries._sent


@pytest.fixture(params=["unix", "tcp"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def play(request: pytest.FixtureRequest, kind: str) -> Callable[..., None]:
    """Run a case in a place, on an event loop of each kind: the stand-alone program has another one than a worker."""

    def run(case: Case, *replies: str) -> None:
        async def main() -> None:
            async with place(kind, *replies) as made:
                await case(made)

        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(main())

    return run


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("wait", [False, True], ids=["at once", "later"])
def test_no_reply_whose_client_has_gone_is_delivered(play: Callable[..., None], stream: bool, wait: bool) -> None:
    """The client never reads: it goes as soon as it has asked, or when its reply is ready for it."""

    async def case(here: Place) -> None:
        for number in range(100):
            end = await here.connect()
            if wait:
                await here.ask(end, f"{number}", stream=stream)
            else:
                await here.loop.sock_sendall(end, here.request(f"{number}", stream=stream))
            end.close()
        if not wait:  # the kernel takes some of these replies, and others are aborted
            await here.until(lambda: not here.server._busy)
        await here.close()
        sent = sum(node.sent for node in here.sampled)
        assert not wait or sent == 100
        assert not any(node.delivered for node in here.sampled) and here.session.tree.sequences() == []
        assert here.session.counters.unread_replies == sent

    play(case, *["hello"] * 100)


def test_a_reply_that_is_read_in_part_is_not_delivered(play: Callable[..., None]) -> None:
    async def case(here: Place) -> None:
        end = await here.connect()
        node = await here.ask(end, "q")
        assert await here.loop.sock_recv(end, 100)
        end.close()
        await here.until(lambda: not node.pending)
        await here.close()
        assert not node.delivered and here.session.counters.unread_replies == 1

    play(case, "hello" * 100)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_client_that_has_read_its_reply_and_closes_has_it(play: Callable[..., None], stream: bool) -> None:
    async def case(here: Place) -> None:
        end = await here.connect()
        node = await here.ask(end, "q", stream=stream)
        assert not node.delivered
        assert b"hello" in await here.read(end)
        end.close()
        await here.until(lambda: not node.pending)
        assert node.delivered
        await here.close()
        assert len(here.session.tree.sequences()) == 1 and here.session.counters.unread_replies == 0

    play(case, "hello")


def test_the_end_of_a_session_finds_what_was_read_up_to_it(play: Callable[..., None]) -> None:
    """The agent's process has just ended and the event loop has not heard of it, or its connection is still open."""

    async def case(here: Place) -> None:
        ended, stays, unread = [await here.connect() for _ in range(3)]
        first, second, third = [
            await here.ask(end, question) for end, question in ((ended, "a"), (stays, "b"), (unread, "c"))
        ]
        await here.read(ended)
        await here.read(stays)
        ended.close()
        here.session.settle()
        assert first.delivered and here.session.turns() == (2 if here.kind == "unix" else 1)
        await here.close()
        # Over TCP only the client's kernel is known to have it.
        assert [second.delivered, third.delivered] == [here.kind == "unix", False]
        assert here.session.counters.unread_replies == (1 if here.kind == "unix" else 2)
        stays.close()
        unread.close()

    play(case, "one", "two", "three")


def test_requests_that_are_sent_ahead_show_nothing(play: Callable[..., None]) -> None:
    async def case(here: Place) -> None:
        end = await here.connect()
        await here.loop.sock_sendall(end, here.request("a") + here.request("b") + here.request("c"))
        await here.until(lambda: sum(node.sent for node in here.sampled) == 3)
        assert not any(node.delivered for node in here.sampled)
        end.close()
        await here.until(lambda: not any(node.pending for node in here.sampled))
        assert not any(node.delivered for node in here.sampled)

    play(case, "one", "two", "three")


def test_a_reply_that_was_not_read_is_handed_again_and_one_that_may_be_read_is_not(play: Callable[..., None]) -> None:
    async def case(here: Place) -> None:
        gone, slow = await here.connect(), await here.connect()
        first = await here.ask(gone, "a")
        gone.close()
        await here.until(lambda: not first.pending)
        again = await here.connect()
        await here.loop.sock_sendall(again, here.request("a"))
        assert b"one" in await here.read(again) and len(here.sampled) == 1
        again.close()
        await here.until(lambda: not first.pending)
        assert first.delivered
        second = await here.ask(slow, "b")
        third = await here.ask(other := await here.connect(), "b")  # another client's
        assert second is not third
        again = await here.connect()
        await here.loop.sock_sendall(again, here.request("b", **{"x-stainless-retry-count": "1"}))
        assert b"four" in await here.read(again)  # nothing says whose retry it is
        other.close()
        await here.until(lambda: not third.pending)
        await here.loop.sock_sendall(again, here.request("b"))
        assert b"three" in await here.read(again)
        again.close()
        slow.close()

    play(case, "one", "two", "three", "four")


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_client_that_asked_for_the_end_of_its_connection_still_reads(
    play: Callable[..., None], stream: bool, reads: bool
) -> None:
    """As Python's urllib does with each call: the server closes, and what it sent is read later, or never."""

    async def case(here: Place) -> None:
        end = await here.connect()
        node = await here.ask(end, "a", stream=stream, Connection="close")
        await here.until(lambda: any(isinstance(one, socket.socket) for one in here.server._deliveries._sent))
        here.server._deliveries.look(here.session)
        assert node.pending and not node.delivered
        if reads:
            while await here.loop.sock_recv(end, 1 << 16):
                pass
        end.close()

        def settled() -> bool:
            here.server._deliveries.look(here.session)
            return not node.pending

        await here.until(settled)
        assert node.delivered == reads
        assert len(here.session.tree.sequences()) == reads

    play(case, "one")


def test_few_sockets_are_kept_for_a_session(play: Callable[..., None]) -> None:
    async def case(here: Place) -> None:
        ends = [await here.connect() for _ in range(12)]
        nodes = [await here.ask(end, f"a{number}", Connection="close") for number, end in enumerate(ends)]
        await here.until(lambda: sum(bool(node.pending) for node in nodes) == 8)
        assert not any(node.delivered for node in nodes)
        for end in ends:
            while await here.loop.sock_recv(end, 1 << 16):
                pass
            end.close()

        def settled() -> bool:
            here.server._deliveries.look(here.session)
            return not any(node.pending for node in nodes)

        await here.until(settled)
        assert [node.delivered for node in nodes] == [False] * 4 + [True] * 8

    play(case, *"abcdefghijkl")


def test_an_echo_and_the_agents_events_prove_what_the_connection_does_not(play: Callable[..., None]) -> None:
    async def case(here: Place) -> None:
        nodes = []
        for said in (["a"], ["a", "one", "b"], ["a", "one", "b", "two", "c"]):
            end = await here.connect()
            nodes.append(await here.ask(end, *said))
            end.close()
            await here.until(lambda: not nodes[-1].pending)
        await here.close()
        first, second, third = nodes
        assert [first.delivered, second.delivered, third.delivered] == [True, True, False]
        assert here.session.counters.unread_replies == 1
        here.session.disown({third.reply.id if third.reply else ""})
        assert third.delivered and here.session.counters.unread_replies == 0

    play(case, "one", "two", "three")


async def test_the_agents_events_prove_nothing_of_a_reply_that_was_never_sent() -> None:
    session = Session("e", char_policy(QueueEngine("one")))
    node = await session.prepare(decode_request(b'{"messages": [{"role": "user", "content": "q"}]}'), False).reply()
    session.disown({node.reply.id if node.reply else ""})
    assert not node.delivered
