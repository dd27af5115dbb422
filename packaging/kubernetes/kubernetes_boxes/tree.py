"""A work tree in a pod, as far as a diff needs it."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Awaitable, Callable, Container, Mapping

from rollout.sandbox import PatchTooLarge, SandboxError
from rollout.sandbox.treediff import LINK, counts, git_mode

Script = Callable[..., Awaitable[bytes]]
"""Runs a script in a keeper: (script, *words, stdin=bytes) -> output."""


class PodTree:
    """A PodTree is a `treediff.FileTree` of what was listed; it has the contents that were fetched.

    listed: the output of `stages.LIST`. changed: files that may have other contents than at boot.
    """

    def __init__(self, listed: bytes) -> None:
        booted, *entries = listed.split(b"\0")[:-1]
        self.files: dict[bytes, tuple[int, int]] = {}
        self.changed: set[bytes] = set()
        self._contents: dict[bytes, bytes] = {}
        for entry in entries:
            mode, kind, size, changed, path = entry.split(b" ", 4)
            bits = int(mode, 8) | (stat.S_IFLNK if kind == b"l" else stat.S_IFREG)
            if counts(path, bits):
                self.files[path] = git_mode(bits), int(size)
                if float(changed) > float(booted):
                    self.changed.add(path)

    def read(self, path: bytes) -> bytes:
        """Return the contents of a file, or where a link points."""
        return self._contents[path]

    def within(self, old: Mapping[bytes, tuple[int, int]], ignored: Container[bytes], budget: int) -> set[bytes]:
        """Return the changed paths whose contents a patch needs. Raises PatchTooLarge if they are larger than that."""
        wanted = set()
        for path in self.changed:
            if old.get(path) != self.files[path]:
                if path in ignored:
                    self._contents[path] = b""
                    continue
                budget -= self.files[path][1]
                if budget < 0:
                    raise PatchTooLarge("too many bytes of changed files")
            wanted.add(path)
        return wanted

    async def fetch(self, run: Script, pack: str, place: str, paths: set[bytes]) -> None:
        """Get contents. What is gone meanwhile, or has another type, is gone here, too. Raises SandboxError."""
        names = b"".join(path + b"\0" for path in paths)
        packed = await run(pack, place, str(len(names)), stdin=names) if paths else b""
        seen: dict[bytes, bytes] = {}
        try:
            with tarfile.open(fileobj=io.BytesIO(packed), mode="r|", errors="surrogateescape") as tar:
                for member in tar:
                    path = os.fsencode(member.name)
                    if member.issym() or member.islnk():
                        target = os.fsencode(member.linkname)
                        seen[path] = seen.get(target, b"") if member.islnk() else target
                        self.files[path] = (self.files[path][0] if member.islnk() else LINK), len(seen[path])
                    elif (file := tar.extractfile(member)) is not None:
                        seen[path] = file.read()
                        self.files[path] = git_mode(stat.S_IFREG | member.mode), len(seen[path])
        except tarfile.TarError as error:
            if packed:
                raise SandboxError("diff_failed", f"a broken archive: {error}") from error
        self._contents |= seen
        for path in paths - seen.keys():
            self.files.pop(path, None)


class Part:
    """A Part is a tree that has only some files of another one."""

    def __init__(self, whole: object, paths: Container[bytes]) -> None:
        self.files = {path: entry for path, entry in whole.files.items() if path in paths}  # type: ignore[attr-defined]
        self.read = whole.read  # type: ignore[attr-defined]
