"""Sandboxes (boxes), in which programs run, and their protocol: what an episode and the grader may ask of one.

A sandbox is one private copy of a task's repository plus a HOME and a temporary directory, with a way to run programs
in it. It is booted for one use and closed after it: `close` ends every process in it and deletes every file of it, and
may be called at any time and more than once.

Whatever goes wrong on our side (no disk, a missing snapshot, a box that does not start) is a `SandboxError`: never the
policy's fault and never a reward. What a *program* in the box does (exit codes, timeouts, too much output) is an
ordinary result.

Each kind of box is one folder, `local` (directories and processes of this machine) and `docker` (containers of an
engine), or a package beside this project. They import nothing of each other; what they share is in the modules here.
"""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

WORKDIR, HOME, TMPDIR = "/testbed", "/home/agent", "/tmp"
"""Where a box that has its own root file system keeps its work tree, HOME and temporary files."""

OUTPUT_CAP = 16 * 2**20
"""How many bytes of stdout, and of stderr, `exec` keeps unless told otherwise."""

PATCH_CAP = 8 * 2**20
"""How many bytes of changed content, and of patch text, `diff` accepts."""

RENEWED_CAP = 2**20
"""How many bytes of a file in a renewed directory `get` reads."""

LEFT_OUT = b"ignored: "
"""The prefix of the lines, before a diff's first file, that name changed files left out of it (paths as JSON)."""


class SandboxError(Exception):
    """The infrastructure failed.

    cause: a short slug for metrics, such as "missing_snapshot"; `rewards.verdict.Reason` lists those that are counted.
    """

    def __init__(self, cause: str, detail: str = "") -> None:
        super().__init__(f"{cause}: {detail}" if detail else cause)
        self.cause = cause


_FULL = tuple(os.strerror(number).lower() for number in (errno.ENOSPC, errno.EDQUOT))


def failed(cause: str, text: str) -> SandboxError:
    """Return a SandboxError of this cause, or of no_space if the text has the system's words for a full disk."""
    return SandboxError("no_space" if any(words in text.lower() for words in _FULL) else cause, text)


F = TypeVar("F", bound=Callable[..., Any])


def infrastructure(cause: str) -> Callable[[F], F]:
    """Return a decorator for what is done with a box: an OSError becomes a SandboxError of this cause (or no_space).

    So does a thread that cannot be started. What `get` did not find stays a FileNotFoundError.
    """

    def decorated(function: F) -> F:
        @functools.wraps(function)
        async def told(*args: Any, **options: Any) -> Any:
            try:
                return await function(*args, **options)
            except OSError as error:
                if cause == "get_failed" and isinstance(error, FileNotFoundError):
                    raise
                raise failed(cause, str(error)) from error
            except RuntimeError as error:
                if "can't start new thread" not in str(error):
                    raise
                raise SandboxError(cause, str(error)) from error

        return cast("F", told)

    return decorated


class PatchTooLarge(Exception):
    """The agent changed more than `PATCH_CAP` bytes; this is the policy's failure, not the infrastructure's."""


@dataclass(frozen=True)
class ExecResult:
    """This is how a program in a box ended.

    returncode: as a shell reports it (128 + N for a death by signal N); None if it was timed out.
    truncated: stdout or stderr was longer than the cap; its first and last bytes were kept, one half each.
    wall_s: seconds from start to end, including the set-up of the box.
    """

    returncode: int | None
    stdout: bytes
    stderr: bytes
    timed_out: bool
    truncated: bool
    wall_s: float


@dataclass(frozen=True)
class Limits:
    """These limits hold for a box; the module of each kind says which of them it enforces.

    Of the whole box: memory_bytes (there is no swap), cpus, processes (threads count as such) and disk_bytes, the
    files that are added or changed. Of each process: cpu_s, seconds of CPU time; file_bytes, the largest file that it
    may write; open_files, file descriptors.
    """

    memory_bytes: int = 4 * 2**30
    cpus: float = 2.0
    processes: int = 1024
    disk_bytes: int = 8 * 2**30
    cpu_s: int = 3600
    file_bytes: int = 2 * 2**30
    open_files: int = 4096


class Sandbox(Protocol):
    """A sandbox has these verbs once it is booted. Paths are paths as seen INSIDE the box."""

    @property
    def workdir(self) -> str:
        """Return the work tree, which is also the directory that programs start in."""

    @property
    def home(self) -> str:
        """Return the box's HOME."""

    @property
    def tmpdir(self) -> str:
        """Return the box's directory for temporary files."""

    @property
    def relays(self) -> bool:
        """Return whether what is written to a socket of `socket_dir` is read by another program, which hands it on."""

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout_s: float,
        stdin: bytes = b"",
        output_cap: int = OUTPUT_CAP,
    ) -> ExecResult:
        """Run a program and end everything it started, also on timeout and on cancellation.

        The environment is `env` over the sandbox's own PATH, HOME, TMPDIR and LANG (and what a container image sets),
        and nothing else. Programs that are started at the same time may run one after another. A program that cannot be
        found gives returncode 127 or 126. Raises SandboxError.
        """

    async def put(self, path: str, data: bytes) -> None:
        """Write a file, with mode 0644, in one step; missing parent directories are made.

        `path` is relative to workdir or lies below workdir, home or tmpdir, else ValueError. Symbolic links are not
        followed. Raises SandboxError.
        """

    async def renew(self, path: str, files: Mapping[str, bytes]) -> None:
        """Make a directory at the root of the box's file system anew, such as /tests, whatever is there now.

        No program of the box has a part in it. files: contents by relative paths, with mode 0755; a path that ends in a
        slash is an empty directory. Afterwards `get` reads files in there, at most the first `RENEWED_CAP` bytes of
        each. Raises SandboxError, also if boxes of this kind cannot do it.
        """

    async def get(self, path: str) -> bytes:
        """Read a file; the same paths as for `put` are allowed.

        Raises FileNotFoundError if there is no regular file (symbolic links are not followed), and SandboxError.
        """

    async def diff(self) -> bytes:
        """Return all changes to the work tree since boot as a git patch, b"" if there are none.

        Nothing that the agent can do (its own .git, config, attributes, ignore files, hooks) has an influence on it.
        Files that the ignore rules of the snapshot name and its commit lacks are left out. Lines that begin with
        `LEFT_OUT` name those of them that were in the snapshot and were changed (the first ones, if there are many);
        git ignores these lines. Raises PatchTooLarge, SandboxError.
        """

    async def close(self) -> None:
        """End all processes and delete all files. Never raises."""
