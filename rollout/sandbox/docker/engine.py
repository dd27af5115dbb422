"""A container engine (Docker, or podman's socket): calls to it, and the containers and execs that they make.

Calls go through the docker SDK in a thread pool, whose size is also that of the client's connection pool: with fewer
connections than threads the SDK's pool breaks under load. The one exception is the stream of an exec: the SDK reads
the head of the answer through a buffer and hands out the bare socket, so output that came with the head is lost.
`ContainerEngine.open_stream` makes that one request itself, and needs no thread while a program runs.

Every container carries its owner in a label: machine, boot, process namespace, process and its start time.
`ContainerEngine.reap` removes the containers of owners that are certainly gone.
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
from collections.abc import Callable, Generator, Mapping
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
from rollout.sandbox.docker.warm import Spares
from rollout.sandbox.owner import gone, me

logger = logging.getLogger(__name__)

PROJECT = "claude-code-rl"
OWNER, RUN = f"{PROJECT}.owner", f"{PROJECT}.run"
# For images of containers: they keep the labels, and containers that others make of them would be ours to remove.
UNOWNED = [f"LABEL {OWNER}=", f"LABEL {RUN}="]
_THREADS = 32
_TIMEOUT_S = 120.0  # for one answer of the engine; pulls and builds send something all the time
_GRACE_S = 10.0  # for a killed container to be dead
_CHUNK = 1 << 16


class Machine:
    """This is the machine of an engine: this one, unless a subclass says otherwise. Methods block."""

    name = ""
    cpus = os.cpu_count() or 1

    def most_processes(self) -> int:
        """Return how many processes podman lets a container have."""
        return podman.most_processes()

    def read(self, path: str) -> str:
        """Return the text of a file of the machine. Raises OSError, SandboxError."""
        return Path(path).read_text()

    def shown(self, path: Path) -> str:
        """Return where the machine has what is at a path of this one, to be bound into boxes."""
        return str(path)

    def shared(self, directory: Path) -> str:
        """Return where the machine has a directory of sockets, to be bound into a box."""
        return str(directory)

    def hand_over(self, spare: Path, directory: Path) -> None:
        """Let an empty directory be the one that a box shows in place of the directory above it. Raises OSError."""
        (spare / directory.name).symlink_to(".")
        directory.rmdir()
        directory.symlink_to(spare)

    def unshare(self, directory: Path) -> None:
        """Forget a directory that was shared with a box."""
        if directory.is_symlink():
            spare = directory.readlink()
            directory.unlink()
            (spare / directory.name).unlink()
            spare.rename(directory)

    def let_in(self, directory: Path, uid: int) -> None:
        """Let a box's user connect to the sockets of a shared directory; it takes a session's secret to use one."""
        if uid != os.getuid():
            directory.chmod(0o711)
            for path in filter(Path.is_socket, directory.iterdir()):
                path.chmod(0o666)


class ContainerEngine:
    """This is one container engine, by default the one that DOCKER_HOST and its companions name.

    url: of its socket here. machine: where it runs; its name tells engines apart. relays: another program reads what is
    written to a box's sockets, and hands it on. pool: the threads. spares: see `warm`.
    The constructor raises SandboxError no_engine if it does not answer. All methods but `call` and `open_stream` block,
    and raise the SDK's errors.
    """

    relays = False

    def __init__(self, url: str | None = None, machine: Machine = Machine()) -> None:  # noqa: B008  it has no state
        self.url, self.machine = url or os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock", machine
        self.name = machine.name
        try:
            self.client = docker.APIClient(
                **(kwargs_from_env() if url is None else {"base_url": url}),
                version="auto",
                timeout=_TIMEOUT_S,
                max_pool_size=_THREADS,
            )
            self.podman = podman.is_podman(self.client.version())
        except (DockerException, requests.RequestException) as error:
            raise translated(error, "no_engine") from error
        self.pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="engine")
        self._sized: bool | None = None
        self._owed: set[str] = set()
        self.spares = Spares(self)
        self.reap()

    async def call(self, function: Callable[..., Any], *args: Any, cause: str = "docker_failed", **options: Any) -> Any:
        """Run a blocking function in the thread pool; errors of the SDK become SandboxErrors, as in `checked`.

        A cancelled call runs on to its end, unobserved; shield it if its result matters.
        """
        work = functools.partial(checked, cause, function, *args, **options)
        return await asyncio.get_running_loop().run_in_executor(self.pool, work)

    def labels(self, run: str = "") -> dict[str, str]:
        """Return the labels of a new container. run: the name of the run."""
        return {OWNER: me(), RUN: run}

    def ulimits(self, **values: int) -> list[dict[str, Any]]:
        """Return limits for each process of a new container, in the form of its host config."""
        values = {**podman.ulimits(self.machine.most_processes()), **values} if self.podman else values
        return [{"Name": name, "Soft": value, "Hard": value} for name, value in values.items()]

    @functools.cached_property
    def security_opt(self) -> list[str]:
        """Return the host config's security options of a new container: no new privileges, and no new namespaces."""
        profile = podman.seccomp(self.client, self.cache("podman"), self.machine.read) if self.podman else None
        return ["no-new-privileges", *([f"seccomp={self.machine.shown(profile)}"] if profile else [])]

    def cache(self, kind: str) -> Path:
        """Return a directory of this machine for what is worth keeping about this engine."""
        return cache_dir(kind)

    def fetch(self, image: str) -> bool:
        """Bring an image to the engine from where no registry is needed; return whether that was possible."""
        return False

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
                with contextlib.suppress(DockerException, requests.RequestException):  # another process is at it
                    self.remove(container["Id"])
                    removed.append(container["Id"])
        if removed:
            logger.warning("removed %d containers of runs that are gone", len(removed))
        return removed

    def owe(self, container: str) -> None:
        """Note a container that must be removed when the next one is made, because the engine does not answer now."""
        self._owed.add(container)

    def create(self, image: str, host: dict[str, Any], disk_bytes: int, **config: Any) -> tuple[str, bool]:
        """Create a box's container; returns its id and whether the engine itself limits its disk. See `new`."""
        for owed in list(self._owed):  # threads that do this at the same time do no harm
            self.remove(owed)
            self._owed.discard(owed)
        if self._sized is not False:
            sized = {**host, "storage_opt": {"size": str(disk_bytes)}}
            try:
                made = self.new(image, sized, **config)
                self._sized = True
                return made, True
            except APIError as error:
                if self._sized or not re.search(r"storage.?opt|quota", str(error.explanation), re.IGNORECASE):
                    raise
                self._sized = False  # this storage driver has no quotas
        return self.new(image, host, **config), False

    @contextlib.contextmanager
    def helper(self, image: str, host: Mapping[str, Any] = {}, **config: Any) -> Generator[str]:
        """Make a container without a network that is no box, whose output can be read. host, config: see `new`.

        It need not be started: the files of its image can be read, and others added.
        """
        # Whatever the engine does with the output of others.
        host = {"network_mode": "none", "ulimits": self.ulimits(), "log_config": {"Type": "json-file"}, **host}
        container = self.new(image, host, **{"command": ["true"], "entrypoint": [], **config})
        try:
            yield container
        finally:
            try:
                self.remove(container)
            except DockerException:
                self.owe(container)

    def new(self, image: str, host: dict[str, Any], **config: Any) -> str:
        """Create a container; returns its id. host: the host config. config: the rest."""
        host_config = self.client.create_host_config(**host)
        # By default the SDK would set the HTTP proxies of ~/.docker/config.json in the box.
        config = {"labels": self.labels(), "use_config_proxy": False, **config}
        return self.client.create_container(image, host_config=host_config, **config)["Id"]

    def kill(self, container: str) -> None:
        """Kill a container and wait until it is dead; it may be dead already."""
        try:
            self.client.kill(container)
        except APIError as error:
            if error.status_code not in (404, 409):
                raise
        self.client.wait(container, timeout=_GRACE_S)

    def remove(self, container: str) -> None:
        """Kill and delete a container with its volumes; it may be gone already."""
        with contextlib.suppress(NotFound):
            self.client.remove_container(container, force=True, v=True)

    def state(self, container: str) -> Mapping[str, Any]:
        """Return the engine's `State` of a container."""
        return self.client.inspect_container(container)["State"]

    def changed_bytes(self, container: str) -> int:
        """Return the size of what a running container has written, 0 if there is no such container."""
        try:
            return self._changed_bytes(container)
        except APIError:
            if not self.podman:
                raise
        # Podman cannot count while files are deleted, and a box must not hide that way, so it is paused.
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
        """Return a row for each process of a running container."""
        # By default podman runs the container's own `ps`. Asked for columns that it knows, it looks itself.
        return self.client.top(container, "pid,args" if self.podman else None)["Processes"]

    def stat(self, container: str, path: str) -> Mapping[str, Any] | None:
        """Return what is at a path of a container, None if nothing is: name, size, mode (Go's), linkTarget.

        A link at the end of the path is not followed.
        """
        answer = self.client.head(self._archive_url(container), params={"path": path}, timeout=_TIMEOUT_S)
        encoded = answer.headers.get("X-Docker-Container-Path-Stat")
        if encoded is None:
            if answer.status_code == 404:
                return None
            raise SandboxError("docker_failed", f"stat {path}: HTTP {answer.status_code}")
        # Podman answers 404 for a link to nothing, with this header, and uses the URL-safe alphabet.
        return json.loads(base64.b64decode(encoded, b"-_"))

    def archive(self, container: str, path: str) -> requests.Response:
        """Return the tar archive of a path of a container, as a stream that the caller closes.

        The SDK's own method cannot read podman's header. Raises NotFound, APIError.
        """
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
        """Start an exec that was created and attach to it. Raises SandboxError if the engine cannot start it."""
        url = urlsplit(self.url)
        try:
            if url.scheme == "unix":
                reader, writer = await asyncio.open_unix_connection(url.path, limit=_CHUNK)
            else:
                reader, writer = await asyncio.open_connection(url.hostname, url.port, limit=_CHUNK)
        except OSError as error:
            raise SandboxError("no_engine", f"{self.name or self.url}: {error}") from error
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
    """A stream carries standard input, output and error of a running exec."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, data: bytes) -> None:
        """Write all of standard input and close it; that a program does not read it is no error."""
        with contextlib.suppress(OSError):
            if data:
                self._writer.write(data)
                await self._writer.drain()
            self._writer.write_eof()

    async def receive(self, take: Callable[[int, bytes], None]) -> None:
        """Give (1 or 2, bytes) to `take` until the stream ends, however it ends."""
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
        """Close the connection; the program runs on."""
        self._writer.close()


@functools.cache
def _engine(pid: int) -> ContainerEngine:
    return ContainerEngine()


def get_engine() -> ContainerEngine:
    """Return this process's engine; the first call connects, and removes what dead runs have left. Blocks."""
    return _engine(os.getpid())  # a forked child connects by itself


def cache_dir(kind: str) -> Path:
    """Return a directory in the user's cache, for what is worth keeping between runs."""
    directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", PROJECT, kind)
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def checked(cause: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return function(...); errors of the SDK become SandboxErrors with this cause, or a more telling one."""
    try:
        return function(*args, **options)
    except (DockerException, requests.RequestException) as error:
        raise translated(error, cause) from error


def translated(error: Exception, cause: str) -> SandboxError:
    """Return the SandboxError for what the SDK raised, with this cause unless the error itself tells a better one."""
    text = " ".join(str(error.explanation if isinstance(error, APIError) and error.explanation else error).split())
    if isinstance(error, ImageNotFound) or (isinstance(error, NotFound) and "image" in text.lower()):
        return SandboxError("missing_image", text)
    if isinstance(error, NotFound) and "no such container" in text.lower():
        return SandboxError("box_killed", f"the container was removed from outside ({text})")
    if isinstance(error, requests.ConnectionError | requests.Timeout) or "Error while fetching server" in text:
        where = os.environ.get("DOCKER_HOST", "the default socket")
        return SandboxError("no_engine", f"no container engine answers at {where} ({text})")
    return failed(cause, text)
