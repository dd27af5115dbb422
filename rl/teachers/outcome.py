"""This module makes training data of teachers' answers: preference pairs, and replies to distil.

A state's majority is what more than half of the teachers that answered have replied: the same tools with the same
arguments. If the student replied otherwise, its reply and a teacher's are a pair. Without such a majority a state gives
nothing.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from rl.ingest.agreement import calls_of
from rl.ingest.asking import limited
from rl.ingest.sft import chat_of
from rl.ingest.states import Message, State, without_thinking
from rollout import files

Answers = Mapping[tuple[str, str], Mapping[str, Any]]


def majority(answers: Mapping[str, Message]) -> list[str]:
    """Return the names of the teachers, out of all that answered, that agree and are more than half; [] for none."""
    groups: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for name, action in answers.items():
        groups[tuple(sorted(calls_of(action)))].append(name)
    largest = max(groups.values(), key=len, default=[])
    return largest if 2 * len(largest) > len(answers) else []


def write(source: Path, limit: int | None, names: Sequence[str], answers: Answers, out: Path) -> dict[str, int]:
    """Write pairs.jsonl and distill.jsonl in ``out``; return how many states had which outcome. Raises OSError.

    Rows are those of TRL: ``prompt``, ``chosen``, ``rejected``, and ``messages``; each with ``tools``.
    """
    counts = Counter[str]()
    with ExitStack() as stack:
        pairs, distilled = (
            stack.enter_context(open(stack.enter_context(files.replacing(out / name, synced=True)), "w"))
            for name in ("pairs.jsonl", "distill.jsonl")
        )
        for state in limited(source, limit):
            given = {
                name: answers[state.state_id, name]["action"] for name in names if (state.state_id, name) in answers
            }
            if not given:
                counts["no teacher answered"] += 1
                continue
            agreed = majority(given)
            if not agreed:
                counts["teachers disagree"] += 1
                continue
            best = given[agreed[0]]
            same = sorted(calls_of(best)) == sorted(calls_of(state.student_action))
            about = {"state_id": state.state_id, "teachers": agreed, "answered": len(given)}
            try:
                taught = _chat(state, best)
                pair = None if same else _pair(state, best)
            except ValueError:
                counts["cannot be written as chat"] += 1
                continue
            counts["teachers agree with the student" if same else "teachers agree on something else"] += 1
            row = {"messages": taught[0], "tools": taught[1], "agrees_with_student": same}
            distilled.write(json.dumps(row | about, ensure_ascii=False) + "\n")
            if pair is not None:
                pairs.write(json.dumps(pair | about, ensure_ascii=False) + "\n")
    return dict(counts)


def _chat(state: State, action: Message) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    return chat_of(msgspec.structs.replace(state, student_action=action))


def _pair(state: State, best: Message) -> dict[str, Any]:
    """Return a pair, both sides without thinking: else the side that has it would win or lose by that."""
    sides = []
    for action in (best, state.student_action):
        bare = without_thinking(action) or {"role": "assistant", "content": []}
        sides.append(_chat(state, bare))
    (chosen, tools), (rejected, _) = sides
    return {"prompt": chosen[:-1], "chosen": chosen[-1:], "rejected": rejected[-1:], "tools": tools}
