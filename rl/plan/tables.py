"""A plan as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from rl.plan.memory import GIB, Ledger

if TYPE_CHECKING:
    from rl.plan import Plan


def show(plan: Plan, cfg: DictConfig, console: Console | None = None) -> None:
    console = console or Console(highlight=False)
    console.print(_head(plan, cfg))
    for title, ledgers in ((f"GiB on each GPU ({cfg.cluster.gpu}), by phase", plan.gpu), ("GiB of a node", plan.node)):
        console.print(_ledgers(title, ledgers))
    console.print(_step(plan, cfg))
    for warning in plan.warnings:
        console.print(f"note: {warning}", soft_wrap=True)
    if plan.fits:
        tight = max(plan.gpu, key=lambda phase: phase.total)
        room = (tight.limit or 0) - tight.total
        console.print(
            f"It fits, by calculation. Least room: {room / GIB:.1f} GiB of a GPU, {tight.name}.", soft_wrap=True
        )


def _head(plan: Plan, cfg: DictConfig) -> Table:
    shape, trainer, engine, episodes = plan.shape, plan.trainer, plan.engine, plan.episodes
    table = Table(title=cfg.trainer.experiment_name, show_header=False)
    counts = f"{shape.params / 1e9:.2f} billion parameters"
    if shape.experts:
        counts += f", {shape.active / 1e9:.2f} active ({shape.routed} of {shape.expert_count} experts)"
    if shape.lora:
        counts += f"; LoRA trains {shape.trained / 1e6:.1f} million"
    table.add_row("model", f"{shape.name}: {counts}")
    if trainer.megatron:
        split = f"Megatron: TP {trainer.tensor}, PP {trainer.pipeline}, CP {trainer.context}, EP {trainer.expert}"
    else:
        split = f"FSDP over {trainer.share}, sequence parallel {trainer.sequence_parallel}"
    where = f"{trainer.nodes} x {trainer.gpus_per_node} GPUs"
    table.add_row("trainer", f"{where}; {split}; {trainer.tokens:,} packed tokens per GPU")
    kind = f"TP {engine.tensor}{', expert parallel' if engine.expert > 1 else ''}"
    place = "the same GPUs" if engine.colocated else f"{engine.gpus} GPUs of its own"
    table.add_row("engine", f"{place}: {engine.replicas} replicas, {kind}; {engine.context:,} tokens of context")
    cache = f"{plan.kv_tokens:,} tokens per {engine.group}: {plan.pace.held:.1f} episodes of the mean context"
    table.add_row(
        "KV cache", f"{cache}, {plan.kv_tokens / engine.context:.1f} of the longest; {plan.pace.asked:.0f} run"
    )
    boxes = f"{episodes.per_step} a step, {episodes.concurrent} at a time; on a node {episodes.per_node} and as many"
    table.add_row("episodes", f"{boxes} boxes for grading")
    return table


def _ledgers(title: str, ledgers: tuple[Ledger, ...]) -> Table:
    table = Table(title=title)
    table.add_column("what")
    table.add_column("GiB", justify="right")
    for number, ledger in enumerate(ledgers):
        if number:
            table.add_section()
        for part in ledger.parts:
            table.add_row(f"  {part.name}", f"{part.bytes / GIB:.1f}")
        room = "" if ledger.limit is None else f" of {ledger.limit / GIB:.1f}{'' if ledger.fits else ': TOO MUCH'}"
        table.add_row(f"[bold]{ledger.name}[/bold]", f"[bold]{ledger.total / GIB:.1f}{room}[/bold]")
    return table


def _step(plan: Plan, cfg: DictConfig) -> Table:
    pace = plan.pace
    table = Table(title="a step, from assumed speeds (plan.*)")
    table.add_column("what")
    table.add_column("assumed", justify="right")
    table.add_row("tokens trained on", f"{pace.tokens:,}")
    table.add_row("tokens sampled", f"{pace.sampled:,}")
    table.add_row("tokens a second of one episode, while it samples", f"{pace.decode:.0f}")
    table.add_row("mean episode, seconds", f"{pace.episode_s:.0f}")
    for phase, seconds in pace.seconds.items():
        table.add_row(f"{phase}, seconds", f"{seconds:.0f}")
    table.add_row("[bold]step, minutes[/bold]", f"[bold]{pace.step_s / 60:.1f}[/bold]")
    if steps := cfg.trainer.total_training_steps:
        table.add_row(f"{steps} steps, hours", f"{steps * pace.step_s / 3600:.1f}")
    return table
