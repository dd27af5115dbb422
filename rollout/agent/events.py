"""An agent's event stream: lines of JSON that it prints, in the form of Claude Code's stream-json.

Any process in the box can write to such a stream, so it is hostile input. ``read`` keeps what a record can hold; the
other functions take any event that it returns, and those of records, whatever is in them.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from rollout import storable

_PARTS = 1 << 20  # lines and values of a stream, about 100 bytes each once read; an episode of 200 turns has 20,000
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_OURS = re.compile(r"toolu_([0-9a-f]+(?:_[0-9a-f]+)+)[0-9a-f]{2}")


def read(output: bytes) -> list[dict[str, Any]]:
    """Return the events of an output, one per line.

    Lines that are no JSON object are left out (a time-out cuts one, the policy's commands may print some), and so are
    those that nest more than 64 deep or have an integer of more than 64 bits, and all that follows a million lines and
    values.
    """
    events, parts = [], 0
    for line in io.BytesIO(output):
        parts += 1
        if line.lstrip().startswith(b"{"):
            bare = _STRING.sub(b"", line)
            parts += sum(map(bare.count, (b"{", b"[", b",")))
        elif parts <= _PARTS:
            continue
        if parts > _PARTS:
            break
        try:
            event = msgspec.json.decode(line)
        except (ValueError, RecursionError):  # msgspec's own errors are ValueErrors
            continue
        if isinstance(event, dict) and storable(event):
            events.append(event)
    return events


def blocks(event: dict[str, Any], *kinds: str) -> list[dict[str, Any]]:
    """Return the content blocks of an event, if its type is one of ``kinds``; a text is one text block.

    Each block is a dict, of which nothing else is known.
    """
    message = event.get("message")
    if event.get("type") not in kinds or not isinstance(message, dict):
        return []
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []


def commands(blocks: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield what the calls among these blocks run, read or search for; not what they write."""
    for block in blocks:
        asked = block.get("input")
        if block.get("type") == "tool_use" and isinstance(asked, dict):
            values = [asked.get(name) for name in ("command", "file_path", "path", "pattern")]
            yield from (value for value in values if isinstance(value, str))


def message_id(event: dict[str, Any]) -> str:
    """Return the id of an event's message; empty if it has none."""
    message = event.get("message")
    named = message.get("id") if isinstance(message, dict) else None
    return named if isinstance(named, str) else ""


def reply_of(call_id: str) -> str:
    """Return the id of the reply that one of the proxy's calls is in, by the call's id; empty if it is none of them."""
    return f"msg_{ours[1]}" if (ours := _OURS.fullmatch(call_id)) else ""


def usage(event: dict[str, Any]) -> tuple[int, int]:
    """Return the tokens of all prompts and of all replies of a run, as the agent's last event adds them up."""
    models = event.get("modelUsage")
    if event.get("type") != "result" or not isinstance(models, dict):
        return 0, 0
    used = [model for model in models.values() if isinstance(model, dict)]
    prompts = ("inputTokens", "cacheReadInputTokens", "cacheCreationInputTokens")
    replies = sum(_count(model.get("outputTokens")) for model in used)
    return sum(_count(model.get(kind)) for model in used for kind in prompts), replies


def output_tokens(reply: dict[str, Any]) -> int:
    """Return the tokens of a reply of the Messages API, as the endpoint counts them."""
    used = reply.get("usage")
    return _count(used.get("output_tokens")) if isinstance(used, dict) else 0


def _count(value: Any) -> int:
    return value if isinstance(value, int) and 0 <= value < 1 << 40 else 0
