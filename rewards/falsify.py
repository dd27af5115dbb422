"""This program makes tests wrong: each named test function must fail afterwards, whatever it tests.

One comparison of the function, drawn at random, is given a wrong value that is as plausible as the right one. If no
comparison is certain to be reached, a wrong comparison is added at the function's end. A function that may end early,
or is expected to fail, stays as it is.

It runs in a box, before the tests, with the Python that is found there (3.8 or later), so it is one file that imports
nothing of this project. `rewards.second` appends a call of `main`.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator

_draw = random.SystemRandom()
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SWALLOWING = ("raises", "Raises", "suppress", "subtest", "subTest")  # context managers that may swallow a failure


def main(word: str, wanted: dict[str, list[str]]) -> None:
    """Rewrite the files, and print the word with "FILE::FUNCTION" for each function that must fail now."""
    for path, names in wanted.items():
        try:
            with open(path, "rb") as file:
                source = file.read().replace(b"\r\n", b"\n")
            new, done = falsified(source, names)
            compile(new, path, "exec")
        except (OSError, ValueError, SyntaxError):  # no file, no Python, or not in UTF-8
            continue
        with open(path, "wb") as file:
            file.write(new)
        for name in sorted(done):
            print(f"{word} {path}::{name}", flush=True)


def falsified(source: bytes, names: list[str]) -> tuple[bytes, set[str]]:
    """Return a module with the functions of these names made wrong, and the names for which that was possible.

    Raises ValueError if the source is not UTF-8 or has line ends other than line feeds, and SyntaxError.
    """
    text = source.decode()
    if "\r" in text:
        raise ValueError("lines end in a way that Python and this program may count differently")
    lines = source.split(b"\n")
    tree = ast.parse(text)
    edits: list[tuple[int, int, bytes]] = []
    found: set[str] = set()
    whole: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, _FUNCTIONS) and node.name in names:
            found.add(node.name)
            if edit := _edit(node, source, lines):
                edits.append(edit)
            else:
                whole.add(node.name)
    for start, end, new in sorted(edits, reverse=True):
        source = source[:start] + new + source[end:]
    return source, found - whole


def _edit(
    function: ast.FunctionDef | ast.AsyncFunctionDef, source: bytes, lines: list[bytes]
) -> tuple[int, int, bytes] | None:
    """Return the edit of the source that makes a function fail: its start and end in bytes, and the new text.

    None if the function may end early, or is expected to fail.
    """
    first, last = function.body[0], function.body[-1]
    for node in _own(function):
        if isinstance(node, (ast.Yield, ast.YieldFrom)) or (isinstance(node, ast.Return) and node is not last):
            return None
    if any(word in ast.dump(decorator) for decorator in function.decorator_list for word in ("xfail", "xpectedFail")):
        return None

    def place(line: int | None, column: int | None) -> int:
        return sum(len(text) + 1 for text in lines[: (line or 1) - 1]) + (column or 0)

    def span(node: ast.stmt | ast.expr) -> tuple[int, int]:
        return place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)

    if sites := [*_comparisons(function.body)]:
        statement, left, right = _draw.choice(sites)
        for side in (right, left):
            if (other := _other(side)) is not None:
                return (*span(side), other.encode())
        number = _draw.randint(10**6, 10**9)
        sides = [side for side in (left, right) if not _tests_own(side)] or [left, right]
        equal = [b"(%s) == %d" % (source[slice(*span(side))], number) for side in sides]
        return (*span(statement), b"assert (%s)" % b" or ".join(equal))
    number = _draw.randint(0, 999)
    wrong = f"assert {number} == {number + _draw.randint(1, 999)}".encode()
    between = b"; "
    if first.lineno != function.lineno:
        between = b"\n" + lines[first.lineno - 1][: first.col_offset]
    if isinstance(last, ast.Return):
        return span(last)[0], span(last)[0], wrong + between
    return span(last)[1], span(last)[1], between + wrong


def _comparisons(body: list[ast.stmt]) -> Iterator[tuple[ast.stmt, ast.expr, ast.expr]]:
    """Yield (statement, left, right) for the assertions of equality that are reached unless something fails earlier.

    Assertions about two literals are left out, as are those whose failure something around them may swallow.
    """
    for statement in body:
        sides: list[ast.expr] = []
        if isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Compare):
            if len(statement.test.ops) == 1 and isinstance(statement.test.ops[0], ast.Eq):
                sides = [statement.test.left, *statement.test.comparators]
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            call = statement.value
            if isinstance(call.func, ast.Attribute) and call.func.attr in ("assertEqual", "assertEquals"):
                sides = call.args[:2]
        elif isinstance(statement, (ast.With, ast.AsyncWith)):
            if not any(word in ast.dump(item) for item in statement.items for word in _SWALLOWING):
                yield from _comparisons(statement.body)
        elif isinstance(statement, ast.For) and isinstance(statement.iter, (ast.List, ast.Tuple)):
            leaves = any(isinstance(node, (ast.Break, ast.Continue)) for node in ast.walk(statement))
            if statement.iter.elts and not leaves:
                yield from _comparisons(statement.body)
        if len(sides) < 2 or any(isinstance(side, ast.Starred) for side in sides):
            continue
        if any(_other(side) is None for side in sides):
            yield statement, sides[0], sides[1]


def _tests_own(side: ast.expr) -> bool:
    """Tell whether a side may be the test's own object that equals everything, such as `mock.ANY` or `Anything()`.

    The sign is a capital letter at the beginning of its name.
    """
    named = side.func if isinstance(side, ast.Call) else side
    name = named.attr if isinstance(named, ast.Attribute) else named.id if isinstance(named, ast.Name) else ""
    return name.lstrip("_")[:1].isupper()


def _other(node: ast.expr) -> str | None:
    """Return the text of a literal of the same type that is not equal to this one; None if this is not a literal."""
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return None
    number = _draw.randint(1, 999)
    if isinstance(value, bool):
        return repr(not value)
    if value is None:
        return str(number)
    if isinstance(value, (int, float)):
        return repr(value + number if value + number != value else -value)
    if isinstance(value, (str, bytes)):
        more = _draw.choice("abcdefgh")
        return repr(value + (more if isinstance(value, str) else more.encode()))
    if isinstance(value, (list, tuple)):
        return repr(value + type(value)([number]))
    while isinstance(value, (set, dict)) and number in value:
        number += 1
    if isinstance(value, set):
        return repr(value | {number})
    return repr({**value, number: number}) if isinstance(value, dict) else None


def _own(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.AST]:
    """Yield the nodes of a function, except those inside of functions and classes that are nested in it."""
    left: list[ast.AST] = list(function.body)
    while left:
        node = left.pop()
        yield node
        if not isinstance(node, (*_FUNCTIONS, ast.Lambda, ast.ClassDef)):
            left.extend(ast.iter_child_nodes(node))
