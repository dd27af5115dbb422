"""Replies in the Anthropic Messages wire format, as one JSON body or as server-sent events; no I/O.

The format is documented at https://docs.anthropic.com/en/api/messages-streaming.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any

import msgspec

from rollout.proxy.messages import Block, text_key


@dataclass(frozen=True)
class Reply:
    """A Reply is one sampled assistant message as the client receives it.

    ``blocks`` are Anthropic content blocks. ``stop_reason`` is end_turn, tool_use, max_tokens or stop_sequence; in the
    last case ``stop_sequence`` is the sequence that was found.
    """

    id: str
    blocks: tuple[Block, ...]
    stop_reason: str
    input_tokens: int
    output_tokens: int
    stop_sequence: str | None = None

    # These are cached because every later request of the conversation is compared with them.
    @functools.cached_property
    def tool_ids(self) -> frozenset[str]:
        """Return the ids of the reply's tool_use blocks."""
        return frozenset(b["id"] for b in self.blocks if b["type"] == "tool_use")

    @functools.cached_property
    def text(self) -> str:
        """Return the reply's text blocks, joined."""
        return "".join(b["text"] for b in self.blocks if b["type"] == "text")

    @functools.cached_property
    def said(self) -> bytes:
        """Return the key of the reply's text."""
        return text_key(self.text)


def reply_json(reply: Reply, model: str) -> dict[str, Any]:
    """Return the body of a reply that is not streamed. ``model`` is the name that the client asked for."""
    return {
        "id": reply.id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [_signed(block, reply.id) for block in reply.blocks],
        "stop_reason": reply.stop_reason,
        "stop_sequence": reply.stop_sequence,
        "usage": {"input_tokens": reply.input_tokens, "output_tokens": reply.output_tokens},
    }


def _signed(block: Block, reply_id: str) -> Block:
    # Clients send thinking back only if it has a signature. Ours is the reply's id; nobody verifies it.
    return {**block, "signature": reply_id} if block["type"] == "thinking" else block


def reply_start_event(reply_id: str, model: str, input_tokens: int) -> bytes:
    """Return the first server-sent event, ``message_start``, which can be sent before the reply is sampled."""
    message = reply_json(Reply(reply_id, (), "", input_tokens, 0), model) | {"stop_reason": None}
    return sse("message_start", {"message": message})


def reply_events(reply: Reply) -> bytes:
    """Return all server-sent events of a sampled reply after ``message_start``, in one buffer."""
    out: list[bytes] = []
    for index, block in enumerate(reply.blocks):
        if block["type"] == "tool_use":
            start: Block = {**block, "input": {}}
            arguments = json.dumps(block["input"], ensure_ascii=False)
            deltas: list[Block] = [{"type": "input_json_delta", "partial_json": arguments}]
        elif block["type"] == "thinking":
            start = {"type": "thinking", "thinking": "", "signature": ""}
            deltas = [
                {"type": "thinking_delta", "thinking": block["thinking"]},
                {"type": "signature_delta", "signature": reply.id},
            ]
        else:
            start = {"type": "text", "text": ""}
            deltas = [{"type": "text_delta", "text": block["text"]}]
        out.append(sse("content_block_start", {"index": index, "content_block": start}))
        out += [sse("content_block_delta", {"index": index, "delta": delta}) for delta in deltas]
        out.append(sse("content_block_stop", {"index": index}))
    end = {"stop_reason": reply.stop_reason, "stop_sequence": reply.stop_sequence}
    out.append(sse("message_delta", {"delta": end, "usage": {"output_tokens": reply.output_tokens}}))
    out.append(sse("message_stop", {}))
    return b"".join(out)


def sse(event: str, data: dict[str, Any]) -> bytes:
    """Return one server-sent event whose JSON data is ``data`` with the event's name as its ``type``."""
    return b"event: %s\n%s" % (event.encode(), data_event({"type": event, **data}))


def data_event(data: Any) -> bytes:
    """Return one server-sent event without a name, whose data is on one line for clients that know more line ends."""
    encoded = msgspec.json.encode(data)
    for end, escaped in _LINE_ENDS:
        encoded = encoded.replace(end, escaped)
    return b"data: %b\n\n" % encoded


# NEL and the separators of lines and paragraphs, where some clients (httpx's readers of lines) end a line, too.
_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))
