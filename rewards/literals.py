"""Draw wrong literals: of the same form and size as the right one, and as the file's author writes them.

The module runs in a box as a part of `rewards.falsify`, with Python 3.8 or later.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from typing import Any

_STRING = re.compile(r"""([rRbBuU]{0,2})(\"{3}|'{3}|"|')((?:(?!\2)[^\\]|\\.)*)\2""", re.DOTALL)
# Of a string's text: an escape, which stays, or a word, or a number.
_PIECES = re.compile(r"\\(?:x..|u....|U.{8}|N\{[^}]*\}|[0-7]{1,3}|.)|%\w|[A-Za-z]+|[0-9]+", re.DOTALL)
# How often a digit is drawn. With these weights, and never the same digit, digits stay as frequent as they are in
# the assertions of real tests.
_DIGITS = (320, 320, 151, 79, 41, 30, 21, 15, 14, 11)
_STYLES = (str.islower, str.isupper, str.istitle)


class Pool:
    """A pool is what a file's literals are made of: texts, words and numbers, each as often as it occurs."""

    def __init__(self, tree: Any, draw: random.Random) -> None:
        self.draw = draw
        self.texts: list[str] = []
        self.numbers: list[str] = []
        self.words: list[str] = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 200:
                self.texts.append(node.value)
                self.words += re.findall(r"[A-Za-z]+", node.value)
            elif isinstance(node, ast.Constant) and type(node.value) is int:
                self.numbers.append(str(node.value))

    def other(self, source: str) -> str | None:
        """Return another literal than this number, text, truth value or None; None if none can be drawn."""
        for _ in range(8):
            new = self._drawn(source)
            if new is not None and new != source and _differ(source, new):
                return new
        return None

    def fill(self, empty: str) -> str:
        """Return a list, tuple or dictionary with one element in place of an empty one."""
        one = repr(self.draw.choice(self.texts)) if self.texts and self.draw.random() < 0.5 else self._digit("")
        return {"[": f"[{one}]", "(": f"({one},)", "{": f"{{{one}: {self._digit('')}}}"}[empty[0]]

    def _drawn(self, source: str) -> str | None:
        if source in ("True", "False"):
            return "False" if source == "True" else "True"
        if source == "None":
            return self._digit("")
        strings = list(_STRING.finditer(source))
        if strings:
            match = self.draw.choice(strings)
            new = self._text(match[1].lower(), match[2], match[3])
            return None if new is None else source[: match.start(3)] + new + source[match.end(3) :]
        return self._number(source)

    def _number(self, source: str) -> str | None:
        if source.isdigit():
            return self._digits(source)
        if re.match(r"0[xXbBoO]", source):
            spots = [m.start() for m in re.finditer("[0-9]", source[2:])]
            if not spots:
                return None
            at = 2 + self.draw.choice(spots)
            digit = source[at]
            new = "10"[int(digit == "1")] if source[1] in "bB" else str((int(digit) + self.draw.choice((1, 7))) % 8)
            return source[:at] + new + source[at + 1 :]
        spots = [m.start() for m in re.finditer("[0-9]", re.split("[eEjJ]", source)[0])]
        leading = [at for at in spots if source[at] != "0"]
        spots = leading[:2] if len(leading) > 1 else leading or spots[:1]
        if not spots:
            return None
        at = self.draw.choice(spots)
        return source[:at] + self._digit(source[at], at == 0 and source[1:2].isdigit()) + source[at + 1 :]

    def _digits(self, source: str) -> str:
        """Return another number with as many digits; a round one stays round."""
        if len(source) == 1:
            return self._digit(source)
        same = [number for number in self.numbers if len(number) == len(source) and number != source]
        if same and self.draw.random() < 0.6:
            return self.draw.choice(same)
        kept = len(source) - len(source.rstrip("0")) or 0
        at = self.draw.randrange(max(1, len(source) - kept))
        return source[:at] + self._digit(source[at], at == 0) + source[at + 1 :]

    def _digit(self, old: str, leading: bool = False) -> str:
        weights = [0 if str(n) == old or (leading and not n) else weight for n, weight in enumerate(_DIGITS)]
        return str(self.draw.choices(range(10), weights)[0])

    def _text(self, prefix: str, quote: str, body: str) -> str | None:
        plain = "\\" not in body and "r" not in prefix and len(quote) == 1
        if plain and (not body or self.draw.random() < 0.3):
            same = [
                text for text in self.texts
                if _alike(text, body) and text.isascii() and text.isprintable() and not set(text) & {"\\", quote}
            ]  # fmt: skip
            if same:
                return self.draw.choice(same)
        pieces = [m for m in _PIECES.finditer(body) if m[0][0] not in "\\%"]
        if not pieces:
            if not body:
                return self.draw.choice("abxy")
            return None
        match = self.draw.choice(pieces)
        old = match[0]
        new = self._digits(old) if old.isdigit() else self._word(old)
        return body[: match.start()] + new + body[match.end() :]

    def _word(self, old: str) -> str:
        """Return a word of the file, of the same length and case if there is one, or the same with another letter."""
        style = [check(old) for check in _STYLES]
        alike = [w for w in self.words if w != old and [check(w) for check in _STYLES] == style]
        same = [w for w in alike if len(w) == len(old)]
        near = [w for w in alike if abs(len(w) - len(old)) <= 2] if len(old) > 2 else []
        if same or near:
            return self.draw.choice(same or near)
        at = self.draw.randrange(len(old))
        letters = "aeiou" if old[at] in "aeiou" else "AEIOU" if old[at] in "AEIOU" else "bcdfglmnprst"
        letter = self.draw.choice([one for one in letters if one != old[at].lower()])
        return old[:at] + (letter.upper() if old[at].isupper() else letter) + old[at + 1 :]


def leaves(node: Any, direct: bool = True) -> Iterator[tuple[ast.AST, bool]]:
    """Yield the literals in an expression, and whether the expression's value is certain to change with each.

    It is if only lists, tuples, dictionaries, sets and signs are around it.
    """
    if isinstance(node, ast.Constant):
        if node.value is not Ellipsis:
            yield node, direct
    elif (isinstance(node, (ast.List, ast.Tuple)) and not node.elts) or (isinstance(node, ast.Dict) and not node.keys):
        yield node, direct
    elif isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        for element in node.elts:
            yield from leaves(element, direct)
    elif isinstance(node, ast.Dict):
        for element in (*node.keys, *node.values):
            if element is not None:
                yield from leaves(element, direct)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield from leaves(node.operand, direct)
    elif not isinstance(node, (ast.JoinedStr, ast.Lambda)):
        for child in ast.iter_child_nodes(node):
            yield from leaves(child, False)


def _alike(text: str, body: str) -> bool:
    """Tell whether two texts could stand in each other's place: of one length, or nearly so, and of the same sort."""
    if text == body or abs(len(text) - len(body)) > len(body) // 8 + (not body) * 4:
        return False
    return not body or (text[:1].isalpha() == body[:1].isalpha() and (" " in text) == (" " in body))


def _differ(source: str, new: str) -> bool:
    try:
        old, value = ast.literal_eval(source), ast.literal_eval(new)
        return bool(old != value)
    except (ValueError, SyntaxError, TypeError, MemoryError):
        return False
