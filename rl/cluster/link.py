"""Connections between the nodes of a job while ``rl.cluster`` starts and ends them: lines of JSON over TCP.

Each node other than the head has a connection to it, over which both send lines. The connection lives as long as its
two processes, so a side whose peer has ended learns it from the end of the connection. Each side proves that it knows
the job's key, so that neither a foreign client nor a foreign server at one of the ports is heard. Nothing secret is
sent, not even the key, so nothing is encrypted. What SLURM says of a process's place in the job is read here, too.

head -> node: {"nonce"}; node -> head: {"node", "proof"}; head -> node: {"welcome": proof of the proof}; then
node -> head: any of {"checked": text}, {"tested": figures}, {"say": text}, {"ready": keys}, {"problem": text};
head -> node: {"go": true}, {"test": order} (null: no more), {"ray": "ip:port"}; the end of the connection means: stop.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import hmac
import itertools
import json
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl.config.compose import ConfigError

# What the parts of a heterogeneous job are for. The second and third are also the names of Ray resources.
ROLES = ("training", "episodes", "grading")
_LINE = 1 << 20
_PORTS = 8
_ANSWER_S = 10.0  # for the head to greet a node; a foreign server at one of the ports may never do so
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}  # a lost machine is noticed after 90 s


class NodeError(Exception):
    """A node failed; the message is one line per node, the first of which begins with the node's name."""


@dataclass(frozen=True)
class JobPosition:
    """A job position is where this process is in the job.

    ``head`` is the address of the first node, which listens on the first of ``ports`` that is free there. ``attempt``
    counts requeues from 0, ``array_task`` is None outside of an array job, and ``key`` is known to the tasks of the job
    only. ``parts``: the number of nodes in each part of a heterogeneous job, in the order of ``ROLES``; else one
    number, ``nodes``, and episodes are played where the trainer is.
    """

    rank: int
    nodes: int
    parts: Sequence[int]
    node: str
    job: str
    attempt: int
    array_task: str | None
    head: str
    ports: Sequence[int]
    key: str

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> JobPosition:
        """Read what srun has set, and the key that the batch script has made. Raises ConfigError outside of a job."""
        try:
            number, attempt = int(environment["SLURM_JOB_ID"]), int(environment.get("SLURM_RESTART_COUNT", 0))
            nodes = int(environment["SLURM_STEP_NUM_NODES"])
            sizes = (environment.get(f"SLURM_JOB_NUM_NODES_HET_GROUP_{part}") for part in range(len(ROLES) + 1))
            task = environment.get("SLURM_ARRAY_TASK_ID")
            return cls(
                rank=int(environment["SLURM_PROCID"]),
                nodes=nodes,
                parts=[int(size) for size in sizes if size] or [nodes],
                node=environment["SLURMD_NODENAME"],
                job=str(number) if task is None else f"{environment['SLURM_ARRAY_JOB_ID']}_{task}",
                attempt=attempt,
                array_task=task,
                head=environment["SLURM_LAUNCH_NODE_IPADDR"],  # srun runs where the batch script does: the first node
                # Below the ports that the kernel hands out; different ones when the job starts again.
                ports=[20000 + (16 * number + _PORTS * attempt + i) % 12000 for i in range(_PORTS)],
                key=environment["RAY_AUTH_TOKEN"],
            )
        except KeyError as error:
            raise ConfigError(f"{error.args[0]} is not set: start it with sbatch scripts/slurm/train.sbatch") from error

    @property
    def role(self) -> str | None:
        """Return what this node is for, a name of ``ROLES``; None: for everything, as in most jobs."""
        if len(self.parts) == 1:
            return None
        return ROLES[bisect.bisect_right(list(itertools.accumulate(self.parts)), self.rank)]

    @property
    def resources(self) -> list[str]:
        """Return the overrides that say which Ray resources nodes that play and nodes that grade have."""
        keys = ("cluster.episode_resource", "cluster.grading_resource")
        return [f"{key}={role}" for key, role, _ in zip(keys, ROLES[1:], self.parts[1:], strict=False)]

    @property
    def plays(self) -> bool:
        """Tell whether boxes run on this node."""
        return self.role != "training"


class Peer:
    """A peer is the head's end of the connection to one node.

    ``checked`` gets what the node found wrong with itself, "" for nothing; ``ready`` gets the node's message that it is
    prepared; ``gone`` is set when the connection has ended.
    """

    def __init__(self, name: str, writer: asyncio.StreamWriter) -> None:
        self.name, self._writer = name, writer
        self.checked: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.tested: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.gone = asyncio.Event()

    async def ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Order a test (``rl.cluster.preflight``) and return what it gave; waits for ever if the node is lost."""
        self.tested = asyncio.get_running_loop().create_future()
        await self.send(test=order)
        return await self.tested

    async def send(self, **message: Any) -> None:
        """Send a message; nothing happens if the node is gone, which its reader notices."""
        with contextlib.suppress(OSError):
            await _send(self._writer, message)

    def close(self) -> None:
        """Hang up, which tells the node to stop."""
        self._writer.write_eof()


class Listener:
    """A listener is the head's end of the link to the other nodes of the job.

    ``failed`` gets the first NodeError of any of them; ``address`` is this node's, as the others reach it.
    """

    def __init__(self, place: JobPosition, say: Callable[[str], None]) -> None:
        self.place, self._say = place, say
        self.peers: dict[str, Peer] = {}
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.address = place.head
        self._complete = asyncio.Event()
        self._closing = False
        self._server: asyncio.Server | None = None

    async def listen(self) -> None:
        """Open one of the ports. Raises NodeError if all are taken."""
        for port in self.place.ports:
            try:
                self._server = await asyncio.start_server(self._serve, None, port, limit=_LINE)
                return
            except OSError as error:
                cause = error
        raise NodeError(f"{self.place.node}: cannot listen on any of the ports {_list(self.place.ports)}: {cause}")

    async def complete(self, seconds: float) -> None:
        """Wait until all nodes of the job have called. Raises NodeError after ``seconds``."""
        if self.place.nodes > 1:
            try:
                await asyncio.wait_for(self._complete.wait(), seconds)
            except TimeoutError:
                known = ", ".join(sorted([self.place.node, *self.peers]))
                silent = f"{self.place.nodes - 1 - len(self.peers)} of {self.place.nodes}"
                raise NodeError(
                    f"{self.place.node}: {silent} nodes have not called in {seconds:.0f} s "
                    f"(here: {known}); see their logs, or SLURM's"
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
            await _send(writer, {"nonce": (nonce := secrets.token_hex(16))})
            hello = await asyncio.wait_for(anext(lines), 30)
            proof = _proof(self.place.key, nonce)
            if not hmac.compare_digest(str(hello.get("proof")), proof):
                return
            _keep_alive(writer)
            peer = self.peers[hello["node"]] = Peer(hello["node"], writer)
            self.address = writer.get_extra_info("sockname")[0]
            await peer.send(welcome=_proof(self.place.key, proof))
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
        for name, future in (("tested", peer.tested), ("checked", peer.checked), ("ready", peer.ready)):
            if name in message and not future.done():
                future.set_result(message[name])
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
    async def open(cls, place: JobPosition, seconds: float) -> Link:
        """Call the head until it answers. Raises NodeError after ``seconds``."""
        end = asyncio.get_running_loop().time() + seconds
        for port in itertools.cycle(place.ports):
            with contextlib.suppress(OSError, TimeoutError, StopAsyncIteration, ValueError):
                connecting = asyncio.open_connection(place.head, port, limit=_LINE)
                reader, writer = await asyncio.wait_for(connecting, _ANSWER_S)
                link = cls(reader, writer)
                try:
                    await asyncio.wait_for(link._greet(place), _ANSWER_S)
                    _keep_alive(writer)
                    return link
                except BaseException:
                    writer.close()
                    raise
            if asyncio.get_running_loop().time() > end:
                break
            if port == place.ports[-1]:
                await asyncio.sleep(0.5)
        raise NodeError(f"{place.node}: the head ({place.head}, ports {_list(place.ports)}) does not answer")

    async def _greet(self, place: JobPosition) -> None:
        """Prove to the head that this node knows the key, and see that the head does. Raises ValueError, OSError."""
        proof = _proof(place.key, str((await anext(self._lines)).get("nonce")))
        await _send(self._writer, {"node": place.node, "proof": proof})
        if (await anext(self._lines)).get("welcome") != _proof(place.key, proof):
            raise ValueError("a foreign server")

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


def _proof(key: str, text: str) -> str:
    return hmac.new(key.encode(), text.encode(), "sha256").hexdigest()


def _list(ports: Sequence[int]) -> str:
    return ", ".join(map(str, ports))


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
