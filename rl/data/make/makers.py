"""Makers of bugs: twelve that SWE-smith has too, plain edits of a syntax tree.

Each is a function from a node and its place (`rl.data.make.sites`) to the node that replaces it, None where it does not
apply. `rl.data.make.mistakes` has the makers of mistakes that people make.
"""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from rl.data.make.sites import Replacement, SiteContext, maker

_COMPARISONS: dict[type[cst.BaseCompOp], tuple[type[cst.BaseCompOp], ...]] = {
    cst.Equal: (cst.NotEqual,),
    cst.NotEqual: (cst.Equal,),
    cst.LessThan: (cst.GreaterThan, cst.GreaterThanEqual),
    cst.GreaterThan: (cst.LessThan, cst.LessThanEqual),
    cst.LessThanEqual: (cst.GreaterThan, cst.GreaterThanEqual),
    cst.GreaterThanEqual: (cst.LessThan, cst.LessThanEqual),
    cst.In: (cst.NotIn,),
    cst.NotIn: (cst.In,),
    cst.Is: (cst.IsNot,),
    cst.IsNot: (cst.Is,),
}
_ARITHMETIC: dict[type[cst.BaseBinaryOp], tuple[type[cst.BaseBinaryOp], ...]] = {
    cst.Add: (cst.Subtract,),
    cst.Subtract: (cst.Add,),
    cst.Multiply: (cst.FloorDivide, cst.Add),
    cst.Divide: (cst.FloorDivide, cst.Multiply),
    cst.FloorDivide: (cst.Divide, cst.Multiply),
    cst.Modulo: (cst.FloorDivide,),
    cst.Power: (cst.Multiply,),
    cst.BitAnd: (cst.BitOr,),
    cst.BitOr: (cst.BitAnd,),
    cst.BitXor: (cst.BitOr,),
    cst.LeftShift: (cst.RightShift,),
    cst.RightShift: (cst.LeftShift,),
}

OPPOSITE = {"True": "False", "False": "True"}
"""Truth values, and their opposites."""


@maker(cst.ClassDef)
def remove_bases(node: cst.ClassDef, place: SiteContext) -> Replacement | None:
    """Take one of its base classes from a class."""
    if not node.bases:
        return None
    gone = place.rng.choice(node.bases)
    left = [base for base in node.bases if base is not gone]
    if left or node.keywords:
        return node.with_changes(bases=left)
    return node.with_changes(bases=[], lpar=cst.MaybeSentinel.DEFAULT, rpar=cst.MaybeSentinel.DEFAULT)


@maker(cst.FunctionDef)
def remove_function(node: cst.FunctionDef, place: SiteContext) -> Replacement | None:
    """Remove a method. (If a module lost a function, mostly nothing could be imported.)"""
    return cst.RemoveFromParent() if place.is_method(node) else None


@maker(cst.If)
def invert_if(node: cst.If, place: SiteContext) -> Replacement | None:
    """Swap the branches of a condition."""
    if isinstance(node.orelse, cst.Else):
        return node.with_changes(body=node.orelse.body, orelse=node.orelse.with_changes(body=node.body))
    return node.with_changes(test=negated(node.test), whitespace_before_test=cst.SimpleWhitespace(" "))


@maker(cst.IndentedBlock)
def shuffle_lines(node: cst.IndentedBlock, place: SiteContext) -> Replacement | None:
    """Exchange two neighbouring statements."""
    body = list(node.body)
    pairs = [at for at in range(len(body) - 1) if not is_docstring(body[at]) and not _leaves(body[at + 1])]
    if not pairs:
        return None
    at = place.rng.choice(pairs)
    return node.with_changes(body=[*body[:at], body[at + 1], body[at], *body[at + 2 :]])


def _leaves(statement: cst.CSTNode) -> bool:
    """Tell whether a statement ends its block, so that what comes after it would never run."""
    last = statement.body[-1] if isinstance(statement, cst.SimpleStatementLine) else None
    return isinstance(last, cst.Return | cst.Raise | cst.Continue | cst.Break)


@maker(cst.SimpleStatementLine)
def remove_assignment(node: cst.SimpleStatementLine, place: SiteContext) -> Replacement | None:
    """Remove an assignment."""
    gone = len(node.body) == 1 and isinstance(node.body[0], cst.Assign | cst.AugAssign | cst.AnnAssign)
    return cst.RemoveFromParent() if gone else None


@maker(cst.If)
def remove_conditional(node: cst.If, place: SiteContext) -> Replacement | None:
    """Remove an `if` with what depends on it, or only its condition."""
    if isinstance(place.parent(node), cst.If):  # an elif
        return None
    if node.orelse is None and place.rng.random() < 0.5:
        return cst.RemoveFromParent()
    return unwrapped(node.body)


@maker(cst.For, cst.While)
def remove_loop(node: cst.For | cst.While, place: SiteContext) -> Replacement | None:
    """Remove a loop."""
    return cst.RemoveFromParent()


@maker(cst.With, cst.Try)
def remove_wrapper(node: cst.With | cst.Try, place: SiteContext) -> Replacement | None:
    """Remove a `with` or a `try`; what it was around remains."""
    return unwrapped(node.body)


@maker(cst.BinaryOperation)
def break_chains(node: cst.BinaryOperation, place: SiteContext) -> Replacement | None:
    """Cut the end off a chain of operations, or its beginning."""
    if isinstance(node.left, cst.BinaryOperation):
        return with_parentheses_of(node.left, node)
    return with_parentheses_of(node.right, node) if isinstance(node.right, cst.BinaryOperation) else None


@maker(cst.Integer, cst.Float, cst.SimpleString, cst.Name)
def change_constants(node: cst.BaseExpression, place: SiteContext) -> Replacement | None:
    """Change a number, a text or a truth value."""
    if isinstance(node, cst.Name):
        return node.with_changes(value=OPPOSITE[node.value]) if node.value in OPPOSITE else None
    if isinstance(node, cst.Integer):
        value = node.evaluated_value
        return cst.Integer(str(abs(value + place.rng.choice([-1, 1, 2]))))
    if isinstance(node, cst.Float):
        return node.with_changes(value=repr(node.evaluated_value * 2 + 1))
    if isinstance(node, cst.SimpleString) and not isinstance(place.parent(node), cst.Expr) and len(node.raw_value) > 1:
        cut = node.raw_value[:-1]
        return None if cut.endswith("\\") else node.with_changes(value=node.prefix + node.quote + cut + node.quote)
    return None


@maker(cst.Comparison, cst.BinaryOperation, cst.BooleanOperation)
def change_operator(node: cst.BaseExpression, place: SiteContext) -> Replacement | None:
    """Change an operator."""
    if isinstance(node, cst.BooleanOperation):
        other = cst.Or if isinstance(node.operator, cst.And) else cst.And
        return node.with_changes(operator=like(node.operator, other))
    if isinstance(node, cst.BinaryOperation):
        kinds = _ARITHMETIC.get(type(node.operator), ())
        return node.with_changes(operator=like(node.operator, place.rng.choice(kinds))) if kinds else None
    assert isinstance(node, cst.Comparison)
    target = place.rng.choice(node.comparisons)
    kinds = _COMPARISONS.get(type(target.operator), ())
    return node.deep_replace(target.operator, like(target.operator, place.rng.choice(kinds))) if kinds else None


@maker(cst.BinaryOperation, cst.Comparison)
def swap_operands(node: cst.BinaryOperation | cst.Comparison, place: SiteContext) -> Replacement | None:
    """Exchange the two sides of an operator."""
    if isinstance(node, cst.BinaryOperation):
        return node.with_changes(left=node.right, right=node.left)
    if len(node.comparisons) != 1:
        return None
    target = node.comparisons[0]
    return node.with_changes(left=target.comparator, comparisons=[target.with_changes(comparator=node.left)])


def negated(test: cst.BaseExpression) -> cst.BaseExpression:
    """Return the expression that is true where `test` is false."""
    if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        return test.expression
    if isinstance(test, cst.BooleanOperation | cst.IfExp | cst.NamedExpr | cst.Lambda) and not test.lpar:
        test = test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    return cst.UnaryOperation(cst.Not(), test)


def unwrapped(suite: cst.BaseSuite) -> Replacement | None:
    """Return the statements of a block, to stand in place of what they were in."""
    if not isinstance(suite, cst.IndentedBlock):
        return None
    first, *rest = suite.body
    return cst.FlattenSentinel([first, *rest])


def with_parentheses_of(node: cst.BaseExpression, outer: cst.BaseExpression) -> cst.BaseExpression:
    """Return an expression with the parentheses of the one that it replaces."""
    return node.with_changes(lpar=outer.lpar, rpar=outer.rpar) if outer.lpar else node


def like(old: cst.CSTNode, new: type[cst.CSTNode]) -> cst.CSTNode:
    """Return an operator of another kind with the blanks of the old one."""
    blanks = {name: getattr(old, name) for name in ("whitespace_before", "whitespace_after") if hasattr(old, name)}
    for name, blank in blanks.items():  # `a<b` has no blanks, and `a in b` needs them
        if new in (cst.NotIn, cst.IsNot, cst.In, cst.Is, cst.And, cst.Or) and getattr(blank, "empty", False):
            blanks[name] = cst.SimpleWhitespace(" ")
    return new(**blanks)


def is_docstring(statement: cst.CSTNode) -> bool:
    """Tell whether a statement is nothing but a text."""
    return (
        isinstance(statement, cst.SimpleStatementLine)
        and isinstance(statement.body[0], cst.Expr)
        and isinstance(statement.body[0].value, cst.SimpleString | cst.ConcatenatedString)
    )


def positional(arguments: Sequence[cst.Arg]) -> list[int]:
    """Return the places of the arguments that have neither a keyword nor a star."""
    return [number for number, one in enumerate(arguments) if one.keyword is None and not one.star]
