"""The shards of an array job: a batch cut into parts of whole groups (3/16: the third of 16)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

Piece = TypeVar("Piece")


@dataclass(frozen=True)
class Shard:
    """A shard is part ``number``, counted from 1, of a batch in ``count`` parts. It is given as "3/16" and shown as
    "3-of-16"."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read "3/16". Raises ValueError with one line."""
        number, slash, count = text.partition("/")
        if not (slash and number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
            raise ValueError(f"{text!r} is no shard; write its number and how many there are, from 1/16 to 16/16")
        return cls(int(number), int(count))

    def __str__(self) -> str:
        return f"{self.number}-of-{self.count}"

    def of(self, pieces: Iterable[Piece], group: Callable[[Piece], str]) -> list[Piece]:
        """Return the shard's part of the pieces, in their order: whole groups, the same in each process.

        The largest group goes first, each to the shard that has the fewest pieces so far.
        """
        pieces = list(pieces)
        sizes = Counter(group(piece) for piece in pieces)
        loads = [0] * self.count
        mine = set()
        for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
            least = loads.index(min(loads))
            loads[least] += size
            if least == self.number - 1:
                mine.add(name)
        return [piece for piece in pieces if group(piece) in mine]
