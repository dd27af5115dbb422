"""Boxes whose files are directories of this machine, whatever runs the programs in them.

A process killed before it could close its sandboxes leaves their directories behind, and rarely a program. `sweep` ends
and deletes what is left; the next process that boots a sandbox under the same TMPDIR calls it.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rollout.sandbox import OUTPUT_CAP, PATCH_CAP, ExecResult, Limits, SandboxError, failed, files
from rollout.sandbox.treediff import Directory, Tree, patch_between

logger = logging.getLogger(__name__)

_WORKSPACE = "code-rl-sandboxes-"


_GONE_S = 5.0  # how long killed processes may take to be gone


@dataclass(frozen=True)
class Command:
    """What one exec runs: env is whole, `stop` ends it when it is completed; the rest as for `Sandbox.exec`."""

    argv: list[str]
    env: dict[str, str]
    stdin: bytes
    timeout_s: float
    stop: asyncio.Future[None]
    output_cap: int


class DirectorySandbox:
    """A box whose files are directories of this machine: tree/, home/ and tmp/ below `root`, which it owns.

    What a kind of box adds: how a program is run, the environment it gets, what the tree was at first. strays: a
    process can be left that only its environment or directory tells from others.
    """

    def __init__(self, root: Path, workdir: str, home: str, tmpdir: str, *, strays: bool) -> None:
        self.workdir, self.home, self.tmpdir = workdir, home, tmpdir
        self._root = root
        self._may_stray = strays
        self._closed = False
        self._running: dict[asyncio.Task[ExecResult], asyncio.Future[None]] = {}

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout_s: float,
        stdin: bytes = b"",
        output_cap: int = OUTPUT_CAP,
    ) -> ExecResult:
        if self._closed:
            raise SandboxError("closed", "exec after close")
        environment = {**self._environment(), **env}
        stop: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # A task of its own, which is told to stop, not cancelled: the process must be seen to its end.
        command = Command(list(argv), environment, stdin, timeout_s, stop, output_cap)
        task = asyncio.ensure_future(self._run(command))
        self._running[task] = stop
        task.add_done_callback(self._running.pop)
        try:
            result = await asyncio.shield(task)
        except asyncio.CancelledError:
            await _stop({task: stop})
            raise
        if stop.done():
            raise SandboxError("closed", "the sandbox was closed during exec")
        return result

    async def put(self, path: str, data: bytes) -> None:
        base, relative = self._locate(path)
        try:
            await asyncio.to_thread(files.write_below, base, relative, data)
        except OSError as error:
            raise failed("put_failed", f"{path}: {error}") from error

    async def get(self, path: str) -> bytes:
        base, relative = self._locate(path)
        try:
            return await asyncio.to_thread(files.read_below, base, relative)
        except OSError as error:
            if error.errno in (None, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EISDIR):
                raise FileNotFoundError(f"no regular file at {path}") from error
            raise SandboxError("get_failed", f"{path}: {error}") from error

    async def diff(self) -> bytes:
        if self._closed:
            raise SandboxError("closed", "diff after close")
        return await asyncio.to_thread(self._diff)

    async def close(self) -> None:
        self._closed = True
        await asyncio.shield(asyncio.ensure_future(self._close()))

    async def _close(self) -> None:
        await _stop(dict(self._running))
        if self._may_stray:  # what an exec that was cut short by the loop's end left behind
            try:
                await asyncio.to_thread(kill_strays, self._root)
            except SandboxError as error:
                logger.warning("closing a sandbox: %s", error)
        await asyncio.to_thread(files.remove_tree, self._root)

    def _diff(self) -> bytes:
        tree, scratch = self._root / "tree", self._root / "diff"
        try:
            try:
                new = Directory(os.fsencode(tree))
                return patch_between(self._origin(), new, scratch, PATCH_CAP)
            except PermissionError:  # the agent may have taken away our right to read its files
                files.open_modes(tree)
                return patch_between(self._origin(), Directory(os.fsencode(tree)), scratch, PATCH_CAP)
        except OSError as error:
            raise failed("diff_failed", str(error)) from error
        finally:
            files.remove_tree(scratch)

    def _locate(self, path: str) -> tuple[Path, PurePosixPath]:
        """The host directory and the path below it that `path` means."""
        full = PurePosixPath(self.workdir, path)
        for inside, name in ((self.workdir, "tree"), (self.home, "home"), (self.tmpdir, "tmp")):
            if full.is_relative_to(inside):
                relative = full.relative_to(inside)
                if relative.name and ".." not in relative.parts:
                    return self._root / name, relative
        raise ValueError(f"not a path below the work tree, HOME or TMPDIR of the sandbox: {path}")

    async def _run(self, command: Command) -> ExecResult:
        """Run one program, as `process.run` does."""
        raise NotImplementedError

    def _environment(self) -> dict[str, str]:
        raise NotImplementedError

    def _origin(self) -> Tree:
        """The work tree as it was at boot. OSError."""
        raise NotImplementedError


async def built(build: Callable[[], Path]) -> Path:
    """The directory that `build` makes in a thread; deleted again when the caller is cancelled meanwhile."""
    building = asyncio.ensure_future(asyncio.to_thread(build))
    try:
        return await asyncio.shield(building)
    except asyncio.CancelledError:
        # The thread cannot be stopped: wait for what it makes.
        with contextlib.suppress(SandboxError, ValueError):
            await asyncio.to_thread(files.remove_tree, await building)
        raise


def check_mounts(mounts: Iterable[tuple[Path, str]]) -> None:
    """SandboxError missing_bind for the first that is not there."""
    for source, _ in mounts:
        if not source.exists():
            raise SandboxError("missing_bind", str(source))


def make_root(fill: Callable[[Path], None]) -> Path:
    """A new directory of this process with home/ and tmp/ in it, and what `fill` makes; it goes with the process.

    Raises SandboxError for an OSError: no_space, boot_failed.
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
    """The directory of this process's sandboxes. The lock in it tells others that the process lives.

    pid is the cache key: a forked child makes its own.
    """
    sweep()
    parent = _parent()
    # Locked under a name that nobody sweeps, then renamed.
    directory = Path(tempfile.mkdtemp(prefix="new-" + _WORKSPACE, dir=parent))
    lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)
    final = parent / directory.name.removeprefix("new-")
    directory.rename(final)
    atexit.register(files.remove_tree, final)
    return final


def sweep() -> None:
    """End and delete what processes that are dead have left of their sandboxes in the same place."""
    for workspace in _parent().glob(_WORKSPACE + "*"):
        _remove_if_dead(workspace)


def _parent() -> Path:
    """TMPDIR, or what it was before it became a training run's own."""
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
        try:
            kill_strays(workspace)
        except SandboxError as error:
            logger.warning("what %s has left: %s", workspace, error)
        files.remove_tree(workspace)
    finally:
        os.close(lock)


def ulimits(limits: Limits) -> str:
    """Shell commands that set the limits of each process, for any POSIX shell."""
    # -f counts blocks of 512 bytes
    values = {"c": 0, "t": limits.cpu_s, "f": limits.file_bytes // 512, "n": limits.open_files}
    return "".join(f"ulimit -{flag} {value}; " for flag, value in values.items())


def kill_group(pid: int) -> None:
    """SIGKILL to the process group that `pid` leads."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def kill_strays(root: Path) -> None:
    """Kill what still lives in the box or boxes below `root` or carries their environment, and wait until it is gone:
    also what left its group, and what was just forked."""
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
        except OSError:  # gone, a zombie, or another user's
            continue
        program = os.path.basename(command.partition(b"\0")[0])
        plain = directory.startswith(below) or b"HOME=" + below in environment
        # bwrap, which has not yet made its mounts; the program in its namespace.
        if plain or (program == b"bwrap" and below in command) or mounted in mounts:
            yield int(name)


def _of_process(name: bytes, kind: bytes) -> bytes:
    with open(b"/proc/%s/%s" % (name, kind), "rb") as file:
        return file.read()


async def _stop(running: Mapping[asyncio.Task[ExecResult], asyncio.Future[None]]) -> None:
    """End running execs. Their results and errors belong to nobody any more."""
    for stop in running.values():
        if not stop.done():
            stop.set_result(None)
    if running:  # wait, not gather: a second cancellation must not reach them
        done, _ = await asyncio.wait(running)
        for task in done:
            task.exception()
