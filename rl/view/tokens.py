"""An episode's tokens in the session tree: which were shared, which branched, and which were trained on."""

from __future__ import annotations

import functools
import heapq
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy

from rl.metrics.trained import EpisodeTraining
from rollout.records import NodeRecord, Record, pack_ids, unpack_floats, unpack_ids

MOST = 2000  # tokens of a node that are sent at once
_JUMPS = 24
_SHADES = 8  # colours of a scale
_GAP, _LANE = 6, 22  # of the map, in its units
# A byte-level tokenizer writes each byte as one visible character: the byte's own one, or one of those from 256 on.
_VISIBLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_BYTES = {chr(one): one for one in _VISIBLE}
_BYTES |= {chr(256 + at): one for at, one in enumerate(one for one in range(256) if one not in _VISIBLE)}


class Vocabulary:
    """A vocabulary writes token ids as text. ``problem`` says why it cannot, and is empty if it can."""

    def __init__(self, model: Path) -> None:
        self.problem = ""
        self._codec: Any = None
        self.special: frozenset[int] = frozenset()
        try:
            from tokenizers import Tokenizer

            self._codec = Tokenizer.from_file(str(model / "tokenizer.json"))
            self.special = frozenset(self._codec.get_added_tokens_decoder())
        except Exception as error:  # the package raises bare Exceptions
            self.problem = f"the policy's tokenizer is not at {model} ({error}); say with --model where it is"

    def text(self, ids: Sequence[int]) -> str:
        """Return what ids say; their numbers if there is no tokenizer."""
        if self._codec is None:
            return "".join(f"{one} " for one in ids)
        return self._codec.decode(list(ids), skip_special_tokens=False)

    def data(self, parts: Sequence[bytes]) -> bytes:
        """Return what packed ids say, in UTF-8, with a zero byte between parts.

        This takes a tenth of the time of ``text`` if the decoder is a byte-level one.
        """
        if self._codec is None or self._bytes is None:
            size = 4 * MOST  # as ``Texts`` does it
            cut = ([ids[at : at + size] for at in range(0, len(ids), size)] for ids in parts)
            return "\0".join("".join(self.text(unpack_ids(one)) for one in ids) for ids in cut).encode()
        starts, sizes, data = self._bytes
        known = numpy.frombuffer(pack_ids([len(sizes) - 1]).join(parts), dtype="<i4")
        if known.size and not 0 <= known.min() <= known.max() < len(sizes):
            known = known[(known >= 0) & (known < len(sizes))]
        lengths = sizes.take(known)
        at = numpy.repeat(starts.take(known) + lengths - lengths.cumsum(dtype=sizes.dtype), lengths)
        at += numpy.arange(at.size, dtype=at.dtype)
        return data.take(at).tobytes()

    @functools.cached_property
    def _bytes(self) -> tuple[Any, Any, Any] | None:
        """Return where each id's bytes begin, how many there are, and all of them; None if ids depend on each other.

        After the last id there is one more, which is a zero byte.
        """
        if type(self._codec.decoder).__name__ != "ByteLevel":
            return None
        known = self._codec.get_vocab(with_added_tokens=True)
        pieces = [b""] * (max(known.values(), default=-1) + 1)
        for token, number in known.items():
            values = [_BYTES.get(one) for one in token]
            pieces[number] = token.encode() if None in values else bytes(values)  # ty: ignore
        pieces.append(b"\0")
        sizes = numpy.array([len(one) for one in pieces], dtype=numpy.int32)  # half as long to move as int64
        starts = sizes.cumsum(dtype=sizes.dtype) - sizes
        return starts, sizes, numpy.frombuffer(b"".join(pieces), dtype=numpy.uint8)

    @functools.lru_cache(maxsize=1 << 17)  # noqa: B019  there is one per model
    def piece(self, one: int) -> str:
        """Return what an id says by itself."""
        if self._codec is None:
            return f"{one} "
        text = self._codec.decode([one], skip_special_tokens=False)
        return text or self._codec.id_to_token(one) or f"<{one}>"


@functools.lru_cache(maxsize=4)
def vocabulary(model: Path) -> Vocabulary:
    """Return the vocabulary of a model's directory."""
    return Vocabulary(model)


@dataclass
class MapNode:
    """A map node is a node that is drawn. ``start`` and ``end``: its tokens in its path; ``lane``: its line in the map.

    ``rows``: training rows that train it; ``ends``: rows that end with it; ``masked``: none of these has a
    mask of 1. ``x``, ``y``, ``width``: in the map's units.
    """

    node: int
    parent: int
    start: int
    end: int
    sampled: bool
    delivered: bool
    masked: bool
    lane: int = 0
    rows: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    x: float = 0.0
    y: float = 0.0
    width: float = 0.0

    @property
    def kind(self) -> str:
        """Return how it is drawn: context, trained, or the reason why not."""
        if not self.sampled:
            return "context"
        if self.rows and not self.masked:
            return "trained"
        return "lost" if not self.delivered else "served"


@dataclass
class TreeMap:
    """This is the map of an episode. ``edges``: (x, y of the parent's end, y of the branch); ``longest``: tokens."""

    places: list[MapNode]
    edges: list[tuple[float, float, float]]
    longest: int
    width: float
    height: float


def tree(record: Record, masked: bool = False, width: float = 1000.0) -> TreeMap:
    """Lay out the session tree: one line per branch, tokens from left to right, what is shared drawn once. masked: the
    run trains on none of its rows."""
    nodes = record.nodes
    places: list[MapNode] = []
    for number, node in enumerate(nodes):
        parent = node.parent if node.parent < number else -1
        start = places[parent].end if parent >= 0 else 0
        end, sampled = start + node.length, node.logprobs is not None
        places.append(MapNode(number, parent, start, end, sampled, node.delivered, masked))
    for number, row in enumerate(record.rows):
        known = [node for node in row.nodes if 0 <= node < len(places)]  # the audit says what is wrong with others
        for node in known:
            places[node].rows.append(number)
        if known:
            places[max(known)].ends.append(number)
    longest = max((one.end for one in places), default=0)
    lanes = _lanes(places)
    scale = (width - _GAP) / max(1, longest)
    for one in places:
        one.x, one.width = round(one.start * scale, 2), round(max(1.0, (one.end - one.start) * scale - 0.6), 2)
        one.y = one.lane * _LANE + 2
    edges = [
        (one.x, places[one.parent].y + _LANE / 2 - 3, one.y + _LANE / 2 - 3)
        for one in places
        if one.parent >= 0 and places[one.parent].lane != one.lane
    ]
    return TreeMap(places, edges, longest, width, lanes * _LANE)


def _lanes(places: list[MapNode]) -> int:
    """Give each node a line: the child on the longest path stays on its parent's. Return how many lines there are."""
    depth = [one.end for one in places]
    children: dict[int, list[int]] = {}
    for one in reversed(places):
        if one.parent >= 0:
            depth[one.parent] = max(depth[one.parent], depth[one.node])
    for one in places:
        children.setdefault(one.parent, []).append(one.node)
    used = 0
    waiting = [(node, -1) for node in reversed(children.get(-1, []))]
    while waiting:
        node, lane = waiting.pop()
        if lane < 0:
            lane, used = used, used + 1
        places[node].lane = lane
        found = sorted(children.get(node, []), key=lambda one: -depth[one])
        waiting += [(one, -1) for one in reversed(found[1:])] + [(one, lane) for one in found[:1]]
    return used


@dataclass(frozen=True)
class Token:
    """This is a token as it is shown. ``shade``, ``tilt``, ``haze``: 0 to 7, how improbable it was, how far trainer and
    rollout are apart, and how uncertain the policy was; None where that is not known."""

    at: int
    id: int
    text: str
    special: bool
    logprob: float | None = None
    version: int | None = None
    trainer: float | None = None
    ratio: float | None = None
    entropy: float | None = None

    @property
    def shade(self) -> int | None:
        """Return the class of its log-probability."""
        return None if self.logprob is None else min(_SHADES - 1, int(-self.logprob / 0.75))

    @property
    def tilt(self) -> int | None:
        """Return the class of the ratio's distance from 1."""
        return None if self.ratio is None else min(_SHADES - 1, int(abs(math.log(self.ratio)) / 0.03))

    @property
    def haze(self) -> int | None:
        """Return the class of its entropy."""
        return None if self.entropy is None else min(_SHADES - 1, int(self.entropy / 0.4))


def tokens(
    record: Record, node: int, words: Vocabulary, trained: EpisodeTraining | None, start: int = 0
) -> list[Token]:
    """Return at most ``MOST`` tokens of a node from ``start`` on."""
    one = record.nodes[node]
    ids = unpack_ids(one.ids[4 * start : 4 * (start + MOST)])
    versions = unpack_ids(one.versions) if isinstance(one.versions, bytes) else []
    told = trained.values.get(node) if trained else None
    columns: Any = (_logprobs(one), versions, told.logprobs if told else (), told.entropies if told else ())
    out = []
    for at, value in enumerate(ids, start):
        logprob, version, trainer, entropy = (column[at] if at < len(column) else None for column in columns)
        ratio = _ratio(trainer, logprob)
        text, special = words.piece(value), value in words.special
        out.append(Token(at, value, text, special, logprob, version, trainer, ratio, entropy))
    return out


def _logprobs(node: NodeRecord) -> list[float]:
    return unpack_floats((node.logprobs or b"")[: len(node.ids)])


def _ratio(trainer: float | None, rollout: float | None) -> float | None:
    if trainer is None or rollout is None:
        return None
    return math.exp(max(-50.0, min(50.0, trainer - rollout)))


@dataclass(frozen=True)
class Jump:
    """A jump is a token worth a look: ``value`` is its log-probability, or the ratio of trainer to rollout."""

    node: int
    at: int
    text: str
    value: float


def improbable(record: Record, words: Vocabulary) -> list[Jump]:
    """Return the sampled tokens with the lowest log-probabilities, the lowest first."""
    nodes = enumerate(record.nodes)
    found = ((value, node, at, value) for node, one in nodes for at, value in enumerate(_logprobs(one)))
    return _jumps(record, words, found)


def tilted(record: Record, words: Vocabulary, trained: EpisodeTraining | None) -> list[Jump]:
    """Return the sampled tokens whose probabilities in trainer and rollout differ most; empty where that is unknown."""
    if trained is None:
        return []
    found = []
    for node, one in enumerate(record.nodes):
        if told := trained.values.get(node):
            for at, (mine, theirs) in enumerate(zip(_logprobs(one), told.logprobs, strict=False)):
                found.append((-abs(theirs - mine), node, at, _ratio(theirs, mine) or 0.0))
    return _jumps(record, words, found)


def _jumps(record: Record, words: Vocabulary, found: Any) -> list[Jump]:
    return [
        Jump(node, at, words.piece(*unpack_ids(record.nodes[node].ids[4 * at : 4 * at + 4])), value)
        for _, node, at, value in heapq.nsmallest(_JUMPS, found)
    ]


class Texts:
    """Texts are what the nodes of an episode say, with the place of each token in them."""

    def __init__(self, record: Record, words: Vocabulary) -> None:
        self._record, self._words = record, words
        self._known: dict[int, tuple[str, list[int]]] = {}

    def of(self, node: int) -> str:
        """Return the text of a node."""
        return self._made(node)[0]

    def token(self, node: int, character: int) -> int:
        """Return the number of a node's token that has a character of the node's text."""
        ends = self._made(node)[1]
        chunk = bisect_right(ends, character)
        ids, at = self._chunk(node, chunk), character - (ends[chunk - 1] if chunk else 0)
        return MOST * chunk + bisect_right(range(len(ids)), at, key=lambda n: len(self._words.text(ids[: n + 1])))

    def _chunk(self, node: int, number: int) -> list[int]:
        return unpack_ids(self._record.nodes[node].ids[4 * MOST * number : 4 * MOST * (number + 1)])

    def _made(self, node: int) -> tuple[str, list[int]]:
        """Return the text of a node, and where each ``MOST`` of its tokens end: a list of all ends would be large."""
        if node not in self._known:
            chunks = range(-(-self._record.nodes[node].length // MOST))
            texts = [self._words.text(self._chunk(node, number)) for number in chunks]
            self._known[node] = "".join(texts), list(accumulate(map(len, texts)))
        return self._known[node]
