"""Read, write and delete the files of a sandbox from outside it.

The agent may have put a symbolic link anywhere, so no path is opened by its whole name: every component is opened
relative to the one before, and none of them may be a link.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import stat
import subprocess
import tarfile
from collections.abc import Generator
from pathlib import Path, PurePosixPath

logger = logging.getLogger(__name__)
_left: set[Path] = set()

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def write_below(base: Path, relative: PurePosixPath, data: bytes) -> None:
    """Write base/relative with mode 0644, in one step; missing directories are made. Raises OSError."""
    with _parent(base, relative, create=True) as directory:
        temporary = f".put-{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(os.open(temporary, flags, 0o644, dir_fd=directory), "wb") as file:
                file.write(data)
            os.rename(temporary, relative.name, src_dir_fd=directory, dst_dir_fd=directory)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=directory)
            raise


def read_below(base: Path, relative: PurePosixPath) -> bytes:
    """Read the regular file base/relative. Raises OSError; FileNotFoundError if it is not a regular file."""
    with _parent(base, relative, create=False) as directory:
        # O_NONBLOCK: opening a FIFO must not wait for a writer.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(relative.name, flags, dir_fd=directory), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise FileNotFoundError(f"not a regular file: {relative}")
            return file.read()


def remove_tree(path: Path) -> None:
    """Delete a directory, whatever was done to the modes and depth of what is in it. Raises nothing.

    One that cannot be deleted, because descriptors or processes have run out, is deleted by the next call.
    """
    for one in (path, *_left):
        try:
            _remove(one)
            _left.discard(one)
        except OSError as error:
            _left.add(one)
            logger.warning("%s is left for now: %s", one, error)


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        pass
    except (OSError, RecursionError):  # modes that deny us, or more levels than Python recurses
        open_modes(path)
        done = subprocess.run(["rm", "-rf", "--", str(path)], stdin=subprocess.DEVNULL, capture_output=True)
        if done.returncode and path.is_dir():
            raise OSError(done.stderr.decode(errors="replace").strip() or f"rm ended with {done.returncode}") from None


def open_modes(path: Path) -> None:
    """Give this user back the right to read, write and enter everything below a directory."""
    subprocess.run(["chmod", "-R", "u+rwX", "--", str(path)], stdin=subprocess.DEVNULL, capture_output=True)


@contextlib.contextmanager
def _parent(base: Path, relative: PurePosixPath, create: bool) -> Generator[int]:
    """Open the directory that holds base/relative, and yield the descriptor."""
    directory = os.open(base, _DIRECTORY)
    try:
        for name in relative.parts[:-1]:
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o755, dir_fd=directory)
            inner = os.open(name, _DIRECTORY, dir_fd=directory)
            os.close(directory)
            directory = inner
        yield directory
    finally:
        os.close(directory)


def unowned(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Take owner and time from a member of an archive, so that the same files make the same bytes."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member
