"""This module finds the smallest program that shows a failure: the call that a failing test makes, and what it needs.

The program is cut out of the test's source: the expression that failed, the statements before it that its names need,
imports. Variables that were plain values are written as such, so that nothing of the test's parameters or fixtures is
needed. `rl.make.statement` runs it on both trees and uses it only if they answer differently.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rl.make.runs import Failure

_MOST_LINES = 25
_LONGEST = 1500  # characters
_MOST_SAID = 600
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_RAISING = ("raises", "assertRaises", "assertRaisesRegex")
_EQUAL = ("assertEqual", "assertEquals", "assertIs", "assertListEqual", "assertDictEqual", "assertTupleEqual")
_EQUAL += ("assertSequenceEqual", "assertSetEqual", "assertMultiLineEqual", "assertNotEqual", "assertAlmostEqual")
_TRUE = ("assertTrue", "assertFalse", "assertIsNone", "assertIsNotNone")


@dataclass(frozen=True)
class Snippet:
    """A snippet is a short program. before: its statements. expression: what is asked for at its end."""

    before: str
    expression: str

    @property
    def text(self) -> str:
        """Return the program as people write it."""
        return f"{self.before}\n{self.expression}".strip()

    def program(self) -> str:
        """Return the program whose last line says what the expression gives: ``returns VALUE`` or ``raises ERROR``."""
        return (
            "names = {'__name__': 'example'}\n"
            f"try:\n    exec({self.before!r}, names)\n    found = eval({self.expression!r}, names)\n"
            f"    said = 'returns ' + ascii(found)[:{_MOST_SAID}]\n"
            "except Exception as error:\n    said = f'{type(error).__name__}: {error}'\n"
            f"    said = 'raises ' + ascii(said)[1:-1][:{_MOST_SAID}]\n"
            "print()\nprint(said)\n"
        )


class _CannotError(Exception):
    """A name of the test stands for something that a program outside of it cannot have."""


def snippet(source: str, failure: Failure) -> Snippet | None:
    """Return the smallest program that shows a failure, None if there is none. source: of the test's file."""
    path = failure.test.partition("::")[0]
    lines = [line for file, line, _ in failure.frames if file == path]
    try:
        module = ast.parse(source)
        function = _function(module, failure.test)
        if function is None or not lines:
            return None
        for line in lines:  # the test's own first, then helpers', whose names the test does not define
            if (function.lineno <= line <= (function.end_lineno or 0)) and (asked := _asked(function, line)):
                found = _Slice(module, function, failure.values, asked[1]).program(asked[0])
                return found if len(found.text) <= _LONGEST and found.text.count("\n") < _MOST_LINES else None
    except (_CannotError, SyntaxError, ValueError, RecursionError):
        return None
    return None


def _function(module: ast.Module, test: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """Return the function of a test, by pytest's name."""
    body: list[ast.stmt] = module.body
    found: ast.stmt | None = None
    for name in test.partition("[")[0].split("::")[1:]:
        found = next((one for one in body if isinstance(one, (*_FUNCTIONS, ast.ClassDef)) and one.name == name), None)
        if found is None:
            return None
        body = found.body
    return found if isinstance(found, ast.FunctionDef) else None


def _asked(function: ast.FunctionDef | ast.AsyncFunctionDef, line: int) -> tuple[ast.expr, ast.stmt] | None:
    """Return the expression that failed in a line, and the function's own statement that it is in."""
    for outer in function.body:
        if outer.lineno <= line <= (outer.end_lineno or 0):
            statement: ast.stmt = outer
            while inner := [one for one in _inside(statement) if one.lineno <= line <= (one.end_lineno or 0)]:
                if _is_raising(statement) and statement.lineno == line:
                    break
                statement = inner[0]
            if _is_raising(statement):
                inner = list(_inside(statement))
                statement = inner[-1] if inner else statement
            expression = _expression(statement)
            return (expression, outer) if expression is not None else None
    return None


def _inside(statement: ast.stmt) -> Iterator[ast.stmt]:
    for name in ("body", "orelse", "finalbody"):
        yield from getattr(statement, name, ())
    for handler in getattr(statement, "handlers", ()):
        yield from handler.body


def _is_raising(statement: ast.stmt) -> bool:
    """Tell whether a statement is a `with` that expects an error."""
    return isinstance(statement, ast.With) and any(
        isinstance(item.context_expr, ast.Call) and _last(item.context_expr.func) in _RAISING
        for item in statement.items
    )


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _expression(statement: ast.stmt) -> ast.expr | None:
    """Return what a statement asks the package for."""
    if isinstance(statement, ast.Assert):
        return _side(statement.test)
    if isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Return | ast.Expr):
        value = statement.value
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            name = value.func.attr
            if name in _RAISING and len(value.args) >= 2:
                return ast.Call(value.args[1], value.args[2:], value.keywords)
            if name in _EQUAL and len(value.args) >= 2:
                return _telling(value.args[:2])
            if name in _TRUE and value.args:
                return _side(value.args[0])
            if name.startswith("assert"):
                return None
        return value
    if isinstance(statement, ast.For):
        return statement.iter
    return None


def _side(test: ast.expr) -> ast.expr:
    """Return the part of a condition whose value tells more than that it is false."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _side(test.operand)
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq | ast.Is | ast.NotEq):
        return _telling([test.left, test.comparators[0]])
    return test


def _telling(sides: list[ast.expr]) -> ast.expr:
    """Return the side with a call, else the first that is no plain value."""
    for kind in (ast.Call, (ast.Attribute, ast.Subscript, ast.BinOp, ast.Compare, ast.Name)):
        for side in sides:
            if any(isinstance(node, kind) for node in ast.walk(side)):
                return side
    return sides[0]


class _Slice:
    """A slice is the part of a test that an expression needs."""

    def __init__(
        self,
        module: ast.Module,
        function: ast.FunctionDef | ast.AsyncFunctionDef,
        values: Mapping[str, str],
        until: ast.stmt,
    ) -> None:
        self._values = values
        self._before = [one for one in function.body if (one.end_lineno or 0) < until.lineno]
        self._module = [one for one in module.body if one is not function]
        self._parameters = {one.arg for one in [*function.args.args, *function.args.kwonlyargs]}
        # By where they stand: statements of the module, plain values, statements of the test.
        self._statements: dict[tuple[int, int, int], ast.stmt | str] = {}
        self._known = set(dir(builtins)) - self._parameters - set(values)

    def program(self, expression: ast.expr) -> Snippet:
        """Return the program for an expression. Raises _CannotError."""
        self._need(expression)
        before = [self._written(one) for _, one in sorted(self._statements.items(), key=lambda item: item[0])]
        return Snippet("\n".join(before), ast.unparse(ast.fix_missing_locations(expression)))

    def _need(self, node: ast.AST) -> None:
        """Find the names that a statement or an expression reads and does not bind itself. Raises _CannotError."""
        bound = {one.arg for one in ast.walk(node) if isinstance(one, ast.arg)}
        bound |= {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Load)}
        names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)} - bound
        for name in sorted(names - self._known):
            self._known.add(name)
            self._find(name)

    def _find(self, name: str) -> None:
        """Add the statements that give a name its value. Raises _CannotError."""
        mentions = [one for one in self._before if name in _names(one)]
        bound = any(name in _binds(one) for one in mentions)
        if name in self._values and (not bound or name in self._parameters):
            self._statements[1, len(self._statements), 0] = f"{name} = {self._values[name]}"
        elif bound:
            for one in mentions:
                self._take(one, 2)
        elif given := [one for one in self._module if name in _binds(one)]:
            self._take(given[0], 0)
        else:
            raise _CannotError(name)

    def _take(self, statement: ast.stmt, level: int) -> None:
        key = level, statement.lineno, statement.col_offset
        if isinstance(statement, ast.Assert) or key in self._statements:
            return
        if isinstance(statement, ast.ImportFrom) and (statement.level or (statement.module or "").startswith("test")):
            raise _CannotError("an import from the tests")
        self._statements[key] = statement
        if not isinstance(statement, ast.Import | ast.ImportFrom):
            self._need(statement)

    def _written(self, statement: ast.stmt | str) -> str:
        if isinstance(statement, str):
            return statement
        if isinstance(statement, ast.Import | ast.ImportFrom):
            statement.names = [one for one in statement.names if (one.asname or one.name.split(".")[0]) in self._known]
        return ast.unparse(statement)


def _names(statement: ast.stmt) -> set[str]:
    return {one.id for one in ast.walk(statement) if isinstance(one, ast.Name)}


def _binds(statement: ast.stmt) -> set[str]:
    """Return the names to which a statement gives a value."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {one.asname or one.name.split(".")[0] for one in statement.names}
    if isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
        return {statement.name}
    return {one.id for one in ast.walk(statement) if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Load)}
