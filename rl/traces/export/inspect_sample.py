"""The samples of Inspect's logs, made from episodes as plain JSON.

A sample has the messages of the last main conversation, and as events every reply and call of all conversations. A
sub-agent's are in a span, inside of that of the agent that started it, and so are those of a side call. The messages
are in ``events_data``, each once, and a reply refers to those that were before it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from datetime import UTC, datetime
from typing import Any

import msgspec

from rl.data.choice import ChoiceEntry
from rl.traces.export.conversation import ChatConversation, tokens
from rollout.agent import Status
from rollout.program import shown
from rollout.proxy.blocks import ChatMessage
from rollout.records import Record
from rollout.trace import Point

_STOPS = {"end_turn": "stop", "stop_sequence": "stop", "tool_use": "tool_calls", "max_tokens": "max_tokens"}
_STOPS |= {"refusal": "content_filter", "model_context_window_exceeded": "model_length"}
Json = dict[str, Any]


def clock(seconds: float) -> str:
    """Return a Unix time as Inspect writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def sample(entry: ChoiceEntry, record: Record, talks: list[ChatConversation], model: str) -> Json:
    """Return an episode as a sample, without its id and epoch. An infrastructure failure has an error and no score."""
    facts, verdict, spent = entry.facts, record.verdict, record.timing.get("total", 0.0)
    made = _Events(record, talks, model)
    mains = [talk for talk in talks if talk.kind == "main"]  # after a compaction there is another one
    asked = mains[0].messages[: min(mains[0].replies)] if mains else []
    failure = shown(f"{verdict['reason']}: {verdict['detail']}")
    found = {"value": "C" if facts["resolved"] else "I", "answer": facts["reason"] or "resolved"}
    scores = {"resolved": found | {"explanation": verdict["detail"]}, "reward": {"value": facts["reward"]}}
    status = record.agent.get("status")
    limits = {Status.MAX_TURNS: ("turn", facts["turns"]), Status.TIMEOUT: ("time", record.timing.get("agent", 0.0))}
    about = {"attempt": record.attempt, "agent": status, "threads": [talk.kind for talk in talks]}
    said = [one["content"] for one in asked if one["role"] == "user"]
    return {
        # What Claude Code puts before a prompt would be all that the list of samples shows.
        "input": "\n\n".join(text.rpartition("</system-reminder>")[2].strip() or text for text in said),
        "target": "",
        "messages": [_message(one, model) for one in mains[-1].messages] if mains else [],
        "output": made.last,
        "scores": scores if facts["reward"] is not None else None,
        "metadata": facts | about | {"labels": msgspec.to_builtins(entry.labels)},
        "events": made.events(),
        "events_data": {"messages": made.messages, "calls": []},
        "model_usage": {model: dict(made.used)} if made.used else {},
        "started_at": clock(record.started),
        "completed_at": clock(record.started + spent),
        "total_time": spent,
        "error": dict.fromkeys(("message", "traceback", "traceback_ansi"), failure) if facts["infra"] else None,
        "limit": dict(zip(("type", "limit"), limits[status], strict=True)) if status in limits else None,
    }


class _Events:
    """These are the events of an episode.

    ``messages``: to which they refer; ``used``: all tokens; ``last``: the agent's last reply, as a model's output.
    """

    def __init__(self, record: Record, talks: list[ChatConversation], model: str) -> None:
        self._record, self._model = record, model
        self._events: list[tuple[int, Json]] = []  # with the number of the reply, by which they are in order
        self.messages: list[Json] = []
        self.used, self.last = Counter[str](), Json()
        first = [min((talk.replies[place].number for place in talk.fresh), default=-1) for talk in talks]
        starts: dict[str, tuple[int, Json]] = {}  # by the id of a call, its conversation and its arguments
        for number, talk in enumerate(talks):
            for call in (call for place in talk.fresh for call in talk.messages[place].get("tool_calls", ())):
                starts.setdefault(call["id"], (number, call["function"]["arguments"]))
        for number, talk in enumerate(talks):
            if talk.kind == "main" or not talk.fresh:
                self._talk(talk, None)
                continue
            parent, given = starts.get(talk.caller, (number, {}))
            # No conversation is inside of a later one; what the agent reports may be forged.
            inside = f"{parent}" if first[parent] < first[number] and talks[parent].kind != "main" else None
            about = {"type": "agent", "name": str(given.get("description") or talk.kind), "parent_id": inside}
            ends = [talk.replies[place] for place in (min(talk.fresh), max(talk.fresh))]
            self._add(ends[0], "span_begin", id=f"{number}", **about)
            self._talk(talk, f"{number}")
            self._add(ends[1], "span_end", id=f"{number}")

    def events(self) -> list[Json]:
        """Return the events in the order in which the replies began."""
        return [event for _, event in sorted(self._events, key=lambda one: one[0])]

    def _talk(self, talk: ChatConversation, span: str | None) -> None:
        start, tools = len(self.messages), [_tool(one["function"]) for one in talk.tools]
        self.messages += [_message(one, self._model) for one in talk.messages]
        for place in talk.fresh:
            point, message = talk.replies[place], self.messages[start + place]
            ended = clock((point.started or self._record.started) + point.seconds)
            asked = {"input": [], "input_refs": [[start, start + place]], "tools": tools, "tool_choice": "auto"}
            about = {"span_id": span, "model": self._model, "config": {}, "completed": ended}
            output = self._output(point, message)
            self.last = output if talk.kind == "main" else self.last
            self._add(point, "model", output=output, **about, **asked)
            tools = []  # they are the same for all replies
            for call in message["tool_calls"]:
                self._add(point, "tool", span_id=span, result=_result(call, talk.messages[place + 1 :]), **call)

    def _output(self, point: Point, message: Json) -> Json:
        read, written = tokens(point)
        used = {"input_tokens": read[0], "input_tokens_cache_read": read[1], "input_tokens_cache_write": read[2]}
        used |= {"output_tokens": written, "total_tokens": sum(read) + written}
        self.used.update(used)
        choice = {"message": message, "stop_reason": _STOPS.get(point.stop, "unknown")}
        return {"model": self._model, "choices": [choice], "usage": used, "time": point.seconds}

    def _add(self, point: Point, event: str, **values: Any) -> None:
        began = point.started or self._record.started
        when = {"timestamp": clock(began), "working_start": began - self._record.started}
        self._events.append((point.number, {"event": event, **when, **values}))


def _result(call: Json, following: list[ChatMessage]) -> str:
    """Return the result of a call, which is in the messages before the next reply."""
    heard = itertools.takewhile(lambda one: one["role"] != "assistant", following)
    return next((one["content"] for one in heard if one.get("tool_call_id") == call["id"]), "")


def _message(message: ChatMessage, model: str) -> Json:
    made: Json = {"role": message["role"], "content": message["content"]}
    if message["role"] == "tool":
        return made | {"tool_call_id": message.get("tool_call_id"), "function": message.get("name")}
    if message["role"] != "assistant":
        return made
    if thought := message.get("reasoning_content"):
        made["content"] = [{"type": "reasoning", "reasoning": thought}, {"type": "text", "text": message["content"]}]
    calls = [(one["id"], one["function"]) for one in message.get("tool_calls", ())]
    told = [{"id": name, "function": call["name"], "arguments": call["arguments"]} for name, call in calls]
    return made | {"tool_calls": told, "model": model}


def _tool(tool: Json) -> Json:
    """Return a tool with the names of its parameters: Inspect refuses schemata that go beyond its own."""
    known = tool["parameters"].get("properties")
    parameters = {"type": "object", "properties": {name: {} for name in known} if isinstance(known, dict) else {}}
    return {"name": str(tool["name"]), "description": str(tool["description"]), "parameters": parameters}
