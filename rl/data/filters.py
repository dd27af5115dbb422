"""Filters of converted rows, their seeded order, and a split that is stable when rows are added."""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Row = dict[str, Any]


@dataclass(frozen=True)
class Selection:
    """A selection holds the filters; one that is None or empty is off.

    repos: shell patterns, case-insensitive.
    difficulties: exact values of the set's own scale.
    min_failing, max_failing: number of FAIL_TO_PASS tests.
    min_statement, max_statement: characters of the problem statement.
    shuffle: the seed of a random order; None keeps the set's order.
    limit: the number of rows to keep, from the start of that order.
    """

    repos: Sequence[str] = ()
    instance_ids: Collection[str] = ()
    difficulties: Collection[str] = ()
    min_failing: int | None = None
    max_failing: int | None = None
    min_statement: int | None = None
    max_statement: int | None = None
    shuffle: int | None = None
    limit: int | None = None

    def dropped_by(self, row: Row) -> str | None:
        """Return the first filter that rejects the row, as the command line names it; None if the row passes."""
        repo, failing, statement = row["repo"].lower(), len(row["FAIL_TO_PASS"]), len(row["problem_statement"])
        checks = {
            "--repo": not self.repos or any(fnmatch.fnmatchcase(repo, pattern.lower()) for pattern in self.repos),
            "--instance-ids": not self.instance_ids or row["instance_id"] in self.instance_ids,
            "--difficulty": not self.difficulties or row["difficulty"] in self.difficulties,
            "--min-failing": self.min_failing is None or failing >= self.min_failing,
            "--max-failing": self.max_failing is None or failing <= self.max_failing,
            "--min-statement": self.min_statement is None or statement >= self.min_statement,
            "--max-statement": self.max_statement is None or statement <= self.max_statement,
        }
        return next((name for name, passed in checks.items() if not passed), None)

    def apply(self, rows: Iterable[Row]) -> tuple[list[Row], Counter[str]]:
        """Return the selected rows, and how many rows each filter dropped."""
        dropped: Counter[str] = Counter()
        left = []
        for row in rows:
            by = self.dropped_by(row)
            if by is None:
                left.append(row)
            else:
                dropped[by] += 1
        if self.shuffle is not None:
            # Sorted by a hash, not shuffled by a generator, so that the order of two rows does not depend on the rest.
            left.sort(key=lambda row: _share(self.shuffle, row["instance_id"]))
        if self.limit is not None and len(left) > self.limit:
            dropped["--limit"] = len(left) - self.limit
            left = left[: self.limit]
        return left, dropped


def split(rows: Sequence[Row], share: float, by: Literal["instance", "repo"], seed: int) -> tuple[list[Row], list[Row]]:
    """Return (training rows, held-out rows), with about `share` of the instances or repositories held out.

    A hash decides for each instance or repository on its own, so rows that are added later move no other row.
    """
    key = "instance_id" if by == "instance" else "repo"
    sides: tuple[list[Row], list[Row]] = ([], [])
    for row in rows:
        sides[_share(seed, row[key].lower()) < share].append(row)
    return sides


def share_of(text: str) -> float:
    """Return a share of an option. Raises ArgumentTypeError unless it is above 0 and at most 1."""
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return value


def _share(seed: int | None, name: str) -> float:
    """Return a number in [0, 1) that is the same on every machine."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7], "big") / 2**56
