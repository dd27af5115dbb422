"""The way of a session's socket into a pod: relay.c, in the pod's keeper, and the other end of its stream here."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path

from kubernetes_boxes.cluster import Stream

_GONE = 0xFFFFFFFF  # see relay.c
_WAITING = 32 << 20  # bytes that the proxy has not taken yet
SOURCE = Path(__file__).with_name("relay.c")
"""What runs in the pod, once it is compiled."""


async def carry(stream: Stream, path: Path, ready: asyncio.Future[None]) -> None:
    """Carry the connections of a pod's socket to one here until the stream ends; see relay.c.

    Frames are read at once, whatever becomes of them: no connection stops the others.
    """
    writers: dict[int, asyncio.StreamWriter] = {}
    tasks: set[asyncio.Task[None]] = set()
    lock, last = asyncio.Lock(), 0

    async def tell(number: int, data: bytes, size: int | None = None) -> None:
        async with lock:  # a frame is in one piece
            await stream.send(struct.pack("!II", number, len(data) if size is None else size) + data)

    async def answer(number: int, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 15):
                await tell(number, data)
        await tell(number, b"")

    def start(work: Coroutine[None, None, None]) -> None:
        tasks.add(task := asyncio.ensure_future(work))
        task.add_done_callback(tasks.discard)

    try:
        async for number, size, data in _frames(stream):
            if number == 0:
                ready.set_result(None)
            elif number > last:  # a new connection
                last = number
                try:
                    reader, writers[number] = await asyncio.open_unix_connection(str(path))
                    start(answer(number, reader))
                except OSError:  # the session is closed
                    start(tell(number, b"", _GONE))
            elif (writer := writers.get(number)) is None:
                continue
            elif size == _GONE:
                writers.pop(number).close()
            else:
                with contextlib.suppress(OSError, RuntimeError):  # uvloop's, for a connection that is closed
                    writer.write(data) if size else writer.write_eof()
                if sum(one.transport.get_write_buffer_size() for one in writers.values()) > _WAITING:
                    writers.pop(number).transport.abort()
                    start(tell(number, b"", _GONE))
    finally:
        for task in tasks:
            task.cancel()
        for writer in writers.values():
            writer.close()
        await stream.close()


async def _frames(stream: Stream) -> AsyncIterator[tuple[int, int, bytes]]:
    """Yield (number of the connection, size, data) as a relay sends them."""
    held = bytearray()
    async for channel, data in stream:
        held += data if channel == 1 else b""
        while len(held) >= 8:
            number, size = struct.unpack_from("!II", held)
            length = 0 if size == _GONE else size
            if len(held) < 8 + length:
                break
            yield number, size, bytes(held[8 : 8 + length])
            del held[: 8 + length]
