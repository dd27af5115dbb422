"""The episode's parts from the config. Imports neither verl nor vLLM until they are made."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rewards.rules import Rules
from rewards.shape import Shape
from rl.boxes import kind_of
from rollout.agent import Agent
from rollout.agent.claude_code import ClaudeCode
from rollout.episode import Setup
from rollout.proxy.engine import Engine
from rollout.proxy.forward import SideEndpoint
from rollout.proxy.parsers import VllmReplyParser
from rollout.proxy.render import ChatTemplateRenderer, end_ids, generation_config
from rollout.proxy.server import ProxyServer
from rollout.proxy.session import Policy

# How each kind of agent (``agent.kind``) is made, from the values of its configs/agent/*.yaml and the limits of a reply
# and of the context. Raises FileNotFoundError when the agent's program is not there.
AGENTS: dict[str, Callable[..., Agent]] = {"claude_code": ClaudeCode.of}


def agent_from(config: DictConfig, max_tokens: int, max_context: int) -> Agent:
    """Return the agent of a config. Raises ValueError for an unknown kind and FileNotFoundError without its program."""
    settings: dict[str, Any] = OmegaConf.to_container(config.agent, resolve=True)
    kind = settings.pop("kind", "claude_code")  # configs of earlier runs do not name it
    if kind not in AGENTS:
        raise ValueError(f"agent.kind is {kind!r}; it must be one of {', '.join(AGENTS)}")
    return AGENTS[kind](max_tokens=max_tokens, max_context=max_context, **settings)


def agent_config(config: DictConfig) -> Agent:
    max_tokens = config.proxy.max_tokens or config.data.max_response_length
    return agent_from(config, max_tokens, config.actor_rollout_ref.rollout.max_model_len)


def rules_from(config: DictConfig) -> Rules:
    """What of a patch is graded, and what of it is flagged. Raises ValueError, whose message begins with the key."""
    grading = OmegaConf.to_container(config.grading, resolve=True)
    try:
        return Rules(grading["drop"], grading["flags"])
    except ValueError as error:
        raise ValueError(f"grading.flags: {error}") from error


def shape_from(config: DictConfig) -> Shape | None:
    """The reward's shape, None for the outcome's own. Raises ValueError, whose message begins with the key."""
    try:
        return Shape.of(**config.grading.reward)
    except ValueError as error:
        raise ValueError(f"grading.reward: {error}") from error


def side_endpoint(config: DictConfig) -> SideEndpoint | None:
    if config.proxy.side_calls != "forward":
        return None
    side = config.proxy.side_endpoint
    return SideEndpoint(side.url, side.model, os.environ.get(side.key_env) if side.key_env else None)


def make_setup(config: DictConfig, tokenizer: Any, model_type: str, engine: Engine, proxy: ProxyServer) -> Setup:
    """Everything that an episode of this run needs. ``model_type``: of the policy's config.json."""
    policy = Policy(
        engine=engine,
        renderer=ChatTemplateRenderer(tokenizer, model_type, any_family=config.proxy.any_family),
        parser=VllmReplyParser(config.proxy.tool_parser, config.proxy.reasoning_parser, tokenizer),
        tokenizer=tokenizer,
        end_ids=end_ids(tokenizer, generation_config(config.actor_rollout_ref.model.path)),
        max_tokens=agent_config(config).max_tokens,
        max_context=config.actor_rollout_ref.rollout.max_model_len,
        train_side_calls=config.proxy.side_calls == "train",
        side_endpoint=side_endpoint(config),
    )
    return setup_around(config, policy, proxy)


def setup_around(config: DictConfig, policy: Policy, proxy: ProxyServer) -> Setup:
    """Everything but the policy and the proxy that it is reached through."""
    agent = agent_config(config)
    return Setup(
        policy=policy,
        proxy=proxy,
        boot=kind_of(config.sandbox).boot(agent.binary, Path(config.run.dir or "").name),
        agent=agent,
        grade_timeout_s=config.grading.timeout_s,
        rules=rules_from(config),
        shape=shape_from(config),
        infra_retries=config.episode.infra_retries,
        scratch=Path(scratch) if (scratch := os.environ.get("RL_SOCKET_DIR")) else None,
    )
