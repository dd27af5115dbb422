"""The parts of episodes, made from a config: agent, boxes, rules, reward and policy.

verl and vLLM are imported when the first policy is loaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rewards.credit import Credit
from rewards.rules import Rules
from rewards.shape import Shape, load
from rl.config import plugins
from rl.config.plugins import MIXED, agents_of
from rl.episodes.boxes import kind_of
from rollout.agent import Agent
from rollout.agent.claude_code import ClaudeCode
from rollout.agent.codex import Codex
from rollout.agent.command import CommandAgent
from rollout.agent.gemini_cli import GeminiCli
from rollout.agent.mini_swe_agent import MiniSweAgent
from rollout.agent.mix import Mix
from rollout.agent.opencode import OpenCode
from rollout.agent.openhands import OpenHands
from rollout.agent.qwen_code import QwenCode
from rollout.episode import Boot, Setup
from rollout.proxy.chat import ChatEndpoint
from rollout.proxy.engine import Engine
from rollout.proxy.fits import check_fits
from rollout.proxy.forward import SideEndpoint
from rollout.proxy.parsers import VllmReplyParser
from rollout.proxy.render import ChatTemplateRenderer, end_ids, generation_config, vocabulary
from rollout.proxy.roles import SIDE, Rule
from rollout.proxy.server import ProxyServer
from rollout.proxy.session import Policy

# Makes each kind of agent (``agent.kind``) from the values of its configs/agent/*.yaml, max_tokens and max_context.
AGENTS: dict[str, Callable[..., Agent]] = {
    "claude_code": ClaudeCode.of,
    "codex": Codex.of,
    "opencode": OpenCode.of,
    "qwen_code": QwenCode.of,
    "mini_swe_agent": MiniSweAgent.of,
    "openhands": OpenHands.of,
    "gemini_cli": GeminiCli.of,
    "command": CommandAgent.of,
}

# The agents whose programs have to be installed (``rl.agents``).
INSTALLED = (Codex, OpenCode, QwenCode, MiniSweAgent, OpenHands, GeminiCli)

# By protocol, the class that speaks it with an endpoint that calls are forwarded to.
ENDPOINTS: dict[str, type[SideEndpoint]] = {"messages": SideEndpoint, "chat": ChatEndpoint}


def agent_from(config: DictConfig, max_tokens: int, max_context: int, key: str = "agent") -> Agent:
    """Return the agent whose settings are at ``key``: ``agent``, or its key in a mix (``agents_of``).

    Raises ValueError for an unknown kind and for wrong settings, FileNotFoundError without its program.
    """
    settings: Any = OmegaConf.to_container(OmegaConf.select(config, key), resolve=True)
    kind = settings.pop("kind", "claude_code")  # configs of earlier runs do not name it
    try:
        make = plugins.named(kind, AGENTS)
    except ValueError as error:
        raise ValueError(f"{key}.kind {error}") from error
    try:
        return make(max_tokens=max_tokens, max_context=max_context, **settings)
    except (TypeError, KeyError) as error:  # of an agent of another package: keys that it wants, or does not know
        raise ValueError(f"{key}.kind={kind}: {type(error).__name__}: {error}") from error
    except ValueError as error:
        raise ValueError(str(error) if key == "agent" else f"{key}: {error}") from error


def agents_from(config: DictConfig, max_tokens: int, max_context: int) -> dict[str, Agent]:
    """Return the agents of a config by name, which is the kind of one that is alone. Raises as ``agent_from`` does."""
    return {
        key.partition(".")[2] or settings.get("kind", "claude_code"): agent_from(config, max_tokens, max_context, key)
        for key, settings in agents_of(config).items()
    }


def mix_from(config: DictConfig) -> Mix | None:
    """Return the mix of a config's agents, None if it has one agent. Raises ValueError."""
    if config.agent.get("kind") != MIXED:
        return None
    group: Any = OmegaConf.to_container(config.agent, resolve=True)
    mix = Mix(group["mix"], group["seed"])
    there = [name for name, settings in group.items() if name != "mix" and isinstance(settings, dict)]
    if unknown := [name for name in mix.weights if name not in there]:
        raise ValueError(f"agent.mix: there is no agent {unknown[0]!r}; there are {', '.join(there)}")
    return mix


def rules_from(config: DictConfig) -> Rules:
    """Return the rules that say what of a patch is graded and flagged. Raises ValueError that begins with the key."""
    grading: Any = OmegaConf.to_container(config.grading, resolve=True)
    try:
        return Rules(grading["drop"], grading["flags"], grading.get("needs_second_opinion", False))
    except ValueError as error:
        raise ValueError(f"grading.flags: {error}") from error


def shape_from(config: DictConfig) -> Shape | None:
    """Return the shape of the reward, None if it is 1 or 0. Raises ValueError that begins with the key."""
    try:
        return Shape.of(**config.grading.reward)
    except ValueError as error:
        raise ValueError(f"grading.reward: {error}") from error


def credit_from(config: DictConfig) -> Credit | None:
    """Return what gives rows their rewards, None for their episode's. Raises ValueError that begins with the key."""
    name = config.episode.get("credit")  # evaluations have none
    try:
        return load(name) if name else None
    except ValueError as error:
        raise ValueError(f"episode.credit: {error}") from error


def roles_from(config: DictConfig) -> dict[str, Rule] | None:
    """Return the rules by role, None if roles are not told apart. Raises ValueError that begins with the key."""
    given: Any = OmegaConf.to_container(config.proxy.get("roles") or OmegaConf.create(), resolve=True)
    rules: dict[str, Rule] = {}
    for role, said in given.items():
        key = f"proxy.roles.{role}"
        if role == SIDE:
            raise ValueError(f"{key}: proxy.side_calls says what is done with side calls")
        if not re.fullmatch(r"main|subagent(/[\w.:-]{1,64})?", str(role)):
            raise ValueError(f"{key}: there is no such role; roles are main, subagent and subagent/TYPE")
        match said:
            case {"train": bool(train), **rest} if not rest:
                rules[role] = Rule(train)
            case {"endpoint": str(url), "model": str(model), **rest} if rest.keys() <= {"protocol", "key_env"}:
                if not re.match("https?://[^@]+$", url):
                    raise ValueError(f"{key}.endpoint must be a URL without a key in it, such as http://HOST:8000")
                rules[role] = Rule(False, _endpoint(key, url, model, **rest))
            case _:
                raise ValueError(f"{key} is {said}; give train, or endpoint and model (and protocol, key_env)")
    return rules if rules or config.episode.get("credit") else None


def side_endpoint_from(config: DictConfig) -> SideEndpoint | None:
    """Return the endpoint that answers side calls, None for the policy. Raises ValueError that begins with the key."""
    side, forwards = config.proxy.side_endpoint, config.proxy.side_calls == "forward"
    protocol = side.get("protocol", "messages")  # configs of earlier runs do not name it
    return _endpoint("proxy.side_endpoint", side.url, side.model, protocol, side.key_env) if forwards else None


def _endpoint(key: str, url: str, model: str, protocol: str = "messages", key_env: str | None = None) -> SideEndpoint:
    if protocol not in ENDPOINTS:
        raise ValueError(f"{key}.protocol is {protocol!r}; it must be messages or chat")
    if key_env and not os.environ.get(key_env):
        raise ValueError(f"{key}.key_env names {key_env}, which is not set")
    return ENDPOINTS[protocol](url, model, os.environ[key_env] if key_env else None)


@dataclass(frozen=True)
class Settings:
    """Settings are a config, and what training and evaluations say of episodes in different ways.

    ``agents``: each with the function that boots its boxes, by name. ``max_tokens``: of one reply; ``max_context``: of
    a prompt and its reply together.
    """

    config: DictConfig
    agents: Mapping[str, tuple[Agent, Boot]]
    max_tokens: int
    max_context: int


def training_settings(config: DictConfig) -> Settings:
    """Return the settings of a training run's config. Raises as ``read_settings`` does."""
    return read_settings(
        config,
        max_tokens=config.proxy.max_tokens or config.data.max_response_length,
        max_context=config.actor_rollout_ref.rollout.max_model_len,
        run=Path(config.run.dir or "").name,
    )


def read_settings(config: DictConfig, *, max_tokens: int, max_context: int, run: str) -> Settings:
    """Return the settings of the groups that all programs have: agent, proxy, sandbox, grading and episode.

    ``run``: the name of the run, which marks its boxes. Raises ConfigError, ValueError and FileNotFoundError.
    """
    boxes, agents = kind_of(config.sandbox), agents_from(config, max_tokens, max_context)
    booted = {name: (agent, boxes.boot(agent, run)) for name, agent in agents.items()}
    return Settings(config, booted, max_tokens, max_context)


def load_policy(settings: Settings, model: str, tokenizer: Any, model_type: str, engine: Engine) -> Policy:
    """Return a policy that ``engine`` samples for; this imports vLLM and verl.

    ``model``: directory or hub name of its config.json and generation_config.json; ``model_type``: from the former.
    Raises ValueError for a parser that is not known, and for what does not fit the chat template.
    """
    config, proxy = settings.config, settings.config.proxy
    renderer = ChatTemplateRenderer(tokenizer, model_type)
    check_fits(renderer, proxy.tool_parser, proxy.any_family)
    return Policy(
        engine=engine,
        renderer=renderer,
        parser=VllmReplyParser(proxy.tool_parser, proxy.reasoning_parser, tokenizer),
        tokenizer=tokenizer,
        end_ids=end_ids(tokenizer, generation_config(model)),
        max_tokens=settings.max_tokens,
        max_context=settings.max_context,
        train_side_calls=proxy.side_calls == "train",
        side_endpoint=side_endpoint_from(config),
        max_calls=proxy.max_calls,
        max_body=int(proxy.max_body_mb * 2**20),
        max_session_tokens=proxy.max_session_tokens,
        vocabulary=vocabulary(model),
        roles=roles_from(config),
    )


def make_setup(settings: Settings, policy: Policy, proxy: ProxyServer) -> Setup:
    """Return everything that the episodes of a process need. Raises ValueError that begins with the key."""
    config, mix = settings.config, mix_from(settings.config)
    name, (agent, boot) = next(iter(settings.agents.items()))
    return Setup(
        policy=policy,
        proxy=proxy,
        boot=boot,
        agent=agent,
        name=name,
        mix=mix,
        agents=settings.agents,
        grade_timeout_s=config.grading.timeout_s,
        rules=rules_from(config),
        second_opinion=config.grading.second_opinion,
        shape=shape_from(config),
        credit=credit_from(config),
        infra_retries=config.episode.infra_retries,
        scratch=Path(scratch) if (scratch := os.environ.get("RL_SOCKET_DIR")) else None,
    )
