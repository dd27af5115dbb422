"""Read ATIF documents (Agent Trajectory Interchange Format, version 1.x): a JSON file per trajectory.

Embedded sub-agents are read, too, and those in other files where their path leads to one beside the document.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rl.traces.ingest import lines
from rl.traces.ingest.chat import message_of, result, tools_of
from rl.traces.ingest.lines import Findings
from rl.traces.ingest.states import Message, StateWriter

FORMAT = "atif"
_CARD = "export.json"  # what rl.export writes beside its documents
_DEEPEST = 20  # sub-agents inside of sub-agents; a reference may lead back to its own document


class _Call(msgspec.Struct):
    tool_call_id: str
    function_name: str
    arguments: dict[str, Any] = {}


class _Reference(msgspec.Struct):
    trajectory_id: str | None = None
    trajectory_path: str | None = None


class _Result(msgspec.Struct):
    source_call_id: str | None = None
    content: str | list[dict[str, Any]] | None = None
    subagent_trajectory_ref: list[_Reference] | None = None


class _Observation(msgspec.Struct):
    results: list[_Result] = []


class _Step(msgspec.Struct):
    source: str
    message: str | list[dict[str, Any]] = ""
    model_name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None
    observation: _Observation | None = None
    llm_call_count: int | None = None
    is_copied_context: bool | None = None


class _Agent(msgspec.Struct):
    model_name: str | None = None
    tool_definitions: list[dict[str, Any]] | None = None


class _Trajectory(msgspec.Struct):
    schema_version: str
    steps: list[_Step]
    agent: _Agent = msgspec.field(default_factory=_Agent)
    session_id: str | None = None
    trajectory_id: str | None = None
    subagent_trajectories: list[_Trajectory] | None = None


def ingest(path: Path, writer: StateWriter, findings: Findings, subagents: bool) -> None:
    """Write the states of a document, or of all .json files in a folder. Raises OSError."""
    documents = (one for one in sorted(path.rglob("*.json")) if one.name != _CARD)
    for file in documents if path.is_dir() else [path]:
        findings.counts["trajectories"] += 1
        if (found := lines.whole(file, _Trajectory, findings)) is not None:
            _write(found, file, writer, findings, subagents, [], None)


def _write(
    found: _Trajectory, file: Path, writer: StateWriter, findings: Findings, subagents: bool, agent: list[str],
    spawned_by: str | None,
) -> None:  # fmt: skip
    if not found.schema_version.startswith("ATIF-v1."):
        findings.problem(str(file), f"schema version {found.schema_version!r}; this reads ATIF-v1.x")
        return
    name = found.trajectory_id or found.session_id or file.stem
    writer.begin(name, FORMAT)
    first = found.steps[0] if found.steps and found.steps[0].source == "system" else None
    head = writer.head(_content(first.message) if first else "", tools_of(found.agent.tool_definitions))
    tip = -1
    spawned: list[tuple[str | None, _Reference]] = []
    for number, step in enumerate(found.steps, 1):
        if step is first:
            continue
        if step.source != "agent":
            role = "system" if step.source == "system" else "user"
            tip = writer.message(tip, {"role": role, "content": _content(step.message)})
        else:
            action = _action(step)
            if step.is_copied_context or step.llm_call_count == 0:
                findings.counts["steps that no model made here, in histories only"] += 1
            elif action["content"]:
                model = step.model_name or found.agent.model_name or ""
                more: dict[str, Any] = {"where": f"{file}: step {number}", "agent": agent, "spawned_by": spawned_by}
                writer.state("/".join([name, *agent[-1:], str(number)]), head, tip, action, model, **more)
            tip = writer.message(tip, action)
        for one in step.observation.results if step.observation else ():
            if one.content is not None:
                tip = writer.message(tip, {"role": "user", "content": [_heard(one)]})
            spawned += [(one.source_call_id, ref) for ref in one.subagent_trajectory_ref or ()]
    inner = {one.trajectory_id: one for one in found.subagent_trajectories or ()}
    if not subagents:
        findings.counts["sub-agents left out"] += len(inner)
        return
    for call, reference in spawned:
        sub, place = inner.pop(reference.trajectory_id, None), file
        if sub is None and reference.trajectory_path is not None:
            place = file.parent / reference.trajectory_path
            sub = _beside(place, file, findings)
        if sub is not None and len(agent) < _DEEPEST:
            within = [*agent, sub.trajectory_id or place.stem]
            _write(sub, place, writer, findings, True, within, call)
    for sub in inner.values():  # that no result refers to
        _write(sub, file, writer, findings, True, [*agent, sub.trajectory_id or ""], None)


def _beside(place: Path, file: Path, findings: Findings) -> _Trajectory | None:
    """Return the document that another one refers to. It must be in the same folder, whatever the path says."""
    if not place.resolve().is_relative_to(file.parent.resolve()):
        findings.problem(str(file), f"its sub-agent is in {place}, outside of its folder; left out")
        return None
    return lines.whole(place, _Trajectory, findings)


def _action(step: _Step) -> Message:
    made = step.tool_calls or ()
    calls = [{"id": one.tool_call_id, "name": one.function_name, "arguments": one.arguments} for one in made]
    said = {"content": _content(step.message), "reasoning_content": step.reasoning_content, "tool_calls": calls}
    return message_of({"role": "assistant", **said})


def _heard(one: _Result) -> Message:
    content = _content(one.content or "")
    called = one.source_call_id
    return {"type": "text", "text": content} if called is None else result(called, content)


def _content(content: str | list[dict[str, Any]]) -> str:
    """Return a content as text. An image or audio is in a file of its own; its name stands for it."""
    if isinstance(content, str):
        return content
    return "\n".join(
        part["text"] if isinstance(part.get("text"), str) else f"[{part.get('type')}: {_path(part.get('source'))}]"
        for part in content
    )


def _path(source: Any) -> str:
    return str(source.get("path")) if isinstance(source, Mapping) else ""
