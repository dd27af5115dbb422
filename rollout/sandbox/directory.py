"""Boxes whose files are directories of this machine, whatever runs the programs in them.

A process that is killed before it could close its sandboxes leaves their directories behind, and sometimes a program.
`sweep` ends and deletes what is left; every process calls it before it boots its first sandbox, and finds what others
left below the same TMPDIR.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import errno
import fcntl
import functools
import logging
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath

from rollout.sandbox import PATCH_CAP, Limits, SandboxError, failed, files
from rollout.sandbox.base import BaseSandbox
from rollout.sandbox.ignored import IgnoredPaths
from rollout.sandbox.treediff import Directory, Origin, patch_between

logger = logging.getLogger(__name__)

_WORKSPACE = "code-rl-sandboxes-"
_GONE_S = 5.0  # how long killed processes may take to disappear
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)  # this process or machine has no more of them


class DirectorySandbox(BaseSandbox):
    """This box has its files in directories of this machine: tree/, home/ and tmp/ below `root`, which it owns.

    A kind of box adds how a program is run (`run_program`) and what the tree was at first (`origin`). strays: whether
    processes may be left that only their environment or working directory tells apart from others.
    """

    def __init__(self, root: Path, workdir: str, home: str, tmpdir: str, *, strays: bool, in_turn: bool) -> None:
        super().__init__(workdir, home, tmpdir, in_turn=in_turn)
        self.root = root
        self._may_stray = strays

    async def write_file(self, base: str, relative: PurePosixPath, data: bytes) -> None:
        """Write a file; see `BaseSandbox.write_file`."""
        await asyncio.to_thread(files.write_below, self._host(base), relative, data)

    async def read_file(self, base: str, relative: PurePosixPath) -> bytes:
        """Read a file; see `BaseSandbox.read_file`."""
        try:
            return await asyncio.to_thread(files.read_below, self._host(base), relative)
        except OSError as error:
            if error.errno in (None, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EISDIR):
                raise FileNotFoundError(f"no regular file at {relative}") from error
            raise

    async def changes(self) -> bytes:
        """Compare the work tree with `origin`."""
        return await asyncio.to_thread(self._patch)

    async def remove(self) -> None:
        """End what programs have left, and delete `root`."""
        await asyncio.to_thread(_destroy, self.root, strays=self._may_stray)

    def _patch(self) -> bytes:
        tree, scratch = self.root / "tree", self.root / "diff"

        def patch() -> bytes:
            origin, now = self.origin(), Directory(os.fsencode(tree))
            with IgnoredPaths(origin, scratch / "ignored") as ignored:
                return patch_between(origin, now, scratch / "git", PATCH_CAP, ignored)

        try:
            return patch()
        except PermissionError:  # the agent may have taken away our right to read its files
            files.open_modes(tree)
            files.remove_tree(scratch)
            return patch()
        finally:
            files.remove_tree(scratch)

    def _host(self, base: str) -> Path:
        """Return the directory of this machine that is workdir, home or tmpdir in the box."""
        return self.root / self._part(base)

    def origin(self) -> Origin:
        """Return the work tree as it was at boot. Raises OSError."""
        raise NotImplementedError


async def built(build: Callable[[], Path]) -> Path:
    """Return the directory that `build` makes in a thread; it is deleted if the caller is cancelled meanwhile."""
    building = asyncio.ensure_future(asyncio.to_thread(build))
    try:
        return await asyncio.shield(building)
    except asyncio.CancelledError:
        # The thread cannot be stopped, so wait for what it makes.
        with contextlib.suppress(SandboxError, ValueError):
            await asyncio.to_thread(files.remove_tree, await building)
        raise


def make_root(fill: Callable[[Path], None]) -> Path:
    """Return a new directory with home/ and tmp/ in it and what `fill` adds; it is deleted when this process exits.

    An OSError becomes a SandboxError: no_space, boot_failed.
    """
    root: Path | None = None
    try:
        root = Path(tempfile.mkdtemp(dir=_workspace(os.getpid())))
        for name in ("home", "tmp"):
            (root / name).mkdir()
        fill(root)
    except OSError as error:
        if root is not None:
            files.remove_tree(root)
        raise failed("boot_failed", str(error)) from error
    return root


@functools.cache
def _workspace(pid: int) -> Path:
    """Return the directory of this process's sandboxes; the lock in it tells other processes that this one lives.

    pid is the cache key, so that a forked child makes its own.
    """
    sweep()
    parent = _parent()
    # It is locked under a name that nobody sweeps, then renamed.
    directory = Path(tempfile.mkdtemp(prefix="new-" + _WORKSPACE, dir=parent))
    lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)
    final = parent / directory.name.removeprefix("new-")
    directory.rename(final)
    atexit.register(files.remove_tree, final)
    return final


def sweep() -> None:
    """End the processes and delete the files of sandboxes whose owner is dead."""
    for workspace in _parent().glob(_WORKSPACE + "*"):
        _remove_if_dead(workspace)


def _parent() -> Path:
    """Return TMPDIR, or what it was before a training run set its own."""
    return Path(os.environ.get("RL_BOX_DIR") or tempfile.gettempdir())


def _remove_if_dead(workspace: Path) -> None:
    try:
        lock = os.open(workspace / "lock", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # another user's, or just being deleted
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    else:
        _destroy(workspace, strays=True)
    finally:
        os.close(lock)


def _destroy(directory: Path, *, strays: bool) -> None:
    """Delete the box or boxes in a directory, after ending the processes that they may have left."""
    if strays:
        try:
            kill_strays(directory)
        except (SandboxError, OSError) as error:
            logger.warning("deleting a sandbox: %s", error)
    files.remove_tree(directory)


def ulimits(limits: Limits, *, processes: bool) -> str:
    """Return commands for /bin/sh that set the limits of each process.

    processes: also limit how many processes the user may have.
    """
    # -f counts blocks of 512 bytes
    values = {"c": 0, "t": limits.cpu_s, "f": limits.file_bytes // 512, "n": limits.open_files}
    text = "".join(f"ulimit -{flag} {value}; " for flag, value in values.items())
    if processes:  # bash has -u for it, dash has -p
        text += f"ulimit -u {limits.processes} 2>/dev/null || ulimit -p {limits.processes}; "
    return text


def kill_strays(root: Path) -> None:
    """Kill every process of the boxes below `root`, however it detached itself, and wait until it is gone.

    Raises SandboxError unkillable.
    """
    deadline = time.monotonic() + _GONE_S
    while strays := list(_strays(os.fsencode(root))):
        if time.monotonic() > deadline:
            raise SandboxError("unkillable", f"processes {strays} are alive {_GONE_S:.0f} s after SIGKILL")
        for pid in strays:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def _strays(root: bytes) -> Iterable[int]:
    # A mount's source is named from the root of its file system; the last part is unique by itself.
    below, mounted = root + b"/", b"/" + os.path.basename(root) + b"/"
    for name in os.listdir(b"/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            directory = os.readlink(b"/proc/%s/cwd" % name)
            environment, command, mounts = (_of_process(name, kind) for kind in (b"environ", b"cmdline", b"mountinfo"))
        except OSError as error:  # gone, a zombie, or another user's
            if error.errno in _EXHAUSTED:  # not looked at, so it may be one
                raise
            continue
        program = os.path.basename(command.partition(b"\0")[0])
        plain = directory.startswith(below) or b"HOME=" + below in environment
        # A bwrap that has not made its mounts yet, or a program inside its namespace.
        if plain or (program == b"bwrap" and below in command) or mounted in mounts:
            yield int(name)


def _of_process(name: bytes, kind: bytes) -> bytes:
    with open(b"/proc/%s/%s" % (name, kind), "rb") as file:
        return file.read()
