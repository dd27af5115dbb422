"""Search one episode or many for a text, in everything that was said, answered, read and graded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from rl.view.texts import excerpt
from rl.view.tokens import Texts, Vocabulary
from rl.view.turns import COMPACTED, EpisodeReading, composed
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


def find(reading: EpisodeReading, texts: Texts, wanted: str) -> tuple[list[Hit], int]:
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


def _everything(
    reading: EpisodeReading, texts: Texts, pattern: re.Pattern[str]
) -> Iterator[tuple[str, int, int, int, str]]:
    """Yield (what, turn, place, node, text); the node is -1 where the text is not in the tree."""
    answered: set[int] = set()  # turns with a hit in a result, which the next one reads
    seen: set[int] = set()
    for turn in reading.turns:
        mine = [one for one in turn.texts() if pattern.search(one[-1])]
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


class _Node(msgspec.Struct):
    ids: bytes
    says: bytes = b""


class _Ids(msgspec.Struct):
    """This is what a search needs of each record; to decode the whole of it would take longer than all the rest."""

    model: str
    nodes: list[_Node]
    parts: list[bytes] = []


# What ``composed`` may put between or instead of the strings of a record: marks, words, and what a number is made of.
_MARKS = re.compile(r"[\x00-\x1f\"'\\{}\[\]():,]")
_WORDS = f"true false null none nan -infinity {COMPACTED}".lower()
_NUMBER = re.compile(r"[\d.e+-]*")
# The end of an escape sequence, such as \n or \u001b, that stands before a string's own text.
_ESCAPE = re.compile(r"^(?:[ux0-9a-f]{1,9}|[nrt])")


class Query:
    """A query looks for a text in whole records, no matter in which case.

    It finds what ``find`` finds in an episode, and texts that no page shows; it says only whether there is one.
    """

    def __init__(self, wanted: str, words: Callable[[str], Vocabulary]) -> None:
        """Take the text, and what returns the vocabulary of a model."""
        # Bytes are quicker to search than text, and as good where lower() of bytes knows all letters.
        self._plain = all(one.isascii() or one.lower() == one.upper() for one in wanted)
        self._words = words
        text = wanted.lower() if self._plain else wanted.casefold()
        # A text without marks is in what is composed of a record only if this part of it is in one of the strings.
        core = _ESCAPE.sub("", text.strip())
        made = _MARKS.search(text) or _NUMBER.fullmatch(core) or core in _WORDS
        self._wanted, self._core = (
            self._folded(one.encode("utf-8", "replace")) for one in (text, "" if made else core)
        )

    def finds(self, data: bytes) -> bool:
        """Tell whether the text is in a record, which is given as its MessagePack. Raises msgspec.DecodeError."""
        whole = self._folded(data)
        near = self._core in whole
        if near and self._wanted in whole:  # most texts are in it as they are
            return True
        known = _DECODER.decode(data)
        sent = b"".join([*known.parts, *(node.says for node in known.nodes)])
        if near or b"\\u" in sent or b"\\/" in sent:  # as any letter can be written in JSON
            text = "\0".join(composed(msgspec.msgpack.decode(data, type=Record)))
            if self._wanted in self._folded(text.encode("utf-8", "replace")):
                return True
        return self._wanted in self._folded(self._words(known.model).data([node.ids for node in known.nodes]))

    def _folded(self, data: bytes) -> Any:
        return data.lower() if self._plain else data.decode("utf-8", "replace").casefold()


_DECODER = msgspec.msgpack.Decoder(_Ids)
