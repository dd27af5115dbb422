"""Atomic writes: files and directories are replaced in one step; a reader finds the old one or the whole new one."""

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: Path, synced: bool = False) -> Generator[Path]:
    """Yield a path in the same directory; the file that the block writes there takes the place of ``path``.

    If the block raises, ``path`` stays as it was and the new file is removed. Several processes may do this at once:
    the last one wins. With ``synced``, file and rename have reached the disk when this returns.
    """
    new = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        yield new
        if synced:
            sync(new)
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    if synced:
        sync(path.parent)


@contextlib.contextmanager
def making(path: Path, overwrite: bool = False) -> Generator[Path]:
    """Yield a new directory beside ``path``, which becomes ``path`` with all that the block writes there.

    If the block raises, the new directory is removed, and ``path`` stays as it was. Raises FileExistsError, before
    anything is written, if ``path`` exists and ``overwrite`` is False.
    """
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path}: is there already")
    path.parent.mkdir(parents=True, exist_ok=True)
    new, old = (path.with_name(f".{path.name}.{secrets.token_hex(6)}") for _ in range(2))
    new.mkdir()
    try:
        yield new
        if path.exists():
            path.rename(old)
        new.rename(path)
        sync(path.parent)
    finally:
        for left in (new, old):
            shutil.rmtree(left, ignore_errors=True)


def opened(path: Path) -> BinaryIO:
    """Open a file to read. Raises OSError, also for what is no plain file: a pipe would never end."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FileNotFoundError(errno.EINVAL, "not a plain file", str(path))
    return open(fd, "rb", buffering=1 << 20)


def write(path: Path, text: str, synced: bool = False) -> None:
    """Write a text file in one step; see ``replacing``."""
    with replacing(path, synced) as new:
        new.write_text(text)


def sync(path: Path) -> None:
    """Wait until a file's contents or a directory's entries have reached the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
