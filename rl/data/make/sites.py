"""Find the places of a file at which makers can plant a bug, and plant one.

A maker is a small function from a node of a concrete syntax tree (libcst) to what takes its place, or None where it
does not apply. Everything else of the file stays as it was written, to the last blank. Only places that tests run are
offered.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider

Replacement = cst.CSTNode | cst.RemovalSentinel | cst.FlattenSentinel


@dataclass(frozen=True)
class SiteContext:
    """This is what a maker is told of the place where it is asked for a bug.

    rng: the source of all randomness of an edit. shared: names and keys that another module of the package uses, too.
    """

    rng: random.Random
    parents: Mapping[cst.CSTNode, cst.CSTNode]
    shared: frozenset[str]

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """Return the node around a node, None for the module."""
        return self.parents.get(node)

    def function(self, node: cst.CSTNode) -> cst.FunctionDef | None:
        """Return the innermost function around a node, None outside of all."""
        around = self.parents.get(node)
        while around is not None and not isinstance(around, cst.FunctionDef):
            around = self.parents.get(around)
        return around

    def is_method(self, function: cst.FunctionDef) -> bool:
        """Tell whether a function is in the body of a class."""
        block = self.parents.get(function)
        return block is not None and isinstance(self.parents.get(block), cst.ClassDef)


Make = Callable[[Any, SiteContext], Replacement | None]


@dataclass(frozen=True)
class Maker:
    """A maker plants one kind of bug. types: the nodes for which it is asked."""

    name: str
    types: tuple[type[cst.CSTNode], ...]
    make: Make


MAKERS: dict[str, Maker] = {}
"""All makers, by name, in the order in which they are defined."""


def maker(*types: type[cst.CSTNode]) -> Callable[[Make], Make]:
    """Register a function as the maker of its name."""

    def register(make: Make) -> Make:
        name = getattr(make, "__name__", "")
        MAKERS[name] = Maker(name, types, make)
        return make

    return register


@dataclass(frozen=True)
class Site:
    """A site is a node for a maker. tests: bits of the tests that run it. start, end: its lines, from 1."""

    node: cst.CSTNode
    tests: int
    start: int
    end: int


class File:
    """A file is a source file's tree, and which tests run each of its lines."""

    def __init__(self, source: str, tests: Mapping[int, int], shared: frozenset[str] = frozenset()) -> None:
        """Parse the source. tests: bits of the tests that run a line, by line, from 1. Raises cst.ParserSyntaxError."""
        self.source = source
        wrapper = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
        self._module = wrapper.module
        self._parents = wrapper.resolve(ParentNodeProvider)
        self._shared = shared
        self._sites: list[Site] = []
        for node, at in wrapper.resolve(PositionProvider).items():
            if isinstance(node, _NODES):
                bits = 0
                for line in range(at.start.line, at.end.line + 1):
                    bits |= tests.get(line, 0)
                if bits:
                    self._sites.append(Site(node, bits, at.start.line, at.end.line))

    def sites(self, maker: Maker) -> list[Site]:
        """Return the places in functions and classes that tests run and that a maker may be asked for, in order."""
        return [
            site
            for site in self._sites
            if isinstance(site.node, maker.types)
            and (isinstance(site.node, cst.FunctionDef | cst.ClassDef) or self.place("").function(site.node))
        ]

    def place(self, seed: str) -> SiteContext:
        """Return what a maker is given beside the node."""
        return SiteContext(random.Random(seed), self._parents, self._shared)

    def planted(self, maker: Maker, site: Site, seed: str) -> str | None:
        """Return the source with a bug at a site; None if the maker has none for it, or the result is not Python."""
        new = maker.make(site.node, self.place(seed))
        if new is None or new is site.node:
            return None
        try:
            text = self._module.visit(_Replace(site.node, new)).code
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compile(text, "edited", "exec", dont_inherit=True)
        except (cst.CSTValidationError, SyntaxError, ValueError, TypeError, RecursionError):
            return None
        return None if text == self.source else text


_NODES = (cst.BaseStatement, cst.BaseSmallStatement, cst.BaseExpression, cst.IndentedBlock)
_NODES += (cst.Arg, cst.DictElement, cst.ExceptHandler, cst.Index, cst.Param, cst.Slice)


class _Replace(cst.CSTTransformer):
    """This replaces one node. (libcst writes `pass` into a block that is left empty.)"""

    def __init__(self, old: cst.CSTNode, new: Replacement) -> None:
        super().__init__()
        self._old, self._new = old, new

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        return self._new if original_node is self._old else updated_node
