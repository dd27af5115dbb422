"""The gate for replies: which can be learned from, the same for all formats, wherever a conversation came from.

The rules are those of the Messages API: each call has one result, in the messages that come next; ids of calls are
unique; two replies never follow each other; a reply does not stand in its own context, and says more than a thought.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollout.proxy.blocks import blocks_of

Message = dict[str, Any]
UNASKED = "nothing was asked before it"
TWICE = "two replies in a row"
PENDING = "a call before it has no result in the next message"
STRAY = "a result before it answers no call"
AGAIN = "an id of a call stands twice before it"
OWN = "it stands in its own context"
SILENT = "a thought alone, or nothing"


@dataclass(frozen=True)
class GateState:
    """A gate state is what the rules must know of a conversation up to one of its messages. ``before``: that of the
    message before, None for the first; ``pending``: calls without a result; ``why``: the rule that is broken."""

    before: GateState | None
    role: str
    calls: frozenset[str]
    pending: frozenset[str]
    why: str


class Gate:
    """A gate watches one conversation, which may branch."""

    def __init__(self) -> None:
        self._named: dict[str, list[GateState]] = {}  # by the id of a call, where it stands

    def after(self, before: GateState | None, message: Message) -> GateState:
        """Return the place of a message that comes after ``before``."""
        role, calls, answered = message["role"], ids(message, "tool_use"), ids(message, "tool_result")
        last, pending, why = (before.role, before.pending, before.why) if before else ("", frozenset[str](), "")
        if role == "system":
            role = last  # stands anywhere
        elif role == "assistant":
            twice = len(set(calls)) < len(calls) or any(self._stands(name, before) for name in calls)
            broken = {UNASKED: not last, PENDING: bool(pending), TWICE: last == role, AGAIN: twice}
            why = why or next((rule for rule, breaks in broken.items() if breaks), "")
            pending = frozenset(calls)
        else:
            stray = len(set(answered)) < len(answered) or not set(answered) <= pending
            why = why or (STRAY if stray else "")
            pending -= set(answered)
        place = GateState(before, role, frozenset(calls), pending, why)
        for name in calls:
            self._named.setdefault(name, []).append(place)
        return place

    def wrong(self, before: GateState | None, reply: Message) -> str:
        """Return the rule that a reply to the conversation up to ``before`` breaks; "" if none."""
        calls = ids(reply, "tool_use")
        if before is None or not before.role:
            return UNASKED
        if before.why or before.pending:
            return before.why or PENDING
        if any(self._stands(name, before) for name in calls):
            return OWN
        if before.role == "assistant":
            return TWICE
        if len(set(calls)) < len(calls):
            return AGAIN
        texts = (str(one.get("text") or "") for one in blocks_of(reply["content"]) if one["type"] == "text")
        return "" if calls or any(text.strip() for text in texts) else SILENT

    def _stands(self, name: str, before: GateState | None) -> bool:
        places = self._named.get(name)
        while places and before is not None:
            if any(before is one for one in places):
                return True
            before = before.before
        return False


def ids(message: Message, kind: str) -> list[str]:
    """Return the ids of the calls that a message makes (tool_use), or answers (tool_result)."""
    key, content = "id" if kind == "tool_use" else "tool_use_id", message["content"]
    blocks = content if isinstance(content, list) else []
    return [str(block.get(key)) for block in blocks if isinstance(block, dict) and block.get("type") == kind]
