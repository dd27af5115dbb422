"""Checks of what episodes need, in training and in an evaluation: agent, proxy, boxes, grading and store."""

import asyncio
import functools
from collections.abc import Callable

from omegaconf import DictConfig

from rl.checks.numbers import check_positive
from rl.config.compose import ConfigError, check_all, refuse
from rl.config.plugins import agents_of
from rl.episodes.asking import ask_endpoint
from rl.episodes.boxes import kind_of
from rl.episodes.setup import agent_from, credit_from, mix_from, roles_from, rules_from, shape_from, side_endpoint_from
from rl.metrics import own
from rl.run.store import check_store
from rollout.agent.claude_code import SUBAGENTS
from rollout.proxy.parsers import FORMATS
from rollout.proxy.roles import MAIN, SUBAGENT, Rule


def check_episodes(config: DictConfig, plays: bool = True) -> None:
    """Raise ConfigError if something is missing that episodes need, in training or in an evaluation.

    ``plays``: they are played on this machine, which then needs the agents' programs and what makes boxes.
    """
    # The agents' limits are not looked at.
    agents = [functools.partial(agent_from, max_tokens=1, max_context=1, key=key) for key in agents_of(config)]
    read = [functools.partial(_read, what) for what in (mix_from, *(agents if plays else ()))]
    boxes = [check_boxes] if plays else []
    check_all(config, *read, *boxes, _check_proxy, _check_grading, _check_figures, check_store)
    _check_roles(config, plays)


def check_boxes(config: DictConfig) -> None:
    """Raise ConfigError if this machine cannot make the boxes of the config's sandbox group."""
    boxes = kind_of(config.sandbox)
    check_positive(config, (f"sandbox.{key}" for key in boxes.numbers))
    boxes.check()
    if "quickstart" in config:
        boxes.need_base_image("the quickstart's tasks are local snapshots")


def _read(what: Callable[[DictConfig], object], config: DictConfig) -> None:
    """Raise ConfigError if a part of the config cannot be read."""
    try:
        what(config)
    except (ValueError, FileNotFoundError) as error:
        raise ConfigError(str(error)) from error


def _check_proxy(config: DictConfig) -> None:
    # Only vLLM knows the names of reasoning parsers; the format of tool calls must be one that we read strictly.
    name = config.proxy.tool_parser
    if name not in FORMATS:
        raise ConfigError(f"proxy.tool_parser is {name!r}; docs/models.md lists what there is: {', '.join(FORMATS)}")
    if config.proxy.side_calls not in ("train", "serve", "forward"):
        raise ConfigError(f"proxy.side_calls is {config.proxy.side_calls!r}; it must be train, serve or forward")
    if config.proxy.side_calls == "forward":
        side = config.proxy.side_endpoint
        for key in ("url", "model"):
            if not side[key]:
                raise ConfigError(f"proxy.side_calls=forward needs proxy.side_endpoint.{key}")


def _check_roles(config: DictConfig, plays: bool) -> None:
    """Raise ConfigError if what is said of roles can be read, but cannot work."""
    rules, agent, lines = roles_from(config) or {}, config.agent, []
    types = {role.removeprefix(f"{SUBAGENT}/") for role in rules} - {MAIN}
    if types and agent.get("kind", "claude_code") == "claude_code":
        if agent.tools is not None and "Agent" not in agent.tools:
            lines.append("proxy.roles: agent.tools has no Agent, so there are no sub-agents")
        unknown = types - {SUBAGENT, *SUBAGENTS}
        if unknown and not (agent.get("project_settings") or agent.extra_args):  # which may define some
            names = ", ".join(SUBAGENTS)
            lines.append(f"proxy.roles.subagent/{min(unknown)}: Claude Code has no such sub-agent; it has {names}")
    if "algorithm" in config:  # training
        if not any(rule.train for rule in ({MAIN: Rule(), SUBAGENT: Rule()} | rules).values()):
            lines.append("proxy.roles: nothing is trained, neither the main conversation nor any sub-agent")
        by_std = config.algorithm.get("norm_adv_by_std_in_grpo", True)
        if config.episode.get("credit") and (by_std or config.algorithm.adv_estimator != "grpo"):
            lines.append("episode.credit needs algorithm.adv_estimator=grpo and norm_adv_by_std_in_grpo=false")
    refuse(lines)
    for role, rule in rules.items() if plays else ():
        if rule.endpoint is not None:
            asyncio.run(ask_endpoint(rule.endpoint, f"proxy.roles.{role}"))


def _check_figures(config: DictConfig) -> None:
    own.load(config.episode.get("figures") or {})  # evaluations have none


def _check_grading(config: DictConfig) -> None:
    for what in (rules_from, shape_from, side_endpoint_from, roles_from, credit_from):
        _read(what, config)
