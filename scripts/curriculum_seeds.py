"""Compare the curriculum with uniform drawing: steps until the quickstart's policy resolves 0.8, for several seeds.

    .venv/bin/python scripts/curriculum_seeds.py --seeds 1 2 3 --out outputs/curriculum-seeds.md [key=value ...]

Both runs of a seed have the same tasks and begin with the same policy, and play the held-out tasks (32 episodes) after
every second step. Their rates on training tasks cannot be compared, because the runs draw different tasks. There are 32
training tasks, so that a run draws each about twice: in a single pass, any order plays every task once; with 16, no
policy gets to 0.8. What is finished is not run again. key=value: more of rl.train's command line.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from measuring import audited, finished, minutes, table

from rl.metrics.episodes import read_jsonl, resolve_rate
from rollout import program

ENOUGH = 0.8
WAYS = {"uniform": "false", "by rate": "true"}
FEW = ["quickstart.train_tasks=32", "curriculum.readmit_after=4", "actor_rollout_ref.rollout.val_kwargs.n=1"]
COLUMNS = (
    "seed", "drawn", f"steps to {ENOUGH}", "held-out, every second step", "mean", "groups that teach nothing",
    "minutes", "audit",
)  # fmt: skip


def run(seed: int, way: str, root: Path, more: list[str]) -> Path:
    """Return the directory of a finished run; train one if there is none."""
    command = ["rl.train", "+experiment=quickstart", f"seed={seed}", f"run.root={root}", "trainer.logger=[]"]
    command += [f"curriculum.by_rate={WAYS[way]}", "trainer.test_freq=2", f"trainer.experiment_name={way.split()[-1]}"]
    return finished(root / way.split()[-1], *command, *FEW, *more)


def row(seed: int, way: str, directory: Path) -> list[str]:
    records = read_jsonl(directory / "metrics.jsonl")
    held_out = [(line["step"], rate) for line in records if (rate := resolve_rate(line, "val")) is not None]
    steps = [line for line in records if "timing_s/step" in line]
    equal = sum(line["group/all_equal"] for line in steps) / len(steps)
    return [
        str(seed),
        way,
        str(next((step for step, rate in held_out if rate >= ENOUGH), "never")),
        " ".join(f"{rate:.2f}" for _, rate in held_out),
        f"{sum(rate for _, rate in held_out) / len(held_out):.3f}",
        f"{equal:.2f}",
        f"{minutes(directory):.1f}",
        audited(directory),
    ]


def main() -> None:
    options = program.parser("python scripts/curriculum_seeds.py", __doc__)
    options.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options.add_argument("--root", type=Path, default=Path("outputs/curriculum-seeds"), help="where the runs are")
    options.add_argument("--out", type=Path, default=Path("outputs/curriculum-seeds.md"), help="the table")
    options.add_argument("more", nargs="*", metavar="key=value", help="more of rl.train's command line")
    args = options.parse_args()
    made = [
        row(seed, way, run(seed, way, args.root.absolute() / f"seed-{seed}", args.more))
        for seed in args.seeds
        for way in WAYS
    ]
    rows = table(COLUMNS, *made)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(f"{rows}\n{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores\n")
    print(rows)


if __name__ == "__main__":
    main()
