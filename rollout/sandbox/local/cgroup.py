"""Control groups (version 2) that limit the memory and the processes of local boxes, where this user may have them.

A box has one group. Its programs are started in it, by a shell that enters it first, so nothing of a box is outside.

The groups of boxes lie beside the trainer's own group rather than in it: the kernel can limit the children of a group
only if the group itself has no processes (the root of all groups is exempt). And the trainer is not moved, because
Ray's and the engine's processes are in the same group and start others all the time. So the groups of boxes are made in
the nearest group above that this user may write to and that has, or can get, the controllers `memory` and `pids`. The
search ends at a group with a memory limit: boxes beside it would escape a limit that somebody set for the whole run.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from rollout.sandbox import Limits, SandboxError
from rollout.sandbox.owner import gone, me

logger = logging.getLogger(__name__)

_PREFIX = "code-rl-box,"
_NEEDED = {"memory", "pids"}
_GONE_S = 5.0  # how long killed processes may take to disappear
_finding = threading.Lock()


class ControlGroup:
    """This is the control group of one box. It is made here, and removed by `remove`. Raises OSError."""

    def __init__(self, parent: Path, limits: Limits) -> None:
        self._path = parent / f"{_PREFIX}{me().replace('/', ',')},{secrets.token_hex(8)}"
        self._path.mkdir()
        try:
            self._write("memory.max", limits.memory_bytes)
            self._write("memory.oom.group", 1)  # all of it is killed: half a program is no result
            self._write("pids.max", limits.processes)
            if (self._path / "memory.swap.max").exists():  # a kernel without swap has none
                self._write("memory.swap.max", 0)
        except OSError:
            self._path.rmdir()
            raise

    def entered(self, argv: Sequence[str]) -> list[str]:
        """Return a command line that runs another one in the group."""
        return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self._path / "cgroup.procs"), *argv]

    def overruns(self) -> int:
        """Return how often the kernel has killed processes because the group was at its memory limit."""
        # Not `oom_kill`: that also counts what is killed because the whole machine is out of memory.
        found = re.search(r"^oom (\d+)$", self._read("memory.events"), re.MULTILINE)
        return int(found[1]) if found else 0

    def end(self) -> None:
        """Kill all processes of the group, and wait until they are gone. Blocks. Raises SandboxError unkillable."""
        deadline = time.monotonic() + _GONE_S
        while "populated 1" in self._read("cgroup.events"):
            if time.monotonic() > deadline:
                raise SandboxError("unkillable", f"processes in {self._path} are alive {_GONE_S:.0f} s after SIGKILL")
            _kill(self._path)
            time.sleep(0.002)

    def remove(self) -> None:
        """Kill what is left in the group and remove it; one that is gone is fine. Blocks."""
        _remove(self._path)

    def _read(self, name: str) -> str:
        try:
            return (self._path / name).read_text()
        except OSError:  # somebody has removed the group, which nothing can be in then
            return ""

    def _write(self, name: str, value: int) -> None:
        (self._path / name).write_text(str(value))


def made(limits: Limits) -> ControlGroup | None:
    """Return a new group for a box, None where groups are not delegated: then the box is watched."""
    above = parent()
    try:
        return ControlGroup(above, limits) if above else None
    except OSError as error:
        logger.warning("a box gets no control group and is watched: %s", error)
        return None


def parent() -> Path | None:
    """Return the group in which boxes get theirs, None if there is none (found, tried and logged once per process)."""
    with _finding:  # boxes are booted in many threads, and the first ones ask at the same time
        return _parent()


@functools.cache
def _parent() -> Path | None:
    groups = own_and_above(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text())
    found, why = choose(groups)
    # A warning in both cases, because nobody sees lower levels of the log.
    if found is None or (why := _fails(found)):
        logger.warning("the memory and processes of boxes are looked at about once a second: %s", why)
        return None
    logger.warning("the memory and processes of boxes are limited by control groups in %s", found)
    for group in found.glob(_PREFIX + "*"):
        if gone(group.name.removeprefix(_PREFIX).rpartition(",")[0].replace(",", "/"), running=True):
            _remove(group)
    return found


def own_and_above(membership: str, mounts: str) -> list[Path]:
    """Return the directories of this process's group and of all above it, none without control groups of version 2.

    membership: of /proc/self/cgroup. mounts: of /proc/self/mountinfo.
    """
    own = re.search(r"^0::(/.*)$", membership, re.MULTILINE)
    for line in mounts.splitlines():
        fields, _, kind = line.partition(" - ")
        root, point = fields.split()[3:5]
        if own and ".." not in own[1] and kind.startswith("cgroup2 ") and PurePosixPath(own[1]).is_relative_to(root):
            inside = PurePosixPath(own[1]).relative_to(root)
            return [Path(point, one) for one in (inside, *inside.parents)]
    return []


def choose(groups: Sequence[Path]) -> tuple[Path | None, str]:
    """Return the first of `own_and_above` in which boxes can have groups; else None, and why the last is not it."""
    why = "this process is in no control group of version 2"
    for group in groups:
        try:
            if not (why := _unfit(group)):
                return group, ""
            for name in ("memory.max", "memory.high"):  # the root of all groups has none
                if (group / name).exists() and (group / name).read_text().strip() != "max":
                    return None, f"{why}, and boxes beside it would escape its {name}"
        except OSError as error:
            why = str(error)
    return None, why


def _unfit(group: Path) -> str:
    """Return why boxes cannot have groups in this one, "" if they can. Turns on the controllers. Raises OSError."""
    if not set((group / "cgroup.controllers").read_text().split()) >= _NEEDED:
        return f"{group} lacks the controllers memory and pids"
    control = group / "cgroup.subtree_control"
    if not all(os.access(path, os.W_OK) for path in (group, group / "cgroup.procs", control)):
        return f"{group} is not delegated to this user"
    if not set(control.read_text().split()) >= _NEEDED:
        try:
            control.write_text(" ".join(f"+{name}" for name in sorted(_NEEDED)))
        except OSError as error:  # EBUSY
            return f"{group} has processes itself ({error.strerror})"
    return ""


def _fails(parent: Path) -> str:
    """Return why no program can be started in a group of this one, "" if it can."""
    try:
        group = ControlGroup(parent, Limits())
        try:
            command = group.entered(["/bin/true"])
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        finally:
            group.remove()
    except OSError as error:
        return str(error)
    return f"no program can enter a group in {parent}: {done.stderr.strip()}" if done.returncode else ""


def _kill(group: Path) -> None:
    try:
        (group / "cgroup.kill").write_text("1")
    except OSError:  # a kernel before 5.14
        with contextlib.suppress(OSError):
            for pid in (group / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)


def _remove(group: Path) -> None:
    deadline = time.monotonic() + _GONE_S
    while True:
        try:
            group.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            if time.monotonic() > deadline:
                logger.warning("a box's control group is left: %s", error)
                return
            _kill(group)
            time.sleep(0.002)
