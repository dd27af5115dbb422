"""CPU memory and disk of a node in a plan, and what checkpoints take on the disk of the run."""

from __future__ import annotations

import math

from omegaconf import DictConfig

from rl.episodes.boxes import kind_of
from rl.plan.engine import traffic
from rl.plan.layout import ACTOR, MODEL, ROLLOUT, Layout, TrainerLayout, count_tasks, select
from rl.plan.memory import GIB, Ledger, engine_weights, gradients, ledger, moments, weights
from rl.plan.model import ModelShape

# Bytes of a token in TransferQueue: ids twice and mask as int64, six float32 fields (log-probabilities of engine and
# trainer, entropy, advantages, returns, rewards), and the copies that a step makes of some of them.
QUEUE_BYTES = 72
START, STEP = "CPU memory of a node, at the start", "CPU memory of a node, in a step"
DISK, CHECKPOINTS = "disk of a node", "disk of run.root"


def ledgers(config: DictConfig, shape: ModelShape, layout: Layout) -> list[Ledger]:
    """Return the ledgers of the fullest node: its CPU memory while the model is loaded and in a step, and its disk; and
    one of the disk that checkpoints are on, if any are saved."""
    plan, cluster, trainer, engine = config.plan, config.cluster, layout.trainer, layout.engine
    per_node, episodes, boxes = trainer.gpus_per_node, layout.per_node, 2 * layout.per_node
    processes = {"processes of trainer and engine (assumed)": per_node * plan.process_gb * GIB}
    # One process of each group that shares weights reads the whole model; all do where embeddings are tied.
    readers = per_node if shape.tied else max(1, per_node // trainer.share)
    whole = {"the model, read": trainer.stored * shape.params * (1 if trainer.megatron else readers)}
    # A trainer apart from its engine keeps one more copy, where several updates go without a sync (DetachActorWorker).
    copies = trainer.home + trainer.offload_params + (not engine.colocated)
    kept = copies * weights(shape, trainer) + trainer.home * gradients(shape, trainer)
    kept += (trainer.home or trainer.offload_optimizer) * moments(shape, trainer)
    # With adapters of its own the engine keeps its base weights while it sleeps; else they are sent again.
    adapters = shape.lora and engine.sleeps and not select(config, f"{MODEL}.lora.merge", False)
    routed = 2 * shape.layers * shape.routed * bool(select(config, f"{ROLLOUT}.enable_rollout_routing_replay", False))
    step = {
        "weights and optimizer, offloaded": per_node * kept,
        "engine's weights, asleep": per_node * adapters * engine_weights(shape, engine),
        "weights under way (shared memory)": 0 if trainer.gpus > 1 or engine.sleeps else engine.bucket,
        **processes,
        f"Claude Code in {episodes} boxes": episodes * plan.claude_gb * GIB,
        f"{boxes} boxes: of agents and of grading (assumed)": boxes * plan.box_gb * GIB,
        "rows of a step": layout.per_step * plan.rows * traffic(config, layout).row * (QUEUE_BYTES + routed),
    }
    tasks = count_tasks(config, "data.train_files", "data.val_files")
    budget = select(config, "sandbox.image_budget_gb") or math.inf
    images = min(tasks * plan.image_gb, budget) if kind_of(config.sandbox).from_images else 0
    disk = {
        f"images of {tasks or 'unknown'} tasks (assumed)": images * GIB,
        f"{boxes} boxes (assumed)": boxes * plan.box_disk_gb * GIB,
    }
    memory, found = int(cluster.cpu_gb * GIB), [ledger(DISK, disk, int(cluster.disk_gb * GIB))]
    if not trainer.cpu:  # whose phases are those of rl.plan.memory
        found = [ledger(START, whole | processes, memory), ledger(STEP, step, memory), *found]
    if config.trainer.save_freq > 0:
        one, count = checkpoint_bytes(config, shape, trainer), checkpoints_kept(config)
        room = math.inf if cluster.checkpoint_gb is None else int(cluster.checkpoint_gb * GIB)
        found.append(ledger(CHECKPOINTS, {f"{count} checkpoints of {one / GIB:.0f} GiB": count * one}, room))
    return found


def checkpoint_bytes(config: DictConfig, shape: ModelShape, trainer: TrainerLayout) -> int:
    """Return the bytes of one checkpoint: all ranks' weights and moments as they are in memory. All else is small."""
    contents = set(select(config, f"{ACTOR}.checkpoint.save_contents", ["model", "optimizer", "extra"]))
    copies = 1 if trainer.megatron else trainer.gpus // trainer.share  # with FSDP each rank writes its shard
    model, adam = copies * trainer.stored * shape.params, 12 if trainer.megatron else 2 * trainer.stored * copies
    sizes = {"model": model, "optimizer": shape.trained * adam, "hf_model": 2 * shape.params}
    return sum(size for name, size in sizes.items() if name in contents)


def checkpoints_kept(config: DictConfig) -> int:
    """Count the checkpoints at the fullest moment: the oldest goes when a new one is whole (rl/run/checkpoints.py)."""
    steps, keep = select(config, "trainer.total_training_steps"), select(config, "trainer.max_actor_ckpt_to_keep")
    if not steps:  # it ends by its epochs; if all are kept, there will be more
        return (keep or 1) + 1
    ever = math.ceil(steps / (1 if config.run.save_minutes else config.trainer.save_freq))  # the last step's, too
    return min(ever, keep + 1) if keep else ever
