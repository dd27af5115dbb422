"""What the attack suites share: the kinds of boxes they are run against, and a task worth attacking.

Containers are root's, without a user namespace: of all users that a box may have, the one with the most to misuse.

Every attack is bounded, so that a hole does no harm here, and whatever it reaches for is on this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rewards.task import Task
from rl.setup import rules_from
from rollout.episode import Boot
from rollout.sandbox import Limits, Sandbox
from rollout.sandbox.docker import box as docker
from rollout.sandbox.docker import images
from rollout.sandbox.docker.engine import get_engine
from rollout.sandbox.local.box import LocalSandbox, boot_local
from tests.docker_kit import made, task_images
from tests.sandboxes import BWRAP, make_snapshot

_FILE_BYTES = 8 * 2**20
RULES = rules_from(
    OmegaConf.create({"grading": OmegaConf.load(Path(__file__).resolve().parents[2] / "configs/grading/default.yaml")})
)


@dataclass(frozen=True)
class Kind:
    """A kind of sandbox. boot: for a task, with a directory of sockets or without. kill: ends a box from outside,
    as a crash would. file_bytes: the largest file; memory_mb, disk_mb, processes: what a box may take as a whole. None:
    no limit, or none that holds for every user. own_system: the whole file system is the box's own, to be written to.
    """

    boot: Boot
    kill: Callable[[Sandbox], Awaitable[None]]
    file_bytes: int | None = None
    memory_mb: int | None = None
    disk_mb: int | None = None
    processes: int | None = None
    own_system: bool = False


async def _boot_bwrap(task: Task, socket_dir: Path | None) -> Sandbox:
    limits = Limits(cpu_s=60, file_bytes=_FILE_BYTES)
    return await boot_local(task.snapshot, isolation="bwrap", limits=limits, socket_dir=socket_dir)


async def _kill_bwrap(box: Sandbox) -> None:
    """Kill the bubblewrap processes of a box."""
    assert isinstance(box, LocalSandbox)
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            arguments = Path("/proc", name, "cmdline").read_bytes().split(b"\0")
            if arguments[0].endswith(b"bwrap") and os.fsencode(box._root / "tree") in arguments:
                os.kill(int(name), signal.SIGKILL)


_DOCKER = Limits(memory_bytes=256 * 2**20, processes=128, disk_bytes=48 * 2**20, cpu_s=60, file_bytes=_FILE_BYTES)


async def boot_container(task: Task, socket_dir: Path | None, image: str = "") -> Sandbox:
    """The task's snapshot in a container from the base image, or from another that is made of it."""
    source = images.Source(image or await asyncio.to_thread(made, task_images().base_image, get_engine()))
    return await docker.boot_docker(source, snapshot=task.snapshot, limits=_DOCKER, socket_dir=socket_dir)


async def _kill_docker(box: Sandbox) -> None:
    assert isinstance(box, docker.DockerSandbox)
    await asyncio.to_thread(get_engine().client.kill, box.container)


# One line per kind: pytest.param("name", marks=...), and its entry in KINDS.
# The first test of all may have to make the base image.
DOCKER = pytest.param("docker", marks=[pytest.mark.docker, pytest.mark.timeout(900)])
BOXES = [BWRAP, DOCKER]
KINDS = {
    "bwrap": Kind(_boot_bwrap, _kill_bwrap, file_bytes=_FILE_BYTES),
    "docker": Kind(
        boot_container,
        _kill_docker,
        file_bytes=_FILE_BYTES,
        memory_mb=_DOCKER.memory_bytes >> 20,
        disk_mb=_DOCKER.disk_bytes >> 20,
        processes=_DOCKER.processes,
        own_system=True,
    ),
}


def cases(names: Iterable[str], *elsewhere: str) -> pytest.MarkDecorator:
    """All of `names` against boxes of the first kind, and those of `elsewhere` against the other kinds: for attacks
    whose end depends little on the box."""
    pairs = [(box, name) for box in BOXES for name in (names if box is BOXES[0] else elsewhere)]
    parameters = [pytest.param(*box.values, name, marks=box.marks) for box, name in pairs]
    return pytest.mark.parametrize(("kind", "name"), parameters, indirect=["kind"])


_EVAL = """#!/bin/bash
set -uxo pipefail
export PATH=/opt/miniconda3/envs/testbed/bin:$PATH
cd /testbed
git config --global --add safe.directory /testbed
git checkout {commit} tests/test_mod.py
git apply -v - <<'EOF_114329324912'
diff --git a/tests/test_mod.py b/tests/test_mod.py
--- a/tests/test_mod.py
+++ b/tests/test_mod.py
@@ -1,3 +1,4 @@
 from pkg import mod
 def test_old():
     assert callable(mod.f)
+    assert mod.__name__
diff --git a/tests/test_new.py b/tests/test_new.py
new file mode 100644
--- /dev/null
+++ b/tests/test_new.py
@@ -0,0 +1,4 @@
+from pkg import mod
+def test_new():
+    # {nonce}
+    assert mod.f() == 2
EOF_114329324912
: '>>>>> Start Test Output'
{command} -rA -p no:cacheprovider tests/test_mod.py tests/test_new.py
: '>>>>> End Test Output'
git checkout {commit} tests/test_mod.py
"""
PYTEST = "python -m pytest"


def make_task(directory: Path, command: str = PYTEST, nonce: str = "a hidden test") -> Task:
    """pkg.mod.f returns 1 and must return 2. The hidden patch changes one test file and makes another."""
    snapshot = make_snapshot(directory / "snapshot")
    (snapshot / "tests").mkdir()
    (snapshot / "tests/test_mod.py").write_text("from pkg import mod\ndef test_old():\n    assert callable(mod.f)\n")
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.com"]
    for arguments in (["add", "-A"], ["commit", "-qm", "tests"]):
        subprocess.run([*git, *arguments], cwd=snapshot, check=True)
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=snapshot, text=True).strip()
    row = {
        "instance_id": "attacked__task-1",
        "image": "dir:snapshot",
        "repo": "attacked/task",
        "version": "1",
        "FAIL_TO_PASS": ["tests/test_new.py::test_new"],
        "PASS_TO_PASS": ["tests/test_mod.py::test_old"],
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
        "eval_script": _EVAL.format(commit=commit, command=command, nonce=nonce),
        "problem_statement": "f must return 2.",
        "base_commit": commit,
    }
    return Task.from_row(row, directory)


@pytest.fixture(params=BOXES)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]
