"""Resolve rates of tasks, counted from graded episodes, and task files of chosen tasks with their rates in columns."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from rewards.task import Task
from rl.evaluate.statistics import wilson
from rollout import files


@dataclass(frozen=True)
class ResolveRate:
    """A rate is what was measured of a task: how many of its graded episodes were resolved."""

    episodes: int
    resolved: int

    @property
    def value(self) -> float:
        """Return the share that was resolved."""
        return self.resolved / self.episodes

    def columns(self) -> dict[str, Any]:
        """Return the columns of a task's row, with Wilson's interval at 95 %."""
        low, high = wilson(self.value, self.episodes)
        return {"resolve_rate": self.value, "resolve_rate_low": low, "resolve_rate_high": high} | {
            "episodes": self.episodes
        }


def rated(episodes: Iterable[tuple[str, bool]]) -> dict[str, ResolveRate]:
    """Return the rates of tasks. ``episodes``: (task, whether it was resolved) of each graded episode."""
    counts: dict[str, list[int]] = {}
    for task, resolved in episodes:
        count = counts.setdefault(task, [0, 0])
        count[0] += 1
        count[1] += resolved
    return {task: ResolveRate(*count) for task, count in counts.items()}


def write_rated(source: Path, out: Path, tasks: Sequence[Task], rates: Mapping[str, ResolveRate]) -> None:
    """Write the rows of the tasks that have a rate, together with it; columns of earlier rates are replaced."""
    found = [rates[task.instance_id].columns() for task in tasks if task.instance_id in rates]
    columns = {name: [one[name] for one in found] for name in (found[0] if found else ())}
    write_rows(source, out, tasks, rates, columns)


def _moved(task: Task, place: Path) -> str | None:
    """Return what a task's grader reads, with its directory relative to another place."""
    if task.directory is None:
        return task.grading or None
    return json.dumps({**task.asked, "directory": os.path.relpath(task.directory, place)})


def other_than(parser: argparse.ArgumentParser, source: Path, out: Path) -> None:
    """End the program (exit status 2) if it would write its rows over the task file that it takes them from."""
    if out.resolve() == source.resolve():
        parser.error("--out would overwrite the tasks")


def write_rows(
    source: Path, out: Path, tasks: Sequence[Task], wanted: Collection[str], columns: Mapping[str, list[Any]]
) -> None:
    """Write the rows of a task file whose ids are wanted, with all their columns and new ones.

    tasks: those of the file, in its order. Directories are named relative to ``out``.
    """
    table = pyarrow.parquet.read_table(source)
    images = [
        f"dir:{os.path.relpath(task.snapshot, out.parent.resolve())}" if task.image.startswith("dir:") else task.image
        for task in tasks
    ]
    table = table.set_column(table.column_names.index("image"), "image", [images])
    if any(task.directory for task in tasks):
        gradings = [_moved(task, out.parent.resolve()) for task in tasks]
        table = table.set_column(table.column_names.index("grading"), "grading", [gradings])
    table = table.filter(pyarrow.array([task.instance_id in wanted for task in tasks]))
    for name, values in columns.items():
        if name in table.column_names:
            table = table.drop_columns([name])
        table = table.append_column(name, [values])
    with files.replacing(out) as new:
        pyarrow.parquet.write_table(table, new)
