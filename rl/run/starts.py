"""This module ends a run that is started again and again without getting on.

A job that requeues itself does so until someone looks: a time limit that is too short for a step and its checkpoint
would cost a whole allocation. ``starts.json`` in the run directory holds, for the last starts since the one by hand,
how far the run was when they began. What counts is what the next start can build on: the newest checkpoint and the
episodes that are kept from an interrupted rollout. A step that was finished and not saved is done again, so it does not
count.

Only starts after a requeue are held to this: who starts a run by hand, or presses Ctrl-C, sees what happens.
"""

import json
from pathlib import Path

from rl.run import unfinished
from rl.run.directory import Run
from rollout import files

FRUITLESS = 2  # starts in a row without progress that end a run


class NoProgress(Exception):
    """A run was started twice and is where it was; the message says what to do."""


def note(run: Run, requeued: bool) -> None:
    """Note that the run is started.

    Raises:
        NoProgress: this start is a requeue, and the two before it brought the run no further.
    """
    path = run.dir / "starts.json"
    now = {"step": run.checkpoint_step, "kept": unfinished.count(run.dir, run.checkpoint_step)}
    before = read(path) if requeued else []
    if before[-FRUITLESS:] == [now] * FRUITLESS:
        at = f"step {now['step']}" if now["step"] else "its beginning"
        raise NoProgress(
            f"no progress: the last {FRUITLESS} starts of {run.dir} added neither a checkpoint nor an episode that "
            f"could be kept, so it is not requeued again and stays at {at}; give the job more time (--time), save more "
            "often (run.save_minutes), or let it end in time (run.grace_s and --signal: python -m rl.plan prints what "
            "fits), and submit it again"
        )
    files.write(path, json.dumps([*before, now][-FRUITLESS:]) + "\n", synced=True)


def read(path: Path) -> list[dict[str, int]]:
    """Return what was noted; an empty list if nothing was."""
    return json.loads(path.read_text()) if path.exists() else []
