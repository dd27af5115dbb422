"""Requests in the Anthropic Messages wire format, read as spans and as chat messages; no I/O.

A request's conversation is represented in two forms:

* *Spans* are what the session tree compares. The conversation is cut wherever it changes between context (user
  messages, tool results, system messages) and the assistant. Claude Code rewrites the history that it sends back: a
  list of text blocks becomes a string, ``cache_control`` moves, reminders are appended to old messages. A span's key
  therefore leaves out everything that is known to change and keeps everything that carries meaning.
* *Chat messages* are what a chat template renders (OpenAI's roles: system, user, assistant, tool).

Every request repeats the whole conversation, so most of each body has been seen before, byte for byte. Messages are
cut out of the body without being decoded (``msgspec.Raw``). A ``MessageMemory`` remembers what decoding a
message gave, by a hash of its bytes, so that only new messages are decoded.

The format is documented at https://docs.anthropic.com/en/api/messages; details follow what Claude Code 2.1 sends.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import msgspec

from rollout.proxy.blocks import Block, ChatMessage, assistant_chat, blocks_of, context_chat, flat, text_in
from rollout.proxy.texts import squeezed
from rollout.proxy.wire import SYSTEM, TOOLS, RequestError, WireMessage, WireRequest, WireTool, decoded, hashed

Identity = tuple[bytes, bytes, frozenset[str], frozenset[str]]  # what Span.identify sets

# Claude Code sends "(no content)" in place of a reply that had no content at all; this is that text squeezed.
_NO_CONTENT = "(nocontent)"

# One for all spans that have no ids: each would be one more object for the garbage collector to visit.
_NO_IDS: frozenset[str] = frozenset()


class Span:
    """A Span is a run of consecutive messages of one side, which is either context or the assistant.

    ``first`` is the index of its first message in the request. ``key`` identifies its content and is the same for all
    the ways in which clients are known to rewrite it. An assistant span also has ``tool_ids``, those of its tool_use
    blocks, ``signatures``, those of its thinking, and ``said``, the key of its text. Clients send the ids that we
    issued back unchanged, whatever else they rewrite.
    """

    def __init__(
        self, raws: Sequence[msgspec.Raw], first: int, assistant: bool, fresh: Mapping[int, WireMessage] | None = None
    ) -> None:
        """``fresh``: messages of the request that are decoded already, by their indices."""
        self._raws, self.first, self.assistant, self._fresh = raws, first, assistant, fresh or {}
        self._messages: list[WireMessage] | None = None
        self._exact = b""
        self.identify((b"", b"", _NO_IDS, _NO_IDS))

    @classmethod
    def of(cls, messages: list[WireMessage], assistant: bool) -> Span:
        """Make a span of messages that no client sent in this form."""
        span = cls((), 0, assistant)
        span._messages = messages
        span.identify(_identity(span))
        return span

    def identify(self, identity: Identity) -> None:
        """Set what identifies the span."""
        self.key, self.said, self.tool_ids, self.signatures = self.identity = identity

    @property
    def size(self) -> int:
        """Return the number of the span's bytes in the request."""
        return sum(map(len, self._raws))

    @property
    def exact(self) -> bytes:
        """Return a hash of all that the policy reads of the span, even what ``key`` leaves out. Raises RequestError."""
        if not self._exact:
            self._exact = hashed(msgspec.json.encode(self.chat))
        return self._exact

    @property
    def text(self) -> str:
        """Return the span's text, joined as a reply's is. Raises RequestError."""
        return "".join(text_in(blocks_of(message.content)) for message in self.messages())

    def messages(self) -> list[WireMessage]:
        """Return the span's messages, which are decoded on the first call. Raises RequestError."""
        if self._messages is None:
            self._messages = [
                self._fresh.get(at) or decoded(WireMessage, raw, f"messages[{at}]")
                for at, raw in enumerate(self._raws, self.first)
            ]
        return self._messages

    def wire(self) -> Sequence[bytes | msgspec.Raw]:
        """Return the span's messages as JSON: byte for byte as the client sent them, if it did."""
        return self._raws or [msgspec.json.encode(message) for message in self.messages()]

    @property
    def chat(self) -> list[ChatMessage]:
        """Return the span as chat messages. Raises RequestError."""
        chat: list[ChatMessage] = []
        for message in self.messages():
            blocks = blocks_of(message.content)
            chat.extend(assistant_chat(blocks) if self.assistant else context_chat(message.role, blocks))
        return chat


class Spans(Sequence[Span]):
    """The Spans of a request are its messages, cut between context and assistant; each is made when it is asked for.

    ``starts``: the index of each span's first message, and the number of messages. ``identities``: what identifies each
    span. ``assistant``: whether the first one is the assistant's; its side and the other take turns.
    """

    def __init__(
        self,
        messages: list[msgspec.Raw],
        starts: list[int],
        identities: list[Identity],
        assistant: bool,
        made: dict[int, Span],
    ) -> None:
        self._messages, self._made = messages, made
        self.starts, self.identities, self.assistant = starts, identities, assistant

    def __len__(self) -> int:
        """Return the number of spans."""
        return len(self.identities)

    @overload
    def __getitem__(self, at: int) -> Span: ...
    @overload
    def __getitem__(self, at: slice) -> list[Span]: ...
    def __getitem__(self, at: int | slice) -> Span | list[Span]:
        """Return one span, always the same object, or a list of them."""
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        if at < 0:
            at += len(self)
        identity = self.identities[at]  # raises IndexError
        span = self._made.get(at)
        if span is None:
            start, end = self.starts[at : at + 2]
            span = self._made[at] = Span(self._messages[start:end], start, self.assistant ^ bool(at % 2))
            span.identify(identity)
        return span


@dataclass(eq=False)
class Head:
    """A Head is the system prompt and the tools (in chat form) of a request. ``key`` identifies both.

    ``encoded``: whether the last prompt that began with it took little time to encode, as the next one will.
    """

    key: bytes
    system: str
    tools: tuple[dict[str, Any], ...]
    encoded: bool = False


@dataclass(frozen=True)
class Conversation:
    """A Conversation is a request in the form that the session tree works on."""

    head: Head
    spans: Spans


@dataclass(frozen=True, eq=False)
class _Before:
    """This is an earlier request: the hashes of its messages, and what they were cut into (``Spans``)."""

    digests: list[bytes]
    starts: list[int]
    identities: list[Identity]
    assistant: bool


# How many earlier requests a new one is compared with: those of the agent and of its sub-agents.
_RECENT = 4


class MessageMemory:
    """A MessageMemory remembers what decoding the messages of one session gave, in a few dozen bytes per message.

    The keys are hashes of the messages' bytes. A dictionary that has ``limit`` entries is emptied before the next one
    is added; after that, messages are decoded again, which costs time but changes no result.
    """

    def __init__(self, limit: int = 100_000) -> None:
        self.limit = limit
        self.sides: dict[bytes, bool] = {}  # message -> whether it is the assistant's
        self.spans: dict[bytes, Identity] = {}  # messages of a span -> what identifies it
        self.kept: set[bytes] = set()  # messages that have entered the tree
        self._recent: list[_Before] = []

    def keep(self, kind: dict[bytes, Any], digest: bytes, value: Any) -> None:
        """Store ``value`` in ``kind``, one of the two dictionaries."""
        if len(kind) >= self.limit:
            kind.clear()
            self.kept.clear()
        kind[digest] = value

    def entered(self, request: WireRequest) -> None:
        """Remember that a request has entered the tree."""
        if len(self.kept) >= self.limit:
            self.kept.clear()
        self.kept.update(request.digests)

    def new_bytes(self, request: WireRequest) -> int:
        """Return how many bytes of a request may have to be decoded or compared.

        They are the messages that are not in the tree, the last one, and system prompt and tools if they are new.
        """
        kept = self.kept
        new = [len(raw) for at, raw in zip(request.digests, request.messages, strict=True) if at not in kept]
        head = 0 if request.head_digest in _heads else request.head_size
        last = len(request.messages[-1]) if request.digests[-1] in self.kept else 0
        return head + last + sum(new)

    def before(self, digests: list[bytes]) -> tuple[_Before | None, int]:
        """Return the earlier request that begins with the most of these messages, and with how many."""
        most: tuple[_Before | None, int] = None, 0
        for before in self._recent:
            same = sum(itertools.takewhile(bool, map(operator.eq, digests, before.digests)))
            if same > most[1]:
                most = before, same
        return most

    def remember(self, now: _Before, before: _Before | None, same: int) -> None:
        """Note a request. It replaces ``before`` unless the two share less than half of that one's messages."""
        kept = [one for one in self._recent if one is not before or 2 * same < len(one.digests)]
        self._recent = [*kept[1 - _RECENT :], now]


def conversation(request: WireRequest, seen: MessageMemory | None = None) -> Conversation:
    """Cut a request into spans: adjacent messages of one side are one span, however the client splits them.

    Raises RequestError, which names the field that is wrong.
    """
    seen = seen or MessageMemory()
    digests = request.digests
    starts, identities, assistant = [0], list[Identity](), False
    fresh: dict[int, WireMessage] = {}
    before, same = seen.before(digests)
    if before is not None:
        # A span is the same if the message after it is, too: that one begins the next span.
        count = max(0, bisect.bisect_left(before.starts, same) - 1)
        starts, identities, assistant = before.starts[: count + 1], before.identities[:count], before.assistant
    start = starts[-1]
    sides = [
        _side(request, at, fresh, seen) if (side := seen.sides.get(digests[at])) is None else side
        for at in range(start, len(digests))
    ]
    if not identities:
        assistant = sides[0]
    made = dict[int, Span]()
    at, side = start, sides[0]
    for end in range(start + 1, len(digests) + 1):
        here = None if end == len(digests) else sides[end - start]
        if here is not side:
            made[len(identities)] = span = _span(Span(request.messages[at:end], at, side, fresh), digests[at:end], seen)
            identities.append(span.identity)
            starts.append(end)
            at, side = end, bool(here)
    spans = Spans(request.messages, starts, identities, assistant, made)
    if spans[-1].assistant:
        raise RequestError("messages: the last message may not be an assistant message (prefill is not supported)")
    seen.remember(_Before(digests, starts, identities, assistant), before, same)
    return Conversation(_head(request), spans)


def _side(request: WireRequest, index: int, fresh: dict[int, WireMessage], seen: MessageMemory) -> bool:
    """Decode a message, which is also put into ``fresh``; return whether it is the assistant's."""
    message = fresh[index] = decoded(WireMessage, request.messages[index], f"messages[{index}]")
    check_blocks(message.content, f"messages[{index}].content")
    seen.keep(seen.sides, request.digests[index], side := message.role == "assistant")
    return side


# The heads of all sessions. They are as large as prompts, but an agent and its sub-agents use only a few.
_heads: dict[bytes, Head] = {}
_MOST_HEADS, _LARGEST_HEAD = 64, 1 << 18
# vLLM's parser looks at each of them, on the event loop.
_MOST_TOOLS = 1_000


def _head(request: WireRequest) -> Head:
    head = _heads.get(request.head_digest)
    if head is None:
        content = decoded(SYSTEM, request.system, "system")
        check_blocks(content, "system")
        system = flat(content)
        wire = decoded(TOOLS, request.tools, "tools") or []
        if len(wire) > _MOST_TOOLS:
            raise RequestError(f"tools: at most {_MOST_TOOLS} are possible")
        tools = tuple(_chat_tool(tool) for tool in wire)
        key = _digest(["head", system, json.dumps(tools)])
        head = Head(key, system, tools)
        if request.head_size <= _LARGEST_HEAD:
            if len(_heads) >= _MOST_HEADS:
                _heads.clear()
            _heads[request.head_digest] = head
    return head


# The fields that a block of each type must have, with the types of their values.
_FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "text": {"text": str},
    "thinking": {"thinking": str},
    "tool_use": {"id": str, "name": str, "input": dict},
    "tool_result": {"tool_use_id": str, "content": (str, list, type(None))},
}


def check_blocks(content: str | list[Block], field: str) -> None:
    """Raise RequestError if a content has a block that lacks what a block of its type must have."""
    for i, block in enumerate(content if isinstance(content, list) else ()):
        kind = block.get("type")
        if not isinstance(kind, str):
            raise RequestError(f"{field}[{i}].type: a string is required")
        for name, wanted in _FIELDS.get(kind, {}).items():
            if not isinstance(block.get(name), wanted):
                raise RequestError(f"{field}[{i}].{name}: missing or of the wrong type in a {kind} block")
        if kind == "tool_result" and isinstance(block.get("content"), list):
            inner = block["content"]
            if not all(isinstance(part, dict) for part in inner):
                raise RequestError(f"{field}[{i}].content: a list of blocks is required")
            check_blocks(inner, f"{field}[{i}].content")


def text_key(text: str) -> bytes:
    """Return the key of an assistant span without calls: its text without white space and reminders, hashed."""
    said = squeezed(text)
    return _digest(["assistant", "" if said == _NO_CONTENT else said])


def _span(span: Span, digests: Sequence[bytes], seen: MessageMemory) -> Span:
    digest = digests[0] if len(digests) == 1 else hashed(b"".join(digests))
    known = seen.spans.get(digest)
    if known is None:
        known = _identity(span)
        seen.keep(seen.spans, digest, known)
    span.identify(known)
    return span


def _identity(span: Span) -> Identity:
    parts: list[str] = ["assistant" if span.assistant else "context"]
    tool_ids: set[str] = set()
    signatures: set[str] = set()
    for message in span.messages():
        for block in blocks_of(message.content):
            kind = block.get("type")
            if kind == "tool_use":
                tool_ids.add(str(block.get("id")))
                parts.append(f"tool_use:{block.get('id')}")
            elif kind == "tool_result":
                parts.append(f"tool_result:{block.get('tool_use_id')}:{squeezed(flat(block.get('content', '')))}")
            elif kind == "text":
                parts.append(squeezed(block.get("text", "")))
            elif kind == "thinking":  # clients send thinking back, or not, as they like
                signatures.add(str(block.get("signature")))
            elif kind != "redacted_thinking":
                parts.append(f"{kind}:{json.dumps(block.get('source'), sort_keys=True)}")
    said = text_key(span.text) if span.assistant else b""
    if span.assistant and not tool_ids:
        key = text_key("".join(parts[1:]))
        return key, said, _NO_IDS, frozenset(signatures) or _NO_IDS
    if not any(parts[1:]):  # only reminders, such as the news that a background agent has ended: they are the content
        texts = (flat(message.content) for message in span.messages())
        parts.append("".join("".join(texts).split()))
    # Clients merge and split text blocks; only tool results and images keep their borders.
    return _digest(_merge_text(parts)), said, frozenset(tool_ids) or _NO_IDS, frozenset(signatures) or _NO_IDS


def _merge_text(parts: list[str]) -> list[str]:
    merged: list[str] = []
    for part in parts:
        bordered = part.startswith(("tool_use:", "tool_result:", "image:", "document:"))
        if part and not bordered and merged and merged[-1].startswith("text:"):
            merged[-1] += part
        elif part:
            merged.append(part if bordered else f"text:{part}")
    return merged


def _chat_tool(tool: WireTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema or {}}
    return {"type": "function", "function": function}


def _digest(parts: list[str]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part.encode("utf-8", "surrogatepass"))
        digest.update(b"\0")
    return digest.digest()
