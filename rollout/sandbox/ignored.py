"""Changed files that a task's snapshot itself ignores, and that are therefore left out of a patch.

What a build leaves behind (`build/`, `node_modules/`, a virtual environment) is no part of a solution, and would make a
patch too large. The rules are those of the snapshot: the agent's edited `.gitignore` files, its `.git/info/exclude` and
its configuration do not count. Git reads the rules in a scratch work tree that holds the snapshot's `.gitignore` files
and nothing else. As always in git, a file that the commit has is not ignored.
"""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

from rollout.sandbox import PatchTooLarge, SandboxError
from rollout.sandbox.treediff import LINK, Origin, git_environment, make_repository

RULES = b".gitignore"
"""The name of files with ignore rules."""

_MOST_ASKED = 1_000_000  # questions to git, each some 10 microseconds
_GIT = ("git", "-c", f"core.excludesFile={os.devnull}")
_FIELDS = 4  # of git's answer: file, line, pattern, path


class IgnoredPaths:
    """These are the paths that are left out of a patch from `origin`; `in` asks about one.

    scratch: a directory for this class alone; the caller deletes it. To be used in a `with` statement. Raises
    PatchTooLarge if it is asked about too many paths, SandboxError if git fails, OSError if `origin` cannot be read.
    """

    def __init__(self, origin: Origin, scratch: Path) -> None:
        self._origin, self._tree, self._git_dir = origin, scratch / "tree", scratch / "git"
        self._rules = [
            path for path, (mode, _) in origin.files.items() if os.path.basename(path) == RULES and mode != LINK
        ]
        self._git: subprocess.Popen[bytes] | None = None
        self._asked = 0

    def __enter__(self) -> IgnoredPaths:
        return self

    def __exit__(self, *_: object) -> None:
        if self._git is not None:
            self._git.kill()
            self._git.communicate()

    def __contains__(self, path: object) -> bool:
        """Return whether this file is left out."""
        assert isinstance(path, bytes)
        if not self._rules or not self._is_named(path):
            return False
        return path not in self._origin.files or (self._committed is not None and path not in self._committed)

    def _is_named(self, path: bytes) -> bool:
        """Ask git whether the rules name a path, or a directory above it."""
        self._asked += 1
        if self._asked > _MOST_ASKED:
            raise PatchTooLarge(f"more than {_MOST_ASKED} changed files")
        if self._git is None:
            self._git = self._start()
        place = os.path.join(os.fsencode(self._tree), path)
        if not os.path.isdir(place):
            return self._ask(path)
        # The path was a directory with rules in it and is a file or link now: rules for directories must not match it.
        aside = os.fsencode(self._tree) + b"-aside"
        os.rename(place, aside)
        try:
            return self._ask(path)
        finally:
            os.rename(aside, place)

    def _ask(self, path: bytes) -> bool:
        assert self._git is not None
        assert self._git.stdin is not None and self._git.stdout is not None
        answer = b""
        try:
            self._git.stdin.write(b"./" + path + b"\0")  # ./ because a colon at the beginning has a meaning
            while answer.count(b"\0") < _FIELDS:
                read = self._git.stdout.read(1 << 16)
                if not read:
                    raise BrokenPipeError
                answer += read
        except BrokenPipeError as error:
            raise SandboxError("diff_failed", f"git check-ignore ended: {self._git.wait()}") from error
        pattern = answer.split(b"\0")[2]
        return bool(pattern) and not pattern.startswith(b"!")

    def _start(self) -> subprocess.Popen[bytes]:
        """Start a git that answers for one path after another."""
        make_repository(self._git_dir)
        self._tree.mkdir()
        for path in self._rules:
            place = os.path.join(os.fsencode(self._tree), path)
            os.makedirs(os.path.dirname(place), exist_ok=True)
            with open(place, "wb") as file:
                file.write(self._origin.read(path))
        return subprocess.Popen(
            [*_GIT, "check-ignore", "--no-index", "--stdin", "-z", "--verbose", "--non-matching"],
            env=self._environment(),
            cwd=self._tree,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )

    @functools.cached_property
    def _committed(self) -> frozenset[bytes] | None:
        """Return the files of the snapshot's commit; None if that is not known: then no snapshot file is ignored."""
        index = self._origin.index()
        if index is None:
            return None
        (self._git_dir / "index").write_bytes(index)
        argv, env = [*_GIT, "ls-files", "-z"], self._environment()
        done = subprocess.run(argv, env=env, cwd=self._tree, stdin=subprocess.DEVNULL, capture_output=True)
        return frozenset(done.stdout.split(b"\0")) if done.returncode == 0 else None

    def _environment(self) -> dict[str, str]:
        return {**git_environment(self._git_dir), "GIT_WORK_TREE": str(self._tree), "GIT_FLUSH": "1"}
