"""This module tests faults in the middle of real episodes: the real Claude Code, real containers, a scripted policy.

Each ends as docs/failures.md says: a failure of the infrastructure is tried again, then dropped and counted, and never
a reward; a failure of the policy is a reward of 0. After each, nothing is left.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rewards import grade as grading
from rewards.task import Task
from rewards.verdict import Reason, Verdict
from rollout import episode as episodes
from rollout.episode import run_episode
from rollout.proxy.server import ProxyServer
from rollout.sandbox import Sandbox
from rollout.sandbox.docker import engine as docker_engine
from rollout.sandbox.docker.engine import get_engine
from tests.docker_kit import left, made, task_images
from tests.integration.claude_kit import call, in_turn
from tests.integration.fault_kit import Stand, repairing
from tests.lacks import lacks
from tests.own_engine import OwnEngine, running, used
from tests.sandboxes import alive

# The first test of all may have to make the base image.
pytestmark = [pytest.mark.docker, pytest.mark.claude, pytest.mark.timeout(900)]


def need_root(*programs: str) -> None:
    """A skip where file systems cannot be mounted, or a program is missing; continuous integration has to have them."""
    missing = [f"no {name}" for name in programs if shutil.which(name) is None]
    if missing or os.geteuid():
        lacks(f"root and file systems of its own, for a fault ({', '.join(missing) or 'not root'})")


# --- the agent's box


@pytest.mark.parametrize("how", ["kill", "remove"])
async def test_a_container_that_is_ended_while_the_agent_works(stand: Stand, how: str) -> None:
    async def end() -> None:
        container, client = stand.boxes["agent"][-1].container, get_engine().client
        if how == "kill":
            await asyncio.to_thread(client.kill, container)
        else:
            await asyncio.to_thread(client.remove_container, container, force=True)

    await stand.play(stand.setup(stand.sleeping()), end, times=2)
    stand.check(Reason.BOX_KILLED, Reason.BOX_KILLED)


async def test_the_second_attempt_counts(stand: Stand) -> None:
    async def end() -> None:
        await asyncio.to_thread(get_engine().client.kill, stand.boxes["agent"][-1].container)

    await stand.play(stand.setup(stand.sleeping(), repairing(stand.task)), end)
    stand.check(Reason.BOX_KILLED, None)


async def test_an_image_that_is_missing(stand: Stand) -> None:
    await stand.play(stand.setup(stand.sleeping(), options=("sandbox.base_image=localhost:1/no/such:1",)))
    stand.check(Reason.MISSING_IMAGE, Reason.MISSING_IMAGE)


async def test_an_agent_that_hangs(stand: Stand) -> None:
    """Claude Code itself is stopped; the engine has no part in it."""
    hang = in_turn(call("Bash", command=f"kill -STOP $PPID; sleep {stand.nap}"), "Done.")
    for timeout_s in (5, 20, 60):  # on a busy machine it starts late
        stand.kept.clear()
        episode = await stand.play(stand.setup(hang, timeout_s=timeout_s))
        assert episode.agent is not None and episode.agent.status == "timeout"
        if episode.rows:
            break
    stand.check(Reason.EMPTY_PATCH)


EAT = "python3 -c 'kept = [bytearray(2**20) for _ in range(2000)]'"


@pytest.mark.parametrize("victim", ["tool", "agent"])
async def test_out_of_memory(stand: Stand, victim: str) -> None:
    """The kernel ends the largest process, or, where the agent has marked it, Claude Code."""
    mark = "echo 1000 > /proc/$PPID/oom_score_adj; " if victim == "agent" else ""
    eats = call("Bash", command=mark + EAT + "; echo code $?")
    episode = await stand.play(stand.setup(in_turn(eats, "Done."), options=("sandbox.memory_mb=700",)))
    assert episode.agent is not None and episode.agent.status == ("crashed" if mark else "finished")
    stand.check(Reason.EMPTY_PATCH)


async def test_a_box_that_fills_its_disk(stand: Stand) -> None:
    fills = call("Bash", command="for n in $(seq 30); do head -c 4M /dev/zero > /tmp/$n; done; sleep 60")
    options = ("sandbox.disk_mb=60", "sandbox.file_mb=8")
    episode = await stand.play(stand.setup(in_turn(fills, "Done."), options=options))
    assert episode.agent is not None and (episode.agent.status == "crashed" or get_engine()._sized)
    stand.check(Reason.EMPTY_PATCH)


# --- the trainer's side


async def test_no_place_for_a_socket(stand: Stand, tmp_path: Path) -> None:
    need_root("mount")
    place = tmp_path / "full"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,nr_inodes=2", "none", place], check=True)
    try:
        (place / "last").touch()
        await stand.play(dataclasses.replace(stand.setup(stand.sleeping()), scratch=place))
        stand.check(Reason.NO_SPACE, Reason.NO_SPACE)
    finally:
        subprocess.run(["umount", place], check=True)


async def test_a_proxy_that_stops_while_the_agent_works_and_its_successor(stand: Stand) -> None:
    """The agent finds nobody any more; in the second attempt there is no proxy from the start; then there is one."""
    script = in_turn(call("Bash", command=f"sleep {stand.nap} & sleep 2; kill $!"), "Done.")
    await stand.play(stand.setup(script, timeout_s=15), stand.proxy.stop)
    stand.check(Reason.PROXY_FAILED, Reason.PROXY_FAILED)
    stand.proxy = ProxyServer(ping_s=0.3)
    await stand.proxy.start()
    try:
        await stand.play(stand.setup(repairing(stand.task)))
        stand.check(Reason.PROXY_FAILED, Reason.PROXY_FAILED, None)
    finally:
        await stand.proxy.stop()


# --- the grading box, which boots while the agent works


async def test_a_grading_box_that_does_not_boot(stand: Stand) -> None:
    setup = stand.setup(repairing(stand.task))

    async def boot(task: Task, socket_dir: Path | None) -> object:
        return await setup.boot(task if socket_dir else dataclasses.replace(task, image="dir:gone"), socket_dir)

    await stand.play(dataclasses.replace(setup, boot=boot))
    stand.check(Reason.MISSING_SNAPSHOT, Reason.MISSING_SNAPSHOT)
    assert all(episode.patch for episode in stand.kept)  # it is known when the agent has ended


async def test_a_grading_box_that_nobody_takes_is_closed(stand: Stand) -> None:
    wait = call("Bash", command="until test -e /tmp/go; do sleep 0.1; done")

    async def boot_and_go(task: Task, socket_dir: Path | None) -> object:
        box = await setup.boot(task, socket_dir)
        if socket_dir is None:  # it is there before the agent ends
            await stand.boxes["agent"][-1].put("/tmp/go", b"")
        return box

    setup = stand.setup(in_turn(wait, "Done."))
    await stand.play(dataclasses.replace(setup, boot=boot_and_go))
    assert len(stand.boxes["grading"]) == 1
    stand.check(Reason.EMPTY_PATCH)


@pytest.mark.parametrize("phase", ["boot", "agent", "grade"])
async def test_a_cancelled_episode_leaves_nothing(stand: Stand, phase: str) -> None:
    (file,) = (path.name for path in stand.task.snapshot.glob("*.py"))
    slow = call("Bash", command=f"printf 'import os; os.system(\"sleep {stand.nap}\")\\n' >> {file}")
    script = stand.sleeping() if phase == "agent" else in_turn(slow, "Done.")
    playing = asyncio.create_task(run_episode(stand.setup(script), stand.task, "e"))
    if phase == "boot":
        while not await asyncio.to_thread(left, get_engine()):  # its container is made, but does not run yet
            assert not playing.done(), playing
    else:
        await stand.until(lambda: alive(stand.nap), playing)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert len(stand.boxes["agent"]) == (phase != "boot")
    stand.check_clean()


# --- the engine: one of this module's own


@pytest.fixture(scope="module")
def own() -> Iterator[OwnEngine]:
    need_root("mount", "dockerd")
    image = made(task_images().base_image, get_engine())
    with running(OwnEngine, image, data_mb=700) as started:
        yield started


async def test_an_engine_that_is_restarted(stand: Stand, own: OwnEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the agent works it stops; attempts fail until it is back, and then the task is solved."""
    with used(own):
        setup = dataclasses.replace(stand.setup(stand.sleeping(), repairing(stand.task)), infra_retries=8)
        played = asyncio.ensure_future(stand.play(setup, lambda: asyncio.to_thread(own.stop)))
        await stand.until(lambda: len(stand.kept) >= 2, played)
        await asyncio.to_thread(own.start)
        await played
        *failed, last = (episode.verdict.reason for episode in stand.kept)
        assert failed[0] in (Reason.NO_ENGINE, Reason.BOX_KILLED) and {*failed[1:]} == {Reason.NO_ENGINE}
        assert last is None
        stand.check(*failed, last)


async def test_a_grading_that_hangs(stand: Stand, own: OwnEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine hangs while the tests run."""
    monkeypatch.setattr("rewards.grading._CLOSE_S", 0.5)
    monkeypatch.setattr(docker_engine, "_TIMEOUT_S", 15.0)  # a call is waited for, also by who gave up
    (file,) = (path.name for path in stand.task.snapshot.glob("*.py"))
    slow = call("Bash", command=f"printf 'import os; os.system(\"sleep {stand.nap}\")\\n' >> {file}")

    async def hang() -> None:
        own.signal(signal.SIGSTOP)
        while not stand.kept:
            await asyncio.sleep(0.02)
        own.signal(signal.SIGCONT)

    with used(own):
        setup = stand.setup(in_turn(slow, "Done."), repairing(stand.task))
        monkeypatch.setattr(episodes, "grade", functools.partial(grading.grade, spare_s=1.0))
        try:
            await stand.play(dataclasses.replace(setup, grade_timeout_s=10), hang)
        finally:
            own.signal(signal.SIGCONT)
        while left(get_engine()):
            await asyncio.sleep(0.05)
        stand.check(Reason.GRADER_HUNG, None)


async def test_the_disk_of_the_machine_is_full(stand: Stand, own: OwnEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before an episode, while the agent works (what it then cannot write is no empty patch), when it is graded; and
    when there is room again, the next one resolves its task."""

    async def fill() -> None:
        await asyncio.to_thread(own.fill)

    async def fill_and_grade(*arguments: Any, **options: Any) -> Verdict:
        await fill()
        return await grading.grade(*arguments, **options)

    full = "for i in $(seq 300); do head -c 65536 /dev/zero > /tmp/probe || break; sleep 0.1; done"
    wait = call("Bash", command=f"sleep {stand.nap} & {full}; kill $!")
    with used(own):
        for when in ("boot", "agent", "grade"):
            script = repairing(stand.task, *([wait] if when == "agent" else []))
            setup = dataclasses.replace(stand.setup(script), infra_retries=0)
            if when == "boot":
                await fill()
            try:
                with monkeypatch.context() as patch:
                    if when == "grade":
                        patch.setattr(episodes, "grade", fill_and_grade)
                    await stand.play(setup, fill if when == "agent" else None)
            finally:
                own.make_room()
            assert bool(stand.kept[-1].patch) == (when == "grade")
        await stand.play(stand.setup(repairing(stand.task)))
        stand.check(*[Reason.NO_SPACE] * 3, None)


async def test_a_disk_without_room_for_what_a_patch_adds(
    stand: Stand, own: OwnEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch = b"diff --git a/big b/big\nnew file mode 100644\n--- /dev/null\n+++ b/big\n@@ -0,0 +1,90000 @@\n"
    patch += b"+line\n" * 90000
    with used(own):
        box = await stand.setup(stand.sleeping()).boot(stand.task, None)

        async def boot() -> Sandbox:
            await asyncio.to_thread(own.fill, 800_000)  # for the patch itself
            return box

        try:
            verdict = await grading.grade(stand.task, patch, boot, timeout_s=60)
        finally:
            own.make_room()
        assert (verdict.reason, verdict.reward) == (Reason.NO_SPACE, None) and "big" in verdict.detail, verdict
        stand.check_clean()
