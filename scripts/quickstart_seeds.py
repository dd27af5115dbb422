"""Reproduce README's figures: the quickstart for several seeds, one after the other.

    .venv/bin/python scripts/quickstart_seeds.py --seeds 1 2 3 [--out DIR/NAME] [key=value ...]

Runs `python -m rl.train +experiment=quickstart seed=S [key=value ...]` for each seed (a run that is finished already is
not run again), audits each run, and writes OUT.png (the curves) and OUT.md (the table). docs/quickstart.md has a copy
of the table, docs/quickstart-seeds.png is one of the curves.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from measuring import audited, finished, minutes, table

from rl.metrics.episodes import read_jsonl, resolve_rate
from rollout import program

COLUMNS = (
    "seed", "held-out before", "held-out after", "minutes", "s to first step", "s per step (max)",
    "lowest pearson", "rows per episode", "proxy ms per call", "infra failures", "audit",
)  # fmt: skip


def run(seed: int, root: Path, more: list[str]) -> Path:
    """Return the directory of a finished run of this seed; train one if there is none."""
    where = root / f"seed-{seed}"
    command = ("rl.train", "+experiment=quickstart", f"seed={seed}", f"run.root={where}")
    return finished(where / "quickstart", *command, *more)


def row(seed: int, directory: Path) -> list[str]:
    records = read_jsonl(directory / "metrics.jsonl")
    steps = [r for r in records if "timing_s/step" in r]
    held_out = [rate for r in records if (rate := resolve_rate(r, "val")) is not None]
    begun = json.loads((directory / "run.json").read_text())["started"]
    prepared = (directory / "config.yaml").stat().st_mtime
    return [
        str(seed),
        f"{held_out[0]:.2f}",
        f"{held_out[-1]:.2f}",
        f"{minutes(directory):.1f}",
        f"{steps[0]['time'] - steps[0]['timing_s/step'] - prepared:.0f} (+{prepared - begun:.0f} preparing)",
        f"{sum(r['timing_s/step'] for r in steps) / len(steps):.0f} ({max(r['timing_s/step'] for r in steps):.0f})",
        f"{min(r['training/rollout_actor_probs_pearson_corr'] for r in steps):.4f}",
        f"{min(r['episode/rows'] for r in steps):.2f} to {max(r['episode/rows'] for r in steps):.2f}",
        f"{sum(r['proxy/overhead_ms'] for r in steps) / len(steps):.1f}",
        f"{sum(r['infra/failures'] for r in steps):.0f}",
        audited(directory),
    ]


def draw(runs: dict[int, Path], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    for seed, directory in runs.items():
        records = read_jsonl(directory / "metrics.jsonl")
        train = [(r["step"], rate) for r in records if (rate := resolve_rate(r, "train")) is not None]
        held_out = [(r["step"], rate) for r in records if (rate := resolve_rate(r, "val")) is not None]
        (line,) = axes.plot(*zip(*train, strict=True), alpha=0.6, linewidth=1.2)
        axes.plot(*zip(*held_out, strict=True), "o", markersize=8, color=line.get_color(), label=f"seed {seed}")
    axes.set(xlabel="GRPO step", ylabel="share of episodes resolved", ylim=(-0.02, 1.02))
    axes.set_title("lines: the training tasks of each step; dots: 64 episodes of held-out tasks", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=110)


def main() -> None:
    options = program.parser("python scripts/quickstart_seeds.py", __doc__)
    options.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options.add_argument("--root", type=Path, default=Path("outputs/seeds"), help="where the runs are")
    options.add_argument("--out", type=Path, default=Path("outputs/quickstart-seeds"), help="OUT.png, OUT.md")
    args, more = options.parse_known_args()
    runs = {seed: run(seed, args.root.resolve(), more) for seed in args.seeds}
    rows = table(COLUMNS, *(row(seed, directory) for seed, directory in runs.items()))
    machine = f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, no GPU"
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".md").write_text(f"Measured on {machine}.\n\n{rows}")
    draw(runs, args.out.with_suffix(".png"))
    print(rows)


if __name__ == "__main__":
    main()
