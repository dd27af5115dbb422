"""This module runs one child process with bounded output and bounded time, and leaves nothing of it behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from rollout.sandbox import OUTPUT_CAP, ExecResult, SandboxError

_GRACE_S = 5.0  # how long a killed process may take to disappear


@dataclass(frozen=True)
class Command:
    """A program to run: its arguments, its whole environment, and its bounds.

    stop: a future that whoever wants the program to end early completes.
    """

    argv: Sequence[str]
    env: dict[str, str]
    timeout_s: float
    stdin: bytes = b""
    output_cap: int = OUTPUT_CAP
    stop: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Output:
    """This keeps the first bytes of stdout (1) and stderr (2); it drops the rest, so that a program never blocks."""

    def __init__(self, cap: int) -> None:
        self._kept = {1: bytearray(), 2: bytearray()}
        self._cap = cap
        self._truncated = False

    def take(self, stream: int, data: bytes) -> None:
        """Keep what fits of `data`."""
        kept = self._kept[stream]
        room = self._cap - len(kept)
        self._truncated |= len(data) > room
        kept += data[:room]

    def result(self, returncode: int | None, timed_out: bool, started: float) -> ExecResult:
        """Return the result of a program that has just ended. started: by `time.monotonic`."""
        wall_s = time.monotonic() - started
        return ExecResult(returncode, bytes(self._kept[1]), bytes(self._kept[2]), timed_out, self._truncated, wall_s)


def kill_group(pid: int) -> None:
    """Send SIGKILL to the process group that `pid` leads."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


async def run(
    command: Command,
    *,
    cwd: str = "/",
    pass_fds: Sequence[int] = (),
    kill: Callable[[int], None] = kill_group,
    settle: Callable[[], Awaitable[None]] | None = None,
    runner: bool = False,
) -> ExecResult:
    """Run a command as the leader of its own session, with no inherited descriptors but pass_fds.

    Do not cancel this (asyncio may lose a process that is just starting); complete `command.stop` instead.
    kill(pid) must SIGKILL the process and everything it started; it is called on timeout and on stop, and the result
    is timed_out in both cases. settle() is awaited once the process has ended, for whatever reason, and its group has
    been killed; it must end everything that is left. runner: argv is a program that runs the box and reports how the
    program inside ended, so a signal that ends the runner itself is a SandboxError box_killed.
    Raises SandboxError if the process cannot be started or does not die.
    """
    loop = asyncio.get_running_loop()
    started = time.monotonic()
    child = _Child(loop, command.output_cap)
    try:
        transport, _ = await loop.subprocess_exec(
            lambda: child,
            *command.argv,
            stdin=asyncio.subprocess.PIPE if command.stdin else asyncio.subprocess.DEVNULL,
            cwd=cwd,
            env=command.env,
            start_new_session=True,
            pass_fds=tuple(pass_fds),
        )
    except OSError as error:
        raise SandboxError("exec_failed", str(error)) from error
    pid = transport.get_pid()
    if command.stdin:
        pipe = cast(asyncio.WriteTransport, transport.get_pipe_transport(0))
        pipe.write(command.stdin)
        pipe.close()  # once everything is written
    try:
        await asyncio.wait({child.exited, command.stop}, timeout=command.timeout_s, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:  # the event loop is shutting down: there is no time for more than this
        kill(pid)
        transport.close()
        raise
    timed_out = not child.exited.done()
    try:
        if timed_out:
            kill(pid)
            await asyncio.wait({child.exited}, timeout=_GRACE_S)
            if not child.exited.done():
                raise SandboxError("unkillable", f"process {pid} is alive {_GRACE_S:.0f} s after SIGKILL")
        kill_group(pid)
        if settle is not None:
            await settle()
        # What is still in the pipes belongs to the result; nobody is left to write more.
        await asyncio.wait({child.drained}, timeout=_GRACE_S)
    finally:
        transport.close()
    code = transport.get_returncode()
    if runner and not timed_out and code is not None and code < 0:
        raise SandboxError("box_killed", f"signal {-code} ended {command.argv[0]} from outside")
    if code is not None and code < 0:  # as a shell reports it
        code = 128 - code
    return child.output.result(None if timed_out else code, timed_out, started)


class _Child(asyncio.SubprocessProtocol):
    def __init__(self, loop: asyncio.AbstractEventLoop, cap: int) -> None:
        self.output = Output(cap)
        self.exited: asyncio.Future[None] = loop.create_future()
        self.drained: asyncio.Future[None] = loop.create_future()
        self._open = {1, 2}

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.output.take(fd, data)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._open.discard(fd)
        if not self._open and not self.drained.done():
            self.drained.set_result(None)

    def process_exited(self) -> None:
        if not self.exited.done():
            self.exited.set_result(None)
