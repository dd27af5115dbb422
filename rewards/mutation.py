"""Make a test function wrong by changing one thing in it that its result hangs on.

What is changed is, where the function has one, a literal that is compared with something: a number, a word in a text,
an element. It becomes another literal of the same form, so that one test, seen alone, does not tell whether it was
changed. Where there is no such literal, an expected exception, truth value or comparison is changed, or what goes into
the tested code. The module runs in a box as a part of `rewards.falsify`, with Python 3.8 or later.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from typing import Any

from rewards.literals import Pool, leaves

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Edit = tuple  # (start, end, text): bytes of the source are replaced

# The ranks of places, best first; of the first rank that a function has a place in, one place is drawn. Only places of
# certain ranks are sure to make the function fail.
_SELDOM = 0.25  # how often an operator is changed where only it and what is given to the tested code can be
_COMPARED, _INSIDE, _TURNED, _GIVEN, _NEGATED = range(5)

_ASSERTING = re.compile(r"(?i)_*(assert|check|verify|expect|ensure|validate|compare)")
_EQUAL = re.compile(
    r"assert(Equals?|\w*Equal|Dict\w*|List\w*|Count\w*|Contains|In|\w*Message|Regex\w*|NumQueries|_\w*(equal|allclose)"
    r"\w*|_array_\w+|Redirects|HTML\w*|XML\w*|JSON\w*|AlmostEquals?)$"
)
_SAME = re.compile(r"(allclose|isclose|array_equal|array_equiv|equals|startswith|endswith)$")
_RAISING = re.compile(r"(?i)(raises|warns)")
_SWALLOWING = ("raises", "Raises", "suppress", "subtest", "warns", "Warns")  # contexts that may swallow a failure
_SWAPS = {
    "assertTrue": "assertFalse", "assertFalse": "assertTrue", "assertIsNone": "assertIsNotNone",
    "assertIsNotNone": "assertIsNone", "assertGreater": "assertLess", "assertLess": "assertGreater",
    "assertGreaterEqual": "assertLess", "assertLessEqual": "assertGreater", "assertIn": "assertNotIn",
    "assertNotIn": "assertIn", "assertEqual": "assertNotEqual", "assertNotEqual": "assertEqual",
    "assertIs": "assertIsNot", "assertIsNot": "assertIs", "assertIsInstance": "assertNotIsInstance",
    "assertNotIsInstance": "assertIsInstance",
}  # fmt: skip
_TURNS = ("assertTrue", "assertFalse", "assertIsNone", "assertIsNotNone", "assertGreater", "assertLess")
_OPERATORS: dict[type, tuple[str, str]] = {
    ast.Lt: ("<", ">"), ast.Gt: (">", "<"), ast.LtE: ("<=", ">"), ast.GtE: (">=", "<"), ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"), ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}  # fmt: skip
# How often tests expect each of these, besides ValueError, which they expect as often as all of them together.
_ERRORS = {
    "TypeError": 18, "RuntimeError": 5, "NotImplementedError": 4, "KeyError": 3, "IndexError": 2, "AttributeError": 2,
    "ImportError": 2,
}  # fmt: skip
_RARELY_BASES = ("IndexError", "NotImplementedError", "ZeroDivisionError", "OverflowError", "ImportError")
_WARNINGS = ("DeprecationWarning", "UserWarning", "FutureWarning", "RuntimeWarning")


class Module:
    """A module is the source of a test file, its tree, and what its literals are made of.

    sure: change only what is certain to make a test fail, even if that is told more easily.
    """

    def __init__(self, source: bytes, tree: ast.Module, pool: Pool, sure: bool = False) -> None:
        self.source, self.tree, self.pool, self.sure = source, tree, pool, sure
        self._starts = [0]
        for line in source.split(b"\n"):
            self._starts.append(self._starts[-1] + len(line) + 1)
        self.helpers = {node.name: node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)}

    def span(self, node: Any) -> tuple[int, int]:
        """Return where a node begins and ends, in bytes."""
        begin = self._starts[node.lineno - 1] + node.col_offset
        return begin, self._starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: Any) -> str:
        """Return a node's source."""
        return self.source[slice(*self.span(node))].decode()

    def changed(self, node: Any) -> Edit | None:
        """Return an edit that gives a literal another value."""
        start, end = self.span(node)
        if isinstance(node, (ast.List, ast.Tuple, ast.Dict)):
            text = self.text(node)
            return (start, end, self.pool.fill(text)) if text in ("[]", "()", "{}") else None
        new = self.pool.other(self.text(node))
        return None if new is None else (start, end, new)


def wrong(function: Any, module: Module) -> tuple[list, str]:
    """Return edits that make a function fail, and what was changed; none if that is not possible."""
    if any(word in ast.dump(one) for one in function.decorator_list for word in ("xfail", "xpectedFail", "skip")):
        return [], ""
    if any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in _own(function)):
        return [], ""
    found: list = []
    finder = _Finder(module, function, found)
    finder.body(function.body, True)
    if module.sure:
        found = [one for one in found if one[1]]
    elif module.pool.draw.random() < _SELDOM:  # what is given decides less, and what is turned is told more easily
        found = [one for one in found if one[0] % 5 != _GIVEN and one[2] != "method 4"] or found
    else:
        found = [one for one in found if one[2] not in ("method 4", "negation 4")] or found
    for rank in range(2 * (_NEGATED + 1)):
        some = [one for one in found if one[0] == rank]
        module.pool.draw.shuffle(some)
        done: list = []
        kind = some[0][2] if some else ""
        for _, _, _, make in some:
            edits = [edit for edit in make() if edit and module.source[slice(*edit[:2])].decode() != edit[2]]
            if edits and not any(_overlap(one, other) for one in edits for other in done):
                done += edits
                # Some inputs decide nothing, so several are changed.
                if rank % 5 != _GIVEN or len(done) >= 3:
                    break
        if done:
            return done, kind
    return [], ""


def _overlap(one: Edit, other: Edit) -> bool:
    return one[0] < other[1] and other[0] < one[1]


class _Finder:
    """A finder collects the places of a function: (rank, sure to fail, kind, a function that returns edits)."""

    def __init__(self, module: Module, function: Any, found: list) -> None:
        self._module, self._found = module, found
        self._names = _expected(function)
        self._rows = _parameters(function)
        for name in self._names & set(self._rows):
            self._row(self._rows[name])

    def body(self, statements: list, reached: bool) -> None:
        """Collect the places of statements. reached: they are certain to be executed if nothing fails before."""
        for statement in statements:
            self._statement(statement, reached)
            inner = isinstance(statement, (*FUNCTIONS, ast.ClassDef))
            if not inner and any(isinstance(node, (ast.Return, ast.Break, ast.Continue)) for node in _own(statement)):
                reached = False

    def _statement(self, statement: Any, reached: bool) -> None:
        if isinstance(statement, ast.Assert):
            self._test(statement.test, reached)
        elif isinstance(statement, (ast.Expr, ast.Return)):
            value = statement.value.value if isinstance(statement.value, ast.Await) else statement.value
            if isinstance(value, ast.Call):
                self._call(value, reached)
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            named = len(targets) == 1 and isinstance(targets[0], ast.Name) and targets[0].id in self._names
            self._literals(statement.value, _COMPARED if named else _GIVEN, False)  # it may equal everything
        elif isinstance(statement, (ast.With, ast.AsyncWith)):
            for item in statement.items:
                if isinstance(item.context_expr, ast.Call):
                    self._context(item.context_expr, reached)
            swallows = any(word in ast.dump(item) for item in statement.items for word in _SWALLOWING)
            self.body(statement.body, reached and not swallows)
        elif isinstance(statement, (ast.For, ast.AsyncFor)):
            fixed = isinstance(statement.iter, (ast.List, ast.Tuple)) and bool(statement.iter.elts)
            leaves_ = any(isinstance(node, (ast.Break, ast.Continue)) for node in ast.walk(statement))
            self._loop(statement)
            self._literals(statement.iter, _GIVEN, reached)
            self.body(statement.body, reached and fixed and not leaves_)
        else:
            for name in ("body", "orelse", "finalbody"):
                inner = getattr(statement, name, [])
                if isinstance(inner, list):
                    self.body(inner, reached and isinstance(statement, ast.Try) and name == "finalbody")

    def _test(self, test: Any, reached: bool) -> None:
        """Collect the places of an expression that must be true."""
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            for value in test.values:
                self._test(value, reached)
        elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            start, end = self._module.span(test)[0], self._module.span(test.operand)[0]
            if b"(" not in self._module.source[start:end]:
                self._add(_NEGATED, reached, "negation", lambda: [(start, end, "")])
            self._literals(test.operand, _INSIDE, reached)
        elif isinstance(test, ast.Compare) and len(test.ops) == 1:
            self._comparison(test, reached)
        elif isinstance(test, ast.Compare):
            self._literals(test, _INSIDE, reached)
        else:
            if isinstance(test, ast.Call):
                same = _SAME.search(_name(test.func))
                for argument in test.args:
                    self._literals(argument, _COMPARED if same else _INSIDE, reached and not same)
            if isinstance(test, (ast.Call, ast.Name, ast.Attribute, ast.Subscript)):
                at = self._module.span(test)[0]
                self._add(_NEGATED, reached, "negation", lambda: [(at, at, "not ")])

    def _comparison(self, test: ast.Compare, reached: bool) -> None:
        left, right, operator = test.left, test.comparators[0], test.ops[0]
        if isinstance(operator, (ast.Eq, ast.Is)):
            self._equal(left, right, reached)
        elif isinstance(operator, ast.In):
            if isinstance(left, ast.Constant) and isinstance(left.value, (str, bytes)):
                self._literals(left, _COMPARED, reached and len(left.value) > 3)
            self._literals(right, _INSIDE, reached)
        elif not isinstance(operator, (ast.NotIn, ast.NotEq, ast.IsNot)):
            self._literals(left, _INSIDE, reached)
            self._literals(right, _INSIDE, reached)
        old, new = _OPERATORS[type(operator)]
        start, end = self._module.span(left)[1], self._module.span(right)[0]
        gap = self._module.source[start:end].decode()
        match = re.search(old, gap)
        if match and "#" not in gap:
            plain = isinstance(operator, (ast.Eq, ast.NotEq, ast.In, ast.NotIn)) or (
                isinstance(operator, (ast.Is, ast.IsNot)) and not _is(right, (None,))
            )
            place = (start + match.start(), start + match.end(), new)
            self._add(_NEGATED if plain else _TURNED, reached, "operator", lambda: [place])

    def _equal(self, left: Any, right: Any, reached: bool) -> None:
        """Collect the literals of two expressions that must be equal."""
        for side, other in ((right, left), (left, right)):
            if _is_literal(other) and _is_literal(side):
                continue
            for leaf, direct in leaves(side):
                if _is(leaf, (True, False)):
                    self._literal(leaf, _TURNED, reached and direct)
                elif not _is(leaf, (None,)):
                    own = _tests_own(other)
                    self._literal(leaf, _COMPARED if direct else _INSIDE, reached and direct and not own)

    def _call(self, call: ast.Call, reached: bool) -> None:
        name = _name(call.func)
        helper = self._module.helpers.get(name)
        if not _ASSERTING.match(name) and not helper:
            for argument in (*call.args, *(one.value for one in call.keywords)):
                self._literals(argument, _GIVEN, reached)
            return
        if name in ("assertTrue", "assert_") and call.args:
            self._test(call.args[0], reached)
        elif name in ("assertEqual", "assertEquals", "assert_equal", "assertIs") and len(call.args) > 1:
            self._equal(call.args[0], call.args[1], reached)
        elif name in ("assertFalse", "assertIs") and call.args:
            self._literals(call.args[0], _INSIDE, reached)
        elif _RAISING.search(name):
            self._context(call, reached)
            for argument in call.args[1:]:
                self._literals(argument, _GIVEN, reached)
        else:
            equal = _EQUAL.match(name)
            for argument in call.args:
                self._literals(argument, _COMPARED if equal else _INSIDE, reached and name.endswith("sertIn"))
            for keyword in call.keywords:
                if keyword.arg not in ("msg", "message", "err_msg", "rtol", "atol", "places", "delta"):
                    self._literals(keyword.value, _INSIDE, False)
        if name in _SWAPS and isinstance(call.func, ast.Attribute):
            end = self._module.span(call.func)[1]
            rank = _TURNED if name in _TURNS else _NEGATED
            self._add(rank, reached, "method", lambda: [(end - len(name), end, _SWAPS[name])])

    def _context(self, call: ast.Call, reached: bool) -> None:
        """Collect the places of `pytest.raises(...)`, `assertRaises(...)` and their like."""
        name = _name(call.func)
        if not _RAISING.search(name):
            rank = _COMPARED if name == "assertNumQueries" else _GIVEN
            for argument in call.args[:1]:
                self._literals(argument, rank, reached)
            return
        for keyword in call.keywords:
            if keyword.arg == "match" and isinstance(keyword.value, ast.Constant):
                self._literal(keyword.value, _COMPARED, reached)
        for argument in call.args[1:2]:
            if "Message" in name or "Regex" in name:
                self._literals(argument, _COMPARED, reached)
        if not call.args or not isinstance(call.args[0], (ast.Name, ast.Attribute)):
            return
        kind = call.args[0]
        old = _name(kind)
        if old.endswith("Warning"):
            other = [one for one in _WARNINGS if one != old]
            weights = [1] * len(other)
        else:
            known = old in _ERRORS or old == "ValueError"
            if not known and not self._module.sure:  # seldom is one of one's own followed by one of Python's
                return
            other = ["ValueError"] if old in _ERRORS else [*(_ERRORS if known else _RARELY_BASES)]
            other = [one for one in other if one != old]
            weights = [_ERRORS.get(one, 1) for one in other]
        if old in ("Exception", "BaseException", "Warning", "LookupError", "ArithmeticError"):
            return
        new = self._module.pool.draw.choices(other, weights)[0]
        self._add(_TURNED, reached, "exception", lambda: [(*self._module.span(kind), new)])

    def _loop(self, loop: Any) -> None:
        """Collect the expected values of `for given, expected in [...]`."""
        if isinstance(loop.iter, (ast.List, ast.Tuple)) and isinstance(loop.target, ast.Tuple):
            names = [one.id if isinstance(one, ast.Name) else "" for one in loop.target.elts]
            for at, name in enumerate(names):
                if name in self._names:
                    for row in loop.iter.elts:
                        if isinstance(row, (ast.Tuple, ast.List)) and len(row.elts) == len(names):
                            self._literals(row.elts[at], _COMPARED, False)

    def _row(self, values: list) -> None:
        """Collect one literal of each row of a parametrized test's expected values; all rows become wrong, or none."""

        def make() -> list:
            edits = []
            for value in values:
                options = [leaf for leaf, _ in leaves(value)]
                self._module.pool.draw.shuffle(options)
                edit = next((one for one in map(self._module.changed, options) if one), None)
                if edit is None:
                    return []
                edits.append(edit)
            return edits

        self._add(_COMPARED, False, "parameters", make, unreached=False)

    def _literals(self, node: Any, rank: int, reached: bool) -> None:
        for leaf, direct in leaves(node):
            if _is(leaf, (True, False, None)):
                self._literal(leaf, _TURNED if rank == _COMPARED else _GIVEN, False)
            else:
                self._literal(leaf, rank if direct else max(rank, _INSIDE), reached and direct and rank == _COMPARED)

    def _literal(self, leaf: Any, rank: int, sure: bool) -> None:
        self._add(rank, sure, "literal", lambda: [self._module.changed(leaf)], unreached=False)

    def _add(self, rank: int, reached: bool, kind: str, make: Callable[[], list], unreached: bool = True) -> None:
        # What may not be reached is changed only if nothing else can be.
        self._found.append((rank if reached or not unreached else rank + 5, reached, f"{kind} {rank}", make))


def _expected(function: Any) -> set:
    """Return the names that a function uses only as one side of assertions of equality."""
    compared: list = []
    for node in ast.walk(function):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq):
            compared += [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and _EQUAL.match(_name(node.func)):
            compared += node.args
    direct = [node.id for node in compared if isinstance(node, ast.Name)]
    loads = [node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    return {name for name in direct if direct.count(name) == loads.count(name)}


def _parameters(function: Any) -> dict:
    """Return the expected values of all rows of `pytest.mark.parametrize`, by the name of the parameter."""
    found: dict = {}
    for call in function.decorator_list:
        if not (isinstance(call, ast.Call) and _name(call.func) == "parametrize" and len(call.args) > 1):
            continue
        if isinstance(call.args[0], ast.Constant):
            names = re.findall(r"\w+", str(call.args[0].value))
        else:
            names = [one.value for one in getattr(call.args[0], "elts", []) if isinstance(one, ast.Constant)]
        rows = [
            one.args if isinstance(one, ast.Call) and _name(one.func) == "param" else one
            for one in getattr(call.args[1], "elts", [])
        ]
        for at, name in enumerate(names):
            if len(names) == 1:
                values = [row[0] if isinstance(row, list) and row else row for row in rows]
            else:
                cells = [row if isinstance(row, list) else getattr(row, "elts", []) for row in rows]
                values = [row[at] for row in cells if len(row) == len(names)]
            if values and len(values) == len(rows):
                found[name] = values
    return found


def _name(function: Any) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _is(node: Any, values: tuple) -> bool:
    return isinstance(node, ast.Constant) and any(node.value is value for value in values)


def _is_literal(node: Any) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _tests_own(side: Any) -> bool:
    """Tell whether a side may be the test's own object that equals everything, such as `mock.ANY` or `Anything()`.

    The sign is a capital letter at the beginning of its name.
    """
    return _name(side.func if isinstance(side, ast.Call) else side).lstrip("_")[:1].isupper()


def _own(node: Any) -> Iterator[ast.AST]:
    """Yield a node and those in it, except those inside of functions and classes that are nested in it."""
    left = [node]
    while left:
        one = left.pop()
        yield one
        if one is node or not isinstance(one, (*FUNCTIONS, ast.Lambda, ast.ClassDef)):
            left.extend(ast.iter_child_nodes(one))
