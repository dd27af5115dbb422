"""Conversations, which are chat messages in OpenAI's form, made from an episode's trace.

A conversation is one training row: a chain of replies in which each prompt extends the one before it, so the main
thread, each sub-agent, and what follows a compaction are conversations of their own. Its replies are those that were
sampled, with thinking and calls, not what the agent sent back of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rewards.verdict import Outcome
from rollout.proxy.blocks import ChatMessage
from rollout.records import Record
from rollout.trace import Point, Trace, chat_of, ends, system_of, trace


class UnreadableEpisode(ValueError):
    """The messages of an episode cannot be told. The message is one line."""


def agent_name(record: Record) -> str:
    """Return the name of the program that played an episode, as exports have it."""
    return str(record.agent.get("name") or record.agent.get("kind", "claude_code").replace("_", "-"))


@dataclass
class ChatConversation:
    """A conversation has messages in chat form: role, content (a text), and for the assistant reasoning_content and
    tool_calls, whose arguments are objects.

    ``replies``: by place in ``messages``, the points that these are; other assistant messages are the agent's own.
    ``fresh``: the places of those that no earlier conversation has. ``kind``: main, agent (a sub-agent's) or side;
    ``caller``: the id of the call that started the sub-agent.
    """

    trace: Trace
    messages: list[ChatMessage]
    tools: list[dict[str, Any]]
    replies: dict[int, Point]
    fresh: list[int]
    kind: str
    caller: str


def conversations(record: Record) -> list[ChatConversation]:
    """Return an episode's conversations, in the order in which they ended. Raises UnreadableEpisode and TraceError."""
    found = trace(record)
    if not found.points:
        raise UnreadableEpisode("it has neither tokens nor messages")
    if found.silent:
        raise UnreadableEpisode("its messages were not kept, as in all training runs before version 4 of the format")
    lost = record.verdict["outcome"] == Outcome.INFRA_FAILURE  # it trains nothing
    rows = ends(found.points, {*range(len(found.points))}) if lost else found.rows
    return [_conversation(found, row) for row in rows if row]


def tokens(point: Point) -> tuple[tuple[int, int, int], int]:
    """Return how many tokens a reply has read (new ones, from a cache, into a cache), and how many it has; 0 if the
    endpoint does not tell."""
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens", "output_tokens")
    *read, written = (value if isinstance(value := point.usage.get(name), int) else 0 for name in names)
    return (read[0], read[1], read[2]), written


def _conversation(found: Trace, row: list[int]) -> ChatConversation:
    last = found.points[max(row)]
    messages = system_of(last)
    replies: dict[int, Point] = {}
    names: dict[str, str] = {}  # by the id of a call, the tool that it is for
    for message, point in [*found.context(last), ({"role": "assistant", "content": last.blocks}, last)]:
        for one in chat_of([message]):
            if point is not None:
                replies[len(messages)] = point
            names |= {call["id"]: call["function"]["name"] for call in one.get("tool_calls", ())}
            called = names.get(one.get("tool_call_id", ""))
            messages.append({**one, "name": called} if called else one)
    tools = []
    for one in last.tools:
        given = schema if isinstance(schema := one.get("input_schema"), dict) else {}
        about = {"name": one.get("name"), "description": one.get("description") or "", "parameters": given}
        tools.append({"type": "function", "function": about})
    fresh = [place for place, point in replies.items() if point.number in row]
    return ChatConversation(found, messages, tools, replies, fresh, last.kind, last.caller)
