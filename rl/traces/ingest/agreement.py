"""The agreement of two replies: whether they call the same tools with the same arguments.

Arguments are the same if they mean the same: the order of keys, white space at the ends of a text, "3" for 3, and
parameters that are null or have no effect do not count. A call is read whatever its spelling: as a block, or in the
text of a model that was told to write it there. What looks like a call and cannot be read is not taken for "no call".
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from rl.traces.ingest.states import Message, State
from rollout.proxy.blocks import blocks_of

# Parameters that change nothing in what a call does: labels, and defaults that Claude Code adds.
_LABELS = {"description", "security_risk", "summary"}
_SILENT = {"Bash", "Agent", "Task", "execute_bash", "terminal"}
_DEFAULTS = {"replace_all": "false", "run_in_background": "false"}
# How models write calls in a text: SWE-agent's functions, JSON between marks or ticks, and a command between ticks.
# Of each, what begins and what ends it.
_CALL = re.compile(r"<function=([^>\n]+)>"), re.compile(r"</function>")
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>"), re.compile(r"</parameter>")
_JSON = [
    (re.compile(r"<tool_call>\s*(?=\{)"), re.compile(r"(?<=\})\s*</tool_call>")),
    (re.compile(r"```(?:json)?\s*(?=\{)"), re.compile(r"(?<=\})\s*```")),
]
_TICKS = re.compile(r"```(?:bash|sh|shell|mswea_bash_command)?[ \t]*\n(.*?)\n?```", re.DOTALL)
_MARKS = re.compile(r"<function=|<tool_call>|<invoke|\[TOOL_CALLS\]|<\uff5ctool")
COMMAND = "a command between ticks"

Call = tuple[str, bytes]


def calls_of(action: Message, spelled: bool = True) -> list[Call] | None:
    """Return the calls of a reply as (name, normalized arguments), in their order; None if one cannot be read.

    spelled: the recorded model was given no tools, so a command between ticks is a call.
    """
    blocks = blocks_of(action["content"])
    found: list[tuple[str, Any]] = [(one["name"], one["input"]) for one in blocks if one["type"] == "tool_use"]
    if not found:
        text = "\n".join(str(one["text"]) for one in blocks if one["type"] == "text")
        found = list(_written(text))
        if not found and _MARKS.search(text):
            return None
        if not found and spelled:
            found = [(COMMAND, {"command": one}) for one in _TICKS.findall(text)]
    return [(name, _normalized(name, given)) for name, given in found]


def spelled(state: State) -> bool:
    """Tell whether the recorded model wrote its calls in texts."""
    return not state.tools


def unknown(state: State) -> str:
    """Return what is not known of a state, so that nobody should be asked about it or learn from it; "" if nothing."""
    said = [state.student_action, *state.messages]
    calls = any(one["type"] == "tool_use" for m in said if isinstance(m["content"], list) for one in m["content"])
    agent = state.format in ("claude-code", "openhands")  # which always has both
    if not state.tools and (calls or agent):
        return "whose tools are not named (rl.ingest FORMAT --tools FILE gives them)"
    if agent and not state.messages[0]["content"]:
        return "whose system prompt is not known (rl.ingest FORMAT --system FILE gives it)"
    if calls_of(state.student_action, spelled(state)) is None:
        return "whose call cannot be read"
    return ""


def _written(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for begins, body in _between(text, *_CALL):
        yield begins[1], {key[1]: value.strip("\n") for key, value in _between(body, *_PARAMETER)}
    for _, found in itertools.chain.from_iterable(_between(text, *marks) for marks in _JSON):
        try:
            call = msgspec.json.decode(found)  # strict: what it takes can be written again
        except (ValueError, RecursionError):
            continue
        given = call.get("arguments", call.get("parameters", call.get("input")))
        if isinstance(call.get("name"), str) and isinstance(given, dict):
            yield call["name"], given


def _between(text: str, begins: re.Pattern[str], ends: re.Pattern[str]) -> Iterator[tuple[re.Match[str], str]]:
    """Yield what stands between two marks, each time after the first; one expression for all three would read the rest
    of the text again for each first mark without a second one."""
    at = 0
    while (first := begins.search(text, at)) and (last := ends.search(text, first.end())):
        yield first, text[first.end() : last.start()]
        at = last.end()


def _normalized(name: str, given: Mapping[str, Any]) -> bytes:
    kept = {key: _plain(value) for key, value in given.items() if value is not None}
    silent = {key for key in kept if (key in _LABELS and name in _SILENT) or kept[key] == _DEFAULTS.get(key, ...)}
    return msgspec.json.encode({key: kept[key] for key in kept.keys() - silent}, order="deterministic")


def _plain(value: Any) -> Any:
    """Return a value as what it means: numbers and truth values as texts, for models write them as either, and what is
    JSON in a text as what it says."""
    if isinstance(value, str):
        if value.lstrip()[:1] in ("{", "["):
            with contextlib.suppress(msgspec.DecodeError, RecursionError):
                return _plain(msgspec.json.decode(value))
        return value.strip()
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def same_call(one: Message, other: Message, spelled: bool = True) -> bool:
    """Tell whether two replies call the same tools with the same arguments; the order of parallel calls is none."""
    mine, theirs = calls_of(one, spelled), calls_of(other, spelled)
    return mine is not None and theirs is not None and sorted(mine) == sorted(theirs)


def same_tool(one: Message, other: Message, spelled: bool = True) -> bool:
    """Tell whether two replies call the same tools, with any arguments."""
    mine, theirs = calls_of(one, spelled), calls_of(other, spelled)
    return mine is not None and theirs is not None and sorted(n for n, _ in mine) == sorted(n for n, _ in theirs)
