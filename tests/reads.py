"""This module tells which files of the repository were read since a moment, by any process of the machine.

The kernel notes when a file was read, unless its file system is mounted with noatime.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

# Of these, modules count as read when their bytecode is: a check of keys reads the sources of all.
PACKAGES = ("rl/", "rollout/", "rewards/", "tests/")


class UnknownError(RuntimeError):
    """It cannot be known which files are read."""


def listed(root: Path) -> list[str]:
    """Return the paths of the files below a directory that git does not ignore. Raises UnknownError without git."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        said = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise UnknownError(f"git cannot say which files there are: {error}") from None
    found = [path for path in said.split("\0") if path and (root / path).is_file()]
    if not found:
        raise UnknownError(f"git knows no file below {root}")
    return sorted(found)


def _watched(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield the path of each file with the files that show that it was read."""
    for path in listed(root):
        file = root / path
        if path.endswith(".py"):
            yield from ((path, one) for one in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"))
        if not (path.endswith(".py") and path.startswith(PACKAGES)):
            yield path, file


def forget(root: Path) -> None:
    """Let all files of a repository count as not read. Raises UnknownError where this cannot be."""
    files = [file for _, file in _watched(root)]
    try:
        for file in files:
            os.utime(file, ns=(0, file.stat().st_mtime_ns))
        files[0].read_bytes()
        if files[0].stat().st_atime_ns == 0:
            raise UnknownError(f"the file system of {root} does not note when files are read (noatime)")
        os.utime(files[0], ns=(0, files[0].stat().st_mtime_ns))
    except OSError as error:
        raise UnknownError(f"files cannot be marked as not read: {error}") from None


def read(root: Path) -> set[str]:
    """Return the paths of the files that were read since `forget`, or compiled."""
    return {path for path, file in _watched(root) if file.stat().st_atime_ns > 0}
