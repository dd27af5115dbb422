"""Tokens and seconds of a step, estimated from the speeds that ``plan.*`` assumes.

Until those speeds are measured (scripts/bench_gpu.py) the estimate serves to compare layouts and to tell whether a
step takes minutes or hours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from omegaconf import DictConfig

from rl.config.compose import ConfigError
from rl.config.plugins import longest
from rl.plan.engine import EngineLoad, forward, load, traffic
from rl.plan.layout import ACTOR, ROLLOUT, Layout, TrainerLayout, batches_in_flight, count_tasks, filters, select
from rl.plan.memory import moments, weights
from rl.plan.model import ModelShape
from rl.plan.rollout import Boxes, Rollout, flowing, whole
from rl.run.pacing import SHORTEST_S


@dataclass(frozen=True)
class Pace:
    """A pace says how fast a step is: tokens trained on and sampled, groups ``used`` and ``played``, how many times as
    long a rollout takes because of groups that cannot be used (``factor``), ``seconds`` by phase, ``episode_s`` of the
    mean episode, and the seconds of one validation in which no episode hangs (``validation_s``). ``load``: that of a
    group of TP GPUs of the engine. ``cut``: the turns that an episode of ``plan.turns`` has when its row is full; 0 if
    it ends before.
    """

    tokens: int
    sampled: int
    used: int
    played: float
    factor: float
    seconds: dict[str, float]
    episode_s: float
    validation_s: float
    load: EngineLoad
    cut: float

    @property
    def step_s(self) -> float:
        """Sum the seconds of all phases."""
        return sum(self.seconds.values())


def pace(config: DictConfig, shape: ModelShape, layout: Layout) -> Pace:
    """Return the pace of a step of the config."""
    plan, sent = config.plan, traffic(config, layout)
    trainer, engine, (turns, row, *_) = layout.trainer, layout.engine, sent
    served = load(config, shape, engine, layout.concurrent / max(1, engine.gpus // engine.tensor), sent)
    first = plan.first_prompt * forward(config, shape, plan.first_prompt, plan.mfu_prefill) / engine.tensor
    episode_s = plan.boot_s + first + turns * served.turn_s + plan.grade_s
    # An episode ends at its time limit, or where its row is full.
    fullest = (layout.row - plan.first_prompt) / max(1.0, row - plan.first_prompt)
    limit = time_limit(config, episode_s, select(config, "episode.deadline")) / episode_s
    boxes = Boxes(layout.workers, config.sandbox.concurrency, plan.spread, max(1.0, min(limit, fullest)))
    boxes = boxes._replace(hangs=plan.timeouts, limit=max(1.0, limit))
    made, plain = rollouts(config, boxes)
    # Claude Code, our proxy and tests need cores, however fast the engine is.
    cores, groups = layout.nodes * config.cluster.cores, config.data.train_batch_size
    busy_s = made.played * layout.per_step / groups * (plan.episode_cpu_s + plan.grade_s) / cores
    rollout = max(made.time * episode_s, busy_s)
    tokens = layout.per_step * plan.rows * row
    share = plan.mfu_moe if shape.experts else plan.mfu_dense
    once = forward(config, shape, row, share) * tokens / trainer.gpus
    seconds = {"rollout": rollout, "log-probabilities": once if trainer.logprobs else 0.0}
    seconds["update"] = update_passes(config, shape, trainer) * once
    moved = trainer.offload_params * weights(shape, trainer) + trainer.offload_optimizer * moments(shape, trainer)
    if moved:
        seconds["offloading"] = 2 * moved / (plan.offload_gbs * 1e9)
    seconds["weight sync"] = trainer.stored * shape.trained / (plan.sync_gbs * 1e9)
    if not engine.colocated:  # trainer and engine work at the same time: the slower one counts
        seconds["rollout"] = max(0.0, rollout - (sum(seconds.values()) - rollout))
    # Held-out episodes have no deadline.
    held_out = boxes._replace(limit=max(1.0, time_limit(config, episode_s, None) / episode_s))
    one, times = validation(config, held_out)
    if times:
        seconds["validation"] = one * times * episode_s
    calm = validation(config, boxes._replace(hangs=0.0))[0] * episode_s
    sampled = int(made.played / groups * layout.per_step * turns * plan.sampled)
    factor = made.time / plain.time
    cut = turns if turns < min(plan.turns, longest(config, "max_turns")) - 0.5 else 0.0
    return Pace(int(tokens), sampled, groups, made.played, factor, seconds, episode_s, calm, served, cut)


def update_passes(config: DictConfig, shape: ModelShape, trainer: TrainerLayout) -> int:
    """Return how many forwards an update takes as long as. With adapters a backward pass has no gradients of the
    weights to calculate, by which GPUs hardly gain."""
    return (2 if trainer.cpu and shape.lora else 3) * select(config, f"{ACTOR}.ppo_epochs", 1)


def time_limit(config: DictConfig, episode_s: float, times: float | None) -> float:
    """Return the seconds after which an episode has ended: its agent's time limit, or its deadline of so many times the
    median, and its grading."""
    limit = longest(config, "timeout_s")
    if times is not None:
        outside = config.plan.boot_s + config.plan.grade_s
        limit = min(limit, max(SHORTEST_S, times * (episode_s - outside) * math.exp(-(config.plan.spread**2) / 2)))
    return limit + min(config.grading.timeout_s, config.plan.boot_s + config.plan.grade_s)


def rollouts(config: DictConfig, boxes: Boxes) -> tuple[Rollout, Rollout]:
    """Return the rollout of a step with the assumed share of all-equal groups (none without dynamic filtering), and
    the one without any such group."""
    mode, rollout = select(config, "trainer.v1.trainer_mode", "sync"), config.actor_rollout_ref.rollout
    groups, size = config.data.train_batch_size, rollout.n
    share = config.plan.all_equal_groups if filters(config) else 0.0
    if not 0 <= share <= 0.95:
        raise ConfigError(f"plan.all_equal_groups={share}: it is a share of all groups, from 0 to 0.95")
    if mode == "sync":
        most = groups * batches_in_flight(config)
        return whole(boxes, groups, size, share, most), whole(boxes, groups, size)
    ahead = select(config, f"trainer.v1.{mode}.num_warmup_batches", 0)
    return flowing(boxes, groups, size, ahead, share), flowing(boxes, groups, size, ahead)


def validation(config: DictConfig, boxes: Boxes) -> tuple[float, float]:
    """Return the time of one validation in mean episodes, and how many there are per step."""
    trainer = config.trainer
    tasks = count_tasks(config, "data.val_files") or config.plan.val_tasks
    tasks = min(tasks, limit) if (limit := select(config, "data.val_max_samples", -1)) > 0 else tasks
    batch = min(tasks, select(config, "data.val_batch_size", tasks))
    one = tasks / batch * whole(boxes, batch, select(config, f"{ROLLOUT}.val_kwargs.n", 1)).time
    every, steps = trainer.test_freq, select(config, "trainer.total_training_steps")
    if not steps:
        return one, 1 / every if every > 0 else 0.0
    times = bool(trainer.val_before_train) + (math.ceil(steps / every) if every > 0 else 0)  # after the last step, too
    return one, times / steps
