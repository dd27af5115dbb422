"""This module tests reversed patches against real git: they undo what the patch did, whatever the files are."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from rl.data.patches import changes, reverse

# Lines that look like parts of a patch, characters that end no line for git, files without a final newline.
LINE = st.sampled_from(
    ["a", "b", "", "-- a/x", "++ b/x", "@@ -1 +1 @@", "\\ No newline", "x\r", "form\ffeed", "diff --git"]
)
TEXT = st.builds(lambda lines, end: "\n".join(lines) + end, st.lists(LINE, max_size=12), st.sampled_from(["\n", ""]))
TREE = st.dictionaries(
    st.sampled_from(["one.py", "two words.txt", "sub/three", "\xe4"]), st.tuples(TEXT, st.sampled_from([0o644, 0o755]))
)
GIT = ("git", "-c", "core.autocrlf=false", "-c", "core.safecrlf=false", "-c", "core.filemode=true")


def git(directory: Path, *arguments: str, data: str | None = None) -> str:
    done = subprocess.run(
        [*GIT, *arguments], cwd=directory, input=data and data.encode(), capture_output=True, check=True
    )
    return done.stdout.decode()


def write(directory: Path, tree: dict[str, tuple[str, int]]) -> None:
    for name, (text, mode) in tree.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text.encode())
        path.chmod(mode)


def index(directory: Path) -> str:
    git(directory, "add", "--all")
    return git(directory, "write-tree").strip()


@settings(max_examples=60)
@given(before=TREE, after=TREE, renames=st.booleans())
def test_the_reverse_of_a_patch_undoes_it(
    before: dict[str, tuple[str, int]], after: dict[str, tuple[str, int]], renames: bool
) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        git(directory, "init", "--quiet", "--template=")
        write(directory, before)
        first = index(directory)
        for path in before:
            (directory / path).unlink()
        write(directory, after)
        second = index(directory)
        patch = git(directory, "diff-tree", "-r", "-p", "-M" if renames else "--no-renames", first, second)
        if not patch:
            return
        assert changes(patch)
        git(directory, "apply", "--index", "-", data=reverse(patch))
        assert git(directory, "write-tree").strip() == first
        git(directory, "apply", "--index", "-", data=reverse(reverse(patch)))
        assert git(directory, "write-tree").strip() == second
