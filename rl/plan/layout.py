"""The layout of a config: how verl's keys spread trainer, engine and episodes over GPUs and nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
FSDP, MEGATRON = f"{ACTOR}.fsdp_config", f"{ACTOR}.megatron"
FLASH = "flash_attention_2"  # verl's default
BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2, "half": 2, "auto": 2}


@dataclass(frozen=True)
class TrainerLayout:
    """A layout says how the trainer is spread over GPUs. ``stored`` and ``computed`` are bytes per element of the
    weights it keeps, and of the tensors in forward and backward. ``tokens`` and ``logprob_tokens``: size of a packed
    batch on one GPU in the update and for log-probabilities. ``share``: GPUs that share one copy of the weights (FSDP).
    ``flash``: attention and cross entropy are flash-attn's. ``home``: weights, gradients and moments live in CPU memory
    (FSDP2's offload policy). ``cpu``: there is no GPU. ``unsharded``: all weights stay gathered after a forward.
    Megatron's parallel sizes are 1 with FSDP.
    """

    megatron: bool
    nodes: int
    gpus_per_node: int
    share: int
    stored: int
    computed: int
    sequence_parallel: int
    tokens: int
    logprob_tokens: int
    checkpointing: bool
    offload_params: bool
    offload_optimizer: bool
    home: bool
    keep_unsharded_gradients: bool
    fused: bool
    flash: bool
    chunked_entropy: bool
    compiled: bool
    entropy_in_update: bool
    unit_temperature: bool
    logprobs: bool
    tensor: int
    pipeline: int
    context: int
    expert: int
    distributed_optimizer: bool
    cpu: bool
    unsharded: bool

    @property
    def gpus(self) -> int:
        """Count the GPUs of all nodes."""
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class EngineLayout:
    """A layout says how the engine is spread over GPUs. ``colocated``: it shares its GPUs with the trainer; ``sleeps``:
    it frees its memory while it does not generate; ``on_trainer``: replicas run on the trainer's GPUs, even if others
    have GPUs of their own. ``gpus`` is 0 if there is no engine. ``expert``: GPUs that experts are spread over (1: split
    like all weights).
    """

    colocated: bool
    on_trainer: bool
    gpus: int
    tensor: int
    data: int
    replica: int
    expert: int
    element: int
    utilization: float
    sleeps: bool
    context: int
    batched_tokens: int
    sequences: int
    bucket: int

    @property
    def group(self) -> str:
        """Name the GPUs that share one KV cache, in words."""
        return "GPU" if self.tensor == 1 else f"{self.tensor} GPUs"


@dataclass(frozen=True)
class Layout:
    """A layout places trainer and engine, and counts the episodes of a step (``per_step``) and those that run at the
    same time: in the whole run (``concurrent``) and on the node with most of them (``per_node``). ``row`` and
    ``prompt``: the longest training row and prompt in tokens. ``workers``: agent loop workers, on ``nodes``."""

    trainer: TrainerLayout
    engine: EngineLayout
    workers: int
    nodes: int
    per_step: int
    concurrent: int
    per_node: int
    row: int
    prompt: int


def select(config: DictConfig, key: str, default: Any = None) -> Any:
    """Return the value of a dotted key, or ``default`` if it is missing or null."""
    value = OmegaConf.select(config, key)
    return default if value is None else value


def filters(config: DictConfig) -> bool:
    """Tell whether groups with equal rewards are replaced."""
    return bool(select(config, "algorithm.filter_groups.enable", False))


def batches_in_flight(config: DictConfig) -> int:
    """Return how many batches of groups a synchronous step may play at a time."""
    return select(config, "algorithm.filter_groups.max_inflight_gen_batches", 1) if filters(config) else 1


def count_tasks(config: DictConfig, *keys: str) -> int:
    """Count the rows of those task files named by ``keys`` that are on this machine."""
    import pyarrow.parquet

    found = 0
    for key in keys:
        files: Any = select(config, key, [])
        for name in files if isinstance(files, list | ListConfig) else [files]:
            if (path := Path(name).expanduser()).is_file():
                found += pyarrow.parquet.read_metadata(path).num_rows
    return found


def layout_of(config: DictConfig) -> Layout:
    """Return the layout of a composed config."""
    data, rollout, trainer = config.data, config.actor_rollout_ref.rollout, trainer_of(config)
    mode = select(config, "trainer.v1.trainer_mode", "sync")
    separate, row = mode == "separate_async", data.max_prompt_length + data.max_response_length
    engine_nodes = select(rollout, "nnodes", 0) if separate else trainer.nodes
    tensor, replicas = rollout.tensor_model_parallel_size, select(rollout, "data_parallel_size", 1)
    engine = EngineLayout(
        colocated=not separate,
        on_trainer=not separate or bool(select(config, "actor_rollout_ref.hybrid_engine", True)),
        gpus=engine_nodes * (select(rollout, "n_gpus_per_node") if separate else trainer.gpus_per_node),
        tensor=tensor,
        data=replicas,
        replica=tensor * replicas * select(rollout, "pipeline_model_parallel_size", 1),
        expert=select(rollout, "expert_parallel_size", 1),
        element=BYTES[str(select(rollout, "dtype", "bfloat16"))],
        utilization=float(select(rollout, "gpu_memory_utilization", 0.5)),
        sleeps=bool(select(rollout, "free_cache_engine", True) and select(rollout, "enable_sleep_mode", True)),
        context=select(rollout, "max_model_len", row),
        batched_tokens=select(rollout, "max_num_batched_tokens", 8192),
        sequences=select(rollout, "max_num_seqs", 1024),
        bucket=select(rollout, "checkpoint_engine.update_weights_bucket_megabytes", 2048) << 20,
    )
    per_step, workers = data.train_batch_size * rollout.n, select(rollout, "agent.num_workers", 8)
    # Batches of later steps are played meanwhile, or replacements of groups that a step cannot use.
    ahead = select(config, f"trainer.v1.{mode}.num_warmup_batches", 0)
    batches = batches_in_flight(config) if mode == "sync" else 1 + ahead
    concurrent = int(min(workers * config.sandbox.concurrency, per_step * batches))
    nodes = trainer.nodes + separate * engine_nodes  # verl places workers on them in turn
    per_node = min(math.ceil(workers / nodes) * config.sandbox.concurrency, concurrent)
    return Layout(trainer, engine, workers, nodes, per_step, concurrent, per_node, row, data.max_prompt_length)


def trainer_of(config: DictConfig) -> TrainerLayout:
    """Return the layout of the config's trainer."""
    actor, trainer = config.actor_rollout_ref.actor, config.trainer
    megatron = actor.strategy == "megatron"
    backend = actor.megatron if megatron else actor.fsdp_config
    gpus, size = trainer.nnodes * trainer.n_gpus_per_node, select(backend, "fsdp_size", -1)
    home, context = bool(select(backend, "offload_policy", False)), select(backend, "context_parallel_size", 1)
    ulysses = "ulysses_sequence_parallel_size"
    parallel = max(select(actor, ulysses, 1), select(backend, ulysses, 1))
    spread = context if megatron else parallel
    checkpointing = bool(select(config, f"{MODEL}.enable_gradient_checkpointing", True))
    if megatron:
        checkpointing = select(backend, "override_transformer_config.recompute_granularity") == "full"
    return TrainerLayout(
        megatron=megatron,
        nodes=trainer.nnodes,
        gpus_per_node=trainer.n_gpus_per_node,
        share=gpus if size < 0 or size >= gpus else size,
        stored=2 if megatron else BYTES[str(select(backend, "model_dtype", "fp32"))],
        computed=BYTES[str(select(backend, "mixed_precision.param_dtype", select(backend, "dtype", "bf16")))],
        sequence_parallel=parallel,
        tokens=_packed(config, f"{ACTOR}.ppo", spread),
        logprob_tokens=_packed(config, f"{ROLLOUT}.log_prob", spread),
        checkpointing=checkpointing,
        offload_params=bool(select(backend, "param_offload", False)) and not home,
        offload_optimizer=bool(select(backend, "optimizer_offload", False)) and not home,
        home=home,
        keep_unsharded_gradients=bool(select(backend, "use_no_sync_for_gradient_accumulation", False)),
        fused=bool(select(config, f"{MODEL}.use_fused_kernels", False)),
        flash=select(config, f"{MODEL}.override_config.attn_implementation", FLASH) == FLASH,
        chunked_entropy=bool(select(actor, "entropy_from_logits_with_chunking", False)),
        compiled=bool(select(backend, "use_torch_compile", False)),
        entropy_in_update=bool(select(actor, "calculate_entropy", False) or select(actor, "entropy_coeff", 0)),
        unit_temperature=float(select(config, f"{ROLLOUT}.temperature", 1.0)) == 1.0,
        logprobs=not select(config, "algorithm.rollout_correction.bypass_mode", False),
        tensor=select(backend, "tensor_model_parallel_size", 1),
        pipeline=select(backend, "pipeline_model_parallel_size", 1),
        context=context,
        expert=select(backend, "expert_model_parallel_size", 1) * select(backend, "expert_tensor_parallel_size", 1),
        distributed_optimizer=bool(select(backend, "use_distributed_optimizer", True)),
        cpu=select(config, "trainer.device") == "cpu",
        unsharded=not megatron and not select(backend, "reshard_after_forward", True),
    )


def _packed(config: DictConfig, key: str, spread: int) -> int:
    """Return the tokens that one GPU has at a time: a budget per GPU, or whole rows split over ``spread`` GPUs."""
    row = config.data.max_prompt_length + config.data.max_response_length
    if select(config, f"{ACTOR}.use_dynamic_bsz", False):
        return select(config, f"{key}_max_token_len_per_gpu", row)
    return math.ceil(select(config, f"{key}_micro_batch_size_per_gpu", 1) * row / spread)
