"""Measure how fast container sandboxes are, on an idle machine.

    .venv/bin/python -m tests.bench_sandbox [--repeat 20] [--boxes 16] [--hosts 4]

Prints medians: a boot, and from boot to the end of the first program, also of warm boxes with a directory for sockets,
as agents have; a grading, of a task whose tests take about 0.2 s, end to
end, without and with a second opinion; gradings per second with one per core at a time; and the time of a number of
episodes in parallel, each a boot, a program that edits a file, the diff and the end, with their errors. With --hosts,
all of it once more in boxes that are reached through so many SSH servers of this machine (sandbox=ssh).
"""

from __future__ import annotations

import asyncio
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from rewards.grade import grade
from rewards.swebench import warm_up
from rewards.task import Task
from rollout import program
from rollout.sandbox.docker import images
from rollout.sandbox.docker import warm as warm_boxes
from rollout.sandbox.docker.box import DockerSandbox, boot_docker
from rollout.sandbox.docker.engine import get_engine
from rollout.sandbox.docker.fleet import boot_elsewhere
from tests.docker_kit import ready, task_images
from tests.ssh_kit import fleet_of, servers

Boot = Callable[[], Awaitable[DockerSandbox]]


async def _boot(boot: Boot, program: bool = False) -> float:
    began = time.perf_counter()
    box = await boot()
    try:
        if program:
            await box.exec(["true"], env={}, timeout_s=60)
        return time.perf_counter() - began
    finally:
        await box.close()
        await ready(box)


async def _warm_boot(boot: Callable[..., Awaitable[DockerSandbox]], program: bool = False) -> float:
    with tempfile.TemporaryDirectory() as scratch:
        while True:  # each host has its own spares
            with tempfile.TemporaryDirectory(dir=scratch) as place:
                warm = functools.partial(boot, socket_dir=Path(place), warm=1, scratch=scratch)
                took = await _boot(warm, program)
            if warm_boxes.told()["warm_boots"]:
                return took


async def _grading(task: Task, boot: Boot, second_opinion: bool = False) -> float:
    began = time.perf_counter()
    patch = (task.patch or "").encode()
    verdict = await grade(task, patch, boot, timeout_s=120, second_opinion=second_opinion)
    if verdict.reward != 1.0:
        raise RuntimeError(f"{task.instance_id}: {verdict.reason}: {verdict.detail}")
    return time.perf_counter() - began


async def _episode(boot: Boot) -> None:
    box = await boot()
    try:
        await box.exec(["bash", "-c", "echo changed > changed"], env={}, timeout_s=60)
        if b"+changed" not in await box.diff():
            raise RuntimeError("the diff misses a change")
    finally:
        await box.close()


async def _times(run: Callable[[], Awaitable[float]], count: int, at_once: int) -> list[float]:
    slots = asyncio.Semaphore(at_once)

    async def one() -> float:
        async with slots:
            return await run()

    return await asyncio.gather(*(one() for _ in range(count)))


async def main(repeat: int, boxes: int, hosts: int) -> None:
    """Measure and print."""
    kit = task_images()
    task = await kit.make_task(await asyncio.to_thread(get_engine), kit.RECIPES[-1])
    source = images.Source(task.image, task.base_commit)
    await asyncio.to_thread(warm_up)
    await _measure(task, functools.partial(boot_docker, source), repeat, boxes)
    if hosts:
        with servers(hosts) as started, fleet_of(*started, per_host=1) as fleet:
            print(f"on {hosts} hosts", flush=True)
            await _measure(task, functools.partial(boot_elsewhere, fleet, source), repeat, boxes)


async def _measure(task: Task, boot: Boot, repeat: int, boxes: int) -> None:
    grading = functools.partial(_grading, task, boot)
    await grading()
    for what, run in (
        ("a boot", functools.partial(_boot, boot)),
        ("boot to the end of the first program", functools.partial(_boot, boot, True)),
        ("a warm boot", functools.partial(_warm_boot, boot)),
        ("warm, to the end of the first program", functools.partial(_warm_boot, boot, True)),
        ("a grading", grading),
        ("the same with a second opinion", functools.partial(grading, second_opinion=True)),
    ):
        print(f"{what:<37} {statistics.median(await _times(run, repeat, 1)) * 1000:6.0f} ms", flush=True)
    began = time.perf_counter()
    await _times(grading, repeat, os.cpu_count() or 1)
    print(f"gradings a second                     {repeat / (time.perf_counter() - began):6.1f}", flush=True)
    began = time.perf_counter()
    results = await asyncio.gather(*(_episode(boot) for _ in range(boxes)), return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    print(f"{boxes} episodes at once                   {time.perf_counter() - began:6.1f} s, {len(errors)} errors")
    for error in errors[:3]:
        print(f"  {type(error).__name__}: {error}")


if __name__ == "__main__":
    parser = program.parser("python -m tests.bench_sandbox", __doc__)
    parser.add_argument("--repeat", type=int, default=20, help="measurements of each kind")
    parser.add_argument("--boxes", type=int, default=16, help="episodes in parallel")
    parser.add_argument("--hosts", type=int, default=0, help="SSH servers of this machine that lead to boxes")
    options = parser.parse_args()
    asyncio.run(main(options.repeat, options.boxes, options.hosts))
