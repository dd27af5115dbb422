"""Evaluate a policy on recorded states: how often it replies what the recorded model replied."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from rl.data.rates import rated
from rl.evaluate.statistics import estimate
from rl.metrics.episodes import percentile
from rl.run.screen import Screen
from rl.traces.ingest.agreement import calls_of, same_call, same_tool, spelled
from rl.traces.ingest.asking import Survey, limited
from rl.traces.ingest.endpoints import Endpoint
from rl.traces.ingest.states import State
from rollout import files

Answers = Mapping[tuple[str, str], Mapping[str, Any]]  # by state and endpoint


def share(agreed: Iterable[tuple[str, bool]]) -> dict[str, Any]:
    """Return the share of states, each given with its conversation, in which two replies agree; its interval at 95 %,
    which is over conversations; and how many states and conversations are behind it."""
    rates = rated(agreed).values()
    found = estimate([(one.episodes, one.resolved) for one in rates])
    if found is None:
        return {"share": None, "low": None, "high": None, "states": 0, "conversations": 0}
    about = {"states": sum(one.episodes for one in rates), "conversations": found.tasks}
    return {"share": found.value, "low": found.low, "high": found.high, **about}


def shown(figures: Mapping[str, Any]) -> str:
    """Return a share with its interval as text."""
    if figures["share"] is None:
        return "-"
    return f"{figures['share']:.1%} ({figures['low']:.1%} to {figures['high']:.1%})"


def compared(states: Iterable[State], answers: Answers, name: str) -> dict[str, Any]:
    """Return the figures of one endpoint's answers beside the recorded replies: of those with a call, and by recorded
    tool."""
    calls, tools = list[tuple[str, bool]](), list[tuple[str, bool]]()
    kinds: dict[str, list[tuple[str, bool]]] = defaultdict(list)
    mine = {state: answer for (state, one), answer in answers.items() if one == name}
    for state in states:
        if state.state_id not in mine:
            continue
        action, text = mine[state.state_id]["action"], spelled(state)
        same, called = same_call(action, state.student_action, text), calls_of(state.student_action, text)
        if called:  # that two replies call nothing says little of what they say
            calls.append((state.conversation, same))
            tools.append((state.conversation, same_tool(action, state.student_action, text)))
        kinds["+".join(sorted({name for name, _ in called or ()})) or "no call"].append((state.conversation, same))
    seconds = [answer["seconds"] for answer in mine.values()]
    return {
        "same_call": share(calls),
        "same_tool": share(tools),
        "by_tool": {kind: share(agreed) for kind, agreed in sorted(kinds.items())},
        "p50_s": percentile(seconds, 50) if seconds else None,
        "p95_s": percentile(seconds, 95) if seconds else None,
        **{key: sum(one[key] for one in mine.values()) for key in ("input_tokens", "output_tokens", "cost")},
    }


def evaluate(source: Path, endpoint: Endpoint, out: Path, limit: int | None, screen: Screen) -> int:
    """Ask a policy about all states, write results.json, and return the exit status: 1 if not all were answered.

    Raises ValueError (StatesError and JournalError among them) and OSError.
    """
    survey = Survey(source, [endpoint], limit)
    survey.tell(screen)
    asked = survey.ask(out, None, screen)
    results: dict[str, Any] = {
        "states": len(survey.wanted[endpoint.name]),
        "answered": len(asked.answers),
        "refused": len(asked.refused),
        "model": endpoint.model,
        **compared(limited(source, limit), asked.answers, endpoint.name),
    }
    files.write(out / "results.json", json.dumps(results, indent=1), synced=True)
    table = Table("recorded reply", "same calls and arguments", "states", "conversations")
    for kind, figures in {"any call": results["same_call"], **results["by_tool"]}.items():
        table.add_row(kind, shown(figures), str(figures["states"]), str(figures["conversations"]))
    screen.print(table)
    screen.print(f"same tools, with any arguments: {shown(results['same_tool'])}")
    screen.next(("results", str(out / "results.json")))
    return 1 if asked.left else 0
