"""The results of an evaluation: results.json, predictions for SWE-bench, and tables for people."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from rl.evaluate.statistics import Estimate, estimate
from rl.metrics.episodes import Line, percentile
from rollout import files

_SPREAD = ("turns", "calls", "tokens_in", "tokens_sampled", "agent_s", "wall_s")


def results(name: str, tasks: Mapping[str, Mapping[str, Any]], samples: int, lines: Sequence[Line]) -> dict[str, Any]:
    """Return the contents of results.json.

    ``tasks``: each task's row (a hash), repo and difficulty, by id. ``lines`` of other tasks and of later samples are
    ignored. An episode without a verdict counts under ``infra`` only.
    """
    lines = [line for line in lines if line["task"] in tasks and line["sample"] < samples]
    # Attempts that were lost before an episode got its verdict do not matter here.
    graded = {(line["task"], line["sample"]): line for line in lines if not line["infra"]}
    played = Counter(task for task, _ in graded)
    solved = Counter(task for (task, _), line in graded.items() if line["resolved"])
    counts = {task: (played[task], solved[task]) for task in tasks}

    def groups(column: str) -> dict[str, Any]:
        of = {task: str(row[column]) for task, row in tasks.items() if row[column] is not None}
        return {one: _counted([counts[task] for task in of if of[task] == one]) for one in sorted({*of.values()})}

    episodes = list(graded.values())
    ks = sorted({k for k in (1, 2, 4, 8, 16, 32, 64, samples) if k <= samples})
    return {
        "name": name,
        "complete": len(graded) == len(tasks) * samples,
        "samples": samples,
        **_counted(list(counts.values())),
        "pass_at_k": {str(k): _plain(estimate(list(counts.values()), k)) for k in ks},
        "verdicts": _count("resolved" if line["resolved"] else line["reason"] for line in episodes),
        "agent": _count(str(line["agent"]) for line in episodes),
        "flags": _count(flag for line in episodes for flag in line["flags"]),
        "infra": {
            "episodes": len(tasks) * samples - len(graded),
            "attempts": _count(line["reason"] for line in lines if line["infra"]),
        },
        "spread": {key: _spread([line[key] for line in episodes]) for key in _SPREAD} if episodes else {},
        "by_repo": groups("repo"),
        "by_difficulty": groups("difficulty"),
        "by_task": {task: {**tasks[task], "episodes": n, "resolved": c} for task, (n, c) in counts.items()},
    }


def _counted(counts: Sequence[tuple[int, int]]) -> dict[str, Any]:
    return {
        "tasks": len(counts),
        "episodes": sum(n for n, _ in counts),
        "resolved": sum(c for _, c in counts),
        "pass_at_1": _plain(estimate(counts)),
    }


def _plain(found: Estimate | None) -> dict[str, float] | None:
    return None if found is None else vars(found)


def _count(words: Any) -> dict[str, int]:
    return dict(Counter(words).most_common())


def _spread(values: Sequence[float]) -> dict[str, float]:
    total = math.fsum(values)
    spread = {"mean": total / len(values), "p50": percentile(values, 50), "p90": percentile(values, 90)}
    return {name: round(value, 3) for name, value in (spread | {"max": max(values), "sum": total}).items()}


def predictions(name: str, lines: Sequence[Line], sample: int) -> list[dict[str, str]]:
    """Return one patch per task, in the format of swebench 5.0.2 and sb-cli.

    Tasks without a verdict are left out; tasks with an empty patch are not.
    """
    graded = (line for line in lines if line["sample"] == sample and not line["infra"])
    found = {line["task"]: line["patch"] for line in graded}
    return [
        {"instance_id": task, "model_name_or_path": name, "model_patch": patch} for task, patch in sorted(found.items())
    ]


def write_all(directory: Path, found: Mapping[str, Any], lines: Sequence[Line]) -> None:
    """Write results.json, preds.json with each task's first episode, preds.1.json with its second, and so on."""
    files.write(directory / "results.json", json.dumps(found, indent=1) + "\n", synced=True)
    for sample in range(found["samples"]):
        path = directory / (f"preds.{sample}.json" if sample else "preds.json")
        files.write(path, json.dumps(predictions(found["name"], lines, sample), indent=1) + "\n", synced=True)


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Return tables for the terminal: the figures, then one per repository and per difficulty if there are several."""
    main = Table(title=found["name"], show_header=False)
    for k, one in found["pass_at_k"].items():
        main.add_row(f"pass@{k}", share(one))
    main.add_row("tasks, episodes each", f"{found['tasks']}, {found['samples']}")
    for verdict, count in found["verdicts"].items():
        main.add_row(verdict, f"{count} of {found['episodes']}")
    lost = found["infra"]
    if lost["attempts"]:
        causes = ", ".join(f"{count} {reason}" for reason, count in lost["attempts"].items())
        main.add_row("lost to infrastructure", f"{lost['episodes']} episodes; attempts: {causes}")
    four = ("mean", "p50", "p90", "max")
    for key, spread in found["spread"].items():
        main.add_row(f"{key}: {', '.join(four)}", ", ".join(f"{spread[one]:.4g}" for one in four))
    made = [main]
    for column in ("repo", "difficulty"):
        groups = found[f"by_{column}"]
        if len(groups) > 1:
            table = Table(column, "tasks", "episodes", "resolved", "pass@1")
            for name, row in groups.items():
                counts = (str(row[key]) for key in ("tasks", "episodes", "resolved"))
                table.add_row(name, *counts, share(row["pass_at_1"]))
            made.append(table)
    return made


def share(one: Mapping[str, float] | None, form: Callable[[float], str] = "{:.3f}".format) -> str:
    """Return a value with its interval as text, "-" for None."""
    return "-" if one is None else f"{form(one['value'])}  [{form(one['low'])}, {form(one['high'])}]"
