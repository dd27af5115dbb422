"""A plan as printed tables, and a table of the constants that were fitted to a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Column, Table

from rl.plan import Plan
from rl.plan.doubt import Doubts, bounds, doubts, says
from rl.plan.engine import EngineLoad
from rl.plan.fit import FittedConstant
from rl.plan.layout import filters
from rl.plan.memory import GIB, Ledger
from rl.plan.stopping import grace
from rl.plan.throughput import Pace


def show(plan: Plan, config: DictConfig, console: Console | None = None) -> None:
    """Print what the config has, its ledgers, its pace and its warnings."""
    console, cpu = console or Console(highlight=False), plan.layout.trainer.cpu
    console.print(_head(plan, config))
    place = "of this machine" if cpu else "on each GPU"
    console.print(_ledgers(f"GiB {place} ({config.cluster.gpu}), by phase", plan.gpu))
    console.print(_ledgers("GiB of a node", plan.node))
    doubted = doubts(config, plan.shape, plan.layout)
    console.print(_step(plan.pace, doubted, config))
    console.print(_hangs_on(plan.pace, doubted, config), soft_wrap=True)
    console.print(_stopping(plan, doubted, config), soft_wrap=True)
    for warning in plan.warnings:
        console.print(f"note: {warning}", soft_wrap=True)
    if not plan.problems:
        tight = max(plan.gpu, key=lambda phase: phase.total)
        room = f"{(tight.limit - tight.total) / GIB:.1f} GiB{'' if cpu else ' of a GPU'}, {tight.name}"
        fits = "It fits, by calculation" if not plan.pace.cut else "Shortened like this it fits, by calculation"
        console.print(f"{fits}. Least room: {room}.", soft_wrap=True)


def show_fitted(found: Sequence[FittedConstant], config: DictConfig, run: str) -> None:
    """Print the constants that were fitted to a run beside the config's."""
    right = [Column(name, justify="right") for name in ("config", "fitted", "10 to 90 %")]
    table = Table("plan.", *right, "of", title=f"constants, fitted to {run}")
    for one in found:
        now, value, low, high = (_short(number) for number in (config.plan[one.key], *one[1:4]))
        table.add_row(one.key, now, value, f"{low} to {high}", f"{one.count} {one.of}")
    Console(highlight=False).print(table)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _head(plan: Plan, config: DictConfig) -> Table:
    shape, layout, pace = plan.shape, plan.layout, plan.pace
    trainer, engine = layout.trainer, layout.engine
    model = f"{shape.name}: {shape.params / 1e9:.2f} billion parameters"
    if shape.experts:
        model += f", {shape.active / 1e9:.2f} active ({shape.routed} of {shape.expert_count} experts)"
    if shape.lora:
        model += f"; LoRA trains {shape.trained / 1e6:.1f} million"
    split = f"FSDP over {trainer.share}, sequence parallel {trainer.sequence_parallel}"
    if trainer.megatron:
        split = f"Megatron: TP {trainer.tensor}, PP {trainer.pipeline}, CP {trainer.context}, EP {trainer.expert}"
    where = f"{trainer.nodes} x {trainer.gpus_per_node} GPUs; {split}"
    replicas = f"{max(1, engine.gpus // engine.replica)} replicas, TP {engine.tensor}"
    replicas += ", expert parallel" if engine.expert > 1 else ""
    place = "the same GPUs" if engine.colocated else f"{engine.gpus} GPUs of its own"
    longest = f"{pace.load.held:.1f} episodes of the mean context, {plan.kv_tokens / engine.context:.1f} of the longest"
    load = f"{layout.per_step} a step, {layout.concurrent} at a time"
    table = Table(title=config.trainer.experiment_name, show_header=False)
    table.add_row("model", model)
    packed, group = f"{trainer.tokens:,} packed tokens per GPU", f" per {engine.group}"
    if trainer.cpu:
        where, packed, group = "this machine", f"rows of up to {trainer.tokens:,} tokens to be expected", ""
        place, replicas = where, "one replica"
    table.add_row("trainer", f"{where}; {packed}")
    table.add_row("engine", f"{place}: {replicas}; {engine.context:,} tokens of context")
    table.add_row("KV cache", f"{plan.kv_tokens:,} tokens{group}: {longest}")
    table.add_row("at a time", _at_a_time(pace.load))
    table.add_row("episodes", f"{load}; on a node {layout.per_node} and as many boxes for grading")
    return table


def _at_a_time(load: EngineLoad) -> str:
    """Return a line that says what the episodes of a group of TP GPUs do at a moment, and what stays in their cache."""
    idle = load.asked - load.running - load.waiting
    waits = f", {load.waiting:.0f} wait for it" if load.waiting >= 0.5 else ""
    told = f"{load.asked:.0f} episodes: {load.running:.0f} in the engine{waits}, {idle:.0f} use tools"
    return f"{told}; {load.stays:.0%} of the contexts of these stay in the cache"


def _ledgers(title: str, ledgers: tuple[Ledger, ...]) -> Table:
    table = Table("what", Column("GiB", justify="right"), title=title)
    for ledger in ledgers:
        for name, size in ledger.parts.items():
            table.add_row(f"  {name}", f"{size / GIB:.1f}")
        room = "" if ledger.limit == math.inf else f" of {ledger.limit / GIB:.1f}{'' if ledger.fits else ': TOO MUCH'}"
        table.add_row(f"[bold]{ledger.name}", f"[bold]{ledger.total / GIB:.1f}{room}", end_section=True)
    return table


def _step(pace: Pace, doubted: Doubts, config: DictConfig) -> Table:
    steps, share = config.trainer.total_training_steps, config.plan.all_equal_groups
    table = Table("what", Column("assumed", justify="right"), title="a step, from assumed speeds (plan.*)")
    table.add_row("tokens trained on", f"{pace.tokens:,}")
    table.add_row("tokens sampled", f"{pace.sampled:,}")
    table.add_row("tokens a second of one episode, while it samples", f"{1 / pace.load.token_s:.0f}")
    table.add_row("groups used", f"{pace.used}")
    if filters(config):
        table.add_row(f"groups played for them ({share:.0%} with equal rewards)", f"{pace.played:.0f}")
        table.add_row("how many times as long the rollout takes for it", f"{pace.factor:.2f}")
    figures: dict[str, Callable[[Pace], float]] = {"mean episode": lambda other: other.episode_s}
    figures |= {phase: lambda other, phase=phase: other.seconds.get(phase, 0.0) for phase in pace.seconds}
    for what, figure in figures.items():
        table.add_row(f"{what}, seconds", _range(pace, doubted, figure, "{:.0f}"))
    table.add_row("[bold]step, minutes", "[bold]" + _range(pace, doubted, lambda other: other.step_s / 60, "{:.1f}"))
    if steps:
        hours = _range(pace, doubted, lambda other: steps * other.step_s / 3600, "{:.1f}")
        table.add_row(f"{steps} steps, hours", hours)
    return table


def _range(pace: Pace, doubted: Doubts, figure: Callable[[Pace], float], form: str) -> str:
    low, high = bounds(pace, doubted, figure)
    return f"{form.format(figure(pace))} ({form.format(low)} to {form.format(high)})"


def _hangs_on(pace: Pace, doubted: Doubts, config: DictConfig) -> str:
    """Return a line that says which assumptions a step's time hangs on most."""
    widest = sorted(doubted.items(), key=lambda item: item[1][0].step_s / item[1][1].step_s)[:3]
    told = [
        f"{good.step_s / 60:.0f} to {bad.step_s / 60:.0f} with {says(what, config)}" for what, (good, bad) in widest
    ]
    return f"Minutes a step hang on: {'; '.join(told)}."


def _stopping(plan: Plan, doubted: Doubts, config: DictConfig) -> str:
    found, now = plan.stopping, config.run.grace_s
    what, fits = "a step" if found.whole else "the rest of a step", grace(found, plan.pace, doubted)
    seconds = f"{found.rest:.0f} s for {what} and {found.save:.0f} s for its checkpoint of {found.size / GIB:.0f} GiB"
    told = f"run.grace_s={fits} sbatch --signal=B:USR1@{found.warning_s(fits)}"
    there = f"run.grace_s is {now:g}, for --signal=B:USR1@{found.warning_s(now)}"
    return f"To end when a job is warned: {seconds}. In the bad case, too: {told}. ({there}.)"
