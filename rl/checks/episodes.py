"""Checks of what episodes need, in training and in an evaluation: agent, proxy, boxes, grading and store."""

import functools
import os

from omegaconf import DictConfig

from rl.checks.numbers import check_positive
from rl.config.compose import ConfigError, check_all
from rl.config.plugins import agents_of
from rl.episodes.boxes import kind_of
from rl.episodes.setup import ENDPOINTS, agent_from, mix_from, rules_from, shape_from
from rl.metrics import own
from rl.run.store import check_store
from rollout.proxy.parsers import FORMATS


def check_episodes(config: DictConfig, plays: bool = True) -> None:
    """Raise ConfigError if something is missing that episodes need, in training or in an evaluation.

    ``plays``: they are played on this machine, which then needs the agents' programs and what makes boxes.
    """
    agents = [functools.partial(_check_agent, key=key) for key in agents_of(config)]
    played = (*agents, check_boxes) if plays else ()
    check_all(config, _check_mix, *played, _check_proxy, _check_grading, _check_figures, check_store)


def check_boxes(config: DictConfig) -> None:
    """Raise ConfigError if this machine cannot make the boxes of the config's sandbox group."""
    boxes = kind_of(config.sandbox)
    check_positive(config, (f"sandbox.{key}" for key in boxes.numbers))
    boxes.check()
    if "quickstart" in config:
        boxes.need_base_image("the quickstart's tasks are local snapshots")


def _check_mix(config: DictConfig) -> None:
    try:
        mix_from(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _check_agent(config: DictConfig, key: str) -> None:
    try:
        agent_from(config, max_tokens=1, max_context=1, key=key)  # its limits are not looked at
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
        if side.get("protocol", "messages") not in ENDPOINTS:
            raise ConfigError(f"proxy.side_endpoint.protocol is {side.protocol!r}; it must be messages or chat")
        if side.key_env and not os.environ.get(side.key_env):
            raise ConfigError(f"proxy.side_endpoint.key_env names {side.key_env}, which is not set")


def _check_figures(config: DictConfig) -> None:
    own.load(config.episode.get("figures") or {})  # evaluations have none


def _check_grading(config: DictConfig) -> None:
    for read in (rules_from, shape_from):
        try:
            read(config)
        except ValueError as error:
            raise ConfigError(str(error)) from error
