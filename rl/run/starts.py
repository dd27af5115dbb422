"""This module ends a run that is started again and again without getting on.

A job that requeues itself does so until someone looks: a time limit that is too short for a step and its checkpoint
would cost a whole allocation. ``starts.json`` in the run directory holds, for the last starts since the one by hand,
how far the run was when they began. What counts is what the next start can build on: the newest checkpoint, the
episodes that are kept from an interrupted rollout, what a preparation has kept (``rl.quickstart.prepare``), and the
images that a job's nodes have pulled. A step that was finished and not saved is done again, so it does not count. Of a
job on a cluster, ``rl.cluster`` notes the start, before it pulls images and starts Ray, and the ``rl.train`` in it
notes none.

Only starts after a requeue are held to this: who starts a run by hand, or presses Ctrl-C, sees what happens.
"""

import json
from pathlib import Path

from rewards.verdict import Outcome
from rl.run import unfinished
from rl.run.checkpoints import TRACKER
from rl.run.directory import Run
from rollout import files
from rollout.records import Reader

FRUITLESS = 2  # starts in a row without progress that end a run
IMAGES = "images_ready"  # file in the logs of a node: how many images it had at last


class NoProgress(Exception):
    """A run was started twice and is where it was; the message says what to do."""


def note(run: Run, requeued: bool, prepared: Path | None = None) -> None:
    """Note that the run is started; what it needs is made below ``prepared``.

    Raises:
        NoProgress: this start is a requeue, and the two before it brought the run no further.
    """
    path = run.dir / "starts.json"
    now = {"step": run.checkpoint_step, "kept": unfinished.count(run.dir, run.checkpoint_step)}
    now["images"] = sum(int(file.read_text()) for file in run.dir.glob(f"logs/*/{IMAGES}"))
    if prepared:
        now["prepared"] = _made(prepared)
    before = read(path) if requeued else []
    if before[-FRUITLESS:] == [now] * FRUITLESS:
        at = f"step {now['step']}" if now["step"] else "its beginning"
        raise NoProgress(
            f"no progress: the last {FRUITLESS} starts of {run.dir} added no checkpoint, no episode that could be "
            f"kept, no image and nothing to its preparation, so it is not requeued again and stays at {at}; give the "
            "job more time (--time), save more often (run.save_minutes), or let it end in time (run.grace_s and "
            "--signal: python -m rl.plan prints what fits), and submit it again"
        )
    files.write(path, json.dumps([*before, now][-FRUITLESS:]) + "\n", synced=True)


def read(path: Path) -> list[dict[str, int]]:
    """Return what was noted; an empty list if nothing was."""
    return json.loads(path.read_text()) if path.exists() else []


def _made(prepared: Path) -> int:
    """Return how much the preparations have made: files and directories, episodes, and updates that are saved."""
    parts = [*prepared.glob("*/*")]
    # rl.quickstart.prepare renames what is whole.
    begun = [part for part in parts if part.name.startswith(".") and part.is_dir()]
    records = (record for part in begun for path in part.glob("episodes/*") for record in Reader(path, damage=[]))
    episodes = sum(record.verdict["outcome"] != Outcome.INFRA_FAILURE for record in records)  # those are played again
    updates = sum(int(path.read_text()) for part in begun for path in part.glob(f"*.sft/checkpoints/{TRACKER}"))
    return len(parts) + sum(len([*part.iterdir()]) for part in begun) + episodes + updates
