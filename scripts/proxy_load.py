"""The client of bench_proxy.py: conversations of the shape of Claude Code's, over plain HTTP/1.1."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import re
import time
from dataclasses import dataclass
from typing import Any

SYSTEM_CHARS, TOOLS, TOOLS_CHARS, FIRST_CHARS = 28_000, 12, 48_000, 10_000


def text(chars: int, seed: int) -> str:
    """Return text that resembles prose and code, the same for the same seed."""
    draw = random.Random(seed)
    words = [f"{a}{b}" for a in ("re", "con", "in", "de", "pro") for b in ("turn", "figure", "spect", "vide", "fix")]
    out: list[str] = []
    size = 0
    while size < chars:
        line = " ".join(draw.choices([*words, "self.x =", "if", "(a, b)", "0", "def"], k=10))
        out.append(line)
        size += len(line) + 1
    return "\n".join(out)[:chars]


class Talk:
    """A Talk is one conversation as a client keeps it: the bytes of its ``messages``, each of which is made once.

    ``result_chars``: of each result of a call.
    """

    def __init__(self, seed: int, result_chars: int) -> None:
        schema = {"type": "object", "properties": {"path": {"type": "string"}}}
        each = TOOLS_CHARS // TOOLS - 120
        tools = [
            {"name": f"Tool{i}", "description": text(each, i), "input_schema": schema} for i in range(1, TOOLS + 1)
        ]
        head = {"model": "policy", "max_tokens": 1000, "stream": True, "tools": tools}
        head["system"] = [{"type": "text", "text": text(SYSTEM_CHARS, 0), "cache_control": {"type": "ephemeral"}}]
        self._head = json.dumps(head).encode()[:-1] + b',"messages":['
        first = f"<system-reminder>{text(FIRST_CHARS, 1)}</system-reminder>"
        opening = [{"type": "text", "text": first}, {"type": "text", "text": f"task {seed}"}]
        self.messages = [json.dumps({"role": "user", "content": opening}).encode()]
        self._seed, self.result_chars = seed, result_chars

    def body(self) -> bytes:
        """Return the body of the next request."""
        return self._head + b",".join(self.messages) + b"]}"

    def heard(self, reply: bytes) -> None:
        """Add a reply and what follows it: the result of its call, or a user message if there is no call."""
        said = text(self.result_chars, self._seed * 1000 + len(self.messages))
        if found := re.search(rb'"(?:toolu_|call_|chatcmpl-tool-)[^"]+"', reply):
            tool_id = found.group()[1:-1].decode()
            echo: Any = [{"type": "tool_use", "id": tool_id, "name": "Tool1", "input": {"path": "/src/module.py"}}]
            after = {"type": "tool_result", "tool_use_id": tool_id, "content": said}
        else:
            echo = json.loads(reply)["content"] or "(no content)"
            after = {"type": "text", "text": said}
        self.messages.append(json.dumps({"role": "assistant", "content": echo}).encode())
        self.messages.append(json.dumps({"role": "user", "content": [after]}).encode())


class Client:
    """A Client speaks HTTP/1.1 over one connection, with as little work as possible."""

    def __init__(self, port: int, name: str) -> None:
        self.port = port
        self.head = (
            f"POST /v1/messages HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer t\r\n"
            f"Content-Type: application/json\r\n"
            f"anthropic-version: 2023-06-01\r\nX-Claude-Code-Session-Id: {name}\r\nContent-Length: "
        ).encode()

    async def ask(self, body: bytes, status: int = 200) -> tuple[float, bytes]:
        """Send a request; return the seconds until the reply's last byte, and the reply, which must have ``status``."""
        if not hasattr(self, "writer"):
            self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)
        began = time.perf_counter()
        self.writer.write(self.head + b"%d\r\n\r\n" % len(body))
        self.writer.write(body)
        head = await self.reader.readuntil(b"\r\n\r\n")
        if length := re.search(rb"(?i)content-length: (\d+)", head):
            reply = await self.reader.readexactly(int(length[1]))
        else:
            reply = await self.reader.readuntil(b"0\r\n\r\n")
        took = time.perf_counter() - began
        if b" %d " % status not in head[:16]:
            raise RuntimeError(f"{head.decode()}\n{reply[:500].decode('utf-8', 'replace')}")
        return took, reply


@dataclass
class Load:
    """A Load says what the client process does.

    It plays ``sessions`` at the same time, with ``turns`` each, and bodies that grow by ``result_chars`` per turn.
    ``think_s``: mean of the seconds (0 to twice as many) between a reply and the next request of its session. ``tag``:
    tells the sessions of different loads apart. ``seed``: another one gives other tasks and tool results.
    """

    port: int
    sessions: int
    turns: int
    result_chars: int
    think_s: float = 0.0
    tag: str = ""
    seed: int = 0
    at_once: bool = False


SHAPES = ("text", "lines", "messages", "blocks", "values")


def too_long(shape: str, size: int) -> bytes:
    """Return a body of about ``size`` bytes: one text, one of many lines, or many tiny messages, blocks or values."""
    content: Any = (text(100_000, size) * (size // 100_000 + 1))[:size]
    if shape == "lines":
        content = "x\n" * (size // 3)
    if shape == "blocks":
        content = [{"type": "text", "text": "a"}] * (size // 30)
    messages = [{"role": "user", "content": content}]
    if shape == "messages":
        messages = [{"role": "user", "content": "a"}] * (size // 34)
    if shape == "values":
        call = {"type": "tool_use", "id": "a", "name": "a", "input": {"a": [[]] * (size // 3)}}
        messages = [{"role": "assistant", "content": [call]}, {"role": "user", "content": "a"}]
    return json.dumps({"max_tokens": 9, "messages": messages}, separators=(",", ":")).encode()


async def disturb(port: int, size: int, shape: str) -> dict[str, Any]:
    """Send a body that cannot be answered, and once more, while another session goes on; return latencies in seconds.

    ``size`` and ``shape``: see ``too_long``.
    """
    talk, client, took = Talk(1, 300), Client(port, "other"), []

    async def turn() -> None:
        nonlocal talk
        if len(talk.messages) > 400:  # before its own context is full
            talk = Talk(1, 300)
        seconds, reply = await client.ask(talk.body())
        talk.heard(reply)
        took.append(seconds)

    for _ in range(20):
        await turn()
    body = too_long(shape, size)
    alone = took[1:]
    took = []
    sender = Client(port, f"large{size}")

    async def twice() -> list[float]:
        return [(await sender.ask(body, 400))[0] for _ in range(2)]

    large = asyncio.create_task(twice())
    while not large.done():
        await turn()
        await asyncio.sleep(0.005)
    return {"alone": max(alone), "beside": max(took), "refused": await large}


async def play(load: Load) -> dict[str, Any]:
    """Run a load; return its latencies in seconds, [session][turn], and totals.

    The clock starts after the first turn of all sessions.
    """
    talks = [Talk(load.seed + i, load.result_chars) for i in range(load.sessions)]
    clients = [Client(load.port, f"{load.tag}{i}") for i in range(load.sessions)]
    sizes: list[int] = []

    async def turn(i: int) -> float:
        body = talks[i].body()
        sizes.append(len(body))
        took, reply = await clients[i].ask(body)
        talks[i].heard(reply)
        return took

    async def rest(i: int) -> list[float]:
        took, draw = [], random.Random(i)
        for _ in range(load.turns - 1):
            # Sessions that began in step would stay in step for a while, which agents do not.
            await asyncio.sleep(load.think_s * draw.uniform(0, 2))
            took.append(await turn(i))
        return took

    if load.at_once:
        first = await asyncio.gather(*(turn(i) for i in range(load.sessions)))
    else:
        first = [await turn(i) for i in range(load.sessions)]
    gc.disable()  # else a pause of the client would count as the proxy's
    began, cpu = time.perf_counter(), time.process_time()
    later = await asyncio.gather(*(rest(i) for i in range(load.sessions)))
    wall = time.perf_counter() - began
    return {
        "first": first,
        "later": later,
        "wall": wall,
        "client_busy": (time.process_time() - cpu) / wall,
        "bytes": (min(sizes), max(sizes)),
    }
