"""The problems of a plan, a line each: what does not fit, with the keys to change, and what fits but costs time."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rl.config.plugins import longest
from rl.plan import host, memory
from rl.plan.layout import ACTOR, FSDP, MEGATRON, MODEL, ROLLOUT, Layout, layout_of, select
from rl.plan.memory import GIB, Ledger
from rl.plan.model import ModelShape
from rl.plan.throughput import Pace


def layout_problems(shape: ModelShape, layout: Layout) -> list[str]:
    """Return the sizes that do not go together; verl, vLLM or Megatron would refuse them only after minutes."""
    trainer, engine = layout.trainer, layout.engine
    heads, experts = shape.heads, shape.expert_count
    ulysses, tensor = f"{FSDP}.ulysses_sequence_parallel_size", f"{ROLLOUT}.tensor_model_parallel_size"
    replica = "the engine's GPUs: with data and pipeline parallel size it is one replica"
    spread, stages = trainer.tensor * trainer.pipeline * trainer.context, trainer.expert * trainer.pipeline
    divisors = [
        (ulysses, trainer.sequence_parallel, heads, "the model's attention heads"),
        (ulysses, trainer.sequence_parallel, trainer.gpus, "the trainer's GPUs"),
        (tensor, engine.tensor, heads, "the model's attention heads"),
        (tensor, engine.replica, engine.gpus, replica),
        (f"{ROLLOUT}.expert_parallel_size", engine.expert, experts, "the model's experts"),
        (f"{MEGATRON}: tensor x pipeline x context parallel size", spread, trainer.gpus, "the trainer's GPUs"),
        (f"{MEGATRON}: expert x pipeline parallel size", stages, trainer.gpus, "the trainer's GPUs"),
        (f"{MEGATRON}.expert_model_parallel_size", trainer.expert, experts, "the experts"),
    ]  # without experts or an engine the whole is 0, without Megatron its sizes are 1: neither gives a line
    found = [f"{key}={size} does not divide {what} ({whole})" for key, size, whole, what in divisors if whole % size]
    if engine.expert > 1 and engine.expert != (wanted := engine.tensor * engine.data):
        sizes = f"tensor_model_parallel_size x data_parallel_size ({wanted})"
        found.append(f"{ROLLOUT}.expert_parallel_size={engine.expert} is not {sizes}: verl refuses it")
    if trainer.fused and not trainer.megatron and not shape.tied:  # FSDP2 does not gather the head for the kernel
        where = f"with FSDP2 where embeddings are not tied, as in {shape.name} (verl issue 5633)"
        other = f"{ACTOR}.entropy_from_logits_with_chunking=true"
        found.append(f"{MODEL}.use_fused_kernels=true fails in verl 0.9.1 {where}; set {other} instead")
    if engine.context > shape.context:
        size = f"{engine.context} (data.max_prompt_length + data.max_response_length)"
        found.append(f"{ROLLOUT}.max_model_len={size} is more than the {shape.context} positions of {shape.name}")
    return found


def cache_problems(config: DictConfig, shape: ModelShape, layout: Layout, tokens: int) -> list[str]:
    """Return a line if one sequence may have more than ``tokens``, the KV cache's size: vLLM would not start."""
    engine = layout.engine
    if not engine.gpus or tokens >= engine.context:
        return []
    wanted = shape.sequence_bytes(engine.context, engine.element, engine.tensor)
    needed = memory.engine_weights(shape, engine) + memory.engine_working(shape, engine) + wanted
    share = needed / memory.gpu_bytes(config) + 0.01
    changes = [f"{ROLLOUT}.gpu_memory_utilization={share:.2f}"] if share < 0.95 else []
    at = f"{ROLLOUT}.gpu_memory_utilization={engine.utilization:g}"
    if size := select(config, key := f"{ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes"):
        changes, at = [f"{key}={math.ceil(wanted)}"], f"{key}={size}"
    if (longest := memory.longest(shape, engine, memory.kv_room(config, shape, engine))) > layout.prompt:
        changes.append(f"data.max_response_length={longest - layout.prompt}")
    changes.append(f"a larger {ROLLOUT}.tensor_model_parallel_size")
    room = f"{tokens} tokens per {engine.group} at {at}"
    return [f"KV cache: {room}, and one episode may have {engine.context}; it needs {' or '.join(changes)}"]


def ledgers(config: DictConfig, shape: ModelShape) -> dict[str, Ledger]:
    """Return the ledgers of a config by name: those of a GPU by phase, then those of a node."""
    layout = layout_of(config)
    gpu = {f"GPU memory, {ledger.name}": ledger for ledger in memory.phases(config, shape, layout)}
    return gpu | {ledger.name: ledger for ledger in host.ledgers(config, shape, layout)}


def ledger_problems(config: DictConfig, shape: ModelShape) -> Iterator[str]:
    """Yield a line for each ledger that does not fit: its largest parts, and its size with other values of keys. Each
    change is calculated by itself; if some are enough, only those are named, at most three."""
    for name, ledger in ledgers(config, shape).items():
        if ledger.fits:
            continue
        smaller, pickled = dict[str, Ledger](), pickle.dumps(config)
        for change in _changes(config, shape, ledger):
            changed = pickle.loads(pickled)  # several times faster than copy.deepcopy
            for key, value in change.items():
                OmegaConf.update(changed, key, value, force_add=True)
            if (made := ledgers(changed, shape)[name]).total < ledger.total:
                smaller[" and ".join(f"{key}={str(value).lower()}" for key, value in change.items())] = made
        enough = {text: made for text, made in smaller.items() if made.fits} or smaller
        better = " or ".join(f"{made.total / GIB:.1f} GiB with {text}" for text, made in list(enough.items())[:3])
        size = f"{ledger.total / GIB:.1f} GiB of {ledger.limit / GIB:.1f} (most of it: {ledger.largest(2)})"
        yield f"{name}: {size}; " + (f"{better}" if better else "no key that is known here makes it smaller")


def _changes(config: DictConfig, shape: ModelShape, ledger: Ledger) -> list[dict[str, Any]]:
    """Return the overrides that may make a ledger smaller, those first that cost least speed."""
    layout = layout_of(config)
    trainer, over = layout.trainer, (ledger.total - ledger.limit) / memory.gpu_bytes(config)
    keys, split = (MEGATRON, "context") if trainer.megatron else (FSDP, "ulysses_sequence")
    wider, boxes = 2 * max(trainer.context, trainer.sequence_parallel), list(ledger.parts.values())[-1]
    shorter = {f"{ACTOR}.ppo_max_token_len_per_gpu": trainer.tokens // 2, f"{keys}.{split}_parallel_size": wider}
    changes: list[dict[str, Any]] = [
        {f"{ROLLOUT}.gpu_memory_utilization": int(100 * (layout.engine.utilization - over)) / 100},
        {f"{ROLLOUT}.free_cache_engine": True, f"{ROLLOUT}.enable_sleep_mode": True},
        {f"{ACTOR}.entropy_from_logits_with_chunking": True},
        {f"{MODEL}.use_fused_kernels": trainer.megatron or shape.tied},
        {f"{MODEL}.enable_gradient_checkpointing": True},
        shorter if wider <= trainer.gpus else {},
        {f"{keys}.optimizer_offload": True},
        {f"{keys}.param_offload": True, f"{keys}.optimizer_offload": True},
        {f"{FSDP}.offload_policy": True},
        {f"{FSDP}.fsdp_size": trainer.gpus},
        {"sandbox.image_budget_gb": int((ledger.limit - boxes) / GIB)},
        {"trainer.max_actor_ckpt_to_keep": 2},
        {"trainer.max_actor_ckpt_to_keep": 1},
        {"sandbox.concurrency": config.sandbox.concurrency // 2},
        {"trainer.nnodes": 2 * trainer.nodes},
    ]
    return [change for change in changes if change and all(value > 0 for value in change.values())]


def warnings(config: DictConfig, shape: ModelShape, layout: Layout, pace: Pace) -> list[str]:
    """Return what fits, but costs time or has no effect."""
    found, engine, boxes = [], layout.engine, layout.per_node
    cpus, limit = select(config, "sandbox.cpus", 1), select(config, "sandbox.memory_mb", 0)
    if pace.cut:
        wanted = min(config.plan.turns, longest(config, "max_turns"))
        row = f"its row of {layout.row} tokens is full; a longer one is data.max_response_length"
        found.append(f"an episode of plan.turns={wanted:g} is planned with {pace.cut:.0f}, where {row}")
    load = pace.load
    if load.stays < 0.95:  # not below 1: the figures are assumed
        cache = f"KV cache of each {engine.group} holds {load.held:.0f} contexts; of {load.asked:.0f} episodes that"
        state = f"play there, {load.running + load.waiting:.0f} are in the engine, and {1 - load.stays:.0%} of the"
        keys = f"raise {ROLLOUT}.gpu_memory_utilization or lower sandbox.concurrency"
        found.append(f"{cache} {state} others' contexts are read again after their tools: {keys}")
    elif load.held > 3 * load.asked and not layout.trainer.cpu and layout.concurrent < layout.per_step:
        room = f"KV cache holds the contexts of {load.held:.0f} episodes per {engine.group}, and {load.asked:.0f} play"
        found.append(f"{room}: raise sandbox.concurrency, or {ROLLOUT}.agent.num_workers")
    if load.asked > engine.sequences:
        running = f"but {load.asked:.0f} episodes per engine run at a time"
        found.append(f"{ROLLOUT}.max_num_seqs={engine.sequences}, {running}")
    if cpus * boxes > 2 * config.cluster.cores:
        cores = f"{boxes} boxes of sandbox.cpus={cpus} on {config.cluster.cores} cores (cluster.cores)"
        found.append(f"{cores}: tests slow each other down, and grading.timeout_s counts wall time")
    if 2 * boxes * limit / 1024 > config.cluster.cpu_gb:
        found.append(f"{2 * boxes} boxes may take sandbox.memory_mb={limit} each, together more than cluster.cpu_gb")
    if engine.expert > 1 and not shape.experts:
        found.append(f"{ROLLOUT}.expert_parallel_size has no effect: {shape.name} has no experts")
    return found
