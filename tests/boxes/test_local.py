"""This module tests boxes of directories and processes of this machine: what only they do. The verbs are in the other
files here.
"""

from __future__ import annotations

import io
import logging
import mmap
import os
import resource
import signal
import subprocess
import sys
import sysconfig
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import uvloop

from rollout.sandbox import SandboxError, directory
from rollout.sandbox.local import box as local
from rollout.sandbox.local import bwrap
from rollout.sandbox.local.box import Isolation, boot_local
from tests.sandboxes import BWRAP, REPOSITORY, alive, make_snapshot, sh


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    return make_snapshot(tmp_path / "snapshot")


@pytest.mark.parametrize("isolation", [BWRAP])
async def test_bwrap_hides_host_files(snapshot: Path, tmp_path: Path, isolation: Isolation) -> None:
    box = await boot_local(snapshot, isolation=isolation)
    home, system = Path.home(), [Path("/var/lib"), Path("/sys/kernel")]
    try:
        for path in (tmp_path, REPOSITORY / "rollout", REPOSITORY / ".git", home / ".ssh", *system):
            assert (await sh(box, f"ls {path}")).returncode != 0, path
        # Read-only, or another's: the box may be run by root, whom ownership alone does not stop.
        for target in ("/x", "/usr/x", "/etc/x", "/etc/passwd", f"{sys.prefix}/x", "/proc/x"):
            assert (await sh(box, f"exec 3>>{target}")).returncode != 0, target
        found = await sh(box, "find /proc -path '/proc/[0-9]*' -prune -o -type f -writable -print -quit")
        assert found.stdout == b""
        before = os.stat("/dev/null")
        await sh(box, "chmod 600 /dev/null; touch -d 2001-01-01 /dev/null; chmod 666 /dev/null")
        after = os.stat("/dev/null")
        assert (before.st_ctime_ns, before.st_mode) == (after.st_ctime_ns, after.st_mode)
        assert (await sh(box, "echo x > /dev/null; head -c 1 /dev/urandom > /dev/null")).returncode == 0
    finally:
        await box.close()


@pytest.mark.bwrap
async def test_of_the_trainers_packages_a_box_shows_pytest_only(snapshot: Path) -> None:
    """Tests run on the trainer's Python with pytest. Its other packages can neither be imported nor read; the agent's
    program is shown even if it lies among them."""
    program = Path(sysconfig.get_path("purelib"), "claude_agent_sdk", "_bundled", "claude")
    box = await boot_local(snapshot, isolation="bwrap", binds={program: str(program)})
    try:
        await box.put("test_a.py", b"def test_a(): pass\n")
        ran = await sh(box, "python3 -m pytest -q test_a.py && pytest -q test_a.py")
        assert ran.stdout.count(b"1 passed") == 2, ran
        for module in ("libcst", "hypothesis", "rollout", "pip"):
            assert b"No module named" in (await sh(box, f"cd /; python3 -c 'import {module}'")).stderr
        places = " ".join(map(str, bwrap.packages()))
        seen = {*(await sh(box, f"ls -d $(printf '%s/* ' {places}) 2>/dev/null")).stdout.decode().split()}
        shown = {str(path) for paths in bwrap.packages().values() for path in paths}
        assert {path for path in seen - shown if "claude_agent_sdk" not in path} == set()
        assert {"pytest", "_pytest", "pluggy"} <= {Path(path).name for path in seen}
        assert (await sh(box, f"test -x {program} && exec 3>>$(dirname {program})/../../x")).returncode != 0
        assert (await sh(box, f"test -x {program}")).returncode == 0
        assert not list(program.parents[2].glob("x"))
    finally:
        await box.close()


async def test_a_full_disk_is_named(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise local.shutil.Error([("a", "b", "[Errno 28] No space left on device: 'b'")])

    monkeypatch.setattr(local.shutil, "copytree", full)
    with pytest.raises(SandboxError) as failure:
        await boot_local(snapshot, isolation="none")
    assert failure.value.cause == "no_space"


def test_a_start_copies_no_page_tables(snapshot: Path) -> None:
    """A fork would: then every page that this process writes next is a fault, and the loop has stood still before."""
    pages, page = 20_000, mmap.PAGESIZE

    async def main() -> int:
        box = await boot_local(snapshot, isolation="none")
        with mmap.mmap(-1, pages * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            memory.madvise(mmap.MADV_NOHUGEPAGE)

            def touch() -> int:
                before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
                for at in range(0, pages * page, page):
                    memory[at] = 1
                return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

            assert touch() > pages / 2  # the measure measures
            assert (await sh(box, "true")).returncode == 0
            faults = touch()
        await box.close()
        return faults

    assert uvloop.run(main()) < pages / 10


@pytest.mark.parametrize("program", ["cat >/dev/null", "true"])
def test_a_descriptor_is_closed_once(snapshot: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Under uvloop, too: a second close would hit the file that another thread has opened in between."""
    open_when_closed: list[bool] = []

    class Pipe(io.FileIO):
        def close(self) -> None:
            if not self.closed:
                open_when_closed.append(Path(f"/proc/self/fd/{self.fileno()}").exists())
            super().close()

    class Popen(subprocess.Popen):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            for name in ("stdin", "stdout", "stderr"):
                pipe = getattr(self, name)
                setattr(self, name, Pipe(os.dup(pipe.fileno()), pipe.mode))
                pipe.close()

    async def main() -> None:
        box = await boot_local(snapshot, isolation="none")
        monkeypatch.setattr("rollout.sandbox.process.subprocess.Popen", Popen)
        await box.exec(["sh", "-c", program], env={}, timeout_s=60, stdin=bytes(1 << 20))
        await box.close()

    uvloop.run(main())
    assert open_when_closed == [True] * 3


async def test_without_isolation_a_bind_cannot_move(snapshot: Path) -> None:
    with pytest.raises(ValueError):
        await boot_local(snapshot, isolation="none", binds={snapshot: "/elsewhere"})


async def test_auto_without_bwrap_warns_once(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bwrap, "problem", lambda: "bubblewrap is missing")
    local._warn_unprotected.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            made = await boot_local(snapshot, isolation="auto")
            assert made.isolation == "none"
            await made.close()
    assert len(caplog.records) == 1 and "without isolation" in caplog.text
    with pytest.raises(SandboxError) as failure:
        await boot_local(snapshot, isolation="bwrap")
    assert str(failure.value) == "no_bwrap: bubblewrap is missing"


def test_directories_of_a_killed_process_are_swept(snapshot: Path, tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()

    def boot_and(end: str) -> None:
        program = f"""
            import asyncio, os
            from pathlib import Path
            from rollout.sandbox.local.box import boot_local
            async def main():
                box = await boot_local(Path({str(snapshot)!r}), isolation="none")
                {end}
            asyncio.run(main())
        """
        environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(REPOSITORY)}
        subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env=environment, check=True)

    boot_and("os._exit(0)")
    assert len(list(temporary.iterdir())) == 1
    boot_and("pass")  # sweeps the first one's, and its own at its exit, though it forgot to close
    assert list(temporary.iterdir()) == []


@pytest.mark.bwrap
def test_what_a_killed_process_was_starting_is_swept(
    snapshot: Path, tmp_path: Path, nap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bwrap's programs end with their parent, but not if it dies while bwrap starts them."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    program = f"""
        import asyncio, os, sys
        from pathlib import Path
        from rollout.sandbox.local import bwrap
        from rollout.sandbox.local.box import boot_local
        async def main():
            box = await boot_local(Path({str(snapshot)!r}), isolation="bwrap")
            print(os.getpid(), flush=True)
            await box.exec(["sleep", {nap!r}], env={{}}, timeout_s=60)
        bwrap.problem()
        for _ in sys.stdin:
            worker = os.fork()
            if worker == 0:
                asyncio.run(main())
                os._exit(0)
            os.waitpid(worker, 0)
    """
    monkeypatch.setenv("RL_BOX_DIR", str(temporary))
    command = [sys.executable, "-c", textwrap.dedent(program)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as workers:
        assert workers.stdin is not None and workers.stdout is not None
        for delay in range(12):
            print("next", file=workers.stdin, flush=True)
            worker = int(workers.stdout.readline())
            while not alive(nap):  # as soon as there is bwrap's command line
                pass
            time.sleep(delay / 2000)
            os.kill(worker, signal.SIGKILL)
        workers.stdin.close()
    directory.sweep()
    assert list(temporary.iterdir()) == []
    end = time.monotonic() + 20  # a killed process is there until it is scheduled; unkilled, these sleep for longer
    while alive(nap) and time.monotonic() < end:
        time.sleep(0.05)
    assert not alive(nap)
