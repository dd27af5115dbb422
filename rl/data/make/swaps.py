"""Swaps: the places of a source at which a word or an operator can be exchanged for its counterpart.

An exchange undoes itself: a place that has a bug is repaired by exchanging it again. So the places of a file are also
all the repairs that an agent can try, and one of them is right. A place is identified by its text and the word after
it, which must occur together only once: whoever wants to exchange something has to find both in the file.
"""

from __future__ import annotations

import io
import re
import tokenize
from dataclasses import dataclass, replace

_PAIRS = (
    ("<", "<="),
    (">", ">="),
    ("==", "!="),
    ("and", "or"),
    ("+", "-"),
    ("+=", "-="),
    ("True", "False"),
    ("0", "1"),
    ("is", "is not"),
    ("in", "not in"),
    ("2", "3"),
    ("any", "all"),
    ("min", "max"),
    ("lower", "upper"),
    ("lstrip", "rstrip"),
    ("startswith", "endswith"),
    ("find", "rfind"),
    ("split", "rsplit"),
    ("break", "continue"),
)
_OTHER = {one: other for pair in _PAIRS for one, other in (pair, pair[::-1])}
_TESTS = ("if", "elif", "while")
_KINDS = (tokenize.OP, tokenize.NAME, tokenize.NUMBER)
# What identifies a place: a word, a digit or signs that mean nothing to sed.
_NEXT = re.compile(r"\(?[A-Za-z_]+|[0-9]|\(|(?:[):,\]]*[,:] |[):,\]]+)(?=[\sA-Za-z0-9_]|$)")


@dataclass(frozen=True)
class Swap:
    """A swap exchanges the text ``old`` at a line (from 0) and column for ``new``. ``after``: what follows it there."""

    line: int
    column: int
    old: str
    new: str
    after: str = ""

    def applied(self, source: str) -> str:
        """Return the source of which it is one (``swaps``) after it."""
        lines = source.split("\n")
        text = lines[self.line]
        lines[self.line] = text[: self.column] + self.new + text[self.column + len(self.old) :]
        return "\n".join(lines)

    @property
    def texts(self) -> tuple[str, str]:
        """Return what stands there once, and what is to stand there."""
        return self.old + self.after, self.new + self.after


def swaps(source: str) -> list[Swap]:
    """Return, in order, the swaps of a source whose text occurs only once with what follows it: sed needs that.

    The first lines of functions, imports and other module statements have none. The source may be incomplete Python.
    """
    lines = source.split("\n")
    tokens = _tokens(source)
    found = []
    for number, token in enumerate(tokens):
        at = token.start[0] - 1
        if at >= len(lines) or not lines[at][:1].isspace() or token.start[0] != token.end[0]:
            continue
        after = tokens[number + 1].string if number + 1 < len(tokens) else ""
        before = tokens[number - 1].string if number else ""
        if (pair := _pair(lines[at], token, before, after)) is None:
            continue
        swap = _with_spaces(lines[at], Swap(at, token.start[1], *pair), token.type)
        following = _NEXT.match(lines[at], swap.column + len(swap.old))
        if following is not None and source.count(swap.old + following[0]) == 1:
            found.append(replace(swap, after=following[0]))
    return found


def _with_spaces(line: str, swap: Swap, kind: int) -> Swap:
    """Return the swap with the spaces around its operator or keyword, if a space follows.

    No space follows the sign of a number.
    """
    is_literal = kind == tokenize.NUMBER or swap.old in ("True", "False")
    if is_literal or not line.startswith(" ", swap.column + len(swap.old)):
        return swap
    before = " " if line[: swap.column].endswith(" ") and line[: swap.column].strip() else ""
    return Swap(swap.line, swap.column - len(before), f"{before}{swap.old} ", f"{before}{swap.new} ")


def _pair(line: str, token: tokenize.TokenInfo, before: str, after: str) -> tuple[str, str] | None:
    """Return what is exchanged at a token, None for nothing."""
    word = token.string
    if token.type not in _KINDS:
        return None
    rest = line[token.start[1] :]
    if word == "is" and after == "not":
        return ("is not", "is") if rest.startswith("is not") else None
    if word == "not" and after == "in":
        return ("not in", "in") if rest.startswith("not in") else None
    if word in _TESTS and line.lstrip().startswith(word):
        if after == "not":
            return (f"{word} not", word) if rest.startswith(f"{word} not") else None
        return word, f"{word} not"
    is_loop = word == "in" and (before == "not" or "for " in line[: token.start[1]])
    return None if is_loop or word not in _OTHER else (word, _OTHER[word])


def _tokens(source: str) -> list[tokenize.TokenInfo]:
    found: list[tokenize.TokenInfo] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            found.append(token)
    except (tokenize.TokenError, SyntaxError):  # what a policy has left need not be Python
        pass
    return found
