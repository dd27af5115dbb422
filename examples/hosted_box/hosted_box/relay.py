"""A unix socket in a box without a network, whose connections travel over the standard streams of one program there.

The trainer imports this file and the box runs it (`python3 -I -c TEXT PATH`), so it needs the standard library only. A
frame is the number of a connection, a size and as many bytes; without bytes it ends its connection. Frame 0 says that
the socket is there.
"""

import asyncio
import contextlib
import itertools
import os
import struct
import sys

HEAD = struct.Struct(">II")


class Relay:
    """One end of the relay. send: sends bytes to the other one. dial: opens a connection for one that began there."""

    def __init__(self, send, dial=None):
        self.send, self.dial, self.turn, self.listening = send, dial, asyncio.Lock(), asyncio.Event()
        self.writers, self.carried, self.last = {}, set(), 0

    async def frame(self, number, data=b""):
        async with self.turn:
            await self.send(HEAD.pack(number, len(data)) + data)

    async def carry(self, number, reader, writer):
        """Send what one connection says, until it ends."""
        self.writers[number] = writer
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await self.frame(number, data)
        self.writers.pop(number).close()
        await self.frame(number)

    async def take(self, chunks):
        """Lead what the other end sends to its connections, until that ends."""
        held = bytearray()
        async for chunk in chunks:
            held += chunk
            while len(held) >= HEAD.size and len(held) >= HEAD.size + HEAD.unpack_from(held)[1]:
                number, size = HEAD.unpack_from(held)
                data = bytes(held[HEAD.size : HEAD.size + size])
                del held[: HEAD.size + size]
                with contextlib.suppress(OSError):  # the reader of a connection notices its end
                    await self.led(number, data)

    async def led(self, number, data):
        if number == 0:
            self.listening.set()
        elif self.dial and number > self.last:
            self.last = number
            reader, self.writers[number] = await self.dial()
            self.carried.add(asyncio.ensure_future(self.carry(number, reader, self.writers[number])))
        if number in self.writers and data:
            self.writers[number].write(data)
            await self.writers[number].drain()
        elif number in self.writers:
            self.writers[number].close()


async def main(path):
    """Be the end in the box, until the trainer's ends."""
    numbers, loop = itertools.count(1), asyncio.get_running_loop()

    async def send(data):
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    async def received():
        while data := await loop.run_in_executor(None, os.read, 0, 1 << 16):
            yield data

    relay = Relay(send)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    server = await asyncio.start_unix_server(lambda *ends: relay.carry(next(numbers), *ends), path)
    os.chmod(path, 0o666)
    await relay.frame(0)
    async with server:
        await relay.take(received())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
