"""Which checkpoints of a run can be gone on from.

verl writes a checkpoint in place: ``global_step_N/`` file by file, then its tracker file, which names it. A process
that is killed or a disk that is full leaves either of them half done. So the trainer seals what is whole: it waits
until everything is on the disk, then puts an empty file ``complete`` into it. A checkpoint counts if it is sealed, or
if the tracker has come to its step (Megatron saves in the background and writes the tracker when it is done).

Old ones are removed here and not by verl, which does so before the new one is whole, forgets those of an earlier start
and leaves the data loader's part of each.
"""

import os
import shutil
from pathlib import Path

from rl.run.programs import last_lines
from rollout import files

SEAL = "complete"
TRACKER = "latest_checkpointed_iteration.txt"


class NotSaved(Exception):
    """A checkpoint could not be written. What there is of it is removed, which also makes room for the logs."""

    def __init__(self, directory: Path, step: int, cause: BaseException) -> None:
        free = shutil.disk_usage(directory).free
        discard(directory, step)
        why = last_lines(str(cause)) or repr(cause)
        super().__init__(
            f"the checkpoint of step {step} could not be written with {free / 2**20:.1f} MiB free in {directory}: {why}"
        )


def newest(directory: Path) -> int:
    """Step of the newest complete checkpoint, 0 if there is none. Changes nothing."""
    return max(_complete(directory), default=0)


def tidy(directory: Path, keep: int | None) -> list[int]:
    """Make ``directory`` what verl is to find, before it starts: complete checkpoints only, and the tracker names the
    newest. Of the complete ones the newest ``keep`` stay (None: all). Returns the steps that were incomplete."""
    complete = _complete(directory)
    left = sorted(set(_steps(directory)) - set(complete))
    for step in left:
        discard(directory, step)
    for aside in directory.glob(".global_step_*"):
        shutil.rmtree(aside)
    drop_old(directory, keep)
    if complete:
        files.write(directory / TRACKER, str(max(complete)), synced=True)
    else:
        (directory / TRACKER).unlink(missing_ok=True)
    return left


def seal(directory: Path, step: int) -> None:
    """Mark the checkpoint of ``step``, which verl has just written, as complete."""
    place = _place(directory, step)
    for path in [*place.rglob("*"), place, directory]:
        files.sync(path)
    files.write(place / SEAL, "", synced=True)


def drop_old(directory: Path, keep: int | None) -> None:
    """Remove complete checkpoints but the newest ``keep`` (None: none)."""
    for step in sorted(_complete(directory))[:-keep] if keep else []:
        discard(directory, step)


def discard(directory: Path, step: int) -> None:
    """Remove what there is of a checkpoint; at any instant it is there as it was, or is none."""
    place = _place(directory, step)
    if place.exists():
        aside = place.with_name(f".{place.name}")
        os.replace(place, aside)
        shutil.rmtree(aside)


def _steps(directory: Path) -> list[int]:
    names = (place.name.removeprefix("global_step_") for place in directory.glob("global_step_*"))
    return [int(name) for name in names if name.isdigit()]


def _complete(directory: Path) -> list[int]:
    tracker = directory / TRACKER
    named = tracker.read_text().strip() if tracker.exists() else ""
    reached = int(named) if named.isdigit() else 0
    return [step for step in _steps(directory) if step <= reached or (_place(directory, step) / SEAL).exists()]


def _place(directory: Path, step: int) -> Path:
    return directory / f"global_step_{step}"
