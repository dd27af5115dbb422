"""Run one child process with bounded output and bounded time, and leave nothing of it behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, cast

from rollout.sandbox import OUTPUT_CAP, ExecResult, SandboxError

_KILLED = 128 + signal.SIGKILL
_GRACE_S = 5.0  # how long a killed process may take to disappear


@dataclass(frozen=True)
class Command:
    """A Command is a program to run: its arguments, its whole environment, and its bounds.

    stop: a future that is completed to end the program early.
    """

    argv: Sequence[str]
    env: dict[str, str]
    timeout_s: float
    stdin: bytes = b""
    output_cap: int = OUTPUT_CAP
    stop: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


def cut(data: bytes | bytearray, cap: int) -> bytes:
    """Return the first and the last bytes of what is longer than the cap, one half each."""
    return bytes(data if len(data) <= cap else data[: cap - cap // 2] + data[len(data) - cap // 2 :])


class Output:
    """This keeps the first and the last bytes of stdout (1) and stderr (2), one half each of what fits.

    It drops what is between them, so that a program never blocks.
    """

    def __init__(self, cap: int) -> None:
        self._kept = {1: bytearray(), 2: bytearray()}
        self._cap = cap
        self._truncated = False

    def take(self, stream: int, data: bytes) -> None:
        """Keep what fits of `data`."""
        kept = self._kept[stream]
        kept += data
        if len(kept) > 2 * self._cap:  # seldom, because it moves bytes
            self._kept[stream] = self._cut(kept)

    def _cut(self, kept: bytearray) -> bytearray:
        self._truncated |= len(kept) > self._cap
        return bytearray(cut(kept, self._cap))

    def result(self, returncode: int | None, timed_out: bool, started: float) -> ExecResult:
        """Return the result of a program that has just ended. started: by `time.monotonic`."""
        wall_s = time.monotonic() - started
        out, err = (bytes(self._cut(self._kept[stream])) for stream in (1, 2))
        return ExecResult(returncode, out, err, timed_out, self._truncated, wall_s)


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
    over: Callable[[int], Coroutine[Any, Any, None]] | None = None,
    runner: bool = False,
) -> ExecResult:
    """Run a command as the leader of its own session, with no inherited descriptors but pass_fds.

    Do not cancel this (asyncio may lose a process that is just starting); complete `command.stop` instead.
    kill(pid) must SIGKILL the process and everything it started; it is called on timeout and on stop, and the result
    is timed_out in both cases. settle() is awaited once the process has ended, for whatever reason, and its group has
    been killed; it must end everything that is left. over(pid) returns if the program uses more than it may (the
    program is then killed, with returncode 137, as where the kernel limits memory), and is cancelled when the program
    ends. runner: argv is a program that runs the box and reports how the program inside ended, so a signal that ends
    the runner itself is a SandboxError box_killed.
    Raises SandboxError if the process cannot be started or does not die.
    """
    started = time.monotonic()
    try:
        # Not by the loop: uvloop forks, which copies the page tables of this process (66 ms for 700 MB, in which the
        # loop stands still); Popen uses vfork (1 ms).
        program = subprocess.Popen(
            command.argv,
            stdin=subprocess.PIPE if command.stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd,
            env=command.env,
            start_new_session=True,
            pass_fds=tuple(pass_fds),
        )
    except OSError as error:
        raise SandboxError("exec_failed", str(error)) from error
    pid = program.pid
    child = _Child(program, command)
    watching: set[asyncio.Future[None]] = set()
    try:
        try:
            child.begin()
        except BaseException:  # there is no thread for it
            kill(pid)
            program.wait()
            raise
        watching = {asyncio.ensure_future(over(pid))} if over else set()
        ends: set[asyncio.Future[None]] = {child.exited, command.stop, *watching}
        await asyncio.wait(ends, timeout=command.timeout_s, return_when=asyncio.FIRST_COMPLETED)
        exceeded = any(task.done() for task in watching) and not child.exited.done()
        timed_out = not child.exited.done() and not exceeded
        if timed_out or exceeded:
            kill(pid)
            await asyncio.wait({child.exited}, timeout=_GRACE_S)
            if not child.exited.done():
                raise SandboxError("unkillable", f"process {pid} is alive {_GRACE_S:.0f} s after SIGKILL")
        kill_group(pid)
        if settle is not None:
            await settle()
        for task in filter(asyncio.Future.done, watching):
            task.result()  # it may have failed to look
        # What is still in the pipes belongs to the result; nobody is left to write more.
        await asyncio.wait({child.drained}, timeout=_GRACE_S)
    except asyncio.CancelledError:  # the event loop is shutting down: there is no time for more than this
        kill(pid)
        raise
    finally:
        for task in watching:
            task.cancel()
        child.close()
    code = _KILLED if exceeded else program.returncode
    if runner and not timed_out and code is not None and code < 0:
        raise SandboxError("box_killed", f"signal {-code} ended {command.argv[0]} from outside")
    if code is not None and code < 0:  # as a shell reports it
        code = 128 - code
    return child.output.result(None if timed_out else code, timed_out, started)


class _Child:
    """This writes the input of a started program, reads its output and notices its end.

    The loop's own pipe transports are not used: those of uvloop close the descriptor, and then the file object that it
    belongs to. By then, another thread may have opened a file that got the same descriptor.
    """

    def __init__(self, program: subprocess.Popen[bytes], command: Command) -> None:
        self.output = Output(command.output_cap)
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[None] = self._loop.create_future()
        self.drained: asyncio.Future[None] = self._loop.create_future()
        self._program = program
        self._open = {1: cast(IO[bytes], program.stdout), 2: cast(IO[bytes], program.stderr)}
        self._stdin = command.stdin
        if command.stdin:
            self._open[0] = cast(IO[bytes], program.stdin)
            os.set_blocking(self._open[0].fileno(), False)

    def begin(self) -> None:
        """Wait for its end, and read and write from now on. Raises RuntimeError or OSError if that is not possible."""
        threading.Thread(target=self._wait, daemon=True).start()
        for stream, pipe in self._open.items():
            if stream:
                self._loop.add_reader(pipe.fileno(), self._read, stream)
            else:
                self._loop.add_writer(pipe.fileno(), self._write, memoryview(self._stdin))

    def close(self, *streams: int) -> None:
        """Close these streams, or all."""
        for stream in streams or list(self._open):
            pipe = self._open.pop(stream)
            (self._loop.remove_reader if stream else self._loop.remove_writer)(pipe.fileno())
            pipe.close()

    def _write(self, rest: memoryview) -> None:
        fd = self._open[0].fileno()
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:
            return
        except OSError:  # the program reads no more
            rest = rest[:0]
        if rest:
            self._loop.add_writer(fd, self._write, rest)
        else:
            self.close(0)

    def _read(self, stream: int) -> None:
        if data := os.read(self._open[stream].fileno(), 1 << 16):
            self.output.take(stream, data)
            return
        self.close(stream)
        if not self._open.keys() & {1, 2}:
            self.drained.set_result(None)

    def _wait(self) -> None:
        self._program.wait()
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self.exited.set_result, None)
