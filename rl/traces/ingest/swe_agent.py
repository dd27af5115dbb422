"""SWE-agent's trajectories (.traj) and rows of SWE-smith's training sets (.jsonl, .json, .parquet), read as states.

A .traj file keeps the messages of each step's query: what the model was sent. Before 1.1, a step's `messages` are what
the model was sent in the next step. In older files the history up to the step takes their place; a demonstration may
have nothing but a history. A row of a training set is one conversation, as a list or as JSON text, and so is a
.traj.json of mini-swe-agent.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl.traces.ingest import lines
from rl.traces.ingest.chat import message_of
from rl.traces.ingest.lines import Findings
from rl.traces.ingest.states import Message, StateWriter
from rollout.proxy.blocks import blocks_of

FORMAT = "swe-agent"
_Chat = Mapping[str, Any]  # a message


def ingest(path: Path, writer: StateWriter, findings: Findings, subagents: bool) -> None:
    """Write the states of a file, or of all in a folder. SWE-agent has no sub-agents. Raises OSError."""
    found = (one for one in sorted(path.rglob("*")) if one.name.endswith((".traj", ".traj.json")))
    files = [*found] if path.is_dir() else [path]
    if not files:
        findings.problem(str(path), "no .traj file in it")
    for file in files:
        for where, value in _values(file, findings):
            findings.counts["trajectories"] += 1
            with findings.watching(where):
                if file.suffix == ".traj":
                    _trajectory(file, value, writer, findings)
                else:
                    _row(where, _mini(value) if file.name.endswith(".traj.json") else value, writer)


def _values(file: Path, findings: Findings) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the trajectories and rows of a file, each with its place."""
    if file.name.endswith((".traj", ".traj.json")):
        kind: Any = dict[str, Any] if file.suffix == ".traj" else dict[str, Any] | list[dict[str, Any]]
        if (found := lines.whole(file, kind, findings)) is not None:
            yield str(file), found
    elif file.suffix == ".json":
        for number, row in enumerate(lines.whole(file, list[dict[str, Any]], findings) or (), 1):
            yield f"{file}: row {number}", row
    elif file.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        findings.read(file.stat().st_size)
        try:
            with pyarrow.parquet.ParquetFile(file) as table:
                rows = (row for batch in table.iter_batches(batch_size=8) for row in batch.to_pylist())
                yield from ((f"{file}: row {number}", row) for number, row in enumerate(rows, 1))
        except (pyarrow.ArrowException, ValueError) as error:
            findings.problem(str(file), error)
    else:
        yield from lines.values(file, dict[str, Any], findings)


def _mini(found: dict[str, Any] | list[Any]) -> dict[str, Any]:
    """Return a trajectory of mini-swe-agent as a row; before 1.0 it is a list of messages.

    Raises ValueError, TypeError, KeyError and AttributeError.
    """
    if isinstance(found, list):
        return {"messages": found}
    if not str(found.get("trajectory_format", "")).startswith("mini-swe-agent"):
        raise ValueError(f"its trajectory_format is {found.get('trajectory_format')!r}; mini-swe-agent-1 is read")
    model = ((found.get("info") or {}).get("config") or {}).get("model") or {}
    said = [one for one in found["messages"] if one.get("role") != "exit"]  # what the program says at its end
    return {"messages": said, "instance_id": found.get("instance_id"), "model": model.get("model_name")}


def _row(where: str, row: Mapping[str, Any], writer: StateWriter) -> None:
    """Write the states of a training row: one per reply."""
    given = row["messages"]
    system, talk = _messages(json.loads(given) if isinstance(given, str) else given)
    name = str(row.get("traj_id") or where)  # a task may have several
    outcome = {key: row[key] for key in ("instance_id", "resolved") if row.get(key) is not None}
    writer.begin(name, FORMAT, outcome)
    head, tip = writer.head(system), -1
    for number, message in enumerate(talk):
        if message["role"] == "assistant":
            writer.state(f"{name}/{number}", head, tip, message, str(row.get("model") or ""), where=where)
        tip = writer.message(tip, message)


def _messages(chat: Iterable[_Chat]) -> tuple[str | list[Message], list[Message]]:
    """Return the system prompt and the other messages of a chat.

    Each call gets an id of its own, as its result; people put trajectories together.
    """
    messages = [message_of(one) for one in chat]
    names: dict[str, str] = {}  # what an id stands for by now
    for block in (block for message in messages for block in blocks_of(message["content"])):
        if block["type"] == "tool_use":
            name = block["id"]
            block["id"] = names[name] = f"{names[name]}'" if name in names else name
        elif block["type"] == "tool_result":
            block["tool_use_id"] = names.get(block["tool_use_id"], block["tool_use_id"])
    if messages and messages[0]["role"] == "system":
        return messages[0]["content"], messages[1:]
    return "", messages


def _trajectory(file: Path, found: Mapping[str, Any], writer: StateWriter, findings: Findings) -> None:
    """Write the states of a .traj file: one per reply."""
    outcome = {"instance_id": file.stem, "exit_status": (found.get("info") or {}).get("exit_status")}
    writer.begin(str(file), FORMAT, outcome)
    model, longest = _model(found), 0
    for number, before, reply in _replies(found, findings):
        system, (*talk, action) = _messages((*before, reply))
        findings.counts["contexts shorter than one before"] += len(talk) < longest
        longest = max(longest, len(talk))
        head, tip, where = writer.head(system), writer.tip(talk), f"{file}: step {number}"
        writer.state(f"{file}/{number}", head, tip, action, model, where=where)


def _replies(found: Mapping[str, Any], findings: Findings) -> Iterator[tuple[int, Sequence[_Chat], _Chat]]:
    """Yield the number of each step that has a reply, the messages that were read before it, and the reply.

    Raises ValueError if ``found`` is no trajectory.
    """
    history = [one for one in found.get("history") or () if isinstance(one, dict)]
    said = [n for n, one in enumerate(history) if one.get("role") == "assistant" and not one.get("is_demo")]
    if found.get("trajectory") is None:  # a demonstration that someone has put together
        if not said:
            raise ValueError("neither a trajectory nor a history with replies")
        yield from ((number, history[:place], history[place]) for number, place in enumerate(said))
        return
    before: Any = None  # the messages of the step before, in which this one was asked
    for number, step in enumerate(found["trajectory"]):
        query, own = step.get("query"), step.get("messages")
        if query is None and own is not None:
            places = [n for n, one in enumerate(own) if one.get("role") == "assistant" and _is_of(one, step)]
            query, before = before or (own[: places[-1]] if places else own), own
        if query == [{}] or not (step.get("response") or step.get("action")):
            # The model was not asked, for example at a limit of costs: what stands there as a reply is SWE-agent's own
            # text.
            findings.counts["steps without a reply, left out"] += 1
            continue
        # The reply of a step is in the history, with its calls; a reply that was asked for again is not.
        place = next((place for place in said if _is_of(history[place], step)), None)
        if place is None and said and step.get("action") and history[said[0]].get("action") == step["action"]:
            place = said[0]  # a history whose texts someone has edited
        if place is None:
            findings.counts["replies that the history lacks, without the calls that they may have had"] += 1
            reply, reached = {"role": "assistant", "content": step.get("response")}, next(iter(said), len(history))
        else:
            reply, reached, said = history[place], place, [other for other in said if other > place]
        yield number, query or history[:reached], reply


def _is_of(said: _Chat, step: Mapping[str, Any]) -> bool:
    response, action = step.get("response"), step.get("action")
    if response and said.get("content") == response:
        return True
    return bool(action) and (said.get("action"), said.get("thought")) == (action, step.get("thought"))


def _model(found: Mapping[str, Any]) -> str:
    """Return the model's name, which is in the config that the trajectory is replayed with."""
    config = found.get("replay_config")
    try:
        known = json.loads(config) if isinstance(config, str) else config or {}
        return str(known["agent"]["model"]["name"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
