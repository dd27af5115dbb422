"""This module tests boot, cancellation, close and limits, on every kind of box; nothing is left of a box that is
closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from rollout.sandbox import Limits, Sandbox, SandboxError
from rollout.sandbox.local import cgroup
from tests.boxes.kinds import BoxKit, kinds
from tests.sandboxes import alive, begun, sh

MIB = 2**20


# --- boot


async def test_boxes_are_private_and_vanish(kind: BoxKit) -> None:
    first, second = [await kind.boot() for _ in range(2)]
    deep = "import os; [(os.mkdir('d'), os.chdir('d')) for _ in range(1100)]"  # more levels than Python recurses
    await sh(first, f'echo 1 > README.md; chmod -R 000 pkg; python3 -c "{deep}"')
    assert await second.get("README.md") == b"hello\n" == (kind.repository / "README.md").read_bytes()
    for box in (first, second):
        await box.close()
        await box.close()
    assert kind.left() == []
    for use in (first.diff(), sh(first, "true")):
        with pytest.raises(SandboxError) as failure:
            await use
        assert failure.value.cause == "closed"


async def test_many_at_once(kind: BoxKit) -> None:
    async def one(number: int) -> bytes:
        box = await kind.boot()
        try:
            await sh(box, f"echo {number} > README.md")
            assert b"+%d\n" % number in await box.diff()
            return await box.get("README.md")
        finally:
            await box.close()

    numbers = range(16 if kind.name in ("plain", "bwrap") else 8)
    assert await asyncio.gather(*map(one, numbers)) == [b"%d\n" % number for number in numbers]


async def test_a_cancelled_boot_leaves_nothing(kind: BoxKit) -> None:
    for delay in kind.moments:
        booting = asyncio.create_task(kind.boot())
        await asyncio.sleep(delay)
        booting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await booting).close()
    assert kind.left() == []


async def test_boot_failures_have_causes(kind: BoxKit) -> None:
    gone = Path("/no/such")
    for options, cause in (
        ({"snapshot": gone}, "missing_snapshot"),
        ({"binds": {gone: "/x"}}, "missing_bind"),
        ({"socket_dir": gone}, "missing_bind"),
    ):
        with pytest.raises(SandboxError) as failure:
            await kind.boot(**options)
        assert failure.value.cause == cause


# --- cancellation and close


async def test_cancellation_at_any_moment_ends_all(kind: BoxKit, box: Sandbox, nap: str) -> None:
    for delay in kind.moments:
        for times in (1, 3):
            running = asyncio.create_task(sh(box, f"(setsid env -i sleep {nap} &) ; sleep {nap}"))
            await asyncio.sleep(delay)
            for _ in range(times):
                running.cancel()
                await asyncio.sleep(0)
            with contextlib.suppress(asyncio.CancelledError):
                await running
            assert times > 1 or not alive(nap)
    assert (await sh(box, "echo on")).stdout == b"on\n"
    await box.close()  # waits for what a second cancellation has cut off
    assert not alive(nap)


async def test_cancellation_of_a_running_program_is_passed_on(box: Sandbox, nap: str) -> None:
    running = asyncio.create_task(sh(box, f"(setsid sleep {nap} &) ; sleep {nap}"))
    await begun(nap, running)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not alive(nap)


async def test_close_ends_programs_that_run_or_wait(box: Sandbox, nap: str) -> None:
    programs = [asyncio.create_task(sh(box, f"sleep {nap}")) for _ in range(2)]
    await begun(nap, programs[0])
    await box.close()
    for program in programs:
        with pytest.raises(SandboxError) as failure:
            await program
        assert failure.value.cause == "closed"
    assert not alive(nap)


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
def test_the_end_of_the_loop_ends_boxes(kind: BoxKit, runner: Callable, nap: str) -> None:
    async def main() -> None:
        async def episode() -> None:
            box = await kind.boot()
            try:
                # asyncio (3.11) waits for ever for a process whose pipes it was connecting when the loop ended. They
                # are connected when the program has read its input.
                await sh(box, f"cat >/dev/null; (setsid sleep {nap} &) ; sleep {nap}", stdin=b"x")
            finally:
                await box.close()

        episodes = asyncio.create_task(episode())  # left to the runner, which cancels every task
        await begun(nap, episodes)

    runner(main())
    assert not alive(nap) and kind.left() == []


def test_boxes_work_on_uvloop(kind: BoxKit, nap: str) -> None:
    """Ray runs the agent loop workers on it."""

    async def main() -> None:
        box = await kind.boot()
        data = os.urandom(300_000)
        done = await box.exec(["bash", "-c", "cat; echo oops >&2; exit 4"], env={}, timeout_s=30, stdin=data)
        assert (done.returncode, done.stdout, done.stderr) == (4, data, b"oops\n")
        script = f"(setsid sleep {nap} &) ; sleep {nap}"
        assert (await sh(box, script, timeout_s=0.2)).timed_out and not alive(nap)
        for delay in kind.moments[::2]:
            running = asyncio.create_task(sh(box, script))
            await asyncio.sleep(delay)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert not alive(nap)
        await box.close()

    uvloop.run(main())


@kinds("bwrap", "docker", "podman", "apptainer", "apptainer-less", "kubernetes")
async def test_a_box_that_is_killed_from_outside_is_not_the_programs_failure(
    kind: BoxKit, box: Sandbox, nap: str
) -> None:
    running = asyncio.create_task(sh(box, f"sleep {nap}"))
    await begun(nap, running)
    await kind.kill(box)
    with pytest.raises(SandboxError) as failure:
        await running
    assert failure.value.cause == ("exec_failed" if kind.name == "bwrap" else "box_killed")
    while kind.name == "kubernetes" and alive(nap):  # a pod is gone before its programs
        await asyncio.sleep(0.05)
    assert not alive(nap)


# --- limits


async def test_limits_of_each_process(kind: BoxKit) -> None:
    box = await kind.boot(limits=Limits(cpu_s=1, file_bytes=MIB, open_files=50))
    try:
        shown = await sh(box, "ulimit -t; ulimit -f; ulimit -n; ulimit -c; ulimit -v")
        assert shown.stdout.split() == [b"1", b"1024", b"50", b"0", b"unlimited"]
        assert (await sh(box, "head -c 2000000 /dev/zero > big")).returncode != 0
        spun = await sh(box, "while :; do :; done", timeout_s=60)
        assert not spun.timed_out and spun.returncode in (128 + 9, 128 + 24)
    finally:
        await box.close()


@kinds("docker", "podman")
async def test_memory_and_processes_of_a_box_are_limited(kind: BoxKit, nap: str) -> None:
    box = await kind.boot(limits=Limits(memory_bytes=64 * MIB, processes=40))
    try:
        eat = "import os; held = [bytearray(os.urandom(1) * 2**20) for _ in range(200)]; print('held')"
        done = await box.exec(["python3", "-c", eat], env={}, timeout_s=60)
        assert (done.returncode, done.stdout) == (137, b"")
        # bash would try again for seconds.
        many = await box.exec(
            ["sh", "-c", f"for i in $(seq 60); do sleep {nap} & done; echo all"], env={}, timeout_s=60
        )
        assert b"Cannot fork" in many.stderr and many.stdout == b"" and not alive(nap)
        assert (await sh(box, "echo fine")).stdout == b"fine\n"
    finally:
        await box.close()


HOLD = """
import mmap, os, sys, time
held = [bytearray(os.urandom(1) * 2**20) for _ in range(int(sys.argv[1]))]
if sys.argv[2] == "forks":  # the pages stay those of the first process
    while os.getpid() and not os.fork():
        if len(sys.argv) > 6: break
        sys.argv.append("")
if sys.argv[2] == "memfd":
    held = [os.memfd_create("x") for _ in range(int(sys.argv[1]))]
    [os.write(fd, bytes(2**20)) for fd in held]
if sys.argv[2] == "deleted":
    held = []
    for _ in range(int(sys.argv[1])):
        held.append(os.open("gone", os.O_CREAT | os.O_WRONLY)); os.write(held[-1], bytes(2**20)); os.unlink("gone")
time.sleep(float(sys.argv[3]))
print("held")
"""


@kinds("plain", "bwrap")
@pytest.mark.parametrize(
    ("mebibytes", "how", "ends"),
    [(200, "memory", 137), (60, "memory", 0), (60, "forks", 0), (60, "memfd", 137), (60, "deleted", 137)],
)
async def test_what_is_watched_ends_a_program(kind: BoxKit, mebibytes: int, how: str, ends: int) -> None:
    """A program over a limit is killed with all that it started, and the box goes on. Memory that forked processes
    share counts once; memory and files without names count as files."""
    box = await kind.boot(limits=Limits(memory_bytes=150 * MIB, disk_bytes=32 * MIB))
    try:
        nap = "60" if ends else "2.5"
        done = await box.exec(["python3", "-c", HOLD, str(mebibytes), how, nap], env={}, timeout_s=50)
        assert (done.returncode, done.timed_out, bool(done.stdout)) == (ends, False, not ends), done
        assert (await sh(box, "echo fine")).stdout == b"fine\n"
    finally:
        await box.close()


FORK = ["sh", "-c", "for i in $(seq $0); do sleep $1 & done; wait; echo all", "{count}", "{nap}"]
THREAD = """
import sys, threading, time
for _ in range(int(sys.argv[1])):
    threading.Thread(target=time.sleep, args=[float(sys.argv[2])], daemon=True).start()
time.sleep(float(sys.argv[2]))
print("all")
"""


@kinds("plain", "bwrap")
@pytest.mark.parametrize("program", [FORK, ["python3", "-c", THREAD, "{count}", "{nap}"]], ids=["fork", "threads"])
async def test_too_many_processes_end_a_program(
    kind: BoxKit, nap: str, program: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are counted where no control group limits them: the kernel's limit of each user does not hold for root."""
    monkeypatch.setattr(cgroup, "parent", lambda: None)
    box = await kind.boot(limits=Limits(processes=40))
    try:
        few = await box.exec([word.format(count=20, nap=2.5) for word in program], env={}, timeout_s=100)
        assert (few.returncode, few.stdout) == (0, b"all\n"), few
        many = await box.exec([word.format(count=60, nap=nap) for word in program], env={}, timeout_s=100)
        assert not many.timed_out and many.stdout == b"" and not alive(nap)
        assert many.returncode == 137 if os.geteuid() == 0 or not kind.isolated else many.returncode, many
        assert (await sh(box, "echo fine")).stdout == b"fine\n"
    finally:
        await box.close()


@kinds("bwrap")
async def test_nothing_is_written_where_nobody_looks(kind: BoxKit) -> None:
    """/dev is a file system in memory; what is written to /dev/shm counts as files of the box."""
    box = await kind.boot(limits=Limits(disk_bytes=32 * MIB))
    try:
        done = await sh(box, "echo x > /dev/x; ls /dev/x; echo y > /dev/shm/y && cat /dev/shm/y; echo z > /dev/null")
        assert done.stdout == b"y\n"
        fill = "for i in 1 2 3 4; do head -c 24M /dev/zero > /dev/shm/big$i || exit 9; done; sleep 60"
        assert (await sh(box, fill, timeout_s=50)).returncode == 137
    finally:
        await box.close()


@kinds("plain", "bwrap", "docker", "podman")
async def test_the_disk_of_a_box_is_limited(kind: BoxKit) -> None:
    box = await kind.boot(limits=Limits(disk_bytes=32 * MIB))
    try:
        one = await sh(box, "head -c 50000000 /dev/zero > big; echo $?; rm big")
        assert one.stdout.split()[0] != b"0"  # one file cannot be larger
        # Bounded: without a limit this ends at 96 MiB.
        fill = "for i in 1 2 3 4; do head -c 24M /dev/zero > big$i || exit 9; done; sleep 60; echo all"
        many = await sh(box, fill, timeout_s=60)
        assert many.stdout == b"" and many.returncode in (9, 137) and not many.timed_out
        async with asyncio.timeout(120):  # on a slow disk a look in the middle of it finds the box too large again
            while (await sh(box, "rm -f big*; echo works")).stdout != b"works\n":
                pass
        assert await box.diff() == b""
    finally:
        await box.close()
