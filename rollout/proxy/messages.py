"""The Anthropic Messages wire format: requests in, replies out. Plain data, no I/O.

Two forms of a conversation come out of a request:

* *spans*, what the session tree compares: the conversation cut at every change between context (user,
  tool result, system) and assistant. Claude Code rewrites what it echoes (a list of text blocks becomes a
  string, ``cache_control`` moves, reminders are appended to old messages), so a span's key leaves out
  everything that is known to change and keeps everything that carries meaning.
* *chat messages*, what a chat template renders (OpenAI roles: system, user, assistant, tool).

Source of the format: https://docs.anthropic.com/en/api/messages and what Claude Code 2.1 sends.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

ChatMessage = dict[str, Any]
Block = dict[str, Any]

_REMINDER = re.compile(r"<system-reminder>.*?</system-reminder>", re.DOTALL)
# Claude Code puts this in place of a reply that had no content at all.
_NO_CONTENT = "(nocontent)"


class RequestError(Exception):
    """A request that cannot be answered. ``status`` and ``kind`` follow Anthropic's error table."""

    def __init__(self, message: str, status: int = 400, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind

    def body(self) -> bytes:
        return msgspec.json.encode({"type": "error", "error": {"type": self.kind, "message": str(self)}})


class WireMessage(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class WireTool(msgspec.Struct, omit_defaults=True):
    name: str
    input_schema: dict[str, Any] = {}
    description: str = ""


class WireRequest(msgspec.Struct):
    """The fields of a request that matter here; everything else is accepted and ignored."""

    messages: list[WireMessage]
    model: str = ""
    max_tokens: int = 0
    system: str | list[dict[str, Any]] = ""
    tools: list[WireTool] = []
    stop_sequences: list[str] = []
    stream: bool = False


_decoder = msgspec.json.Decoder(WireRequest)


def decode_request(body: bytes) -> WireRequest:
    """Read and check a request body. Raises RequestError naming the field that is wrong."""
    try:
        request = _decoder.decode(body)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(str(error)) from error
    if not request.messages:
        raise RequestError("messages: at least one message is required")
    if request.messages[-1].role == "assistant":
        raise RequestError("messages: the last message may not be an assistant message (prefill is not supported)")
    return request


@dataclass(frozen=True)
class Span:
    """A run of consecutive messages of one side.

    ``key`` identifies the content up to the rewrites a client makes; ``tool_ids`` are the tool_use ids of an
    assistant span (ours come back unchanged, whatever else was rewritten); ``chat`` is what the template sees.
    """

    assistant: bool
    key: bytes
    tool_ids: frozenset[str] = frozenset()
    chat: tuple[ChatMessage, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Conversation:
    """A request in the form that the session tree works on. ``head`` identifies system prompt and tools."""

    head: bytes
    system: str
    tools: tuple[dict[str, Any], ...]
    spans: tuple[Span, ...]


def conversation(request: WireRequest) -> Conversation:
    """Cut a request into spans. Adjacent messages of one side are one span, however the client splits them."""
    system = _text_of(request.system)
    tools = tuple(_chat_tool(tool) for tool in request.tools)
    spans: list[Span] = []
    run: list[WireMessage] = []
    for message in request.messages:
        if run and (run[-1].role == "assistant") != (message.role == "assistant"):
            spans.append(_span(run))
            run = []
        run.append(message)
    spans.append(_span(run))
    head = _digest(["head", _squeeze(system), json.dumps(tools, sort_keys=True)])
    return Conversation(head=head, system=system, tools=tools, spans=tuple(spans))


def text_key(text: str) -> bytes:
    """The key of an assistant span that is only text: what is left of it after white space and reminders."""
    squeezed = _squeeze(text)
    return _digest(["assistant", "" if squeezed == _NO_CONTENT else squeezed])


def _span(run: list[WireMessage]) -> Span:
    assistant = run[0].role == "assistant"
    chat: list[ChatMessage] = []
    parts: list[str] = ["assistant" if assistant else "context"]
    tool_ids: set[str] = set()
    for message in run:
        blocks = _blocks(message.content)
        chat.extend(_assistant_chat(blocks) if assistant else _context_chat(message.role, blocks))
        for block in blocks:
            kind = block.get("type")
            if kind == "tool_use":
                tool_ids.add(str(block.get("id")))
                parts.append(f"tool_use:{block.get('id')}")
            elif kind == "tool_result":
                parts.append(f"tool_result:{block.get('tool_use_id')}:{_squeeze(_text_of(block.get('content', '')))}")
            elif kind == "text":
                parts.append(_squeeze(block.get("text", "")))
            elif kind not in ("thinking", "redacted_thinking"):  # stripped from echoes at the client's will
                parts.append(f"{kind}:{json.dumps(block.get('source'), sort_keys=True)}")
    if assistant and not tool_ids:
        return Span(True, text_key("".join(parts[1:])), frozenset(), tuple(chat))
    # Text blocks are merged and split by the client: only tool results and images keep their borders.
    return Span(assistant, _digest(_merge_text(parts)), frozenset(tool_ids), tuple(chat))


def _merge_text(parts: list[str]) -> list[str]:
    merged: list[str] = []
    for part in parts:
        bordered = part.startswith(("tool_use:", "tool_result:", "image:", "document:"))
        if part and not bordered and merged and merged[-1].startswith("text:"):
            merged[-1] += part
        elif part:
            merged.append(part if bordered else f"text:{part}")
    return merged


def _blocks(content: str | list[Block]) -> list[Block]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _text_of(content: str | list[Block] | None) -> str:
    """Flatten a system prompt or a tool result to text; what is not text gets a placeholder one can read."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(b.get("text", "") if b.get("type") == "text" else f"[{b.get('type')}]" for b in content)


def _context_chat(role: str, blocks: list[Block]) -> Iterator[ChatMessage]:
    """Tool results become tool messages; the text around them one message of the sender's role, in order."""
    texts: list[str] = []

    def flush() -> Iterator[ChatMessage]:
        if texts:
            yield {"role": role, "content": "\n".join(texts)}
            texts.clear()

    for block in blocks:
        if block.get("type") == "tool_result":
            yield from flush()
            yield {
                "role": "tool",
                "tool_call_id": block.get("tool_use_id", ""),
                "content": _text_of(block.get("content")),
            }
        else:
            texts.append(_text_of([block]))
    yield from flush()


def _assistant_chat(blocks: list[Block]) -> list[ChatMessage]:
    message: ChatMessage = {
        "role": "assistant",
        "content": "".join(b.get("text", "") for b in blocks if b.get("type") == "text"),
    }
    thinking = "".join(b.get("thinking", "") for b in blocks if b.get("type") == "thinking")
    if thinking:
        message["reasoning_content"] = thinking
    calls = [
        {"id": b.get("id"), "type": "function", "function": {"name": b.get("name"), "arguments": b.get("input", {})}}
        for b in blocks
        if b.get("type") == "tool_use"
    ]
    if calls:
        message["tool_calls"] = calls
    return [message]


def _chat_tool(tool: WireTool) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema},
    }


def _squeeze(text: str) -> str:
    return "".join(_REMINDER.sub("", text).split())


def _digest(parts: list[str]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part.encode("utf-8", "surrogatepass"))
        digest.update(b"\0")
    return digest.digest()


@dataclass(frozen=True)
class Reply:
    """One sampled assistant message as the client gets it.

    ``blocks``: Anthropic content blocks; ``stop_reason``: end_turn, tool_use, max_tokens or stop_sequence.
    """

    id: str
    blocks: tuple[Block, ...]
    stop_reason: str
    input_tokens: int
    output_tokens: int

    @property
    def tool_ids(self) -> frozenset[str]:
        return frozenset(b["id"] for b in self.blocks if b["type"] == "tool_use")

    @property
    def text(self) -> str:
        return "".join(b["text"] for b in self.blocks if b["type"] == "text")


def reply_json(reply: Reply, model: str) -> dict[str, Any]:
    """The body of a non-streaming reply."""
    return {
        "id": reply.id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": list(reply.blocks),
        "stop_reason": reply.stop_reason,
        "stop_sequence": None,
        "usage": {"input_tokens": reply.input_tokens, "output_tokens": reply.output_tokens},
    }


def reply_start_event(reply_id: str, model: str, input_tokens: int) -> bytes:
    """The first server-sent event; it can go out before the reply is sampled."""
    message = {
        "id": reply_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": input_tokens, "output_tokens": 0},
    }
    return sse("message_start", {"message": message})


def reply_events(reply: Reply) -> bytes:
    """All server-sent events of a sampled reply after ``message_start``, as one buffer."""
    out: list[bytes] = []
    for index, block in enumerate(reply.blocks):
        if block["type"] == "tool_use":
            start: Block = {**block, "input": {}}
            delta: Block = {
                "type": "input_json_delta",
                "partial_json": json.dumps(block["input"], ensure_ascii=False),
            }
        else:
            start = {"type": "text", "text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        out.append(sse("content_block_start", {"index": index, "content_block": start}))
        out.append(sse("content_block_delta", {"index": index, "delta": delta}))
        out.append(sse("content_block_stop", {"index": index}))
    end = {"stop_reason": reply.stop_reason, "stop_sequence": None}
    out.append(sse("message_delta", {"delta": end, "usage": {"output_tokens": reply.output_tokens}}))
    out.append(sse("message_stop", {}))
    return b"".join(out)


def sse(event: str, data: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (event.encode(), msgspec.json.encode({"type": event, **data}))
