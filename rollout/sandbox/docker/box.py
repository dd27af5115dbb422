"""A sandbox in a container, on any engine that speaks Docker's API and runs on this machine (or one of a `fleet`).

`boot_docker` starts a container from the sealed image of a task (see `rollout.sandbox.docker.images`): it has no
network, no capabilities, no new privileges, and the image's own user. All `Limits` are enforced. Process 1 does
nothing; programs are execs beside it. Of the host a box sees only the caller's read-only binds and the socket
directory.

Nothing outlives an exec: its shell kills what is left before it ends, the engine is asked whether that was all, and if
not the container is killed. The next exec starts it again; its files stay. Programs run one after another.

Where the storage driver has no quotas, the size of a box is checked about once a second while a program runs. A box
over its disk limit is killed: the program ends with exit code 137, as it does when memory runs out. No single file can
grow over the limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from rollout.sandbox import RENEWED_CAP, ExecResult, Limits, SandboxError, infrastructure
from rollout.sandbox.base import BaseSandbox, mounts_of
from rollout.sandbox.docker import files as docker_files
from rollout.sandbox.docker import images
from rollout.sandbox.docker.diff import container_diff
from rollout.sandbox.docker.engine import ContainerEngine, get_engine
from rollout.sandbox.process import Command, Output
from rollout.sandbox.pulls import Pulls

# Process 1 has no signal handlers, so no signal from the box can end it. Its user is not that of the programs, which
# have no capabilities even as root, so none can trace it. With SIGCHLD ignored the kernel reaps orphans.
_KEEPER = "65533:65533"
_IDLE = ["bash", "-c", 'trap "" CHLD; exec sleep 2147483647']
# -1: all processes but process 1 and the shell itself; they have the same user.
_RUN = ["/bin/sh", "-c", '"$@"; code=$?; kill -9 -1 2>/dev/null; exit $code', "sh"]
_KILLED = 137
_POLL_S = (0.2, 1.0)  # between two looks at a running program: at first, at most
_GRACE_S = 10.0
_HOSTS = Path(__file__).with_name("hosts")

logger = logging.getLogger(__name__)


@infrastructure("boot_failed")
async def boot_docker(
    source: images.Source,
    *,
    engine: ContainerEngine | None = None,
    snapshot: Path | None = None,
    limits: Limits = Limits(),  # noqa: B008  frozen
    binds: Mapping[Path, str] | None = None,
    socket_dir: Path | None = None,
    run: str = "",
    budget_bytes: int | None = None,
    pulls: Pulls = Pulls(),  # noqa: B008  frozen
    warm: int = 0,
    scratch: str | None = None,
) -> DockerSandbox:
    """Return a fresh sandbox on the sealed image of `source`, which is pulled and sealed first if it is not there.

    engine: None: this machine's. snapshot: a directory with a git repository, small and sealed already; the work tree
    is a copy of it, and the source's image has only the tools. binds: host path -> path inside, read-only. socket_dir:
    a host directory that appears at its own path inside; unix sockets in it can be connected to. run: a name for the
    container's labels. budget_bytes, pulls: for images (see `images.sealed`). warm, scratch: how many containers the
    engine has ready, and for sockets below which directory (see `warm.Spares`). The caller closes the sandbox.
    Raises SandboxError: no_engine, missing_image, missing_snapshot, seal_failed, missing_bind, no_space, boot_failed.
    """
    mounts = await asyncio.to_thread(mounts_of, snapshot, binds, socket_dir)
    sockets = mounts.pop()[0] if socket_dir else None
    engine = engine or await asyncio.to_thread(get_engine)
    for attempt in (0, 1):
        if snapshot is None:
            sealed = await engine.call(images.sealed, engine, source, budget_bytes, pulls)
        else:
            sealed = await engine.call(images.plain, engine, source.image)
        cold = functools.partial(_boot, engine, sealed, snapshot, limits, tuple(mounts), run)
        booting = asyncio.ensure_future(
            engine.call(engine.spares.boot, cold, sockets, warm, scratch, cause="boot_failed")
        )
        try:
            container, limited = await asyncio.shield(booting)
            watched = None if limited else limits.disk_bytes
            return DockerSandbox(engine, container, sealed, snapshot, watched, sockets)
        except asyncio.CancelledError:
            # The thread cannot be stopped, so wait for what it makes and remove that.
            with contextlib.suppress(SandboxError):
                container, _ = await booting
                await engine.call(engine.remove, container)
                if sockets is not None:
                    await engine.call(engine.machine.unshare, sockets)
            raise
        except SandboxError as error:
            if error.cause != "missing_image" or attempt:
                raise
            images.forget(engine, source)  # somebody has removed the sealed image: seal it again
    raise AssertionError("not reached")


class DockerSandbox(BaseSandbox):
    """This sandbox is a container; see `boot_docker`."""

    def __init__(
        self,
        engine: ContainerEngine,
        container: str,
        sealed: images.SealedImage,
        snapshot: Path | None,
        watched_bytes: int | None,
        sockets: Path | None,
    ) -> None:
        super().__init__(sealed.workdir, in_turn=True)
        self.container = container
        self._engine = engine
        self._sealed = sealed
        self._origin: Path | str = snapshot or sealed.ref
        self._watched_bytes = watched_bytes  # None: the engine limits the disk itself
        self._sockets = sockets
        self.relays = engine.relays
        self._up = True
        self._pending: set[asyncio.Future[Any]] = set()  # calls to the engine

    async def write_file(self, base: str, relative: PurePosixPath, data: bytes) -> None:
        """Write a file; see `BaseSandbox.write_file`."""
        owner = self._sealed.uid, self._sealed.gid
        what = docker_files.write, self._engine, self.container, base, relative, data, owner
        await self._call(*what, cause="put_failed")

    async def read_file(self, base: str, relative: PurePosixPath) -> bytes:
        """Read a file; see `BaseSandbox.read_file`."""
        most = RENEWED_CAP if base in self.renewed else None
        return await self._call(docker_files.read, self._engine, self.container, base, relative, most)

    async def write_directory(self, path: str, files: Mapping[str, bytes]) -> None:
        """Make a directory anew; see `BaseSandbox.write_directory`."""
        owner = self._sealed.uid, self._sealed.gid
        await self._call(docker_files.renew, self._engine, self.container, path, files, owner, cause="put_failed")

    async def changes(self) -> bytes:
        """Kill the container, and let the engine say what changed."""
        await self._kill()
        what = self._engine, self.container, self._origin, self.workdir
        return await self._call(container_diff, *what, cause="diff_failed")

    async def remove(self) -> None:
        """Remove the container; if the engine does not, it is owed."""
        if self._pending:
            await asyncio.wait(self._pending)
        if not self.container:
            return
        container, self.container = self.container, ""
        for pause in (0.5, 2.0, 0.0):
            try:
                await self._engine.call(self._engine.remove, container)
                if self._sockets is not None:
                    await self._engine.call(self._engine.machine.unshare, self._sockets)
                return
            except SandboxError as error:
                logger.warning("removing a container: %s", error)
                await asyncio.sleep(pause)
        self._engine.owe(container)  # if none is made after it, another process finds it by its labels

    # --- one program

    async def run_program(self, command: Command) -> ExecResult:
        """Run one program in the container; see `BaseSandbox.run_program`."""
        started = time.monotonic()
        client = self._engine.client
        if not self._up:
            await self._call(client.start, self.container, cause="exec_failed")
            self._up = True
        if self._sockets is not None:
            await self._call(self._engine.machine.let_in, self._sockets, self._sealed.uid, cause="exec_failed")
        made = await self._call(
            client.exec_create,
            self.container,
            [*_RUN, *command.argv],
            stdin=True,
            environment=[f"{key}={value}" for key, value in command.env.items()],
            workdir=self.workdir,
            user=f"{self._sealed.uid}:{self._sealed.gid}",
            cause="exec_failed",
        )
        stream = await self._engine.open_stream(made["Id"])
        output = Output(command.output_cap)
        tasks = [asyncio.ensure_future(stream.send(command.stdin)), asyncio.ensure_future(stream.receive(output.take))]
        try:
            code = await self._watch(made["Id"], tasks[1], command.stop, started + command.timeout_s)
            await asyncio.wait(tasks[1:], timeout=_GRACE_S)  # what is on its way belongs to the result
        finally:
            for task in tasks:
                task.cancel()
            stream.close()
        return output.result(code, code is None, started)

    async def _watch(
        self, exec_id: str, streamed: asyncio.Future[None], stop: asyncio.Future[None], deadline: float
    ) -> int | None:
        """Wait for the end of a program and of everything that it started; returns its exit code, None at the deadline.

        The code is 137 if the box was killed: told to stop, over its disk limit, or out of memory.
        """
        pause, longest = _POLL_S
        waiting: set[asyncio.Future[Any]] = {stop, streamed}
        while True:
            left = max(0.0, deadline - time.monotonic())
            await asyncio.wait(waiting, timeout=min(pause, left), return_when=asyncio.FIRST_COMPLETED)
            pause = min(pause * 2, longest)
            if streamed in waiting and streamed.done():
                # Most often this is the program's end, which the engine notes a moment later. But the program may have
                # closed its output and run on, or others may hold it open after its end.
                waiting.remove(streamed)
                pause = 0.002
            state = await self._call(self._engine.client.exec_inspect, exec_id, cause="exec_failed")
            # Docker says that it has started a program before it does so.
            begun = state["Running"] or state["ExitCode"] is not None or streamed.done()
            if begun and not state["Running"]:
                return await self._settle(state["ExitCode"])
            late = deadline <= time.monotonic()
            if not begun and not late:
                continue
            if late and (await self._call(self._engine.state, self.container)).get("Paused"):
                raise SandboxError("box_killed", "the container is paused, from outside")
            if stop.done() or late or await self._over_disk():
                await self._kill()
                return None if late and not stop.done() else _KILLED

    async def _settle(self, code: int | None) -> int:
        """End what a program has left when it ended with this code; returns the code as `_watch` does."""
        try:
            left = await self._call(self._engine.processes, self.container)
        except SandboxError:
            left = None
        if not left or (code == _KILLED and not await self._takes_programs()):
            return await self._out_of_memory(bool(left))
        if len(left) > 1:
            await self._kill()
        return _KILLED if code is None else code

    async def _out_of_memory(self, listed: bool) -> int:
        """Return the exit code of a program whose container is ending because memory ran out; raise SandboxError if it
        ends for another reason. One that does not end, whose processes the engine has ``listed``, has as many of them
        as it may, and is ended."""
        end = time.monotonic() + _GRACE_S  # its first process takes a moment to end
        while (state := await self._call(self._engine.state, self.container))["Running"]:
            if time.monotonic() > end and listed:
                await self._kill()
                return _KILLED
            if time.monotonic() > end:
                raise SandboxError("docker_failed", "the engine does not tell which processes a container has")
            await asyncio.sleep(0.05)
        self._up = False
        if not state.get("OOMKilled"):
            raise SandboxError("box_killed", "the container was ended from outside")
        return _KILLED

    async def _takes_programs(self) -> bool:
        """Return whether a container takes another program.

        One that is just ending does not, though its first process is listed until all others are gone.
        """
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
            await self._call(self._engine.kill, self.container)
            self._up = False

    async def _call(self, function: Any, *args: Any, cause: str = "docker_failed", **options: Any) -> Any:
        """Call the engine in a thread; if this is cancelled, `remove` waits for the end of the call."""
        future = asyncio.ensure_future(self._engine.call(function, *args, cause=cause, **options))
        self._pending.add(future)
        future.add_done_callback(self._called)
        return await asyncio.shield(future)

    def _called(self, future: asyncio.Future[Any]) -> None:
        self._pending.discard(future)
        if not future.cancelled():
            future.exception()  # perhaps nobody waits for it any more


def _boot(
    engine: ContainerEngine,
    sealed: images.SealedImage,
    snapshot: Path | None,
    limits: Limits,
    mounts: tuple[tuple[Path, str], ...],
    run: str,
    sockets: Path | None,
    at: str | None = None,
) -> tuple[str, bool]:
    """Start a container; returns its id and whether the engine limits its disk. at: where it shows the sockets, None:
    at their own path."""
    shown = [(engine.machine.shown(path), inside) for path, inside in [(_HOSTS, "/etc/hosts"), *mounts]]
    if engine.podman:  # podman puts a file there that a box could write to
        shown.append((os.devnull, "/run/.containerenv"))
    if sockets is not None:
        shown.append((engine.machine.shared(sockets), str(at or sockets)))
    host = {
        "network_mode": "none",
        "cap_drop": ["ALL"],
        "security_opt": engine.security_opt,
        "mem_limit": limits.memory_bytes,
        "memswap_limit": limits.memory_bytes,
        "nano_cpus": int(min(limits.cpus, engine.machine.cpus) * 1e9),
        "pids_limit": limits.processes,
        "ulimits": engine.ulimits(
            core=0,
            cpu=limits.cpu_s,
            fsize=min(limits.file_bytes, limits.disk_bytes),
            nofile=limits.open_files,
        ),
        # A box can write to the output of process 1, and the engine would log that to a disk that nobody limits.
        "log_config": {"Type": "none"},
        "mounts": [{"Type": "bind", "Source": path, "Target": inside, "ReadOnly": True} for path, inside in shown],
    }
    config = {
        "entrypoint": _IDLE,
        "user": _KEEPER,
        "command": [],
        "healthcheck": {"test": ["NONE"]},
        "labels": engine.labels(run),
        "hostname": "sandbox",
        # The runtime makes a network with a loopback anyway; the engine's own takes 80 ms more, and writes hosts.
        "network_disabled": True,
    }
    container, limited = engine.create(sealed.ref, host, limits.disk_bytes, **config)
    try:
        if snapshot is not None:
            owner = sealed.uid, sealed.gid
            engine.client.put_archive(container, "/", docker_files.packed(snapshot, owner))
        engine.client.start(container)
    except BaseException:
        engine.remove(container)
        raise
    if snapshot is None:
        images.used(engine, sealed)
    return container, limited
