"""Tokens and seconds of a step, from the speeds that ``plan.*`` assumes. Good for comparing layouts and for knowing
whether a step takes minutes or hours, not more, until those figures are measured (scripts/bench_gpu.py)."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import DictConfig

from rl.plan.layout import Engine, Episodes, Trainer, select
from rl.plan.memory import BLOCK, kv_room, kv_tokens, moments, weights
from rl.plan.model import Shape


@dataclass(frozen=True)
class Traffic:
    """Tokens: of an episode's row, sampled ones of it, and its context in the mean of its calls."""

    row: float
    sampled: float
    mean_context: float
    turns: float


@dataclass(frozen=True)
class Pace:
    """Of one step. ``seconds`` by phase; ``decode`` is tokens a second of one episode and ``engine`` of a whole
    replica, sampled; ``episode_s`` the mean episode; ``held`` episodes per group of TP GPUs whose context the KV cache
    holds, of ``asked``."""

    tokens: int
    sampled: int
    seconds: dict[str, float]
    episode_s: float
    decode: float
    engine: float
    held: float
    asked: float

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())


def traffic(cfg: DictConfig, episodes: Episodes) -> Traffic:
    """An episode ends at the longest row, whatever the number of turns is that is assumed."""
    plan = cfg.plan
    turns = min(plan.turns, cfg.agent.max_turns)
    per_turn = plan.sampled + plan.read
    first = min(plan.first_prompt, episodes.prompts)
    turns = max(1.0, min(turns, (episodes.row - first) / per_turn))
    row = min(episodes.row, first + turns * per_turn)
    return Traffic(row, turns * plan.sampled, (first + row) / 2, turns)


def flops(shape: Shape, context: float) -> float:
    """Of a token in a forward: two per active parameter (the embedding is looked up), and attention over half of
    ``context`` tokens."""
    return 2 * (shape.active - (0 if shape.tied else shape.embeddings)) + 2 * shape.layers * shape.queries * context


def decode_step(shape: Shape, engine: Engine, cfg: DictConfig, batch: float, context: float) -> float:
    """Seconds of one decoding step of ``batch`` sequences on a group of TP GPUs: weights that the batch reads, its
    keys and values, and what does not depend on it."""
    touched = 1 - (1 - shape.routed / shape.expert_count) ** max(1.0, batch) if shape.experts else 1.0
    read = engine.element * (shape.params - shape.experts + touched * shape.experts) / engine.tensor
    read += max(1.0, batch) * context * shape.kv_bytes(engine.element, engine.tensor)
    return cfg.plan.decode_ms / 1e3 + read / (cfg.plan.bandwidth * cfg.cluster.memory_gbs * 1e9)


def pace(cfg: DictConfig, shape: Shape, trainer: Trainer, engine: Engine, episodes: Episodes, gpu: int) -> Pace:
    plan, cluster = cfg.plan, cfg.cluster
    load = traffic(cfg, episodes)
    peak = cluster.tflops * 1e12
    groups = max(1, engine.gpus // engine.tensor)
    asked = episodes.concurrent / groups
    held = kv_tokens(shape, engine, kv_room(shape, engine, gpu), BLOCK) / load.mean_context
    prefill = flops(shape, load.mean_context) / (engine.tensor * peak * plan.mfu_prefill)
    # Contexts that do not fit are read again in each of their turns.
    again = max(0.0, 1 - held / asked) * load.mean_context
    read = (plan.read + again) * prefill
    running = min(asked, engine.sequences)
    turn, each = plan.tool_s + read, 0.0
    for _ in range(50):  # how many decode at a time depends on how long decoding takes
        batch = max(1.0, min(running, running * plan.sampled * each / turn if each else running))
        busy = min(0.9, running * read / turn)
        each = decode_step(shape, engine, cfg, batch, load.mean_context) / (1 - busy)
        turn = 0.5 * turn + 0.5 * max(plan.tool_s + read + plan.sampled * each, running * read)
    turn *= max(1.0, asked / running)  # the others wait in the engine
    episode_s = plan.boot_s + flops(shape, load.row) * plan.first_prompt / (engine.tensor * peak * plan.mfu_prefill)
    episode_s += load.turns * turn + plan.grade_s
    longest = min(plan.straggler * episode_s, cfg.agent.timeout_s + cfg.grading.timeout_s)
    waves = episodes.per_step / episodes.concurrent
    rollout = (waves - 1) * episode_s + max(episode_s, longest) if waves >= 1 else waves * episode_s
    tokens = episodes.per_step * plan.rows * load.row
    speed = trainer.gpus * peak * (plan.mfu_moe if shape.experts else plan.mfu_dense)
    forward = flops(shape, load.row) * tokens / speed
    epochs = select(cfg, "actor_rollout_ref.actor.ppo_epochs", 1)
    seconds = {"rollout": rollout, "log-probabilities": forward if trainer.logprobs else 0.0}
    seconds["update"] = 3 * epochs * forward
    moved = (weights(shape, trainer) if trainer.offload_params else 0) + (
        moments(shape, trainer) if trainer.offload_optimizer else 0
    )
    if moved:
        seconds["offloading"] = 2 * moved / (plan.offload_gbs * 1e9)
    whole = trainer.stored * (shape.trained if shape.lora else shape.params)
    seconds["weight sync"] = whole / (plan.sync_gbs * 1e9)
    if select(cfg, "trainer.v1.trainer_mode", "sync") != "sync":
        # Episodes go on meanwhile; what is left of the rollout is its mean rate, without the wait for the longest.
        seconds["rollout"] = waves * episode_s
    if not engine.colocated:
        # Both work at a time: the slower one counts.
        rest = sum(value for key, value in seconds.items() if key != "rollout")
        seconds["rollout"] = max(0.0, seconds["rollout"] - rest)
    return Pace(
        tokens=int(tokens),
        sampled=int(episodes.per_step * load.sampled),
        seconds=seconds,
        episode_s=episode_s,
        decode=1 / each,
        engine=load.turns * plan.sampled * asked / (load.turns * turn),
        held=held,
        asked=asked,
    )
