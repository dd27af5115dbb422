"""The checkpoints of a run: tell which are complete, and remove incomplete and old ones.

verl writes a checkpoint in place: ``global_step_N/`` file by file, then a tracker file that names the step. A killed
process or a full disk can leave either half written. So the trainer seals a checkpoint: when everything has reached the
disk, an empty file ``complete`` is put into it. A checkpoint counts as complete if it is sealed, or if the tracker has
reached its step (Megatron saves in the background and writes the tracker when it is done).

Old checkpoints are removed here and not by verl: verl removes one before the new one is complete, forgets those of an
earlier start, and leaves the data loader's part of each behind.
"""

import os
import shutil
from pathlib import Path

from rl.run.programs import last_lines
from rollout import files

SEAL = "complete"
TRACKER = "latest_checkpointed_iteration.txt"


class NotSaved(Exception):
    """A checkpoint could not be written. What exists of it is removed, which also makes room for the logs."""

    def __init__(self, directory: Path, step: int, cause: BaseException) -> None:
        free = f"{shutil.disk_usage(directory).free / 2**20:.1f} MiB free in {directory}"
        discard(directory, step)
        why = last_lines(str(cause)) or repr(cause)
        super().__init__(f"the checkpoint of step {step} could not be written with {free}: {why}")


def newest(directory: Path) -> int:
    """Return the step of the newest complete checkpoint, 0 if there is none. Nothing is changed."""
    return max(_complete(directory), default=0)


def tidy(directory: Path, keep: int | None) -> list[int]:
    """Prepare ``directory`` for verl to resume from.

    Afterwards it holds complete checkpoints only, the newest ``keep`` of them (None: all), and the tracker names the
    newest one. Returns the steps whose checkpoints were incomplete and are removed.
    """
    complete = _complete(directory)
    incomplete = sorted(set(_steps(directory)) - set(complete))
    for step in incomplete:
        discard(directory, step)
    for aside in directory.glob(".global_step_*"):
        shutil.rmtree(aside)
    drop_old(directory, keep)
    if complete:
        files.write(directory / TRACKER, str(max(complete)), synced=True)
    else:
        (directory / TRACKER).unlink(missing_ok=True)
    return incomplete


def seal(directory: Path, step: int) -> None:
    """Mark the checkpoint of ``step``, which verl has just written, as complete."""
    checkpoint = _path(directory, step)
    for path in [*checkpoint.rglob("*"), checkpoint, directory]:
        files.sync(path)
    files.write(checkpoint / SEAL, "", synced=True)


def unseal(directory: Path, step: int) -> None:
    """Mark the checkpoint of ``step``, which is about to be written again, as incomplete."""
    (_path(directory, step) / SEAL).unlink(missing_ok=True)


def drop_old(directory: Path, keep: int | None) -> None:
    """Remove all complete checkpoints but the newest ``keep``; None keeps all."""
    for step in sorted(_complete(directory))[:-keep] if keep else []:
        discard(directory, step)


def discard(directory: Path, step: int) -> None:
    """Remove the checkpoint of ``step`` if it exists. A kill in between leaves it untouched or out of sight."""
    checkpoint = _path(directory, step)
    if checkpoint.exists():
        aside = checkpoint.with_name(f".{checkpoint.name}")
        os.replace(checkpoint, aside)
        shutil.rmtree(aside)


def _steps(directory: Path) -> list[int]:
    names = (path.name.removeprefix("global_step_") for path in directory.glob("global_step_*"))
    return [int(name) for name in names if name.isdigit()]


def _complete(directory: Path) -> list[int]:
    tracker = directory / TRACKER
    named = tracker.read_text().strip() if tracker.exists() else ""
    reached = int(named) if named.isdigit() else 0
    return [step for step in _steps(directory) if step <= reached or (_path(directory, step) / SEAL).exists()]


def _path(directory: Path, step: int) -> Path:
    return directory / f"global_step_{step}"
