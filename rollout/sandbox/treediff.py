"""Make a git patch between two directory trees; whoever wrote the second cannot influence how.

The trees are compared as bytes: nothing of the second tree says how (no index, attributes, filters, ignore files or
hooks). Only the files that differ are written as objects to a scratch repository, and one `git diff-tree` there prints
the patch. Left out are everything below a `.git` (in any spelling, at any depth), what tests and interpreters leave
behind (`JUNK_DIRS`, `JUNK_SUFFIXES`; a stale .pyc in a patch could even take the place of its source), anything that is
neither a file nor a symbolic link, and what the first tree's own ignore rules name (`rollout.sandbox.ignored`).
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import zlib
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Protocol

from rollout.sandbox import LEFT_OUT, PatchTooLarge, SandboxError

JUNK_DIRS = frozenset({b"__pycache__", b".pytest_cache", b".mypy_cache", b".ruff_cache", b".hypothesis"})
JUNK_SUFFIXES = (b".pyc", b".pyo")
_MOST_FILES = 20_000  # that a patch may change
_MOST_NAMED = 100  # files that a patch names as left out
_GIT_S = 60
_MAX_PATH = 3000  # bytes; longer ones cannot be opened by name (PATH_MAX)
LINK, _EXECUTABLE, _PLAIN, _TREE = 0o120000, 0o100755, 0o100644, 0o40000

Entry = tuple[int, bytes]  # git mode, raw object id


class FileTree(Protocol):
    """A tree has the files and links that belong in a patch (see `counts`)."""

    @property
    def files(self) -> Mapping[bytes, tuple[int, int]]:
        """Return (git mode, size in bytes) by relative path."""

    def read(self, path: bytes) -> bytes:
        """Return the contents of a file, or where a link points."""


class Origin(FileTree, Protocol):
    """An origin is the tree that a patch starts from: a task's snapshot, which no agent has written to."""

    def index(self) -> bytes | None:
        """Return git's index file, which lists what the snapshot's commit has; None if there is none."""


def patch_between(
    old: FileTree, new: FileTree, scratch: Path, max_bytes: int, ignored: Container[bytes] = frozenset()
) -> bytes:
    """Return the patch that turns `old` into `new` (apply it with `git apply`), b"" if nothing differs.

    scratch: a directory that does not exist yet; the caller deletes it. ignored: files that are left out; they are read
    only if mode and size are the same. Lines before the patch name those that are in `old` (see `Sandbox.diff`). Raises
    PatchTooLarge if the changed content or the patch exceeds max_bytes, if more than 20,000 files changed, or if git
    takes longer than a minute. Raises SandboxError if git fails, OSError if a tree cannot be read.
    """
    budget, changed = max_bytes, 0
    left_out: list[bytes] = []
    before: dict[bytes, tuple[int, bytes]] = {}
    after: dict[bytes, tuple[int, bytes]] = {}
    for path in old.files.keys() | new.files.keys():
        was, now = old.files.get(path), new.files.get(path)
        if was is not None and was == now and old.read(path) == new.read(path):
            continue
        if path in ignored:
            if was is not None:
                left_out.append(path)
            continue
        if now is not None:
            budget -= now[1]
            if budget < 0:
                raise PatchTooLarge(f"more than {max_bytes} bytes of changed files")
            after[path] = now[0], new.read(path)
        if was is not None:
            before[path] = was[0], old.read(path)
        changed += 1
        if changed > _MOST_FILES:
            raise PatchTooLarge(f"more than {_MOST_FILES} changed files")
    if not before and not after:
        return b""
    make_repository(scratch)
    trees = [_write_files(scratch / "objects", files).hex() for files in (before, after)]
    patch = _git_diff(scratch, trees)
    if len(patch) > max_bytes:
        raise PatchTooLarge(f"a patch of {len(patch)} bytes, more than {max_bytes}")
    names = [json.dumps(path.decode("utf-8", "backslashreplace")) for path in sorted(left_out)[:_MOST_NAMED]]
    return b"".join(b"%s%s\n" % (LEFT_OUT, name.encode()) for name in names) + patch


def make_repository(place: Path) -> None:
    """Make an empty git directory."""
    for part in ("objects", "refs"):
        (place / part).mkdir(parents=True, exist_ok=True)
    (place / "HEAD").write_text("ref: refs/heads/none\n")


def git_environment(git_dir: Path) -> dict[str, str]:
    """Return an environment in which git uses this directory, and no configuration of the user or the machine."""
    return {
        "PATH": os.defpath + ":/usr/local/bin",
        "GIT_DIR": str(git_dir),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_ATTR_NOSYSTEM": "1",
        "LC_ALL": "C",
    }


def counts(path: bytes, mode: int) -> bool:
    """Return whether a file or link at this relative path belongs in a patch. mode: as `stat` gives it."""
    *directories, name = path.split(b"/")
    if len(path) > _MAX_PATH or any(part.lower() == b".git" for part in (*directories, name)):
        return False
    if not JUNK_DIRS.isdisjoint(directories):
        return False
    return stat.S_ISLNK(mode) or (stat.S_ISREG(mode) and not name.endswith(JUNK_SUFFIXES))


def git_mode(mode: int) -> int:
    """Return git's mode of a file or link. mode: as `stat` gives it."""
    return LINK if stat.S_ISLNK(mode) else _EXECUTABLE if mode & 0o100 else _PLAIN


def object_id(kind: bytes, data: bytes) -> bytes:
    """Return the raw SHA-1 id that git gives an object."""
    return hashlib.sha1(kind + b" %d\0" % len(data) + data).digest()


class Directory:
    """A directory of this machine is read as an `Origin`; its files must not change meanwhile. Raises OSError."""

    def __init__(self, root: bytes) -> None:
        self._root = root
        self.files: dict[bytes, tuple[int, int]] = {}
        pending = [b""]
        while pending:
            directory = pending.pop()
            with os.scandir(os.path.join(root, directory)) as entries:
                for entry in entries:
                    path = os.path.join(directory, entry.name)
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(status.st_mode):
                        # Asked with a name below it, so that the rules for directories apply.
                        if counts(path + b"/x", stat.S_IFREG):
                            pending.append(path)
                    elif counts(path, status.st_mode):
                        self.files[path] = git_mode(status.st_mode), status.st_size

    def read(self, path: bytes) -> bytes:
        """Return the contents of a file, or where a link points."""
        full = os.path.join(self._root, path)
        if self.files[path][0] == LINK:
            return os.readlink(full)
        with open(os.open(full, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            return file.read()

    def index(self) -> bytes | None:
        """Return git's index file, None if there is none."""
        try:
            with open(os.path.join(self._root, b".git/index"), "rb") as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None


def _write_object(objects: Path, kind: bytes, data: bytes) -> bytes:
    raw = object_id(kind, data)
    name = raw.hex()
    path = objects / name[:2] / name[2:]
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(zlib.compress(kind + b" %d\0" % len(data) + data, 1))
    return raw


def _write_files(objects: Path, files: Mapping[bytes, tuple[int, bytes]]) -> bytes:
    """Write blobs and the trees that hold them; returns the id of the root tree."""
    entries = {path: (mode, _write_object(objects, b"blob", data)) for path, (mode, data) in files.items()}
    children: dict[bytes, dict[bytes, Entry]] = {b"": {}}
    for path, entry in entries.items():
        directory, name = os.path.split(path)
        children.setdefault(directory, {})[name] = entry
        while directory and os.path.dirname(directory) not in children:
            directory = os.path.dirname(directory)
            children[directory] = {}
    # Deepest first, so that a directory's own id is known when its parent is written.
    for directory in sorted((d for d in children if d), key=lambda d: d.count(b"/"), reverse=True):
        parent, name = os.path.split(directory)
        children[parent][name] = _TREE, _write_tree(objects, children[directory])
    return _write_tree(objects, children[b""])


def _write_tree(objects: Path, entries: Mapping[bytes, Entry]) -> bytes:
    def order(name: bytes) -> bytes:  # git sorts a directory as if its name ended in a slash
        return name + b"/" if entries[name][0] == _TREE else name

    rows = (b"%o %s\0%s" % (entries[name][0], name, entries[name][1]) for name in sorted(entries, key=order))
    return _write_object(objects, b"tree", b"".join(rows))


def _git_diff(git_dir: Path, trees: list[str]) -> bytes:
    options = ["-r", "-p", "--binary", "--full-index", "--no-renames", "--no-ext-diff", "--no-textconv"]
    try:
        done = subprocess.run(
            ["git", "-c", "core.attributesFile=" + os.devnull, "diff-tree", *options, *trees],
            env=git_environment(git_dir),
            cwd=git_dir,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_S,
        )
    except subprocess.TimeoutExpired as error:  # what it has to compare is small, so the policy has made it hard
        raise PatchTooLarge(f"git made no patch of the changed files in {_GIT_S} s") from error
    if done.returncode != 0:
        raise SandboxError("diff_failed", done.stderr.decode(errors="replace").strip())
    return done.stdout
