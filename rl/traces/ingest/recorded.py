"""Make records of recorded conversations, so that whatever reads runs reads other programs' files, too."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rewards.verdict import Outcome, Reason
from rl.traces.ingest.states import State, read_states
from rollout.proxy.blocks import blocks_of
from rollout.proxy.calls import CallRecord
from rollout.records import VERSION, Record, RecordWriter


def records(source: Path) -> Iterator[Record]:
    """Yield a record for each conversation of a states file, one at a time. Raises StatesError and OSError."""
    for _, states in itertools.groupby(read_states(source), lambda state: state.conversation):
        yield record(list(states))


def record(states: Sequence[State]) -> Record:
    """Return the states of one conversation as the record of an episode whose calls were forwarded."""
    parts: dict[bytes, int] = {}
    calls, events = list[CallRecord](), list[dict[str, Any]]()
    first, outcome = states[0], states[0].outcome
    for number, state in enumerate(states):
        system, *talk = state.messages
        texts = map(msgspec.json.encode, (system["content"], state.tools, *talk))
        head, tools, *places = (parts.setdefault(text, len(parts)) for text in texts)
        blocks = blocks_of(state.student_action["content"])
        reply = {"id": state.state_id, "content": blocks, "model": state.source_model}
        calls.append(CallRecord(places, head, tools, reply=reply, started=float(number)))
        message = {"id": state.state_id, "content": blocks}
        events.append({"type": "assistant", "message": message, "parent_tool_use_id": state.spawned_by})
    resolved = outcome.get("resolved")
    kind = Outcome.RESOLVED if resolved else Outcome.UNRESOLVED
    reason = None if resolved else Reason.NOT_GRADED if resolved is None else Reason.TESTS_FAILED
    reward = outcome.get("reward", None if resolved is None else float(bool(resolved)))
    verdict = {"outcome": kind, "reason": reason, "reward": reward, "detail": "", "flags": []}
    agent = {"name": first.format, "turns": len(states), "events": len(events), "reports": True}
    task = str(outcome.get("instance_id") or first.conversation)
    return Record(
        version=VERSION, episode=first.conversation, task=task, split=first.format, step=0, attempt=0, started=0.0,
        model=first.source_model, parser="", sampling={}, nodes=[], rows=[], verdict=verdict, agent=agent, patch=b"",
        timing={}, counters={}, events=events, parts=list(parts), calls=calls,
    )  # fmt: skip


def write(source: Path, run: Path) -> Path:
    """Write the conversations of a states file as a run, and return its directory. Raises StatesError and OSError."""
    writer = RecordWriter(run / "episodes", source.name.split(".")[0], synced=False)
    for one in records(source):
        writer.append(one)
    writer.close()
    return run
