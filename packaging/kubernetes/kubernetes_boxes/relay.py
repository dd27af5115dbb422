"""The way of a session's socket into a pod: relay.c, in the pod's keeper, and the other end of its stream here."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from pathlib import Path

from kubernetes_boxes.cluster import Stream

_GONE = 0xFFFFFFFF  # see relay.c
SOURCE = Path(__file__).with_name("relay.c")
"""What runs in the pod, once it is compiled."""


async def carry(stream: Stream, path: Path, ready: asyncio.Future[None]) -> None:
    """Carry the connections of a pod's socket to one here until the stream ends; see relay.c."""
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

    try:
        async for number, size, data in _frames(stream):
            if number == 0:
                ready.set_result(None)
                continue
            if number > last:  # a new connection
                last = number
                try:
                    reader, writers[number] = await asyncio.open_unix_connection(str(path))
                except OSError:  # the session is closed
                    await tell(number, b"", _GONE)
                    continue
                tasks.add(task := asyncio.ensure_future(answer(number, reader)))
                task.add_done_callback(tasks.discard)
                continue
            if size == _GONE:
                if number in writers:
                    writers.pop(number).close()
                continue
            if (writer := writers.get(number)) is not None:
                with contextlib.suppress(OSError):
                    writer.write(data) if size else writer.write_eof()
                    await writer.drain()
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
