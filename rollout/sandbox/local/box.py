"""Sandboxes on this machine, without a container engine.

`boot_local` copies the snapshot to a private temporary directory and runs programs on the copy:

* isolation "bwrap": in a bubblewrap namespace; the work tree is /testbed, there is no network, and of
  the host only read-only system directories, the Python in use and the caller's binds are visible.
* isolation "none": as ordinary processes of this user, in the temporary directory itself. Files,
  processes and network of the host are NOT protected: for development and trusted policies only.
* isolation "auto": bwrap where it works, else none.

Either way nothing that an exec started outlives it, the environment is built from nothing, no
descriptor is inherited, CPU time, file size and open files are limited, and `close` deletes everything.
Memory and the total size of the box are not limited; address space cannot be, because the agent's
binary reserves far more than it uses.

A process killed before it could close its sandboxes leaves their directories behind, and rarely a program: bwrap's
end with their parent, but not in the milliseconds in which bwrap starts them. `sweep` ends and deletes what is left;
the next process that boots a sandbox under the same TMPDIR calls it.
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
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from rollout.sandbox import ExecResult, Limits, SandboxError, process
from rollout.sandbox.directory import (
    Command,
    DirectorySandbox,
    built,
    check_mounts,
    kill_group,
    kill_strays,
    make_root,
    ulimits,
)
from rollout.sandbox.local import bwrap
from rollout.sandbox.treediff import Directory, Tree

logger = logging.getLogger(__name__)

Isolation = Literal["auto", "bwrap", "none"]

# The program is a child of this shell: as process 1 of its namespace it would ignore most signals.
_RUN = ["/bin/sh", "-c", '"$@"; exit $?', "sh"]


async def boot_local(
    snapshot: Path,
    *,
    isolation: Isolation = "auto",
    limits: Limits = Limits(),  # noqa: B008  frozen
    binds: Mapping[Path, str] | None = None,
    socket_dir: Path | None = None,
) -> LocalSandbox:
    """A fresh sandbox on a copy of `snapshot` (a directory with the task's git repository).

    binds: host path -> path inside, read-only; without isolation both must be the same (ValueError).
    socket_dir: a host directory that appears at its own path inside; unix sockets in it can be
    connected to. The caller closes the sandbox. Call it in the thread that stays: with bwrap a box
    dies with the thread that runs its event loop.
    Raises SandboxError: missing_snapshot, missing_bind, no_bwrap, no_space, boot_failed.
    """
    mounts = [(path.absolute(), inside) for path, inside in (binds or {}).items()]
    if socket_dir is not None:
        mounts.append((socket_dir.absolute(), str(socket_dir.absolute())))
    isolated = await asyncio.to_thread(_isolated, isolation)
    root = await built(lambda: _build(snapshot, isolated, mounts))
    return LocalSandbox(snapshot, root, mounts, isolated, limits)


class LocalSandbox(DirectorySandbox):
    """See `boot_local` and the protocol in `rollout.sandbox`."""

    def __init__(
        self, snapshot: Path, root: Path, mounts: list[tuple[Path, str]], isolated: bool, limits: Limits
    ) -> None:
        inside = (bwrap.WORKDIR, bwrap.HOME, bwrap.TMPDIR)
        plain = (str(root / "tree"), str(root / "home"), str(root / "tmp"))
        super().__init__(root, *(inside if isolated else plain), strays=not isolated)
        self.isolation: Isolation = "bwrap" if isolated else "none"
        self._snapshot = snapshot
        self._mounts = mounts
        self._limit = _limit_command(limits, isolated)

    def _environment(self) -> dict[str, str]:
        path = f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin"
        return {"PATH": path, "HOME": self.home, "TMPDIR": self.tmpdir, "LANG": "C.UTF-8"}

    def _origin(self) -> Tree:
        return Directory(os.fsencode(self._snapshot))

    async def _run(self, command: Command) -> ExecResult:
        run = self._run_isolated if self.isolation == "bwrap" else self._run_plain
        return await run(replace(command, argv=[*self._limit, *command.argv]))

    async def _run_plain(self, command: Command) -> ExecResult:
        async def settle(pid: int) -> None:
            kill_group(pid)
            await asyncio.to_thread(kill_strays, self._root)

        return await process.run(
            command.argv,
            cwd=self.workdir,
            env=command.env,
            stdin=command.stdin,
            timeout_s=command.timeout_s,
            stop=command.stop,
            output_cap=command.output_cap,
            pass_fds=(),
            kill=kill_group,
            settle=settle,
        )

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
            # Process 1 of the namespace: bwrap then sees it end with all the others, and ends too.
            inner = re.search(rb'"child-pid": (\d+)', read_status())
            if inner is None:
                self._may_stray = True
                kill_group(pid)
            else:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(inner[1]), signal.SIGKILL)

        async def settle(pid: int) -> None:
            kill_group(pid)

        # bwrap must not load what LD_* names inside the box, so these are set by it, not for it.
        loader = [(key, value) for key, value in command.env.items() if key.startswith("LD_")]
        outer = {key: value for key, value in command.env.items() if not key.startswith("LD_")}
        try:
            result = await process.run(
                [*bwrap.command(self._root, self._mounts, loader, status_write), *_RUN, *command.argv],
                cwd="/",
                env=outer,
                stdin=command.stdin,
                timeout_s=command.timeout_s,
                stop=command.stop,
                output_cap=command.output_cap,
                pass_fds=(status_write,),
                kill=kill,
                settle=settle,
            )
            if not killed and b'"exit-code"' not in read_status():
                raise SandboxError("exec_failed", result.stderr[-500:].decode(errors="replace").strip())
            return result
        except asyncio.CancelledError:  # the loop ends, perhaps while the process is starting
            self._may_stray = True
            raise
        finally:
            os.close(status_read)
            os.close(status_write)


def _build(snapshot: Path, isolated: bool, mounts: list[tuple[Path, str]]) -> Path:
    """Make the directories of a box; returns their root."""
    check_mounts(mounts)
    for source, inside in mounts:
        if not isolated and str(source) != inside:
            raise ValueError(f"without isolation {source} cannot appear as {inside}")
    if not snapshot.is_dir():
        raise SandboxError("missing_snapshot", str(snapshot))

    def fill(root: Path) -> None:
        shutil.copytree(snapshot, root / "tree", symlinks=True)
        if isolated:
            bwrap.prepare(root)

    return make_root(fill)


def _isolated(isolation: Isolation) -> bool:
    if isolation == "bwrap" and not bwrap.available():
        raise SandboxError("no_bwrap", "bubblewrap is not installed or may not make namespaces here")
    if isolation == "none" or not bwrap.available():
        _warn_unprotected()
        return False
    return True


@functools.cache
def _warn_unprotected() -> None:
    logger.warning(
        "sandboxes run without isolation: the agent can read and write this user's files, reach the "
        "network and signal other processes of this user; install bubblewrap to protect them"
    )


def _limit_command(limits: Limits, isolated: bool) -> list[str]:
    """A prefix that runs the rest of the command line under the limits."""
    prlimit = shutil.which("prlimit")
    if prlimit is None:
        return ["/bin/sh", "-c", ulimits(limits) + 'exec "$@"', "sh"]
    command = [prlimit, "--core=0", f"--cpu={limits.cpu_s}", f"--fsize={limits.file_bytes}"]
    command.append(f"--nofile={limits.open_files}")
    if isolated and os.geteuid() != 0:
        command.append(f"--nproc={limits.processes}")
    return [*command, "--"]
