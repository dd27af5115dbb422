"""CPU memory and disk of a node, and what is on the shared disk."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from rl.boxes import kind_of
from rl.plan.layout import REF, Engine, Episodes, Trainer, engine_of, episodes_of, select, trainer_of
from rl.plan.memory import GIB, Ledger, engine_weights, gradients, ledger, moments, weights
from rl.plan.model import Shape
from rl.plan.throughput import traffic

# Of a token in TransferQueue: ids twice and mask as int64, six float32 fields (log-probabilities of engine and
# trainer, entropy, advantages, returns, rewards), and the copies that a step makes of some of them.
QUEUE_BYTES = 72
START, STEP, DISK, CHECKPOINTS = (
    "CPU memory of a node, at the start",
    "CPU memory of a node, in a step",
    "disk of a node",
    "disk of run.root",
)


def ledgers(cfg: DictConfig, shape: Shape) -> list[Ledger]:
    """Of the fullest node, and of the disk that the run is on."""
    trainer = trainer_of(cfg)
    engine = engine_of(cfg, trainer)
    episodes = episodes_of(cfg, trainer, engine)
    row = traffic(cfg, episodes).row
    return cpu_memory(cfg, shape, trainer, engine, episodes, row) + disk(cfg, shape, trainer, episodes)


def cpu_memory(
    cfg: DictConfig, shape: Shape, trainer: Trainer, engine: Engine, episodes: Episodes, row_tokens: float
) -> list[Ledger]:
    """Two ledgers of the fullest node: while the model is loaded, and in a step. Boxes at their assumed size."""
    plan, limit = cfg.plan, int(cfg.cluster.cpu_gb * GIB)
    per_node = trainer.gpus_per_node
    processes = ("processes of trainer and engine (assumed)", per_node * plan.process_gb * GIB)
    # One process of each group that shares weights reads the whole model; all do where embeddings are tied.
    readers = per_node if shape.tied else max(1, per_node // trainer.share)
    whole = trainer.stored * shape.params * (readers if not trainer.megatron else 1)
    start = ledger(START, [("the model, read", whole), processes], limit)
    kept = 0.0
    if trainer.home:
        kept = weights(shape, trainer) + gradients(shape, trainer) + moments(shape, trainer)
    if trainer.offload_params:
        kept += weights(shape, trainer)
    if trainer.offload_optimizer:
        kept += moments(shape, trainer)
    if not engine.colocated:  # DetachActorWorker's copy, where several updates go without a sync
        kept += weights(shape, trainer)
    asleep = per_node * engine_weights(shape, engine) if engine.keeps_weights_on_cpu else 0
    routed = (
        2 * shape.layers * shape.routed if select(cfg, f"{REF}.rollout.enable_rollout_routing_replay", False) else 0
    )
    boxes = 2 * episodes.per_node
    queue = episodes.per_step * plan.rows * row_tokens * (QUEUE_BYTES + routed)
    step = ledger(
        STEP,
        [
            ("weights and optimizer, offloaded", per_node * kept),
            ("engine's weights, asleep", asleep),
            ("weights under way (shared memory)", 0 if trainer.gpus > 1 or engine.sleeps else engine.bucket),
            processes,
            (f"Claude Code in {episodes.per_node} boxes", episodes.per_node * plan.claude_gb * GIB),
            (f"{boxes} boxes: of agents and of grading (assumed)", boxes * plan.box_gb * GIB),
            ("rows of a step", queue),
        ],
        limit,
    )
    return [start, step]


def disk(cfg: DictConfig, shape: Shape, trainer: Trainer, episodes: Episodes) -> list[Ledger]:
    """Images and boxes on a node's own disk, checkpoints where the run is."""
    tasks = count_tasks(cfg)
    budget = select(cfg, "sandbox.image_budget_gb")
    images = tasks * cfg.plan.image_gb if kind_of(cfg.sandbox).from_images else 0
    images = min(images, budget) if budget else images
    local = ledger(
        DISK,
        [
            (f"images of {tasks or 'unknown'} tasks (assumed)", images * GIB),
            (f"{2 * episodes.per_node} boxes (assumed)", 2 * episodes.per_node * cfg.plan.box_disk_gb * GIB),
        ],
        int(cfg.cluster.disk_gb * GIB),
    )
    if cfg.trainer.save_freq <= 0:
        return [local]
    one = checkpoint_bytes(cfg, shape, trainer)
    count = checkpoints_kept(cfg)
    room = cfg.cluster.checkpoint_gb
    parts = [(f"{count} checkpoints of {one / GIB:.0f} GiB", count * one)]
    return [local, ledger(CHECKPOINTS, parts, None if room is None else int(room * GIB))]


def checkpoint_bytes(cfg: DictConfig, shape: Shape, trainer: Trainer) -> int:
    """Of one checkpoint: all ranks' weights and moments, as they are in memory. What else is in it is small."""
    contents = set(select(cfg, f"{REF}.actor.checkpoint.save_contents", ["model", "optimizer", "extra"]))
    copies = 1 if trainer.megatron else trainer.gpus // trainer.share  # with FSDP each rank writes its shard
    bytes_ = 0
    if "model" in contents:
        bytes_ += copies * trainer.stored * shape.params
    if "optimizer" in contents:
        bytes_ += shape.trained * (12 if trainer.megatron else 2 * trainer.stored * copies)
    if "hf_model" in contents:
        bytes_ += 2 * shape.params
    return bytes_


def checkpoints_kept(cfg: DictConfig) -> int:
    """At the fullest moment: the oldest is removed when a new one is whole (rl/run/checkpoints.py)."""
    steps, every = select(cfg, "trainer.total_training_steps", 0), cfg.trainer.save_freq
    ever = max(1, steps // every) if steps else 1
    keep = select(cfg, "trainer.max_actor_ckpt_to_keep")
    return ever if not keep else min(ever, keep + 1)


def count_tasks(cfg: DictConfig) -> int:
    """Rows of the task files that are here; 0 if there are none."""
    import pyarrow.parquet

    found = 0
    for key in ("data.train_files", "data.val_files"):
        files: Any = select(cfg, key, [])
        for name in files if isinstance(files, list | ListConfig) else [files]:
            path = Path(name).expanduser()
            if path.is_file():
                found += pyarrow.parquet.read_metadata(path).num_rows
    return found


# ------------------------------------------------------------------ what to change


def remedies(name: str, cfg: DictConfig, shape: Shape) -> list[str]:
    """Changes of one key with which the ledger of that name fits, of each key the least."""
    found: dict[str, str] = {}
    for key, value in _changes(name, cfg, shape):
        changed = copy.deepcopy(cfg)
        OmegaConf.update(changed, key, value)
        if key not in found and any(made.name == name and made.fits for made in ledgers(changed, shape)):
            found[key] = f"{key}={value}"
    return list(found.values())


def _changes(name: str, cfg: DictConfig, shape: Shape) -> Iterator[tuple[str, Any]]:
    """Those that leave the GPUs as they are."""
    trainer = trainer_of(cfg)
    if name == START and trainer.share < trainer.gpus and not shape.tied:
        yield f"{REF}.actor.fsdp_config.fsdp_size", -1  # one process in place of several reads the model
    if name == CHECKPOINTS:
        for keep in (2, 1):
            yield "trainer.max_actor_ckpt_to_keep", keep
    if name == DISK:
        boxes = next(made for made in ledgers(cfg, shape) if made.name == DISK).parts[-1].bytes
        if (room := int(cfg.cluster.disk_gb - boxes / GIB)) > 0 and "image_budget_gb" in cfg.sandbox:
            yield "sandbox.image_budget_gb", room
    if name in (STEP, DISK):
        for parts in (2, 4, 8, 16, 32):
            if cfg.sandbox.concurrency >= parts:
                yield "sandbox.concurrency", cfg.sandbox.concurrency // parts
        for times in (2, 4, 8):
            yield "trainer.nnodes", trainer.nodes * times
