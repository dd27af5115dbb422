"""The config of an evaluation: compose it, check it, and derive from it what identifies the evaluation."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rewards.task import Task
from rl.checks.data import check_task_files
from rl.checks.episodes import check_episodes
from rl.checks.keys import check_interpolations, check_types
from rl.checks.numbers import check_numbers
from rl.config.compose import ConfigError, check_all, compose, refuse
from rl.config.plugins import agents_of
from rl.episodes.boxes import kind_of
from rl.episodes.setup import Settings, agent_from, read_settings
from rl.run.array_job import Shard
from rl.run.weights import Weights, find_weights

_GROUPS = ("agent", "proxy", "sandbox", "grading", "episode")
# Groups of training's config; an evaluation inherits what they set.
_TRAINING = ("experiment", "scale")
_POSITIVE = ("proxy.max_calls", "proxy.max_body_mb", "proxy.max_session_tokens", "grading.timeout_s")
_POSITIVE += ("store.timeout_s", "serve.tensor_parallel_size", "serve.timeout_s")
_POSITIVE_OR_NULL = ("limit", "max_context", "proxy.max_tokens")
# Keys of the groups above that change how fast an evaluation runs, but not how an episode ends. A kind of box has more.
_SPEED_ONLY = ("episode", "proxy.side_endpoint.key_env")
# Keys of the agent that may name files.
_AGENT_FILES = ("settings", "hooks", "mcp_servers", "skills", "output_style")
# The longest reply if neither the config nor the policy's context sets a lower limit: Claude Code's own limit for
# models that it knows.
_REPLY_TOKENS = 32_000


def compose_evaluation(overrides: Sequence[str], name: str = "evaluate") -> tuple[DictConfig, Weights | None]:
    """Return the config of a command line, and the weights that it names, None for an endpoint. Raises ConfigError.

    name: of the primary config; ``collect`` has other names for some keys.
    """
    keys = {text: text.lstrip("+~").partition("=")[0] for text in overrides}
    training = [text for text in overrides if keys[text] in _TRAINING]
    rest = [text for text in overrides if text not in training]
    made: dict[str, DictConfig] = {}
    check_all(
        OmegaConf.create(),
        lambda _: made.update(own=compose(rest, name, functools.partial(_check_values, name=name))),
        lambda _: made.update(trained=compose(training)) if training else None,
    )
    own = made["own"]
    check_interpolations(own)
    return _with_weights(own, made.get("trained"), {*keys.values(), *(["tasks"] if name == "collect" else [])})


def _with_weights(config: DictConfig, trained: DictConfig | None, given: set[str]) -> tuple[DictConfig, Weights | None]:
    """Let the config inherit from an experiment (``trained``) or from the run that it names. Raises ConfigError."""
    if trained is not None:
        _inherit(config, trained, given | ({"policy"} if config.endpoint else set()))
    if bool(config.policy) == bool(config.endpoint):
        both = "both are" if config.policy else "neither is"
        raise ConfigError(f"give policy=DIR or endpoint=URL; {both} set")
    if not config.policy:
        return config, None
    weights = find_weights(str(config.policy))
    if weights.run is not None:
        if trained is not None:
            raise ConfigError(
                f"+experiment cannot be combined with a policy of {weights.run}, which has its own config; give one"
            )
        _inherit(config, OmegaConf.load(weights.run / "config.yaml"), given | {"policy"})
    return config, weights


def evaluation_of(trained: DictConfig, values: Mapping[str, Any], name: str = "evaluate") -> DictConfig:
    """Return the config of an evaluation that has the settings of a training config, and these ``values`` of keys.

    name: see ``compose_evaluation``.
    """
    config = compose((), name)
    _inherit(config, trained, {*values, *(["tasks"] if name == "collect" else [])})
    for key, value in values.items():
        OmegaConf.update(config, key, value)
    return config


def _inherit(config: DictConfig, trained: Any, given: Collection[str]) -> None:
    """Replace our defaults by training's settings, except for keys that are ``given`` on the command line."""
    rollout, sampling = trained.actor_rollout_ref.rollout, trained.actor_rollout_ref.rollout.val_kwargs
    values: dict[str, Any] = {
        "policy": trained.actor_rollout_ref.model.path,
        "tasks": trained.data.val_files,
        "max_context": rollout.max_model_len,
        "sampling.temperature": sampling.temperature if sampling.do_sample else 0.0,
        "sampling.top_p": sampling.top_p,
        "sampling.top_k": sampling.top_k,
        "serve.dtype": rollout.dtype,
        "serve.tensor_parallel_size": rollout.tensor_model_parallel_size,
        "serve.enforce_eager": rollout.enforce_eager,
    }
    values |= {group: OmegaConf.to_container(trained[group], resolve=True) for group in _GROUPS}
    values["proxy"]["max_tokens"] = trained.proxy.max_tokens or trained.data.max_response_length
    for key, value in values.items():
        if key in given or key.split(".")[0] in given:
            continue
        said = {one: OmegaConf.select(config, one) for one in given if one.startswith(f"{key}.")}
        OmegaConf.update(config, key, value, merge=False)
        for one, own in said.items():
            OmegaConf.update(config, one, own, merge=False, force_add=True)


def check_evaluation(config: DictConfig, name: str = "evaluate") -> list[Task]:
    """Check everything that can be known before a server is asked, and return all tasks, regardless of ``limit``.

    Raises ConfigError with all that is wrong.
    """
    tasks: list[Task] = []
    key = "data" if name == "collect" else "tasks"
    _check_values(config, name)
    check_all(config, _check_endpoint, check_episodes, lambda config: tasks.extend(check_task_files(config, key)))
    return tasks


def _check_values(config: DictConfig, name: str) -> None:
    positive = (*_POSITIVE, "epochs" if name == "collect" else "samples")

    def check_own_types(config: DictConfig) -> None:
        check_types(config, name, positive + _POSITIVE_OR_NULL)

    check_all(config, lambda config: check_numbers(config, positive, _POSITIVE_OR_NULL), check_own_types)


def _check_endpoint(config: DictConfig) -> None:
    lines = []
    if config.protocol == "expert":
        if not config.policy:
            lines.append("an expert plays in the form of a model: give policy=MODEL, and no endpoint")
        if config.agent.get("kind", "claude_code") != "claude_code":
            lines.append("an expert knows the tools of Claude Code only: leave out agent=")
    elif config.protocol not in ("tokens", "messages", "chat"):
        lines.append(f"protocol is {config.protocol!r}; it must be tokens, messages or chat")
    elif config.protocol != "tokens" and config.policy:
        lines.append(f"protocol={config.protocol} is for an endpoint; a policy is always served with protocol=tokens")
    elif config.protocol != "tokens" and not config.model:
        lines.append(f"protocol={config.protocol} needs model=NAME, the model's name at the endpoint")
    if config.endpoint and not str(config.endpoint).startswith(("http://", "https://")):
        lines.append(f"endpoint is {config.endpoint!r}; it must be a URL, such as http://127.0.0.1:8000")
    try:
        shard_of(config)
    except ValueError as error:
        lines.append(f"shard: {error}")
    if config.shard and config.merge:
        lines.append("merge=true is for all shards; leave out shard")
    if config.key_env and not os.environ.get(config.key_env):
        lines.append(f"key_env names {config.key_env}, which is not set")
    refuse(lines)


def shard_of(config: DictConfig) -> Shard | None:
    """Return the part of the tasks that is played, None for all. Raises ValueError."""
    return Shard.parse(str(config.shard)) if config.shard else None


def endpoint_key(config: DictConfig) -> str | None:
    """Return the endpoint's API key from the environment, None if ``key_env`` names none."""
    return os.environ.get(config.key_env) if config.key_env else None


def name_of(config: DictConfig, weights: Weights | None) -> str:
    """Return the evaluation's name for tables, predictions and the directory."""
    return str(config.name or (weights.name if weights else config.model)).replace("/", "__")


def identity_of(config: DictConfig, weights: Weights | None, tasks: Sequence[Task]) -> dict[str, Any]:
    """Return everything that decides how an episode ends. Two evaluations with equal identities are the same one."""
    plain: Any = OmegaConf.to_container(config, resolve=True)
    identity = {name: plain[name] for name in (*_GROUPS, "protocol", "tokenizer", "sampling", "max_context")}
    if not identity["proxy"].get("roles"):  # evaluations of before there were any
        identity["proxy"].pop("roles", None)
    if weights is not None:
        identity |= {"policy": weights.model, "weights": digest(weights.stamps())[:8], "serve": plain["serve"]}
        identity["serve"].pop("timeout_s")
    else:
        identity |= {"endpoint": plain["endpoint"], "model": plain["model"]}
    agents = agents_of(config)
    for key, settings in agents.items():
        if any(settings.get(name) for name in _AGENT_FILES):  # what is in them, too
            agent = agent_from(config, max_tokens=1, max_context=1, key=key)
            hashes = {path: hashlib.sha256(data).hexdigest() for path, data in agent.files().items()}
            identity[f"{key}_files"] = digest([agent.argv("")[1:], hashes])
    if not plain.get("grade", True):
        identity["grade"] = False
    if plain["protocol"] == "expert":
        identity["expert"] = plain["expert"]
    free = [f"{key}.binary" for key in agents] + [f"sandbox.{key}" for key in kind_of(config.sandbox).speed_only]
    for path in (*_SPEED_ONLY, *free):
        *outer, last = path.split(".")
        inner = identity
        for part in outer:
            inner = inner.get(part) or {}
        inner.pop(last, None)
    return identity | {"tasks": {task.instance_id: digest(task.to_row()) for task in tasks}}


def digest(value: Any) -> str:
    """Return a hash of a JSON value, 16 hex digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def settings_of(config: DictConfig, max_context: int, name: str) -> Settings:
    """Return the settings of the evaluation's episodes. Raises as ``rl.episodes.setup.read_settings`` does.

    max_context: tokens of a prompt and its reply together. name: marks the episodes' boxes.
    """
    reply = config.proxy.max_tokens or min(_REPLY_TOKENS, max_context)
    return read_settings(config, max_tokens=reply, max_context=max_context, run=name)
