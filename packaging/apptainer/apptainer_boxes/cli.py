"""The `apptainer` (or SingularityCE) program: its command lines, and what it can do for this user.

Everything is done as an ordinary user: `--userns` asks for user namespaces even where a setuid installation would do
without them. A box is started with `--containall` and sees no path of the host but those that are named here.
`--net --network none` is the one network that needs no privilege, a loopback of its own.
"""

from __future__ import annotations

import asyncio
import csv
import functools
import io
import itertools
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollout.sandbox import ExecResult, Limits, SandboxError, process
from rollout.sandbox.process import Command

logger = logging.getLogger(__name__)

# The first version of each that knows all options used here; `--no-mount bind-paths` is the newest option.
OLDEST = {"apptainer": (1, 2), "singularity-ce": (4, 0)}
_OUTPUT_CAP = 1 << 20
# The program needs these variables of the trainer's environment to ask systemd for a control group.
_SESSION = ("XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS")


@dataclass(frozen=True)
class Program:
    """A Program is the installed one of the two. name: "apptainer" or "singularity-ce". version: major, minor."""

    path: str
    name: str
    version: tuple[int, int]

    @property
    def prefix(self) -> str:
        """Return the prefix that marks variables for a box; the program removes it and sets them there."""
        return "APPTAINERENV_" if self.name == "apptainer" else "SINGULARITYENV_"


@functools.cache
def program() -> Program:
    """Return the first of apptainer and singularity on the PATH. Blocks.

    Raises SandboxError no_engine if there is none, or one that is too old.
    """
    path = shutil.which("apptainer") or shutil.which("singularity")
    if path is None:
        raise SandboxError("no_engine", "neither apptainer nor singularity is on the PATH")
    try:
        done = subprocess.run([path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError("no_engine", f"{path} --version: {error}") from error
    said = (done.stdout + done.stderr).strip()
    found = re.match(r"(\S+) version v?(\d+)\.(\d+)", said)
    if done.returncode or found is None or found[1] not in OLDEST:
        raise SandboxError("no_engine", f"{path} --version says {said[:200]!r}, which is no known version")
    version = int(found[2]), int(found[3])
    if version < OLDEST[found[1]]:
        oldest = ".".join(map(str, OLDEST[found[1]]))
        raise SandboxError("no_engine", f"{path} is {found[1]} {found[2]}.{found[3]}; it must be {oldest} or later")
    return Program(path, found[1], version)


def plain_environment(home: Path) -> dict[str, str]:
    """Return an environment for the program with nothing of the trainer's in it.

    home: where the program keeps its own files; it also marks the processes that the program starts outside of the box.
    """
    kept = {key: os.environ[key] for key in _SESSION if key in os.environ}
    return {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(home), "LANG": "C.UTF-8", **kept}


def exec_command(program: Program, image: Path, options: Iterable[str], argv: Sequence[str]) -> list[str]:
    """Return the command line that runs argv in a box of its own.

    options: more of the program's options, such as those of `Features.options` and `bind`.
    """
    # --no-eval: the values of variables and arguments are taken literally.
    alone = ["--userns", "--containall", "--cleanenv", "--no-eval", "--net", "--network", "none"]
    alone += ["--no-mount", "hostfs,cwd,bind-paths"]
    if os.geteuid() == 0:
        alone.append("--no-privs")
    return [program.path, "--quiet", "exec", *alone, *options, str(image), *argv]


def bind(source: Path, inside: str, *, read_only: bool = True) -> list[str]:
    """Return the options that show a path of this machine in a box."""
    fields = ["type=bind", f"source={source}", f"destination={inside}", *(["ro"] if read_only else [])]
    row = io.StringIO()
    csv.writer(row, lineterminator="").writerow(fields)
    return ["--mount", row.getvalue()]


async def call(argv: Sequence[str], env: dict[str, str], timeout_s: float) -> ExecResult:
    """Run the program for something other than a box's exec; if cancelled, it is ended first. Raises SandboxError."""
    command = Command(argv, env, timeout_s, output_cap=_OUTPUT_CAP)
    running = asyncio.ensure_future(process.run(command))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        command.stop.set_result(None)
        await asyncio.wait({running})
        raise


def said(done: ExecResult) -> str:
    """Return one line about why a call failed."""
    text = " ".join(done.stderr.decode(errors="replace").split())[-500:]
    return f"timed out after {done.wall_s:.0f} s: {text}" if done.timed_out else f"exit {done.returncode}: {text}"


# --- what works on this machine


@dataclass(frozen=True)
class Features:
    """Features are what works on this machine. overlay: programs may write anywhere in the image; what they write goes
    to a directory of the box. limits: control groups bound the memory, CPUs and processes of a box."""

    overlay: bool
    limits: bool

    def options(self, overlay: Path, limits: Limits) -> list[str]:
        """Return the program's options for a box. overlay: the directory that changes of the image are written to."""
        options = ["--overlay", str(overlay)] if self.overlay else []
        if self.limits:
            options += ["--memory", str(limits.memory_bytes), "--memory-swap", str(limits.memory_bytes)]
            options += ["--cpus", str(min(limits.cpus, os.cpu_count() or 1)), "--pids-limit", str(limits.processes)]
        return options


_features: dict[str, Features] = {}
_TRY = 'for n in net pid ipc; do readlink "/proc/self/ns/$n"; done; [ "$1" = no ] || : >/.box-was-here'
_TRY_S = 120.0
_TRY_LIMITS = Limits(memory_bytes=1 << 30, cpus=1.0, processes=256)


async def features(program: Program, image: Path, scratch: Path) -> Features:
    """Return what a program can do for this user here; it is tried once per process, on any image.

    scratch: an empty directory. Raises SandboxError boot_failed if no box starts at all, or only one that shares the
    machine's network or processes.
    """
    if program.path in _features:
        return _features[program.path]
    own = {os.readlink(f"/proc/self/ns/{name}") for name in ("net", "pid", "ipc")}
    env = plain_environment(scratch)
    for tried in (Features(*pair) for pair in itertools.product((True, False), repeat=2)):
        overlay = scratch / f"overlay-{tried.limits}"
        overlay.mkdir(exist_ok=True)
        options = ["--no-home", *tried.options(overlay, _TRY_LIMITS)]
        script = ["/bin/sh", "-c", _TRY, "sh", "yes" if tried.overlay else "no"]
        done = await call(exec_command(program, image, options, script), env, _TRY_S)
        if done.returncode == 0:
            break
    else:
        raise SandboxError("boot_failed", f"{program.name} starts no box with {image}: {said(done)}")
    shared = own.intersection(done.stdout.decode().split())
    if shared or done.stdout.count(b":[") != len(own):
        names = ", ".join(sorted(shared)) or "its namespaces cannot be read"
        raise SandboxError("boot_failed", f"{program.name}: a box is not separate from this machine: {names}")
    if not tried.limits:
        logger.warning(
            "%s cannot limit memory, CPUs and processes of a box here (no control groups delegated to this user)",
            program.name,
        )
    if not tried.overlay:
        logger.warning(
            "%s has no writable overlay here: programs can write to the work tree, HOME and TMPDIR only", program.name
        )
    _features[program.path] = tried
    return tried
