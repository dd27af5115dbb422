"""This module keeps calls as they went over the wire: what the agent sent, and what it was answered. It does no I/O.

The session tree holds tokens, and a hosted model has not even those. A collection keeps messages, too.
"""

from __future__ import annotations

from typing import Any

import msgspec

from rollout.proxy.messages import WireRequest

# Bytes of messages that are kept of one session. Anybody in the box can send requests, of any size.
_MOST = 256 << 20


class CallRecord(msgspec.Struct, omit_defaults=True):
    """A call record is one call that was answered. Its parts are named by their places in ``Conversation.parts``.

    ``node``: the index of the reply's sampled node in the session tree; -1 for a forwarded call, whose ``reply`` is the
    body of the endpoint's answer. ``started``: Unix time; ``seconds``: until the reply was sent.
    """

    messages: list[int]
    system: int = -1
    tools: int = -1
    side: bool = False
    node: int = -1
    reply: dict[str, Any] = {}
    started: float = 0.0
    seconds: float = 0.0


class Conversation:
    """A conversation is what a session's agent sent, each message once, and the calls that consist of these.

    ``parts``: JSON texts, byte for byte. ``lost``: calls that are not in it, because they are too large or their reply
    cannot be read.
    """

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.calls: list[CallRecord] = []
        self.lost = 0
        self._places: dict[bytes, int] = {}
        self._size = 0

    def add(self, wire: WireRequest, call: CallRecord) -> None:
        """Add ``call``, whose request is ``wire``."""
        if self._size > _MOST:
            self.lost += 1
            return
        call.messages = [self._place(raw) for raw in wire.messages]
        call.system, call.tools = self._place(wire.system), self._place(wire.tools)
        self.calls.append(call)

    def _place(self, raw: msgspec.Raw) -> int:
        text = bytes(raw)
        if text not in self._places:
            self._places[text] = len(self.parts)
            self.parts.append(text)
            self._size += len(text)
        return self._places[text]


def reply_in(heard: bytes) -> dict[str, Any] | None:
    """Return the message that an endpoint sent, as JSON or as server-sent events; None if it is not a whole one."""
    try:
        if heard.lstrip()[:1] == b"{":
            return _whole(msgspec.json.decode(heard))
        message: dict[str, Any] = {}
        blocks: dict[int, dict[str, Any]] = {}
        for line in heard.splitlines():
            if not line.startswith(b"data:"):
                continue
            event = msgspec.json.decode(line[5:])
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
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    return None


def _whole(message: dict[str, Any]) -> dict[str, Any] | None:
    kinds = isinstance(message.get("id"), str) and all(isinstance(one["type"], str) for one in message["content"])
    return message if kinds else None


def _add(block: dict[str, Any], delta: dict[str, Any]) -> None:
    for name in ("text", "thinking", "signature", "partial_json"):
        if name in delta:
            block[name] = block.get(name, "") + delta[name]
    if "citation" in delta:
        block["citations"] = [*(block.get("citations") or []), delta["citation"]]


def _closed(block: dict[str, Any]) -> dict[str, Any]:
    if "partial_json" in block:
        text = block.pop("partial_json")
        block["input"] = msgspec.json.decode(text) if text else {}
    return block
