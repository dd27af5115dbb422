"""How a config spreads trainer, engine and episodes over GPUs and nodes: verl's keys, read once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

REF = "actor_rollout_ref"
BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2, "half": 2, "auto": 2}


@dataclass(frozen=True)
class Trainer:
    """``stored`` and ``computed`` are bytes of an element of the kept weights, and in forward and backward.
    ``tokens``: in a packed batch on one GPU, in the update and for log-probabilities. ``share``: GPUs that share one
    copy of the weights (FSDP). Megatron's sizes are 1 with FSDP. ``home``: weights, gradients and moments live in CPU
    memory (FSDP2's offload policy)."""

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

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class Engine:
    """``colocated``: it shares its GPUs with the trainer; ``sleeps``: and gives up its memory while it does not
    generate. ``on_trainer``: there are replicas on the trainer's GPUs, also where others have their own. ``gpus`` is 0
    when there is none. ``expert``: over how many GPUs experts are spread, 1: as all weights."""

    colocated: bool
    on_trainer: bool
    gpus: int
    nodes: int
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
    keeps_weights_on_cpu: bool
    bucket: int
    graphs: bool

    @property
    def replicas(self) -> int:
        return max(1, self.gpus // self.replica)

    @property
    def group(self) -> str:
        """GPUs that have one KV cache together, in words."""
        return "GPU" if self.tensor == 1 else f"{self.tensor} GPUs"


@dataclass(frozen=True)
class Episodes:
    """``per_step``: episodes; ``concurrent``: at a time in the whole run, ``per_node`` on the node with most of them;
    ``row``: the longest training row in tokens."""

    per_step: int
    concurrent: int
    per_node: int
    row: int
    prompts: int
    updates: int


def select(cfg: DictConfig, key: str, default: Any = None) -> Any:
    value = OmegaConf.select(cfg, key)
    return default if value is None else value


def trainer_of(cfg: DictConfig) -> Trainer:
    actor, rollout, model = f"{REF}.actor", f"{REF}.rollout", f"{REF}.model"
    megatron = select(cfg, f"{actor}.strategy") == "megatron"
    engine = f"{actor}.megatron" if megatron else f"{actor}.fsdp_config"
    nodes, per_node = cfg.trainer.nnodes, cfg.trainer.n_gpus_per_node
    size = select(cfg, f"{engine}.fsdp_size", -1)
    gpus = nodes * per_node
    parallel = max(
        select(cfg, f"{actor}.ulysses_sequence_parallel_size", 1),
        select(cfg, f"{engine}.ulysses_sequence_parallel_size", 1),
    )
    row = cfg.data.max_prompt_length + cfg.data.max_response_length
    spread = select(cfg, f"{engine}.context_parallel_size", 1) if megatron else parallel
    tokens = _packed(cfg, f"{actor}.ppo_max_token_len_per_gpu", f"{actor}.ppo_micro_batch_size_per_gpu", row, spread)
    scoring = _packed(
        cfg,
        f"{rollout}.log_prob_max_token_len_per_gpu",
        f"{rollout}.log_prob_micro_batch_size_per_gpu",
        row,
        spread,
    )
    home = bool(select(cfg, f"{engine}.offload_policy", False))
    computed = BYTES[str(select(cfg, f"{engine}.mixed_precision.param_dtype", select(cfg, f"{engine}.dtype", "bf16")))]
    return Trainer(
        megatron=megatron,
        nodes=nodes,
        gpus_per_node=per_node,
        share=gpus if size < 0 or size >= gpus else size,
        stored=2 if megatron else BYTES[str(select(cfg, f"{engine}.model_dtype", "fp32"))],
        computed=computed,
        sequence_parallel=parallel,
        tokens=tokens,
        logprob_tokens=scoring,
        checkpointing=_checkpointing(cfg, megatron),
        offload_params=bool(select(cfg, f"{engine}.param_offload", False)) and not home,
        offload_optimizer=bool(select(cfg, f"{engine}.optimizer_offload", False)) and not home,
        home=home,
        keep_unsharded_gradients=bool(select(cfg, f"{engine}.use_no_sync_for_gradient_accumulation", False)),
        fused=bool(select(cfg, f"{model}.use_fused_kernels", False)),
        chunked_entropy=bool(select(cfg, f"{actor}.entropy_from_logits_with_chunking", False)),
        compiled=bool(select(cfg, f"{engine}.use_torch_compile", False)),
        entropy_in_update=bool(select(cfg, f"{actor}.calculate_entropy", False))
        or bool(select(cfg, f"{actor}.entropy_coeff", 0)),
        unit_temperature=float(select(cfg, f"{rollout}.temperature", 1.0)) == 1.0,
        logprobs=not select(cfg, "algorithm.rollout_correction.bypass_mode", False),
        tensor=select(cfg, f"{engine}.tensor_model_parallel_size", 1) if megatron else 1,
        pipeline=select(cfg, f"{engine}.pipeline_model_parallel_size", 1) if megatron else 1,
        context=select(cfg, f"{engine}.context_parallel_size", 1) if megatron else 1,
        expert=select(cfg, f"{engine}.expert_model_parallel_size", 1)
        * select(cfg, f"{engine}.expert_tensor_parallel_size", 1)
        if megatron
        else 1,
        distributed_optimizer=bool(select(cfg, f"{engine}.use_distributed_optimizer", True)),
    )


def _packed(cfg: DictConfig, budget: str, micro: str, row: int, spread: int) -> int:
    """Tokens on one GPU at a time. A row is split over ``spread`` GPUs; the budget is per GPU."""
    if select(cfg, f"{REF}.actor.use_dynamic_bsz", False):
        return select(cfg, budget, row)
    return math.ceil(select(cfg, micro, 1) * row / spread)


def _checkpointing(cfg: DictConfig, megatron: bool) -> bool:
    if megatron:
        return select(cfg, f"{REF}.actor.megatron.override_transformer_config.recompute_granularity") == "full"
    return bool(select(cfg, f"{REF}.model.enable_gradient_checkpointing", True))


def engine_of(cfg: DictConfig, trainer: Trainer) -> Engine:
    rollout = f"{REF}.rollout"
    separate = select(cfg, "trainer.v1.trainer_mode") == "separate_async"
    nodes = select(cfg, f"{rollout}.nnodes", 0) if separate else trainer.nodes
    gpus = nodes * select(cfg, f"{rollout}.n_gpus_per_node", trainer.gpus_per_node) if separate else trainer.gpus
    tensor = cfg.actor_rollout_ref.rollout.tensor_model_parallel_size
    data = select(cfg, f"{rollout}.data_parallel_size", 1)
    replica = tensor * data * select(cfg, f"{rollout}.pipeline_model_parallel_size", 1)
    row = cfg.data.max_prompt_length + cfg.data.max_response_length
    lora = select(cfg, f"{REF}.model.lora_rank", 0) > 0 and not select(cfg, f"{REF}.model.lora.merge", False)
    sleeps = bool(select(cfg, f"{rollout}.free_cache_engine", True)) and bool(
        select(cfg, f"{rollout}.enable_sleep_mode", True)
    )
    return Engine(
        colocated=not separate,
        on_trainer=not separate or bool(select(cfg, f"{REF}.hybrid_engine", True)),
        gpus=gpus,
        nodes=nodes,
        tensor=tensor,
        data=data,
        replica=replica,
        expert=select(cfg, f"{rollout}.expert_parallel_size", 1),
        element=BYTES[str(select(cfg, f"{rollout}.dtype", "bfloat16"))],
        utilization=float(select(cfg, f"{rollout}.gpu_memory_utilization", 0.5)),
        sleeps=sleeps,
        context=select(cfg, f"{rollout}.max_model_len", row),
        batched_tokens=select(cfg, f"{rollout}.max_num_batched_tokens", 8192),
        sequences=select(cfg, f"{rollout}.max_num_seqs", 1024),
        keeps_weights_on_cpu=lora and sleeps,
        bucket=select(cfg, f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes", 2048) << 20,
        graphs=not select(cfg, f"{rollout}.enforce_eager", False),
    )


def episodes_of(cfg: DictConfig, trainer: Trainer, engine: Engine) -> Episodes:
    rollout = cfg.actor_rollout_ref.rollout
    workers = select(cfg, f"{REF}.rollout.agent.num_workers", 8)
    nodes = trainer.nodes if engine.colocated else trainer.nodes + engine.nodes
    per_step = cfg.data.train_batch_size * rollout.n
    if select(cfg, "trainer.v1.trainer_mode", "sync") == "sync":
        ahead = per_step
    else:  # groups of the steps to come are played meanwhile
        mode = cfg.trainer.v1.trainer_mode
        ahead = per_step * (1 + select(cfg, f"trainer.v1.{mode}.num_warmup_batches", 1))
    concurrent = min(workers * cfg.sandbox.concurrency, ahead)
    return Episodes(
        per_step=per_step,
        concurrent=concurrent,
        # verl places workers in turn over the nodes.
        per_node=min(math.ceil(workers / nodes) * cfg.sandbox.concurrency, concurrent),
        row=cfg.data.max_prompt_length + cfg.data.max_response_length,
        prompts=cfg.data.max_prompt_length,
        updates=max(1, cfg.data.train_batch_size // cfg.actor_rollout_ref.actor.ppo_mini_batch_size),
    )
