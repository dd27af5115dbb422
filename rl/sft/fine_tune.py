"""Fine-tune a model on the episodes of directories, and say in a report what it was trained on.

    DIR/rows.parquet        the rows, token for token
    DIR/model/, adapter/    the policy; with LoRA, model/ has the adapter in its weights
    DIR/sft.json            counts of episodes, rows and tokens, steps, losses, seconds
    DIR/sft_metrics.jsonl   verl's metrics of each step; sft.log: what it prints

Each of these is whole or not there, so the same call goes on where an earlier one was killed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from rl.metrics.episodes import read_jsonl
from rl.run.forks import Forks
from rl.run.screen import Screen, to_go
from rl.sft.checks import max_length
from rl.sft.episodes import Counts, write_rows
from rl.sft.other import run_dpo, run_llamafactory
from rl.sft.trainer import Passes, run_sft
from rollout import files


def tune(
    config: DictConfig,
    model: str,
    sources: Sequence[Path],
    out: Path,
    seed: int,
    screen: Screen,
    forks: Forks | None = None,
) -> dict[str, Any]:
    """Fine-tune ``model`` on all episodes and given rows of ``sources``; return the report, which is ``out/sft.json``.

    seed: of the order of the rows. forks: see ``run_sft``. Raises RowsError, RuntimeError, ServeError and OSError.
    """
    report = out / "sft.json"
    if report.exists():
        return json.loads(report.read_text())
    sft, began = config.sft, time.monotonic()
    passes = Passes(sft.epochs, sft.lr, sft.batch_size, max_length(config), seed)

    def watch(step: int, steps: int, metrics: Mapping[str, float]) -> None:
        pace = (time.monotonic() - began) / step
        note = f"loss {metrics['train/loss']:.4f}, {to_go((steps - step) * pace)}"
        screen.show("fine-tuning, steps", step, steps, note)

    if sft.trainer == "verl":
        counts = _rows(model, sources, out, passes, screen)
        screen.say(_sentence(counts, passes))
        screen.show("fine-tuning")
        run_sft(config, model, out / "rows.parquet", out, passes, watch, forks)
        steps = read_jsonl(out / "sft_metrics.jsonl")
        losses = [line["data"]["train/loss"] for line in steps]
        last = {"steps": steps[-1]["step"], "loss": {"first": losses[0], "last": losses[-1]}}
        figures = {**asdict(counts), **last}
    else:
        run = {"llamafactory": run_llamafactory, "dpo": run_dpo}[sft.trainer]
        screen.say(f"fine-tuning with {sft.trainer} on {', '.join(map(str, sources))}")
        screen.show("fine-tuning")
        figures = run(config, model, sources, out, passes, watch)
    screen.clear()
    seconds = round(time.monotonic() - began, 1)
    made = {"trainer": sft.trainer, "model": model, "sources": [*map(str, sources)], **figures, "seconds": seconds}
    files.write(report, json.dumps(made, indent=1) + "\n", synced=True)
    loss = figures["loss"]
    screen.say(f"fine-tuned: {made['steps']} steps, loss {loss['first']:.4f} to {loss['last']:.4f}, {seconds:.0f} s")
    return made


def _rows(model: str, sources: Sequence[Path], out: Path, passes: Passes, screen: Screen) -> Counts:
    """Write the rows unless they are there, and return what was counted."""
    known = out / "rows.json"
    if known.exists():
        return Counts(**json.loads(known.read_text()))
    from transformers import AutoTokenizer

    def show(counts: Counts) -> None:
        screen.show("reading rows", counts.rows)

    screen.show("reading rows")
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    counts = write_rows(sources, out / "rows.parquet", max_length=passes.max_length, tokenizer=tokenizer, show=show)
    files.write(known, json.dumps(asdict(counts), indent=1) + "\n", synced=True)
    return counts


def _sentence(counts: Counts, passes: Passes) -> str:
    left = f", {counts.too_long} of more than {passes.max_length} left out" if counts.too_long else ""
    given = f", {counts.given} of them given" if counts.given else ""
    return (
        f"fine-tuning on {counts.rows} rows of {counts.episodes} episodes ({counts.resolved} resolved){given}, "
        f"{counts.trained} of {counts.tokens} tokens trained{left}; {passes.epochs} epochs, rate {passes.lr:g}"
    )
