"""The plan of a run without GPUs (``trainer.device=cpu``): the machine counts as one GPU with its memory."""

from __future__ import annotations

import math
import pickle
from statistics import NormalDist

import psutil
from omegaconf import DictConfig, open_dict

from rl.plan import memory
from rl.plan.engine import traffic
from rl.plan.layout import ACTOR, MODEL, ROLLOUT, Layout, layout_of, select
from rl.plan.memory import GIB
from rl.plan.model import ModelShape

ERROR = 0.15  # of a planned peak (docs/planning.md#on-a-cpu)
UNKNOWN = (
    "on a CPU it is not known how long the longest row is (plan.spread is assumed), how fast a core computes in "
    "float32 or beside other work, how fast the engine samples, and what tests take in memory"
)


def longest_row(config: DictConfig, layout: Layout) -> int:
    """Return the tokens of the longest row of a step that is to be expected, in which what follows the first prompt is
    spread like episodes' durations."""
    sent, spread = traffic(config, layout), config.plan.spread
    deviations = NormalDist().inv_cdf((layout.per_step - 0.375) / (layout.per_step + 0.25))  # Blom's approximation
    longest = sent.first + (sent.row - sent.first) * math.exp(spread * deviations - spread * spread / 2)
    return int(min(layout.row, longest))


def machine(config: DictConfig, full: bool = False) -> DictConfig:
    """Return a copy of the config whose ``cluster`` is this machine, as one GPU, and whose batches are of one row: the
    longest to be expected or, if ``full``, the longest there may be. Others than those of CPUs are returned as they
    are."""
    layout = layout_of(config)
    if not layout.trainer.cpu:
        return config
    config = pickle.loads(pickle.dumps(config))
    size, cores = psutil.virtual_memory().total / GIB, select(config, "cpu_threads") or psutil.cpu_count()
    with open_dict(config):
        config.cluster.update(gpu=f"CPU, {cores} cores", gpu_gb=size, cpu_gb=size, cores=cores)
        config.cluster.disk_gb = psutil.disk_usage("/").total / GIB
        config.cluster.update(tflops=cores * config.plan.cpu_gflops / 1e3, memory_gbs=config.plan.cpu_memory_gbs)
        for key in ("mfu_dense", "mfu_moe", "mfu_attention", "mfu_prefill", "bandwidth"):
            config.plan[key] = 1.0
        if not select(config, f"{ACTOR}.use_dynamic_bsz", False):
            config.actor_rollout_ref.actor.use_dynamic_bsz = True
            rows = layout.row if full else longest_row(config, layout)
            rows *= select(config, f"{ACTOR}.ppo_micro_batch_size_per_gpu", 1)
            config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu = rows
            config.actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu = rows
    return config


def problems(config: DictConfig, shape: ModelShape) -> tuple[list[str], list[str]]:
    """Return a line for each phase of training that does not fit, and notes. A row as long as the config allows may
    take more than the machine has by the plan's error; an expected one may not. rl.sft is not judged."""
    found, notes, layout = [], [UNKNOWN], layout_of(config)
    there = psutil.virtual_memory().total
    for full, limit in ((False, there), (True, (1 + ERROR) * there)):
        made = machine(config, full)
        phases = [one for one in memory.phases(made, shape, layout_of(made)) if one.name != memory.TUNING]
        worst = max(phases, key=lambda phase: phase.total)
        row = layout_of(made).trainer.tokens
        size = f"{worst.name}: a row of {row} tokens takes {worst.total / GIB:.1f} GiB of {there / GIB:.1f}"
        if worst.total > limit and not found:
            lora = "" if shape.lora else f", {MODEL}.lora_rank=32"
            keys = f"lower data.max_response_length{lora} or {ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes"
            found.append(f"memory, {size} (most of it: {worst.largest(3)}); {keys}")
        elif full and worst.total > there and not found:
            notes.append(f"{size}, and one may have as many (data.max_response_length={layout.row - layout.prompt})")
    return found, notes
