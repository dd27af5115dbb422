"""This module finds a text in everything that an episode has (what was said, answered, read, graded), or in many."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from rl.view.reading import Reading, composed
from rl.view.texts import excerpt
from rl.view.tokens import Texts, Vocabulary
from rollout.records import Record

MOST = 300  # hits that are shown


@dataclass(frozen=True)
class Hit:
    """A hit is one place of a text. ``what``: the kind of text that it is in, or tokens; ``turn``: the turn that has or
    reads that text (0: none); ``place``: the text's number in the turn; ``node``, ``token``: where the hit is in the
    tree (node -1: nowhere); ``before``, ``text``, ``after``: the hit with what is around it."""

    what: str
    turn: int
    place: int
    node: int
    token: int
    before: str
    text: str
    after: str


def find(reading: Reading, texts: Texts, wanted: str) -> tuple[list[Hit], int]:
    """Return the first hits, in the order of time, and how many there are. Case does not matter.

    A passage that is in a text as people read it, and also in the tokens of that text, counts as one hit.
    """
    found: list[Hit] = []
    count = 0
    pattern = re.compile(re.escape(wanted), re.IGNORECASE)
    for what, turn, place, node, text in _everything(reading, texts, pattern):
        for match in pattern.finditer(text):
            count += 1
            if len(found) < MOST:
                token = texts.token(node, match.start()) if node >= 0 else 0
                found.append(Hit(what, turn, place, node, token, *excerpt(text, match.start(), len(match[0]))))
    return found, count


def _everything(reading: Reading, texts: Texts, pattern: re.Pattern[str]) -> Iterator[tuple[str, int, int, int, str]]:
    """Yield (what, turn, place, node, text); the node is -1 where the text is not in the tree."""
    said: dict[int, list[tuple[str, int, str]]] = {}
    for turn, what, place, text in reading.texts():
        said.setdefault(turn.number, []).append((what, place, text))
    answered: set[int] = set()  # turns with a hit in a result, which the next one reads
    seen: set[int] = set()
    for turn in reading.turns:
        mine = [(what, place, text) for what, place, text in said.get(turn.number, ()) if pattern.search(text)]
        sampled = texts.of(turn.node) if turn.node >= 0 else ""
        if turn.after not in answered and not any(what in ("told", "asked") for what, *_ in mine):
            for node in (one for one in turn.context if one not in seen):
                yield "read", turn.number, 0, node, texts.of(node)
        seen.update(turn.context)
        if pattern.search(sampled):
            yield "said", turn.number, 0, turn.node, sampled
            mine = [one for one in mine if one[0] in _NOT_SAMPLED]
        answered |= {turn.number for what, *_ in mine if what == "result"}
        yield from ((what, turn.number, place, -1, text) for what, place, text in mine)
    record = reading.record
    yield "patch", 0, 0, -1, record.patch.decode("utf-8", "replace")
    yield "log", 0, 0, -1, str(record.verdict.get("log_tail", ""))
    yield "verdict", 0, 0, -1, f"{record.verdict.get('detail', '')}\n{reading.ending}"


_NOT_SAMPLED = ("result", "told", "asked")


class Query:
    """A query looks for a text in whole records, no matter in which case.

    It finds what ``find`` finds in an episode, and texts that no page shows; it says only whether there is one.
    """

    def __init__(self, wanted: str, words: Callable[[Record], Vocabulary]) -> None:
        # Bytes are quicker to search than text, and as good where lower() of bytes knows all letters.
        plain = all(one.isascii() or one.lower() == one.upper() for one in wanted)
        self._bytes = wanted.lower().encode("utf-8", "replace") if plain else b""
        self._text, self._words = wanted.casefold(), words

    def finds(self, data: bytes) -> bool:
        """Tell whether the text is in a record, which is given as its MessagePack. Raises msgspec.DecodeError."""
        if self._in(data):  # most texts are in it as they are
            return True
        record = msgspec.msgpack.decode(data, type=Record)
        if self._in("\0".join(composed(record)).encode("utf-8", "replace")):
            return True
        return self._in(self._words(record).data([node.ids for node in record.nodes]))

    def _in(self, data: bytes) -> bool:
        if self._bytes:
            return self._bytes in data.lower()
        return self._text in data.decode("utf-8", "replace").casefold()
