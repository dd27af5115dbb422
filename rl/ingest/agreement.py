"""This module compares two replies: do they call the same tools with the same arguments?

Arguments are the same if they mean the same: the order of keys, white space at the ends of a text, "3" for 3, and
parameters that are null or have no effect do not count. Two replies without a call agree: both end the turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from rl.ingest.states import Message

# Parameters that change nothing in what a call does: labels, and defaults that Claude Code adds.
_LABELS = {"description", "security_risk", "summary"}
_SILENT = {"Bash", "Agent", "Task", "execute_bash", "terminal"}
_DEFAULTS = {"replace_all": False, "run_in_background": False}
# How SWE-agent's models call a tool in a text.
_CALL = re.compile(r"<function=([^>\n]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)</parameter>", re.DOTALL)

Call = tuple[str, bytes]


def calls_of(action: Message) -> list[Call]:
    """Return the calls of a reply as (name, normalized arguments), in their order."""
    content = action["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    found: list[tuple[str, Any]] = [(one["name"], one["input"]) for one in blocks if one["type"] == "tool_use"]
    if not found:
        found = [call for one in blocks if one["type"] == "text" for call in _written(one["text"])]
    return [(name, _normalized(name, given)) for name, given in found]


def _written(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, body in _CALL.findall(text):
        yield name, {key: value.strip("\n") for key, value in _PARAMETER.findall(body)}


def _normalized(name: str, given: Mapping[str, Any]) -> bytes:
    kept = {
        key: _plain(value)
        for key, value in given.items()
        if value is not None
        and not (key in _LABELS and name in _SILENT)
        and not (key in _DEFAULTS and value == _DEFAULTS[key])
    }
    return msgspec.json.encode(kept, order="deterministic")


def _plain(value: Any) -> Any:
    """Return a value as what it means: numbers and truth values as texts, for models write them as either."""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"{value:g}" if isinstance(value, float) else str(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def same_call(one: Message, other: Message) -> bool:
    """Tell whether two replies call the same tools with the same arguments; the order of parallel calls is none."""
    return sorted(calls_of(one)) == sorted(calls_of(other))


def same_tool(one: Message, other: Message) -> bool:
    """Tell whether two replies call the same tools, with any arguments."""
    return sorted(name for name, _ in calls_of(one)) == sorted(name for name, _ in calls_of(other))
