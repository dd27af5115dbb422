"""This module fine-tunes a model on the episodes of directories, and says in a report what it was trained on.

    DIR/rows.parquet        the rows, token for token
    DIR/model/, adapter/    the policy; with LoRA, model/ has the adapter in its weights
    DIR/sft.json            counts of episodes, rows and tokens, steps, losses, seconds
    DIR/sft_metrics.jsonl   verl's metrics of each step; sft.log: what it prints

Each of these is whole or not there, so the same call goes on where an earlier one was killed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from rl.metrics.episodes import read_jsonl
from rl.screen import Screen, to_go
from rl.sft.checks import max_length
from rl.tune.rows import Counts, write_rows
from rl.tune.trainer import Passes, run_sft
from rollout import files


def tune(
    config: DictConfig, model: str, sources: Sequence[Path], out: Path, seed: int, screen: Screen
) -> dict[str, Any]:
    """Fine-tune ``model`` on all episodes of ``sources``; return the report, which is ``out/sft.json``.

    seed: of the order of the rows. Raises RowsError, RuntimeError and OSError.
    """
    report = out / "sft.json"
    if report.exists():
        return json.loads(report.read_text())
    began = time.monotonic()
    counts = _rows(config, model, sources, out, screen)
    sft = config.sft
    passes = Passes(sft.epochs, sft.lr, sft.batch_size, max_length(config), seed)
    screen.say(_sentence(counts, passes))

    def watch(step: int, steps: int, metrics: Mapping[str, float]) -> None:
        pace = (time.monotonic() - began) / step
        note = f"loss {metrics['train/loss']:.4f}, {to_go((steps - step) * pace)}"
        screen.show("fine-tuning, steps", step, steps, note)

    screen.show("fine-tuning")
    own = {"WANDB_RUN_ID": f"{os.environ['WANDB_RUN_ID']}-{out.name}"} if "WANDB_RUN_ID" in os.environ else {}
    run_sft(
        config,
        model,
        out / "rows.parquet",
        out,
        passes,
        out / "sft.log",
        loggers=tuple(config.trainer.logger),
        environment=own,
        watch=watch,
    )
    screen.clear()
    steps = read_jsonl(out / "sft_metrics.jsonl")
    losses = [line["data"]["train/loss"] for line in steps]
    made = {
        "model": model,
        "sources": [str(one) for one in sources],
        **asdict(counts),
        "steps": steps[-1]["step"],
        "loss": {"first": losses[0], "last": losses[-1]},
        "seconds": round(time.monotonic() - began, 1),
    }
    files.write(report, json.dumps(made, indent=1) + "\n", synced=True)
    screen.say(f"fine-tuned: {made['steps']} steps, loss {losses[0]:.4f} to {losses[-1]:.4f}, {made['seconds']:.0f} s")
    return made


def _rows(config: DictConfig, model: str, sources: Sequence[Path], out: Path, screen: Screen) -> Counts:
    """Write the rows unless they are there, and return what was counted."""
    known = out / "rows.json"
    if known.exists():
        return Counts(**json.loads(known.read_text()))
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    screen.show("reading episodes")
    counts = write_rows(
        sources,
        out / "rows.parquet",
        max_length=max_length(config),
        tokenizer=tokenizer,
        show=lambda counts: screen.show("reading episodes", counts.episodes),
    )
    files.write(known, json.dumps(asdict(counts), indent=1) + "\n", synced=True)
    return counts


def _sentence(counts: Counts, passes: Passes) -> str:
    left = f", {counts.too_long} of more than {passes.max_length} left out" if counts.too_long else ""
    return (
        f"fine-tuning on {counts.rows} rows of {counts.episodes} episodes ({counts.resolved} resolved), "
        f"{counts.trained} of {counts.tokens} tokens trained{left}; {passes.epochs} epochs, rate {passes.lr:g}"
    )
