"""What tests of sandboxes and grading share: a snapshot, both kinds of isolation, a look at processes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from rollout.sandbox import ExecResult, Sandbox
from rollout.sandbox.local import bwrap

BWRAP = pytest.param(
    "bwrap",
    marks=[
        pytest.mark.bwrap,
        pytest.mark.skipif(not bwrap.available(), reason="bubblewrap is missing or may not make namespaces"),
    ],
)
ISOLATIONS = [BWRAP, "none"]


def make_snapshot(directory: Path) -> Path:
    """A git repository with two files, an executable and a symbolic link."""
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


async def sh(box: Sandbox, script: str, timeout_s: float = 120, **options: object) -> ExecResult:
    return await box.exec(["bash", "-c", script], env={}, timeout_s=timeout_s, **options)  # type: ignore[arg-type]


def alive(argument: str) -> bool:
    """Whether a process on this machine has exactly this command line argument."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                arguments = Path("/proc", name, "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if argument.encode() in arguments:
                return True
    return False
