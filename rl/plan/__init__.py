"""The plan of a config: whether it fits the cluster, and how long a step takes.

    python -m rl.plan +experiment=NAME key=value ...

It can be calculated on any machine, and has bytes on each GPU (with trainer.device=cpu: in this machine) by phase of a
step, CPU memory, disk, boxes, tokens and time. The command prints tables and exits with 0, or with 2 and one line for
each thing that does not fit and what to change. ``cluster.*`` says what a node has, ``plan.*`` what has to be assumed,
from=RUN fits that to a run; docs/planning.md explains the figures.
``rl.train`` makes the same check before it starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from rl.plan import cpu, host, memory, problems, stopping, throughput
from rl.plan.layout import MODEL, Layout, layout_of, select
from rl.plan.memory import Ledger
from rl.plan.model import ModelShape, load_config, shape_of, turn_notes
from rl.plan.stopping import Stopping
from rl.plan.throughput import Pace


@dataclass(frozen=True)
class Plan:
    """A plan has a ledger for each phase of a step on one GPU (``gpu``), ledgers of a node's CPU memory and disks
    (``node``), and the tokens that the KV cache of one group of TP GPUs holds (``kv_tokens``). ``stopping`` is what a
    run's end takes after a warning. ``problems`` do not fit, ``warnings`` cost time or are odd; each is one line.
    """

    shape: ModelShape
    layout: Layout
    gpu: tuple[Ledger, ...]
    node: tuple[Ledger, ...]
    kv_tokens: int
    pace: Pace
    stopping: Stopping
    problems: tuple[str, ...]
    warnings: tuple[str, ...]


def plan(config: DictConfig, model_config: Any = None) -> Plan:
    """Return the plan of a composed config. ``model_config`` is the model's transformers config; None: read from what
    the config names. Imports torch and transformers (seconds), neither verl nor vLLM, and needs no GPU.

    Raises:
        ModelUnknown: there is no config of the model.
        ConfigError: a value of ``plan.*`` is impossible.
    """
    name, targets = select(config, f"{MODEL}.path", "?"), select(config, f"{MODEL}.target_modules")
    shape = shape_of(model_config or load_config(name), name, select(config, f"{MODEL}.lora_rank", 0), targets)
    given, config = config, cpu.machine(config)
    layout = layout_of(config)
    gpu, node = memory.phases(config, shape, layout), host.ledgers(config, shape, layout)
    tokens = memory.kv_tokens(shape, layout.engine, memory.kv_room(config, shape, layout.engine))
    pace = throughput.pace(config, shape, layout)
    found = problems.layout_problems(shape, layout) + problems.cache_problems(config, shape, layout, tokens)
    ending = stopping.stopping(config, shape, layout, pace)
    warnings = problems.warnings(config, shape, layout, pace) + turn_notes(name)
    if layout.trainer.cpu:
        too_much, notes = cpu.problems(given, shape)
        found, warnings = found + too_much, warnings + notes
    else:
        found += problems.ledger_problems(config, shape)
        found += stopping.problem(config, shape, layout, pace, ending)
    return Plan(shape, layout, tuple(gpu), tuple(node), tokens, pace, ending, tuple(found), tuple(warnings))
