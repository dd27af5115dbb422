"""Checks of the task files: each row can be run and graded, and no held-out task is trained on."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from rewards.task import Task, TaskError, load_tasks
from rl.checks.alike import KINDS, Overlap, overlaps
from rl.config.compose import ConfigError, check_all
from rl.episodes.boxes import is_snapshot, kind_of
from rl.episodes.setup import mix_from


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
    _check_overlap(config, [task for _, task in train.values()], [task for _, task in held_out.values()])
    size, trainer = config.data.train_batch_size, config.trainer
    most = config.data.get("train_max_samples") or -1  # all
    count = min(len(train), most) if most > 0 else len(train)
    if config.data.get("val_batch_size") is not None:  # a batch that is lost would end the validation
        raise ConfigError("data.val_batch_size: leave it null; sandbox.concurrency limits how many tasks are played")
    if count < size:
        raise ConfigError(
            f"data.train_batch_size is {size}, but data.train_files (and data.train_max_samples) give only {count} "
            "tasks; a step needs that many different ones"
        )
    if trainer.total_training_steps and (last := trainer.total_epochs * (count // size)) < trainer.total_training_steps:
        raise ConfigError(
            f"trainer.total_epochs={trainer.total_epochs} ends the run after {last} steps, without the checkpoint and "
            f"the validation of step {trainer.total_training_steps}: set trainer.total_training_steps={last}"
        )
    return [task for _, task in (*train.values(), *held_out.values())]


def _check_overlap(config: DictConfig, train: Sequence[Task], held_out: Sequence[Task]) -> None:
    """Raise ConfigError if training tasks have more in common with held-out ones than `allow_overlap` names."""
    allowed = set(config.allow_overlap)
    if unknown := allowed - set(KINDS):
        raise ConfigError(f"allow_overlap={sorted(unknown)}: it may have {', '.join(KINDS)}")
    found = overlaps([vars(task) for task in train], [vars(task) for task in held_out])
    refused = [one for one in found if one.kind not in allowed]
    if not refused:
        return
    counts = Counter(one.kind for one in refused)
    raise ConfigError(
        f"{len({one.instance_id for one in refused})} of {len(train)} training tasks have something in common with "
        f"held-out ones or SWE-bench Verified ({', '.join(f'{n} {kind}' for kind, n in counts.items())}; "
        f"{_in_words(refused[0])}); list them with python -m rl.data.overlap and take them out, "
        f"or set allow_overlap=[{','.join(sorted(allowed | set(counts)))}]"
    )


def _in_words(found: Overlap) -> str:
    if found.kind == "verified":
        return f"{found.instance_id} is of {found.other}, one of its repositories"
    what = "the repository of" if found.kind == "repo" else f"{found.share:.0%} of its {found.kind} in common with"
    return f"{found.instance_id} has {what} {found.other}"


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
    """Return a function that raises TaskError if a task lacks a snapshot that it needs (without images all need one),
    or an agent in a mix. Raises ConfigError for a wrong mix."""
    try:
        mix = mix_from(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    images = kind_of(config.sandbox).from_images

    def usable(task: Task) -> None:
        if (is_snapshot(task) or not images) and not task.snapshot.is_dir():
            raise TaskError(f"{task.instance_id}: image: no directory {task.snapshot}")
        try:
            _ = mix and mix.draw(task.instance_id, 0, task.agent)
        except ValueError as error:
            raise TaskError(f"{task.instance_id}: agent: {error}") from error

    return usable
