"""Control groups of local boxes: where they go, and, where the kernel and the user's rights allow it, what they do."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout.sandbox import Limits, SandboxError
from rollout.sandbox.local import cgroup
from tests.boxes.kinds import BoxKit, kinds
from tests.sandboxes import REPOSITORY, alive, begun, sh

MIB = 2**20

# --- where the groups go, with directories that play the file system

V1 = "9:name=systemd:/\n4:memory:/job\n8:pids:/\n"
MOUNT = "31 24 0:27 {root} {point} rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
OTHER = "25 30 0:23 / /proc rw,relatime - proc proc rw\n"


@pytest.mark.parametrize(
    ("membership", "root", "expected"),
    [
        ("0::/a.slice/b.scope\n", "/", ["/g/a.slice/b.scope", "/g/a.slice", "/g"]),
        (V1 + "0::/\n", "/", ["/g"]),
        ("0::/docker/1f/init\n", "/docker/1f", ["/g/init", "/g"]),  # a container that sees the machine's names
        ("0::/../session\n", "/", []),  # a group that is not below the mount
        ("0::/a\n", "/docker/1f", []),
        (V1, "/", []),
    ],
)
def test_the_own_group_and_those_above(membership: str, root: str, expected: list[str]) -> None:
    assert cgroup.own_and_above(membership, OTHER + MOUNT.format(root=root, point="/g")) == [*map(Path, expected)]
    assert cgroup.own_and_above(membership, OTHER) == []


class ScriptedMachine:
    """Directories that play three groups, one in the other: the last is this process's."""

    def __init__(self, top: Path) -> None:
        self.groups = [top / "slice" / "scope", top / "slice", top]
        (top / "slice" / "scope").mkdir(parents=True)
        for group in self.groups:
            self.has(group, controllers="cpu io memory pids", subtree_control="", procs="")
            if group != top:
                for name in ("memory.max", "memory.high"):
                    (group / name).write_text("max\n")

    def has(self, group: Path, **files: str) -> None:
        for name, text in files.items():
            (group / f"cgroup.{name}").write_text(text + "\n")

    def full(self, group: Path) -> None:
        """It has processes: the kernel refuses what is written to this file."""
        (group / "cgroup.subtree_control").unlink()
        (group / "cgroup.subtree_control").symlink_to("/proc/self/oom_score_adj")


@pytest.fixture
def played(tmp_path: Path) -> ScriptedMachine:
    return ScriptedMachine(tmp_path / "groups")


def test_the_nearest_group_that_can_have_children_with_limits(played: ScriptedMachine) -> None:
    scope, above, top = played.groups
    assert cgroup.choose(played.groups) == (scope, "")
    assert (scope / "cgroup.subtree_control").read_text() == "+memory +pids"
    played.full(scope)
    played.has(above, subtree_control="cpu memory pids")
    assert cgroup.choose(played.groups) == (above, "")
    assert (above / "cgroup.subtree_control").read_text() == "cpu memory pids\n"  # left as it was
    played.full(above)
    assert cgroup.choose(played.groups) == (top, "")


def test_why_there_is_none(played: ScriptedMachine) -> None:
    scope, above, top = played.groups
    assert cgroup.choose([]) == (None, "this process is in no control group of version 2")
    played.full(scope)
    (above / "cgroup.procs").unlink()  # stands for one that may not be written
    played.has(top, controllers="hugetlb")
    assert cgroup.choose(played.groups) == (None, f"{top} lacks the controllers memory and pids")
    assert cgroup.choose(played.groups[:2]) == (None, f"{above} is not delegated to this user")
    found, why = cgroup.choose(played.groups[:1])
    assert found is None and why.startswith(f"{scope} has processes itself (")
    assert "No such file" in cgroup.choose([top / "gone"])[1]


@pytest.mark.parametrize("name", ["memory.max", "memory.high"])
def test_boxes_do_not_escape_the_limit_of_a_run(played: ScriptedMachine, name: str) -> None:
    scope, above, _ = played.groups
    played.full(scope)
    (above / name).write_text("1000000\n")  # that of a group which is chosen holds for what is in it
    assert cgroup.choose(played.groups) == (above, "")
    (scope / name).write_text("1000000\n")
    found, why = cgroup.choose(played.groups)
    assert found is None and why.endswith(f"boxes beside it would escape its {name}")


# --- the real thing


@pytest.fixture
def parent() -> Iterator[Path]:
    """The group in which boxes get theirs; at the end no group of this process is left in it."""
    found = cgroup.parent()
    if found is None:
        pytest.skip("no control groups of version 2 with memory and pids are delegated to this user")
    yield found
    assert [*found.glob("code-rl-box,*")] == []


EAT = "held = [bytearray(b'x' * 2**20) for _ in range(200)]; print('held')"


@kinds("plain", "bwrap")
async def test_the_kernel_limits_memory_and_processes_of_a_box(kind: BoxKit, nap: str, parent: Path) -> None:
    box = await kind.boot(limits=Limits(memory_bytes=64 * MIB, processes=40))
    try:
        for _ in range(2):
            # All that runs in the box ends; a part of a program is no result.
            done = await sh(box, f'(setsid env -i sleep {nap} &); python3 -c "{EAT}"; echo goes on')
            assert (done.returncode, done.stdout, done.timed_out) == (137, b"", False) and not alive(nap), done
        many = await box.exec(
            ["sh", "-c", f"for i in $(seq 60); do sleep {nap} & done; echo all"], env={}, timeout_s=60
        )
        assert b"Cannot fork" in many.stderr and many.stdout == b"" and not alive(nap), many
        assert (await sh(box, "echo fine")).stdout == b"fine\n"
    finally:
        await box.close()


@kinds("bwrap")
async def test_a_box_over_its_memory_is_the_policys_failure_for_each_of_its_programs(
    kind: BoxKit, nap: str, parent: Path
) -> None:
    box = await kind.boot(limits=Limits(memory_bytes=64 * MIB))
    try:
        beside = asyncio.create_task(sh(box, f"sleep {nap}"))
        await begun(nap, beside)
        assert (await sh(box, f'python3 -c "{EAT}"')).returncode == 137
        assert (await beside).returncode == 137
        # It was the policy then; now it is not.
        beside = asyncio.create_task(sh(box, f"sleep {nap}"))
        await begun(nap, beside)
        await kind.kill(box)
        with pytest.raises(SandboxError) as failure:
            await beside
        assert failure.value.cause == "exec_failed"
    finally:
        await box.close()


@kinds("bwrap")
async def test_a_box_does_not_see_its_group(kind: BoxKit, parent: Path) -> None:
    box = await kind.boot()
    try:
        seen = await sh(box, "cat /proc/self/cgroup; ls /sys/fs/cgroup; grep cgroup /proc/self/mountinfo")
        assert seen.stdout == b"0::/\n"
    finally:
        await box.close()


LEAVES = """
import os, subprocess, sys
from rollout.sandbox import Limits
from rollout.sandbox.local import cgroup
group = cgroup.made(Limits())
subprocess.Popen(group.entered(["sleep", sys.argv[1]]), stdout=subprocess.DEVNULL)
print(group._path, flush=True)
sys.stdin.read()
os._exit(0)
"""


def test_what_a_dead_process_has_left_is_removed(parent: Path, nap: str) -> None:
    command = [sys.executable, "-c", LEAVES, nap]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    assert owner.stdin and owner.stdout
    group = Path(owner.stdout.readline().strip())
    while not alive(nap):
        assert owner.poll() is None
    cgroup._parent.cache_clear()
    assert cgroup.parent() == parent and group.is_dir() and alive(nap)
    owner.communicate()
    cgroup._parent.cache_clear()
    assert cgroup.parent() == parent and not group.exists() and not alive(nap)


def test_processes_are_killed_one_by_one_where_the_kernel_cannot_kill_a_group(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "1000"]) as one:
        (tmp_path / "cgroup.kill").mkdir()  # stands for a file that is not there
        (tmp_path / "cgroup.procs").write_text(f"{one.pid}\n")
        cgroup._kill(tmp_path)
    assert one.returncode == -9


# --- where there are none


@kinds("plain", "bwrap")
async def test_one_line_says_that_boxes_are_watched(
    kind: BoxKit, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cgroup, "own_and_above", lambda *_: time.sleep(0.2) or [])  # the others ask meanwhile
    cgroup._parent.cache_clear()
    try:
        for box in await asyncio.gather(*(kind.boot() for _ in range(3))):
            assert (await sh(box, "echo fine")).stdout == b"fine\n"
            await box.close()
    finally:
        cgroup._parent.cache_clear()
    lines = [record.getMessage() for record in caplog.records if record.name == cgroup.__name__]
    watched = "the memory and processes of boxes are looked at about once a second"
    assert lines == [f"{watched}: this process is in no control group of version 2"]
