"""Overlap of training tasks with held-out ones or SWE-bench Verified: repositories, diffs and problem statements."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KINDS = ("verified", "repo", "diff", "statement")

# All repositories of SWE-bench Verified. Tasks that are made of packages name these (`pypi/NAME`), not the owner.
VERIFIED = (
    "astropy/astropy",
    "django/django",
    "matplotlib/matplotlib",
    "mwaskom/seaborn",
    "pallets/flask",
    "psf/requests",
    "pydata/xarray",
    "pylint-dev/pylint",
    "pytest-dev/pytest",
    "scikit-learn/scikit-learn",
    "sphinx-doc/sphinx",
    "sympy/sympy",
)
_ALIKE = 0.8  # of the pieces that are in either of two texts, this share is in both
_PIECE = 4  # words of a piece
_SHORT = 16  # words; so short a change is compared with the lines around it


@dataclass(frozen=True)
class Overlap:
    """An Overlap is something that a task has in common: with what (an id or a repository), and how much of it."""

    instance_id: str
    kind: str
    other: str
    share: float = 1.0


def in_verified(repo: str, instance_id: str = "") -> bool:
    """Tell whether a task is of one of SWE-bench Verified's repositories.

    A repository is known by its name, whoever owns it (a fork, a package), and by `owner__name` in its own name or in
    the task's id, which is how task sets name theirs (`SWE-Gym/django__django`, `django__django-11001`).
    """
    name = repo.lower().rpartition("/")[2].replace("_", "-")
    return name in _VERIFIED_NAMES or any(_IN_A_NAME.search(text.lower()) for text in (repo, instance_id))


_VERIFIED_NAMES = frozenset(one.rpartition("/")[2] for one in VERIFIED)
_IN_A_NAME = re.compile(rf"(?:^|[/.])(?:{'|'.join(re.escape(one.replace('/', '__')) for one in VERIFIED)})(?:[.-]|$)")


def overlaps(training: Sequence[Mapping[str, Any]], heldout: Sequence[Mapping[str, Any]]) -> list[Overlap]:
    """Return what training tasks have in common with held-out ones and with SWE-bench Verified, in their order.

    Of each kind the most similar task is named. Rows need instance_id, repo, patch (or None) and problem_statement.
    """
    repositories = {row["repo"].lower(): row["instance_id"] for row in reversed(heldout)}
    indexes = {
        "diff": _Index((row["instance_id"], _of_diff(row["patch"] or "")) for row in heldout),
        "statement": _Index((row["instance_id"], _words(row["problem_statement"])) for row in heldout),
    }
    found = []
    for row in training:
        name, repo = row["instance_id"], row["repo"].lower()
        if in_verified(repo, name):
            found.append(Overlap(name, "verified", repo))
        if repo in repositories:
            found.append(Overlap(name, "repo", repositories[repo]))
        for kind, words in (("diff", _of_diff(row["patch"] or "")), ("statement", _words(row["problem_statement"]))):
            other, share = indexes[kind].nearest(words)
            if share >= _ALIKE:
                found.append(Overlap(name, kind, other, round(share, 3)))
    return found


class _Index:
    """An index finds the text that has most pieces in common with another."""

    def __init__(self, texts: Iterable[tuple[str, Sequence[str]]]) -> None:
        self._sizes: dict[str, int] = {}
        self._places: dict[tuple[str, ...], list[str]] = {}
        for name, words in texts:
            pieces = _pieces(words)
            self._sizes[name] = len(pieces)
            for piece in pieces:
                self._places.setdefault(piece, []).append(name)

    def nearest(self, words: Sequence[str]) -> tuple[str, float]:
        """Return the name of the most similar text, and the share of pieces that both have."""
        pieces = _pieces(words)
        common = Counter(name for piece in pieces for name in self._places.get(piece, ()))
        shares = [(count / (len(pieces) + self._sizes[name] - count), name) for name, count in common.items()]
        share, name = max(shares, default=(0.0, ""))
        return name, share


def _pieces(words: Sequence[str]) -> set[tuple[str, ...]]:
    return {tuple(words[at : at + _PIECE]) for at in range(max(1, len(words) - _PIECE + 1))} if words else set()


def _words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text.lower())


def _of_diff(patch: str) -> list[str]:
    """Return the words of a patch's changed lines, with the lines around them if they are few.

    A bug and its fix count as the same: removed and added lines are not told apart.
    """
    body = [line for line in patch.split("\n") if line[:1] in ("+", "-", " ") and line[:4] not in ("+++ ", "--- ")]
    changed = sorted(line[1:].strip() for line in body if line[0] != " ")
    words = _words("\n".join(changed))
    return words if len(words) >= _SHORT else _words("\n".join(sorted(line[1:].strip() for line in body)))
