"""This module decides what of an agent's patch is graded, and flags what looks like an attempt to cheat the tests.

Rules are data (configs/grading/default.yaml). Rules on paths *drop* files from the patch before it is applied, because
a test or a hook of the test runner is not part of a solution. Flags only *mark* a patch, or what an agent ran and read,
for people to look at; they never change a reward, because honest work may do any of these things.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from rewards.patch import FileDiff, PatchError, left_out, split
from rewards.task import Task
from rewards.verdict import Verdict

IGNORED = "ignored_files"
"""The flag of a patch that leaves out changed files which came with the task's image but are not in its commit."""

SHADOWS = "shadows_python"
"""The flag of a new module at the root that has the name of a standard module of some version of Python."""

# The path of a module in a directory that Python searches first when tests run. If a patch adds one with a name from
# below, it is imported in place of the module that has this name.
_MODULE = re.compile(r"(?:src/)?([^/.]+)(?:(?:\.[^/]*)?\.(?:py|so|pyd)|/__init__\.py)")
# Besides Python's own modules: what pytest imports, in any of its versions, and what that imports in turn.
_TAKEN = sys.stdlib_module_names | {
    "pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "exceptiongroup", "tomli", "toml", "attr", "attrs",
    "pygments", "colorama", "typing_extensions", "importlib_metadata", "zipp", "atomicwrites", "more_itertools", "six",
    "wcwidth", "pathlib2", "funcsigs", "xdist", "execnet", "nose",
}  # fmt: skip
# Standard modules of other versions of Python, which an image may have. Honest modules have these names, too, so a
# patch that adds one is only flagged.
_TAKEN_ELSEWHERE = {
    "parser", "symbol", "formatter", "binhex", "macpath", "dummy_threading", "_dummy_thread", "_bootlocale",
    "distutils", "imp", "asyncore", "asynchat", "smtpd", "annotationlib", "compression", "profiling", "_colorize",
    "_pyrepl", "_pylong", "_opcode_metadata", "_sysconfig", "_py_warnings",
}  # fmt: skip

# Finds the paths in a patch that `split` cannot read to its end.
_NAMED = re.compile(r"^--- (?:a/.*|/dev/null)\n\+\+\+ b/([^\t\n]+)", re.MULTILINE)


@dataclass(frozen=True)
class Screened:
    """A Screened is a patch after the rules.

    files: what is left of it. dropped: the paths that were removed, sorted. flags: the names of its flags, sorted.
    """

    files: list[FileDiff]
    dropped: tuple[str, ...]
    flags: tuple[str, ...]


class Rules:
    """Rules say which files of a patch are dropped and what is flagged.

    drop: patterns as in a .gitignore file. A pattern is a name at any depth or, if it has a slash before its last
    character, a path from the root of the work tree. `*`, `?` and `[...]` match within a name, `**` across directories.
    A pattern also matches everything below what it matches, and `!` takes back what an earlier pattern matched.

    flags: name -> {"added": a regular expression to search for in the lines that a patch adds, "path": one to search
    for in its paths, "command": one to search for in what the agent ran and read}; each flag has at least one of them.

    Making them raises ValueError if a regular expression or a key is wrong.
    """

    def __init__(self, drop: Iterable[str] = (), flags: Mapping[str, Mapping[str, str]] | None = None) -> None:
        self._drop = [(not pattern.startswith("!"), _glob(pattern.removeprefix("!"))) for pattern in drop]
        self._added: dict[str, re.Pattern[bytes]] = {}
        self._path: dict[str, re.Pattern[str]] = {}
        self._command: dict[str, re.Pattern[str]] = {}
        for name, rule in (flags or {}).items():
            if not rule or set(rule) - {"added", "path", "command"}:
                raise ValueError(f"flag {name}: needs `added`, `path` or `command`, and nothing else")
            try:
                if "added" in rule:
                    self._added[name] = re.compile(rule["added"].encode(), re.MULTILINE)
                if "path" in rule:
                    self._path[name] = re.compile(rule["path"])
                if "command" in rule:
                    self._command[name] = re.compile(rule["command"])
            except re.error as error:
                raise ValueError(f"flag {name}: {error}") from error

    def drops(self, path: str) -> bool:
        """Tell whether the patterns drop a path."""
        dropped = False
        for drop, pattern in self._drop:
            if drop is not dropped and pattern.fullmatch(path):
                dropped = drop
        return dropped

    def flagged(self, verdict: Verdict, commands: Iterable[str]) -> Verdict:
        """Return the verdict with the flags of what the agent ran and read, too."""
        found = {name for text in commands for name, pattern in self._command.items() if pattern.search(text)}
        return replace(verdict, flags=tuple(sorted(found.union(verdict.flags))))

    def screen(self, task: Task, patch: bytes) -> Screened:
        """Apply the rules to a patch. Raises PatchError.

        A file is dropped as a whole, even if only its old or its new name is matched. Whatever the rules say, these are
        dropped, too: files in the way of those that the task's eval script patches, and new modules that would be
        imported in place of Python's own or pytest's. What the box has left out of the patch counts as dropped, and is
        flagged.
        """
        hidden = _patched_by(task.eval_script)
        kept: list[FileDiff] = []
        dropped = set(left_out(patch))
        flags = {IGNORED} if dropped else set()
        for file in split(patch):
            taken = [path for path in file.paths if self.drops(path) or any(_clash(path, other) for other in hidden)]
            if file.created and (module := _MODULE.fullmatch(file.path)):
                if module[1] in _TAKEN:
                    taken.append(file.path)
                elif module[1] in _TAKEN_ELSEWHERE:
                    flags.add(SHADOWS)
            dropped.update(taken)
            if not taken:
                kept.append(file)
            flags.update(name for name, pattern in self._added.items() if pattern.search(file.added))
            flags.update(name for name, pattern in self._path.items() if any(map(pattern.search, file.paths)))
        return Screened(kept, tuple(sorted(dropped)), tuple(sorted(flags)))


def _patched_by(script: str) -> set[str]:
    """Return the paths in an eval script's own patches, which SWE-bench's scripts have as here-documents."""
    try:
        return {path for file in split(script.encode()) for path in file.paths}
    except PatchError:  # there is none, or none that can be read to its end
        return set(_NAMED.findall(script))


def _glob(pattern: str) -> re.Pattern[str]:
    wild = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^]/]+\])", pattern.strip("/"))
    body = "".join(wild.get(part) or (part if part.startswith("[") else re.escape(part)) for part in parts)
    anywhere = "" if "/" in pattern.rstrip("/") else "(?:.*/)?"
    return re.compile(f"{anywhere}{body}(?:/.*)?", re.DOTALL)


def _clash(path: str, hidden: str) -> bool:
    """Tell whether a file at `path` is `hidden`, or one of the two would need the other to be a directory."""
    return f"{path}/".startswith(f"{hidden}/") or f"{hidden}/".startswith(f"{path}/")
