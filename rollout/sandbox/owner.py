"""Name a process so that others can tell whether it is certainly gone.

The name has machine, boot, process namespace, id and start time. What may outlive its owner carries it: a container, a
lease on a shared disk.
"""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path


@functools.cache
def _identity() -> tuple[str, str, str]:
    """Return machine name, boot id and process namespace, which make a process id unique."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return platform.node(), boot, os.readlink("/proc/self/ns/pid")


def me() -> str:
    """Return the name of this process."""
    return "/".join((*_identity(), str(os.getpid()), _started(os.getpid()) or ""))


def gone(owner: str, running: bool) -> bool:
    """Return whether the process that `owner` names is certainly gone; False if that cannot be known.

    running: what it owns is running (a container), so it cannot be from before a reboot of this machine.
    """
    parts = owner.split("/")
    if len(parts) != 5:
        return False
    node, boot, namespace = _identity()
    if parts[0] != node:
        return False
    if parts[1] != boot:
        return not running  # nothing survives a reboot: what runs belongs to another machine of this name
    return parts[2] == namespace and parts[3].isdigit() and _started(int(parts[3])) != parts[4]


def alive(owner: str) -> bool:
    """Return whether the process that `owner` names certainly lives; False if it cannot be seen from here."""
    return tuple(owner.split("/")[:3]) == _identity() and not gone(owner, running=True)


def _started(pid: int) -> str | None:
    """Return a process's start time in clock ticks since boot, None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]
