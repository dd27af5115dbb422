"""Define what a front end is, and what it remembers of a session; no I/O.

A front end translates a request of its API, message by message, into the form of the Messages API, in which sessions,
records and the audit know a conversation. A request repeats the whole conversation, so what translating a message gave
is remembered by a hash of its bytes (``Translated``), and only new messages are translated.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from rollout.proxy.blocks import Block
from rollout.proxy.replies import Reply
from rollout.proxy.tree import Tree
from rollout.proxy.wire import RequestError, WireRequest, hashed

# Bytes of translations that are kept of one session.
_MOST = 32 << 20
_ENTRY = 200  # of a dictionary
Unit = tuple[msgspec.Raw, bytes]
Tools = tuple[msgspec.Raw, dict[str, str]]


class Translated:
    """A Translated remembers the translations of one session's messages, each with its hash, and those of its heads.

    When it holds too much it is emptied; messages are then translated again, which costs time but changes no result.
    """

    def __init__(self) -> None:
        self.units: dict[bytes, Unit] = {}  # hash of what came -> the message
        self.heads: dict[bytes, Tools] = {}  # hash of tools -> translated, with their marks
        self.sides: dict[bytes, bool] = {}  # hash of what came -> whether it is the assistant's, where several are one
        self.replied: dict[bytes, list[str]] = {}  # hash of a conversation -> replies that were made for it
        self._size = 0

    def keep(self, digest: bytes, message: Block) -> Unit:
        """Return a translated message with its hash, and remember it."""
        raw = msgspec.Raw(msgspec.json.encode(message))
        self._grow(len(raw) + _ENTRY)
        unit = self.units[digest] = raw, hashed(raw)
        return unit

    def tools(self, raw: msgspec.Raw, translate: Callable[[msgspec.Raw], tuple[list[Block], dict[str, str]]]) -> Tools:
        """Return tools in the form of the Messages API, and their marks (``translating.offered``)."""
        known = self.heads.get(digest := hashed(raw))
        if known is None:
            tools, marks = translate(raw)
            found = msgspec.Raw(msgspec.json.encode(tools))
            self._grow(len(found))
            known = self.heads[digest] = found, marks
        return known

    def new_heads(self, *raws: msgspec.Raw) -> int:
        """Return the bytes of those tools and system prompts that are not known."""
        return sum(len(raw) for raw in raws if hashed(raw) not in self.heads)

    def keep_side(self, digest: bytes, side: bool) -> None:
        """Remember whose a part of a message is."""
        self._grow(_ENTRY)
        self.sides[digest] = side

    def keep_reply(self, place: bytes, reply_id: str) -> None:
        """Remember for which conversation a reply is made."""
        replied = self.replied.setdefault(place, [])
        if reply_id not in replied:
            self._grow(_ENTRY)
            replied.append(reply_id)

    def _grow(self, size: int) -> None:
        self._size += size
        if self._size > _MOST:
            for kept in (self.units, self.heads, self.sides, self.replied):
                kept.clear()
            self._size = size


A = TypeVar("A")


class Answer(ABC):
    """An Answer writes one reply, in the form of an API. ``model``: the name that the client asked for.

    ``input_tokens``: those of the prompt, 0 if only the reply will tell.
    """

    def __init__(self, reply_id: str, model: str, input_tokens: int) -> None:
        self.id, self.model, self.input_tokens = reply_id, model, input_tokens
        self.created = int(time.time())

    @abstractmethod
    def whole(self, reply: Reply) -> Any:
        """Return the body of a reply that is not streamed, as it is encoded as JSON."""

    def begin(self) -> bytes:
        """Return the events that come before the reply is sampled."""
        return b""

    def ping(self) -> bytes:
        """Return what keeps a stream open while the reply is being sampled."""
        return b": ping\n\n"

    @abstractmethod
    def rest(self, reply: Reply) -> bytes:
        """Return all events after those of ``begin``."""

    @abstractmethod
    def failed(self, error: RequestError) -> bytes:
        """Return the event of a failure after the stream has begun."""


class Front(ABC, Generic[A]):
    """A Front answers one API. ``name``: of its translations in a session; those of "" need none."""

    name: str

    @abstractmethod
    def read(self, body: bytes, path: str) -> A:
        """Decode a body, but not yet its messages. Raises RequestError."""

    @abstractmethod
    def new_bytes(self, asked: A, known: Translated, tree: Tree) -> int:
        """Return how many bytes of a request have to be translated."""

    @abstractmethod
    def wire(self, asked: A, known: Translated, tree: Tree) -> WireRequest:
        """Return a request in the form of the Messages API. Raises RequestError."""

    @abstractmethod
    def answer(self, asked: A, reply_id: str, input_tokens: int) -> Answer:
        """Return what writes the reply to a request."""

    @abstractmethod
    def error(self, error: RequestError, asked: A | None = None) -> tuple[int, Any]:
        """Return the status and the body of an error, as JSON; bytes are events. ``asked``: None if it is not known."""

    def counted(self, tokens: int) -> Any:
        """Return the body of a count of tokens, if the API has a path for that."""
        raise NotImplementedError
