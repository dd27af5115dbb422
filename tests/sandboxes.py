"""This module is shared by tests of boxes and of grading: a repository, both ways to isolate a local box, a look at
processes.
"""

from __future__ import annotations

import asyncio
import functools
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rollout.sandbox import ExecResult, Sandbox

REPOSITORY = Path(__file__).resolve().parents[1]

BWRAP = pytest.param("bwrap", marks=[pytest.mark.bwrap])
ISOLATIONS = [BWRAP, "none"]


def make_snapshot(directory: Path) -> Path:
    """Make a git repository with two files, an executable and a symbolic link."""
    directory.mkdir(parents=True)
    (directory / "README.md").write_text("hello\n")
    (directory / "pkg").mkdir()
    (directory / "pkg" / "mod.py").write_text("def f():\n    return 1\n")
    (directory / "run.sh").write_text("#!/bin/sh\necho run\n")
    (directory / "run.sh").chmod(0o755)
    (directory / "link").symlink_to("README.md")
    (directory / ".gitignore").write_text("__pycache__/\n*.log\n")
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.com"]
    for arguments in (["init", "-q", "--template="], ["add", "-A"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], cwd=directory, check=True)
    return directory


@functools.cache
def history(directory: Path) -> Path:
    """Make the repository of `make_snapshot`, with a later commit, a tag, a remote, a stash and a reflog to hide, and
    an ignored file that is in no commit."""
    repo = make_snapshot(directory)
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.com"]
    (repo / "tracked.log").write_text("tracked, though it is ignored\n")
    for arguments in (["add", "-f", "tracked.log"], ["commit", "-qm", "second"], ["branch", "base"]):
        subprocess.run([*git, *arguments], cwd=repo, check=True)
    (repo / "README.md").write_text("the fix\n")
    for arguments in (
        ["commit", "-qam", "the fix"],
        ["tag", "-a", "v2", "-m", "fixed"],
        ["remote", "add", "origin", "https://example.com/x.git"],
        ["update-ref", "refs/remotes/origin/main", "HEAD"],
        ["checkout", "-q", "base"],
    ):
        subprocess.run([*git, *arguments], cwd=repo, check=True)
    (repo / "README.md").write_text("stashed\n")
    subprocess.run([*git, "stash", "-q"], cwd=repo, check=True)
    (repo / ".git" / "hooks").mkdir(exist_ok=True)
    (repo / ".git" / "hooks" / "pre-commit").write_text("#!/bin/sh\n")
    (repo / "built.log").write_text("of the image\n")
    return repo


async def sh(box: Sandbox, script: str, timeout_s: float = 120, **options: object) -> ExecResult:
    """Run a bash script in a box."""
    return await box.exec(["bash", "-c", script], env={}, timeout_s=timeout_s, **options)  # type: ignore[arg-type]


def alive(argument: str) -> bool:
    """Return whether a process of this machine has exactly this command line argument."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                arguments = Path("/proc", name, "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if argument.encode() in arguments:
                return True
    return False


async def begun(argument: str, running: asyncio.Future[Any]) -> None:
    """Wait until a process has this argument; fail if `running`, which should start it, ends before."""
    while not alive(argument):
        assert not running.done(), running
        await asyncio.sleep(0.01)
