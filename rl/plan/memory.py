"""GPU memory in a plan: the bytes on each GPU in every phase of a step; without GPUs, those in the machine's memory.

docs/planning.md says what is counted, docs/measurements.md how far off each formula was where it could be measured.
Sizes of sharded tensors are the mean over the shards.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from omegaconf import DictConfig

from rl.plan.layout import ROLLOUT, EngineLayout, Layout, TrainerLayout, select
from rl.plan.model import ModelShape

GIB = 2**30
TUNING = "fine-tuning (rl.sft)"
# verl computes the fused head and the chunked entropy for this many tokens at a time (FusedLinearForPPO, actor.yaml).
FUSED_CHUNK, ENTROPY_CHUNK = 512, 2048
BLOCK = 16  # tokens per block of vLLM's KV cache on a GPU


@dataclass(frozen=True)
class Ledger:
    """A ledger lists what is in one place at the same time, in bytes. ``limit`` is the room there, inf if unknown."""

    name: str
    parts: dict[str, int]
    limit: float

    @property
    def total(self) -> int:
        """Sum the parts."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Tell whether there is room for all parts."""
        return self.total <= self.limit

    def largest(self, count: int) -> str:
        """Return the largest parts in words, with their GiB."""
        found = sorted(self.parts.items(), key=lambda part: -part[1])[:count]
        return ", ".join(f"{part} {size / GIB:.1f}" for part, size in found)


def ledger(name: str, parts: dict[str, float], limit: float) -> Ledger:
    """Return a ledger of the parts that are not empty."""
    return Ledger(name, {key: int(size) for key, size in parts.items() if size}, limit)


def _local(shape: ModelShape, trainer: TrainerLayout) -> tuple[float, float]:
    """Return the dense parameters and the experts' on one GPU before data parallelism (Megatron's TP, PP and EP)."""
    dense = shape.params - shape.experts
    ends = shape.embeddings  # on the first and on the last stage
    return (
        (dense - ends) / (trainer.tensor * trainer.pipeline) + ends / trainer.tensor,
        shape.experts / (trainer.expert * trainer.pipeline),
    )


def weights(shape: ModelShape, trainer: TrainerLayout) -> float:
    """Return the bytes of the trainer's weights on one GPU."""
    if trainer.megatron:
        return trainer.stored * sum(_local(shape, trainer))
    return trainer.stored * shape.params / trainer.share


def gradients(shape: ModelShape, trainer: TrainerLayout) -> float:
    """Return the bytes of the gradients that are kept until the optimizer's step. FSDP shards them like the weights, in
    their precision; if it accumulates without communication they are unsharded, in fp32. Megatron has fp32 buffers for
    all local parameters."""
    if trainer.megatron:
        return 4 * sum(_local(shape, trainer)) * shape.trained / shape.params
    return 4 * shape.trained if trainer.keep_unsharded_gradients else trainer.stored * shape.trained / trainer.share


def moments(shape: ModelShape, trainer: TrainerLayout) -> float:
    """Return the bytes of Adam's two moments: with FSDP in the weights' precision; with Megatron in fp32 beside fp32
    weights, spread over all ranks that have the same parameters."""
    if not trainer.megatron:
        return 2 * trainer.stored * shape.trained / trainer.share
    (dense, experts), trained = _local(shape, trainer), shape.trained / shape.params
    if not trainer.distributed_optimizer:
        return 12 * (dense + experts) * trained
    copies = trainer.gpus / trainer.pipeline
    return 12 * trained * (dense / max(1, copies / trainer.tensor) + experts / max(1, copies / trainer.expert))


def optimizer_step(shape: ModelShape, trainer: TrainerLayout) -> float:
    """Return what the optimizer's step takes beside the moments. On a GPU torch's AdamW updates all tensors at once and
    holds the root of the second moment for all of them; on a CPU it does not, nor does Megatron's."""
    return 0 if trainer.megatron or trainer.home else trainer.stored * shape.trained / trainer.share


def layer_activations(shape: ModelShape, trainer: TrainerLayout) -> float:
    """Return the bytes per token that autograd keeps of one layer: two norms, attention, and the MLP or the experts
    (with the copies of each token that are sent to them, and the router's scores)."""
    c = trainer.computed
    norms = 2 * (4 + 2 * c) * shape.hidden
    attention = (4 + 3 * c) * (shape.queries + shape.keys)
    mlp = 4 * c * shape.routed * shape.intermediate
    dispatch = 2 * c * shape.routed * shape.hidden + 8 * shape.expert_count if shape.experts else 0
    return (norms + attention + mlp + dispatch + _exchanged(shape, trainer)) / trainer.tensor


def _exchanged(shape: ModelShape, trainer: TrainerLayout) -> float:
    """Return the bytes per token that Ulysses copies: each GPU gets all tokens of its heads (of one key-value head)."""
    if trainer.sequence_parallel == 1:
        return 0
    keys = max(shape.keys, trainer.sequence_parallel * shape.head)
    return trainer.computed * (2 * shape.queries + 2 * keys)


def kept_activations(shape: ModelShape, trainer: TrainerLayout, tokens: int) -> float:
    """Return the bytes kept between forward and backward: each layer's input (without gradient checkpointing all of the
    layer), rotary tables, the last norm. A pipeline has as many batches under way as stages, each with its share of the
    layers."""
    per_layer = trainer.computed * shape.hidden / trainer.tensor
    if not trainer.checkpointing:
        per_layer = layer_activations(shape, trainer)
    once = (4 + 2 * trainer.computed) * shape.hidden + 2 * trainer.computed * shape.head
    return tokens * (per_layer * shape.layers + once / trainer.tensor)


def one_layer(shape: ModelShape, trainer: TrainerLayout, tokens: int, backward: bool) -> float:
    """Return the bytes of the layer at work: temporary tensors, in backward also what is computed again; with FSDP the
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
        one = c + 4 if backward and not shape.lora else 0
        gathered = (2 * c + one) * shape.layer
        if shape.tied:  # verl leaves tied embeddings to the root module, whose weights stay gathered
            gathered += (c + one) * shape.embeddings
    return tokens * temporary / trainer.tensor + gathered


def head(shape: ModelShape, trainer: TrainerLayout, tokens: int, backward: bool) -> float:
    """Return the bytes from the last hidden states to log-probabilities and entropy. flash-attn's cross entropy writes
    its gradient over the logits, verl's own keeps their log-softmax and makes a gradient of its own; an entropy that is
    neither compiled nor chunked makes three fp32 copies of the logits."""
    c, parallel = trainer.computed, trainer.tensor
    matrix = shape.vocabulary * shape.hidden * c / parallel * (2 if backward and not shape.lora else 1)
    if trainer.fused:
        return matrix + FUSED_CHUNK * shape.vocabulary * (c + 8) / parallel + 2 * c * tokens * shape.hidden
    entropy = trainer.entropy_in_update or not backward
    per_logit = c if trainer.unit_temperature else 2 * c
    if backward and trainer.cpu:  # measured: the softmax and its gradient
        per_logit += 8
    elif backward and not trainer.flash and not trainer.megatron:
        per_logit += 2 * c if c == 2 else 12
    elif c == 4 and backward:  # flash-attn takes no fp32: a gradient of its own
        per_logit += 4
    if trainer.megatron:
        per_logit += 8  # fp32 logits and their exponentials
    elif entropy and not trainer.chunked_entropy and not trainer.compiled:
        per_logit += 12
    chunk = ENTROPY_CHUNK * shape.vocabulary * 12 if entropy and trainer.chunked_entropy else 0
    return matrix + per_logit * tokens * shape.vocabulary / parallel + chunk


def engine_weights(shape: ModelShape, engine: EngineLayout) -> float:
    """Return the bytes of the engine's weights on one of its GPUs."""
    spread = engine.expert if engine.expert > 1 else engine.tensor
    return engine.element * ((shape.params - shape.experts) / engine.tensor + shape.experts / spread)


def engine_working(shape: ModelShape, engine: EngineLayout) -> float:
    """Return the bytes of a forward of the engine's largest batch, with the sampler's fp32 logits and logprobs."""
    width = shape.routed * shape.intermediate / engine.tensor
    rows = shape.routed if shape.experts else 1
    per_token = 4 * shape.hidden + rows * shape.hidden + 3 * width + (shape.queries + 2 * shape.keys) / engine.tensor
    return engine.batched_tokens * engine.element * per_token + engine.sequences * shape.vocabulary * 12


def gpu_bytes(config: DictConfig) -> int:
    """Return the memory of one GPU."""
    return int(config.cluster.gpu_gb * GIB)


def kv_room(config: DictConfig, shape: ModelShape, engine: EngineLayout) -> float:
    """Return the bytes per GPU that are left for the KV cache; 0 or less if the engine's weights do not fit."""
    if given := select(config, f"{ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes"):
        return given
    return engine.utilization * gpu_bytes(config) - engine_weights(shape, engine) - engine_working(shape, engine)


def kv_tokens(shape: ModelShape, engine: EngineLayout, room: float, block: int = BLOCK) -> int:
    """Return the tokens that ``room`` bytes of each GPU hold, in whole blocks, as vLLM prints them: in sequences of the
    engine's context; in shorter ones fewer, where layers have a state."""
    each = shape.sequence_bytes(engine.context, engine.element, engine.tensor) / engine.context
    return max(0, int(room // (block * each))) * block


def longest(shape: ModelShape, engine: EngineLayout, room: float) -> int:
    """Return the tokens of the longest sequence, up to the engine's context, that ``room`` bytes of each GPU hold."""
    sizes = range(0, engine.context + 1, BLOCK)
    found = bisect.bisect_right(sizes, room, key=lambda size: shape.sequence_bytes(size, engine.element, engine.tensor))
    return sizes[max(0, found - 1)]


def phases(config: DictConfig, shape: ModelShape, layout: Layout) -> list[Ledger]:
    """Return a ledger for each phase of a step: the bytes on each GPU at its peak, with the GPU as the limit."""
    trainer, engine = layout.trainer, layout.engine
    if trainer.cpu:
        return _phases_of_a_cpu(config, shape, layout)
    w, g, m = weights(shape, trainer), gradients(shape, trainer), moments(shape, trainer)
    kept_w = 0 if trainer.home or trainer.offload_params else w
    kept_m = 0 if trainer.home or trainer.offload_optimizer else m
    kept_g = g if trainer.megatron and kept_w else 0
    stays = {"trainer: weights": kept_w, "trainer: gradients": kept_g, "trainer: optimizer": kept_m}
    own = {"engine: weights": engine_weights(shape, engine)}
    cache = max(0.0, kv_room(config, shape, engine))
    awake = own | {"engine: one batch": engine_working(shape, engine), "engine: KV cache": cache}
    asleep = {"engine, asleep (assumed)": int(config.plan.engine_asleep_gb * GIB)} if engine.sleeps else awake
    beside = asleep if engine.on_trainer else {}
    sync = {"full tensors": 2 * trainer.stored * shape.tensor, "bucket": engine.bucket * (2 - engine.colocated)}
    found = {}
    if engine.colocated:
        found["rollout"] = stays | awake
        loaded = {"trainer: weights": w} if shape.lora and not trainer.home else {}
        found["weight sync"] = stays | loaded | (own if engine.sleeps else awake) | sync
    elif engine.gpus:
        found["rollout (its own GPUs)"] = awake | {"buckets": 2 * engine.bucket}
        found["weight sync (trainer)"] = stays | sync | beside
    if trainer.logprobs:
        held = {} if trainer.home else {"weights": w, "optimizer, idle": kept_m}
        found["log-probabilities"] = held | _passing(shape, trainer, False) | beside
    held = {} if trainer.home else {"weights": w, "gradients": g, "optimizer": m}
    found["update"] = held | _passing(shape, trainer, True) | beside
    other = {"CUDA, NCCL, fragments (assumed)": int(config.plan.gpu_other_gb * GIB)}
    return [ledger(name, parts | other, gpu_bytes(config)) for name, parts in found.items()]


def _phases_of_a_cpu(config: DictConfig, shape: ModelShape, layout: Layout) -> list[Ledger]:
    """Return the same of a machine whose trainer, engine and agents share its memory; and one of rl.sft."""
    plan, trainer, engine = config.plan, layout.trainer, layout.engine
    process, system = plan.cpu_process_gb * GIB, plan.cpu_system_gb * GIB
    own = {"trainer: weights": weights(shape, trainer), "trainer: optimizer": moments(shape, trainer)}
    own |= {"trainer: its process": process}
    one = engine_weights(shape, engine)
    served = {"engine: weights": one, "engine: KV cache": kv_room(config, shape, engine)}
    # The server, the agent loop worker, rl.train and its Ray task.
    beside = {"engine: its process": process, "other processes": 4 * process, "system (assumed)": system}
    agents = layout.per_node * plan.claude_gb * GIB
    gathered = {"trainer: weights, gathered": trainer.computed * shape.params * trainer.unsharded}
    # The engine has its weights twice while they are synced, and keeps the memory.
    twice = served | {"engine: weights, synced": one} | beside
    update = own | gathered | {"gradients": gradients(shape, trainer)} | _passing(shape, trainer, True)
    found = {
        "rollout": own | twice | {f"Claude Code in {layout.per_node} boxes": agents},
        "log-probabilities": own | gathered | _passing(shape, trainer, False) | twice,
        "update": update | twice,
        TUNING: update | {"other processes": process, "system (assumed)": system},
    }
    return [ledger(name, parts, gpu_bytes(config)) for name, parts in found.items()]


def _passing(shape: ModelShape, trainer: TrainerLayout, backward: bool) -> dict[str, float]:
    """Return the peak of a packed batch. The layer at work, the logits and the optimizer's step are never in memory
    together: the largest counts."""
    tokens = trainer.tokens if backward else trainer.logprob_tokens
    kept = 2 * trainer.computed * tokens * shape.hidden
    if backward:
        kept = kept_activations(shape, trainer, tokens)
    layer, logits = one_layer(shape, trainer, tokens, backward), head(shape, trainer, tokens, backward)
    step = optimizer_step(shape, trainer) if backward and not trainer.cpu else 0
    if step > kept + max(layer, logits):
        return {"the optimizer's step": step}
    peak = {"logits and entropy": logits} if logits > layer else {"the layer at work": layer}
    return {"kept activations": kept} | peak
