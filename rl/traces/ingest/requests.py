"""Rebuild the requests that Claude Code has noted in its session files, and prove them by their digests.

A record `api-request` names its messages by digests: those that it has in common with an earlier request (`base`,
`keep`) and the others (`tail`). A record `api-request-shape` has system prompt and tools, and `api-request-blob` has a
message that is not simply one of the transcript's. A digest is the SHA-256 of JSON without blanks and with sorted keys,
a message's content being a list of blocks. `requestDigest` is that of everything together.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from typing import Any, NamedTuple

import msgspec

from rl.traces.ingest.lines import LONE, repaired
from rollout.proxy.blocks import blocks_of


def canonical(value: Any) -> bytes:
    """Return a JSON value as the bytes that Claude Code takes digests of."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    try:
        return text.encode()
    except UnicodeEncodeError:  # JavaScript writes lone surrogates as escapes
        return LONE.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode()


class ShelfMessage(NamedTuple):
    """A ShelfMessage is a message on the shelf: its JSON as it was written, and in canonical form."""

    json: bytes
    canonical: bytes


class Shelf(OrderedDict[str, ShelfMessage]):
    """A shelf keeps messages by their digests, the newest ones of at most ``limit`` bytes together."""

    def __init__(self, limit: int = 32 << 20) -> None:
        super().__init__()
        self._limit, self._size = limit, 0

    def put(self, message: dict[str, Any]) -> str:
        """Keep a message, and return its digest."""
        content: Any = message.get("content")
        form = canonical({**message, "content": blocks_of(content)})
        digest = hashlib.sha256(form).hexdigest()
        if digest in self:
            self.move_to_end(digest)
            return digest
        self[digest] = kept = ShelfMessage(msgspec.json.encode(repaired(message)), form)
        self._size += len(kept.json) + len(form)
        while self._size > self._limit:
            _, old = self.popitem(last=False)
            self._size -= len(old.json) + len(old.canonical)
        return digest


class Recent(dict[Any, Any]):
    """A Recent is a dict; it forgets the oldest of more than ``limit`` entries."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        if len(self) > self._limit:
            del self[next(iter(self))]


class Sent:
    """A Sent is a message in a request. ``written``: its place in the states file (``claude_code.Thread._place``)."""

    __slots__ = ("before", "depth", "digest", "written")

    def __init__(self, before: Sent | None, digest: str) -> None:
        self.before, self.digest = before, digest
        self.depth: int = before.depth + 1 if before else 1
        self.written: tuple[int, int] | None = None


Shape = tuple[Any, Any]  # a system prompt and tools


class RequestFacts(msgspec.Struct):
    """This is what a record tells of its request, which has the first ``keep`` messages of request ``base``, and
    ``tail``. ``cacheControl``: where marks were, and which."""

    id: str | None = None
    base: str | None = None
    keep: int = 0
    tail: list[str] = []
    shapeHash: str = ""
    params: dict[str, Any] = {}
    cacheControl: list[dict[str, Any]] = []
    requestDigest: str = ""


class Requests:
    """Requests are what a session file has told of its requests so far."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._shapes = Recent(50)  # each with the canonical forms of its parts
        self._requests = Recent(2_000)
        self._sent = Recent(50_000)  # so that a conversation that is sent anew has the same places

    def shape(self, shape: dict[str, Any], digest: str) -> Shape:
        """Add a shape, and return it. Raises ValueError if it is not that of ``digest``."""
        if hashlib.sha256(canonical(shape)).hexdigest() != digest:
            raise ValueError("the shape's digest is another")
        made = repaired(shape.get("system", "")), repaired(shape.get("tools", []))
        self._shapes[digest] = made, {name: canonical(value) for name, value in shape.items()}
        return made

    def add(self, asked: RequestFacts) -> None:
        """Add a request."""
        last: Sent | None = None
        if asked.base is not None and asked.keep:
            known = self._requests.get(asked.base)
            last = known[0] if known else None
            while last is not None and last.depth > asked.keep:
                last = last.before
            if last is None or last.depth != asked.keep:
                return
        for digest in asked.tail:
            key = last, digest
            if key not in self._sent:
                self._sent[key] = Sent(last, digest)
            last = self._sent[key]
        if last is not None:
            self._requests[str(asked.id)] = last, asked

    def proven(self, name: str | None) -> tuple[Sent, Shape] | str:
        """Return a request's last message and its shape if its digest is the one in the file, else why it is not."""
        if name not in self._requests:
            return "no request is noted" if name is None else "its request is not in the file"
        last, asked = self._requests[name]
        if asked.shapeHash not in self._shapes:
            return "the request's system prompt is not in the file"
        shape, parts = self._shapes[asked.shapeHash]
        forms: list[bytes] = []
        at: Sent | None = last
        while at is not None:
            kept = self._shelf.get(at.digest)
            if kept is None:
                return "a message of the request is not in the file"
            forms.append(kept.canonical)
            at = at.before
        forms.reverse()
        parts = {name: canonical(value) for name, value in asked.params.items()} | parts
        try:
            for mark in asked.cacheControl:
                _mark(mark["path"], mark["value"], parts, forms)
        except (KeyError, IndexError, TypeError, ValueError):
            return "the request's digest is another"
        parts["messages"] = b"[" + b",".join(forms) + b"]"
        whole = b"{" + b",".join(canonical(part) + b":" + parts[part] for part in sorted(parts)) + b"}"
        same = hashlib.sha256(whole).hexdigest() == asked.requestDigest
        return (last, shape) if same else "the request's digest is another"


def _mark(path: list[Any], value: Any, parts: dict[str, bytes], forms: list[bytes]) -> None:
    """Put a mark where it was, as ["system", 1] or ["messages", 4, "content", 0] names it."""
    top, *steps = path
    texts: Any = forms if top == "messages" else parts
    name = steps.pop(0) if top == "messages" else top
    at = whole = json.loads(texts[name])
    for step in steps:
        at = at[step]
    at["cache_control"] = value
    texts[name] = canonical(whole)
