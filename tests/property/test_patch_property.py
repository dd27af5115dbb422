"""Hypothesis makes up two trees and the way in which git prints their difference.

Each file must be split off whole, the parts joined must be the patch, and if some files are left out, exactly these
must stay unchanged.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewards.patch import APPLY, PatchError, read_the_same, split
from tests.property.test_treediff_property import _files, _trees, _write


def git_diff(base: Path, *options: str) -> bytes:
    """Return the changes from base/a to base/b as `git diff` prints them in a work tree."""
    env = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    for side in ("a", "b"):  # two commits of one repository, so that renames and copies are found
        work = base / side
        git = ["git", f"--git-dir={base / 'git'}", f"--work-tree={work}", "-c", "user.name=t", "-c", "user.email=t"]
        steps = [["add", "-A", "."], ["commit", "-qm", side, "--allow-empty"]]
        for step in ([["init", "-q"]] if side == "a" else []) + steps:
            subprocess.run([*git, *step], check=True, cwd=work, env=env, capture_output=True)
    command = ["git", f"--git-dir={base / 'git'}", "diff-tree", "-r", "-p", "--binary", *options, "HEAD~", "HEAD"]
    return subprocess.run(command, check=True, env=env, capture_output=True).stdout


def read_by_git(patch: bytes) -> list[str]:
    """Return the paths of a patch as git reads them, in order."""
    done = subprocess.run(["git", "apply", "--numstat", "-z"], input=patch, check=True, capture_output=True, cwd="/")
    assert read_the_same(split(patch), done.stdout)
    rows = done.stdout.split(b"\0")[:-1]
    return [row.split(b"\t", 2)[2].decode("utf-8", "backslashreplace") for row in rows]


@settings(max_examples=60)
@given(_trees, _trees, st.sampled_from([["--no-renames"], ["-M", "-C", "--find-copies-harder"], ["-M", "-U0"], ["-D"]]))
def test_every_file_is_cut_out_whole(old: dict, new: dict, options: list[str]) -> None:
    base = Path(tempfile.mkdtemp())
    try:
        _write(base / "a", old)
        _write(base / "b", new)
        patch = git_diff(base, *options)
        if not patch:
            with pytest.raises(PatchError):
                split(patch)
            return
        files = split(patch)
        assert b"".join(file.data for file in files) == patch
        assert [file.path for file in files] == read_by_git(patch)
        if options == ["--no-renames"]:
            apart(base, files)
    finally:
        shutil.rmtree(base)


def apart(base: Path, files: list) -> None:
    """Apply every second path of the patch and check that only these change.

    A link in place of a file has two parts, hence paths and not parts.
    """
    names = set(sorted({file.path for file in files})[::2])
    kept = [file for file in files if file.path in names]
    before, after = _files(base / "a"), _files(base / "b")
    wanted = {path: found for path, found in before.items() if path not in names}
    wanted |= {path: found for path, found in after.items() if path in names}
    patch = b"".join(file.data for file in kept)
    done = subprocess.run(
        ["git", "apply", "--whitespace=nowarn"],
        cwd=base / "a",
        input=patch,
        env={**os.environ, "GIT_DIR": "/none"},
        capture_output=True,
    )
    if done.returncode == 0:  # otherwise a file is in the way of a directory, or the other way round
        assert _files(base / "a") == wanted
    else:
        assert any(f"{one}/" in other for one in before for other in after) or any(
            f"{one}/" in other for one in after for other in before
        )


_NAMES = ("x", "y", "conftest.py")
_HEADERS = [f"diff --git a/{a} b/{b}\n" for a in _NAMES for b in _NAMES]
_HEADERS += ['diff --git "a/conf\\164est.py" "b/conf\\164est.py"\n', 'diff --git a/x "b/conf\\164est.py"\n']
_MOVES = [f"similarity index 100%\n{kind} from {a}\n{kind} to {b}\n" for kind in ("rename", "copy")
          for a, b in (("x", "conftest.py"), ("conftest.py", "z"), ("x", "z"))]  # fmt: skip
_OTHERS = ["new file mode 100755\n", "deleted file mode 100644\n", "old mode 100644\nnew mode 100755\n", "\n", "-- \n"]
_SIDES = [f"--- {a}\n+++ {b}\n" for a in ("a/x", "a/conftest.py", "/dev/null", '"a/conf\\164est.py"')
          for b in ("b/x", "b/conftest.py", "/dev/null", "b/conftest.py\t2001-01-01")]  # fmt: skip
_HUNKS = ["@@ -1 +1 @@\n-a\n+b\n", "@@ -1 +0,0 @@\n-a\n", "@@ -0,0 +1 @@\n+b\n", "@@ -1,2 +1 @@\n a\n--- a/x\n",
          "@@ -1 +1,2 @@\n a\n+++ b/conftest.py\n"]  # fmt: skip
_fragments = st.one_of(*map(st.sampled_from, (_HEADERS, _MOVES, _OTHERS, _SIDES, _HUNKS)))


@settings(max_examples=400)
@given(st.lists(_fragments, min_size=1, max_size=9))
def test_no_mixture_of_headers_gets_a_change_through(fragments: list[str]) -> None:
    """Parts of patches come in any order; without those of conftest.py they are refused or do not change it."""
    base = Path(tempfile.mkdtemp())
    try:
        for name in _NAMES:
            (base / name).write_text("a\n")
        try:
            files = [file for file in split("".join(fragments).encode()) if "conftest.py" not in file.paths]
        except PatchError:
            return
        done = subprocess.run(
            ["git", "apply", *APPLY], cwd=base, input=b"".join(file.data for file in files), capture_output=True,
            env={**os.environ, "GIT_DIR": "/none"},
        )  # fmt: skip
        if done.returncode == 0 and read_the_same(files, done.stdout):
            kept = base / "conftest.py"
            assert kept.read_text() == "a\n" and not os.access(kept, os.X_OK)
    finally:
        shutil.rmtree(base)
