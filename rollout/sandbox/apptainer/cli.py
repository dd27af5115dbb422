"""The `apptainer` (or SingularityCE) program: which one there is, its command lines, what it can do for this user.

All is done as an ordinary user: `--userns` asks for user namespaces also where a setuid installation would do without.
A box is started with `--containall` and no path of the host but those named here; `--net --network none` is the one
network that needs no privilege, a loopback of its own.
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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollout.sandbox import ExecResult, SandboxError, process
from rollout.sandbox.directory import kill_group

logger = logging.getLogger(__name__)

# The first of each that knows all options used here; `--no-mount bind-paths` is the youngest of them.
OLDEST = {"apptainer": (1, 2), "singularity-ce": (4, 0)}
_OUTPUT_CAP = 1 << 20
# What the programs need of the trainer's environment to ask systemd for a control group.
_SESSION = ("XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS")


@dataclass(frozen=True)
class Program:
    """path: of the program. name: "apptainer" or "singularity-ce". version: major and minor."""

    path: str
    name: str
    version: tuple[int, int]

    @property
    def prefix(self) -> str:
        """Of environment variables that are set in a box."""
        return "APPTAINERENV_" if self.name == "apptainer" else "SINGULARITYENV_"


@functools.cache
def program() -> Program:
    """The first of apptainer and singularity on the PATH. Blocks. SandboxError no_apptainer: none, or one too old."""
    path = shutil.which("apptainer") or shutil.which("singularity")
    if path is None:
        raise SandboxError("no_apptainer", "neither apptainer nor singularity is on the PATH")
    try:
        done = subprocess.run([path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError("no_apptainer", f"{path} --version: {error}") from error
    said = (done.stdout + done.stderr).strip()
    found = re.match(r"(\S+) version v?(\d+)\.(\d+)", said)
    if done.returncode or found is None or found[1] not in OLDEST:
        raise SandboxError("no_apptainer", f"{path} --version says {said[:200]!r}, which is no known version")
    version = int(found[2]), int(found[3])
    if version < OLDEST[found[1]]:
        oldest = ".".join(map(str, OLDEST[found[1]]))
        raise SandboxError("no_apptainer", f"{path} is {found[1]} {found[2]}.{found[3]}; it must be {oldest} or later")
    return Program(path, found[1], version)


def plain_environment(home: Path) -> dict[str, str]:
    """For a program that is to know nothing of the trainer's environment. home: where it keeps its own files; what it
    starts outside of the box can be told by it."""
    kept = {key: os.environ[key] for key in _SESSION if key in os.environ}
    return {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(home), "LANG": "C.UTF-8", **kept}


def exec_command(found: Program, image: Path, options: Iterable[str], argv: Sequence[str]) -> list[str]:
    """The command line that runs argv in a box of its own. options: see `Features.options`, `bind`, `--home` ..."""
    # --no-eval: values of variables and arguments are taken as they are.
    alone = ["--userns", "--containall", "--cleanenv", "--no-eval", "--net", "--network", "none"]
    alone += ["--no-mount", "hostfs,cwd,bind-paths"]
    if os.geteuid() == 0:
        alone.append("--no-privs")
    return [found.path, "--quiet", "exec", *alone, *options, str(image), *argv]


def bind(source: Path, inside: str, *, read_only: bool = True) -> list[str]:
    """The option that shows a path of this machine in a box."""
    fields = ["type=bind", f"source={source}", f"destination={inside}", *(["ro"] if read_only else [])]
    row = io.StringIO()
    csv.writer(row, lineterminator="").writerow(fields)
    return ["--mount", row.getvalue()]


async def call(argv: Sequence[str], env: Mapping[str, str], timeout_s: float) -> ExecResult:
    """Run the program for something else than a box's exec; when cancelled, it is ended first. SandboxError."""
    stop: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def settle(pid: int) -> None:
        kill_group(pid)

    running = asyncio.ensure_future(
        process.run(
            argv,
            cwd="/",
            env=env,
            stdin=b"",
            timeout_s=timeout_s,
            stop=stop,
            output_cap=_OUTPUT_CAP,
            pass_fds=(),
            kill=kill_group,
            settle=settle,
        )
    )
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        stop.set_result(None)
        await asyncio.wait({running})
        raise


def said(done: ExecResult) -> str:
    """One line on why a call failed."""
    text = " ".join(done.stderr.decode(errors="replace").split())[-500:]
    return f"timed out after {done.wall_s:.0f} s: {text}" if done.timed_out else f"exit {done.returncode}: {text}"


# --- what works on this machine


@dataclass(frozen=True)
class Features:
    """overlay: programs may write anywhere in the image, to a directory of the box. limits: control groups bound the
    memory, CPUs and processes of a box."""

    overlay: bool
    limits: bool

    def options(self, overlay: Path, memory_bytes: int, cpus: float, processes: int) -> list[str]:
        options = ["--overlay", str(overlay)] if self.overlay else []
        if self.limits:
            cpus = min(cpus, os.cpu_count() or 1)
            options += ["--memory", str(memory_bytes), "--memory-swap", str(memory_bytes)]
            options += ["--cpus", str(cpus), "--pids-limit", str(processes)]
        return options


_features: dict[str, Features] = {}
_TRY = 'for n in net pid ipc; do readlink "/proc/self/ns/$n"; done; [ "$1" = no ] || : >/.box-was-here'
_TRY_S = 120.0


async def features(found: Program, image: Path, scratch: Path) -> Features:
    """What this program can do for this user here; tried once per process, on any image. scratch: an empty directory.

    Raises SandboxError boot_failed when no box starts at all, or one that shares the machine's network or processes.
    """
    if found.path in _features:
        return _features[found.path]
    own = {os.readlink(f"/proc/self/ns/{name}") for name in ("net", "pid", "ipc")}
    env = plain_environment(scratch)
    for tried in (Features(*pair) for pair in itertools.product((True, False), repeat=2)):
        overlay = scratch / f"overlay-{tried.limits}"
        overlay.mkdir(exist_ok=True)
        options = tried.options(overlay, 1 << 30, 1.0, 256)
        script = ["/bin/sh", "-c", _TRY, "sh", "yes" if tried.overlay else "no"]
        done = await call(exec_command(found, image, ["--no-home", *options], script), env, _TRY_S)
        if done.returncode == 0:
            break
    else:
        raise SandboxError("boot_failed", f"{found.name} starts no box with {image}: {said(done)}")
    shared = own.intersection(done.stdout.decode().split())
    if shared or done.stdout.count(b":[") != len(own):
        names = ", ".join(sorted(shared)) or "its namespaces cannot be read"
        raise SandboxError("boot_failed", f"{found.name}: a box is not separate from this machine: {names}")
    if not tried.limits:
        logger.warning(
            "%s cannot limit memory, CPUs and processes of a box here (no control groups delegated to this user)",
            found.name,
        )
    if not tried.overlay:
        logger.warning(
            "%s has no writable overlay here: programs can write to the work tree, HOME and TMPDIR only", found.name
        )
    _features[found.path] = tried
    return tried
