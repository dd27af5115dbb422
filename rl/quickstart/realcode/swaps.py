"""This module finds the places of a source at which a word or an operator can be exchanged for its counterpart.

An exchange undoes itself: a place that has a bug is repaired by exchanging it again. So the places of a file are also
all the repairs that an agent can try, and one of them is right.
"""

from __future__ import annotations

import io
import re
import tokenize
from dataclasses import dataclass

_PAIRS = (
    ("<", "<="),
    (">", ">="),
    ("==", "!="),
    ("and", "or"),
    ("+", "-"),
    ("+=", "-="),
    ("*", "//"),
    ("True", "False"),
    ("0", "1"),
    ("is", "is not"),
    ("in", "not in"),
)
_OTHER = {one: other for pair in _PAIRS for one, other in (pair, pair[::-1])}
_TESTS = ("if", "elif", "while")
_PIECE = re.compile(r"\w+|[^\w\s]")
_KINDS = (tokenize.OP, tokenize.NAME, tokenize.NUMBER)


@dataclass(frozen=True)
class Swap:
    """A swap exchanges the text ``old`` at a line (from 0) and column for ``new``."""

    line: int
    column: int
    old: str
    new: str

    def applied(self, source: str) -> str:
        """Return the source after it. Raises ValueError if ``old`` is not there."""
        lines = source.split("\n")
        text = lines[self.line] if self.line < len(lines) else ""
        if not text.startswith(self.old, self.column):
            raise ValueError(f"line {self.line + 1} has no {self.old!r} at column {self.column}")
        lines[self.line] = text[: self.column] + self.new + text[self.column + len(self.old) :]
        return "\n".join(lines)


def swaps(source: str) -> list[Swap]:
    """Return the swaps of a source in order, at lines of functions whose text stands in it once: Edit needs that.

    The first lines of functions, imports and other statements of the module have none. It may be no whole Python.
    """
    lines = source.split("\n")
    tokens = _tokens(source)
    found = []
    for number, token in enumerate(tokens):
        line, column = token.start[0] - 1, token.start[1]
        if (
            line >= len(lines)
            or not lines[line][:1].isspace()
            or source.count(lines[line].strip()) > 1
            or token.start[0] != token.end[0]
        ):
            continue
        after = tokens[number + 1].string if number + 1 < len(tokens) else ""
        before = tokens[number - 1].string if number else ""
        if (pair := _pair(lines[line], token, before, after)) is not None:
            found.append(Swap(line, column, *pair))
    return found


def fragment(source: str, swap: Swap) -> tuple[str, str]:
    """Return the smallest text around a swap that stands in the source once, before and after the swap.

    It has at least the word or sign on each side, as far as the line has one: an operator alone says little.
    """
    line = source.split("\n")[swap.line]
    start, end = swap.column, swap.column + len(swap.old)
    pieces = [found.span() for found in _PIECE.finditer(line)]
    left = [first for first, last in pieces if last <= start]
    right = [first_last[1] for first_last in pieces[::-1] if first_last[0] >= end]
    first, last = left.pop() if left else start, right.pop() if right else end
    while source.count(line[first:last]) > 1 and (left or right):
        if left:
            first = left.pop()
        if right:
            last = right.pop()
    before = line[first:last]
    at = start - first
    return before, before[:at] + swap.new + before[at + len(swap.old) :]


def _pair(line: str, token: tokenize.TokenInfo, before: str, after: str) -> tuple[str, str] | None:
    """Return what is exchanged at a token, None for nothing."""
    word = token.string
    if token.type not in _KINDS:
        return None
    if word == "is" and after == "not":
        return "is not", "is"
    if word == "not" and after == "in":
        return "not in", "in"
    if word in _TESTS and line.lstrip().startswith(word):
        return (f"{word} not ", f"{word} ") if after == "not" else (f"{word} ", f"{word} not ")
    is_star = word == "*" and before in ("(", ",", "lambda")
    is_loop = word == "in" and (before == "not" or "for " in line[: token.start[1]])
    return None if is_star or is_loop or word not in _OTHER else (word, _OTHER[word])


def _tokens(source: str) -> list[tokenize.TokenInfo]:
    found: list[tokenize.TokenInfo] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            found.append(token)
    except (tokenize.TokenError, SyntaxError):  # what a policy has left need not be Python
        pass
    return found
