"""Bytes on each GPU, by phase of a step.

What is counted and where it comes from is in docs/planning.md, with the error of each formula where it could be
measured. Sizes that are sharded are the mean of the shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from rl.plan.layout import Engine, Trainer
from rl.plan.model import Shape

GIB = 2**30
# verl's fused head and chunked entropy go through so many tokens at a time (FusedLinearForPPO, actor.yaml).
FUSED_CHUNK, ENTROPY_CHUNK = 512, 2048
BLOCK = 16  # tokens per block of vLLM's KV cache on a GPU


@dataclass(frozen=True)
class Part:
    name: str
    bytes: int


@dataclass(frozen=True)
class Ledger:
    """Parts that are there at the same time, and the room for them in bytes (None: not known)."""

    name: str
    parts: tuple[Part, ...]
    limit: int | None

    @property
    def total(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def fits(self) -> bool:
        return self.limit is None or self.total <= self.limit


@dataclass(frozen=True)
class Room:
    """Of a GPU, in bytes: all of it, what nobody counts (CUDA, NCCL, fragments), what a sleeping engine keeps."""

    gpu: int
    other: int
    asleep: int


def ledger(name: str, parts: Iterable[tuple[str, float]], limit: int | None) -> Ledger:
    return Ledger(name, tuple(Part(key, int(n)) for key, n in parts if n), limit)


# ------------------------------------------------------------------ what the trainer keeps


def _local(shape: Shape, trainer: Trainer) -> tuple[float, float]:
    """Parameters on one GPU before data parallelism: dense ones and experts' (Megatron's TP, PP, EP; all with FSDP)."""
    dense = shape.params - shape.experts
    ends = shape.embeddings  # on the first and on the last stage
    return (
        (dense - ends) / (trainer.tensor * trainer.pipeline) + ends / trainer.tensor,
        shape.experts / (trainer.expert * trainer.pipeline),
    )


def weights(shape: Shape, trainer: Trainer) -> float:
    if trainer.megatron:
        return trainer.stored * sum(_local(shape, trainer))
    return trainer.stored * shape.params / trainer.share


def gradients(shape: Shape, trainer: Trainer) -> float:
    """Kept until the optimizer's step: of FSDP in the weights' precision and sharded like them, of Megatron whole
    buffers in fp32. Accumulation without communication keeps them unsharded in fp32."""
    trained = shape.trained / shape.params
    if trainer.megatron:
        return 4 * sum(_local(shape, trainer)) * trained
    return 4 * shape.trained if trainer.keep_unsharded_gradients else trainer.stored * shape.trained / trainer.share


def moments(shape: Shape, trainer: Trainer) -> float:
    """Of Adam: two, in the weights' precision with FSDP; with Megatron in fp32 beside fp32 weights, over all ranks that
    have the same parameters."""
    trained = shape.trained / shape.params
    if not trainer.megatron:
        return 2 * trainer.stored * shape.trained / trainer.share
    dense, experts = _local(shape, trainer)
    if not trainer.distributed_optimizer:
        return 12 * (dense + experts) * trained
    copies = trainer.gpus / trainer.pipeline
    return 12 * trained * (dense / max(1, copies / trainer.tensor) + experts / max(1, copies / trainer.expert))


def optimizer_step(shape: Shape, trainer: Trainer) -> float:
    """What torch's AdamW takes beside its moments while it steps: on a GPU it goes through all tensors at once and has
    the root of the second one for all of them. Not on a CPU, and not Megatron's."""
    return 0 if trainer.megatron or trainer.home else trainer.stored * shape.trained / trainer.share


# ------------------------------------------------------------------ what comes and goes in a packed batch


def layer_activations(shape: Shape, trainer: Trainer) -> float:
    """Bytes per token that autograd keeps of one layer: two norms, attention, MLP or experts (with the copies of each
    token that go to them, and the router's scores)."""
    c = trainer.computed
    norms = 2 * (4 + 2 * c) * shape.hidden
    attention = (4 + 3 * c) * (shape.queries + shape.keys)
    mlp = 4 * c * shape.routed * shape.intermediate
    dispatch = 2 * c * shape.routed * shape.hidden + 8 * shape.expert_count if shape.experts else 0
    return (norms + attention + mlp + dispatch + _exchanged(shape, trainer)) / trainer.tensor


def _exchanged(shape: Shape, trainer: Trainer) -> float:
    """Copies that Ulysses makes: every GPU gets all tokens of its heads, and at least one key-value head."""
    if trainer.sequence_parallel == 1:
        return 0
    head = shape.keys // shape.key_heads
    return trainer.computed * (2 * shape.queries + 2 * max(shape.keys, trainer.sequence_parallel * head))


def kept_activations(shape: Shape, trainer: Trainer, tokens: int) -> float:
    """Between forward and backward: with gradient checkpointing each layer's input; rotary tables; the last norm. A
    pipeline has as many batches under way as stages, each with its share of the layers."""
    per_layer = trainer.computed * shape.hidden / trainer.tensor
    if not trainer.checkpointing:
        per_layer = layer_activations(shape, trainer)
    once = (4 + 2 * trainer.computed) * shape.hidden + 2 * trainer.computed * (shape.keys // shape.key_heads)
    return tokens * (per_layer * shape.layers + once / trainer.tensor)


def one_layer(shape: Shape, trainer: Trainer, tokens: int, backward: bool) -> float:
    """What the layer at work takes: temporary tensors, in backward also what is computed again, and with FSDP the
    gathered weights of two layers, in backward also one layer's gradients in both precisions."""
    c, width = trainer.computed, shape.routed * shape.intermediate
    if backward:
        temporary = c * (2 * width + 2 * shape.routed * shape.hidden) + (3 * c * shape.hidden if shape.experts else 0)
        if trainer.checkpointing:
            temporary += layer_activations(shape, trainer) * trainer.tensor
    else:
        rows = 2.5 * shape.routed + 4 if shape.experts else 2
        temporary = c * (2 * width + rows * shape.hidden) + _exchanged(shape, trainer)
    gathered = 0.0
    if not trainer.megatron:
        gathered = 2 * c * shape.layer
        if backward and not shape.lora:
            gathered += (c + 4) * shape.layer
        if shape.tied:  # verl leaves tied embeddings to the root module, whose weights stay gathered
            gathered += c * shape.embeddings + ((c + 4) * shape.embeddings if backward and not shape.lora else 0)
    return tokens * temporary / trainer.tensor + gathered


def head(shape: Shape, trainer: Trainer, tokens: int, backward: bool) -> float:
    """From the last hidden states to log-probabilities and entropy. flash-attn's cross entropy writes its gradient over
    the logits; entropy that is neither compiled nor in chunks makes three fp32 copies of them."""
    c, parallel = trainer.computed, trainer.tensor
    entropy = trainer.entropy_in_update if backward else True
    matrix = shape.vocabulary * shape.hidden * c / parallel * (2 if backward and not shape.lora else 1)
    if trainer.fused:
        return matrix + FUSED_CHUNK * shape.vocabulary * (c + 8) / parallel + 2 * c * tokens * shape.hidden
    logits = tokens * shape.vocabulary / parallel
    bytes_ = c + (0 if trainer.unit_temperature else c)
    if c == 4 and backward:  # no flash-attn: a gradient of its own
        bytes_ += 4
    if trainer.megatron:
        bytes_ += 8  # fp32 logits and their exponentials
    chunk = ENTROPY_CHUNK * shape.vocabulary * 12 if entropy and trainer.chunked_entropy else 0
    if entropy and not trainer.chunked_entropy and not trainer.compiled and not trainer.megatron:
        bytes_ += 12
    return matrix + bytes_ * logits + chunk


def fused_works(shape: Shape, trainer: Trainer) -> bool:
    """Not with FSDP2 where the head is a module of its own, whose weights are not gathered for it (verl issue 5633)."""
    return trainer.megatron or shape.tied


# ------------------------------------------------------------------ the engine


def engine_weights(shape: Shape, engine: Engine) -> float:
    spread = engine.expert if engine.expert > 1 else engine.tensor
    return engine.element * ((shape.params - shape.experts) / engine.tensor + shape.experts / spread)


def engine_working(shape: Shape, engine: Engine) -> float:
    """A forward of the largest batch that it takes at once, and the sampler's fp32 logits and log-probabilities."""
    width = shape.routed * shape.intermediate / engine.tensor
    rows = shape.routed if shape.experts else 1
    per_token = 4 * shape.hidden + rows * shape.hidden + 3 * width + (shape.queries + 2 * shape.keys) / engine.tensor
    return engine.batched_tokens * engine.element * per_token + engine.sequences * shape.vocabulary * 12


def kv_room(shape: Shape, engine: Engine, gpu: int) -> float:
    """Bytes per GPU that are left for the KV cache; not above 0: the weights do not fit."""
    return engine.utilization * gpu - engine_weights(shape, engine) - engine_working(shape, engine)


def kv_tokens(shape: Shape, engine: Engine, room: float, block: int = BLOCK) -> int:
    """Tokens that ``room`` bytes of a GPU hold, in whole blocks, as vLLM prints them."""
    return max(0, int(room // (block * shape.kv_bytes(engine.element, engine.tensor)))) * block


# ------------------------------------------------------------------ phases


def phases(shape: Shape, trainer: Trainer, engine: Engine, room: Room) -> list[Ledger]:
    """One ledger for each phase of a step: bytes on each GPU at its peak, with the GPU as the limit."""
    w, g, m = weights(shape, trainer), gradients(shape, trainer), moments(shape, trainer)
    on_gpu = not trainer.home
    stay_w = w if on_gpu and not trainer.offload_params else 0
    stay_g = g if trainer.megatron and stay_w else 0
    stay_m = m if on_gpu and not trainer.offload_optimizer else 0
    engine_w, engine_t = engine_weights(shape, engine), engine_working(shape, engine)
    cache = kv_room(shape, engine, room.gpu)
    other = ("CUDA, NCCL, fragments (assumed)", room.other)
    stays = [("trainer: weights", stay_w), ("trainer: gradients", stay_g), ("trainer: optimizer", stay_m)]
    awake = [("engine: weights", engine_w), ("engine: one batch", engine_t), ("engine: KV cache", max(0.0, cache))]
    beside: list[tuple[str, float]]
    if engine.sleeps:
        beside = [("engine, asleep (assumed)", room.asleep)] if engine.on_trainer else []
    else:
        beside = awake if engine.on_trainer else []
    sync = [
        ("full tensors", 2 * trainer.stored * shape.tensor),
        ("bucket", engine.bucket * (1 if engine.colocated else 2)),
    ]
    found = []
    if engine.colocated:
        found.append(ledger("rollout", [*stays, *awake, other], room.gpu))
        loaded = w if shape.lora and on_gpu else stay_w
        engine_then = [("engine: weights", engine_w)] if engine.sleeps else awake
        parts = [("trainer: weights", loaded), *stays[1:], *engine_then, *sync, other]
        found.append(ledger("weight sync", parts, room.gpu))
    elif engine.gpus:
        buckets = ("buckets", 2 * engine.bucket)
        found.append(ledger("rollout (its own GPUs)", [*awake, buckets, other], room.gpu))
        found.append(ledger("weight sync (trainer)", [*stays, *sync, *beside, other], room.gpu))
    if trainer.logprobs:
        found.append(
            _trainer_phase("log-probabilities", shape, trainer, [("weights", w)], stay_m, beside, other, room.gpu)
        )
    states = [("weights", w), ("gradients", g), ("optimizer", m)]
    found.append(_trainer_phase("update", shape, trainer, states, 0, beside, other, room.gpu))
    return found


def _trainer_phase(
    name: str,
    shape: Shape,
    trainer: Trainer,
    states: list[tuple[str, float]],
    idle: float,
    beside: list[tuple[str, float]],
    other: tuple[str, float],
    limit: int,
) -> Ledger:
    """``states`` are there if they live on the GPU at all; ``idle``: the optimizer's while it is not used. Logits, the
    layer at work and the optimizer's step are never there together: the largest counts."""
    backward = name == "update"
    tokens = trainer.tokens if backward else trainer.logprob_tokens
    kept = kept_activations(shape, trainer, tokens) if backward else 2 * trainer.computed * tokens * shape.hidden
    layer, logits = one_layer(shape, trainer, tokens, backward), head(shape, trainer, tokens, backward)
    peak = ("logits and entropy", logits) if logits > layer else ("the layer at work", layer)
    held = [] if trainer.home else [*states, ("optimizer, idle", idle)]
    passing = [("kept activations", kept), peak]
    if backward and (step := optimizer_step(shape, trainer)) > kept + peak[1]:
        passing = [("the optimizer's step", step)]
    return ledger(name, [*held, *passing, *beside, other], limit)


# ------------------------------------------------------------------ what to change

Change = tuple[str, Callable[[Trainer, Engine], tuple[Trainer, Engine]]]


def remedies(name: str, shape: Shape, trainer: Trainer, engine: Engine, room: Room) -> list[str]:
    """Changes of the config with which the phase would fit: single ones, else pairs; the least of them first."""
    changes = list(_changes(name, shape, trainer, engine, room))

    def fits(*chosen: Change) -> bool:
        changed, engine_ = trainer, engine
        for _, change in chosen:
            changed, engine_ = change(changed, engine_)
        if engine_.gpus and kv_tokens(shape, engine_, kv_room(shape, engine_, room.gpu)) < engine_.context:
            return False
        return any(phase.name == name and phase.fits for phase in phases(shape, changed, engine_, room))

    good = [(change,) for change in changes if fits(change)] or [
        pair for pair in combinations(changes, 2) if fits(*pair)
    ]
    found: dict[tuple[str, ...], str] = {}  # of each set of keys the least
    for chosen in good:
        found.setdefault(tuple(text.split("=")[0] for text, _ in chosen), " with ".join(text for text, _ in chosen))
    return list(found.values())


def wider(engine: Engine, times: int) -> tuple[str, Engine]:
    """So many times as many GPUs in a tensor-parallel group, as overrides and as an engine."""
    rollout = "actor_rollout_ref.rollout"
    text = f"{rollout}.tensor_model_parallel_size={engine.tensor * times}"
    expert = engine.expert
    if expert > 1:  # verl wants it to be TP x DP
        expert *= times
        text += f" with {rollout}.expert_parallel_size={expert}"
    return text, replace(engine, tensor=engine.tensor * times, replica=engine.replica * times, expert=expert)


def _changes(name: str, shape: Shape, trainer: Trainer, engine: Engine, room: Room) -> Iterator[Change]:
    ref, fsdp = "actor_rollout_ref", "actor_rollout_ref.actor.fsdp_config"
    actor, rollout = f"{ref}.actor", f"{ref}.rollout"
    keys = f"{actor}.megatron" if trainer.megatron else fsdp

    def of_trainer(**values: Any) -> Callable[[Trainer, Engine], tuple[Trainer, Engine]]:
        return lambda t, e: (replace(t, **values), e)

    def of_engine(**values: Any) -> Callable[[Trainer, Engine], tuple[Trainer, Engine]]:
        return lambda t, e: (t, replace(e, **values))

    if "rollout" in name or not engine.sleeps:
        now = next(phase for phase in phases(shape, trainer, engine, room) if phase.name == name)
        less = int(100 * (engine.utilization - (now.total - room.gpu) / room.gpu)) / 100
        if less > 0:
            yield f"{rollout}.gpu_memory_utilization={less}", of_engine(utilization=less)
    if engine.colocated and not engine.sleeps:
        text = f"{rollout}.free_cache_engine=true with {rollout}.enable_sleep_mode=true"
        yield text, of_engine(sleeps=True)
    if not trainer.chunked_entropy:
        yield f"{actor}.entropy_from_logits_with_chunking=true", of_trainer(chunked_entropy=True)
    if not trainer.fused and fused_works(shape, trainer):
        yield f"{ref}.model.use_fused_kernels=true", of_trainer(fused=True)
    if not trainer.checkpointing and not trainer.megatron:
        yield f"{ref}.model.enable_gradient_checkpointing=true", of_trainer(checkpointing=True)
    if trainer.keep_unsharded_gradients:
        yield f"{fsdp}.use_no_sync_for_gradient_accumulation=false", of_trainer(keep_unsharded_gradients=False)
    if not trainer.offload_optimizer and not trainer.home:
        yield f"{keys}.optimizer_offload=true", of_trainer(offload_optimizer=True)
        both = of_trainer(offload_optimizer=True, offload_params=True)
        yield f"{keys}.param_offload=true with {keys}.optimizer_offload=true", both
    for parts in (2, 4, 8):
        size = (trainer.context if trainer.megatron else trainer.sequence_parallel) * parts
        if size <= trainer.gpus:
            spread = "context" if trainer.megatron else "sequence_parallel"
            key = "context_parallel_size" if trainer.megatron else "ulysses_sequence_parallel_size"
            values = {
                "tokens": trainer.tokens // parts,
                "logprob_tokens": trainer.logprob_tokens // parts,
                spread: size,
            }
            text = f"{actor}.ppo_max_token_len_per_gpu={trainer.tokens // parts} with {keys}.{key}={size}"
            yield text, of_trainer(**values)
    if trainer.share == trainer.gpus or trainer.megatron:
        for times in (2, 4, 8):
            nodes = trainer.nodes * times
            yield f"trainer.nnodes={nodes}", of_trainer(nodes=nodes, share=trainer.share * times)
    else:
        yield f"{fsdp}.fsdp_size=-1", of_trainer(share=trainer.gpus)
    if not trainer.megatron and not trainer.home:
        values = {"home": True, "offload_params": False, "offload_optimizer": False}
        yield f"{fsdp}.offload_policy=true", of_trainer(**values)
    for times in (2, 4, 8):
        text, wide = wider(engine, times)
        if engine.gpus % wide.replica == 0:
            changed = {"tensor": wide.tensor, "replica": wide.replica, "expert": wide.expert}
            yield text, of_engine(**changed)
