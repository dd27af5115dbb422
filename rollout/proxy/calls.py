"""The calls and texts of a session, kept as they went over the wire, within a limit of bytes; no I/O.

Of a call that the policy answers, the session tree has the messages (``tree.Node.says``); of a forwarded call, there is
nothing but its messages.
"""

from __future__ import annotations

from typing import Any

import msgspec
import orjson

from rollout import SIDE_MODEL, storable
from rollout.proxy.wire import WireRequest

# Bytes of messages that are kept of one session. Anybody in the box can send requests, of any size.
_MOST = 256 << 20


class CallRecord(msgspec.Struct, omit_defaults=True):
    """A call record is one forwarded call that was answered. Its messages, system prompt and tools are named by their
    places in ``CallLog.parts``.

    ``reply``: the body of the endpoint's answer. ``started``: Unix time; ``seconds``: until the reply was sent.
    ``role``: ``rollout.proxy.roles``.
    ``node``: in records before version 4, the index of the sampled node that answered a call; -1 for a forwarded one.
    """

    messages: list[int]
    system: int = -1
    tools: int = -1
    side: bool = False
    node: int = -1
    reply: dict[str, Any] = {}
    started: float = 0.0
    seconds: float = 0.0
    role: str = ""


class CallLog:
    """A call log is what a session keeps of what was said.

    ``calls``: the forwarded ones; ``parts``: the JSON texts that they consist of, byte for byte and each once.
    ``lost``: counts texts and calls that were too much, or whose reply cannot be read. ``ids``: of the replies.
    """

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.calls: list[CallRecord] = []
        self.lost = 0
        self.ids = set[str]()
        self._places: dict[bytes, int] = {}
        self._size = 0

    def keep(self, text: bytes) -> bytes:
        """Return a text that is to be kept; an empty one if that would be too much."""
        if self._size + len(text) > _MOST:
            self.lost += 1
            return b""
        self._size += len(text)
        return text

    def forwarded(self, wire: WireRequest, heard: bytes, started: float, seconds: float, role: str = "") -> list[Any]:
        """Add a call that an endpoint has answered with the bytes ``heard``; return the reply's blocks."""
        reply = reply_in(heard)
        if reply is None or not self.keep(heard):
            self.lost += reply is None
            return reply["content"] if reply else []
        messages = [self._place(raw) for raw in wire.messages]
        head = self._place(wire.system), self._place(wire.tools)
        side = wire.model == SIDE_MODEL
        self.calls.append(CallRecord(messages, *head, side, -1, reply, started, seconds, role))
        return reply["content"]

    def _place(self, raw: msgspec.Raw) -> int:
        text = bytes(raw)
        if text not in self._places:
            self._places[text] = len(self.parts)
            self.parts.append(text)
            self._size += len(text)
        return self._places[text]


def reply_in(heard: bytes) -> dict[str, Any] | None:
    """Return the message that an endpoint sent, as JSON or as server-sent events; None if it is not a whole one.

    An integer of more than 64 bits, which no record can hold, is read as a float.
    """
    try:
        if heard.lstrip()[:1] == b"{":
            return _whole(orjson.loads(heard))
        message: dict[str, Any] = {}
        blocks: dict[int, dict[str, Any]] = {}
        for line in heard.splitlines():
            if not line.startswith(b"data:"):
                continue
            event = orjson.loads(line[5:])
            match event.get("type"):
                case "message_start":
                    message = event["message"]
                case "content_block_start":
                    blocks[event["index"]] = dict(event["content_block"])
                case "content_block_delta":
                    _add(blocks[event["index"]], event["delta"])
                case "message_delta":
                    usage = {**message.get("usage", {}), **(event.get("usage") or {})}
                    message |= {**event["delta"], "usage": usage}
                case "message_stop":
                    message["content"] = [_closed(blocks[index]) for index in sorted(blocks)]
                    return _whole(message)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    return None


def _whole(message: dict[str, Any]) -> dict[str, Any] | None:
    kinds = all(isinstance(one["type"], str) for one in message["content"])
    return message if kinds and storable(message) else None


def _add(block: dict[str, Any], delta: dict[str, Any]) -> None:
    for name in ("text", "thinking", "signature", "partial_json"):
        if name in delta:
            block[name] = block.get(name, "") + delta[name]
    if "citation" in delta:
        block["citations"] = [*(block.get("citations") or []), delta["citation"]]


def _closed(block: dict[str, Any]) -> dict[str, Any]:
    if "partial_json" in block:
        text = block.pop("partial_json")
        block["input"] = orjson.loads(text) if text else {}
    return block
