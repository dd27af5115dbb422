"""A made task: its snapshot with the bug and without the tests that show it, and the script that grades it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import libcst as cst

from rl.data.evalscript import restored, script
from rl.data.make import edits
from rl.data.make.edits import Edit
from rl.data.make.environment import VENV
from rl.data.make.repositories import git
from rl.data.make.runs import PYTEST
from rl.data.make.sources import Package
from rollout import files

# swebench reads a test's name up to the first blank, and parameters may contain blanks.
_JOIN = r":a; s/^([A-Z]+ [^ []*\[[^] ]*) /\1_/; ta"
_BLANK = re.compile(r"^([^ []*\[[^] ]*) ")


class CannotHideError(ValueError):
    """A task cannot be written, because its tests cannot be hidden and brought back."""


@dataclass(frozen=True)
class HiddenTests:
    """Hidden tests are files as the agent gets them, and as the eval script makes them.

    kept: texts by path, of files that lose some of their tests. whole: the files with all tests, by path.
    """

    kept: Mapping[str, str]
    whole: Mapping[str, str]


def hide(tree: Path, tests: Iterable[str]) -> HiddenTests:
    """Take tests out of their files; a file in which one cannot be found is left out as a whole.

    tests: pytest's names. Raises CannotHideError.
    """
    by_file: dict[str, set[tuple[str, ...]]] = {}
    for test in tests:
        path, *names = test.partition("[")[0].split("::")
        by_file.setdefault(path, set()).add(tuple(names))
    kept, whole = {}, {}
    for path, names in by_file.items():
        try:
            whole[path] = (tree / path).read_bytes().decode()
        except (OSError, UnicodeDecodeError) as error:
            raise CannotHideError(f"{path}: {error}") from error
        if "\r" in whole[path]:
            raise CannotHideError(f"{path}: has line ends that no eval script can write")
        if (left := without(whole[path], names)) is not None:
            kept[path] = left
    return HiddenTests(kept, whole)


def without(source: str, names: Collection[tuple[str, ...]]) -> str | None:
    """Return a module without these functions, named with their classes; None if one of them is not in it."""
    try:
        taking = _FunctionRemover(names)
        module = cst.parse_module(source).visit(taking)
    except (cst.ParserSyntaxError, RecursionError):
        return None
    return module.code if taking.taken == set(names) else None


class _FunctionRemover(cst.CSTTransformer):
    """This takes functions out of a module, and classes that are left without any statement."""

    def __init__(self, names: Collection[tuple[str, ...]]) -> None:
        super().__init__()
        self._names = set(names)
        self._around: list[str] = []
        self.taken: set[tuple[str, ...]] = set()

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self._around.append(node.name.value)

    def leave_ClassDef(self, original_node: cst.ClassDef, updated_node: cst.ClassDef) -> Any:
        self._around.pop()
        return updated_node if updated_node.body.body else cst.RemoveFromParent()

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self._around.append(node.name.value)

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> Any:
        name = tuple(self._around)
        self._around.pop()
        if name not in self._names:
            return updated_node
        self.taken.add(name)
        return cst.RemoveFromParent()


def eval_script(hidden: HiddenTests, test_files: Collection[str]) -> str:
    """Return the script that brings the hidden tests back and runs the tests of these files."""
    made = sorted(set(hidden.whole) - set(hidden.kept))
    before = restored(sorted(hidden.kept), made, edits.patch(hidden.kept, hidden.whole), '"$PWD"')
    run = f"{PYTEST} -rA --tb=short --show-capture=no --color=no {shlex.join(sorted(test_files))}"
    return script(before, [f"{run} | sed -uE '{_JOIN}'"])


def logged(tests: Iterable[str]) -> dict[str, str]:
    """Return the names that tests have in the log of an eval script; without those that cannot be told from others."""
    names = {}
    for test in tests:
        names[test] = test
        while (joined := _BLANK.sub(r"\1_", names[test])) != names[test]:
            names[test] = joined
    counts = Counter(names.values())
    return {test: name for test, name in names.items() if counts[name] == 1 and len(name.split()) == 1}


def task_id(package: Package, edit: Edit) -> str:
    """Return a task's name, which tells the package and nothing of the bug."""
    text = json.dumps([package.label, package.sha256, edits.to_json(edit)])
    return f"pypi__{package.name}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


def write_snapshot(
    package: Package, venv: Path, broken: Mapping[str, str], hidden: HiddenTests, directory: Path
) -> str:
    """Write the repository that an agent gets, in one step, and return its only commit.

    broken: the files with the bug. Files that stay as they are share their disk space with the package's. Raises
    OSError, subprocess.CalledProcessError.
    """
    building = directory.with_name(f".{directory.name}.new")
    shutil.rmtree(building, ignore_errors=True)
    shutil.copytree(package.tree, building, symlinks=True, copy_function=_link)
    for path in hidden.whole:
        (building / path).unlink()
    for path, text in {**hidden.kept, **broken}.items():
        files.write(building / path, text)  # replaces the link
    shutil.rmtree(building / VENV, ignore_errors=True)
    git(building, "init", "--quiet", "--template=", "--initial-branch=main")
    git(building, "add", "--all", "--force")
    git(building, "commit", "--quiet", "--no-verify", "--no-gpg-sign", "--message=Snapshot")
    shutil.copytree(venv, building / VENV, symlinks=True, copy_function=_link)
    shutil.rmtree(directory, ignore_errors=True)
    building.rename(directory)
    return (directory / ".git/refs/heads/main").read_text().strip()


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # another disk, or too many links
        shutil.copy2(source, target, follow_symlinks=False)
    return target
