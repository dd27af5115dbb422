"""Read OpenHands' recordings: the new SDK's events, and the old evaluation's output.jsonl.

The SDK keeps a folder per conversation: base_state.json and events/event-00000-<id>.json. The old evaluation wrote a
line per instance, whose history has actions and observations, or pairs of them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rl.traces.ingest import lines
from rl.traces.ingest.chat import message_of, result, tools_of
from rl.traces.ingest.gate import ids
from rl.traces.ingest.lines import Findings
from rl.traces.ingest.states import Message, StateWriter

FORMAT = "openhands"
_EVENT = re.compile(r"event-(\d{5,})-.*\.json")
_HEARD = ("MessageEvent", "ObservationEvent", "AgentErrorEvent", "UserRejectObservation")
_KNOWN = (*_HEARD, "ActionEvent", "SystemPromptEvent")
# What the model is sent: messages, with the ids of their events, without those that a condensation has forgotten.
_View = list[tuple[Any, Message]]
_Group = list[tuple[Path, dict[str, Any]]]  # one event, or the parallel calls of a reply, each with its file


def ingest(path: Path, writer: StateWriter, findings: Findings, subagents: bool) -> None:
    """Write the states of an output.jsonl, of a conversation's folder, or of all such in a folder. Raises OSError."""
    folders = [one for one in (*sorted(path.rglob("events")), path) if one.name == "events" and one.is_dir()]
    old = [path] if path.is_file() else sorted(path.rglob("output*.jsonl"))
    for events in dict.fromkeys(folders):
        _conversation(events, writer, findings)
    for file in old:
        for where, row in lines.values(file, dict[str, Any], findings):
            findings.counts["conversations"] += 1
            with findings.watching(where):
                _instance(where, row, writer, findings)
    if not folders and not old:
        findings.problem(str(path), "no folder events and no output.jsonl in it")


def _forget(view: _View, names: set[Any], summary: Any, offset: Any) -> None:
    """Remove events, and put a summary in the place ``offset`` of what is left, the system prompt being place 0."""
    view[:] = [one for one in view if one[0] not in names]
    if isinstance(summary, str) and isinstance(offset, int):
        view.insert(max(0, min(offset - 1, len(view))), (None, {"role": "user", "content": summary}))


def _sent(view: _View) -> list[Message]:
    """Return the messages that are sent. As the SDK does it, a call without its result, or a result without its call,
    is not."""
    told = {name for _, message in view for name in ids(message, "tool_result")}
    calls = (set(ids(message, "tool_use")) for _, message in view)
    answered = {name for names in calls if names <= told for name in names}
    return [one for _, one in view if answered.issuperset(ids(one, "tool_use") + ids(one, "tool_result"))]


# The SDK's events


def _conversation(events: Path, writer: StateWriter, findings: Findings) -> None:
    findings.counts["conversations"] += 1
    folder, model = events.parent, ""
    base = folder / "base_state.json"
    if base.exists() and (found := lines.whole(base, dict[str, Any], findings)) is not None:
        with findings.watching(str(base)):
            model = str(found["agent"]["llm"]["model"])
    writer.begin(folder.name, FORMAT)
    view, head, last = _View(), writer.head(""), set[Any]()
    known: dict[Any, _Group] = {}
    for _, together in itertools.groupby(_events(events, findings), _reply_of):
        group = [*together]
        file, event = group[0]
        with findings.watching(str(file)):
            if last and event.get("parent_id") is not None and event["parent_id"] not in last:  # another branch
                view, head = _path(event["parent_id"], known, writer)
            if _is_reply(event):
                action = _said(group)
                name = f"{folder.name}/{event.get('llm_response_id') or event.get('id')}"
                writer.state(name, head, writer.tip(_sent(view)), action, model, where=str(file))
            head = _hear(view, group, head, writer)
            if event.get("kind") == "Condensation":
                findings.counts["compactions"] += 1
            elif event.get("kind") not in _KNOWN:
                findings.counts[f"events of kind {str(event.get('kind'))[:40]} passed over"] += 1
        with findings.watching(str(file)):
            last = {one.get("id") for _, one in group}
            known |= dict.fromkeys(last, group)


def _path(name: Any, known: Mapping[Any, _Group], writer: StateWriter) -> tuple[_View, int]:
    """Return what the model is sent after an event: events are a tree, and only the path to its root counts."""
    path: dict[int, _Group] = {}  # by identity: the events of a damaged file may go round in a circle
    while name in known and id(known[name]) not in path:
        group = known[name]
        path[id(group)] = group
        name = group[0][1].get("parent_id")
    view, head = _View(), writer.head("")
    for group in reversed(path.values()):
        head = _hear(view, group, head, writer)
    return view, head


def _is_reply(event: Mapping[str, Any]) -> bool:
    kind = event.get("kind")
    return kind == "ActionEvent" or (kind == "MessageEvent" and event.get("source") == "agent")


def _hear(view: _View, group: _Group, head: int, writer: StateWriter) -> int:
    """Add an event, or the parallel calls of a reply, to what the model is sent; return its system prompt's number."""
    event = group[0][1]
    name, kind = event.get("id"), event.get("kind")
    if kind == "SystemPromptEvent":
        parts = [event["system_prompt"], *([event["dynamic_context"]] if event.get("dynamic_context") else [])]
        head = writer.head([{"type": "text", "text": part["text"]} for part in parts], _tools(event.get("tools")))
    elif _is_reply(event):
        view.append((name, _said(group)))
    elif kind == "MessageEvent":
        told = event["llm_message"]
        content = [*_list(told.get("content")), *_list(event.get("extended_content"))]
        view.append((name, message_of({"role": told["role"], "content": content})))
    elif kind in _HEARD:
        view.append((name, {"role": "user", "content": [result(str(event["tool_call_id"]), _observed(event))]}))
    elif kind == "Condensation":
        _forget(view, {*_list(event.get("forgotten_event_ids"))}, event.get("summary"), event.get("summary_offset"))
    return head


def _events(events: Path, findings: Findings) -> Iterator[tuple[Path, dict[str, Any]]]:
    files = [one for one in events.iterdir() if _EVENT.fullmatch(one.name)]
    for file in sorted(files, key=lambda one: int(one.name.split("-")[1])):
        if (event := lines.whole(file, dict[str, Any], findings)) is not None:
            yield file, event


def _reply_of(one: tuple[Path, dict[str, Any]]) -> Any:
    """Return what the parallel calls of one reply have in common; of all other events, what is theirs alone."""
    file, event = one
    return (event.get("kind") == "ActionEvent" and event.get("llm_response_id")) or file


def _said(group: _Group) -> Message:
    """Return the reply of an agent: one message event, or one or several calls of one response."""
    first = group[0][1]
    told = first.get("llm_message")
    if not told:  # calls, whose thoughts are beside them
        told = {**first, "content": first.get("thought"), "tool_calls": [event["tool_call"] for _, event in group]}
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
            called = re.sub(r"(?<!^)(?=[A-Z])", "_", str(tool.get("title") or tool.get("kind"))).lower()
            found.append({**tool, "name": tool.get("name") or called})
    return tools_of(found)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value] if value is not None else []


# The old output.jsonl


def _instance(where: str, row: Mapping[str, Any], writer: StateWriter, findings: Findings) -> None:
    about = row.get("metadata") or {}
    model = str((about.get("llm_config") or {}).get("model") or "")
    name = str(row.get("instance_id") or where)
    tested = row.get("test_result") or {}
    report: Any = tested.get("report") if isinstance(tested.get("report"), Mapping) else {}
    outcome = {"instance_id": name, **({"resolved": report["resolved"]} if "resolved" in report else {})}
    writer.begin(where, FORMAT, outcome)  # a task may have several
    history = row.get("history") or []
    events = [event for one in history for event in (one if isinstance(one, list) else [one])]
    view, head = _View(), writer.head("")
    seen: set[str] = set()
    if not any(event.get("action") == "message" and event.get("source") == "user" for event in events):
        view.append((None, {"role": "user", "content": str(row.get("instruction") or "")}))
    for number, event in enumerate(events):
        given = event.get("args") or {}
        if event.get("action") == "system":
            head = writer.head(str(given.get("content") or ""), tools_of(given.get("tools")))
        elif event.get("action") == "condensation":
            findings.counts["compactions"] += 1
            forgotten, first = given.get("forgotten_event_ids"), given.get("forgotten_events_start_id")
            if forgotten is None and isinstance(first, int):
                last = int(given["forgotten_events_end_id"])
                forgotten = [name for name, _ in view if isinstance(name, int) and first <= name <= last]
            _forget(view, set(forgotten or ()), given.get("summary"), given.get("summary_offset"))
        elif "observation" in event:
            view.append((event.get("id"), _seen(event)))
        elif event.get("action") == "message" and event.get("source") == "user":
            view.append((event.get("id"), {"role": "user", "content": str(_told(event))}))
        elif "action" in event and event.get("source") == "agent":
            response = (event.get("tool_call_metadata") or {}).get("model_response") or {}
            reply = str(response.get("id") or f"{where}/{event.get('id', number)}")
            if reply in seen:  # another call of a reply that was seen already
                continue
            seen.add(reply)
            action = _acted(event, response)
            made_by = str(response.get("model") or model)
            writer.state(f"{name}/{reply}", head, writer.tip(_sent(view)), action, made_by, where=where)
            view.append((event.get("id"), action))
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
        return message_of({"role": "assistant", "content": str(_told(event))})
    known = event.get("tool_call_metadata") or {}
    called, name = known.get("tool_call_id") or event.get("id"), str(known.get("function_name") or event["action"])
    calls = [{"id": called, "name": name, "arguments": given}]
    return message_of({"role": "assistant", "content": thought, "tool_calls": calls})


def _seen(event: Mapping[str, Any]) -> Message:
    known = event.get("tool_call_metadata") or {}
    called = known.get("tool_call_id") or event.get("cause")
    content = str(event.get("content") or event.get("message") or "")
    return message_of({"role": "tool", "tool_call_id": called, "content": content})
