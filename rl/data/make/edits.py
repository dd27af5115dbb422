"""Edits of source files as changed lines, so that they can be kept, combined and written as patches."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rollout.sandbox.treediff import object_id


@dataclass(frozen=True, order=True)
class LineChange:
    """A line change replaces the lines start to end (from 0, end not included) of one file.

    lines: the new ones, with their line ends.
    """

    path: str
    start: int
    end: int
    lines: tuple[str, ...]


Edit = tuple[LineChange, ...]
"""An edit: changes in the order of path and line, none of which overlap."""


def between(path: str, old: str, new: str) -> Edit:
    """Return the edit that makes `new` of `old`."""
    before, after = lines_of(old), lines_of(new)
    same = _alike(before, after)
    before, after = before[same:], after[same:]
    if tail := _alike(before[::-1], after[::-1]):
        before, after = before[:-tail], after[:-tail]
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    return tuple(
        LineChange(path, same + start, same + end, tuple(after[first:last]))
        for kind, start, end, first, last in matcher.get_opcodes()
        if kind != "equal"
    )


def applied(edit: Iterable[LineChange], files: Mapping[str, str]) -> dict[str, str]:
    """Return the texts of the files that an edit changes, after it. files: the texts before, by path."""
    changed: dict[str, list[str]] = {}
    for change in sorted(edit, reverse=True):  # from the end, so that line numbers stay true
        lines = changed.setdefault(change.path, lines_of(files[change.path]))
        lines[change.start : change.end] = change.lines
    return {path: "".join(lines) for path, lines in changed.items()}


def combined(edits: Iterable[Edit]) -> Edit | None:
    """Return the edits as one; None if two of them touch each other."""
    changes = sorted(change for edit in edits for change in edit)
    for one, other in pairwise(changes):
        if one.path == other.path and one.end + 1 >= other.start:  # patches need a line between two hunks' changes
            return None
    return tuple(changes)


def patch(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """Return the git patch that turns the files of `old` into those of `new`, which may have more of them."""
    parts = []
    for path in sorted(new):
        before, after = old.get(path), new[path]
        if before == after:
            continue
        ids = [object_id(b"blob", text.encode()).hex()[:10] for text in (before or "", after)]
        head = f"index {ids[0]}..{ids[1]} 100644\n"
        if before is None:
            head = f"new file mode 100644\nindex {'0' * 10}..{ids[1]}\n"
        parts.append(f"diff --git a/{path} b/{path}\n{head}")
        names = ("/dev/null" if before is None else f"a/{path}", f"b/{path}")
        lines = difflib.unified_diff(lines_of(before or ""), lines_of(after), *names)
        parts += [line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines]
    return "".join(parts)


def _alike(one: Sequence[str], other: Sequence[str]) -> int:
    """Return how many lines at the start are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))


def lines_of(text: str) -> list[str]:
    """Return the lines of a text with their ends; a line ends with a line feed only, as git counts them."""
    lines = text.split("\n")
    return [line + "\n" for line in lines[:-1]] + lines[-1:] * bool(lines[-1])


def to_json(edit: Edit) -> list[list[object]]:
    """Return an edit as values of JSON."""
    return [[change.path, change.start, change.end, list(change.lines)] for change in edit]


def from_json(values: Sequence[Sequence]) -> Edit:
    """Return the edit that `to_json` wrote."""
    return tuple(LineChange(path, start, end, tuple(lines)) for path, start, end, lines in values)
