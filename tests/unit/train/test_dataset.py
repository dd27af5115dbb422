"""Metrics are split by the labels in which the tasks of a file differ."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rl.metrics.episodes import MAX_LABELS
from rl.train.dataset import TaskDataset
from tests.unit.rewards.test_task import row, write


@pytest.mark.parametrize(
    ("changes", "labels"),
    [
        ([{}, {}], []),
        ([{"repo": "a/b"}, {"repo": "a/c"}], ["repo"]),
        ([{"difficulty": "easy"}, {"difficulty": "hard"}, {"difficulty": None}], ["difficulty"]),
        ([{"repo": f"a/{n}", "difficulty": "easy"} for n in range(MAX_LABELS)], ["repo"]),
        ([{"repo": f"a/{n}", "difficulty": str(n % 2)} for n in range(MAX_LABELS + 1)], ["difficulty"]),
    ],
)
def test_labels_have_a_few_different_values(changes: list[dict], labels: list[str], tmp_path: Path) -> None:
    file = write(tmp_path / "t.parquet", [row(instance_id=f"t-{n}", **change) for n, change in enumerate(changes)])
    dataset = TaskDataset(str(file), None, OmegaConf.create({"val_files": str(file)}))
    assert dataset.labels == labels
    assert {item["split"] for item in dataset.items} == {"val"} and len(dataset) == len(changes)


def test_a_path_may_begin_with_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell leaves the ~ of key=~/tasks.parquet as it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "t.parquet", [row()])
    (item,) = TaskDataset("~/t.parquet", None, OmegaConf.create({"val_files": "x"})).items
    assert item["task_file"] == str(tmp_path / "t.parquet")
