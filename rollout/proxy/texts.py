"""This module takes long texts in pieces, between which other threads get their turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

_REMINDER, _REMINDER_END = "<system-reminder>", "</system-reminder>"
# The size of a piece in characters.
PIECE = 1 << 16


def pieces(text: str) -> Iterator[str]:
    """Yield a text in pieces of at most ``PIECE`` characters."""
    return (text[at : at + PIECE] for at in range(0, len(text), PIECE))


def squeezed(text: str) -> str:
    """Return a text without white space and reminders, in linear time whatever the text is."""
    kept: list[str] = []
    at = 0
    while (start := text.find(_REMINDER, at)) >= 0 and (end := text.find(_REMINDER_END, start)) >= 0:
        kept.append(text[at:start])
        at = end + len(_REMINDER_END)
    kept.append(text[at:])
    return "".join("".join(piece.split()) for part in kept for piece in pieces(part))


def texts_in(value: Any) -> Iterator[str]:
    """Yield the texts in a JSON value, in any order."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, (dict, list)):
            left += value.values() if isinstance(value, dict) else value


def tokens_beyond(texts: Sequence[str], most: float, encode: Callable[[str], list[int]]) -> int:
    """Return 0 if texts have at most ``most`` tokens, else how many were counted until they were more."""
    tokens = 0
    for piece in pieces("\n".join(texts)):
        tokens += len(encode(piece))
        if tokens > most:
            return tokens
    return 0
