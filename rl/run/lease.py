"""The lease of a run directory: one run holds it at a time, on any disk, whichever machines share it.

The lease is the file ``run.lease`` in the directory; how such files are made, renewed and broken is in
``rollout.sandbox.lease``. It has a line for each process that holds it, with the process's name, a token, and the SLURM
job with the number of its start. ``rl.cluster`` holds it for the whole job; the ``rl.train`` that it starts gets the
token in RL_RUN_LEASE and adds a line, so that the lease lives as long as either of them.

A lease is over when all its processes are dead, which can be seen on their machine only; when SLURM has started their
job again; or when nobody has renewed it for ``STALE_S`` seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rollout.sandbox.lease import BEAT_S, STALE_S, break_off, read, take
from rollout.sandbox.owner import alive, gone, me

POLL_S = 0.5


class InUse(RuntimeError):
    """Another process holds the run directory; the message says which."""


class RunLease:
    """A RunLease holds a run directory, which must exist. ``say`` gets a line if it waits for an old lease."""

    def __init__(self, directory: Path, say: Callable[[str], None] = print) -> None:
        self.token = secrets.token_hex(8)
        self._file, self._say, self._pid = directory / "run.lease", say, os.getpid()
        self._job, self._start = os.environ.get("SLURM_JOB_ID", "-"), int(os.environ.get("SLURM_RESTART_COUNT", 0))
        # The token is last: it also names the file that ``take`` links.
        self._line = f"{me()} {self._job} {self._start} {self.token}"
        self._above = os.environ.get("RL_RUN_LEASE")
        self._seen: tuple[str, int] | None = None
        self._since = 0.0
        self._over = threading.Event()

    def take(self) -> None:
        """Take the lease, after waiting for one that may be stale. Raises InUse; RuntimeError if the disk has none."""
        while not self.tried():
            time.sleep(POLL_S)

    def tried(self) -> bool:
        """Try to take the lease; return whether that worked. If not, try again after ``POLL_S`` s. Raises as
        ``take``."""
        try:
            if take(self._file, self._line):
                return True
            seen = read(self._file)
            if seen is None:
                return False
            lines = seen[0].splitlines()
            if self._above in [line.split()[-1] for line in lines]:
                self._write([*lines, self._line])
                return True
            if all(self._ended(line) for line in lines) or self._stale(seen):
                break_off(self._file, seen[0])
            return False
        except OSError as error:
            raise RuntimeError(f"cannot lease the run directory: {error}; put it on another disk") from error

    def _stale(self, seen: tuple[str, int]) -> bool:
        """Return whether no holder is known to live and this process saw no renewal for ``STALE_S`` s. Raises InUse."""
        lines = seen[0].splitlines()
        known = self._seen is not None and self._seen[0] == seen[0]
        # The processes of this job's earlier start end by themselves: SLURM has told them to.
        mine = all(self._earlier(line) for line in lines)
        living = any(alive(line.split()[0]) for line in lines)
        if not mine and (living or (known and self._seen != seen)):
            raise InUse(f"run directory {self._file.parent} is in use by {_holder(lines[-1])}")
        if not known:
            how = "waiting for it to end" if living else f"it is taken over if it does not answer for {STALE_S:.0f} s"
            self._say(f"{self._file.parent} was in use by {_holder(lines[-1])}; {how}")
        if self._seen != seen:
            self._seen, self._since = seen, time.monotonic()
        return not living and time.monotonic() - self._since > STALE_S

    def _earlier(self, line: str) -> bool:
        job, start = line.split()[1:3]
        return job == self._job != "-" and int(start) < self._start

    def _ended(self, line: str) -> bool:
        owner = line.split()[0]
        return gone(owner, running=True) or (self._earlier(line) and not alive(owner))

    def _write(self, lines: list[str]) -> None:
        own = self._file.with_name(f".{self._file.name}-{self.token}")
        own.write_text("\n".join(lines))
        own.rename(self._file)

    def renew(self, lost: Callable[[str], None]) -> None:
        """Renew the lease in a thread and release it when the process ends.

        If another process has taken it over, because this one stood still for too long, ``lost`` is given a line and
        the process ends: two must not write to one directory.
        """
        atexit.register(self.release)
        threading.Thread(target=self._renew, args=(lost,), daemon=True).start()

    def _renew(self, lost: Callable[[str], None]) -> None:
        while not self._over.wait(BEAT_S):
            with contextlib.suppress(OSError):  # a disk that does not answer now; it may in time
                seen = read(self._file)
                if seen and self._line in seen[0].splitlines():
                    os.utime(self._file)
                elif seen and not self._over.is_set():
                    lost(f"this process stood still, and {_holder(seen[0].splitlines()[-1])} took the run directory")
                    os._exit(1)

    def release(self) -> None:
        """Give the lease back; what other living processes hold of it stays theirs."""
        if self._pid != os.getpid() or self._over.is_set():  # a forked child
            return
        self._over.set()
        with contextlib.suppress(OSError):
            seen = read(self._file)
            if seen is None or self._line not in (lines := seen[0].splitlines()):
                return
            if left := [line for line in lines if line != self._line and not gone(line.split()[0], running=True)]:
                self._write(left)
            else:
                self._file.unlink(missing_ok=True)


def _holder(line: str) -> str:
    """Return who holds a lease, for messages."""
    owner, job, _, _ = line.split()
    machine, _, _, pid, _ = owner.split("/")
    return f"process {pid} on {machine}" + (f" (job {job})" if job != "-" else "")
