"""Does a config fit the cluster? ``python -m rl.plan +experiment=qwen3_coder_30b key=value ...``

Answers by calculation, on any machine: bytes on each GPU by phase of a step, CPU memory, disk, boxes, tokens and time.
Prints tables and ends with 0, or with 2 and one line for each thing that does not fit and what to change. ``cluster.*``
says what a node has, ``plan.*`` what has to be assumed; docs/planning.md what is behind the figures and how far off
they were where they could be measured. ``rl.train`` makes the same check first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from rl.plan import host, memory, throughput
from rl.plan.layout import REF, Engine, Episodes, Trainer, engine_of, episodes_of, select, trainer_of
from rl.plan.memory import GIB, Ledger, Room
from rl.plan.model import Shape, load_config, shape_of
from rl.plan.throughput import Pace


@dataclass(frozen=True)
class Plan:
    """``gpu``: a ledger for each phase of a step, bytes on one GPU; ``node``: of CPU memory and disks; ``kv_tokens``:
    tokens that the KV cache of one group of TP GPUs holds. ``problems`` do not fit; ``warnings`` cost time. Each is one
    line that names keys."""

    shape: Shape
    trainer: Trainer
    engine: Engine
    episodes: Episodes
    gpu: tuple[Ledger, ...]
    node: tuple[Ledger, ...]
    kv_tokens: int
    pace: Pace
    problems: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return not self.problems


def plan(cfg: DictConfig, config: Any = None) -> Plan:
    """The plan of a composed config. ``config``: the model's transformers config, read from what the config names if
    it is not given. Imports torch and transformers (seconds), neither verl nor vLLM, and needs no GPU.

    Raises:
        ModelUnknown: there is no config of the model.
    """
    name = select(cfg, f"{REF}.model.path") or "?"
    if config is None:
        config = load_config(name)
    rank = select(cfg, f"{REF}.model.lora_rank", 0)
    shape = shape_of(config, name, rank, select(cfg, f"{REF}.model.target_modules"))
    trainer = trainer_of(cfg)
    engine = engine_of(cfg, trainer)
    episodes = episodes_of(cfg, trainer, engine)
    room = Room(
        gpu=int(cfg.cluster.gpu_gb * GIB),
        other=int(cfg.plan.gpu_other_gb * GIB),
        asleep=int(cfg.plan.engine_asleep_gb * GIB),
    )
    gpu = memory.phases(shape, trainer, engine, room)
    node = host.ledgers(cfg, shape)
    kv = memory.kv_tokens(shape, engine, memory.kv_room(shape, engine, room.gpu))
    pace = throughput.pace(cfg, shape, trainer, engine, episodes, room.gpu)
    problems = [*_layout_problems(shape, trainer, engine), *_cache_problems(shape, engine, episodes, room, kv)]
    for phase in gpu:
        if not phase.fits:
            changes = memory.remedies(phase.name, shape, trainer, engine, room)
            problems.append(_too_much(f"GPU memory, {phase.name}", phase, changes))
    problems += [
        _too_much(ledger.name, ledger, host.remedies(ledger.name, cfg, shape)) for ledger in node if not ledger.fits
    ]
    return Plan(
        shape=shape,
        trainer=trainer,
        engine=engine,
        episodes=episodes,
        gpu=tuple(gpu),
        node=tuple(node),
        kv_tokens=kv,
        pace=pace,
        problems=tuple(problems),
        warnings=tuple(_warnings(cfg, shape, engine, episodes, pace)),
    )


def _too_much(what: str, ledger: Ledger, changes: list[str]) -> str:
    assert ledger.limit is not None
    largest = sorted(ledger.parts, key=lambda part: -part.bytes)[:2]
    named = ", ".join(f"{part.name} {part.bytes / GIB:.1f}" for part in largest)
    room = f"{ledger.total / GIB:.1f} GiB of {ledger.limit / GIB:.1f}"
    return f"{what}: {room} (most of it: {named}); {_would_fit(changes)}"


def _would_fit(changes: list[str]) -> str:
    return f"it would fit with {' or '.join(changes[:2])}" if changes else "no change that is known here is enough"


def _layout_problems(shape: Shape, trainer: Trainer, engine: Engine) -> list[str]:
    """Sizes that do not divide each other: verl, vLLM or Megatron would say so after minutes."""
    found = []
    heads = shape.queries // (shape.keys // shape.key_heads)
    rollout, actor = f"{REF}.rollout", f"{REF}.actor"

    def divides(key: str, size: int, whole: int, what: str) -> None:
        if whole % size:
            found.append(f"{key}={size} does not divide {what} ({whole})")

    sequence = f"{actor}.fsdp_config.ulysses_sequence_parallel_size"
    divides(sequence, trainer.sequence_parallel, heads, "the model's attention heads")
    divides(sequence, trainer.sequence_parallel, trainer.gpus, "the trainer's GPUs")
    divides(f"{rollout}.tensor_model_parallel_size", engine.tensor, heads, "the model's attention heads")
    if engine.gpus:
        what = "the engine's GPUs: with data and pipeline parallel size it is one replica"
        divides(f"{rollout}.tensor_model_parallel_size", engine.replica, engine.gpus, what)
    if engine.expert > 1 and shape.experts:
        divides(f"{rollout}.expert_parallel_size", engine.expert, shape.expert_count, "the model's experts")
    if engine.expert > 1 and engine.expert != engine.tensor * engine.data:
        found.append(
            f"{rollout}.expert_parallel_size={engine.expert} is not tensor_model_parallel_size x data_parallel_size "
            f"({engine.tensor * engine.data}): verl refuses it"
        )
    if trainer.megatron:
        split = trainer.tensor * trainer.pipeline * trainer.context
        divides(
            f"{actor}.megatron: tensor x pipeline x context parallel size", split, trainer.gpus, "the trainer's GPUs"
        )
        both = trainer.expert * trainer.pipeline
        divides(f"{actor}.megatron: expert x pipeline parallel size", both, trainer.gpus, "the trainer's GPUs")
        if shape.experts:
            divides(f"{actor}.megatron.expert_model_parallel_size", trainer.expert, shape.expert_count, "the experts")
    if trainer.fused and not memory.fused_works(shape, trainer):
        found.append(
            f"{REF}.model.use_fused_kernels=true fails in verl 0.9.1 with FSDP2 where embeddings are not tied, as in "
            f"{shape.name} (verl issue 5633); set {actor}.entropy_from_logits_with_chunking=true in its place"
        )
    if engine.context > shape.context:
        found.append(
            f"{rollout}.max_model_len={engine.context} (data.max_prompt_length + data.max_response_length) is more "
            f"than the {shape.context} positions of {shape.name}"
        )
    return found


def _cache_problems(shape: Shape, engine: Engine, episodes: Episodes, room: Room, tokens: int) -> list[str]:
    """vLLM does not start unless one sequence of the longest context fits its KV cache."""
    if not engine.gpus or tokens >= engine.context:
        return []
    wanted = engine.context * shape.kv_bytes(engine.element, engine.tensor)
    needed = memory.engine_weights(shape, engine) + memory.engine_working(shape, engine) + wanted
    share = needed / room.gpu + 0.01
    rollout = f"{REF}.rollout"
    changes = [f"{rollout}.gpu_memory_utilization={share:.2f}"] if share < 0.95 else []
    text, wide = memory.wider(engine, 2)
    enough = memory.kv_tokens(shape, wide, memory.kv_room(shape, wide, room.gpu)) >= engine.context
    if enough and engine.gpus % wide.replica == 0:
        changes.append(text)
    if tokens > episodes.prompts:
        changes.append(f"data.max_response_length={tokens - episodes.prompts}")
    return [
        f"KV cache: {tokens} tokens per {engine.group} at {rollout}.gpu_memory_utilization={engine.utilization:g}, "
        f"and one episode may have {engine.context}; {_would_fit(changes)}"
    ]


def _warnings(cfg: DictConfig, shape: Shape, engine: Engine, episodes: Episodes, pace: Pace) -> list[str]:
    found = []
    rollout = f"{REF}.rollout"
    if pace.held < 0.95 * pace.asked:  # a figure that is assumed to begin with
        found.append(
            f"KV cache holds the contexts of {pace.held:.0f} of the {pace.asked:.0f} episodes per {engine.group};"
            f" others are read again in each turn: {rollout}.gpu_memory_utilization higher or sandbox.concurrency lower"
        )
    if pace.asked > engine.sequences:
        found.append(
            f"{rollout}.max_num_seqs={engine.sequences}, but {pace.asked:.0f} episodes per engine run at a time"
        )
    if (cpus := select(cfg, "sandbox.cpus", 1)) * episodes.per_node > 2 * cfg.cluster.cores:
        found.append(
            f"{episodes.per_node} boxes of sandbox.cpus={cpus} on {cfg.cluster.cores} cores (cluster.cores): tests "
            "slow each other down; grading.timeout_s counts wall time"
        )
    limit = select(cfg, "sandbox.memory_mb")
    if limit and 2 * episodes.per_node * limit / 1024 > cfg.cluster.cpu_gb:
        found.append(
            f"{2 * episodes.per_node} boxes may take sandbox.memory_mb={limit} each, more than cluster.cpu_gb together"
        )
    if engine.expert > 1 and not shape.experts:
        found.append(f"{rollout}.expert_parallel_size has no effect: {shape.name} has no experts")
    return found
