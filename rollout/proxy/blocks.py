"""Content blocks of the Anthropic Messages format, turned into text and chat messages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

ChatMessage = dict[str, Any]
Block = dict[str, Any]


def text_in(blocks: list[Block]) -> str:
    """Return the text blocks, joined."""
    return "".join(block.get("text", "") for block in blocks if block.get("type") == "text")


def blocks_of(content: str | list[Block]) -> list[Block]:
    """Return a message's content as blocks."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def flat(content: str | list[Block] | None) -> str:
    """Flatten a system prompt or a tool result to text, with a placeholder for each block that is not text."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(b["text"] if b["type"] == "text" else _placeholder(b) for b in content)


def _placeholder(block: Block) -> str:
    if block["type"] == "tool_reference":  # an answer of ToolSearch: this tool can be called from now on
        return f"[tool {block.get('tool_name')}]"
    source = block.get("source")
    media = source.get("media_type") if isinstance(source, dict) else None
    return f"[{block['type']}{f' ({media})' if media else ''} left out: this model reads text only]"


def context_chat(role: str, blocks: list[Block]) -> Iterator[ChatMessage]:
    """Yield a tool message for each tool result, and the text between them as messages of the sender's role."""
    for results, run in itertools.groupby(blocks, lambda block: block.get("type") == "tool_result"):
        if results:
            for one in run:
                yield {"role": "tool", "tool_call_id": one.get("tool_use_id", ""), "content": flat(one.get("content"))}
        else:
            yield {"role": role, "content": flat([*run])}


def assistant_chat(blocks: list[Block]) -> list[ChatMessage]:
    """Return the blocks of an assistant message as a chat message."""
    message: ChatMessage = {"role": "assistant", "content": text_in(blocks)}
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
