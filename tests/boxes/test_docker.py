"""This module tests boxes in containers, of Docker and of podman: what only they do. The verbs are in the other files
here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import uvloop
from docker.errors import APIError

from rollout.sandbox import Limits, SandboxError
from rollout.sandbox.docker.box import DockerSandbox
from rollout.sandbox.docker.engine import ContainerEngine, get_engine
from tests.boxes.kinds import BoxKit, kinds
from tests.docker_kit import small_image
from tests.sandboxes import REPOSITORY, alive, begun, sh

pytestmark = kinds("docker", "podman")


# --- exec


@pytest.mark.parametrize("output", [">/dev/null 2>&1", ""])
async def test_without_the_shell_that_ends_the_rest(box: DockerSandbox, nap: str, output: str) -> None:
    """A program kills the shell that would end what it has started, with its output closed or still open."""
    done = await sh(box, f"echo done > done; kill -9 $PPID; (setsid sleep {nap} {output} &)\nsleep 0.05")
    assert done.wall_s < 20 and not done.timed_out and not alive(nap)
    assert (await sh(box, "cat done")).stdout == b"done\n"  # the box goes on, with its files


async def test_orphans_leave_no_zombies(box: DockerSandbox) -> None:
    count = "for i in 1 2 3 4 5; do (true &); done; sleep 0.2; cat /proc/[0-9]*/stat | grep -c ' Z '"
    assert (await sh(box, count)).stdout == b"0\n"


async def test_what_the_engine_is_told(kind: BoxKit) -> None:
    box = await kind.boot(limits=Limits(memory_bytes=64 * 2**20, cpus=0.5))
    assert isinstance(box, DockerSandbox)
    try:
        await sh(box, "echo logged > /proc/1/fd/1")  # a box cannot fill the engine's log
        host = get_engine().client.inspect_container(box.container)["HostConfig"]
        assert (host["NanoCpus"], host["MemorySwap"]) == (5 * 10**8, 64 * 2**20)
        assert host["LogConfig"]["Type"] == "none"
    finally:
        await box.close()
    for use in (box.get("README.md"), box.put("x", b"")):
        with pytest.raises(SandboxError, match="closed"):
            await use


# --- files


async def test_files_in_a_system_of_the_boxs_own(box: DockerSandbox) -> None:
    await box.put(f"{box.tmpdir}/c", b"")
    assert (await sh(box, "stat -c %a:%u /tmp . /tmp/c")).stdout.split() == [b"1777:0", b"755:0", b"644:0"]
    await sh(box, "cp /etc/passwd /etc/kept; chmod u+w /; mv /tmp /was; ln -s /etc /tmp")
    with pytest.raises(SandboxError, match="put_failed"):
        await box.put("/tmp/passwd", b"changed")
    with pytest.raises(FileNotFoundError):
        await box.get("/tmp/passwd")
    assert (await sh(box, "cmp /etc/passwd /etc/kept")).returncode == 0


async def test_diff_ends_what_still_runs(box: DockerSandbox, nap: str) -> None:
    created = get_engine().client.exec_create(box.container, ["sleep", nap])  # behind the sandbox's back
    get_engine().client.exec_start(created["Id"], detach=True)
    while not alive(nap):
        await asyncio.sleep(0.02)
    await box.diff()
    assert not alive(nap)


# --- what breaks


async def test_a_container_that_is_paused_past_the_limit(box: DockerSandbox, nap: str) -> None:
    """It is not the program that was too slow."""
    running = asyncio.create_task(sh(box, f"sleep {nap}", timeout_s=3))
    await begun(nap, running)
    await asyncio.to_thread(get_engine().client.pause, box.container)
    with pytest.raises(SandboxError, match="box_killed: the container is paused"):
        await running


async def test_a_container_that_is_removed(box: DockerSandbox, nap: str) -> None:
    running = asyncio.create_task(sh(box, f"sleep {nap}"))
    await begun(nap, running)
    await asyncio.to_thread(get_engine().client.remove_container, box.container, force=True)
    with pytest.raises(SandboxError) as failure:
        await running
    assert failure.value.cause in ("box_killed", "exec_failed", "docker_failed")


async def test_an_engine_that_has_not_begun_when_the_program_is_to_stop(
    box: DockerSandbox, nap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Docker answers that it starts a program and then starts it. A look between the two must not be taken for the
    program's end: it would begin after that."""
    engine, looks, running, asked = get_engine(), [], [], []
    inspect, stream = engine.client.exec_inspect, engine.open_stream

    async def open_stream(exec_id: str) -> Any:
        asked.append(exec_id)
        looks.append(inspect(exec_id))  # what it says of a program that it has not begun
        opened = await stream(exec_id)
        running[0].cancel()
        return opened

    monkeypatch.setattr(engine, "open_stream", open_stream)
    monkeypatch.setattr(engine.client, "exec_inspect", lambda exec_id: looks.pop() if looks else inspect(exec_id))
    running.append(asyncio.create_task(sh(box, f"sleep {nap}")))
    with pytest.raises(asyncio.CancelledError):
        await running[0]
    while not ((state := inspect(asked[0]))["Pid"] or state["ExitCode"] is not None):
        await asyncio.sleep(0.01)
    assert not alive(nap)


@pytest.mark.parametrize("listed", [[["1", "sleep"]], [], None], ids=["listed", "not listed", "an error"])
async def test_an_engine_that_lags_does_not_hide_that_the_container_was_ended(
    box: DockerSandbox, nap: str, monkeypatch: pytest.MonkeyPatch, listed: list[list[str]] | None
) -> None:
    """The first process ends after all others. On a busy machine the engine may still list it when the program is
    already gone, or list nothing and yet say that the container runs."""
    running = asyncio.create_task(sh(box, f"sleep {nap}"))
    await begun(nap, running)
    client, said = get_engine().client, []

    def processes(self: ContainerEngine, container: str) -> list[list[str]]:
        if listed is None:
            raise APIError("top: no such process")
        return listed

    def inspect(container: str) -> Any:
        said.append(type(client).inspect_container(client, container))
        said[-1]["State"]["Running"] |= len(said) == 1
        return said[-1]

    monkeypatch.setattr(ContainerEngine, "processes", processes)
    monkeypatch.setattr(client, "inspect_container", inspect)
    await asyncio.to_thread(client.kill, box.container)
    with pytest.raises(SandboxError) as failure:
        await running
    assert failure.value.cause == "box_killed"


def test_an_engine_that_does_not_answer(kind: BoxKit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(SandboxError) as failure:
        ContainerEngine()
    assert failure.value.cause == "no_engine" and "\n" not in str(failure.value)


def test_boxes_of_a_killed_process_are_reaped_and_no_others(kind: BoxKit) -> None:
    """The next process that asks for the engine, as every start of a run does, ends them."""
    naps = [f"{10**6 + os.getpid()}.{number}" for number in range(2)]
    program = f"""
        import asyncio, os
        from rollout.sandbox.docker.box import boot_docker
        from rollout.sandbox.sealing import Source
        async def work(nap):
            box = await boot_docker(Source({small_image()!r}))
            print(os.getpid(), box.container, flush=True)
            await box.exec(["sleep", nap], env={{}}, timeout_s=600)
        for nap in {naps}:
            if os.fork() == 0:
                asyncio.run(work(nap))
                os._exit(0)
            os.read(0, 1)
        os.wait()
        os.wait()
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    workers: list[tuple[int, str]] = []
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, text=True, **pipes) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        try:
            for nap in naps:
                worker, container = parent.stdout.readline().split()
                workers.append((int(worker), container))
                while not alive(nap):
                    assert parent.poll() is None
                print(file=parent.stdin, flush=True)
            (killed, dead), (_, living) = workers
            os.kill(killed, signal.SIGKILL)
            while not gone(killed):
                pass
            assert alive(naps[0])  # nobody has ended it yet
            ContainerEngine()
            assert not alive(naps[0]) and alive(naps[1])
            there = {container["Id"] for container in get_engine().client.containers(all=True)}
            assert dead not in there and living in there
        finally:
            for worker, _ in workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)
            parent.stdin.close()
    get_engine().reap()
    assert not alive(naps[1])


def gone(pid: int) -> bool:
    """Return whether a process has ended; its parent may not have asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second: it was reaped while the file was open
        return True


def test_spares_of_a_killed_process_are_removed_at_once(kind: BoxKit) -> None:
    """Nobody has to ask for the engine; another process waits for the end of this one."""
    program = f"""
        import asyncio, os, signal
        from rollout.sandbox.docker.box import boot_docker
        from rollout.sandbox.sealing import Source
        from tests.docker_kit import ready
        async def work():
            box = await boot_docker(Source({small_image()!r}), warm=1)
            await ready(box)
            print(*[made.result()[0] for made, _ in box._engine.spares._all.values()], box.container, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        asyncio.run(work())
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    told = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, cwd="/").stdout.split()
    assert len(told) == 2
    client = get_engine().client
    while {*told} & {container["Id"] for container in client.containers(all=True)}:
        pass


def test_output_that_comes_at_once_is_whole(kind: BoxKit) -> None:
    """Many short programs, from two event loops: all of their output arrives, from the first byte."""

    async def main() -> None:
        made = await kind.boot()
        try:
            for number in range(6):
                assert (await made.exec(["echo", str(number)], env={}, timeout_s=30)).stdout == b"%d\n" % number
        finally:
            await made.close()

    other = threading.Thread(target=asyncio.run, args=(main(),))
    other.start()
    uvloop.run(main())
    other.join()
