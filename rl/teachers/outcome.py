"""Training data made of teachers' answers: preference pairs, and replies to distil.

A state's majority is what more than half of the teachers that answered have replied: the same tools with the same
arguments. If the student replied otherwise, its reply and a teacher's are a pair. Without such a majority a state gives
nothing, and so does one in which they call nothing: two replies without a call need not say the same.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rl.traces.ingest.agreement import calls_of, same_call, spelled
from rl.traces.ingest.asking import limited
from rl.traces.ingest.evaluate import Answers
from rl.traces.ingest.sft import chat_of
from rl.traces.ingest.states import Message, State, without_thinking
from rollout import files


def majority(answers: Mapping[str, Message], spelled: bool = True) -> list[str]:
    """Return the names of the teachers, out of all that answered, that agree and are more than half; [] for none.

    spelled: see ``calls_of``.
    """
    groups: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for name, action in answers.items():
        if calls := calls_of(action, spelled):
            groups[tuple(sorted(calls))].append(name)
    largest = max(groups.values(), key=len, default=[])
    return largest if 2 * len(largest) > len(answers) else []


def write(source: Path, limit: int | None, names: Sequence[str], answers: Answers, out: Path) -> dict[str, int]:
    """Write pairs.jsonl and distill.jsonl in ``out``; return how many states had which outcome. Raises OSError.

    Rows are those of TRL: ``prompt``, ``chosen``, ``rejected``, and ``messages``; each with ``tools``.
    """
    counts = Counter[str]()
    with (
        files.replacing(out / "pairs.jsonl", synced=True) as one,
        files.replacing(out / "distill.jsonl", synced=True) as other,
        open(one, "w") as pairs,
        open(other, "w") as distilled,
    ):
        for state in limited(source, limit):
            found = {name: answers.get((state.state_id, name)) for name in names}
            given = {name: answer["action"] for name, answer in found.items() if answer}
            if not given:
                counts["no teacher answered"] += 1
                continue
            agreed = majority(given, spelled(state))
            silent = [not calls_of(one, spelled(state)) for one in given.values()]
            if not agreed:
                counts["teachers call nothing" if 2 * sum(silent) > len(silent) else "teachers disagree"] += 1
                continue
            best = given[agreed[0]]
            same = same_call(best, state.student_action, spelled(state))
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
