"""The patch of a container's work tree, by the engine's word and not the box's.

The engine lists the paths that differ from the image; only those are fetched, from the box and from a container of
the image that was never started, and compared by `treediff`, as local sandboxes are. Nothing is run in the box.
"""

from __future__ import annotations

import os
import stat
import tarfile
import tempfile
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path

from docker.errors import APIError

from rollout.sandbox import PatchTooLarge, failed
from rollout.sandbox.docker.engine import ContainerEngine
from rollout.sandbox.docker.files import archive, is_directory
from rollout.sandbox.treediff import LINK, Directory, counts, git_mode, patch_between

_ONE_BY_ONE = 24  # paths; for more, the directory that holds them all is read once
_DELETED = 2
_UNKNOWN = "\N{REPLACEMENT CHARACTER}".encode()
_CHUNK = 1 << 20


def container_diff(engine: ContainerEngine, container: str, origin: str | Path, workdir: str, max_bytes: int) -> bytes:
    """What changed below `workdir` since its origin, the container's image or a small directory that was copied there,
    as a patch. The container must not be running. Blocks.

    Raises PatchTooLarge, SandboxError.
    """
    try:
        if isinstance(origin, Path):
            return _since_snapshot(engine, container, origin, workdir, max_bytes)
        return _since_image(engine, container, origin, workdir, max_bytes)
    except OSError as error:
        raise failed("diff_failed", str(error)) from error


def _since_snapshot(engine: ContainerEngine, container: str, snapshot: Path, workdir: str, max_bytes: int) -> bytes:
    with tempfile.TemporaryDirectory(prefix="diff-") as name:
        old = Directory(os.fsencode(snapshot))
        new = _Fetched(engine, container, workdir, Path(name, "new"), old.files, max_bytes)
        if is_directory(engine.stat(container, workdir)):
            new.fetch(set(), {b""})
        return patch_between(old, new, Path(name, "git"), max_bytes)


def _since_image(engine: ContainerEngine, container: str, image: str, workdir: str, max_bytes: int) -> bytes:
    root = os.fsencode(workdir)
    try:
        changed, gone, unnamed = _changed(engine.client.diff(container) or [], root)
    except APIError as error:
        if error.status_code != 500:
            raise
        # Podman cannot list changes when a file or a link has become a directory: all that there is is compared.
        changed, gone, unnamed = set(), set(), {b""}
    if not is_directory(engine.stat(container, workdir)):  # the work tree itself is gone, or a link now
        changed, gone, unnamed = set(), {b""}, set()
    if not changed and not gone and not unnamed:
        return b""
    host = {"network_mode": "none", "log_config": {"Type": "none"}}
    pristine = engine.client.create_container(
        image,
        ["true"],
        entrypoint=[],
        labels=engine.labels(),
        host_config=engine.client.create_host_config(**host),
        use_config_proxy=False,
    )["Id"]
    try:
        with tempfile.TemporaryDirectory(prefix="diff-") as name:
            old = _Fetched(engine, pristine, workdir, Path(name, "old"))
            old.fetch(changed, gone | unnamed)
            new = _Fetched(engine, container, workdir, Path(name, "new"), old.files, max_bytes)
            new.fetch(changed, unnamed)
            # A directory that became something else: nothing that was in it is named.
            old.fetch(set(), {path for path in changed & old.directories if path not in new.directories})
            return patch_between(old, new, Path(name, "git"), max_bytes)
    finally:
        engine.client.remove_container(pristine, v=True, force=True)


def _changed(entries: Iterable[dict], root: bytes) -> tuple[set[bytes], set[bytes], set[bytes]]:
    """The relative paths that the engine calls added or modified, those that it calls deleted, and directories with
    names in them that are no UTF-8, for which the engine has no words."""
    changed: set[bytes] = set()
    gone: set[bytes] = set()
    unnamed: set[bytes] = set()
    for entry in entries:
        path = os.fsencode(entry["Path"])
        relative = path.removeprefix(root + b"/")
        # What does not count as a link does not count at all, a directory's name included.
        if relative == path or not counts(relative, stat.S_IFLNK):
            continue
        if _UNKNOWN in relative:
            unnamed.add(os.path.dirname(relative[: relative.index(_UNKNOWN)]))
        else:
            (gone if entry["Kind"] == _DELETED else changed).add(relative)
    return changed, gone, unnamed


class _Fetched:
    """Some files and links of a work tree in a container, as a `treediff.Tree`; contents lie in numbered files.

    With `old`, only what has the size that it has there is read without a limit; all else must stay under `budget`,
    as it must for the patch. `directories`: those that were met.
    """

    def __init__(
        self,
        engine: ContainerEngine,
        container: str,
        workdir: str,
        store: Path,
        old: Mapping[bytes, tuple[int, int]] | None = None,
        budget: int = 0,
    ) -> None:
        self.files: dict[bytes, tuple[int, int]] = {}
        self.directories: set[bytes] = set()
        self._contents: dict[bytes, Path | bytes] = {}
        self._engine, self._container, self._workdir = engine, container, workdir
        self._store, self._old, self._budget, self._cap = store, old, budget, budget
        store.mkdir()

    def read(self, path: bytes) -> bytes:
        content = self._contents[path]
        return content if isinstance(content, bytes) else content.read_bytes()

    def fetch(self, single: set[bytes], whole: set[bytes]) -> None:
        """Read the files and links among `single`, and all that is at or below `whole`. What is not there is left
        out. The engine names what is in a directory that was added or changed, but not what was in a deleted one."""
        # Podman follows a link that it is asked for, but not those that it finds in a directory.
        if len(single) + len(whole) > _ONE_BY_ONE or (self._engine.podman and single | whole):
            place = os.path.commonpath(single | whole)
            if self._engine.podman:
                place = os.path.dirname(place)
            self._read(place, lambda path: path in single or _within(path, whole))
            return
        for path in whole:
            self._read(path, lambda _: True)
        for path in sorted(single):
            # Below a link the engine would look where that points.
            if not _within(os.path.dirname(path), self.files.keys()):
                self._read(path, None)

    # wanted None: the file or link itself.
    def _read(self, place: bytes, wanted: Callable[[bytes], bool] | None) -> None:
        where = os.fsdecode(os.path.join(os.fsencode(self._workdir), place))
        links: list[bytes] = []
        try:
            with archive(self._engine, self._container, where) as members:
                for tar, member in members:
                    # Names begin with the last part of the path that was asked for.
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
        for path in links:  # a further name of a file: on its own it comes with its contents
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
            self._budget -= member.size
            if self._budget < 0:
                raise PatchTooLarge(f"more than {self._cap} bytes of changed files")
        source = tar.extractfile(member)
        assert source is not None
        file = self._store / str(len(self._contents))
        with source, open(file, "wb") as target_file:
            while chunk := source.read(_CHUNK):
                target_file.write(chunk)
        self._contents[path] = file


def _within(path: bytes, tops: Container[bytes]) -> bool:
    """Whether `path` is one of `tops` or below one."""
    while path and path not in tops:
        path = os.path.dirname(path)
    return path in tops


def _mode(member: tarfile.TarInfo) -> int:
    """As `stat` gives it; 0 for what is neither a file nor a link."""
    kind = stat.S_IFLNK if member.issym() else stat.S_IFREG if member.isreg() or member.islnk() else 0
    return kind and kind | member.mode
