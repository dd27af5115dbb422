"""Sandboxes by `apptainer` or SingularityCE, for machines without a container engine and users without root.

`boot_apptainer` makes a box from the sealed image of a task (see `rollout.sandbox.apptainer.images`): a private copy of
the work tree, a HOME and a temporary directory on this machine, bound over a read-only image. Every exec is a
container of its own on them: user, process, IPC and network namespaces, no path of the machine but those directories,
the caller's read-only binds and the socket directory. Where the machine allows it, an overlay in the box's directory
lets programs write to the rest of the image too, and control groups bound its memory, CPUs and processes.

Nothing outlives an exec: the end of process 1 of its namespace is the end of all. Programs run one after another.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import secrets
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

import psutil

from rollout.sandbox import ExecResult, Limits, SandboxError, directory, files, process
from rollout.sandbox.apptainer import cli as apptainer_cli
from rollout.sandbox.apptainer import images as apptainer_images
from rollout.sandbox.apptainer.cli import Features, Program, bind, exec_command
from rollout.sandbox.apptainer.images import IN_USE_S, Cache, Sif, TarTree
from rollout.sandbox.sealing import HOME, WORKDIR, Source
from rollout.sandbox.treediff import Directory, Tree

TMPDIR = "/tmp"
# The first thing a program's shell does is to say that the box has started, by a word that nobody knows before. What
# apptainer itself says comes earlier. HOME is set here because apptainer does not take it from the environment.
_RUN = 'printf %s "$1" >&2; HOME=$2; export HOME; shift 2; {limits}"$@"; exit $?'
_SPARE = 1 << 16  # bytes of stderr for what apptainer says before that
_EXIT_S = 2.0  # how long apptainer may take to clean up after a box was killed


async def boot_apptainer(
    source: Source,
    cache: Cache,
    *,
    snapshot: Path | None = None,
    limits: Limits = Limits(),  # noqa: B008  frozen
    binds: Mapping[Path, str] | None = None,
    socket_dir: Path | None = None,
) -> ApptainerSandbox:
    """A fresh sandbox on the sealed image of `source`, which is pulled and sealed first where it was not ahead.

    snapshot: a directory with a git repository, small and sealed as it is; the work tree is a copy of it, and the
    source's image only what it needs. binds: host path -> path inside, read-only. socket_dir: a host directory that
    appears at its own path inside; unix sockets in it can be connected to. The caller closes the sandbox.
    Raises SandboxError: no_apptainer, missing_image, missing_snapshot, seal_failed, no_git, missing_bind, no_space,
    boot_failed.
    """
    found = await asyncio.to_thread(apptainer_cli.program)
    if snapshot is not None and not snapshot.is_dir():
        raise SandboxError("missing_snapshot", str(snapshot))
    mounts = [(path.absolute(), inside) for path, inside in (binds or {}).items()]
    if socket_dir is not None:
        mounts.append((socket_dir.absolute(), str(socket_dir.absolute())))
    directory.check_mounts(mounts)
    if snapshot is None:
        sif = await apptainer_images.sealed(cache, found, source)
    else:
        sif = await apptainer_images.plain(cache, found, source.image)

    def fill(root: Path) -> None:
        for name in ("host", "overlay", "try"):
            (root / name).mkdir()
        if snapshot is not None:
            shutil.copytree(snapshot, root / "tree", symlinks=True)
        else:
            _unpack(sif.tree, root / "tree")

    root = await directory.built(lambda: directory.make_root(fill))
    try:
        able = await apptainer_cli.features(found, sif.image, root / "try")
    except BaseException:
        await asyncio.shield(asyncio.to_thread(files.remove_tree, root))
        raise
    return ApptainerSandbox(found, able, sif, snapshot, root, mounts, limits)


class ApptainerSandbox(directory.DirectorySandbox):
    """See `boot_apptainer` and the protocol in `rollout.sandbox`."""

    def __init__(
        self,
        found: Program,
        able: Features,
        sif: Sif,
        snapshot: Path | None,
        root: Path,
        mounts: list[tuple[Path, str]],
        limits: Limits,
    ) -> None:
        super().__init__(root, WORKDIR, HOME, TMPDIR, strays=True)
        self._program, self._sif, self._snapshot = found, sif, snapshot
        self._options = [
            *able.options(root / "overlay", limits.memory_bytes, limits.cpus, limits.processes),
            *("--home", f"{root / 'home'}:{HOME}", "--pwd", WORKDIR),
            *bind(root / "tree", WORKDIR, read_only=False),
            *bind(root / "tmp", TMPDIR, read_only=False),
            *bind(root / "tmp", "/var/tmp", read_only=False),
        ]
        for path, inside in mounts:
            self._options += bind(path, inside)
        shell = directory.ulimits(limits)
        if not able.limits and os.geteuid() != 0 and _counts_by_namespace():
            shell += f"ulimit -u {limits.processes} 2>/dev/null || ulimit -p {limits.processes}; "  # bash's, dash's
        self._shell = _RUN.format(limits=shell)
        self._turn = asyncio.Lock()
        self._using = asyncio.ensure_future(self._keep_image())

    async def close(self) -> None:
        self._using.cancel()
        await super().close()

    async def _keep_image(self) -> None:
        while True:
            await asyncio.sleep(IN_USE_S / 6)
            await asyncio.to_thread(self._sif.used)

    def _environment(self) -> dict[str, str]:
        return {"HOME": HOME, "TMPDIR": TMPDIR, "LANG": "C.UTF-8"}

    def _origin(self) -> Tree:
        if self._snapshot is not None:
            return Directory(os.fsencode(self._snapshot))
        return TarTree(self._sif.tree)

    async def _run(self, command: directory.Command) -> ExecResult:
        async with self._turn:
            if command.stop.done():
                raise SandboxError("closed", "told to stop before it began")
            return await self._run_now(command)

    async def _run_now(self, command: directory.Command) -> ExecResult:
        word = secrets.token_hex(16)
        script = ["/bin/sh", "-c", self._shell, "sh", word, command.env["HOME"], *command.argv]
        inside = {self._program.prefix + key: value for key, value in command.env.items() if key != "HOME"}
        loop = asyncio.get_running_loop()
        late: asyncio.TimerHandle | None = None

        def kill(pid: int) -> None:
            nonlocal late
            if not _kill_first(pid):
                directory.kill_group(pid)
                return
            late = loop.call_later(_EXIT_S, directory.kill_group, pid)

        async def settle(pid: int) -> None:
            if late is not None:
                late.cancel()
            directory.kill_group(pid)
            await asyncio.to_thread(directory.kill_strays, self._root)

        done = await process.run(
            exec_command(self._program, self._sif.image, self._options, script),
            cwd="/",
            env={**apptainer_cli.plain_environment(self._root / "host"), **inside},
            stdin=command.stdin,
            timeout_s=command.timeout_s,
            stop=command.stop,
            output_cap=command.output_cap + _SPARE,
            pass_fds=(),
            kill=kill,
            settle=settle,
            runner=True,
        )
        before, started, stderr = done.stderr.partition(word.encode())
        if not started and not done.timed_out:
            text = " ".join(before.decode(errors="replace").split())[-500:]
            gone = not self._sif.image.exists()
            raise SandboxError("missing_image" if gone else "exec_failed", f"{self._sif.image}: {text}")
        cap = command.output_cap
        return dataclasses.replace(
            done,
            stdout=done.stdout[:cap],
            stderr=stderr[:cap],
            truncated=done.truncated or len(done.stdout) > cap or len(stderr) > cap,
        )


def _unpack(archive: Path, place: Path) -> None:
    """OSError."""
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
    """SIGKILL to process 1 of every process namespace that was made below a process; the kernel ends the others. Then
    apptainer sees its box end, and cleans up. Returns whether there was one."""
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
    """Whether the kernel counts a user's processes per user namespace; else the limit would count the trainer's."""
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return release is not None and (int(release[1]), int(release[2])) >= (5, 14)
