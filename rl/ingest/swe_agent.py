"""This module reads trajectories of SWE-agent (.traj) and rows of SWE-smith's training sets (.jsonl, .json, .parquet).

A .traj file of version 1 keeps the messages of each step's query (`query`, before 1.1 `messages`): what the model was
sent. In older files the history up to the step takes their place; a demonstration may have nothing but a history. A row
of a training set is one conversation, as a list or as JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rl.ingest import lines
from rl.ingest.chat import message_of
from rl.ingest.lines import Findings, repaired
from rl.ingest.states import Message, StateWriter

FORMAT = "swe-agent"
_OBJECT = msgspec.json.Decoder(dict[str, Any])


def ingest(path: Path, writer: StateWriter, findings: Findings, subagents: bool) -> None:
    """Write the states of a file, or of all in a folder. SWE-agent has no sub-agents. Raises OSError."""
    kinds = (".traj", ".jsonl", ".json", ".parquet")
    files = [one for one in sorted(path.rglob("*")) if one.suffix in kinds[:1]] if path.is_dir() else [path]
    if path.is_dir() and not files:
        findings.problem(str(path), "no .traj file in it")
    for file in files:
        if file.suffix != ".jsonl":
            findings.read(file.stat().st_size)
        if file.suffix == ".traj":
            findings.counts["trajectories"] += 1
            try:
                _trajectory(file, lines.whole(file, _OBJECT), writer, findings)
            except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
                findings.problem(str(file), error)
            continue
        for where, row in _rows(file, findings):
            findings.counts["trajectories"] += 1
            try:
                _row(where, row, writer)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                findings.problem(where, error)


def _rows(file: Path, findings: Findings) -> Iterator[tuple[str, dict[str, Any]]]:
    if file.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        try:
            with pyarrow.parquet.ParquetFile(file) as table:
                number = 0
                for batch in table.iter_batches(batch_size=8):
                    for row in batch.to_pylist():
                        number += 1
                        yield f"{file}: row {number}", row
        except (pyarrow.ArrowException, ValueError) as error:
            findings.problem(str(file), error)
    elif file.suffix == ".json":
        try:
            for number, row in enumerate(lines.whole(file, msgspec.json.Decoder(list[dict[str, Any]])), 1):
                yield f"{file}: row {number}", row
        except ValueError as error:
            findings.problem(str(file), error)
    else:
        for number, text in lines.lines(file, findings):
            try:
                yield f"{file}: line {number}", repaired(lines.decode(text, _OBJECT))
            except ValueError as error:
                findings.problem(f"{file}: line {number}", error)


def _row(where: str, row: Mapping[str, Any], writer: StateWriter) -> None:
    """Write the states of a training row: one per reply."""
    given = row["messages"]
    messages = [message_of(one) for one in (json.loads(given) if isinstance(given, str) else given)]
    name = str(row.get("traj_id") or row.get("instance_id") or where)
    outcome = {key: row[key] for key in ("instance_id", "resolved") if row.get(key) is not None}
    writer.begin(name, FORMAT, outcome)
    system, talk = _parted(messages)
    head, tip = writer.head(system), -1
    for number, message in enumerate(talk):
        if message["role"] == "assistant":
            writer.state(f"{name}/{number}", head, tip, message, str(row.get("model") or ""), where=where)
        tip = writer.message(tip, message)


def _parted(messages: list[Message]) -> tuple[str | list[Message], list[Message]]:
    if messages and messages[0]["role"] == "system":
        return messages[0]["content"], messages[1:]
    return "", messages


def _trajectory(file: Path, found: Mapping[str, Any], writer: StateWriter, findings: Findings) -> None:
    """Write the states of a .traj file: one per reply."""
    instance = file.stem
    info = found.get("info") or {}
    outcome = {"instance_id": instance, "exit_status": info.get("exit_status")}
    writer.begin(f"{file.parent.name}/{instance}", FORMAT, outcome)
    model = _model(found)
    longest = 0
    for number, before, reply in _replies(found, findings):
        system, talk = _parted([message_of(one) for one in before])
        findings.counts["contexts shorter than one before"] += len(talk) < longest
        longest = max(longest, len(talk))
        tip = writer.tip(talk)
        writer.state(
            f"{file}/{number}", writer.head(system), tip, message_of(reply), model, where=f"{file}: step {number}"
        )


_Chat = Mapping[str, Any]


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
    for number, step in enumerate(found["trajectory"]):
        query = step.get("query") or step.get("messages")
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
            reply = {"role": "assistant", "content": step.get("response")}
        else:
            reply = history[place]
        reached = place if place is not None else said[0] if said else len(history)
        said = [other for other in said if place is None or other > place]
        yield number, query or history[:reached], reply


def _is_of(said: _Chat, step: Mapping[str, Any]) -> bool:
    response = step.get("response")
    return (bool(response) and said.get("content") == response) or (
        bool(step.get("action")) and (said.get("action"), said.get("thought")) == (step["action"], step.get("thought"))
    )


def _model(found: Mapping[str, Any]) -> str:
    """Return the model's name, which is in the config that the trajectory is replayed with."""
    config = found.get("replay_config")
    try:
        known = json.loads(config) if isinstance(config, str) else config or {}
        return str(known["agent"]["model"]["name"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
