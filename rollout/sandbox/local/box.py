"""A local sandbox: on this machine, without a container engine.

`boot_local` copies the snapshot to a private temporary directory and runs programs on the copy:

* isolation "bwrap": in a bubblewrap namespace. The work tree is /testbed, there is no network, and of the host only
  read-only system directories, the Python in use and the caller's binds are visible.
* isolation "none": as ordinary processes of this user, in the temporary directory itself. Files, processes and network
  of the host are NOT protected, so this is for development and trusted policies only.
* isolation "auto": bwrap where it works, else none.

Either way nothing that an exec started outlives it, the environment is built from nothing, no descriptor is inherited,
and `close` deletes everything.

Limits of each process are enforced: CPU time, file size and open files. Address space cannot be limited, because the
agent's binary reserves far more than it uses. The memory and processes of the whole box are limited by a control group
where these are delegated to this user (`cgroup`). Elsewhere, `watch` checks them about once a second while a program
runs; it checks the disk on every machine. A program that is over a limit is killed with all that it started, and its
files stay. CPUs are not limited.

A process that is killed before it could close its sandboxes leaves their directories behind, and rarely a program: a
bwrap ends with its parent, but not in the milliseconds in which it starts (see `directory.sweep`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import re
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from rollout.sandbox import HOME, TMPDIR, WORKDIR, ExecResult, Limits, SandboxError, infrastructure, process
from rollout.sandbox.base import mounts_of
from rollout.sandbox.directory import DirectorySandbox, built, kill_strays, make_root, ulimits
from rollout.sandbox.local import bwrap, cgroup, watch
from rollout.sandbox.process import Command
from rollout.sandbox.treediff import Directory, Origin

logger = logging.getLogger(__name__)

Isolation = Literal["auto", "bwrap", "none"]


@infrastructure("boot_failed")
async def boot_local(
    snapshot: Path,
    *,
    isolation: Isolation = "auto",
    limits: Limits = Limits(),  # noqa: B008  frozen
    binds: Mapping[Path, str] | None = None,
    socket_dir: Path | None = None,
) -> LocalSandbox:
    """Return a fresh sandbox on a copy of `snapshot` (a directory with the task's git repository).

    binds: host path -> path inside, read-only; without isolation both must be the same (ValueError).
    socket_dir: a host directory that appears at its own path inside; unix sockets in it can be connected to.
    The caller closes the sandbox. Call this in a thread that stays: with bwrap a box dies with the thread that runs
    its event loop.
    Raises SandboxError: missing_snapshot, missing_bind, no_bwrap, no_space, boot_failed.
    """
    mounts = await asyncio.to_thread(mounts_of, snapshot, binds, socket_dir)
    isolated = await asyncio.to_thread(_isolated, isolation)
    await asyncio.to_thread(cgroup.parent)  # it runs a program, the first time
    for source, inside in mounts:
        if not isolated and str(source) != inside:
            raise ValueError(f"without isolation {source} cannot appear as {inside}")

    base = 0

    def fill(root: Path) -> None:
        nonlocal base
        shutil.copytree(snapshot, root / "tree", symlinks=True)
        if isolated:
            bwrap.prepare(root)
        base = watch.directory_bytes(root)

    root = await built(lambda: make_root(fill))
    return LocalSandbox(snapshot, root, mounts, isolated, limits, base)


class LocalSandbox(DirectorySandbox):
    """This sandbox is directories and processes of this machine; see `boot_local`."""

    def __init__(
        self, snapshot: Path, root: Path, mounts: list[tuple[Path, str]], isolated: bool, limits: Limits, base: int
    ) -> None:
        plain = (str(root / "tree"), str(root / "home"), str(root / "tmp"))
        places = (WORKDIR, HOME, TMPDIR) if isolated else plain
        # Without isolation, what a program leaves behind cannot be told from what another one is doing.
        super().__init__(root, *places, strays=not isolated, in_turn=not isolated)
        self.isolation: Isolation = "bwrap" if isolated else "none"
        self._snapshot = snapshot
        self._mounts = mounts
        self._group = cgroup.made(limits)
        unwatched = {"memory_bytes": sys.maxsize, "processes": sys.maxsize} if self._group else {}
        watched = replace(limits, **unwatched)
        self._over = functools.partial(watch.until_over, root=root, limits=watched, base=base)
        # With bwrap the program is a child of this shell: as process 1 of its namespace it would ignore most signals.
        program = '"$@"; exit $?' if isolated else 'exec "$@"'
        limits = replace(limits, file_bytes=min(limits.file_bytes, limits.disk_bytes))
        limiting = ulimits(limits, processes=isolated and os.geteuid() != 0)
        self._shell = ["/bin/sh", "-c", limiting + program, "sh"]

    def environment(self) -> dict[str, str]:
        """Return the variables that every program gets, with the PATH of this Python."""
        return {"PATH": f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin", **super().environment()}

    def origin(self) -> Origin:
        """Return the snapshot."""
        return Directory(os.fsencode(self._snapshot))

    async def run_program(self, command: Command) -> ExecResult:
        """Run one program, in a namespace or as an ordinary process; see `BaseSandbox.run_program`."""
        command = replace(command, argv=[*self._shell, *command.argv])
        if self.isolation == "bwrap":
            return await self._run_isolated(command)
        command = replace(command, argv=self._entered(command.argv))
        settle = functools.partial(asyncio.to_thread, self._end)
        return await process.run(command, cwd=self.workdir, settle=settle, over=self._over)

    def _entered(self, argv: Sequence[str]) -> Sequence[str]:
        return self._group.entered(argv) if self._group else argv

    def _end(self) -> None:
        """End what a program without isolation has left; no other runs in this box."""
        if self._group:
            self._group.end()
        kill_strays(self.root)

    async def remove(self) -> None:
        """Delete the box and its control group."""
        if self._group:
            await asyncio.to_thread(self._group.remove)
        await super().remove()

    async def _run_isolated(self, command: Command) -> ExecResult:
        status_read, status_write = os.pipe()
        os.set_blocking(status_read, False)
        status = b""
        killed = False

        def read_status() -> bytes:
            nonlocal status
            with contextlib.suppress(BlockingIOError):
                status += os.read(status_read, 4096)
            return status

        def kill(pid: int) -> None:
            nonlocal killed
            killed = True
            # Kill process 1 of the namespace: bwrap then sees it end with all the others, and ends too.
            inner = re.search(rb'"child-pid": (\d+)', read_status())
            if inner is None:
                self._may_stray = True
                process.kill_group(pid)
            else:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(inner[1]), signal.SIGKILL)

        # bwrap itself must not load what LD_* names in the box, so it sets these variables for the program only.
        loader = {key: value for key, value in command.env.items() if key.startswith("LD_")}
        env = {key: value for key, value in command.env.items() if key not in loader}
        try:
            with bwrap.filtering() as filters:
                argv = [*bwrap.command(self.root, self._mounts, loader, status_write, filters), *command.argv]
                command = replace(command, argv=self._entered(argv), env=env)
                overruns = self._group.overruns() if self._group else 0
                result = await process.run(command, pass_fds=[status_write, *filters], kill=kill, over=self._over)
            if self._group and self._group.overruns() > overruns:  # bwrap, too, is killed in the group
                return result
            if not killed and b'"exit-code"' not in read_status():
                raise SandboxError("exec_failed", result.stderr[-500:].decode(errors="replace").strip())
            return result
        except asyncio.CancelledError:  # the event loop ends, perhaps while the process is starting
            self._may_stray = True
            raise
        finally:
            os.close(status_read)
            os.close(status_write)


def _isolated(isolation: Isolation) -> bool:
    problem = "" if isolation == "none" else bwrap.problem()
    if problem and isolation == "bwrap":
        raise SandboxError("no_bwrap", problem)
    if problem or isolation == "none":
        _warn_unprotected(problem)
        return False
    return True


@functools.cache
def _warn_unprotected(problem: str) -> None:
    logger.warning(
        "sandboxes run without isolation: the agent can read and write this user's files, reach the "
        "network and signal other processes of this user%s",
        f"; {problem}" if problem else "",
    )
