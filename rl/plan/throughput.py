"""This module estimates tokens and seconds of a step from the speeds that ``plan.*`` assumes.

Until those speeds are measured (scripts/bench_gpu.py) the estimate serves to compare layouts and to tell whether a
step takes minutes or hours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from omegaconf import DictConfig

from rl.config import ConfigError
from rl.deadline import SHORTEST_S
from rl.plan.layout import (
    ACTOR,
    ROLLOUT,
    EngineLayout,
    Layout,
    batches_in_flight,
    count_tasks,
    filters,
    select,
)
from rl.plan.memory import kv_room, moments, weights
from rl.plan.model import ModelShape
from rl.plan.rollout import Boxes, Rollout, flowing, whole


class Traffic(NamedTuple):
    """Traffic is what a mean episode sends: its turns, the tokens of its training row, and its context averaged over
    its calls.
    """

    turns: float
    row: float
    context: float


@dataclass(frozen=True)
class Pace:
    """A pace says how fast a step is: tokens trained on and sampled, groups ``used`` and ``played``, how many times as
    long a rollout takes because of groups that cannot be used (``factor``), ``seconds`` by phase, ``episode_s`` of the
    mean episode, the tokens a second that an episode samples (``decode``), and the seconds of one validation in which
    no episode hangs (``validation_s``). ``held``: episodes whose contexts the KV cache of a group of TP GPUs holds, out
    of the ``asked`` ones that run there. ``cut``: the turns that an episode of ``plan.turns`` has when its row is full;
    0 if it ends before.
    """

    tokens: int
    sampled: int
    used: int
    played: float
    factor: float
    seconds: dict[str, float]
    episode_s: float
    decode: float
    validation_s: float
    held: float
    asked: float
    cut: float

    @property
    def step_s(self) -> float:
        """Sum the seconds of all phases."""
        return sum(self.seconds.values())


def traffic(config: DictConfig, layout: Layout) -> Traffic:
    """Return the tokens of a mean episode; it ends at the longest row, however many turns are assumed."""
    plan = config.plan
    first, per_turn = min(plan.first_prompt, layout.prompt), plan.sampled + plan.read
    turns = max(1.0, min(plan.turns, config.agent.max_turns, (layout.row - first) / per_turn))
    row = min(layout.row, first + turns * per_turn)
    return Traffic(turns, row, (first + row) / 2)


def forward(config: DictConfig, shape: ModelShape, context: float, share: float) -> float:
    """Return the GPU seconds of a forward of one token in a sequence of ``context`` tokens. Two FLOPs per active
    parameter (untied embeddings are only looked up) run at ``share`` of the peak, what mixes tokens at attention's."""
    matrices = 2 * (shape.active - (0 if shape.tied else shape.embeddings))
    mixing = sum(mixer.flops(context) for mixer in shape.mixers)
    return (matrices / share + mixing / config.plan.mfu_attention) / (config.cluster.tflops * 1e12)


def decode_step(config: DictConfig, shape: ModelShape, engine: EngineLayout, batch: float, context: float) -> float:
    """Return the seconds of one decoding step of ``batch`` sequences on a group of TP GPUs: a constant, and the reading
    of the cache and of the weights that the batch needs."""
    touched = 1 - (1 - shape.routed / shape.expert_count) ** batch if shape.experts else 1.0
    read = engine.element * (shape.params - shape.experts + touched * shape.experts) / engine.tensor
    read += batch * shape.sequence_bytes(context, engine.element, engine.tensor)
    return config.plan.decode_ms / 1e3 + read / (config.plan.bandwidth * config.cluster.memory_gbs * 1e9)


def pace(config: DictConfig, shape: ModelShape, layout: Layout) -> Pace:
    """Return the pace of a step of the config."""
    plan, (turns, row, context) = config.plan, traffic(config, layout)
    trainer, engine = layout.trainer, layout.engine
    asked = layout.concurrent / max(1, engine.gpus // engine.tensor)
    held = max(0.0, kv_room(config, shape, engine)) / shape.sequence_bytes(context, engine.element, engine.tensor)
    # Contexts that the cache does not hold are read again in each of their turns.
    again = max(0.0, 1 - held / asked) * context
    read = (plan.read + again) * forward(config, shape, context, plan.mfu_prefill) / engine.tensor
    running = min(asked, engine.sequences)
    turn, each = max(1e-3, plan.tool_s + read), 0.0
    for _ in range(50):  # how many episodes decode at a time depends on how long decoding takes
        batch = max(1.0, min(running, running * plan.sampled * each / turn if each else running))
        busy = min(0.9, running * read / turn)
        each = decode_step(config, shape, engine, batch, context) / (1 - busy)
        turn = 0.5 * turn + 0.5 * max(plan.tool_s + read + plan.sampled * each, running * read)
    turn *= max(1.0, asked / running)  # the others wait in the engine
    first = plan.first_prompt * forward(config, shape, plan.first_prompt, plan.mfu_prefill) / engine.tensor
    episode_s = plan.boot_s + first + turns * turn + plan.grade_s
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
    seconds["update"] = 3 * select(config, f"{ACTOR}.ppo_epochs", 1) * once
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
    cut = turns if turns < min(plan.turns, config.agent.max_turns) - 0.5 else 0.0
    speeds = (episode_s, 1 / each, calm, held, asked, cut)
    return Pace(int(tokens), sampled, groups, made.played, factor, seconds, *speeds)


def time_limit(config: DictConfig, episode_s: float, times: float | None) -> float:
    """Return the seconds after which an episode has ended: its agent's time limit, or its deadline of so many times the
    median, and its grading."""
    limit = config.agent.timeout_s
    if times is not None:
        outside = config.plan.boot_s + config.plan.grade_s
        limit = min(limit, max(SHORTEST_S, times * (episode_s - outside) * math.exp(-(config.plan.spread**2) / 2)))
    return limit + min(config.grading.timeout_s, config.plan.boot_s + config.plan.grade_s)


def rollouts(config: DictConfig, boxes: Boxes) -> tuple[Rollout, Rollout]:
    """Return the rollout of a step with the assumed share of all-equal groups (none without dynamic filtering), and
    the one without any such group."""
    mode, groups, size = (
        select(config, "trainer.v1.trainer_mode", "sync"),
        config.data.train_batch_size,
        select(config, f"{ROLLOUT}.n"),
    )
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
