"""Reproduce the figures of docs/fine-tuning.md and of realcode: three rounds of fine-tuning for several seeds, one
after the other, and GRPO from there.

    .venv/bin/python scripts/sft_seeds.py --seeds 1 2 3 --out docs/sft-seeds tasks=16
    .venv/bin/python scripts/sft_seeds.py --experiment realcode --grpo --out outputs/realcode [key=value ...]

Runs ``python -m rl.sft +experiment=NAME rounds=3 seed=S [key=value ...]`` for each seed, with --grpo ``rl.train`` from
the last round's policy (a run that is finished already is not run again), audits their episodes, and writes OUT.png
(the curves) and OUT.md (the table).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from measuring import audited, finished, minutes, table

from rl.data.rates import rated
from rl.evaluate.statistics import estimate
from rl.metrics.episodes import has_validation, read_jsonl, resolve_rate
from rollout import program


def run(experiment: str, seed: int, root: Path, more: list[str]) -> Path:
    """Return the directory of a finished run of this seed; make one if there is none."""
    where = root / f"seed-{seed}"
    command = ("rl.sft", f"+experiment={experiment}", "rounds=3", f"seed={seed}", f"run.root={where}")
    return finished(where / f"{experiment}-sft", *command, *more)


def go_on(experiment: str, seed: int, root: Path, policy: Path) -> Path:
    """Return the directory of a finished run of GRPO from ``policy``; train one if there is none."""
    where = root / f"seed-{seed}"
    command = ("rl.train", f"+experiment={experiment}", f"policy={policy}", f"seed={seed}", f"run.root={where}")
    return finished(where / experiment, *command, "trainer.logger=[]")


def reports(directory: Path) -> list[dict[str, Any]]:
    return [json.loads((directory / f"iteration_{n}" / "report.json").read_text()) for n in range(4)]


def row(seed: int, directory: Path) -> list[str]:
    rounds = reports(directory)
    held_out = [f"{one['evaluation']['pass_at_1']['value']:.2f}" for one in rounds]
    played = [f"{one['collection']['resolved']}/{one['collection']['episodes']}" for one in rounds[1:]]
    rows = [str(one["sft"]["rows"]) for one in rounds[1:]]
    return [str(seed), *held_out, ", ".join(played), ", ".join(rows), f"{minutes(directory):.1f}", audited(directory)]


def trained(directory: Path) -> list[str]:
    """Return the cells of a run of GRPO."""
    lines = read_jsonl(directory / "metrics.jsonl")
    first, *_, last = [f"{resolve_rate(line, 'val'):.2f}" for line in lines if has_validation(line)]
    rates = " ".join(f"{rate:.2f}" for line in lines if (rate := resolve_rate(line, "train")) is not None)
    return [f"{first}, {last}", rates, f"{minutes(directory):.1f}", audited(directory)]


def last_validation(directory: Path) -> dict[str, float]:
    """Return what a report's pass_at_1 has, of the held-out episodes that a run of GRPO has played last."""
    logs = (directory / "episode_metrics").glob("*.jsonl")
    lines = [line for log in logs for line in read_jsonl(log) if line["split"] == "val" and not line["infra"]]
    last = max(line["step"] for line in lines)
    rates = rated((line["task"], line["resolved"]) for line in lines if line["step"] == last)
    found = estimate([(rate.episodes, rate.resolved) for rate in rates.values()])
    assert found is not None
    return vars(found)


def draw(rounds: dict[int, Path], grpo: dict[int, Path], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    for seed, directory in rounds.items():
        rates = [one["evaluation"]["pass_at_1"] for one in reports(directory)]
        if seed in grpo:
            rates.append(last_validation(grpo[seed]))
        values = [rate["value"] for rate in rates]
        errors = [[value - rate["low"] for value, rate in zip(values, rates, strict=True)]]
        errors.append([rate["high"] - value for value, rate in zip(values, rates, strict=True)])
        places = [number + 0.03 * (seed - 2) for number in range(len(values))]
        axes.errorbar(places, values, errors, marker="o", capsize=3, label=f"seed {seed}")
    labels = [f"round {number}" for number in range(4)] + ["GRPO"] * bool(grpo)
    axes.set(ylabel="share of held-out episodes resolved", ylim=(-0.02, 1.02))
    axes.set_xticks(range(len(labels)), labels)
    episodes = {one["evaluation"]["episodes"] for directory in rounds.values() for one in reports(directory)}
    axes.set_title(f"{' or '.join(map(str, sorted(episodes)))} held-out episodes each; 95 % intervals", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=110)


def main() -> int:
    parser = program.parser("python scripts/sft_seeds.py", __doc__)
    parser.add_argument("--experiment", default="quickstart", help="(quickstart)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--grpo", action="store_true", help="train on from the last policy")
    parser.add_argument("--out", type=Path, required=True, help="prefix of OUT.png and OUT.md")
    parser.add_argument("--root", type=Path, default=Path("outputs/sft-seeds"), help="where the runs are")
    parser.add_argument("more", nargs="*", metavar="key=value", help="more of rl.sft's command line")
    options = parser.parse_args()
    root = options.root.absolute()
    runs, grpo = {}, {}
    for seed in options.seeds:
        runs[seed] = run(options.experiment, seed, root, options.more)
        if options.grpo:
            grpo[seed] = go_on(options.experiment, seed, root, runs[seed])
    head = ["seed", *(f"round {n}" for n in range(4)), "played and resolved", "rows", "minutes", "audit"]
    head += ["GRPO: before, after", "steps", "minutes", "audit"] * options.grpo
    load = f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores"
    cells = {seed: [*row(seed, directory), *(trained(grpo[seed]) if grpo else ())] for seed, directory in runs.items()}
    rows = table(head, *cells.values())
    options.out.with_suffix(".md").write_text(f"{rows}\n{load}\n")
    draw(runs, grpo, options.out.with_suffix(".png"))
    print(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
