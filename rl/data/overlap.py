"""Find what training tasks have in common with held-out ones, or with SWE-bench Verified; refuse it.

    python -m rl.data.overlap train.parquet ... [--heldout heldout.parquet ...] [--allow KIND ...]

Kinds: `verified` (a repository of SWE-bench Verified), `repo` (a repository of the held-out tasks), `diff` and
`statement` (nearly the same gold patch or problem statement as a held-out task). Exit status: 0 nothing was found that
is not allowed, 1 something was, 2 the input is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rewards.task import TaskError, load_tasks
from rl.checks.alike import KINDS, overlaps
from rollout import program


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = program.parser("python -m rl.data.overlap", __doc__)
    parser.add_argument("training", type=Path, nargs="+", help="parquet files of training tasks")
    parser.add_argument("--heldout", type=Path, nargs="+", default=[], help="parquet files of held-out tasks")
    parser.add_argument("--allow", nargs="+", default=[], choices=KINDS, help="kinds that are reported only")
    args = parser.parse_args(arguments)
    try:
        training, heldout = (
            [vars(task) for path in paths for task in load_tasks(path)] for paths in (args.training, args.heldout)
        )
    except TaskError as error:
        return program.failed(f"error: {error}", 2)
    found = overlaps(training, heldout)
    for one in found:
        print(f"{one.kind:<10} {one.share:.2f}  {one.instance_id}  {one.other}")
    counts = Counter(one.kind for one in found)
    print(
        f"{len(training)} training tasks, {len(heldout)} held out: "
        + (", ".join(f"{count} {kind}" for kind, count in counts.items()) or "nothing in common")
    )
    return 1 if set(counts) - set(args.allow) else 0


if __name__ == "__main__":
    program.end(main)
