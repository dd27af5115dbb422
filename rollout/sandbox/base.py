"""Do what is the same in all kinds of box: the life of an exec, paths, mounts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from rollout.sandbox import HOME, OUTPUT_CAP, TMPDIR, WORKDIR, ExecResult, SandboxError, infrastructure
from rollout.sandbox.process import Command

logger = logging.getLogger(__name__)


class BaseSandbox:
    """A BaseSandbox has the verbs of `rollout.sandbox.Sandbox`. A subclass per kind of box defines its last methods,
    which only this class calls.

    Each exec is an asyncio task that is never cancelled but told to stop: it must see its processes to their end.
    in_turn: programs (and diffs) run one after another. workdir, home, tmpdir: without them those of boxes that have a
    root file system of their own.
    """

    relays = False

    def __init__(self, workdir: str = WORKDIR, home: str = HOME, tmpdir: str = TMPDIR, *, in_turn: bool) -> None:
        self.workdir, self.home, self.tmpdir = workdir, home, tmpdir
        self.renewed: list[str] = []
        self._closed = False
        self._turn: contextlib.AbstractAsyncContextManager = asyncio.Lock() if in_turn else contextlib.nullcontext()
        self._running: dict[asyncio.Task[ExecResult], asyncio.Future[None]] = {}

    @infrastructure("exec_failed")
    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout_s: float,
        stdin: bytes = b"",
        output_cap: int = OUTPUT_CAP,
    ) -> ExecResult:
        """Run a program; see `Sandbox.exec`."""
        self._check_open("exec")
        command = Command(list(argv), {**self.environment(), **env}, timeout_s, stdin, output_cap)
        task = asyncio.ensure_future(self._exec(command))
        self._running[task] = command.stop
        task.add_done_callback(self._ended)
        try:
            result = await asyncio.shield(task)
        except asyncio.CancelledError:
            await _stop({task: command.stop})
            raise
        self._check_open("exec")  # closing ends programs, and what they did until then is no result
        return result

    @infrastructure("put_failed")
    async def put(self, path: str, data: bytes) -> None:
        """Write a file; see `Sandbox.put`."""
        base, relative = self._locate(path)
        self._check_open("put")
        await self.write_file(base, relative, data)

    @infrastructure("put_failed")
    async def renew(self, path: str, files: Mapping[str, bytes]) -> None:
        """Make a directory anew; see `Sandbox.renew`."""
        self._check_open("renew")
        await self.write_directory(path, files)
        self.renewed.append(path)

    @infrastructure("get_failed")
    async def get(self, path: str) -> bytes:
        """Read a file; see `Sandbox.get`."""
        base, relative = self._locate(path)
        self._check_open("get")
        return await self.read_file(base, relative)

    @infrastructure("diff_failed")
    async def diff(self) -> bytes:
        """Return what changed in the work tree; see `Sandbox.diff`."""
        async with self._turn:
            self._check_open("diff")
            return await self.changes()

    async def close(self) -> None:
        """End all processes and delete all files; see `Sandbox.close`."""
        self._closed = True
        await asyncio.shield(asyncio.ensure_future(self._close()))

    async def _close(self) -> None:
        await _stop(self._running)
        try:
            await self.remove()
        except (OSError, RuntimeError, SandboxError) as error:
            logger.warning("a box is not removed before this process ends: %s", error)

    async def _exec(self, command: Command) -> ExecResult:
        async with self._turn:
            if command.stop.done():
                raise SandboxError("closed", "told to stop before it began")
            return await self.run_program(command)

    def _ended(self, task: asyncio.Task[ExecResult]) -> None:
        del self._running[task]
        if not task.cancelled():
            task.exception()  # perhaps nobody waits for it any more

    def _check_open(self, verb: str) -> None:
        if self._closed:
            raise SandboxError("closed", f"{verb} after close")

    def _locate(self, path: str) -> tuple[str, PurePosixPath]:
        """Return which of workdir, home, tmpdir and renewed directories `path` lies in, and the path below it."""
        full = PurePosixPath(self.workdir, path)
        for base in (self.workdir, self.home, self.tmpdir, *self.renewed):
            if full.is_relative_to(base):
                relative = full.relative_to(base)
                if relative.name and ".." not in relative.parts:
                    return base, relative
        raise ValueError(f"not a path below the work tree, HOME or TMPDIR of the sandbox: {path}")

    def _part(self, base: str) -> str:
        """Return which part of the box is at workdir, home or tmpdir: tree, home or tmp."""
        return {self.workdir: "tree", self.home: "home", self.tmpdir: "tmp"}[base]

    # --- what a kind of box defines

    def environment(self) -> dict[str, str]:
        """Return the variables that every program gets."""
        return {"HOME": self.home, "TMPDIR": self.tmpdir, "LANG": "C.UTF-8"}

    async def run_program(self, command: Command) -> ExecResult:
        """Run one program, and end everything that it started, also when `command.stop` completes."""
        raise NotImplementedError

    async def write_file(self, base: str, relative: PurePosixPath, data: bytes) -> None:
        """Write a file below `base`, which is workdir, home or tmpdir, as `Sandbox.put` says."""
        raise NotImplementedError

    async def read_file(self, base: str, relative: PurePosixPath) -> bytes:
        """Return the contents of a file below `base`, as `Sandbox.get` says."""
        raise NotImplementedError

    async def write_directory(self, path: str, files: Mapping[str, bytes]) -> None:
        """Make a directory anew, as `Sandbox.renew` says."""
        raise SandboxError("put_failed", f"boxes of this kind cannot make {path} anew")

    async def changes(self) -> bytes:
        """Return what changed in the work tree, as `Sandbox.diff` says. No program runs meanwhile if `in_turn`."""
        raise NotImplementedError

    async def remove(self) -> None:
        """Delete the box, in which no exec runs any more. Called by each `close`; raises nothing."""
        raise NotImplementedError


async def _stop(running: Mapping[asyncio.Task[ExecResult], asyncio.Future[None]]) -> None:
    """End running execs, and wait until they have ended."""
    running = dict(running)
    for stop in running.values():
        if not stop.done():
            stop.set_result(None)
    if running:  # wait, not gather: a second cancellation must not reach them
        await asyncio.wait(running)


def mounts_of(
    snapshot: Path | None, binds: Mapping[Path, str] | None, socket_dir: Path | None
) -> list[tuple[Path, str]]:
    """Return what a new box shows of this machine, as (path here, path inside).

    See the boot functions for the parameters. Raises SandboxError missing_snapshot or missing_bind for what does not
    exist.
    """
    if snapshot is not None and not snapshot.is_dir():
        raise SandboxError("missing_snapshot", str(snapshot))
    mounts = [(path.absolute(), inside) for path, inside in (binds or {}).items()]
    if socket_dir is not None:
        mounts.append((socket_dir.absolute(), str(socket_dir.absolute())))
    for path, _ in mounts:
        if not path.exists():
            raise SandboxError("missing_bind", str(path))
    return mounts
