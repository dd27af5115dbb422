"""Turn OpenAI's chat messages, which most agents record, into those of Anthropic's Messages API."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rl.traces.ingest.states import Message
from rollout.proxy.blocks import blocks_of


def message_of(chat: Mapping[str, Any]) -> Message:
    """Return a chat message in Anthropic's form: tools' results are the user's. Raises ValueError if it is not one."""
    role = chat.get("role")
    content = chat.get("content")
    if role == "tool":
        called = chat.get("tool_call_id") or _first(chat.get("tool_call_ids"))
        if called is None:  # formats in which calls are text
            return {"role": "user", "content": _content(content)}
        return {"role": "user", "content": [result(str(called), _content(content))]}
    if role in ("user", "system", "developer"):
        return {"role": "user" if role == "user" else "system", "content": _content(content)}
    if role != "assistant":
        raise ValueError(f"a message with the role {role!r}")
    thought = chat.get("reasoning_content") or chat.get("reasoning")
    blocks: list[Message] = list(_thoughts(chat.get("thinking_blocks")))
    if isinstance(thought, str) and not blocks:
        blocks.append({"type": "thinking", "thinking": thought})
    if said := _content(content):
        blocks += blocks_of(said)
    calls = chat.get("tool_calls") or ()
    if not isinstance(calls, Sequence):
        raise ValueError("tool_calls is no list")
    blocks += [call_of(call) for call in calls]
    return {"role": "assistant", "content": blocks}


def result(called: str, content: str | list[Message]) -> Message:
    """Return the block of a tool's result."""
    return {"type": "tool_result", "tool_use_id": called, "content": content}


def call_of(call: Any) -> Message:
    """Return the block of a chat message's call; a call whose arguments are not a JSON object becomes text."""
    if not isinstance(call, Mapping):
        raise ValueError("a call that is no object")
    function = call.get("function") if isinstance(call.get("function"), Mapping) else call
    name, given = function.get("name"), function.get("arguments", {})
    if not isinstance(name, str):
        raise ValueError("a call without a name")
    if isinstance(given, str):
        with contextlib.suppress(ValueError, RecursionError):
            given = json.loads(given or "{}")
    if not isinstance(given, dict):
        return {"type": "text", "text": f"{name}({given})"}
    return {"type": "tool_use", "id": str(call.get("id")), "name": name, "input": given}


def tools_of(tools: Any) -> list[Message]:
    """Return tool definitions, given in either form, in Anthropic's; what is not a definition is left out."""
    found = []
    for tool in tools if isinstance(tools, Sequence) and not isinstance(tools, str) else ():
        function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            schema = function.get("parameters") or function.get("input_schema") or {"type": "object"}
            about = str(function.get("description") or "")
            found.append({"name": function["name"], "description": about, "input_schema": schema})
    return found


def _content(content: Any) -> str | list[Message]:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ValueError("a message whose content is neither text nor parts")
    blocks = [_part(part) for part in content]
    if all(block["type"] == "text" for block in blocks):
        return "\n".join(block["text"] for block in blocks)
    return blocks


def _part(part: Any) -> Message:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise ValueError("a part of a message that is no object")
    if part.get("type") == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    place = part.get("image_url")
    url = place.get("url") if isinstance(place, Mapping) else place
    url = url or _first(part.get("image_urls"))
    if part.get("type") in ("image_url", "image") and isinstance(url, str):
        kind, marked, data = url.removeprefix("data:").partition(";base64,")
        source = {"type": "base64", "media_type": kind, "data": data} if marked else {"type": "url", "url": url}
        return {"type": "image", "source": source}
    return {"type": "text", "text": json.dumps(part, ensure_ascii=False)}


def _thoughts(blocks: Any) -> Iterator[Message]:
    for block in blocks if isinstance(blocks, Sequence) else ():
        if isinstance(block, Mapping) and isinstance(block.get("thinking"), str):
            yield {"type": "thinking", "thinking": block["thinking"]}


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, Sequence) and not isinstance(value, str) and value else None
