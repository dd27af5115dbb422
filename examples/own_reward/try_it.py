"""Print what a reward function gives for tasks whose solution is known: see README.md beside this file."""

from __future__ import annotations

import argparse
import asyncio
import functools
from pathlib import Path

from rewards.grade import grade
from rewards.shape import Effort, Shape, load
from rewards.task import load_tasks
from rollout.sandbox.local.box import boot_local

NOTE = "diff --git a/NOTE b/NOTE\nnew file mode 100644\n--- /dev/null\n+++ b/NOTE\n@@ -0,0 +1 @@\n+note\n"


async def main() -> None:
    """Grade two patches per task in local sandboxes and print verdicts and rewards."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", type=Path, help="a parquet file of tasks with gold patches and local snapshots")
    parser.add_argument("function", help="module:function")
    parser.add_argument("--turns", type=int, default=5, help="pretend that the episode took this many turns (5)")
    options = parser.parse_args()
    shape = Shape(function=load(options.function))
    for task in load_tasks(options.tasks):
        for name, patch in (("gold patch", task.patch or ""), ("a note, no fix", NOTE)):
            verdict = await grade(task, patch.encode(), functools.partial(boot_local, task.snapshot), timeout_s=300)
            verdict = shape(verdict, task, Effort(options.turns, 1000, patch.encode()))
            print(f"{task.instance_id}  {name:<15} {verdict.reason or 'resolved':<14} reward {verdict.reward}")


if __name__ == "__main__":
    asyncio.run(main())
