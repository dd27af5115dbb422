"""Leases: locks on a disk that several machines share. A lock does not outlive the death of its holder.

A lease is a file that names its holder and whose time the holder renews. Making a file that must not exist yet and
renaming one are atomic on every shared file system (NFS from version 3, Lustre, GPFS, BeeGFS, CephFS). `flock` is not
used, because on several of them it does not exclude other machines (Lustre without the mount option flock, BeeGFS by
default). Clocks need not agree: a process that waits measures with its own how long the file's time has not changed.

A holder that stands still for longer than `STALE_S` (a suspended machine, a disk that hangs) may find that another has
taken over. So a lease only prevents that work is done twice; what is made under it must be published in one step.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import AsyncGenerator
from pathlib import Path

from rollout.sandbox.owner import gone, me

STALE_S = 90.0
"""A lease that was not renewed for so many seconds belongs to nobody. NFS clients may cache a file's time for 60."""

BEAT_S = STALE_S / 6
"""The holder of a lease renews it after so many seconds."""

_POLL_S = 0.5


@contextlib.asynccontextmanager
async def lease(file: Path) -> AsyncGenerator[None]:
    """Hold the lease `file` in the block, after waiting until it is free or its holder is gone. Raises OSError."""
    words = f"{me()} {secrets.token_hex(8)}"
    last: tuple[str, int] | None = None
    since = time.monotonic()
    while not take(file, words):
        seen = read(file)
        if seen != last:
            last, since = seen, time.monotonic()
        if seen and (gone(seen[0].partition(" ")[0], running=True) or time.monotonic() - since > STALE_S):
            break_off(file, seen[0])
        elif seen:
            await asyncio.sleep(_POLL_S)
    renewing = asyncio.ensure_future(_renew(file, words))
    try:
        yield
    finally:
        renewing.cancel()
        seen = read(file)
        if seen and seen[0] == words:
            file.unlink(missing_ok=True)


def take(file: Path, words: str) -> bool:
    """Make the lease with these words, the last of them unique; return False if there is one. Raises OSError."""
    # Written under another name and linked, so that nobody ever reads a lease that does not name its holder yet.
    own = file.with_name(f".{file.name}-{words.rpartition(' ')[2]}")
    own.write_text(words)
    try:
        os.link(own, file)
        return True
    except FileExistsError:
        return os.stat(own).st_nlink == 2  # an NFS server may have got the request twice
    finally:
        own.unlink()


def read(file: Path) -> tuple[str, int] | None:
    """Return what a lease says and its time in ns, None if there is none."""
    try:
        with open(file) as stream:  # opening makes an NFS client ask the server for the time
            return stream.read(), os.fstat(stream.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def break_off(file: Path, words: str) -> None:
    """Take away a lease that belongs to nobody any more, but not one that somebody else has taken meanwhile."""
    aside = file.with_name(f".{file.name}-{secrets.token_hex(8)}")
    with contextlib.suppress(FileNotFoundError):  # another was faster
        os.rename(file, aside)
        if (seen := read(aside)) and seen[0] != words:
            with contextlib.suppress(FileExistsError):
                os.link(aside, file)
        aside.unlink()


async def _renew(file: Path, words: str) -> None:
    while True:
        await asyncio.sleep(BEAT_S)
        with contextlib.suppress(OSError):  # a lease that was broken is not ours to renew
            if (seen := read(file)) and seen[0] == words:
                os.utime(file)
