"""The work tree of a pod, as far as a diff needs it."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Container, Mapping

from rollout.sandbox import PATCH_CAP, PatchTooLarge, SandboxError
from rollout.sandbox.treediff import LINK, FileTree, counts, git_mode


class PodTree:
    """A PodTree is a `treediff.FileTree` of what `list` (stages.sh) has listed, with the contents that were unpacked.

    since: an earlier list. changed: the paths that are not as they were then: a file with another inode or change time,
    which no program can set, may be another one, or have other contents.
    """

    def __init__(self, listed: bytes, since: bytes = b"") -> None:
        known = set(since.split(b"\0"))
        self.files: dict[bytes, tuple[int, int]] = {}
        self.changed: set[bytes] = set()
        self._contents: dict[bytes, bytes] = {}
        for entry in listed.split(b"\0")[:-1]:
            _, mode, kind, size, _, path = entry.split(b" ", 5)
            bits = int(mode, 8) | (stat.S_IFLNK if kind == b"l" else stat.S_IFREG)
            if counts(path, bits):
                self.files[path] = git_mode(bits), int(size)
                if entry not in known:
                    self.changed.add(path)

    def read(self, path: bytes) -> bytes:
        """Return the contents of a file, or where a link points."""
        return self._contents[path]

    def index(self) -> bytes | None:
        """Return git's index file, None if it was not unpacked."""
        return self._contents.get(b".git/index")

    def wanted(self, old: Mapping[bytes, tuple[int, int]], ignored: Container[bytes]) -> set[bytes]:
        """Return the paths whose contents a patch needs. Raises PatchTooLarge if they are too large for one."""
        paths, budget = set(), PATCH_CAP
        for path in self.changed:
            if old.get(path) != self.files[path]:
                if path in ignored:
                    continue
                budget -= self.files[path][1]
                if budget < 0:
                    raise PatchTooLarge(f"more than {PATCH_CAP} bytes of changed files")
            paths.add(path)
        return paths

    def unpack(self, packed: bytes) -> None:
        """Take contents from the output of `pack` (stages.sh). Raises SandboxError diff_failed."""
        try:
            with tarfile.open(fileobj=io.BytesIO(packed), mode="r|", errors="surrogateescape") as tar:
                for member in tar:
                    path, target = os.fsencode(member.name), os.fsencode(member.linkname)
                    file = None if member.issym() or member.islnk() else tar.extractfile(member)
                    data = file.read() if file else self._contents[target] if member.islnk() else target
                    mode = LINK if member.issym() else git_mode(stat.S_IFREG | member.mode)
                    self._contents[path] = data
                    if path in self.files:  # it may have been changed meanwhile
                        self.files[path] = mode, len(data)
        except (tarfile.TarError, KeyError) as error:
            raise SandboxError("diff_failed", f"a broken archive: {error}") from error


class Part:
    """A Part is a `treediff.FileTree` with only some files of another one."""

    def __init__(self, whole: FileTree, paths: Container[bytes]) -> None:
        self.files = {path: entry for path, entry in whole.files.items() if path in paths}
        self._whole = whole

    def read(self, path: bytes) -> bytes:
        """Return the contents of a file, or where a link points."""
        return self._whole.read(path)
