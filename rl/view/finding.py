"""This module finds a text in everything that an episode has: what was said, answered, read, and graded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from rl.view.reading import Reading
from rl.view.texts import excerpt
from rl.view.tokens import Texts

MOST = 300  # hits that are shown


@dataclass(frozen=True)
class Hit:
    """A hit has ``what`` it is in (a kind of text, or tokens), the ``turn`` that has or reads it (0: none), the place
    of its text in there, ``node`` and ``token`` where it is in the tree, and the text around it.
    """

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

    What is in a text as people read it and in the tokens that it was read or sampled as is one hit.
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
