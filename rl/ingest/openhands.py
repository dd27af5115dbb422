"""This module reads OpenHands: the new SDK's events, and the old output.jsonl.

The SDK keeps a folder per conversation: base_state.json and events/event-00000-<id>.json. The old evaluation wrote a
line per instance, whose history has actions and observations, or pairs of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rl.ingest import lines
from rl.ingest.chat import message_of, result, tools_of
from rl.ingest.lines import Findings, repaired
from rl.ingest.states import Message, StateWriter

FORMAT = "openhands"
_OBJECT = msgspec.json.Decoder(dict[str, Any])
_EVENT = re.compile(r"event-(\d{5,})-.*\.json")
_FAULTS = (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError)


def ingest(path: Path, writer: StateWriter, findings: Findings, subagents: bool) -> None:
    """Write the states of an output.jsonl, of a conversation's folder, or of all such in a folder. Raises OSError."""
    if path.is_file():
        _old(path, writer, findings)
        return
    found = sorted(path.rglob("events"))
    for events in [*found, *([path / "events"] if path.name == "events" and path not in found else [])]:
        if events.is_dir():
            _conversation(events, writer, findings)
    for file in sorted(path.rglob("output*.jsonl")):
        _old(file, writer, findings)
    if not findings.counts["conversations"]:
        findings.problem(str(path), "no folder events and no output.jsonl in it")


class _View:
    """A view is what the model is sent: events that are messages, without those that a condensation has forgotten."""

    def __init__(self) -> None:
        self._events: list[tuple[Any, Message]] = []  # ids and messages

    def add(self, name: Any, message: Message) -> None:
        """Add an event's message."""
        self._events.append((name, message))

    def forget(self, names: set[Any], summary: Any, offset: Any) -> None:
        """Remove events, and put a summary in the place ``offset`` of what is left, the system prompt being place 0."""
        self._events = [one for one in self._events if one[0] not in names]
        if isinstance(summary, str) and isinstance(offset, int):
            place = max(0, min(offset - 1, len(self._events)))
            self._events.insert(place, (None, {"role": "user", "content": summary}))

    def messages(self) -> list[Message]:
        """Return the messages; neighbours of the user are one message."""
        merged: list[Message] = []
        for _, message in self._events:
            if merged and message["role"] == merged[-1]["role"] == "user":
                merged[-1] = {"role": "user", "content": [*_blocks(merged[-1]), *_blocks(message)]}
            else:
                merged.append(message)
        return merged


def _blocks(message: Message) -> list[Message]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


# The SDK's events


def _conversation(events: Path, writer: StateWriter, findings: Findings) -> None:
    findings.counts["conversations"] += 1
    folder = events.parent
    model = ""
    try:
        base = lines.whole(folder / "base_state.json", _OBJECT)
        model = str(base["agent"]["llm"]["model"])
    except FileNotFoundError:
        pass
    except (KeyError, TypeError, ValueError) as error:
        findings.problem(str(folder / "base_state.json"), error)
    writer.begin(folder.name, FORMAT)
    view, head = _View(), writer.head("")
    for replies in _replies(events, findings):
        file, event = replies[0]
        kind = event.get("kind")
        try:
            if kind == "SystemPromptEvent":
                texts = [
                    event["system_prompt"]["text"],
                    *([event["dynamic_context"]["text"]] if event.get("dynamic_context") else []),
                ]
                head = writer.head([{"type": "text", "text": text} for text in texts], _tools(event.get("tools")))
            elif kind == "ActionEvent" or (kind == "MessageEvent" and event.get("source") == "agent"):
                action = _said([one for _, one in replies])
                name = str(event.get("llm_response_id") or event.get("id"))
                writer.state(f"{folder.name}/{name}", head, writer.tip(view.messages()), action, model, where=str(file))
                view.add(event.get("id"), action)
            elif kind == "MessageEvent":
                told = event["llm_message"]
                parts = [*_list(told.get("content")), *_list(event.get("extended_content"))]
                view.add(event.get("id"), message_of({"role": told["role"], "content": parts}))
            elif kind in ("ObservationEvent", "AgentErrorEvent", "UserRejectObservation"):
                view.add(
                    event.get("id"), {"role": "user", "content": [result(str(event["tool_call_id"]), _observed(event))]}
                )
            elif kind == "Condensation":
                findings.counts["compactions"] += 1
                view.forget(
                    {*_list(event.get("forgotten_event_ids"))}, event.get("summary"), event.get("summary_offset")
                )
            else:
                findings.counts[f"events of kind {str(kind)[:40]} passed over"] += 1
        except _FAULTS as error:
            findings.problem(str(file), error)


def _replies(events: Path, findings: Findings) -> Iterator[list[tuple[Path, dict[str, Any]]]]:
    """Yield events, one at a time; the parallel calls of one reply together."""
    group: list[tuple[Path, dict[str, Any]]] = []
    files = [one for one in events.iterdir() if _EVENT.fullmatch(one.name)]
    for file in sorted(files, key=lambda one: int(one.name.split("-")[1])):
        try:
            findings.read(file.stat().st_size)
            event = lines.whole(file, _OBJECT)
        except (OSError, ValueError) as error:
            findings.problem(str(file), error)
            continue
        reply = event.get("llm_response_id") if event.get("kind") == "ActionEvent" else None
        if group and (reply is None or group[0][1].get("llm_response_id") != reply):
            yield group
            group = []
        group.append((file, event))
        if reply is None:
            yield group
            group = []
    if group:
        yield group


def _said(events: Sequence[Mapping[str, Any]]) -> Message:
    """Return the reply of an agent: one message event, or one or several calls of one response."""
    first = events[0]
    told = first.get("llm_message") or {
        "content": first.get("thought"),
        "reasoning_content": first.get("reasoning_content"),
        "thinking_blocks": first.get("thinking_blocks"),
        "tool_calls": [event["tool_call"] for event in events],
    }
    return message_of({**told, "role": "assistant"})


def _observed(event: Mapping[str, Any]) -> str | list[Message]:
    match event["kind"]:
        case "AgentErrorEvent":
            return str(event["error"])
        case "UserRejectObservation":
            return f"Action rejected: {event.get('rejection_reason')}"
    seen = event["observation"]
    parts = [*_list(seen.get("content")), *_list(event.get("extended_content"))]
    if seen.get("is_error"):
        parts.insert(0, {"type": "text", "text": "[An error occurred during execution.]\n"})
    return message_of({"role": "user", "content": parts})["content"]


def _tools(tools: Any) -> list[Message]:
    """Return the tools. Newer events have their schemas; older ones name the class of their action only."""
    found = []
    for tool in _list(tools):
        if isinstance(tool, Mapping):
            name = (
                tool.get("name") or re.sub(r"(?<!^)(?=[A-Z])", "_", str(tool.get("title") or tool.get("kind"))).lower()
            )
            found.append({**tool, "name": name, "parameters": tool.get("parameters") or tool.get("input_schema")})
    return tools_of(found)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value] if value is not None else []


# The old output.jsonl


def _old(file: Path, writer: StateWriter, findings: Findings) -> None:
    for number, text in lines.lines(file, findings):
        findings.counts["conversations"] += 1
        try:
            _instance(f"{file}: line {number}", repaired(lines.decode(text, _OBJECT)), writer, findings)
        except _FAULTS as error:
            findings.problem(f"{file}: line {number}", error)


def _instance(where: str, row: Mapping[str, Any], writer: StateWriter, findings: Findings) -> None:
    about = row.get("metadata") or {}
    model = str((about.get("llm_config") or {}).get("model") or "")
    name = str(row.get("instance_id") or where)
    tested = row.get("test_result") or {}
    report: Any = tested.get("report") if isinstance(tested.get("report"), Mapping) else {}
    outcome = {"instance_id": name, **({"resolved": report["resolved"]} if "resolved" in report else {})}
    writer.begin(name, FORMAT, outcome)
    history = row.get("history") or []
    events = [event for one in history for event in (one if isinstance(one, list) else [one])]
    view, head = _View(), writer.head("")
    seen: set[str] = set()
    if not any(event.get("action") == "message" and event.get("source") == "user" for event in events):
        view.add(None, {"role": "user", "content": str(row.get("instruction") or "")})
    for number, event in enumerate(events):
        if event.get("action") == "system":
            given = event.get("args") or {}
            head = writer.head(str(given.get("content") or ""), tools_of(given.get("tools")))
        elif event.get("action") == "condensation":
            findings.counts["compactions"] += 1
            given = event.get("args") or {}
            ids = given.get("forgotten_event_ids")
            if ids is None and isinstance(given.get("forgotten_events_start_id"), int):
                ids = range(given["forgotten_events_start_id"], int(given["forgotten_events_end_id"]) + 1)
            view.forget(set(ids or ()), given.get("summary"), given.get("summary_offset"))
        elif "observation" in event:
            view.add(event.get("id"), _seen(event))
        elif event.get("action") == "message" and event.get("source") == "user":
            view.add(event.get("id"), {"role": "user", "content": str(_told(event))})
        elif "action" in event and event.get("source") == "agent":
            response = (event.get("tool_call_metadata") or {}).get("model_response") or {}
            reply = str(response.get("id") or f"{name}/{event.get('id', number)}")
            if reply in seen:  # another call of a reply that was seen already
                continue
            seen.add(reply)
            action = _acted(event, response)
            made_by = str(response.get("model") or model)
            writer.state(f"{name}/{reply}", head, writer.tip(view.messages()), action, made_by, where=where)
            view.add(event.get("id"), action)
        else:
            findings.counts["events that are no messages, passed over"] += 1


def _told(event: Mapping[str, Any]) -> Any:
    return (event.get("args") or {}).get("content") or event.get("message") or ""


def _acted(event: Mapping[str, Any], response: Mapping[str, Any]) -> Message:
    """Return a reply: the model's own message where it is kept, else what the event says of it."""
    if response.get("choices"):
        return message_of({**response["choices"][0]["message"], "role": "assistant"})
    given = dict(event.get("args") or {})
    thought = str(given.pop("thought", "") or "")
    if event["action"] == "message":
        return {"role": "assistant", "content": [{"type": "text", "text": str(_told(event))}]}
    known = event.get("tool_call_metadata") or {}
    call = {
        "type": "tool_use",
        "id": str(known.get("tool_call_id") or event.get("id")),
        "name": str(known.get("function_name") or event["action"]),
        "input": given,
    }
    return {"role": "assistant", "content": [*([{"type": "text", "text": thought}] if thought else []), call]}


def _seen(event: Mapping[str, Any]) -> Message:
    known = event.get("tool_call_metadata") or {}
    called = known.get("tool_call_id") or event.get("cause")
    content = str(event.get("content") or event.get("message") or "")
    return {"role": "user", "content": [result(str(called), content)] if called is not None else content}
