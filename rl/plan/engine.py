"""The engine's speed in a plan: how fast it serves episodes, and how many of their contexts stay in its KV cache."""

from __future__ import annotations

from typing import NamedTuple

from omegaconf import DictConfig

from rl.config.plugins import longest
from rl.plan.layout import EngineLayout, Layout
from rl.plan.memory import kv_room
from rl.plan.model import ModelShape


class Traffic(NamedTuple):
    """Traffic is what a mean episode sends: its turns, the tokens of its training row, its context averaged over its
    calls, and the tokens of its first prompt."""

    turns: float
    row: float
    context: float
    first: int


class EngineLoad(NamedTuple):
    """This is what a group of TP GPUs has to do. ``asked`` episodes play there at the same time, and a turn of each
    takes ``turn_s``. ``running`` of them are served, ``waiting`` wait for that; all others use tools, and ``stays`` is
    the share of their contexts that is still in the cache afterwards. The cache holds the mean contexts of ``held``
    episodes. ``token_s``: seconds of a token that an episode samples."""

    asked: float
    held: float
    running: float
    waiting: float
    stays: float
    turn_s: float
    token_s: float


def traffic(config: DictConfig, layout: Layout) -> Traffic:
    """Return the tokens of a mean episode; it ends at the longest row, however many turns are assumed."""
    plan = config.plan
    first, per_turn = min(plan.first_prompt, layout.prompt), plan.sampled + plan.read
    turns = max(1.0, min(plan.turns, longest(config, "max_turns"), (layout.row - first) / per_turn))
    row = min(layout.row, first + turns * per_turn)
    return Traffic(turns, row, (first + row) / 2, first)


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


def kept(held: float, asked: float, inside: float) -> float:
    """Return the share of idle contexts that stay in a cache with room for ``held``, while ``inside`` of the ``asked``
    requests are in the engine: these have their room, or push others out when they get it."""
    idle = asked - inside
    return min(1.0, max(0.0, held - inside) / idle) if idle > 0 else float(held >= asked)


def load(config: DictConfig, shape: ModelShape, engine: EngineLayout, asked: float, traffic: Traffic) -> EngineLoad:
    """Return the load of a group of TP GPUs where ``asked`` episodes play at the same time."""
    plan, (turns, _, context, first) = config.plan, traffic
    # Claude Code's first prompt is the same in all episodes, but for the task: the cache has it once.
    common = shape.shared_bytes(first, engine.element, engine.tensor)
    own = max(1.0, shape.sequence_bytes(context, engine.element, engine.tensor) - common)
    held = max(0.0, kv_room(config, shape, engine) - common) / own
    served = max(1.0, min(asked, engine.sequences, held))
    one, old = forward(config, shape, context, plan.mfu_prefill) / engine.tensor, (1 - 1 / turns) * (context - first)
    turn, token, stays, busy = max(1e-3, plan.tool_s + plan.read * one), 0.0, 1.0, 0.0
    for _ in range(50):  # what stays, and how many decode at a time, depend on how long a turn takes
        stays = kept(held, asked, asked * (1 - plan.tool_s / turn))
        read = (plan.read + (1 - stays) * old) * one
        batch = max(1.0, min(served, asked * plan.sampled * token / turn))
        token = decode_step(config, shape, engine, batch, context) / (1 - min(0.9, asked * read / turn))
        busy = read + plan.sampled * token
        turn = (turn + max(plan.tool_s + busy, asked * read, asked * busy / served)) / 2
    running = min(served, asked * busy / turn)
    waiting = max(0.0, asked * (1 - plan.tool_s / turn) - running)
    return EngineLoad(asked, held, running, waiting, stays, turn, token)
