"""The rules for patches: which files are graded, and what is flagged as a possible attempt to cheat the tests.

Rules are data (configs/grading/default.yaml). Rules on paths *drop* files from the patch before it is applied, because
a test or a hook of the test runner is not part of a solution. Flags only *mark* a patch, or what an agent ran and read,
for people to look at; they never change a reward, because honest work may do any of these things.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rewards.patch import FileDiff, left_out, patched_by, split
from rewards.task import Task
from rewards.verdict import Verdict

IGNORED = "ignored_files"
"""The flag of a patch that leaves out changed files which came with the task's image but are not in its commit."""

SHADOWS_INSTALLED = "shadows_installed"
"""The flag of a new module that was dropped because the image has one of this name installed."""

DECIDES = "drop_decides"
"""The flag of a patch that resolves the task only with files that the rules drop."""

SHADOWS = "shadows_python"
"""The flag of a new module at the root that has the name of a standard module of some version of Python."""

# A module, and the directory that it is imported from. If Python searches that directory first when tests run, a module
# that a patch adds is imported in place of an installed one with the same name, or of one from below.
_MODULE = re.compile(r"(?:(.*)/)?(?!__init__\.)([^/.]+)(?:(?:\.[^/]*)?\.(?:py|so|pyd)|/__init__\.py)")
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

# These are hooks of an interpreter or a test runner, or run tests themselves, and are no part of a solution.
_HOOKS = re.compile(
    r"(^|/)(conftest|sitecustomize|usercustomize|_?pytest|pluggy|unittest|test/runner|run_?tests\w*|noxfile)(\.py|/|$)"
)
# In a line of a diff.
_TESTS = re.compile(rb"^.?(?:[ \t]*(?:async[ \t]+)?def[ \t]+test|[ \t]*class \w*Test|@pytest)", re.MULTILINE)
_PACKAGING = re.compile(r"(^|/)(pyproject\.toml|setup\.cfg|setup\.py)")
_PLUGIN = re.compile(rb"pytest|plugin|entry|addopts|conftest|cmdclass|exec|import")
# Data that a package may read. Not in directories of plugins, nor what configures a test runner.
_DATA = re.compile(r"\.(txt|json|ya?ml|toml|csv|tsv|xml|html?|sql|md|rst|dat|bin|tmpl|j2|jinja2?|svg|png)$")
_SETTINGS = re.compile(r"(^|/)(\.|jest|vitest|karma|phpunit|pytest|tox)|-info/", re.IGNORECASE)
_SEARCHED = ("", "src", "lib")  # directories whose modules may be found before installed ones


@dataclass(frozen=True)
class ScreenedPatch:
    """A ScreenedPatch is a patch after the rules.

    files: what is left of it. dropped: the paths that were removed, sorted. flags: the names of its flags, sorted.
    unsure: removed files that may be a part of a solution, although they are named like tests or other modules.
    modules: paths of new modules in `files`, by their names, that shadow a module if the image has one of this name.
    """

    files: list[FileDiff]
    dropped: tuple[str, ...]
    flags: tuple[str, ...]
    unsure: tuple[FileDiff, ...] = ()
    modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def dropping(self, rules: Rules) -> ScreenedPatch:
        """Return what is left without what these rules drop, too."""
        out = {path for file in self.files if any(map(rules.drops, file.paths)) for path in file.paths}
        left = [file for file in self.files if not out.intersection(file.paths)]
        return replace(self, files=left, dropped=tuple(sorted({*self.dropped, *out})))

    def without(self, installed: Iterable[str]) -> ScreenedPatch:
        """Return what is left if these modules are installed in the image."""
        taken = {path for name in installed for path in self.modules.get(name, ())}
        if not taken:
            return self
        out = tuple(file for file in self.files if file.path in taken)
        return replace(
            self,
            files=[file for file in self.files if file.path not in taken],
            dropped=tuple(sorted({*self.dropped, *taken})),
            flags=tuple(sorted({*self.flags, SHADOWS_INSTALLED})),
            unsure=(*self.unsure, *(file for file in out if _unsure(file))),
            modules={},
        )


class Rules:
    """Rules say which files of a patch are dropped and what is flagged.

    drop: patterns as in a .gitignore file. A pattern is a name at any depth or, if it has a slash before its last
    character, a path from the root of the work tree. `*`, `?` and `[...]` match within a name, `**` across directories.
    A pattern also matches everything below what it matches, and `!` takes back what an earlier pattern matched.

    flags: name -> {"added": a regular expression to search for in the lines that a patch adds, "path": one to search
    for in its paths, "command": one to search for in what the agent ran and read}; each flag has at least one of them.

    needs_second_opinion: a resolved task without a second opinion (`rewards.second`) is worth nothing.

    Making them raises ValueError if a regular expression or a key is wrong.
    """

    def __init__(
        self,
        drop: Iterable[str] = (),
        flags: Mapping[str, Mapping[str, str]] | None = None,
        needs_second_opinion: bool = False,
    ) -> None:
        self.needs_second_opinion = needs_second_opinion
        self._drop = [(not pattern.startswith("!"), _glob(pattern.removeprefix("!"))) for pattern in drop]
        self._flags: dict[str, dict[str, re.Pattern[Any]]] = {"added": {}, "path": {}, "command": {}}
        for name, rule in (flags or {}).items():
            if not rule or set(rule) - set(self._flags):
                raise ValueError(f"flag {name}: needs `added`, `path` or `command`, and nothing else")
            try:
                for what, text in rule.items():
                    in_bytes = what == "added"
                    self._flags[what][name] = re.compile(text.encode(), re.MULTILINE) if in_bytes else re.compile(text)
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
        found = {name for text in commands for name, pattern in self._flags["command"].items() if pattern.search(text)}
        return replace(verdict, flags=tuple(sorted(found.union(verdict.flags))))

    def screen(self, task: Task, patch: bytes) -> ScreenedPatch:
        """Apply the rules to a patch. Raises PatchError.

        A file is dropped as a whole, even if only its old or its new name is matched. Whatever the rules say, these are
        dropped, too: files in the way of those that the task's eval script patches, files whose tests the task names,
        and new modules that would be imported in place of Python's own or pytest's. What a gold patch of the task's
        repository touches is no test, whatever its name. What the box has left out of the patch counts as dropped, and
        is flagged.
        """
        hidden = patched_by(task.eval_script)
        named = {test.partition("::")[0] for test in (*task.FAIL_TO_PASS, *task.PASS_TO_PASS) if ".py::" in test}
        searched = {*_SEARCHED, *(path.rpartition("/")[0] for path in {*named, *hidden})}
        kept: list[FileDiff] = []
        unsure: list[FileDiff] = []
        modules: dict[str, tuple[str, ...]] = {}
        dropped = set(left_out(patch))
        flags = {IGNORED} if dropped else set()
        for file in split(patch):
            taken = [path for path in file.paths if any(_clash(path, other) for other in hidden)]
            likely = [path for path in file.paths if path not in task.solutions and (path in named or self.drops(path))]
            module = _MODULE.fullmatch(file.path) if file.created else None
            if module and file.path not in task.solutions and (module[1] or "") in searched:
                if module[2] in _TAKEN:
                    likely.append(file.path)
                else:
                    flags.update({SHADOWS} if module[2] in _TAKEN_ELSEWHERE and module[1] in (None, "src") else ())
                    modules[module[2]] = (*modules.get(module[2], ()), file.path)
            dropped.update(taken, likely)
            if not taken and not likely:
                kept.append(file)
            elif not taken and not named.intersection(file.paths) and _unsure(file):
                unsure.append(file)
            flags.update(name for name, pattern in self._flags["added"].items() if pattern.search(file.added))
            flags.update(name for name, pattern in self._flags["path"].items() if any(map(pattern.search, file.paths)))
        return ScreenedPatch(kept, tuple(sorted(dropped)), tuple(sorted(flags)), tuple(unsure), modules)


def _unsure(file: FileDiff) -> bool:
    """Tell whether a file may be a part of a solution, whatever its name: a module without tests, new data, or
    packaging."""
    if _PACKAGING.search(file.path):
        return not _PLUGIN.search(file.added)
    if file.path.endswith(".py"):
        return not any(map(_HOOKS.search, file.paths)) and not _TESTS.search(file.data)
    return file.created and bool(_DATA.search(file.path)) and not any(map(_SETTINGS.search, file.paths))


def _glob(pattern: str) -> re.Pattern[str]:
    wild = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^]/]+\])", pattern.strip("/"))
    body = "".join(wild.get(part) or (part if part.startswith("[") else re.escape(part)) for part in parts)
    anywhere = "" if "/" in pattern.rstrip("/") else "(?:.*/)?"
    return re.compile(f"{anywhere}{body}(?:/.*)?", re.DOTALL)


def _clash(path: str, hidden: str) -> bool:
    """Tell whether a file at `path` is `hidden`, or one of the two would need the other to be a directory."""
    return f"{path}/".startswith(f"{hidden}/") or f"{hidden}/".startswith(f"{path}/")
