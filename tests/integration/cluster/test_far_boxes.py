"""Patches are graded in boxes of another node: here a Ray actor that only the grading resource lets start."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import psutil
import pytest
import ray
from omegaconf import OmegaConf

from rewards.grade import grade
from rewards.task import Task
from rewards.verdict import Reason
from rl.episodes.remote_boxes import far_boots
from rollout.episode import Boot
from rollout.sandbox import SandboxError
from tests.integration.process_kit import command_line


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    options = {"include_dashboard": False, "object_store_memory": 10**8, "log_to_driver": False}
    ray.init(address="local", num_cpus=1, resources={"grading": 1}, **options)
    yield
    ray.shutdown()


@pytest.fixture
def boot(cluster: None) -> Boot:
    sandbox = {"kind": "local", "isolation": "auto", "cpu_s": 60, "file_mb": 100, "concurrency": 4}
    config = {"cluster": {"grading_resource": "grading"}, "run": {"dir": None}, "sandbox": sandbox}

    async def near(task: Task, socket_dir: object) -> None:
        raise AssertionError("a box for grading is a far one")

    return far_boots({"": near}, OmegaConf.create(config))[""]  # ty: ignore


def sleepers() -> list[psutil.Process]:
    return [one for one in psutil.process_iter() if "sleep 4711" in command_line(one)]


async def test_a_patch_is_graded_and_what_a_box_raises_comes_back(boot: Boot, task: Task) -> None:
    assert task.patch is not None
    verdict = await grade(task, task.patch.encode(), lambda: boot(task, None), timeout_s=60)
    assert verdict.reason is None, verdict
    empty = b"diff --git a/x b/x\nnew file mode 100644\nindex 0000000..e69de29\n"
    verdict = await grade(task, empty, lambda: boot(task, None), timeout_s=60)
    assert verdict.reason is Reason.TESTS_FAILED

    box = await boot(task, None)
    await box.put("made", b"here")
    assert await box.get(f"{box.workdir}/made") == b"here" and b"+here" in await box.diff()
    with pytest.raises(FileNotFoundError):
        await box.get("none")
    with pytest.raises(ValueError, match="not a path below"):
        await box.put("/etc/none", b"")
    running = asyncio.create_task(box.exec(["sleep", "4711"], env={}, timeout_s=100))
    while not sleepers():
        await asyncio.sleep(0.05)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    while sleepers():
        await asyncio.sleep(0.05)
    await box.close()
    await box.close()
    with pytest.raises(SandboxError):
        await box.get("made")


async def test_a_node_that_dies_is_an_infrastructure_failure(boot: Boot, task: Task) -> None:
    box = await boot(task, None)
    running = asyncio.create_task(box.exec(["sleep", "4711"], env={}, timeout_s=100))
    while not (found := sleepers()):
        await asyncio.sleep(0.05)
    (host,) = [one for one in found[0].parents() if "ray::Host" in command_line(one)]
    host.kill()
    with pytest.raises(SandboxError) as killed:
        await running
    assert killed.value.cause == "box_killed"
    await box.close()
    verdict = await grade(task, b"x", lambda: boot(task, None), timeout_s=60)
    assert verdict.is_infra or verdict.reason is Reason.PATCH_APPLY_FAILED
    verdict = await grade(task, None, lambda: boot(task, None), timeout_s=60)
    assert verdict.reason is Reason.BOOT_FAILED
