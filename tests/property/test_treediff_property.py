"""Whatever two trees look like, applying their diff to the first gives the second.

Empty directories are left out: git does not know them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.sandbox.treediff import Directory, patch_between

_names = st.sampled_from(["a", "b", "a.b", "a-b", "a0", "é", "sp ace", 'quo"te', "-x", "new\nline"])
_contents = st.one_of(
    st.sampled_from([b"", b"\n", b"one\n", b"one\ntwo\n", b"no newline", b"crlf\r\n", b"-- \n", b"\\ No newline\n"]),
    st.binary(max_size=40),
)
_leaves = st.one_of(
    st.tuples(st.just("file"), _contents),
    st.tuples(st.just("executable"), _contents),
    st.tuples(st.just("link"), st.sampled_from(["a", "/etc/passwd", "nowhere"])),
)
_trees = st.recursive(
    st.dictionaries(_names, _leaves, max_size=4),
    lambda inner: st.dictionaries(_names, st.one_of(_leaves, inner), max_size=4),
    max_leaves=8,
)


def _write(directory: Path, tree: dict) -> None:
    directory.mkdir()
    for name, node in tree.items():
        path = directory / name
        if isinstance(node, dict):
            if _holds_files(node):
                _write(path, node)
        elif node[0] == "link":
            path.symlink_to(node[1])
        else:
            path.write_bytes(node[1])
            path.chmod(0o755 if node[0] == "executable" else 0o644)


def _holds_files(tree: dict) -> bool:
    return any(_holds_files(node) if isinstance(node, dict) else True for node in tree.values())


def _files(directory: Path) -> dict[str, tuple]:
    found: dict[str, tuple] = {}
    for base, directories, names in os.walk(directory):
        for name in [*names, *directories]:
            path = Path(base, name)
            key = str(path.relative_to(directory))
            if path.is_symlink():
                found[key] = ("link", os.readlink(path))
            elif path.is_file():
                found[key] = (os.access(path, os.X_OK), path.read_bytes())
    return found


@settings(max_examples=60)
@given(_trees, _trees)
def test_apply_inverts_diff(old: dict, new: dict) -> None:
    base = Path(tempfile.mkdtemp())
    try:
        _write(base / "old", old)
        _write(base / "new", new)
        old, new = (Directory(os.fsencode(base / name)) for name in ("old", "new"))
        patch = patch_between(old, new, base / "scratch", 10**6)
        assert patch == patch_between(old, new, base / "again", 10**6)
        if patch:
            env = {**os.environ, "GIT_DIR": "/none"}
            command = ["git", "apply", "--whitespace=nowarn"]
            subprocess.run(command, cwd=base / "old", input=patch, check=True, env=env)
        assert _files(base / "old") == _files(base / "new")
    finally:
        shutil.rmtree(base)
