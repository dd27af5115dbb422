"""Write trajectories in the Agent Trajectory Interchange Format (ATIF v1.8), with token ids and logprobs.

An episode is a file. Sub-agents are embedded in it; what comes after a compaction is a file of its own, to which the
one before points.
"""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from rl.data.choice import ChoiceEntry
from rl.traces.export.conversation import ChatConversation, agent_name, tokens
from rl.traces.export.sink import Sink
from rl.traces.export.source import ExportSource
from rollout.proxy.messages import ChatMessage
from rollout.records import Record
from rollout.trace import Point, Trace

VERSION = "ATIF-v1.8"
_LONGEST = 200  # characters of an episode's name in that of a file


def write(source: ExportSource, out: Sink) -> None:
    """Write a file per main conversation, and an index of them, trajectories.jsonl."""
    for entry, talks in source.talks():
        made = [trajectory(entry, talk, f"{number}") for number, talk in enumerate(talks)]
        mains = [one for one, talk in zip(made, talks, strict=True) if talk.kind == "main"] or made[:1]
        for one, talk in zip(made, talks, strict=True):
            if not any(one is main for main in mains):
                _embed(next((other for other in made if talk.caller in _calls(other)), mains[0]), one, talk.caller)
        names = [_file(entry, number) for number in range(len(mains))]
        for one, name, following in zip(mains, names, [*names[1:], None], strict=True):
            if following:
                one["continued_trajectory_ref"] = following
            out.text(f"trajectories/{name}", json.dumps(one, ensure_ascii=False) + "\n")
            about = {"file": f"trajectories/{name}", "episode": entry.facts["episode"]}
            out.row("trajectories.jsonl", about | {"instance_id": entry.task, "resolved": entry.facts["resolved"]})


def _calls(made: dict[str, Any]) -> set[str]:
    return {call["tool_call_id"] for step in made["steps"] for call in step.get("tool_calls", ())}


def _file(entry: ChoiceEntry, number: int) -> str:
    name = quote(entry.facts["episode"], safe="")
    if len(name) > _LONGEST:
        name = f"{name[:_LONGEST]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"
    return name + (f".cont-{number}" if number else "") + ".json"


def trajectory(entry: ChoiceEntry, talk: ChatConversation, name: str) -> dict[str, Any]:
    """Return a conversation as a trajectory, as plain JSON. ``name``: tells it from others of its episode."""
    record, steps = talk.trace.record, list[dict[str, Any]]()
    for place, message in enumerate(talk.messages):
        if message["role"] == "tool" and steps and steps[-1]["source"] == "agent":
            known = {call["tool_call_id"] for call in steps[-1].get("tool_calls", ())}
            answered = message.get("tool_call_id")
            result = {"source_call_id": answered if answered in known else None, "content": message["content"]}
            steps[-1].setdefault("observation", {"results": []})["results"].append(result)
        else:
            steps.append({"step_id": len(steps) + 1, **_step(talk, place, message)})
    counts = [step["metrics"] for step in steps if "metrics" in step]
    facts = {key: entry.facts[key] for key in ("episode", "task", "resolved", "reward", "reason", "flags")}
    return {
        "schema_version": VERSION,
        "session_id": record.episode,
        "trajectory_id": f"{record.episode}-{name}",
        "agent": {
            "name": agent_name(record),
            "version": _agent_version(record),
            "model_name": record.model,
            "tool_definitions": talk.tools,
        },
        "steps": steps,
        "final_metrics": {
            "total_prompt_tokens": sum(one.get("prompt_tokens", 0) for one in counts),
            "total_completion_tokens": sum(one.get("completion_tokens", 0) for one in counts),
            "total_steps": len(steps),
        },
        "extra": {**facts, "thread": talk.kind},
    }


def _step(talk: ChatConversation, place: int, message: ChatMessage) -> dict[str, Any]:
    point = talk.replies.get(place)
    if message["role"] != "assistant":
        # A result without its call is the user's: observations belong to the agent's steps.
        return {"source": "system" if message["role"] == "system" else "user", "message": message["content"]}
    step: dict[str, Any] = {"source": "agent", "message": message["content"]}
    if thought := message.get("reasoning_content"):
        step["reasoning_content"] = thought
    calls = [
        {"tool_call_id": one["id"], "function_name": one["function"]["name"], "arguments": one["function"]["arguments"]}
        for one in message.get("tool_calls", ())
    ]
    if calls:
        step["tool_calls"] = calls
    if point is None:
        return step | {"llm_call_count": 0} if not thought else step
    step["llm_call_count"] = 1
    if place not in talk.fresh:
        step["is_copied_context"] = True
    if point.started:
        step["timestamp"] = datetime.fromtimestamp(point.started, UTC).isoformat()
    if metrics := _metrics(talk.trace, point):
        step["metrics"] = metrics
    return step


def _metrics(trace: Trace, point: Point) -> dict[str, Any]:
    read, written = tokens(point)
    counts = {"prompt_tokens": sum(read), "completion_tokens": written} if point.usage else {}
    if (told := trace.tokens(point)) is None:
        return counts and counts | {"cached_tokens": read[1]}
    return counts | {"completion_token_ids": told[1], "logprobs": told[2]}


def _embed(made: dict[str, Any], inner: dict[str, Any], caller: str) -> None:
    """Embed a sub-agent's trajectory, and refer to it in the result of the call that started it."""
    made.setdefault("subagent_trajectories", []).append(inner)
    for step in made["steps"]:
        for result in step.get("observation", {}).get("results", ()):
            if caller and result["source_call_id"] == caller:
                result.setdefault("subagent_trajectory_ref", []).append({"trajectory_id": inner["trajectory_id"]})


def _agent_version(record: Record) -> str:
    """Return the agent's version, as its first event tells it."""
    found = (event.get("claude_code_version") for event in record.events if event.get("subtype") == "init")
    return next((one for one in found if isinstance(one, str)), "unknown")
