"""A sandbox made by `apptainer` or SingularityCE: no container engine, no root.

`boot_apptainer` makes a box from the sealed image of a task (see `apptainer_boxes.images`): a private copy of
the work tree, a HOME and a temporary directory on this machine, bound over a read-only image. Every exec is a container
of its own on them, with its own user, process, IPC and network namespaces; it sees no path of the machine but those
directories, the caller's read-only binds and the socket directory. Where the machine allows it, an overlay in the box's
directory lets programs write to the rest of the image too.

Nothing outlives an exec: when process 1 of its namespace ends, everything in it ends. Programs run one after another.

The limits of each process are enforced. Memory, CPUs and processes of a box are limited where control groups are
delegated to this user; elsewhere only the number of processes is, per user namespace, on Linux 5.14 or later, unless
this process runs as root. `Limits.disk_bytes` is not enforced.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import psutil

from apptainer_boxes import cli as apptainer_cli
from apptainer_boxes import images as apptainer_images
from apptainer_boxes.cli import Features, Program, bind, exec_command
from apptainer_boxes.images import IN_USE_S, Cache, Sif
from rollout.sandbox import HOME, TMPDIR, WORKDIR, ExecResult, Limits, SandboxError, files, infrastructure, process
from rollout.sandbox.base import mounts_of
from rollout.sandbox.directory import DirectorySandbox, built, kill_strays, make_root, ulimits
from rollout.sandbox.process import Command
from rollout.sandbox.sealing import Source
from rollout.sandbox.tartree import TarTree
from rollout.sandbox.treediff import Directory, Origin

# The first thing a program's shell does is to say that the box has started, by a word that nobody could know before;
# what apptainer itself says comes earlier. HOME is set here because apptainer does not take it from the environment.
_RUN = 'printf %s "$1" >&2; HOME=$2; export HOME; shift 2; {limits}"$@"; exit $?'
_SPARE = 1 << 16  # bytes of stderr for what apptainer says before that
_EXIT_S = 2.0  # how long apptainer may take to clean up after a box was killed


@infrastructure("boot_failed")
async def boot_apptainer(
    source: Source,
    cache: Cache,
    *,
    snapshot: Path | None = None,
    limits: Limits = Limits(),  # noqa: B008  frozen
    binds: Mapping[Path, str] | None = None,
    socket_dir: Path | None = None,
) -> ApptainerSandbox:
    """Return a fresh sandbox on the sealed image of `source`, which is pulled and sealed first if it is not there.

    snapshot: a directory with a git repository, small and sealed already; the work tree is a copy of it, and the
    source's image has only the tools. binds: host path -> path inside, read-only. socket_dir: a host directory that
    appears at its own path inside; unix sockets in it can be connected to. The caller closes the sandbox.
    Raises SandboxError: no_engine, missing_image, missing_snapshot, seal_failed, no_git, missing_bind, no_space,
    boot_failed.
    """
    mounts = await asyncio.to_thread(mounts_of, snapshot, binds, socket_dir)
    program = await asyncio.to_thread(apptainer_cli.program)
    if snapshot is None:
        sif = await apptainer_images.sealed(cache, program, source)
    else:
        sif = await apptainer_images.plain(cache, program, source.image)

    def fill(root: Path) -> None:
        for name in ("host", "overlay", "try"):
            (root / name).mkdir()
        if snapshot is not None:
            shutil.copytree(snapshot, root / "tree", symlinks=True)
        else:
            _unpack(sif.tree, root / "tree")

    root = await built(lambda: make_root(fill))
    try:
        able = await apptainer_cli.features(program, sif.image, root / "try")
    except BaseException:
        await asyncio.shield(asyncio.to_thread(files.remove_tree, root))
        raise
    return ApptainerSandbox(program, able, sif, snapshot, root, mounts, limits)


class ApptainerSandbox(DirectorySandbox):
    """This sandbox is a tree that containers of apptainer run in; see `boot_apptainer`."""

    def __init__(
        self,
        program: Program,
        able: Features,
        sif: Sif,
        snapshot: Path | None,
        root: Path,
        mounts: list[tuple[Path, str]],
        limits: Limits,
    ) -> None:
        super().__init__(root, WORKDIR, HOME, TMPDIR, strays=True, in_turn=True)
        self._program, self._sif, self._snapshot = program, sif, snapshot
        self._options = [*able.options(root / "overlay", limits), "--home", f"{root / 'home'}:{HOME}", "--pwd", WORKDIR]
        for name, inside in (("tree", WORKDIR), ("tmp", TMPDIR), ("tmp", "/var/tmp")):
            self._options += bind(root / name, inside, read_only=False)
        for path, inside in mounts:
            self._options += bind(path, inside)
        by_user = not able.limits and os.geteuid() != 0 and _counts_by_namespace()
        self._shell = _RUN.format(limits=ulimits(limits, processes=by_user))
        self._using = asyncio.ensure_future(self._keep_image())

    async def close(self) -> None:
        """End all processes and delete all files; see `Sandbox.close`."""
        self._using.cancel()
        await super().close()

    async def _keep_image(self) -> None:
        while True:
            await asyncio.sleep(IN_USE_S / 6)
            await asyncio.to_thread(self._sif.used)

    def origin(self) -> Origin:
        """Return the sealed work tree, or the snapshot."""
        return TarTree(self._sif.tree) if self._snapshot is None else Directory(os.fsencode(self._snapshot))

    async def run_program(self, command: Command) -> ExecResult:
        """Run one program in a container of its own; see `BaseSandbox.run_program`."""
        word = secrets.token_hex(16)
        script = ["/bin/sh", "-c", self._shell, "sh", word, command.env["HOME"], *command.argv]
        inside = {self._program.prefix + key: value for key, value in command.env.items() if key != "HOME"}
        loop = asyncio.get_running_loop()
        late: asyncio.TimerHandle | None = None

        def kill(pid: int) -> None:
            nonlocal late
            if _kill_first(pid):
                late = loop.call_later(_EXIT_S, process.kill_group, pid)
            else:
                process.kill_group(pid)

        async def settle() -> None:
            if late is not None:
                late.cancel()
            await asyncio.to_thread(kill_strays, self.root)

        cap = command.output_cap
        outer = replace(
            command,
            argv=exec_command(self._program, self._sif.image, self._options, script),
            env={**apptainer_cli.plain_environment(self.root / "host"), **inside},
            output_cap=cap + _SPARE,
        )
        done = await process.run(outer, kill=kill, settle=settle, runner=True)
        before, started, stderr = done.stderr.partition(word.encode())
        if not started and not done.timed_out:
            text = " ".join(before.decode(errors="replace").split())[-500:]
            gone = not self._sif.image.exists()
            raise SandboxError("missing_image" if gone else "exec_failed", f"{self._sif.image}: {text}")
        truncated = done.truncated or max(len(done.stdout), len(stderr)) > cap
        return replace(done, stdout=process.cut(done.stdout, cap), stderr=process.cut(stderr, cap), truncated=truncated)


def _unpack(archive: Path, place: Path) -> None:
    """Unpack a tar archive into a new directory. Raises OSError."""
    place.mkdir()
    done = subprocess.run(
        ["tar", "--extract", "--no-same-owner", "--same-permissions", f"--file={archive}", f"--directory={place}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={**os.environ, "LC_ALL": "C"},
    )
    if done.returncode != 0:
        raise OSError(f"{archive}: {done.stderr.decode(errors='replace').strip()[-500:]}")


def _kill_first(pid: int) -> bool:
    """Send SIGKILL to process 1 of every process namespace below a process, and return whether there was one.

    The kernel ends the others in the namespace; then apptainer sees its box end, and cleans up.
    """
    killed = False
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(OSError):
                ids = re.search(r"^NSpid:\s+(.+)$", Path(f"/proc/{child.pid}/status").read_text(), re.MULTILINE)
                if ids and "\t" in ids[1] and ids[1].split()[-1] == "1":
                    os.kill(child.pid, signal.SIGKILL)
                    killed = True
    return killed


def _counts_by_namespace() -> bool:
    """Return whether the kernel counts a user's processes per user namespace, so that a limit spares the trainer's."""
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return release is not None and (int(release[1]), int(release[2])) >= (5, 14)
