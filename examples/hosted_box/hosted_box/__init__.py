"""Boxes of a hosted service, Modal: each is a sandbox of theirs. It was never run there; see README.md."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import tempfile
import time
from collections.abc import AsyncIterable, Generator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import modal

from hosted_box import relay
from rewards.task import Task
from rl.config.compose import ConfigError
from rl.episodes.boxes import Kind
from rollout.sandbox import (
    PATCH_CAP,
    WORKDIR,
    ExecResult,
    Limits,
    PatchTooLarge,
    Sandbox,
    SandboxError,
    infrastructure,
)
from rollout.sandbox.base import BaseSandbox, mounts_of
from rollout.sandbox.directory import ulimits
from rollout.sandbox.docker.files import packed
from rollout.sandbox.ignored import IgnoredPaths
from rollout.sandbox.process import Command, Output
from rollout.sandbox.tartree import TarTree
from rollout.sandbox.treediff import Directory, patch_between

CHUNK, TREE_CAP = 4 << 20, 512 << 20  # bytes of one write to a program, and of a work tree without .git
GRACE_S, HELPER_S = 20.0, 300.0
# What the agent starts is a user's who can become no other, so what is left of it can be ended. The relay, tar and the
# files of the image are root's.
USER = (1000, 1000)
SET = shlex.split("setpriv --reuid=1000 --regid=1000 --clear-groups --inh-caps=-all --bounding-set=-all --no-new-privs")
AS_USER = [*SET, "sh", "-c"]
# The input is taken as a whole before the program begins: if it does not arrive, the program is not to blame.
RUN = 'f=$(mktemp) && cat >"$f" && exec <"$f" && rm "$f" || exit 126; "$@"; c=$?; kill -9 -1 2>/dev/null; exit $c'
PUT = """set -e; d=$(dirname "$1"); [ "$(realpath -m "$d")" = "$d" ]; mkdir -p "$d"; t=$(mktemp "$d/.put-XXXXXX")
cat >"$t"; chmod 644 "$t"; mv -fT "$t" "$1" """
GET = '[ -f "$1" ] && [ "$(realpath "$1")" = "$1" ] && exec cat "$1"'
PACK = f"set -o pipefail; tar -c --hard-dereference --exclude=./.git -C {WORKDIR} . | head -c {TREE_CAP}"


@contextlib.contextmanager
def service(cause: str) -> Generator[None]:
    """Make whatever the SDK raises the service's failure."""
    try:
        yield
    except Exception as error:
        raise SandboxError(cause, f"modal: {type(error).__name__}: {error}") from error


class Modal(Kind):
    """Boxes are sandboxes of Modal, made from one image, with a copy of the task's snapshot."""

    numbers = (*Kind.numbers, "memory_mb", "cpus", "processes", "lifetime_s")

    def check(self) -> None:
        try:
            modal.App.lookup(self.sandbox.app, create_if_missing=True)
        except Exception as error:
            raise ConfigError(f"sandbox=modal: {error}; has `modal token new` been run here?") from error

    @infrastructure("boot_failed")
    async def boot_box(self, task: Task, grading: bool, run: str, **common: Any) -> Sandbox:
        limits, sockets = common["limits"], common["socket_dir"]
        shown = mounts_of(task.snapshot, common["binds"], None)
        with service("boot_failed"):
            app = await modal.App.lookup.aio(self.sandbox.app, create_if_missing=True)
            image = modal.Image.from_registry(self.sandbox.image)
            for path, inside in shown:  # the service keeps what it has been sent
                image = (image.add_local_dir if path.is_dir() else image.add_local_file)(path, inside, copy=True)
            memory, life = limits.memory_bytes >> 20, int(self.sandbox.lifetime_s)
            size: dict[str, Any] = {"cpu": (limits.cpus, limits.cpus), "memory": (memory, memory), "timeout": life}
            sandbox = await modal.Sandbox.create.aio(
                "sleep", "infinity", app=app, image=image, tags={"run": run or "-"}, block_network=True, **size
            )
        box = Box(sandbox, task.snapshot, limits, sockets)
        try:
            tree = await asyncio.to_thread(packed, task.snapshot, USER)
            checked("boot_failed", await box.helper(["tar", "-x", "-C", "/"], tree))
            above = {str(parent) for _, inside in shown for parent in Path(inside).parents}
            checked("boot_failed", await box.helper(["chmod", "a+rx", "/", *above, *(inside for _, inside in shown)]))
        except BaseException:
            await box.close()
            raise
        return box


class Box(BaseSandbox):
    """A box is a sandbox of the service; every exec in it is an exec of theirs."""

    relays = True

    def __init__(self, sandbox: modal.Sandbox, snapshot: Path, limits: Limits, sockets: Path | None) -> None:
        super().__init__(in_turn=True)
        self._sandbox, self._snapshot, self._sockets = sandbox, snapshot, sockets
        self._shell = [*AS_USER, ulimits(limits, processes=True) + RUN, "sh"]
        self._relays: dict[Path, asyncio.Future[None]] = {}

    async def run_program(self, command: Command) -> ExecResult:
        started, output = time.monotonic(), Output(command.output_cap)
        for path in self._sockets.iterdir() if self._sockets else ():
            if path.is_socket() and path not in self._relays:
                await self._let_in(path)
        argv = [*self._shell, *command.argv]
        running = asyncio.ensure_future(self._played(argv, command.stdin, output, {**command.env}, WORKDIR))
        ends = {running, command.stop, *self._relays.values()}
        try:
            await asyncio.wait(ends, timeout=command.timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if late := not running.done():
                await self.helper([*AS_USER, "kill -9 -1"])
                await asyncio.wait({running}, timeout=GRACE_S)
            if any(one.done() for one in self._relays.values()):
                raise SandboxError("box_killed", "the way to the session's socket has ended")
            if not running.done():
                raise SandboxError("unkillable", "a program is alive after SIGKILL")
            return output.result(None if late else running.result(), late, started)
        finally:
            running.cancel()

    async def _let_in(self, path: Path) -> None:
        with service("exec_failed"):
            text = Path(relay.__file__).read_text()
            process = await self._sandbox.exec.aio("python3", "-I", "-c", text, str(path), text=False)

        async def send(data: bytes) -> None:
            process.stdin.write(data)
            await process.stdin.drain.aio()

        end = relay.Relay(send, lambda: asyncio.open_unix_connection(path))
        self._relays[path] = asyncio.ensure_future(end.take(process.stdout))
        listening = asyncio.ensure_future(end.listening.wait())
        await asyncio.wait({listening, self._relays[path]}, timeout=HELPER_S, return_when=asyncio.FIRST_COMPLETED)
        if not listening.done():
            listening.cancel()
            raise SandboxError("exec_failed", "no relay in the box: its image has no python3, or the service is slow")

    async def helper(self, argv: Sequence[str], stdin: bytes = b"", cap: int = 64 << 20) -> ExecResult:
        """Run a program of ours as root."""
        output, started = Output(cap), time.monotonic()
        code = await asyncio.wait_for(self._played(argv, stdin, output, {}, None), HELPER_S)
        return output.result(code, False, started)

    async def _played(
        self, argv: Sequence[str], stdin: bytes, output: Output, env: dict[str, str | None], workdir: str | None
    ) -> int:
        async def take(number: int, stream: AsyncIterable[bytes]) -> None:
            async for data in stream:
                output.take(number, data)

        with service("exec_failed"):
            process = await self._sandbox.exec.aio(*argv, env=env, workdir=workdir, text=False)
            streams = asyncio.gather(take(1, process.stdout), take(2, process.stderr))
            for at in range(0, len(stdin), CHUNK):
                process.stdin.write(stdin[at : at + CHUNK])
                await process.stdin.drain.aio()
            process.stdin.write_eof()
            await process.stdin.drain.aio()
            await streams
            return await process.wait.aio()

    async def write_file(self, base: str, relative: PurePosixPath, data: bytes) -> None:
        checked("put_failed", await self.helper([*AS_USER, PUT, "sh", f"{base}/{relative}"], data))

    async def read_file(self, base: str, relative: PurePosixPath) -> bytes:
        done = await self.helper([*AS_USER, GET, "sh", f"{base}/{relative}"])
        if done.returncode or done.truncated:
            raise FileNotFoundError(f"no regular file, or a huge one, at {relative}")
        return done.stdout

    async def changes(self) -> bytes:
        done = await self.helper(["bash", "-c", PACK], cap=TREE_CAP)
        if len(done.stdout) == TREE_CAP:
            raise PatchTooLarge(f"a work tree of more than {TREE_CAP} bytes")
        return await asyncio.to_thread(self._patch, checked("diff_failed", done))

    def _patch(self, archive: bytes) -> bytes:
        old = Directory(os.fsencode(self._snapshot))
        with tempfile.TemporaryDirectory() as name, IgnoredPaths(old, Path(name, "ignored")) as ignored:
            (tar := Path(name, "tar")).write_bytes(archive)
            return patch_between(old, TarTree(tar), Path(name, "git"), PATCH_CAP, ignored)

    async def remove(self) -> None:
        for one in self._relays.values():
            one.cancel()
        with service("box_killed"):
            await self._sandbox.terminate.aio()


def checked(cause: str, done: ExecResult) -> bytes:
    """Return what a program of ours has printed. Raises SandboxError if it failed."""
    if done.returncode:
        raise SandboxError(cause, done.stderr.decode(errors="replace")[-500:])
    return done.stdout
