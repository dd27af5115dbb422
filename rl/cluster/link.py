"""This module lets the nodes of a job talk while ``rl.cluster`` starts and ends them: JSON lines, a TCP connection
each.

The connection lives as long as its two processes, so each side learns of the other's end by the connection's. The first
line of a node holds the job's key; a client without it is not heard. Nothing secret is sent, so nothing is encrypted.

node -> head: {"key", "node"}, then any of {"say": text}, {"ready": keys}, {"problem": text}.
head -> node: {"welcome": true}, {"ray": "ip:port"}; the end of the connection means: stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rl.config import ConfigError

_LINE = 1 << 20
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}  # a machine that is gone says nothing: 90 s


class NodeError(Exception):
    """A node failed; the message is one line that begins with the node's name."""


@dataclass(frozen=True)
class Place:
    """A place is where this process is in the job.

    ``head`` is the address of the first node, ``attempt`` counts requeues from 0, ``array_task`` is None outside of an
    array job, and ``key`` is known to the tasks of the job only.
    """

    rank: int
    nodes: int
    node: str
    job: str
    attempt: int
    array_task: str | None
    head: str
    port: int
    key: str

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Place:
        """Read what srun has set, and the key that the batch script has made. Raises ConfigError outside of a job."""
        try:
            number = int(environment["SLURM_JOB_ID"])
            task = environment.get("SLURM_ARRAY_TASK_ID")
            return cls(
                rank=int(environment["SLURM_PROCID"]),
                nodes=int(environment["SLURM_STEP_NUM_NODES"]),
                node=environment["SLURMD_NODENAME"],
                job=str(number) if task is None else f"{environment['SLURM_ARRAY_JOB_ID']}_{task}",
                attempt=int(environment.get("SLURM_RESTART_COUNT", 0)),
                array_task=task,
                head=environment["SLURM_LAUNCH_NODE_IPADDR"],  # srun runs where the batch script does: on the first
                port=20000 + number % 10000,  # below the ports that the kernel hands out
                key=environment["RAY_AUTH_TOKEN"],
            )
        except KeyError as error:
            raise ConfigError(f"{error.args[0]} is not set: start it with sbatch scripts/slurm/train.sbatch") from error


class Peer:
    """A peer is the head's end of the connection to one node.

    ``ready`` gets the node's message that it is prepared; ``gone`` is set when the connection has ended.
    """

    def __init__(self, name: str, writer: asyncio.StreamWriter) -> None:
        self.name, self._writer = name, writer
        self.ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.gone = asyncio.Event()

    async def send(self, **message: Any) -> None:
        """Send a message; nothing happens if the node is gone, which its reader notices."""
        with contextlib.suppress(OSError):
            await _send(self._writer, message)

    def close(self) -> None:
        """Hang up, which tells the node to stop."""
        self._writer.write_eof()


class Listener:
    """The head's listener for the other nodes of the job.

    ``failed`` gets the first NodeError of any of them; ``address`` is this node's, as the others reach it.
    """

    def __init__(self, place: Place, say: Callable[[str], None]) -> None:
        self.place, self._say = place, say
        self.peers: dict[str, Peer] = {}
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.address = place.head
        self._complete = asyncio.Event()
        self._closing = False
        self._server: asyncio.Server | None = None

    async def listen(self) -> None:
        """Open the port. Raises NodeError if it is taken."""
        try:
            self._server = await asyncio.start_server(self._serve, None, self.place.port, limit=_LINE)
        except OSError as error:
            raise NodeError(f"{self.place.node}: cannot listen on port {self.place.port}: {error}") from error

    async def complete(self, seconds: float) -> None:
        """Wait until all nodes of the job have called. Raises NodeError after ``seconds``."""
        if self.place.nodes > 1:
            try:
                await asyncio.wait_for(self._complete.wait(), seconds)
            except TimeoutError:
                known = ", ".join(sorted([self.place.node, *self.peers]))
                raise NodeError(
                    f"{self.place.nodes - 1 - len(self.peers)} of {self.place.nodes} nodes have not called in "
                    f"{seconds:.0f} s (here: {known}); see their logs, or SLURM's"
                ) from None

    async def close(self, seconds: float) -> None:
        """Tell the nodes to stop, and wait until they have."""
        self._closing = True
        for peer in self.peers.values():
            peer.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(peer.gone.wait() for peer in self.peers.values())), seconds)
        if self._server:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = _lines(reader)
        peer: Peer | None = None
        try:
            hello = await asyncio.wait_for(anext(lines), 30)
            if not hmac.compare_digest(str(hello.get("key")), self.place.key):
                return
            _keep_alive(writer)
            peer = self.peers[hello["node"]] = Peer(hello["node"], writer)
            self.address = writer.get_extra_info("sockname")[0]
            await peer.send(welcome=True)
            if len(self.peers) == self.place.nodes - 1:
                self._complete.set()
            async for message in lines:
                self._hear(peer, message)
        except (OSError, TimeoutError, StopAsyncIteration):
            pass
        finally:
            writer.close()
            if peer:
                peer.gone.set()
                self._fail(f"{peer.name}: lost: its process has ended or its machine does not answer")

    def _hear(self, peer: Peer, message: Mapping[str, Any]) -> None:
        if "say" in message:
            self._say(f"{peer.name}: {message['say']}")
        if "ready" in message and not peer.ready.done():
            peer.ready.set_result(message["ready"])
        if "problem" in message:
            self._fail(f"{peer.name}: {message['problem']}")

    def _fail(self, text: str) -> None:
        if not self._closing and not self.failed.done():
            self.failed.set_exception(NodeError(text))


class Link:
    """A link is a node's end of the connection; ``address`` is this node's, as the head reaches it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._lines, self._writer = _lines(reader), writer
        self.address: str = writer.get_extra_info("sockname")[0]

    @classmethod
    async def open(cls, place: Place, seconds: float) -> Link:
        """Call the head until it answers. Raises NodeError after ``seconds``."""
        end = asyncio.get_running_loop().time() + seconds
        while True:
            try:
                reader, writer = await asyncio.open_connection(place.head, place.port, limit=_LINE)
                await _send(writer, {"key": place.key, "node": place.node})
                link = cls(reader, writer)
                await asyncio.wait_for(anext(link._lines), 30)
                _keep_alive(writer)
                return link
            except (OSError, TimeoutError, StopAsyncIteration) as error:
                if asyncio.get_running_loop().time() > end:
                    raise NodeError(f"{place.node}: the head ({place.head}:{place.port}) does not answer") from error
                await asyncio.sleep(0.5)

    async def send(self, **message: Any) -> None:
        """Send a message; nothing happens if the head is gone, which ``receive`` notices."""
        with contextlib.suppress(OSError):
            await _send(self._writer, message)

    async def receive(self) -> dict[str, Any] | None:
        """Return the next message of the head, None if it has hung up or is gone."""
        try:
            return await anext(self._lines, None)
        except OSError:
            return None

    async def close(self) -> None:
        """Close the connection, which tells the head that this node has stopped."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


async def _send(writer: asyncio.StreamWriter, message: Mapping[str, Any]) -> None:
    writer.write(json.dumps(message).encode() + b"\n")
    await writer.drain()


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    while (line := await reader.readline()).endswith(b"\n"):
        yield json.loads(line)


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
