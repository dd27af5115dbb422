"""Reproduce the figures of docs/fine-tuning.md: three rounds of fine-tuning for several seeds, one after the other.

    .venv/bin/python scripts/sft_seeds.py --seeds 1 2 3 --out docs/sft-seeds tasks=16

Runs ``python -m rl.sft +experiment=quickstart rounds=3 seed=S [key=value ...]`` for each seed (a run that is finished
already is not run again), audits its episodes, and writes OUT.png (the curves) and OUT.md (the table).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from measuring import audited, finished, minutes, table

from rollout import program


def run(seed: int, root: Path, more: list[str]) -> Path:
    """Return the directory of a finished run of this seed; make one if there is none."""
    where = root / f"seed-{seed}"
    command = ("rl.sft", "+experiment=quickstart", "rounds=3", f"seed={seed}", f"run.root={where}")
    return finished(where / "quickstart-sft", *command, *more)


def reports(directory: Path) -> list[dict[str, Any]]:
    return [json.loads((directory / f"iteration_{n}" / "report.json").read_text()) for n in range(4)]


def row(seed: int, directory: Path) -> list[str]:
    rounds = reports(directory)
    held_out = [f"{one['evaluation']['pass_at_1']['value']:.2f}" for one in rounds]
    played = [f"{one['collection']['resolved']}/{one['collection']['episodes']}" for one in rounds[1:]]
    rows = [str(one["sft"]["rows"]) for one in rounds[1:]]
    return [str(seed), *held_out, ", ".join(played), ", ".join(rows), f"{minutes(directory):.1f}", audited(directory)]


def draw(runs: dict[int, Path], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    for seed, directory in runs.items():
        rates = [one["evaluation"]["pass_at_1"] for one in reports(directory)]
        values = [rate["value"] for rate in rates]
        errors = [[value - rate["low"] for value, rate in zip(values, rates, strict=True)]]
        errors.append([rate["high"] - value for value, rate in zip(values, rates, strict=True)])
        places = [number + 0.03 * (seed - 2) for number in range(len(values))]
        axes.errorbar(places, values, errors, marker="o", capsize=3, label=f"seed {seed}")
    axes.set(xlabel="round", ylabel="share of held-out episodes resolved", ylim=(-0.02, 1.02), xticks=range(4))
    episodes = {one["evaluation"]["episodes"] for directory in runs.values() for one in reports(directory)}
    axes.set_title(f"{' or '.join(map(str, sorted(episodes)))} held-out episodes each; 95 % intervals", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=110)


def main() -> int:
    parser = program.parser("python scripts/sft_seeds.py", __doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, required=True, help="prefix of OUT.png and OUT.md")
    parser.add_argument("--root", type=Path, default=Path("outputs/sft-seeds"), help="where the runs are")
    parser.add_argument("more", nargs="*", metavar="key=value", help="more of rl.sft's command line")
    options = parser.parse_args()
    runs = {seed: run(seed, options.root.absolute(), options.more) for seed in options.seeds}
    head = ["seed", *(f"round {n}" for n in range(4)), "played and resolved", "rows", "minutes", "audit"]
    load = f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores"
    rows = table(head, *(row(seed, directory) for seed, directory in runs.items()))
    options.out.with_suffix(".md").write_text(f"{rows}\n{load}\n")
    draw(runs, options.out.with_suffix(".png"))
    print(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
