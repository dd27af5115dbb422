"""This module replaces files in one step: a reader finds the old file or the whole new one, never a part of it."""

import contextlib
import os
import secrets
from collections.abc import Generator
from pathlib import Path


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
