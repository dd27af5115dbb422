"""This module tells which files of the repository were read since a moment, by any process of the machine.

The kernel notes when a file was read, unless its file system is mounted with noatime.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

# Modules count as read when their bytecode is: checks of keys read the sources of all.
PACKAGES = ("rl/", "rollout/", "rewards/", "tests/")


def _watched(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield each tracked file's path with the files that show that it was read."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    for path in filter(None, listed.split("\0")):
        file = root / path
        if path.endswith(".py") and path.startswith(PACKAGES):
            yield from ((path, one) for one in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"))
        elif file.is_file():
            yield path, file


def forget(root: Path) -> None:
    """Let all files of a repository count as not read."""
    for _, file in _watched(root):
        os.utime(file, ns=(0, file.stat().st_mtime_ns))


def read(root: Path) -> set[str]:
    """Return the paths of the files that were read since `forget`, or compiled."""
    return {path for path, file in _watched(root) if file.stat().st_atime_ns > 0}
