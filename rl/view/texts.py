"""Make hostile text readable (terminal sequences, invisible marks, great lengths), and show diffs."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

HEAD, TAIL = 12_000, 4_000  # characters of a long text that a page shows
_AROUND = 60  # characters before and after a hit
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
# Bidirectional and invisible marks: they can make a line read as what it is not.
_MARKS = re.compile("[\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufeff\ufff9-\ufffb]")
_CONTROLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"} | {0x7F: "\u2421"}
_CONTROLS |= {code: f"\\x{code:02x}" for code in range(0x80, 0xA0)}
_SURROGATES = re.compile("[\ud800-\udfff]")
_PAIRS = 10_000  # of lines that are compared with each other; more are shown as taken away and added


def clean(text: Any) -> str:
    """Return a text that is harmless to show: without terminal sequences, with visible control characters."""
    text = str(text).replace("\r\n", "\n")
    text = _SURROGATES.sub("\ufffd", _ESCAPES.sub("", text)).translate(_CONTROLS)
    return _MARKS.sub(lambda mark: f"\u27e8U+{ord(mark[0]):04X}\u27e9", text)


def visible(piece: str) -> str:
    """Return the text of one token; its line ends are visible, too."""
    return clean(piece.replace("\r", "\u240d")).replace("\n", "\u21b5\n") or "\u2205"


@dataclass(frozen=True)
class Cut:
    """A cut is a text as a page shows it: ``head``, how many characters are left out, ``tail``."""

    head: str
    left_out: int = 0
    tail: str = ""


def cut(text: Any, head: int = HEAD, tail: int = TAIL) -> Cut:
    """Return the two ends of a text, cleaned."""
    text = str(text)
    if len(text) <= head + tail:
        return Cut(clean(text))
    return Cut(clean(text[:head]), len(text) - head - tail, clean(text[-tail:]))


@dataclass
class DiffView:
    """A DiffView is a file's part of a patch: (kind, text) of its lines, kind being add, del, hunk, meta or same."""

    name: str
    lines: list[tuple[str, str]] = field(default_factory=list)

    @property
    def added(self) -> int:
        """Count the added lines."""
        return sum(kind == "add" for kind, _ in self.lines)

    @property
    def removed(self) -> int:
        """Count the removed lines."""
        return sum(kind == "del" for kind, _ in self.lines)


def patch(text: str) -> list[DiffView]:
    """Return the files of a git patch, whatever is in it."""
    found: list[DiffView] = []
    body = False
    for line in text.splitlines():
        if line.startswith("diff --git ") or not found:
            name = re.sub(r"^diff --git (?:a/)?(.*?) (?:b/)?\S*$", r"\1", line)
            found.append(DiffView(clean(name)))
            body = False
        kind = "meta"
        if line.startswith("@@"):
            kind, body = "hunk", True
        elif body:
            kind = {"+": "add", "-": "del", "\\": "meta"}.get(line[:1], "same")
        found[-1].lines.append((kind, clean(line)))
    return found


def compared(old: str, new: str) -> list[tuple[str, str]]:
    """Return (kind, text) of the lines of two texts, as in a patch with all context."""
    before, after = old.splitlines(), new.splitlines()
    shorter = min(len(before), len(after))
    head = next((n for n in range(shorter) if before[n] != after[n]), shorter)
    rest = shorter - head
    tail = next((n for n in range(rest) if before[-1 - n] != after[-1 - n]), rest)
    until, end = len(before) - tail, len(after) - tail
    first, last = ([("same", f" {clean(one)}") for one in part] for part in (before[:head], before[until:]))
    return [*first, *_compared(before[head:until], after[head:end]), *last]


def _compared(before: Sequence[str], after: Sequence[str]) -> Iterator[tuple[str, str]]:
    changes = [("replace", 0, len(before), 0, len(after))]
    if len(before) * len(after) <= _PAIRS:
        changes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    for what, a, b, c, d in changes:
        if what == "equal":
            yield from (("same", f" {clean(one)}") for one in before[a:b])
        else:
            yield from (("del", f"-{clean(one)}") for one in before[a:b])
            yield from (("add", f"+{clean(one)}") for one in after[c:d])


def excerpt(text: str, at: int, length: int) -> tuple[str, str, str]:
    """Return what stands before a hit, the hit, and what stands after it, in one line."""
    end = at + length
    parts = text[max(0, at - _AROUND) : at], text[at:end], text[end : end + _AROUND]
    before, hit, after = (clean(one).replace("\n", "\u21b5") for one in parts)
    return before, hit, after
