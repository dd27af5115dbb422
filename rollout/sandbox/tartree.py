"""The work tree of a box that is kept, or comes, as an archive: it is compared with another one in place."""

from __future__ import annotations

import os
import stat
import tarfile
from pathlib import Path

from rollout.sandbox.treediff import counts, git_mode


class TarTree:
    """A work tree in an archive is read in place, as a `treediff.Origin`. Raises OSError if it cannot be."""

    def __init__(self, archive: Path) -> None:
        self.files: dict[bytes, tuple[int, int]] = {}
        self._archive = archive
        self._contents: dict[bytes, bytes | int] = {}  # where a link points, or where a file's bytes begin
        self._index: tuple[int, int] | None = None  # where git's index begins, and its size
        try:
            with tarfile.open(archive, "r:", errors="surrogateescape") as tar:
                for member in tar:
                    path = os.fsencode(member.name).removeprefix(b"./")
                    if path == b".git/index" and member.isreg():
                        self._index = member.offset_data, member.size
                    mode = member.mode | (stat.S_IFLNK if member.issym() else stat.S_IFREG)
                    if (member.isreg() or member.issym()) and counts(path, mode):
                        content = os.fsencode(member.linkname) if member.issym() else member.offset_data
                        size = len(content) if isinstance(content, bytes) else member.size
                        self.files[path], self._contents[path] = (git_mode(mode), size), content
        except tarfile.TarError as error:
            raise OSError(f"{archive}: {error}") from error

    def read(self, path: bytes) -> bytes:
        """Return the contents of a file, or where a link points."""
        content = self._contents[path]
        return content if isinstance(content, bytes) else self._bytes(content, self.files[path][1])

    def index(self) -> bytes | None:
        """Return git's index file, None if there is none."""
        return None if self._index is None else self._bytes(*self._index)

    def _bytes(self, begin: int, size: int) -> bytes:
        with open(self._archive, "rb") as file:
            file.seek(begin)
            return file.read(size)
