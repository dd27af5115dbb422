"""The task files as verl's training and validation data: one item per task, without its hidden tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet
import torch
from torch.utils.data import Dataset

from rewards.task import load_tasks
from rl.metrics.episodes import MAX_LABELS


class TaskDataset(Dataset[dict[str, Any]]):
    """A data set has one item per task. verl makes it by its key ``data.custom_cls``, which prescribes the signature.

    An item names the task and its file and does not carry the row itself: hidden tests stay out of the trainer's
    queues, and an agent loop worker reads each file once. ``labels``: those of "difficulty" and "repo" by which metrics
    are split. ``rates``: (episodes, resolved) as measured for each task (``rl.data.probe``), (0, 0) if nothing was.
    Raises rewards.task.TaskError for a bad row.
    """

    def __init__(
        self, data_files: str | list[str], tokenizer: Any, config: Any, processor: Any = None, max_samples: int = -1
    ) -> None:
        files = [data_files] if isinstance(data_files, str) else list(data_files)
        held_out = config.val_files
        held_out = {held_out} if isinstance(held_out, str) else set(held_out)
        tasks = [(file, task) for file in files for task in load_tasks(Path(file).expanduser())]
        if max_samples > 0:
            tasks = tasks[:max_samples]
        self.items = [
            {
                "task": task.instance_id,
                "task_file": str(Path(file).expanduser().absolute()),
                "split": "val" if file in held_out else "train",
                "data_source": task.repo,
                "kept": "",  # episodes of the task's group that need not be played: rl.train.unfinished
                # For verl's validation table; Claude Code makes the real prompt from the statement.
                "raw_prompt": [{"role": "user", "content": task.problem_statement}],
            }
            for file, task in tasks
        ]
        values = {name: {getattr(task, name) for _, task in tasks} for name in ("difficulty", "repo")}
        self.labels = [name for name, found in values.items() if 1 < len(found) <= MAX_LABELS]
        measured = {task: rate for file in files for task, rate in _measured(Path(file).expanduser()).items()}
        self.rates = {task.instance_id: measured.get(task.instance_id, (0, 0)) for _, task in tasks}

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        # verl's batch object must hold at least one tensor.
        return {**self.items[index], "index": index, "dummy_tensor": torch.zeros(1, dtype=torch.uint8)}


def _measured(file: Path) -> dict[str, tuple[int, int]]:
    """Return (episodes, resolved) of the tasks of a file whose rates are in its columns."""
    columns = ["instance_id", "episodes", "resolve_rate"]
    if not set(columns) <= set(pyarrow.parquet.read_schema(file).names):
        return {}
    rows = pyarrow.parquet.read_table(file, columns=columns).to_pylist()
    return {
        row["instance_id"]: (row["episodes"], round(row["episodes"] * row["resolve_rate"]))
        for row in rows
        if row["episodes"] and row["resolve_rate"] is not None
    }
