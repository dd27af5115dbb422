"""This module checks the task files: each row is a task that can be run and graded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from rewards.task import Task, TaskError, load_tasks
from rl.boxes import is_snapshot, kind_of
from rl.config import ConfigError, check_all


def check_tasks(config: DictConfig) -> list[Task]:
    """Return the tasks of both splits, if each can be run and graded and no held-out task is trained on.

    Raises:
        ConfigError: for the first row of a file or the first image that is wrong.
    """
    tasks = check_files(config)
    kind_of(config.sandbox).check_tasks(tasks)
    return tasks


def check_files(config: DictConfig) -> list[Task]:
    """Return the tasks of both splits like ``check_tasks``, without asking for their images. Raises ConfigError."""
    found: dict[str, dict[str, tuple[str, Task]]] = {}

    def load(key: str) -> Callable[[DictConfig], None]:
        return lambda config: found.update({key: _load(config, key)})

    check_all(config, load("data.train_files"), load("data.val_files"))
    train, held_out = found["data.train_files"], found["data.val_files"]
    for instance_id, (key, _) in held_out.items():
        if instance_id in train:
            raise ConfigError(
                f"{instance_id} is a training task ({train[instance_id][0]}) and a held-out one ({key}); "
                "take it out of one of the files"
            )
    size = config.data.train_batch_size
    if len(train) < size:
        raise ConfigError(
            f"data.train_batch_size is {size}, but data.train_files has only {len(train)} tasks; "
            "a step needs that many different ones"
        )
    return [task for _, task in (*train.values(), *held_out.values())]


def check_task_files(config: DictConfig, key: str) -> list[Task]:
    """Return the tasks of the files that ``key`` names, if each can be run and graded.

    Raises:
        ConfigError: for the first file, row or image that is wrong.
    """
    tasks = [task for _, task in _load(config, key).values()]
    kind_of(config.sandbox).check_tasks(tasks)
    return tasks


def _load(config: DictConfig, key: str) -> dict[str, tuple[str, Task]]:
    """Return (file, task) by instance id for the files that ``key`` names."""
    files = OmegaConf.select(config, key)
    if not files:
        raise ConfigError(f"{key} is not set; give a parquet file of tasks, or a list of such files")
    found: dict[str, tuple[str, Task]] = {}
    usable = _usable(config)
    for name in files if isinstance(files, ListConfig) else [files]:
        path = Path(name).expanduser()
        if not path.is_file():
            raise ConfigError(f"{key}: no file {path.absolute()}")
        try:
            for task in load_tasks(path):
                usable(task)
                if task.instance_id in found:
                    raise TaskError(f"{path}: {task.instance_id}: instance_id: also in {found[task.instance_id][0]}")
                found[task.instance_id] = str(path), task
        except TaskError as error:
            raise ConfigError(f"{key}: {error}") from error
    return found


def _usable(config: DictConfig) -> Callable[[Task], Any]:
    """Return a function that raises TaskError if a task lacks its snapshot; without images each task needs one."""

    def local(task: Task) -> None:
        if not task.snapshot.is_dir():
            raise TaskError(f"{task.instance_id}: image: no directory {task.snapshot}")

    images = kind_of(config.sandbox).from_images
    return lambda task: None if images and not is_snapshot(task) else local(task)
