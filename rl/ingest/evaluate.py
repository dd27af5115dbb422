"""This module evaluates a policy on recorded states: how often does it reply what the recorded model has replied?"""

from __future__ import annotations

import asyncio
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from rl.evaluate.statistics import estimate
from rl.ingest.agreement import calls_of, same_call, same_tool
from rl.ingest.asking import Budget, answers_of, ask_all, identify, limited, opened
from rl.ingest.endpoints import Endpoint
from rl.ingest.states import State
from rl.screen import Screen
from rollout import files


class Tally:
    """A tally counts how many states of each conversation two replies agree in. Intervals are over conversations."""

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])

    def add(self, conversation: str, agrees: bool) -> None:
        """Count a state."""
        self._counts[conversation][0] += 1
        self._counts[conversation][1] += agrees

    def figures(self) -> dict[str, Any]:
        """Return the share, its interval at 95 %, and how many states and conversations are behind it."""
        found = estimate([(n, c) for n, c in self._counts.values()])
        states = sum(n for n, _ in self._counts.values())
        if found is None:
            return {"share": None, "low": None, "high": None, "states": 0, "conversations": 0}
        return {"share": found.value, "low": found.low, "high": found.high} | {
            "states": states,
            "conversations": found.tasks,
        }


def shown(figures: Mapping[str, Any]) -> str:
    """Return a share with its interval as text."""
    if figures["share"] is None:
        return "-"
    return f"{figures['share']:.1%} ({figures['low']:.1%} to {figures['high']:.1%})"


def percentile(values: list[float], share: float) -> float | None:
    """Return a percentile of values, None if there are none."""
    if len(values) < 2:
        return values[0] if values else None
    return statistics.quantiles(values, n=100, method="inclusive")[round(share * 100) - 1]


def compared(
    source: Path, limit: int | None, answers: Mapping[tuple[str, str], Mapping[str, Any]], name: str
) -> dict[str, Any]:
    """Return the figures of one endpoint's answers beside the recorded replies: in all, and by recorded tool."""
    call, tool, kinds = Tally(), Tally(), defaultdict[str, Tally](Tally)
    for state, answer in _answered(source, limit, answers, name):
        mine = answer["action"]
        same = same_call(mine, state.student_action)
        call.add(state.conversation, same)
        tool.add(state.conversation, same_tool(mine, state.student_action))
        kinds["+".join(sorted({n for n, _ in calls_of(state.student_action)})) or "no call"].add(
            state.conversation, same
        )
    seconds = [answer["seconds"] for (_, one), answer in answers.items() if one == name]
    mine = [answer for (_, one), answer in answers.items() if one == name]
    return {
        "same_call": call.figures(),
        "same_tool": tool.figures(),
        "by_tool": {kind: tally.figures() for kind, tally in sorted(kinds.items())},
        "p50_s": percentile(seconds, 0.5),
        "p95_s": percentile(seconds, 0.95),
        "input_tokens": sum(one["input_tokens"] for one in mine),
        "output_tokens": sum(one["output_tokens"] for one in mine),
        "cost": sum(one["cost"] for one in mine),
    }


def _answered(
    source: Path, limit: int | None, answers: Mapping[tuple[str, str], Mapping[str, Any]], name: str
) -> Iterator[tuple[State, Mapping[str, Any]]]:
    for state in limited(source, limit):
        answer = answers.get((state.state_id, name))
        if answer is not None:
            yield state, answer


def evaluate(source: Path, endpoint: Endpoint, out: Path, limit: int | None, screen: Screen) -> int:
    """Ask a policy about all states, write results.json, and return the exit status: 1 if not all were answered.

    Raises ValueError (StatesError and JournalError among them) and OSError.
    """
    total = sum(1 for _ in limited(source, limit))
    identify(source, out, [endpoint])
    journal = opened(out)
    try:
        left = total - len(journal.finished("state", "endpoint"))
        screen.say(f"{total} states, {left} of them to ask {endpoint.model} about")
        budget = Budget(None, 0.0)
        asyncio.run(ask_all(source, [endpoint], journal, budget, lambda *_: True, limit, screen, left))
        answers = answers_of(journal)
        done = len(journal.finished("state", "endpoint"))
    finally:
        journal.close()
    results: dict[str, Any] = {
        "states": total,
        "answered": len(answers),
        "refused": done - len(answers),
        "model": endpoint.model,
    }
    results |= compared(source, limit, answers, endpoint.name)
    files.write(out / "results.json", json.dumps(results, indent=1), synced=True)
    table = Table("recorded reply", "same calls and arguments", "states", "conversations")
    for kind, figures in {"all": results["same_call"], **results["by_tool"]}.items():
        table.add_row(kind, shown(figures), str(figures["states"]), str(figures["conversations"]))
    screen.print(table)
    screen.print(f"same tools, with any arguments: {shown(results['same_tool'])}")
    screen.next(("results", str(out / "results.json")))
    return 0 if done == total else 1
