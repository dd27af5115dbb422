"""The container engine (Docker, or podman's socket): calls to it, whose containers are whose, one exec's stream.

Calls go through the docker SDK in a thread pool of our own, whose size is also that of the client's connection pool:
with fewer connections than threads the SDK's pool breaks under load. The one exception is the stream of an exec: the
SDK reads the answer's head through a buffer and hands out the bare socket, so output that came with the head is lost.
`Stream` makes that one request itself, and needs no thread for as long as a program runs.

Every container carries the labels of its owner: machine, boot, process namespace, process and its start time. `reap`
removes the containers of owners that are certainly gone.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import docker
import requests
from docker.errors import APIError, DockerException, ImageNotFound, NotFound, create_api_error_from_http_exception
from docker.utils import kwargs_from_env

from rollout.sandbox import SandboxError, failed
from rollout.sandbox.docker import podman
from rollout.sandbox.owner import gone, me

logger = logging.getLogger(__name__)

PROJECT = "claude-code-rl"
OWNER, RUN = f"{PROJECT}.owner", f"{PROJECT}.run"
_THREADS = 32
_TIMEOUT_S = 120.0  # for one answer of the engine; pulls and builds send something all the time
_CHUNK = 1 << 16


class ContainerEngine:
    """One engine, as DOCKER_HOST and its companions name it. Raises SandboxError no_engine when it does not answer.

    All methods but `call` and `open_stream` block.
    """

    def __init__(self) -> None:
        try:
            self.client = docker.APIClient(
                **kwargs_from_env(), version="auto", timeout=_TIMEOUT_S, max_pool_size=_THREADS
            )
            self.podman = podman.is_podman(self.client.version())
        except (DockerException, requests.RequestException) as error:
            raise translated(error, "no_engine") from error
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="engine")
        self._sized: bool | None = None
        self._owed: set[str] = set()
        self.reap()

    async def call(self, function: Callable[..., Any], *args: Any, cause: str = "docker_failed", **options: Any) -> Any:
        """Run a blocking function in the pool. What the engine refuses is a SandboxError with this cause, or with
        a more telling one. A cancelled call runs on to its end, unobserved: shield what must be seen."""
        work = functools.partial(checked, cause, function, *args, **options)
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def labels(self, run: str = "") -> dict[str, str]:
        return {OWNER: me(), RUN: run}

    def ulimits(self, **values: int) -> list[dict[str, Any]]:
        """Limits of each process of a container that is to be started, for its host config."""
        values = {**podman.ulimits(), **values} if self.podman else values
        return [{"Name": name, "Soft": value, "Hard": value} for name, value in values.items()]

    @functools.cached_property
    def security_opt(self) -> list[str]:
        """Of a container that is to be started, for its host config: no new privileges, and no new namespaces."""
        profile = podman.seccomp(self.client, cache_dir("podman")) if self.podman else None
        return ["no-new-privileges", *([f"seccomp={profile}"] if profile else [])]

    def reap(self) -> list[str]:
        """Remove containers whose owner is gone; returns their ids. Failures are logged, never raised."""
        removed = []
        try:
            containers = self.client.containers(all=True, filters={"label": OWNER})
        except (DockerException, requests.RequestException) as error:
            logger.warning("looking for containers of runs that are gone: %s", translated(error, "docker_failed"))
            return removed
        for container in containers:
            if gone(container["Labels"][OWNER], container["State"] == "running"):
                with contextlib.suppress(DockerException, requests.RequestException):  # another process was faster
                    self.client.remove_container(container["Id"], force=True, v=True)
                    removed.append(container["Id"])
        if removed:
            logger.warning("removed %d containers of runs that are gone", len(removed))
        return removed

    def owe(self, container: str) -> None:
        """Remove a container that cannot be removed now, for the engine is away, when the next one is made."""
        self._owed.add(container)

    def create(self, image: str, host: dict[str, Any], disk_bytes: int, **config: Any) -> tuple[str, bool]:
        """Create a container; returns its id and whether the engine itself limits its disk."""
        for owed in list(self._owed):  # threads that do this at the same time do no harm
            with contextlib.suppress(NotFound):
                self.client.remove_container(owed, force=True, v=True)
            self._owed.discard(owed)
        if self._sized is not False:
            sized = {**host, "storage_opt": {"size": str(disk_bytes)}}
            try:
                made = self._create(image, sized, config)
                self._sized = True
                return made, True
            except APIError as error:
                if self._sized or not re.search(r"storage.?opt|quota", str(error.explanation), re.IGNORECASE):
                    raise
                self._sized = False  # this storage driver has no quotas
        return self._create(image, host, config), False

    def _create(self, image: str, host: dict[str, Any], config: dict[str, Any]) -> str:
        # The SDK would set the HTTP proxies of ~/.docker/config.json in the box.
        return self.client.create_container(
            image, host_config=self.client.create_host_config(**host), use_config_proxy=False, **config
        )["Id"]

    def changed_bytes(self, container: str) -> int:
        """The size of what a running container has written; 0 when it is not there."""
        try:
            return self._changed_bytes(container)
        except APIError:
            if not self.podman:
                raise
        # Podman cannot count while files go, and a box must not hide so: it stands still for a moment.
        try:
            self.client.pause(container)
        except APIError:  # it has just ended
            return 0
        try:
            return self._changed_bytes(container)
        finally:
            self.client.unpause(container)

    def _changed_bytes(self, container: str) -> int:
        listed = self.client.containers(all=True, size=True, filters={"id": container})
        return listed[0].get("SizeRw", 0) if listed else 0

    def processes(self, container: str) -> list[list[str]]:
        """A row for each process of a running container."""
        # By default podman runs the container's own `ps`; it looks itself when it is asked for columns of its own.
        return self.client.top(container, "pid,args" if self.podman else None)["Processes"]

    def stat(self, container: str, path: str) -> Mapping[str, Any] | None:
        """What is at a path of a container, links not followed at its end: name, size, mode (Go's), linkTarget."""
        answer = self.client.head(self._archive_url(container), params={"path": path}, timeout=_TIMEOUT_S)
        encoded = answer.headers.get("X-Docker-Container-Path-Stat")
        if encoded is None:
            if answer.status_code == 404:
                return None
            raise SandboxError("docker_failed", f"stat {path}: HTTP {answer.status_code}")
        # Podman: there is a link, but nothing where it points (404), and base64 for addresses.
        return json.loads(base64.b64decode(encoded, b"-_"))

    def archive(self, container: str, path: str) -> requests.Response:
        """The tar archive of a path of a container, as a stream; the caller closes it. The SDK's own cannot read
        podman's header. Raises NotFound, APIError."""
        url, query = self._archive_url(container), {"path": path}
        answer = self.client.get(url, params=query, stream=True, timeout=_TIMEOUT_S)
        try:
            answer.raise_for_status()
        except requests.HTTPError as error:
            create_api_error_from_http_exception(error)
        return answer

    def _archive_url(self, container: str) -> str:
        return f"{self.client.base_url}/v{self.client.api_version}/containers/{container}/archive"

    async def open_stream(self, exec_id: str) -> Stream:
        """Start an exec that was created and attach to it. SandboxError when the engine cannot start it."""
        url = urlsplit(os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock")
        try:
            if url.scheme == "unix":
                reader, writer = await asyncio.open_unix_connection(url.path, limit=_CHUNK)
            else:
                reader, writer = await asyncio.open_connection(url.hostname, url.port, limit=_CHUNK)
        except OSError as error:
            raise SandboxError("no_engine", str(error)) from error
        try:
            body = b'{"Detach": false, "Tty": false}'
            head = (
                f"POST /v{self.client.api_version}/exec/{exec_id}/start HTTP/1.1\r\nHost: engine\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
                "Connection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
            )
            writer.write(head.encode() + body)
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _TIMEOUT_S)
            status = answer.split(b" ", 2)[1]
            if status not in (b"101", b"200"):
                text = (await asyncio.wait_for(reader.read(2000), _TIMEOUT_S)).decode(errors="replace")
                raise failed("exec_failed", " ".join(text.split()))
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError) as error:
            writer.close()
            raise SandboxError("exec_failed", f"the engine hung up: {error}") from error
        except BaseException:
            writer.close()
            raise
        return Stream(reader, writer)


class Stream:
    """Standard input, output and error of a running exec."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, data: bytes) -> None:
        """Write all of standard input and close it. A program that does not read it is no error."""
        with contextlib.suppress(OSError):
            if data:
                self._writer.write(data)
                await self._writer.drain()
            self._writer.write_eof()

    async def receive(self, take: Callable[[int, bytes], None]) -> None:
        """Hand (1 or 2, bytes) to `take` until the stream ends, however it ends."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await self._reader.readexactly(8)
                left = int.from_bytes(head[4:], "big")
                while left:
                    data = await self._reader.read(min(left, _CHUNK))
                    if not data:
                        return
                    left -= len(data)
                    take(head[0], data)

    def close(self) -> None:
        self._writer.close()


@functools.cache
def _engine(pid: int) -> ContainerEngine:
    return ContainerEngine()


def get_engine() -> ContainerEngine:
    """This process's engine; the first call connects, and removes what runs that are gone have left. Blocks."""
    return _engine(os.getpid())  # a forked child makes its own


def cache_dir(kind: str) -> Path:
    """A directory of this user for what is worth keeping between runs."""
    directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", PROJECT, kind)
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def checked(cause: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """function(...), whose engine errors become SandboxErrors."""
    try:
        return function(*args, **options)
    except (DockerException, requests.RequestException) as error:
        raise translated(error, cause) from error


def translated(error: Exception, cause: str) -> SandboxError:
    """The SandboxError for what the SDK raised: `cause`, unless the error itself tells a better one."""
    text = " ".join(str(error.explanation if isinstance(error, APIError) and error.explanation else error).split())
    if isinstance(error, ImageNotFound) or (isinstance(error, NotFound) and "image" in text.lower()):
        return SandboxError("missing_image", text)
    if isinstance(error, requests.ConnectionError | requests.Timeout) or "Error while fetching server" in text:
        where = os.environ.get("DOCKER_HOST", "the default socket")
        return SandboxError("no_engine", f"no container engine answers at {where} ({text})")
    return failed(cause, text)
