"""Makers of mistakes that people make: limits, arguments, errors, caches, defaults, agreements, conditions.

`drop_function` makes none: it leaves the body of a function to be written anew.
"""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

from rl.data.make.makers import OPPOSITE, is_docstring, like, negated, positional
from rl.data.make.sites import Replacement, SiteContext, maker

_LIMITS: dict[type[cst.BaseCompOp], type[cst.BaseCompOp]] = {
    cst.LessThan: cst.LessThanEqual,
    cst.LessThanEqual: cst.LessThan,
    cst.GreaterThan: cst.GreaterThanEqual,
    cst.GreaterThanEqual: cst.GreaterThan,
}


@maker(cst.Comparison)
def boundary(node: cst.Comparison, place: SiteContext) -> Replacement | None:
    """Include a limit, or no longer include it."""
    targets = [one.operator for one in node.comparisons if type(one.operator) in _LIMITS]
    if not targets:
        return None
    target = place.rng.choice(targets)
    return node.deep_replace(target, like(target, _LIMITS[type(target)]))


@maker(cst.Slice, cst.Index, cst.Call)
def off_by_one(node: cst.Slice | cst.Index | cst.Call, place: SiteContext) -> Replacement | None:
    """Make a slice, an index, a range or a length one too long or too short."""
    if isinstance(node, cst.Slice):
        sides = [side for side in ("lower", "upper") if getattr(node, side) is not None]
        if not sides:
            return None
        side = place.rng.choice(sides)
        return node.with_changes(**{side: _one_off(getattr(node, side), place)})
    if isinstance(node, cst.Index):
        value = node.value
        number = value.expression if isinstance(value, cst.UnaryOperation) else value
        return node.with_changes(value=_one_off(value, place)) if isinstance(number, cst.Integer) else None
    if m.matches(node, m.Call(func=m.Name("len"))):
        return _one_off(node, place)
    if m.matches(node, m.Call(func=m.Name("range") | m.Name("enumerate"))) and positional(node.args):
        last = node.args[positional(node.args)[-1]]
        if m.matches(node.func, m.Name("enumerate")) and len(node.args) == 1:
            return node.with_changes(args=[*node.args, cst.Arg(cst.Integer("1"))])
        return node.deep_replace(last.value, _one_off(last.value, place))
    return None


def _one_off(value: cst.BaseExpression, place: SiteContext) -> cst.BaseExpression:
    if isinstance(value, cst.Integer):
        number = value.evaluated_value + place.rng.choice([-1, 1])
        return cst.Integer(str(number if number >= 0 else 1))
    if isinstance(value, cst.UnaryOperation) and isinstance(value.expression, cst.Integer):
        return value.with_changes(expression=cst.Integer(str(value.expression.evaluated_value + 1)))
    operator = cst.Add() if place.rng.random() < 0.5 else cst.Subtract()
    if not isinstance(value, cst.Name | cst.Call | cst.Attribute | cst.Subscript) and not value.lpar:
        value = value.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    return cst.BinaryOperation(value, operator, cst.Integer("1"), lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


@maker(cst.Call)
def swap_arguments(node: cst.Call, place: SiteContext) -> Replacement | None:
    """Exchange two arguments of a call."""
    numbers = [number for number in positional(node.args) if number + 1 in positional(node.args)]
    if not numbers:
        return None
    at = place.rng.choice(numbers)
    args = list(node.args)
    left, right = args[at], args[at + 1]
    if left.value.deep_equals(right.value):
        return None
    args[at], args[at + 1] = left.with_changes(value=right.value), right.with_changes(value=left.value)
    return node.with_changes(args=args)


@maker(cst.Call)
def lose_argument(node: cst.Call, place: SiteContext) -> Replacement | None:
    """Drop a keyword argument."""
    numbers = [number for number, one in enumerate(node.args) if one.keyword is not None]
    if not numbers:
        return None
    gone = place.rng.choice(numbers)
    return node.with_changes(args=[one for number, one in enumerate(node.args) if number != gone])


@maker(cst.SimpleStatementLine, cst.ExceptHandler)
def lose_exception(node: cst.SimpleStatementLine | cst.ExceptHandler, place: SiteContext) -> Replacement | None:
    """Swallow an error: it is no longer raised, or no longer told to the caller."""
    if isinstance(node, cst.SimpleStatementLine):
        raises = len(node.body) == 1 and isinstance(node.body[0], cst.Raise)
        return node.with_changes(body=[cst.Return() if place.rng.random() < 0.5 else cst.Pass()]) if raises else None
    if not isinstance(node.body, cst.IndentedBlock) or m.matches(node.body.body[0], m.SimpleStatementLine([m.Pass()])):
        return None
    return node.with_changes(body=node.body.with_changes(body=[cst.SimpleStatementLine([cst.Pass()])]))


@maker(cst.FunctionDef)
def stale_cache(node: cst.FunctionDef, place: SiteContext) -> Replacement | None:
    """Keep a result and return it again, although what it was computed from has changed."""
    parameters = node.params.params
    if node.asynchronous or not isinstance(node.body, cst.IndentedBlock) or not parameters or node.decorators:
        return None
    last = node.body.body[-1]
    returned = last.body[-1] if isinstance(last, cst.SimpleStatementLine) else None
    if not isinstance(returned, cst.Return) or returned.value is None or m.findall(node, m.Yield()):
        return None
    first, name = parameters[0].name.value, f"_{node.name.value.strip('_')}"
    if first == "self" and place.is_method(node):
        missing, kept = f'"{name}" not in self.__dict__', f"self.{name}"
    elif not place.is_method(node) and place.function(node) is None:
        cache = f"{node.name.value}.__dict__"
        missing, kept = f"repr({first}) not in {cache}", f"{cache}[repr({first})]"
    else:
        return None
    keeping = cst.ensure_type(cst.parse_statement(f"if {missing}:\n    {kept} = 0"), cst.If)
    keeping = keeping.deep_replace(m.findall(keeping, m.Integer())[0], returned.value)
    keeping = keeping.with_changes(leading_lines=cst.ensure_type(last, cst.SimpleStatementLine).leading_lines)
    result = cst.parse_statement(f"return {kept}")
    return node.with_changes(body=node.body.with_changes(body=[*node.body.body[:-1], keeping, result]))


@maker(cst.FunctionDef)
def wrong_default(node: cst.FunctionDef, place: SiteContext) -> Replacement | None:
    """Change the default of a parameter."""
    defaults = [
        param.default
        for param in [*node.params.params, *node.params.kwonly_params]
        if isinstance(param.default, cst.Integer | cst.SimpleString | cst.Name | cst.Float | cst.Tuple)
    ]
    if not defaults:
        return None
    old = place.rng.choice(defaults)
    if isinstance(old, cst.Name):
        if old.value not in ("None", *OPPOSITE):
            return None
        new: cst.BaseExpression = cst.Name(OPPOSITE.get(old.value, "False"))
    elif isinstance(old, cst.Integer):
        new = cst.Integer(str(old.evaluated_value + 1))
    else:
        empty = m.matches(old, m.SimpleString('""') | m.SimpleString("''"))
        new = cst.SimpleString('" "') if empty else cst.Name("None")
    return node.with_changes(params=node.params.deep_replace(old, new))


@maker(cst.SimpleString, cst.Return)
def broken_invariant(node: cst.SimpleString | cst.Return, place: SiteContext) -> Replacement | None:
    """Rename a key that another module relies on, or return a pair the wrong way round."""
    if isinstance(node, cst.SimpleString):
        value = node.raw_value
        if value not in place.shared or not value.isidentifier():
            return None
        other = value.replace("_", "") if "_" in value else value + ("s" if not value.endswith("s") else "_")
        return node.with_changes(value=node.prefix + node.quote + other + node.quote)
    if not isinstance(node.value, cst.Tuple) or len(node.value.elements) != 2:
        return None
    left, right = node.value.elements
    swapped = [left.with_changes(value=right.value), right.with_changes(value=left.value)]
    return node.with_changes(value=node.value.with_changes(elements=swapped))


@maker(cst.BooleanOperation)
def lose_condition(node: cst.BooleanOperation, place: SiteContext) -> Replacement | None:
    """Forget one of two conditions."""
    kept = place.rng.choice([node.left, node.right])
    return kept.with_changes(lpar=node.lpar, rpar=node.rpar) if node.lpar and not kept.lpar else kept


@maker(cst.Name)
def wrong_variable(node: cst.Name, place: SiteContext) -> Replacement | None:
    """Use another variable of the function."""
    function, parent = place.function(node), place.parent(node)
    named = cst.Attribute | cst.Param | cst.AssignTarget | cst.Annotation | cst.FunctionDef
    if function is None or isinstance(parent, named):
        return None
    if isinstance(parent, cst.Arg) and parent.keyword is node:
        return None
    names = sorted(
        {param.name.value for param in function.params.params}
        | {
            target.value
            for one in m.findall(function.body, m.AssignTarget(m.Name()))
            if isinstance(target := cst.ensure_type(one, cst.AssignTarget).target, cst.Name)
        }
    )
    others = [name for name in names if name not in (node.value, "self", "cls")]
    return node.with_changes(value=place.rng.choice(others)) if node.value in names and others else None


@maker(cst.If, cst.While)
def lose_negation(node: cst.If | cst.While, place: SiteContext) -> Replacement | None:
    """Forget a `not`."""
    if isinstance(node.test, cst.UnaryOperation) and isinstance(node.test.operator, cst.Not):
        return node.with_changes(test=negated(node.test))
    return None


@maker(cst.FunctionDef)
def drop_function(node: cst.FunctionDef, place: SiteContext) -> Replacement | None:
    """Leave only the head and the docstring of a function: its body has to be written anew."""
    if not isinstance(node.body, cst.IndentedBlock) or (m.findall(node, m.Yield()) and node.asynchronous):
        return None
    kept = [statement for statement in node.body.body[:1] if is_docstring(statement)]
    if len(node.body.body) == len(kept):
        return None
    missing = cst.parse_statement("raise NotImplementedError")
    return node.with_changes(body=node.body.with_changes(body=[*kept, missing]))
