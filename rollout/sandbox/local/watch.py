"""Measure what a box uses while a program runs in it (memory, processes, disk), where nothing else limits it.

Memory and processes are those of the program and all its descendants. Memory is the kernel's count of resident pages;
only if that is over the limit, it is counted again with each shared page once, which takes longer. Threads count as
processes. Disk is what is in the box's directories, and in files that are deleted and still open (files in memory, made
by memfd_create, are such files, too).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import stat
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from rollout.sandbox import Limits

_POLL_S = (0.2, 1.0)  # between two looks: at first, at most
_SHARE = 10  # a pause is at least so many times as long as the look before it, in large trees
_PAGE = os.sysconf("SC_PAGE_SIZE")


async def until_over(pid: int, root: Path, limits: Limits, base: int) -> None:
    """Return when a program uses more than ``limits`` allow. Cancel this when the program has ended.

    pid: of the program, or of what has started it. root: of the box, which had ``base`` bytes at first.
    """
    pause, longest = _POLL_S
    while True:
        await asyncio.sleep(pause)
        began = time.monotonic()
        if await asyncio.to_thread(_over, pid, root, limits, base):
            return
        pause = max(min(pause * 2, longest), _SHARE * (time.monotonic() - began))


def _over(pid: int, root: Path, limits: Limits, base: int) -> bool:
    family, threads = descendants(pid, limits.processes)
    if threads > limits.processes:
        return True
    if resident_bytes(family) > limits.memory_bytes and shared_bytes(family) > limits.memory_bytes:
        return True
    return directory_bytes(root) + deleted_bytes(family) - base > limits.disk_bytes


def descendants(pid: int, most: int) -> tuple[list[int], int]:
    """Return a process and all that it and its children have started, and the number of their threads.

    What ends meanwhile may be missing. Counting stops when there are more than ``most`` threads: processes may multiply
    faster than they are counted.
    """
    family, count = [pid], 0
    for one in family:  # it grows
        with contextlib.suppress(OSError):
            threads = os.listdir(f"/proc/{one}/task")
            count += len(threads)
            if count > most:
                break
            for thread in threads:
                with contextlib.suppress(OSError):
                    family += map(int, Path(f"/proc/{one}/task/{thread}/children").read_text().split())
    return family, count


def resident_bytes(family: Sequence[int]) -> int:
    """Return the resident memory of processes. A page that several of them share counts for each."""
    total = 0
    for pid in family:
        with contextlib.suppress(OSError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    return total


def shared_bytes(family: Sequence[int]) -> int:
    """Return the resident memory of processes, with each page counted once. This walks their page tables."""
    total = 0
    for pid in family:
        with contextlib.suppress(OSError):
            found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
            total += int(found[1]) << 10 if found else 0
    return total


def deleted_bytes(family: Sequence[int]) -> int:
    """Return the size of the files that processes have open and that have no name."""
    found: dict[tuple[int, int], int] = {}
    for pid in family:
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    file = os.stat(f"/proc/{pid}/fd/{fd}")
                    if stat.S_ISREG(file.st_mode) and not file.st_nlink:
                        found[file.st_dev, file.st_ino] = file.st_blocks * 512
    return sum(found.values())


def directory_bytes(root: Path) -> int:
    """Return the disk space of all files in a directory. What this user may not read is left out. Raises OSError."""
    # Not Python: this takes a tenth of the time, and the tree may be deeper than a path is long.
    done = subprocess.run(["du", "-sk", "--", str(root)], stdin=subprocess.DEVNULL, capture_output=True)
    return int(done.stdout.split()[0]) << 10 if done.stdout else 0
