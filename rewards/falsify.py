"""Rewrite test files: as they are, or so that named tests must fail, whatever they test.

Both runs of a second opinion rewrite the same files in the same order, so that nothing but a value tells them apart:
`rewards.mutation` says which, and what it becomes. The program runs in a box, before the tests, with the Python that is
found there (3.8 or later). `rewards.second` makes one text of it and the modules that it imports.
"""

from __future__ import annotations

import ast
import os
import random
import re
from collections.abc import Iterable, Iterator
from typing import Any

from rewards.literals import Pool
from rewards.mutation import FUNCTIONS, Module, wrong

_SAMPLE = 20  # functions of PASS_TO_PASS that are made wrong, at most
_OTHERS = 0.25  # in how many gradings some of PASS_TO_PASS are made wrong
_ELSEWHERE = {".git", "node_modules", "site-packages", "__pycache__", ".venv", "venv", ".tox"}
_MOST_FILES = 400


def main(word: str, change: int, sure: bool, seed: str, tests: list, others: list, files: list) -> None:
    """Rewrite the files of all tests; if `change` is 1, so that some are wrong. 0 does, prints and takes the same.

    Code that knows of one test whether it is wrong must not know it of all. So some of FAIL_TO_PASS are left as they
    are, if there are several. Tests of PASS_TO_PASS pass without a solution and may be known to the agent, so in most
    gradings none of them is made wrong, and in the others half. Behind the word is printed which tests are wrong,
    behind the word and a minus which may be in part, and behind the word and an equals sign which of FAIL_TO_PASS
    cannot be made wrong.

    sure: change only what is certain to make a test fail. seed: what is drawn follows from it. tests, others: the
    names of FAIL_TO_PASS and PASS_TO_PASS. files: those of the hidden patch and of the test command, for tests whose
    names have no file.
    """
    draw = random.Random(seed)
    places = _Places(files)
    first = {cut(name) for name in tests}
    wanted: dict = {}
    for name in sorted(first.union(map(cut, others))):
        for path, function in places.of(name):
            wanted.setdefault(path, []).append((name, function))
    other = sorted({name for some in wanted.values() for name, _ in some} - first)
    most = min((len(other) + 1) // 2, _SAMPLE)
    chosen = set(draw.sample(other, most if draw.random() < _OTHERS else 0))
    changes: dict = {}
    ends: dict = {}
    for path in sorted(wanted)[:_MOST_FILES]:
        named = [(name, function) for name, function in wanted[path] if name in first or name in chosen]
        changes[path], done = edits(places.sources[path], named, sure, draw)
        for name, _ in named:
            ends.setdefault(name, []).append(name in done)
    able = {name for name in ends if all(ends[name])}
    can = sorted(able & first)
    if can:
        chosen.update(draw.sample(can, draw.randint(1, max(1, len(can) - 1))))
    touched: set = set()
    new: dict = {}
    for path, found in changes.items():
        at = {_place(function) for name, function in wanted[path] if name in chosen}
        at = {place for place in at if found.get(place)}
        touched.update(name for name, function in wanted[path] if _place(function) in at)
        new[path] = edited(places.sources[path], [edit for place in at for edit in found[place]])
    for path, text in new.items():  # one after the other, so that their times tell nothing
        try:
            with open(path, "wb") as file:
                file.write(text if change else places.sources[path])
        except OSError:
            able.difference_update(name for name, _ in wanted[path])
    for name in sorted(able & chosen):
        print(word, name)
    for name in sorted(touched - (able & chosen)):
        print(word + "-", name)
    for name in sorted(first.difference(can)):
        print(word + "=", name)


def cut(test: str) -> str:
    """Return a test's name without its parameters."""
    return test.partition("[")[0] if "::" in test else test


def edits(source: bytes, named: list, sure: bool, draw: random.Random) -> tuple:
    """Return what makes the functions of a module wrong, by their places, and the names all of whose functions it does.

    named: pairs of a name and a node of the module's tree. The source is UTF-8 with line feeds.
    """
    tree = ast.parse(source.decode())
    module = Module(source, tree, Pool(tree, draw), sure)
    done: dict = {}
    found: dict = {}
    for name, function in named:
        place = _place(function)
        if place not in found:
            found[place] = wrong(function, module)[0]
        done.setdefault(name, []).append(bool(found[place]))
    try:
        compile(edited(source, [edit for some in found.values() for edit in some]), "test", "exec")
    except (SyntaxError, ValueError):
        return {}, set()
    return found, {name for name, all_ in done.items() if all(all_)}


def edited(source: bytes, found: list) -> bytes:
    """Return a source with these (start, end, text) exchanged."""
    for start, end, text in sorted(found, reverse=True):
        source = source[:start] + text.encode() + source[end:]
    return source


def _place(function: Any) -> tuple:
    return function.lineno, function.col_offset


class _Places:
    """This finds the functions that tests' names mean. sources: the files that were read."""

    def __init__(self, files: list) -> None:
        self._files = [path for path in files if path.endswith(".py")]
        self.sources: dict = {}
        self._found: dict = {}
        self._walked: list = []

    def of(self, test: str) -> Iterator:
        """Yield (path, node) for each function that a name means; nothing for names of other runners."""
        path, *names = test.split("::")
        inside = re.match(r"(\w+) \(([\w.]+)\)", test)
        if names:
            paths, names = [path], names
        elif inside:
            words = inside[2].split(".")
            words = words[:-1] if words[-1] == inside[1] else words
            paths, names = self._module(words[:-1]), [words[-1], inside[1]]
        elif re.match(r"test\w*$", test):  # sympy's
            paths, names = self._files, [test]
        else:  # unittest prints a docstring's first line in place of a name
            for one in self._files:
                for (_, name), nodes in self._functions(one).items():
                    for node in nodes:
                        text = ast.get_docstring(node) or ""
                        if name.startswith("test") and text and text.split("\n")[0].strip() == test.strip():
                            yield one, node
            return
        for one in paths:
            functions = self._functions(one)
            wanted = names[-2] if len(names) > 1 else ""
            for owner in self._owners(one, wanted):
                if (owner, names[-1]) in functions:
                    for node in functions[owner, names[-1]]:
                        yield one, node
                    break

    def _owners(self, path: str, name: str) -> Iterator:
        """Yield a class and its bases that are in the same file; "" is the module."""
        left, seen = [name], set()
        while left:
            one = left.pop(0)
            if one not in seen:
                seen.add(one)
                yield one
                left += self._found[path][1].get(one, []) if path in self._found else []

    def _functions(self, path: str) -> dict:
        """Return the functions of a file by class ("" for none) and name."""
        if path in self._found:
            return self._found[path][0]
        functions: dict = {}
        bases: dict = {}
        self._found[path] = functions, bases
        try:
            with open(path, "rb") as file:
                source = file.read()
            if b"\r" in source:
                return functions
            tree = ast.parse(source.decode())
        except (OSError, ValueError, SyntaxError, RecursionError):
            return functions
        self.sources[path] = source
        for owner, body in _bodies(tree, "", bases):
            for node in body:
                if isinstance(node, FUNCTIONS):
                    functions.setdefault((owner, node.name), []).append(node)
        return functions

    def _module(self, words: list) -> list:
        """Return the files that a module's name may mean, of those that are in the tree.

        A patch may add a module that is only named like a test's. So the files that it cannot change come first, and
        where none of them has the name, all that have it count.
        """
        tail = "/".join(words)
        ends = (f"{tail}.py", f"{tail}/__init__.py")
        behind = tuple("/" + end for end in ends)
        known = [path for path in self._files if f"/{path}".endswith(behind) and os.path.isfile(path)]
        usual = [root + end for root in ("", "tests/", "src/", "test/", "lib/") for end in ends]
        found = known or [path for path in usual if os.path.isfile(path)]
        if found:
            return found
        if not self._walked:
            self._walked = list(_walk())
        found = [path for path in self._walked if path.endswith(behind)]
        return found if len(found) == 1 else []


def _bodies(node: Any, owner: str, bases: dict) -> Iterator:
    """Yield the statements of a module and of its classes, also those under `if` and `try`, each with its class."""
    body = [*getattr(node, "body", []), *getattr(node, "orelse", [])]
    yield owner, body
    for one in body:
        if isinstance(one, ast.ClassDef):
            bases[one.name] = [base.id for base in one.bases if isinstance(base, ast.Name)]
            yield from _bodies(one, one.name, bases)
        elif isinstance(one, (ast.If, ast.Try)):
            yield from _bodies(one, owner, bases)


def _walk() -> Iterable:
    for at, inner, names in os.walk("."):
        inner[:] = [name for name in inner if name not in _ELSEWHERE]
        yield from (os.path.join(at, name)[2:] for name in names if name.endswith(".py"))
