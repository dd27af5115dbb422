"""This module runs this process out of descriptors, processes and threads at every point of a box's life."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rl.config.compose import ConfigError, compose
from rl.data.make.runs import Bench
from rl.data.make.sources import MakeError
from rl.episodes.boxes import Local
from rollout.sandbox import Sandbox, SandboxError
from rollout.sandbox.local import bwrap
from rollout.sandbox.local.box import boot_local
from tests.boxes.kinds import BoxKit, kinds
from tests.sandboxes import sh

_MOST = 40  # more than any verb has open, or starts


@contextlib.contextmanager
def descriptors(left: int) -> Iterator[None]:
    """Let this process have only so many descriptors more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + _MOST + 10, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(left):
            os.close(taken.pop())
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def starts(left: int) -> Iterator[None]:
    """Let this process start only so many processes and threads more. The kernel's own limit exempts root."""

    def counted(function: Callable[..., Any], error: Exception) -> Callable[..., Any]:
        def start(*args: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise error
            return function(*args, **options)

        return start

    with pytest.MonkeyPatch.context() as patch:
        process, thread = BlockingIOError(errno.EAGAIN, "cannot fork"), RuntimeError("can't start new thread")
        patch.setattr(subprocess.Popen, "_execute_child", counted(subprocess.Popen._execute_child, process))  # type: ignore[attr-defined]
        patch.setattr(threading.Thread, "start", counted(threading.Thread.start, thread))
        yield


def children() -> set[str]:
    return {pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


async def life(kind: BoxKit, ready: Sandbox, verb: str) -> None:
    """Do one thing with a box, or boot and close another."""
    if verb == "boot":
        await (await kind.boot()).close()
    elif verb == "exec":
        assert (await sh(ready, "cat", stdin=b"x" * 9)).returncode == 0
    elif verb == "put":
        await ready.put("new/file", b"x")
    elif verb == "get":
        assert await ready.get("README.md") == b"hello\n"
    else:
        assert b"new/file" in await ready.diff()


@kinds("plain", "bwrap", "apptainer", "docker")
@pytest.mark.parametrize("limit", [descriptors, starts])
@pytest.mark.parametrize("verb", ["boot", "exec", "put", "get", "diff"])
async def test_a_box_that_runs_out_raises_its_own_error(
    kind: BoxKit, limit: Callable[[int], contextlib.AbstractContextManager[None]], verb: str
) -> None:
    """With 0, 1, 2 ... left each verb does all of its work or raises SandboxError, and nothing is left of it."""
    ready = await kind.boot()
    failed = 0
    try:
        await ready.put("new/file", b"x")
        before, others = len(os.listdir("/proc/self/fd")), children()
        for left in range(_MOST):
            with limit(left):
                try:
                    await life(kind, ready, verb)
                except SandboxError:
                    failed += 1
                else:
                    break
        await life(kind, ready, verb)
        assert left < _MOST - 1
        if not kind.own_system:  # an engine does the work of those, and its connections are kept
            assert failed or verb in ("put", "get")
            assert len(os.listdir("/proc/self/fd")) <= before
        assert children() <= others
    finally:
        await ready.close()


@kinds("plain", "bwrap")
@pytest.mark.parametrize("limit", [descriptors, starts])
async def test_closing_never_raises(
    kind: BoxKit, limit: Callable[[int], Any], caplog: pytest.LogCaptureFixture
) -> None:
    box = await kind.boot()
    with limit(0):
        await box.close()
    await box.close()


async def test_a_moment_without_descriptors_takes_nobodys_isolation(tmp_path: Path) -> None:
    """What is out of descriptors does not count as a machine without bubblewrap, whose boxes are not isolated."""
    bwrap._flavour.cache_clear()
    try:
        with descriptors(0), pytest.raises(SandboxError) as failure:
            await boot_local(tmp_path, isolation="auto")
        assert failure.value.cause in ("boot_failed", "exec_failed")
    finally:
        bwrap._flavour.cache_clear()


@pytest.mark.parametrize(
    "script, said", [(None, "bubblewrap is missing"), ("#!/bin/sh\nexit 1\n", "user namespaces are forbidden")]
)
async def test_what_bubblewrap_lacks_is_said_alike_by_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, said: str
) -> None:
    """A missing program and forbidden namespaces are two messages, the same for boxes, checks and makers of tasks."""
    if script:
        (tmp_path / "bwrap").write_text(script)
        (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) if not script else f"{tmp_path}:{os.environ['PATH']}")
    bwrap._flavour.cache_clear()
    try:
        assert bwrap.problem().startswith(said)
        with pytest.raises(SandboxError, match=f"no_bwrap: {said}"):
            await boot_local(tmp_path, isolation="bwrap")
        with pytest.raises(ConfigError, match=f"sandbox.isolation=bwrap, but {said}"):
            Local(compose(["sandbox.isolation=bwrap"]).sandbox).check()
        with pytest.raises(MakeError, match=said):
            await Bench(tmp_path, tmp_path).boot({})
    finally:
        bwrap._flavour.cache_clear()
