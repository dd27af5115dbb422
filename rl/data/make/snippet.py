"""The smallest program that shows a failure: the call that a failing test makes, and what it needs.

The program is cut out of the test's source: the expression that failed, the statements before it that its names need,
imports. Variables that were plain values are written as such, so that nothing of the test's parameters or fixtures is
needed. `rl.data.make.statement` runs it on both trees and uses it only if they answer differently.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rl.data.make.runs import Failure

_MOST_LINES = 25
_LONGEST = 1500  # characters
_MOST_SAID = 600
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_RAISING = ("raises", "assertRaises", "assertRaisesRegex")
_EQUAL = ("assertEqual", "assertEquals", "assertIs", "assertListEqual", "assertDictEqual", "assertTupleEqual")
_EQUAL += ("assertSequenceEqual", "assertSetEqual", "assertMultiLineEqual", "assertNotEqual", "assertAlmostEqual")
_START = ("setUp", "setUpClass", "setup_method", "setup_class")
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
        """Return the program whose last line says what the expression gives: ``returns VALUE`` or ``raises ERROR``,
        nothing if that is too long to be told.
        """
        return (
            f"try:\n    exec({self.before!r}, globals())\n    found = eval({self.expression!r}, globals())\n"
            "    said = 'returns ' + ascii(found)\n"
            "except Exception as error:\n    said = f'{type(error).__name__}: {error}'\n"
            "    said = 'raises ' + ascii(said)[1:-1]\n"
            f"print()\nprint(said if len(said) < {_MOST_SAID} else '')\n"
        )


class _CannotError(Exception):
    """A name of the test stands for something that a program outside of it cannot have."""


def snippets(source: str, failure: Failure) -> list[Snippet]:
    """Return small programs for a failed test: first for what failed, then for what the test checks after it.

    source: of the test's file.
    """
    path = failure.test.partition("::")[0]
    lines = [line for file, line, _ in failure.frames if file == path]
    try:
        module = ast.parse(source)
        around, function = _function(module, failure.test)
        if function is None:
            return []
        own = range(function.body[0].lineno, (function.end_lineno or 0) + 1)
        body = _alone(module, around, function)
        # The test's own line first, then helpers', whose names the test does not define.
        first = next((asked for line in lines if line in own and (asked := _asked(body, line))), None)
    except (SyntaxError, ValueError, RecursionError):
        return []
    if first is None:
        return []
    rest = [one for one in body[body.index(first[1]) + 1 :] if _checks(one)]
    found = []
    for asked in [first, *filter(None, (_asked([one], one.end_lineno or 0) for one in rest))]:
        with contextlib.suppress(_CannotError, ValueError, RecursionError):
            one = _TestSlice(module, function, body, failure.values, asked[1]).program(asked[0])
            if len(one.text) <= _LONGEST and one.text.count("\n") < _MOST_LINES:
                found.append(one)
    return found


def _function(module: ast.Module, test: str) -> tuple[ast.ClassDef | None, ast.FunctionDef | None]:
    """Return the function of a test, by pytest's name, and the class that it is in."""
    found: list[ast.stmt | ast.Module] = [module]
    for name in test.partition("[")[0].split("::")[1:]:
        body = getattr(found[-1], "body", ())
        found += [one for one in body if isinstance(one, (*_FUNCTIONS, ast.ClassDef)) and one.name == name][:1] or [
            module
        ]
    last, around = found[-1], found[-2] if len(found) > 1 else None
    return (
        around if isinstance(around, ast.ClassDef) else None,
        last if isinstance(last, ast.FunctionDef) and last.body else None,
    )


def _alone(module: ast.Module, around: ast.ClassDef | None, function: ast.FunctionDef) -> list[ast.stmt]:
    """Return a test's statements after those of its class and of the fixtures of its file that come before them."""
    before: list[ast.stmt] = []
    for one in module.body:
        names = {arg.arg for arg in function.args.args}
        if isinstance(one, ast.FunctionDef) and one.name in names and not one.args.args and one.decorator_list:
            *body, last = one.body
            value = last.value if isinstance(last, ast.Return | ast.Expr) else None
            value = value.value if isinstance(value, ast.Yield) else value
            if value is not None:
                before += [*body, ast.copy_location(ast.Assign([ast.Name(one.name, ast.Store())], value), last)]
    start: list[ast.stmt] = []
    for one in around.body if around else ():
        if isinstance(one, ast.FunctionDef) and one.name in _START:
            start += one.body
        elif isinstance(one, ast.FunctionDef) and not one.name.startswith("test"):
            kinds = {_last(kind) for kind in one.decorator_list}
            if kinds <= {"staticmethod", "classmethod"}:
                one.args.args, one.decorator_list = one.args.args["staticmethod" not in kinds :], []
                before.append(one)
        elif not isinstance(one, ast.FunctionDef):
            before.append(one)
    body = ast.Module([*before, *start, *function.body], [])
    return ast.fix_missing_locations(_QualifierRemover().visit(body)).body


class _QualifierRemover(ast.NodeTransformer):
    """This makes plain names of the attributes of `self` and `cls`, but not of a test case's own methods."""

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        return node  # has a self of its own

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") and not node.attr.startswith("assert"):
            return ast.copy_location(ast.Name(node.attr, node.ctx), node)
        return node


def _checks(statement: ast.stmt) -> bool:
    """Tell whether a statement checks something."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return (
        isinstance(statement, ast.Assert)
        or _is_raising(statement)
        or (isinstance(call, ast.Call) and _last(call.func).startswith("assert"))
    )


def _asked(body: Sequence[ast.stmt], line: int) -> tuple[ast.expr, ast.stmt] | None:
    """Return the expression that failed in a line, and the statement of a test's body that it is in."""
    for outer in body:
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


class _TestSlice:
    """A slice is the part of a test that an expression needs."""

    def __init__(
        self,
        module: ast.Module,
        function: ast.FunctionDef | ast.AsyncFunctionDef,
        body: list[ast.stmt],
        values: Mapping[str, str],
        until: ast.stmt,
    ) -> None:
        self._values = values
        self._before = body[: body.index(until)]
        self._module = [one for one in module.body if one is not function]
        self._parameters = {one.arg for one in [*function.args.args, *function.args.kwonlyargs]}
        # By where they stand: statements of the module, plain values, statements of the test.
        self._statements: dict[tuple[int, int], ast.stmt | str] = {}
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
        mentions = [one for one in self._before if name in _binds(one) | _names(one)]
        bound = any(name in _binds(one) for one in mentions)
        if name in self._values and (not bound or name in self._parameters):
            self._statements[1, len(self._statements)] = f"{name} = {self._values[name]}"
        elif bound:
            for one in mentions:
                self._take(one, 2, self._before.index(one))
        elif given := [one for one in self._module if name in _binds(one)]:
            self._take(given[0], 0, self._module.index(given[0]))
        else:
            raise _CannotError(name)

    def _take(self, statement: ast.stmt, level: int, place: int) -> None:
        key = level, place
        if _checks(statement) or key in self._statements:
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
    """Return the names that a statement has when it runs."""
    if isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
        return set()
    return {one.id for one in ast.walk(statement) if isinstance(one, ast.Name)}


def _binds(statement: ast.stmt) -> set[str]:
    """Return the names to which a statement gives a value."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {one.asname or one.name.split(".")[0] for one in statement.names}
    if isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
        return {statement.name}
    return {one.id for one in ast.walk(statement) if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Load)}
