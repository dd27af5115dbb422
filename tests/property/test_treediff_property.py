"""Whatever two trees look like, applying their diff to the first gives the second, and what git ignores is ignored.

Empty directories are left out: git does not know them. So are patches that `git apply` wrongly refuses.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rollout.sandbox.ignored import IgnoredPaths
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


_patterns = [
    "a",
    "b/",
    "/a",
    "*",
    "!a",
    "!a.b",
    "!*/",
    "a/*",
    "**/b",
    "a/**",
    "/b/*",
    "!/b/a",
    "?",
    "[ab]",
    "# no",
    "é",
]
_rules = st.lists(st.sampled_from(_patterns), max_size=4)


def test_a_rule_for_directories_does_not_name_a_link_in_place_of_one(tmp_path: Path) -> None:
    (tmp_path / "old" / "b").mkdir(parents=True)
    (tmp_path / "old" / ".gitignore").write_text("b/\n")
    (tmp_path / "old" / "b" / ".gitignore").write_text("c\n")
    with IgnoredPaths(Directory(os.fsencode(tmp_path / "old")), tmp_path) as ignored:
        assert b"b/d" in ignored and b"b" not in ignored and b"b/c" in ignored


@settings(max_examples=60)
@given(_trees, _trees, st.dictionaries(st.sampled_from(["", "a", "b", "b/a"]), _rules, max_size=3), st.data())
def test_what_git_ignores_is_ignored(old: dict, new: dict, rules: dict[str, list[str]], data: st.DataObject) -> None:
    """The judge is git itself, in the snapshot's repository with the new tree's files and the old one's rules."""
    base = Path(tempfile.mkdtemp())
    try:
        _write(base / "old", old)
        for place, lines in rules.items():
            directory = base / "old" / place
            if all(part.is_dir() or not os.path.lexists(part) for part in (directory.parent, directory)):
                directory.mkdir(parents=True, exist_ok=True)
                (directory / ".gitignore").write_text("".join(f"{line}\n" for line in lines))
        env = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
        git = ["git", f"--git-dir={base / 'old/.git'}", "-c", "core.quotePath=false"]
        subprocess.run([*git, f"--work-tree={base / 'old'}", "init", "-q"], check=True, env=env)
        for arguments in (["read-tree", "--empty"], ["add", "-A", "."]):  # the first makes an index in any case
            subprocess.run([*git, f"--work-tree={base / 'old'}", *arguments], check=True, env=env)
        forced = [path for path in sorted(_files(base / "old")) if ".git/" not in path and data.draw(st.booleans())]
        if forced:
            add = [*git, "--literal-pathspecs", f"--work-tree={base / 'old'}", "add", "-f", "--", *forced]
            subprocess.run(add, check=True, env=env)
        _write(base / "new", new)
        origin, now = (Directory(os.fsencode(base / name)) for name in ("old", "new"))
        with IgnoredPaths(origin, base) as ignored:
            found = {path for path in now.files if path in ignored}
        for path in origin.files:  # git reads rules from its work tree
            if os.path.basename(path) == b".gitignore" and _fits(base / "new", os.fsdecode(path)):
                (base / "new" / os.fsdecode(path)).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(base / "old" / os.fsdecode(path), base / "new" / os.fsdecode(path))
        look = [*git, f"--work-tree={base / 'new'}", "ls-files", "-z", "--others", "--ignored", "--exclude-standard"]
        wanted = {path for path in subprocess.check_output(look, cwd=base / "new", env=env).split(b"\0")[:-1]}
        assert found == wanted & now.files.keys()
    finally:
        shutil.rmtree(base)


def _fits(root: Path, path: str) -> bool:
    above = [root / part for part in list(Path(path).parents)[:-1]]
    return all((part.is_dir() and not part.is_symlink()) or not os.path.lexists(part) for part in above)


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


def _apply(patch: bytes, directory: Path) -> subprocess.CompletedProcess[bytes]:
    env = {**os.environ, "GIT_DIR": "/none"}
    return subprocess.run(
        ["git", "apply", "--whitespace=nowarn"], cwd=directory, input=patch, env=env, capture_output=True
    )


def _refused(old: Path, new: Path) -> bool:
    """Tell whether git refuses a new path: it looks for links above the path even behind a link that is removed, and
    for the path behind a removed link that leads to itself."""
    above = {old / directory for path in _files(new) for directory in Path(path).parents}
    return any(one.is_symlink() and (one.parent.resolve() != one.parent or _leads_to_itself(one)) for one in above)


def _leads_to_itself(link: Path) -> bool:
    try:
        link.stat()
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


@pytest.mark.parametrize(
    ("was", "becomes", "said"),
    [
        ({"a": {"b": ("link", "nowhere")}, "c": ("link", "a")}, {"c": {"b": {"d": ("file", b"")}}},
         b"'c/b/d' is beyond a symbolic link"),
        ({"a": ("link", "a")}, {"a": {"b": ("file", b"")}}, b"Too many levels of symbolic links"),
    ],
)  # fmt: skip
def test_git_still_refuses_what_a_removed_link_leads_to(was: dict, becomes: dict, said: bytes, tmp_path: Path) -> None:
    """If it does no more, the assumption of the next test is not needed."""
    _write(tmp_path / "old", was)
    _write(tmp_path / "new", becomes)
    assert _refused(tmp_path / "old", tmp_path / "new")
    old, new = (Directory(os.fsencode(tmp_path / name)) for name in ("old", "new"))
    done = _apply(patch_between(old, new, tmp_path / "scratch", 10**6), tmp_path / "old")
    assert done.returncode == 1 and said in done.stderr


@settings(max_examples=60)
@given(_trees, _trees)
def test_apply_inverts_diff(old: dict, new: dict) -> None:
    base = Path(tempfile.mkdtemp())
    try:
        _write(base / "old", old)
        _write(base / "new", new)
        assume(not _refused(base / "old", base / "new"))
        old, new = (Directory(os.fsencode(base / name)) for name in ("old", "new"))
        patch = patch_between(old, new, base / "scratch", 10**6)
        assert patch == patch_between(old, new, base / "again", 10**6)
        if patch:
            done = _apply(patch, base / "old")
            assert done.returncode == 0, done.stderr
        assert _files(base / "old") == _files(base / "new")
    finally:
        shutil.rmtree(base)
