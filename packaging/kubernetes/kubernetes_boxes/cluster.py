"""The cluster of a box: calls to its API server, and the streams of programs in its pods.

A stream is a websocket of the API's `exec`, whose messages begin with the number of a channel.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Generator, Sequence
from typing import Any

import aiohttp
from kubernetes.aio import client, config
from kubernetes.aio.config.config_exception import ConfigException
from kubernetes.aio.stream import WsApiClient

from rollout.sandbox import SandboxError, failed
from rollout.sandbox.owner import gone, me

OWNER = "claude-code-rl.owner"
LABEL = {"app": "claude-code-rl-box"}
_STDIN, _ERROR = 0, 3
_CHUNK = 1 << 16
_ALIVE_S = 15.0  # between two pings; a connection without an answer to one ends
_TIMEOUT_S = 60.0  # for one answer
_LOST = (aiohttp.ClientError, ConnectionError, TimeoutError)

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def told(cause: str) -> Generator[None]:
    """Turn errors of the client into SandboxErrors: of this cause if the API server answers, no_engine if not."""
    try:
        yield
    except client.ApiException as error:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            raise failed(cause, json.loads(error.body or "")["message"]) from error
        raise failed(cause, f"{error.status} {error.reason}") from error
    except aiohttp.WSServerHandshakeError as error:
        raise failed(cause, f"{error.status} {error.message}") from error
    except _LOST as error:
        raise SandboxError("no_engine", f"the cluster's API server: {str(error) or type(error).__name__}") from error


class Cluster:
    """A Cluster is one namespace, reached by an event loop; to be closed.

    kubeconfig: its file, None: the user's, or the pod's own account where this is a pod. context: one of its contexts.
    """

    def __init__(self, api: client.ApiClient, ws: WsApiClient, namespace: str) -> None:
        self._api, self._ws, self.namespace = api, ws, namespace
        self._pods: Any = client.CoreV1Api(api)
        self._execs: Any = client.CoreV1Api(ws)

    @classmethod
    async def connect(cls, kubeconfig: str | None, context: str | None, namespace: str) -> Cluster:
        """Return a connection to a namespace. Raises SandboxError no_engine if the config cannot be used."""
        settings = client.Configuration()
        named = {"config_file": kubeconfig, "context": context}  # a pod's own account has no contexts
        how = {key: value for key, value in named.items() if value is not None}
        try:
            await config.load_config(**how, client_configuration=settings)
        except (ConfigException, OSError) as error:
            raise SandboxError("no_engine", f"no config of a cluster: {error}") from error
        return cls(client.ApiClient(settings), WsApiClient(settings, heartbeat=_ALIVE_S), namespace)

    async def close(self) -> None:
        """Close all connections."""
        await self._api.close()
        await self._ws.close()

    async def _ask(self, verb: str, cause: str = "kubernetes_failed", **options: Any) -> Any:
        """Do something with pods; return None if the one of this name is not there."""
        function = getattr(self._pods, f"{verb}_namespaced_pod")
        with told(cause):
            try:
                return await function(namespace=self.namespace, _request_timeout=_TIMEOUT_S, **options)
            except client.ApiException as error:
                if error.status != 404 or "name" not in options:
                    raise
        return None

    async def create(self, name: str, run: str, spec: dict[str, Any]) -> None:
        """Create a pod."""
        meta = {"name": name, "labels": LABEL, "annotations": {OWNER: me(), "claude-code-rl.run": run}}
        await self._ask("create", "boot_failed", body={"metadata": meta, "spec": spec})

    async def pod(self, name: str) -> Any | None:
        """Return a pod, None if it is gone or about to be."""
        found = await self._ask("read", name=name)
        return None if found is None or found.metadata.deletion_timestamp else found

    async def delete(self, name: str) -> None:
        """Delete a pod, which may be gone already."""
        await self._ask("delete", name=name, grace_period_seconds=0)

    async def boxes(self) -> list[Any]:
        """Return all boxes of the namespace, as the client's pods."""
        return (await self._ask("list", label_selector="app=" + LABEL["app"])).items

    async def reap(self) -> None:
        """Delete boxes whose owner is gone, and those whose time was up."""
        for one in await self.boxes():
            owner, phase = (one.metadata.annotations or {}).get(OWNER, ""), one.status.phase
            if one.status.reason == "DeadlineExceeded" or gone(owner, running=phase == "Running"):
                logger.warning("removing %s, a box of a run that is gone", one.metadata.name)
                await self.delete(one.metadata.name)

    async def start(self, pod: str, container: str, argv: Sequence[str]) -> Stream:
        """Start a program in a container. argv: short, as it is part of a URL."""
        with told("exec_failed"):
            connecting = await self._execs.connect_get_namespaced_pod_exec_without_preload_content(
                pod, self.namespace, container=container, command=list(argv),
                stdin=True, stdout=True, stderr=True, tty=False,
            )  # fmt: skip
            return Stream(await asyncio.wait_for(connecting, _TIMEOUT_S))

    async def call(self, pod: str, container: str, argv: Sequence[str], stdin: bytes = b"") -> tuple[int, bytes, bytes]:
        """Run a program to its end; return its exit status and output."""
        stream, out = await self.start(pod, container, argv), (bytearray(), bytearray())
        sending = asyncio.ensure_future(stream.send(stdin))
        try:
            async for channel, data in stream:
                out[channel - 1].extend(data)
            return stream.status(), bytes(out[0]), bytes(out[1])
        finally:
            sending.cancel()
            await stream.close()


class Stream:
    """A Stream is a running program: iterating over it gives (1 or 2, output), until it has ended or the stream has."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._status: dict[str, Any] | None = None

    async def send(self, data: bytes) -> None:
        """Write to the program's input. What it no longer reads is lost."""
        with contextlib.suppress(*_LOST):
            for at in range(0, len(data), _CHUNK):
                await self._socket.send_bytes(bytes([_STDIN]) + data[at : at + _CHUNK])

    async def __aiter__(self) -> AsyncIterator[tuple[int, bytes]]:
        async for message in self._socket:
            data = message.data if isinstance(message.data, bytes) else str(message.data).encode()
            if data[:1] == bytes([_ERROR]) and len(data) > 1:
                self._status = json.loads(data[1:])
            elif len(data) > 1 and data[0] in (1, 2):
                yield data[0], data[1:]

    def status(self) -> int:
        """Return the exit status of a program whose stream has ended. Raises SandboxError exec_failed without one."""
        status = self._status
        if status is None:
            raise SandboxError("exec_failed", f"the stream of a program broke: {self._socket.exception() or 'closed'}")
        if status.get("status") == "Success":
            return 0
        causes = (status.get("details") or {}).get("causes") or []
        for one in causes:
            if one.get("reason") == "ExitCode":
                return int(one["message"])
        raise failed("exec_failed", str(status.get("message")))

    async def close(self) -> None:
        """Close the stream; the program's input ends."""
        await self._socket.close()
