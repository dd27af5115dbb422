"""Bugs from a git repository of one's own: commits that fixed something with a test, undone at HEAD.

Nothing but the files of HEAD and the changes of its commits is read; hooks, filters and settings of the repository do
not run.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from rl.data.make import edits
from rl.data.make.candidates import FIX, Candidate
from rl.data.make.prepare import PreparedPackage
from rl.data.make.repositories import git
from rl.data.make.sources import git_of

_LARGEST = 200  # lines that a commit changes in code
_DIFF = ("diff", "--no-ext-diff", "--no-textconv", "--no-renames", "--src-prefix=a/", "--dst-prefix=b/")


def fixes(repository: Path, prepared: PreparedPackage, sources: Mapping[str, str]) -> Iterator[Candidate]:
    """Yield the undoing of each commit that changed code and tests, newest first, as far as it fits HEAD's code.

    prepared: made of the repository's HEAD. sources: the texts of files that may be changed. A test of the commit's own
    files has to fail. Raises MakeError.
    """
    test_files = {test.partition("::")[0] for test in prepared.order}
    for commit in git_of(repository, "rev-list", "--no-merges", "--min-parents=1", "HEAD").decode().split():
        names = git_of(
            repository, "diff-tree", "--no-commit-id", "--no-renames", "--name-only", "-r", "-z", commit
        ).decode()
        changed = set(filter(None, names.split("\0")))
        proof, code = changed & test_files, sorted(changed & sources.keys() - test_files)
        if not proof or not code:
            continue
        patch = git_of(repository, *_DIFF, f"{commit}^", commit, "--", *code)
        if (undone := _undone(patch, {path: sources[path] for path in code})) is None:
            continue
        edit = tuple(one for path in code for one in edits.between(path, sources[path], undone[path]))
        tests = prepared.running(edit)
        for number, test in enumerate(prepared.order):
            if test in prepared.stable and test.partition("::")[0] in proof:
                tests |= 1 << number
        if tests and 0 < sum(one.end - one.start + len(one.lines) for one in edit) <= _LARGEST:
            yield Candidate(FIX, edit, tests, files=frozenset(proof))


def _undone(patch: bytes, files: Mapping[str, str]) -> dict[str, str] | None:
    """Return files without a patch; None if a part of it cannot be taken back, or what is left is not Python."""
    with tempfile.TemporaryDirectory() as directory:
        for path, text in files.items():
            Path(directory, path).parent.mkdir(parents=True, exist_ok=True)
            Path(directory, path).write_bytes(text.encode())
        patch_file = Path(directory, ".patch")
        patch_file.write_bytes(patch)
        try:
            git(Path(directory), "apply", "--reverse", str(patch_file))
            undone = {path: Path(directory, path).read_bytes().decode() for path in files}
            for text in undone.values():
                compile(text, "undone", "exec", dont_inherit=True)
        except (subprocess.CalledProcessError, OSError, ValueError, SyntaxError):
            return None
        return undone
