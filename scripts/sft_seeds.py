"""Reproduce the figures of docs/fine-tuning.md: three rounds of fine-tuning for several seeds, one after the other.

    .venv/bin/python scripts/sft_seeds.py --seeds 1 2 3 --out docs/sft-seeds [key=value ...]

Runs `python -m rl.sft +experiment=quickstart rounds=3 tasks=16 seed=S` for each seed (a run that is finished already is
not run again), audits what was selected, and writes OUT.png (the curves) and OUT.md (the table).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def run(seed: int, root: Path, more: list[str]) -> Path:
    """Return the directory of a finished run of this seed; make one if there is none."""
    parent = root / f"seed-{seed}" / "quickstart-sft"
    finished = [d for d in parent.glob("*") if (d / "done").exists()]
    if not finished:
        command = [sys.executable, "-m", "rl.sft", "+experiment=quickstart", "rounds=3", "tasks=16", f"seed={seed}"]
        subprocess.run([*command, f"run.root={root / f'seed-{seed}'}", *more], cwd=ROOT, check=True)
        finished = [d for d in parent.glob("*") if (d / "done").exists()]
    return finished[0]


def reports(directory: Path) -> list[dict[str, Any]]:
    return [json.loads((directory / f"iteration_{n}" / "report.json").read_text()) for n in range(4)]


def row(seed: int, directory: Path) -> list[str]:
    rounds = reports(directory)
    held_out = [f"{one['evaluation']['pass_at_1']['value']:.2f}" for one in rounds]
    played = [f"{one['collection']['resolved']}/{one['collection']['episodes']}" for one in rounds[1:]]
    rows = [str(one["sft"]["rows"]) for one in rounds[1:]]
    audit = [sys.executable, "-m", "rollout.audit", str(directory)]
    sound = subprocess.run(audit, capture_output=True, cwd=ROOT).returncode == 0
    minutes = ((directory / "done").stat().st_mtime - json.loads((directory / "run.json").read_text())["started"]) / 60
    return [str(seed), *held_out, ", ".join(played), ", ".join(rows), f"{minutes:.1f}", "ok" if sound else "FAILED"]


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
    axes.set_title("32 held-out tasks, two episodes each; 95 % intervals", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, required=True, help="prefix of OUT.png and OUT.md")
    parser.add_argument("--root", type=Path, default=Path("outputs/sft-seeds"), help="where the runs are")
    parser.add_argument("more", nargs="*", metavar="key=value", help="more of rl.sft's command line")
    options = parser.parse_args()
    runs = {seed: run(seed, options.root.absolute(), options.more) for seed in options.seeds}
    head = ["seed", *(f"round {n}" for n in range(4)), "played and resolved", "rows", "minutes", "audit"]
    lines = [head, ["---"] * len(head), *(row(seed, directory) for seed, directory in runs.items())]
    load = f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores"
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    options.out.with_suffix(".md").write_text(f"{table}\n{load}\n")
    draw(runs, options.out.with_suffix(".png"))
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
