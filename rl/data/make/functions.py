"""Small functions taken out of Python packages, with what calls of them return in the packages' own tests.

A function comes with what it needs of its module, and only if that is little: other functions, constants, the standard
library. Docstrings, comments and annotations are left out, and the rest is written in one way (``ast.unparse``). All
code runs in bubblewrap's boxes.
"""

from __future__ import annotations

import ast
import builtins
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rl.data.make.prepare import SUITE_S, PreparedPackage
from rl.data.make.runs import Bench, NoResultError

_MOST_LINES, _LONGEST_LINE, _LONGEST = 40, 110, 1600
_FEWEST_CALLS = 3
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_EACH_S = 0.3  # of one call

Cases = tuple[tuple[str, str], ...]
"""Calls, and what they return; both are source, and the results are plain values."""


@dataclass(frozen=True)
class Function:
    """A function is a module of its own. ``package``: name and version. ``path``: where it stands there."""

    package: str
    licence: str
    path: str
    name: str
    source: str
    cases: Cases


async def harvest(prepared: PreparedPackage, bench: Bench) -> list[Function]:
    """Return a package's functions that can stand alone, in the order of the package. Raises SandboxError."""
    package = prepared.package
    trees = dict(_modules(prepared))
    names = {path: [one.name for one in _plain_functions(tree)] for path, tree in trees.items()}
    watched = {path: found for path, found in names.items() if found}
    try:
        run = await bench.tests({}, timeout_s=SUITE_S, calls=watched)
    except NoResultError:
        return []
    calls: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for path, name, call, said in run.calls:
        calls.setdefault((path, name), []).append((call, said))
    found = []
    for path, tree in trees.items():
        for name in names[path]:
            cases = tuple(calls.get((path, name), ()))
            source = alone(tree, name) if len(cases) >= _FEWEST_CALLS else None
            if source is not None:
                found.append(Function(package.label, package.licence, path, name, source, cases))
    results = await observed(bench, [([one.source], [call for call, _ in one.cases]) for one in found])
    return [one for function, said in zip(found, results, strict=True) if (one := _kept(function, said[0]))]


def _kept(function: Function, said: Sequence[str] | None) -> Function | None:
    """Return the function with the cases that it answers alone as it does in its package."""
    if said is None:
        return None
    cases = tuple(case for case, result in zip(function.cases, said, strict=True) if case[1] == result)
    return replace(function, cases=cases) if len(cases) >= _FEWEST_CALLS else None


def _modules(prepared: PreparedPackage) -> Iterator[tuple[str, ast.Module]]:
    for path in prepared.package.sources():
        try:
            yield path, ast.parse((prepared.package.tree / path).read_bytes())
        except (SyntaxError, ValueError):
            continue


def _plain_functions(tree: ast.Module) -> list[ast.FunctionDef]:
    return [one for one in tree.body if isinstance(one, ast.FunctionDef) and not one.decorator_list]


def alone(tree: ast.Module, name: str) -> str | None:
    """Return the source of a module that has one function and what it needs; None if that is much, or missing."""
    binding: dict[str, list[ast.stmt]] = {}
    for statement in tree.body:
        for bound in _bound(statement):
            binding.setdefault(bound, []).append(statement)
    needed: dict[ast.stmt, set[str]] = {}
    wanted = [name]
    while wanted:
        one = wanted.pop()
        if one not in binding:
            if one == name:
                return None
            continue  # a builtin or a local name
        statement = binding[one][0]
        if len(binding[one]) > 1 or not _movable(statement):
            return None
        if one not in needed.setdefault(statement, set()):
            needed[statement].add(one)
            wanted += _read(_bare(statement))
    body = [_only(_bare(statement), needed[statement]) for statement in tree.body if statement in needed]
    text = ast.unparse(ast.fix_missing_locations(ast.Module(body, []))) + "\n"
    lines = text.split("\n")
    small = len(lines) <= _MOST_LINES and max(map(len, lines)) <= _LONGEST_LINE and len(text) <= _LONGEST
    return text if small and text.isascii() else None


def _bound(statement: ast.stmt) -> set[str]:
    """Return the names to which a statement of a module gives a value."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {one.asname or one.name.partition(".")[0] for one in statement.names}
    if isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
        return {statement.name}
    return {one.id for one in ast.walk(statement) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}


def _movable(statement: ast.stmt) -> bool:
    """Tell whether a statement can stand in another module."""
    if isinstance(statement, ast.ImportFrom):
        return not statement.level and (statement.module or "").partition(".")[0] in sys.stdlib_module_names
    if isinstance(statement, ast.Import):
        return all(one.name.partition(".")[0] in sys.stdlib_module_names for one in statement.names)
    if isinstance(statement, ast.FunctionDef):
        return not statement.decorator_list
    return isinstance(statement, ast.Assign | ast.AnnAssign)


def _read(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return []
    return sorted({one.id for one in ast.walk(statement) if isinstance(one, ast.Name)} - set(dir(builtins)))


def _only(statement: ast.stmt, names: set[str]) -> ast.stmt:
    """Return an import of nothing but these names; other statements as they are."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        statement.names = [one for one in statement.names if (one.asname or one.name.partition(".")[0]) in names]
    return statement


def _bare(statement: ast.stmt) -> ast.stmt:
    """Return a copy of a statement without docstrings and annotations."""
    return _AnnotationRemover().visit(ast.parse(ast.unparse(statement))).body[0]


class _AnnotationRemover(ast.NodeTransformer):
    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef, ast.Module)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        if isinstance(node, _FUNCTIONS):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        return ast.Pass() if node.value is None else ast.Assign([node.target], node.value, lineno=0)


# A call that never ends is cut off; a result that is no plain value, or an error, is told by its type.
_PROGRAM = """
import json, signal, sys
def late(*_): raise TimeoutError
signal.signal(signal.SIGALRM, late)
def answers(source, calls):
    names, said = {{}}, []
    for call in [None, *calls]:
        try:
            signal.setitimer(signal.ITIMER_REAL, {each_s})
            if call is None: exec(compile(source, "module", "exec"), names)
            else: said.append(repr(eval(call, names))[:400])
        except TimeoutError: return None
        except Exception as error:
            if call is None: return None
            said.append("raises " + type(error).__name__)
        finally: signal.setitimer(signal.ITIMER_REAL, 0)
    return said
sources, calls = json.loads({given!r})
found = json.dumps([answers(source, calls) for source in sources])
print()
print(found)
"""


async def observed(bench: Bench, pieces: Sequence[tuple[Sequence[str], Sequence[str]]]) -> list[list[list[str] | None]]:
    """Run calls on variants of modules, in one box.

    pieces: (sources, calls). Returns, for each piece and source, what each call returns, as source; None if the module
    cannot be imported or a call does not end. Raises SandboxError.
    """
    programs = [_PROGRAM.format(each_s=_EACH_S, given=json.dumps([list(s), list(c)])) for s, c in pieces]
    said = await bench.scripts({}, programs, timeout_s=30)
    return [_checked(text, len(s), len(c)) for text, (s, c) in zip(said, pieces, strict=True)]


def _checked(text: str, sources: int, calls: int) -> list[list[str] | None]:
    """Return what a box has printed, which is hostile; None for each source if it is not what was asked for."""
    nothing: list[list[str] | None] = [None] * sources
    try:
        found: Any = json.loads(text.strip().rpartition("\n")[2])
    except (ValueError, RecursionError):
        return nothing
    if not isinstance(found, list) or len(found) != sources:
        return nothing
    return [one if _is_texts(one, calls) else None for one in found]


def _is_texts(one: Any, count: int) -> bool:
    return isinstance(one, list) and len(one) == count and all(isinstance(text, str) for text in one)
