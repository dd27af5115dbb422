"""Sandboxes in containers, on any engine that speaks Docker's API and runs on this machine.

`boot_docker` starts a container from the sealed image of a task (see `rollout.sandbox.docker.images`): no network, no
capabilities, no new privileges, limited memory, CPU, processes and disk, the image's own user. Process 1 does nothing;
programs are execs beside it. Of the host there are only the caller's read-only binds and the socket directory.

Nothing outlives an exec: its shell kills what is left before it ends, the engine is asked whether that was all, and if
not the container is killed. The next exec starts it again; its files stay. Programs run one after another.

Where the storage driver has no quotas, a box over its disk limit is found while a program runs, about once a second,
and killed: the program ends with exit code 137, as when memory ran out. A single file cannot grow over the limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from docker.errors import APIError, NotFound

from rollout.sandbox import OUTPUT_CAP, PATCH_CAP, ExecResult, Limits, SandboxError
from rollout.sandbox.docker import files as docker_files
from rollout.sandbox.docker import images
from rollout.sandbox.docker.diff import container_diff
from rollout.sandbox.docker.engine import ContainerEngine, get_engine

WORKDIR, HOME, TMPDIR = "/testbed", images.HOME, "/tmp"

# Process 1 has no signal handlers, so nothing in the box can end it. With SIGCHLD ignored the kernel reaps orphans.
_IDLE = ["bash", "-c", 'trap "" CHLD; exec sleep 2147483647']
# -1: all processes but process 1 and the shell itself; they have the same user.
_RUN = ["/bin/sh", "-c", '"$@"; code=$?; kill -9 -1 2>/dev/null; exit $code', "sh"]
_KILLED = 137
_POLL_S = (0.2, 1.0)  # between two looks at a running program: at first, at most
_GRACE_S = 10.0
_HOSTS = Path(__file__).with_name("hosts")

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def boot_docker(
    source: images.Source,
    *,
    snapshot: Path | None = None,
    limits: Limits = Limits(),  # noqa: B008  frozen
    binds: Mapping[Path, str] | None = None,
    socket_dir: Path | None = None,
    run: str = "",
    budget_bytes: int | None = None,
) -> DockerSandbox:
    """A fresh sandbox on the sealed image of `source`, which is pulled and sealed first where it was not ahead.

    snapshot: a directory with a git repository, small and sealed as it is; the work tree is a copy of it, and the
    source's image only what it needs. binds: host path -> path inside, read-only. socket_dir: a host directory that
    appears at its own path inside; unix sockets in it can be connected to. run: a name for the container's labels.
    budget_bytes: for images (see `images.sealed`). The caller closes the sandbox.
    Raises SandboxError: no_engine, missing_image, missing_snapshot, seal_failed, missing_bind, no_space, boot_failed.
    """
    if snapshot is not None and not snapshot.is_dir():
        raise SandboxError("missing_snapshot", str(snapshot))
    mounts = [(path.absolute(), inside) for path, inside in (binds or {}).items()]
    for path, _ in mounts:
        if not path.exists():
            raise SandboxError("missing_bind", str(path))
    if socket_dir is not None:
        if not socket_dir.is_dir():
            raise SandboxError("missing_bind", str(socket_dir))
        mounts.append((socket_dir.absolute(), str(socket_dir.absolute())))
    engine = await asyncio.to_thread(get_engine)
    for attempt in (0, 1):
        if snapshot is None:
            sealed = await engine.call(images.sealed, engine, source, budget_bytes)
        else:
            sealed = await engine.call(images.plain, engine, source.image)
        foreign = socket_dir if sealed.uid != os.getuid() else None
        booting = asyncio.ensure_future(
            engine.call(_boot, engine, sealed, snapshot, limits, mounts, run, cause="boot_failed")
        )
        try:
            container, limited = await asyncio.shield(booting)
            watched = None if limited else limits.disk_bytes
            return DockerSandbox(engine, container, sealed, snapshot, watched, foreign)
        except asyncio.CancelledError:
            # The thread cannot be stopped: wait for what it makes, then remove it.
            with contextlib.suppress(SandboxError):
                container, _ = await booting
                await engine.call(_remove, engine, container)
            raise
        except SandboxError as error:
            if error.cause != "missing_image" or attempt:
                raise
            images.forget(source)  # somebody has removed the sealed image: seal again
    raise AssertionError("not reached")


class DockerSandbox:
    """See `boot_docker` and the protocol in `rollout.sandbox`."""

    workdir, home, tmpdir = WORKDIR, HOME, TMPDIR

    def __init__(
        self,
        engine: ContainerEngine,
        container: str,
        sealed: images.Sealed,
        snapshot: Path | None,
        watched_bytes: int | None,
        sockets: Path | None,
    ) -> None:
        self.container = container
        self._engine = engine
        self._sealed = sealed
        self._origin: Path | str = snapshot or sealed.ref
        self._watched_bytes = watched_bytes  # None: the engine limits the disk itself
        self._sockets = sockets  # of another user than the box's
        self._up = True
        self._closed = False
        self._turn = asyncio.Lock()
        self._stops: set[asyncio.Event] = set()  # of execs: set for them to end
        self._pending: set[asyncio.Future[Any]] = set()

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout_s: float,
        stdin: bytes = b"",
        output_cap: int = OUTPUT_CAP,
    ) -> ExecResult:
        self._open("exec")
        stop = asyncio.Event()
        self._stops.add(stop)
        # A task of its own, which is told to end, not cancelled: the box must be seen to be empty.
        run = self._track(self._run([*_RUN, *argv], env, timeout_s, stdin, _Output(output_cap), stop))
        run.add_done_callback(lambda _: self._stops.discard(stop))
        try:
            result = await asyncio.shield(run)
        except asyncio.CancelledError:
            stop.set()
            await asyncio.wait({run})  # if cancelled again, close waits for it
            raise
        self._open("exec")
        return result

    async def put(self, path: str, data: bytes) -> None:
        base, relative = self._locate(path)
        self._open("put")
        owner = self._sealed.uid, self._sealed.gid
        await self._call(docker_files.write, self._engine, self.container, base, relative, data, owner)

    async def get(self, path: str) -> bytes:
        base, relative = self._locate(path)
        self._open("get")
        return await self._call(docker_files.read, self._engine, self.container, base, relative)

    async def diff(self) -> bytes:
        async with self._turn:
            self._open("diff")
            await self._kill()
            return await self._call(
                container_diff, self._engine, self.container, self._origin, WORKDIR, PATCH_CAP, cause="diff_failed"
            )

    async def close(self) -> None:
        self._closed = True
        for stop in self._stops:
            stop.set()
        await asyncio.shield(asyncio.ensure_future(self._close()))

    async def _close(self) -> None:
        if self._pending:
            await asyncio.wait(self._pending)
        if self.container:
            container, self.container = self.container, ""
            for pause in (0.5, 2.0, 0.0):
                try:
                    await self._engine.call(_remove, self._engine, container)
                    break
                except SandboxError as error:
                    logger.warning("removing a container: %s", error)
                    await asyncio.sleep(pause)
            else:  # and if there is no next one: after the end of this process, by its labels
                self._engine.owe(container)

    # --- one program

    async def _run(
        self,
        argv: list[str],
        env: Mapping[str, str],
        timeout_s: float,
        stdin: bytes,
        output: _Output,
        stop: asyncio.Event,
    ) -> ExecResult:
        async with self._turn:
            if stop.is_set():
                raise SandboxError("closed", "told to stop before it began")
            return await self._run_now(argv, env, timeout_s, stdin, output, stop)

    async def _run_now(
        self,
        argv: list[str],
        env: Mapping[str, str],
        timeout_s: float,
        stdin: bytes,
        output: _Output,
        stop: asyncio.Event,
    ) -> ExecResult:
        started = time.monotonic()
        client = self._engine.client
        if not self._up:
            await self._call(client.start, self.container, cause="exec_failed")
            self._up = True
        if self._sockets is not None:
            await asyncio.to_thread(_let_in, self._sockets)
        environment = {"HOME": HOME, "TMPDIR": TMPDIR, "LANG": "C.UTF-8", **env}
        made = await self._call(
            client.exec_create,
            self.container,
            argv,
            stdin=True,
            environment=[f"{key}={value}" for key, value in environment.items()],
            workdir=WORKDIR,
            cause="exec_failed",
        )
        stream = await self._engine.open_stream(made["Id"])
        tasks = [asyncio.ensure_future(stream.send(stdin)), asyncio.ensure_future(stream.receive(output.take))]
        try:
            code, killed = await self._watch(made["Id"], tasks[1], stop, started + timeout_s)
            await asyncio.wait(tasks[1:], timeout=_GRACE_S)  # what is on its way belongs to the result
        finally:
            for task in tasks:
                task.cancel()
            stream.close()
        return ExecResult(
            returncode=None if killed == "timeout" else _KILLED if killed else code,
            stdout=bytes(output.kept[1]),
            stderr=bytes(output.kept[2]),
            timed_out=killed == "timeout",
            truncated=output.truncated,
            wall_s=time.monotonic() - started,
        )

    async def _watch(
        self, exec_id: str, streamed: asyncio.Future[None], stop: asyncio.Event, deadline: float
    ) -> tuple[int, str]:
        """Wait for the end of a program and of all that it started; its exit code, and what killed the box if
        something did: "timeout", "stop", "disk" or "memory"."""
        pause, longest = _POLL_S
        stopped = asyncio.ensure_future(stop.wait())
        waiting: set[asyncio.Future[Any]] = {stopped, streamed}
        try:
            while True:
                left = max(0.0, deadline - time.monotonic())
                await asyncio.wait(waiting, timeout=min(pause, left), return_when=asyncio.FIRST_COMPLETED)
                pause = min(pause * 2, longest)
                if streamed in waiting and streamed.done():
                    # Most often the program's end, which the engine notes a moment later; but it may have closed its
                    # output, and others may hold that open after its end.
                    waiting.remove(streamed)
                    pause = 0.002
                state = await self._call(self._engine.client.exec_inspect, exec_id, cause="exec_failed")
                if not state["Running"]:
                    return await self._settle(state["ExitCode"])
                late = deadline <= time.monotonic()
                if stop.is_set() or late or await self._over_disk():
                    await self._kill()
                    return _KILLED, "stop" if stop.is_set() else "timeout" if late else "disk"
        finally:
            stopped.cancel()

    async def _settle(self, code: int | None) -> tuple[int, str]:
        """The program has ended: end what it left."""
        try:
            left = await self._call(self._engine.processes, self.container)
        except SandboxError:
            left = None
        if not left or (code == _KILLED and not await self._takes_programs()):
            state = (await self._call(self._engine.client.inspect_container, self.container))["State"]
            end = time.monotonic() + _GRACE_S
            while state["Running"] and time.monotonic() < end:  # as long as its first process takes to end
                await asyncio.sleep(0.05)
                state = (await self._call(self._engine.client.inspect_container, self.container))["State"]
            if state["Running"]:
                raise SandboxError("docker_failed", "the engine does not tell which processes a container has")
            self._up = False
            if state.get("OOMKilled"):
                return _KILLED, "memory"
            raise SandboxError("box_killed", "the container was ended from outside")
        if len(left) > 1:
            await self._kill()
        return (_KILLED if code is None else code), ""

    async def _takes_programs(self) -> bool:
        """Whether the container is not just ending: its first process is listed until all others are gone."""
        client = self._engine.client
        try:
            made = await self._call(client.exec_create, self.container, ["bash", "-c", ":"])
            await self._call(client.exec_start, made["Id"], detach=True)
        except SandboxError:
            return False
        return True

    async def _over_disk(self) -> bool:
        if self._watched_bytes is None:
            return False
        return await self._call(self._engine.changed_bytes, self.container) > self._watched_bytes

    async def _kill(self) -> None:
        """End every process in the box. Its files stay."""
        if self._up:
            await self._call(_kill, self._engine, self.container)
            self._up = False

    # --- helpers

    async def _call(self, function: Any, *args: Any, cause: str = "docker_failed", **options: Any) -> Any:
        return await asyncio.shield(self._track(self._engine.call(function, *args, cause=cause, **options)))

    def _track(self, work: Awaitable[T]) -> asyncio.Future[T]:
        """A future that `close` waits for."""
        future = asyncio.ensure_future(work)
        self._pending.add(future)
        future.add_done_callback(self._done)
        return future

    def _done(self, future: asyncio.Future[Any]) -> None:
        self._pending.discard(future)
        if not future.cancelled():
            future.exception()  # of one that nobody waits for any more

    def _open(self, verb: str) -> None:
        if self._closed:
            raise SandboxError("closed", f"{verb} after close")

    def _locate(self, path: str) -> tuple[str, PurePosixPath]:
        """The directory of the box and the path below it that `path` means."""
        full = PurePosixPath(WORKDIR, path)
        for base in (WORKDIR, HOME, TMPDIR):
            if full.is_relative_to(base):
                relative = full.relative_to(base)
                if relative.name and ".." not in relative.parts:
                    return base, relative
        raise ValueError(f"not a path below the work tree, HOME or TMPDIR of the sandbox: {path}")


class _Output:
    """Keeps the first bytes of each stream."""

    def __init__(self, cap: int) -> None:
        self.kept = {1: bytearray(), 2: bytearray()}
        self.truncated = False
        self._cap = cap

    def take(self, stream: int, data: bytes) -> None:
        kept = self.kept[stream]
        room = self._cap - len(kept)
        self.truncated |= len(data) > room
        kept += data[:room]


def _boot(
    engine: ContainerEngine,
    sealed: images.Sealed,
    snapshot: Path | None,
    limits: Limits,
    mounts: list[tuple[Path, str]],
    run: str,
) -> tuple[str, bool]:
    mounts = [(_HOSTS, "/etc/hosts"), *mounts]
    if engine.podman:  # over a file of its own, which a box could write to
        mounts.append((Path(os.devnull), "/run/.containerenv"))
    host = {
        "network_mode": "none",
        "cap_drop": ["ALL"],
        "security_opt": engine.security_opt,
        "mem_limit": limits.memory_bytes,
        "memswap_limit": limits.memory_bytes,
        "nano_cpus": int(min(limits.cpus, os.cpu_count() or 1) * 1e9),
        "pids_limit": limits.processes,
        "ulimits": engine.ulimits(
            core=0,
            cpu=limits.cpu_s,
            fsize=min(limits.file_bytes, limits.disk_bytes),
            nofile=limits.open_files,
        ),
        # A box can write to process 1's output, and the engine would log it to a disk that nobody limits.
        "log_config": {"Type": "none"},
        "mounts": [_mount(source, inside) for source, inside in mounts],
    }
    config = {
        "entrypoint": _IDLE,
        "command": [],
        "healthcheck": {"test": ["NONE"]},
        "labels": engine.labels(run),
        "hostname": "sandbox",
        # The runtime makes a network with a loopback by itself; the engine's own takes 80 ms more, and writes hosts.
        "network_disabled": True,
    }
    container, limited = engine.create(sealed.ref, host, limits.disk_bytes, **config)
    try:
        if snapshot is not None:
            owner = sealed.uid, sealed.gid
            engine.client.put_archive(container, "/", docker_files.packed(snapshot, WORKDIR, [HOME], owner))
        engine.client.start(container)
    except BaseException:
        _remove(engine, container)
        raise
    if snapshot is None:
        images.used(sealed)
    return container, limited


def _let_in(directory: Path) -> None:
    """Let another user connect to the sockets of a directory; a session's secret is what keeps strangers out."""
    directory.chmod(0o711)
    for path in directory.iterdir():
        if path.is_socket():
            path.chmod(0o666)


def _mount(source: Path, inside: str) -> dict[str, Any]:
    return {"Type": "bind", "Source": str(source), "Target": inside, "ReadOnly": True}


def _kill(engine: ContainerEngine, container: str) -> None:
    """Kill a container and see it dead; it may be dead already."""
    try:
        engine.client.kill(container)
    except APIError as error:
        if error.status_code not in (404, 409):
            raise
    engine.client.wait(container, timeout=_GRACE_S)


def _remove(engine: ContainerEngine, container: str) -> None:
    with contextlib.suppress(NotFound):
        engine.client.remove_container(container, force=True, v=True)
