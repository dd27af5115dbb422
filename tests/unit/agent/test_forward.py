"""This module tests the forwarder with the real proxy: what passes, how it ends, and that a reply which the program has
not read does not count as delivered.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollout.agent import forward
from rollout.proxy.server import ProxyServer
from rollout.proxy.session import Session
from tests.kit import QueueEngine, char_policy

pytestmark = pytest.mark.asyncio

# A client on a bare socket. ``ask`` sends a request; ``wait`` waits until an answer has begun, and reads nothing of it.
CLIENT = """
import json, os, select, socket, sys, time
def connect():
    return socket.create_connection(("127.0.0.1", int(os.environ["PORT"])))
def ask(s, text="hello"):
    body = json.dumps({"model": "m", "max_tokens": 10**7, "messages": [{"role": "user", "content": text}]}).encode()
    head = "POST /v1/messages HTTP/1.1\\r\\nHost: x\\r\\nx-api-key: %s\\r\\nContent-Type: application/json\\r\\n" \\
        "Content-Length: %d\\r\\n\\r\\n" % (os.environ["SECRET"], len(body))
    s.sendall(head.encode() + body)
def wait(s):
    select.select([s], [], [])
def read(s, most=1 << 30):
    data = b""
    while b"\\r\\n\\r\\n" not in data:
        data += s.recv(min(most, 1 << 16))
    head, _, body = data.partition(b"\\r\\n\\r\\n")
    size = int(head.lower().partition(b"content-length: ")[2].split()[0])
    while len(body) < min(size, most):
        got = s.recv(1 << 16)
        if not got:
            break
        body += got
    return body
s = connect()
"""


@contextlib.asynccontextmanager
async def session(engine: Any) -> AsyncIterator[tuple[Session, Path]]:
    server = ProxyServer()
    await server.start()
    with tempfile.TemporaryDirectory(prefix="cc-") as home:
        try:
            yield (
                await server.open_session("e", char_policy(engine, max_tokens=10**7), Path(home, "s")),
                Path(home, "s"),
            )
        finally:
            await server.stop()


async def started(session: Session, socket: Path, script: str) -> asyncio.subprocess.Process:
    env = {forward.SOCKET: str(socket), "PORT": forward.PORT, "SECRET": session.secret, "PATH": os.environ["PATH"]}
    argv = [str(forward.program()), sys.executable, "-c", CLIENT + script]
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*argv, env=env, stdin=pipe, stdout=pipe, stderr=pipe)


async def ran(session: Session, socket: Path, script: str) -> str:
    process = await started(session, socket, script)
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


def delivered(session: Session) -> list[bool]:
    session.settle()
    return [node.delivered for node in session.tree.nodes if node.sampled]


async def until(true: Any) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.005)


LONG = "x" * 400_000


@pytest.mark.parametrize("reply", ["short", LONG], ids=["short", "long"])
@pytest.mark.parametrize(
    "script, read",
    [
        ("ask(s); read(s); s.close()", True),
        ("ask(s); read(s)", True),
        ("ask(s); read(s); os.kill(os.getpid(), 9)", True),
        ("ask(s); s.shutdown(socket.SHUT_WR); time.sleep(0.1)", False),
        ("ask(s); wait(s); s.close()", False),
        ("ask(s); wait(s)", False),
        ("ask(s); wait(s); os.kill(os.getpid(), 9)", False),
        ("ask(s); wait(s); s.recv(20); s.close()", False),
        ("ask(s); wait(s); s.shutdown(socket.SHUT_WR); s.recv(20)", False),
        ("ask(s); wait(s); s.shutdown(socket.SHUT_RDWR)", False),
    ],
)
async def test_what_the_program_has_read_is_delivered_and_nothing_else(script: str, read: bool, reply: str) -> None:
    async with session(QueueEngine(reply, reply)) as (one, socket):
        process = await started(one, socket, script)
        await process.communicate()
        assert process.returncode == (128 + signal.SIGKILL if "kill" in script else 0)
        assert delivered(one) in ([read], [] if not read else [read])  # who has gone before it is sampled aborts it
        one.close()
        assert delivered(one) in ([read], [] if not read else [read])


async def test_a_reply_is_delivered_while_its_connection_stays_open() -> None:
    async with session(QueueEngine("one", "two")) as (one, socket):
        process = await started(one, socket, "ask(s); read(s); print('read', flush=True); sys.stdin.read(); wait(s)")
        assert process.stdout is not None and await process.stdout.readline() == b"read\n"
        await until(lambda: delivered(one) == [True])
        process.kill()
        await process.wait()


async def test_a_reply_that_waits_is_not_delivered_until_it_is_read() -> None:
    async with session(QueueEngine("one")) as (one, socket):
        process = await started(
            one, socket, "ask(s); wait(s); print('there', flush=True); sys.stdin.readline(); read(s)"
        )
        assert process.stdout is not None and await process.stdout.readline() == b"there\n"
        await asyncio.sleep(0.1)  # the forwarder looks several times
        assert delivered(one) == [False]
        await process.communicate(b"\n")
        assert delivered(one) == [True]


async def test_a_hang_up_while_the_engine_works_aborts_the_generation() -> None:
    engine = QueueEngine()
    engine.hangs = True
    async with session(engine) as (one, socket):
        process = await started(one, socket, "ask(s); sys.stdin.readline(); s.close(); sys.stdin.read()")
        await until(lambda: one._generations)
        assert process.stdin is not None
        process.stdin.write(b"\n")
        await until(lambda: one.counters.aborted == 1)
        await process.communicate(b"")


async def test_many_requests_on_many_connections_pass_whole() -> None:
    script = """
from concurrent.futures import ThreadPoolExecutor
def one(n):
    s = connect()
    for turn in range(3):
        ask(s, f"{n} {turn} " + "y" * 500_000)
        assert json.loads(read(s))["content"][0]["text"] == "z" * 200_000
with ThreadPoolExecutor(8) as pool:
    list(pool.map(one, range(8)))
"""
    async with session(QueueEngine(*["z" * 200_000] * 24)) as (one, socket):
        await ran(one, socket, script)
        assert delivered(one) == [True] * 24


async def test_a_refusal_reaches_a_client_that_is_still_sending() -> None:
    script = """
s.sendall(b"POST /v1/messages HTTP/1.1\\r\\nHost: x\\r\\nx-api-key: no\\r\\nContent-Length: 900000\\r\\n\\r\\n")
for _ in range(9):
    s.sendall(b"x" * 100_000)
print(s.recv(12).decode())
"""
    async with session(QueueEngine()) as (one, socket):
        assert await ran(one, socket, script) == "HTTP/1.1 401\n"


async def test_the_program_keeps_its_arguments_streams_and_status() -> None:
    script = (
        "import os, sys; print(sys.argv[1], sys.stdin.read(), *(n for n in os.environ if 'FORW' in n)); sys.exit(7)"
    )
    pipe = asyncio.subprocess.PIPE
    argv = [str(forward.program()), sys.executable, "-c", script, f"{forward.BASE_URL}/x"]
    for env, said in (({forward.SOCKET: "/none"}, b"http://127.0.0.1:"), ({}, forward.BASE_URL.encode())):
        process = await asyncio.create_subprocess_exec(*argv, env=env, stdin=pipe, stdout=pipe)
        out, _ = await process.communicate(b"in")
        assert process.returncode == 7 and out.startswith(said) and out.endswith(b"/x in\n")
    argv = [str(forward.program()), "/no/program"]
    process = await asyncio.create_subprocess_exec(*argv, env={forward.SOCKET: "/none"}, stderr=pipe)
    _, err = await process.communicate()
    assert process.returncode == 127 and b"/no/program: No such file" in err


async def test_what_the_program_leaves_behind_does_not_keep_the_forwarder() -> None:
    script = "ask(s); read(s); os.fork() or (os.setsid(), [os.close(n) for n in (0, 1, 2)], time.sleep(60))"
    async with session(QueueEngine("one")) as (one, socket):
        process = await started(one, socket, script)
        async with asyncio.timeout(60):
            await process.wait()
        assert delivered(one) == [True]


async def test_without_a_compiler_one_line_says_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="install gcc"):
        forward.program()
