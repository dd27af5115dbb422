"""What an episode and the grader may ask of a sandbox.

A sandbox is one private copy of a task's repository plus a HOME and a temporary directory, with a way
to run programs in it. It is booted for one use and closed after it: `close` ends every process in it
and deletes every file of it, and may be called at any time and more than once.

Whatever goes wrong on our side (no disk, missing snapshot, a box that does not start) is a
`SandboxError`: never the policy's fault and never a reward. What a *program* in the box does (exit
codes, timeouts, too much output) is an ordinary result.

Implementations: `rollout.sandbox.local.box` (directories and processes of this machine), `rollout.sandbox.docker.box`
(containers), `rollout.sandbox.apptainer.box` (containers without an engine and without root).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

OUTPUT_CAP = 16 * 2**20
"""Bytes of stdout, and of stderr, that `exec` keeps unless told otherwise."""

PATCH_CAP = 8 * 2**20
"""Bytes of changed content, and of patch text, beyond which `diff` refuses."""


class SandboxError(Exception):
    """The infrastructure failed. `cause` is a short slug for metrics, e.g. "missing_snapshot" (`rewards.verdict.Reason`
    has the names that are counted)."""

    def __init__(self, cause: str, detail: str = "") -> None:
        super().__init__(f"{cause}: {detail}" if detail else cause)
        self.cause = cause


_FULL = tuple(os.strerror(number).lower() for number in (errno.ENOSPC, errno.EDQUOT))


def failed(cause: str, text: str) -> SandboxError:
    """A SandboxError of this cause, or no_space where the system's words for a full disk are in the text."""
    return SandboxError("no_space" if any(words in text.lower() for words in _FULL) else cause, text)


class PatchTooLarge(Exception):
    """The agent changed more than `PATCH_CAP` bytes: the policy's failure, not the infrastructure's."""


@dataclass(frozen=True)
class ExecResult:
    """How a program in the box ended.

    returncode: as a shell reports it (128 + N for a death by signal N); None when it was timed out.
    truncated: stdout or stderr was longer than the cap; the first bytes were kept.
    wall_s: seconds from start to end, set-up of the box included.
    """

    returncode: int | None
    stdout: bytes
    stderr: bytes
    timed_out: bool
    truncated: bool
    wall_s: float


@dataclass(frozen=True)
class Limits:
    """Limits of a box; each kind of box says which of them it enforces.

    Of the whole box: memory_bytes (there is no swap), cpus, processes (threads count), disk_bytes of added or changed
    files. Of each process in it: cpu_s, seconds of CPU time; file_bytes, the largest file that it may write;
    open_files, file descriptors.
    """

    memory_bytes: int = 4 * 2**30
    cpus: float = 2.0
    processes: int = 1024
    disk_bytes: int = 8 * 2**30
    cpu_s: int = 3600
    file_bytes: int = 2 * 2**30
    open_files: int = 4096


class Sandbox(Protocol):
    """Paths are paths as seen INSIDE the box."""

    @property
    def workdir(self) -> str:
        """The work tree, and the directory that programs start in."""

    @property
    def home(self) -> str: ...

    @property
    def tmpdir(self) -> str: ...

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
        nothing else. Programs that are started at the same time may run one after another.
        A program that cannot be found gives returncode 127 or 126. Raises SandboxError.
        """

    async def put(self, path: str, data: bytes) -> None:
        """Write a file (parents made, mode 0644, replaced in one step). Symbolic links are not
        followed. `path` is relative to workdir or lies below workdir, home or tmpdir, else
        ValueError. Raises SandboxError."""

    async def get(self, path: str) -> bytes:
        """Read a file; the same paths as `put`. FileNotFoundError where no regular file is (symbolic
        links are not followed). Raises SandboxError."""

    async def diff(self) -> bytes:
        """All changes to the work tree since boot as a git patch, b"" when there are none. Nothing the
        agent can do (its own .git, config, attributes, ignore files, hooks) has a say in it.
        Raises PatchTooLarge, SandboxError."""

    async def close(self) -> None:
        """End all processes and delete all files. Never raises."""
