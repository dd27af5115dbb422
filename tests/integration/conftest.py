"""This module has fixtures that cost more than one test should pay: a task, a vLLM server, a warm-started policy."""

from __future__ import annotations

import pytest

from rewards.task import Task, load_tasks
from rl.quickstart.tasks import make_tasks


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    """A small repair task with its repository."""
    out = tmp_path_factory.mktemp("tasks")
    make_tasks(out, seed=5, n_train=1, n_heldout=1)
    return load_tasks(out / "train.parquet")[0]
