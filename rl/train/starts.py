"""Requeues without progress: end a run that is started again and again without getting on.

A job that requeues itself does so until someone looks: a time limit that is too short for a step and its checkpoint
would cost a whole allocation. ``starts.json`` in the run directory holds, for the last starts since the one by hand,
their numbers in the job, and how far the run was when they began. What counts is what the next start can build on: the
newest checkpoint, the episodes that are kept from an interrupted rollout, what a preparation has kept
(``rl.quickstart.prepare``), and the images that a job's nodes have pulled. A step that was finished and not saved is
done again, so it does not count.

For a job on a cluster, ``rl.cluster`` notes the start when it has the run directory's lease, before it pulls images and
starts Ray, and the ``rl.train`` in it notes none. A start that ends earlier has written nothing, but SLURM has counted
it: numbers that are missing in ``starts.json`` are starts without progress too, and ``rl.cluster`` looks at them first
of all.

Only starts after a requeue are held to this: whoever starts a run by hand, or presses Ctrl-C, sees what happens.
"""

import json
import sys
from pathlib import Path
from typing import Any

from rewards.verdict import Outcome
from rl.run.checkpoints import TRACKER
from rl.run.directory import Run
from rl.train import unfinished
from rollout import files
from rollout.records.reading import Reader

FRUITLESS = 2  # starts in a row without progress that end a run
FILE = "starts.json"
IMAGES = "images_ready"  # file in the logs of a node: how many images it had in the end


class NoProgress(Exception):
    """A run was started twice and is where it was; the message says what to do."""


def check(run: Run, job: str, start: int, prepared: Path | None = None) -> None:
    """Raise NoProgress if the start must not go on; nothing is written.

    Args:
        run: the run, whose directory need not exist.
        job: the job that is started.
        start: how often it was started before; 0 is the start by hand.
        prepared: the directory below which what the run needs is made.

    Raises:
        NoProgress: this start is a requeue, and the two before it, noted or not, brought the run no further.
    """
    now = _state(run, prepared)
    got_on = [noted["start"] for noted in read(run.dir, job, start) if noted["state"] != now]
    fruitless = start - max(got_on, default=-1) - 1
    if fruitless >= FRUITLESS:
        at = f"step {now['step']}" if now["step"] else "its beginning"
        raise NoProgress(
            f"no progress: the last {fruitless} starts of {run.dir} added no checkpoint, no episode that could be "
            f"kept, no image and nothing to its preparation, so it is not requeued again and stays at {at}; give the "
            "job more time (--time), save more often (run.save_minutes), or let it end in time (run.grace_s and "
            "--signal: python -m rl.plan prints what fits), and submit it again"
        )


def note(run: Run, job: str, start: int, prepared: Path | None = None) -> None:
    """Check the start, as ``check`` does, and note it. Raises NoProgress."""
    check(run, job, start, prepared)
    starts = [*read(run.dir, job, start), {"job": job, "start": start, "state": _state(run, prepared)}]
    files.write(run.dir / FILE, json.dumps(starts[-FRUITLESS - 1 :]) + "\n", synced=True)


def read(run_dir: Path, job: str, start: int) -> list[dict[str, Any]]:
    """Return what was noted of the job's starts before this one."""
    path = run_dir / FILE
    noted = json.loads(path.read_text()) if path.exists() else []
    return [one for one in noted if one["job"] == job and one["start"] < start]


def following(run_dir: Path, job: str) -> int:
    """Return the number after the job's last start that was noted, for a job that may have other runs too."""
    return max((one["start"] for one in read(run_dir, job, sys.maxsize)), default=-1) + 1


def _state(run: Run, prepared: Path | None) -> dict[str, int]:
    """Return how far the run is, by what the next start can build on."""
    state = {"step": run.checkpoint_step, "kept": unfinished.count(run.dir, run.checkpoint_step)}
    state["images"] = sum(int(file.read_text()) for file in run.dir.glob(f"logs/*/{IMAGES}"))
    if prepared:
        state["prepared"] = _made(prepared)
    return state


def _made(prepared: Path) -> int:
    """Return how much the preparations have made: files and directories, episodes, and updates that are saved."""
    parts = [*prepared.glob("*/*")]
    # rl.quickstart.prepare renames what is whole.
    begun = [part for part in parts if part.name.startswith(".") and part.is_dir()]
    records = (record for part in begun for path in part.glob("episodes/*") for record in Reader(path, damage=[]))
    episodes = sum(record.verdict["outcome"] != Outcome.INFRA_FAILURE for record in records)  # those are played again
    updates = sum(int(path.read_text()) for part in begun for path in part.glob(f"*.sft/checkpoints/{TRACKER}"))
    return len(parts) + sum(len([*part.iterdir()]) for part in begun) + episodes + updates
