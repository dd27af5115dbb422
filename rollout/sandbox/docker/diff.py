"""The patch of a container's work tree, made from what the engine says, not from what the box says.

The engine lists the paths that differ from the image. Only those are fetched, from the box and from a container of the
image that was never started, and compared by `treediff`, as for local sandboxes. Nothing is run in the box.
"""

from __future__ import annotations

import os
import stat
import tarfile
import tempfile
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from docker.errors import APIError

from rollout.sandbox import PATCH_CAP, PatchTooLarge, failed
from rollout.sandbox.docker.engine import ContainerEngine
from rollout.sandbox.docker.files import archive, is_directory, read
from rollout.sandbox.ignored import RULES, IgnoredPaths
from rollout.sandbox.treediff import LINK, Directory, counts, git_mode, patch_between

_ONE_BY_ONE = 40  # paths; for more, the directory that holds them all is read once
_ADDED, _DELETED = 1, 2
_UNKNOWN = "\N{REPLACEMENT CHARACTER}".encode()
_CHUNK = 1 << 20


def container_diff(engine: ContainerEngine, container: str, origin: str | Path, workdir: str) -> bytes:
    """Return what changed below `workdir`, as a patch. The container must not be running. Blocks.

    origin: what was there at first, as the name of the container's image or as the small directory that was copied.
    Raises PatchTooLarge, SandboxError.
    """
    try:
        if isinstance(origin, Path):
            return _since_snapshot(engine, container, origin, workdir)
        return _since_image(engine, container, origin, workdir)
    except OSError as error:
        raise failed("diff_failed", str(error)) from error


def _since_snapshot(engine: ContainerEngine, container: str, snapshot: Path, workdir: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="diff-") as name:
        old = Directory(os.fsencode(snapshot))
        with IgnoredPaths(old, Path(name)) as ignored:
            new = _ContainerTree(engine, container, workdir, Path(name, "new"), old.files, ignored)
            if is_directory(engine.stat(container, workdir)):
                new.fetch(set(), {b""})
            return patch_between(old, new, Path(name, "patch"), PATCH_CAP, ignored)


def _since_image(engine: ContainerEngine, container: str, image: str, workdir: str) -> bytes:
    root = os.fsencode(workdir)
    try:
        changed, gone, unnamed, rules = _changed(engine.client.diff(container) or [], root)
    except APIError as error:
        if error.status_code != 500:
            raise
        # Podman cannot list changes if a file or a link has become a directory: then everything is compared.
        changed, gone, unnamed, rules = set(), set(), {b""}, set()
    if not is_directory(engine.stat(container, workdir)):  # the work tree itself is gone, or a link now
        changed, gone, unnamed, rules = set(), {b""}, set(), set()
    if not changed and not gone and not unnamed:
        return b""
    with engine.helper(image) as pristine, tempfile.TemporaryDirectory(prefix="diff-") as name:
        old = _ContainerTree(engine, pristine, workdir, Path(name, "old"))
        old.fetch(changed | rules, gone | unnamed)
        with IgnoredPaths(old, Path(name)) as ignored:
            new = _ContainerTree(engine, container, workdir, Path(name, "new"), old.files, ignored)
            known = old.files.keys() | old.directories
            new.fetch({path for path in changed if path in known or path not in ignored}, unnamed)
            new.fetch(rules & old.files.keys() - changed, set())  # else they would be missing there
            # If a directory became something else, the engine names nothing that was in it.
            old.fetch(set(), {path for path in changed & old.directories if path not in new.directories})
            return patch_between(old, new, Path(name, "patch"), PATCH_CAP, ignored)


def _changed(entries: Iterable[dict], root: bytes) -> tuple[set[bytes], set[bytes], set[bytes], set[bytes]]:
    """Return four sets of relative paths: what the engine calls added or modified, what it calls deleted, directories
    with names that it cannot give because they are not UTF-8, and files that may hold ignore rules for all these."""
    changed: set[bytes] = set()
    gone: set[bytes] = set()
    unnamed: set[bytes] = set()
    added: set[bytes] = set()
    for entry in entries:
        path = os.fsencode(entry["Path"])
        relative = path.removeprefix(root + b"/")
        # A path that would not count if it were a link does not count whatever it is, a directory included.
        if relative == path or not counts(relative, stat.S_IFLNK):
            continue
        if _UNKNOWN in relative:
            unnamed.add(os.path.dirname(relative[: relative.index(_UNKNOWN)]))
        else:
            (gone if entry["Kind"] == _DELETED else changed).add(relative)
            if entry["Kind"] == _ADDED:
                added.add(relative)
    places = {place for path in changed | gone for place in _above(path)} | unnamed
    return changed, gone, unnamed, {os.path.join(place, RULES) for place in places - added}


class _ContainerTree:
    """This `treediff.FileTree` has some files and links of a work tree in a container; contents lie in numbered files.

    old: if given, only files that have the same mode and size there are read without a limit. Of the others, those in
    `ignored` are not read, and the rest may have `PATCH_CAP` bytes together. directories: those
    that were seen.
    """

    def __init__(
        self,
        engine: ContainerEngine,
        container: str,
        workdir: str,
        store: Path,
        old: Mapping[bytes, tuple[int, int]] | None = None,
        ignored: Container[bytes] = frozenset(),
    ) -> None:
        self.files: dict[bytes, tuple[int, int]] = {}
        self.directories: set[bytes] = set()
        self._contents: dict[bytes, Path | bytes] = {}
        self._engine, self._container, self._workdir = engine, container, workdir
        self._store, self._old, self._ignored, self._budget = store, old, ignored, PATCH_CAP
        store.mkdir()

    def read(self, path: bytes) -> bytes:
        content = self._contents[path]
        return content if isinstance(content, bytes) else content.read_bytes()

    def index(self) -> bytes | None:
        """Return git's index file, None if there is none."""
        try:
            return read(self._engine, self._container, self._workdir, PurePosixPath(".git/index"))
        except FileNotFoundError:
            return None

    def fetch(self, single: set[bytes], whole: set[bytes]) -> None:
        """Read the files and links among `single`, and everything at or below `whole`; what is not there is left out.

        `whole` is needed because the engine names what is in a directory that was added or changed, but not what was in
        a deleted one.
        """
        # Podman follows a link that it is asked for, but not links that it finds in a directory.
        if len(single) + len(whole) > _ONE_BY_ONE or (self._engine.podman and single | whole):
            place = os.path.commonpath(single | whole)
            if self._engine.podman:
                place = os.path.dirname(place)
            self._read(place, lambda path: path in single or _within(path, whole))
            return
        for path in whole:
            self._read(path, lambda _: True)
        for path in sorted(single):
            # Below a link the engine would look where the link points.
            if not _within(os.path.dirname(path), self.files.keys()):
                self._read(path, None)

    # wanted: which paths at or below `place` are kept; None: only the file or link at `place` itself.
    def _read(self, place: bytes, wanted: Callable[[bytes], bool] | None) -> None:
        where = os.fsdecode(os.path.join(os.fsencode(self._workdir), place))
        links: list[bytes] = []
        try:
            with archive(self._engine, self._container, where) as members:
                for tar, member in members:
                    # Names in the archive begin with the last part of the path that was asked for.
                    below = os.fsencode(member.name).split(b"/", 1)[1:]
                    path = b"/".join(part for part in (place, *below) if part)
                    if member.isdir():
                        self.directories.add(path)
                        if wanted is None:
                            break
                    elif path and (wanted is None or wanted(path)) and counts(path, _mode(member)):
                        if member.islnk():
                            links.append(path)
                        else:
                            self._keep(path, _mode(member), tar, member)
        except FileNotFoundError:
            return
        for path in links:  # another name of a file; asked for alone, it comes with the contents
            self._read(path, None)

    def _keep(self, path: bytes, mode: int, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        if path in self.files:  # asked for twice
            return
        if stat.S_ISLNK(mode):
            target = os.fsencode(member.linkname)
            self.files[path], self._contents[path] = (LINK, len(target)), target
            return
        self.files[path] = git_mode(mode), member.size
        if self._old is not None and self._old.get(path) != self.files[path]:
            if path in self._ignored:
                return
            self._budget -= member.size
            if self._budget < 0:
                raise PatchTooLarge(f"more than {PATCH_CAP} bytes of changed files")
        source = tar.extractfile(member)
        assert source is not None
        file = self._store / str(len(self._contents))
        with source, open(file, "wb") as target_file:
            while chunk := source.read(_CHUNK):
                target_file.write(chunk)
        self._contents[path] = file


def _above(path: bytes) -> Iterator[bytes]:
    """Yield the directories that a path is in, b"" for the work tree itself."""
    while path:
        path = os.path.dirname(path)
        yield path


def _within(path: bytes, tops: Container[bytes]) -> bool:
    """Return whether `path` is one of `tops` or below one."""
    while path and path not in tops:
        path = os.path.dirname(path)
    return path in tops


def _mode(member: tarfile.TarInfo) -> int:
    """Return the mode as `stat` gives it, 0 for what is neither a file nor a link."""
    kind = stat.S_IFLNK if member.issym() else stat.S_IFREG if member.isreg() or member.islnk() else 0
    return kind and kind | member.mode
