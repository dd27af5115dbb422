"""Types of a config's values: a value has to have the type that verl's dataclass declares, or that its default has.

verl instantiates its dataclasses with whatever it is given: a learning rate of "abc" fails in a worker, minutes later.
The dataclasses are read from verl's source, because importing them takes ten seconds.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl.config.compose import package_dir

# The folders of verl's package that have the dataclasses of its config.
_CLASSES = ("workers/config", "trainer/config", "utils/profiler", "utils/skip")
# Keys that may be null although their default has a type.
NULL_TOO = (
    "trainer.max_actor_ckpt_to_keep",
    "trainer.max_critic_ckpt_to_keep",
    "sandbox.image_budget_gb",
    "sft.select.resolved",
)
_WORDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list, such as [a,b]",
    dict: "keys with values",
}
_NAMES = {"bool": bool, "int": int, "float": float, "str": str, "list": list, "tuple": list, "dict": dict}


def wrong_value(path: str, value: Any, default: Any, declared: ast.expr | None) -> str:
    """Return a line that says why ``value`` cannot be what ``path`` is set to, "" if it can be.

    default: the value that the key has by itself. declared: the type of the dataclass's field, None if there is none.
    """
    expected = _expected(declared) if declared is not None else None
    if expected is None:
        expected = {next((kind for kind in (bool, float, list) if _is(default, kind)), type(None))}
        if expected == {type(None)}:  # a text may become anything, such as a list of files
            return ""
        if path in NULL_TOO or list in expected:
            expected.add(type(None))
    if any(_is(value, kind) for kind in expected):
        return ""
    words = [word for kind, word in _WORDS.items() if kind in expected] + ["null"] * (type(None) in expected)
    return f"{path} is {value!r}; it must be {' or '.join(words)}"


def _is(value: Any, kind: type) -> bool:
    from omegaconf import DictConfig, ListConfig

    if isinstance(value, bool):  # in Python a number, too
        return kind is bool
    # A name of digits is a number in YAML.
    kinds: dict[type, Any] = {float: int | float, str: str | int | float}
    kinds |= {list: list | ListConfig, dict: dict | DictConfig}
    return isinstance(value, kinds.get(kind, kind))


def _expected(declared: ast.expr) -> set[type] | None:
    """Return the types that an annotation such as ``Optional[int]`` allows, None if it names another one."""
    match declared:
        case ast.Constant(value=None):
            return {type(None)}
        case ast.Name(id=name) | ast.Subscript(value=ast.Name(id=name)) if name in _NAMES:
            return {_NAMES[name]}
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            all_of = [_expected(inner), {type(None)}]
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=inner)):
            all_of = [_expected(one) for one in inner]
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            all_of = [_expected(left), _expected(right)]
        case _:
            return None
    return None if None in all_of else {kind for found in all_of for kind in found or ()}


@functools.cache
def fields(name: str) -> Mapping[str, ast.expr]:
    """Return the fields, with the expressions of their types, of one of verl's dataclasses and those it derives from.

    No two classes of the config have the same name. A class that is not known has no fields.
    """
    found = _classes().get(name)
    if found is None:
        return {}
    own = {
        node.target.id: node.annotation
        for node in found.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    bases = [base.id for base in found.bases if isinstance(base, ast.Name)]
    return {key: kind for base in bases for key, kind in fields(base).items()} | own


def dataclass_of(declared: ast.expr) -> str:
    """Return the name of the dataclass of verl's config in an annotation such as ``Optional[PolicyLossConfig]``, "" if
    there is none."""
    known = _classes()
    return next((node.id for node in ast.walk(declared) if isinstance(node, ast.Name) and node.id in known), "")


@functools.cache
def _classes() -> dict[str, ast.ClassDef]:
    verl = Path(package_dir("verl"))
    trees = [ast.parse(file.read_text()) for folder in _CLASSES for file in (verl / folder).rglob("*.py")]
    return {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}
