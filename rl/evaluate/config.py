"""What an evaluation is of: its config, with what a training run brings, and what must be known before it starts."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rewards.task import Task
from rl.checks.data import check_task_files
from rl.checks.episodes import check_episodes
from rl.checks.numbers import check_numbers
from rl.config import ConfigError, compose
from rl.run.checkpoints import newest
from rl.setup import Settings, read_settings

_GROUPS = ("agent", "proxy", "sandbox", "grading", "episode")
# Groups of training's config: what an experiment sets is taken from it.
_TRAINING = ("experiment", "scale")
_POSITIVE = ("samples", "agent.max_turns", "agent.timeout_s")
_POSITIVE += ("grading.timeout_s", "serve.tensor_parallel_size", "serve.timeout_s")
_POSITIVE_OR_NULL = ("limit", "max_context", "proxy.max_tokens")
# Of the groups above, what decides how fast it goes and not how an episode ends.
_UNDECIDING = ("agent.binary", "episode", "sandbox.concurrency", "sandbox.pull_parallel", "sandbox.image_budget_gb")
_UNDECIDING += ("sandbox.cache_dir", "proxy.side_endpoint.key_env")
_WEIGHTS = ("*.safetensors", "*.bin", "model_world_size_*.pt")
# Of a reply where neither the config nor the policy's context says less: Claude Code's own for models it knows.
_REPLY_TOKENS = 32_000


@dataclass(frozen=True)
class Weights:
    """Where a policy's weights are. ``model``: a Hugging Face directory or hub name; with ``sharded`` it is to be
    merged from there first, a checkpoint of verl's FSDP. ``run``: the training run, if it is of one, and ``step``."""

    model: str
    sharded: Path | None = None
    run: Path | None = None
    step: int = 0

    @property
    def name(self) -> str:
        if self.run is not None:
            return f"{self.run.parent.name}-{self.run.name}-step{self.step}"
        return Path(self.model).name if Path(self.model).exists() else self.model.replace("/", "__")


def compose_evaluation(overrides: Sequence[str]) -> tuple[DictConfig, Weights | None]:
    """The config of a command line, and the weights that it names. Raises ConfigError, hydra's and OmegaConf's."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    keys = [one.key_or_group for one in OverridesParser.create().parse_overrides([*overrides])]
    training = [text for text, key in zip(overrides, keys, strict=True) if key in _TRAINING]
    cfg = compose([text for text in overrides if text not in training], "evaluate")
    if training:
        _inherit(cfg, compose(training), {*keys} | ({"policy"} if cfg.endpoint else set()))
    if bool(cfg.policy) == bool(cfg.endpoint):
        both = "both are" if cfg.policy else "neither is"
        raise ConfigError(f"give policy=DIR or endpoint=URL; {both} set")
    if not cfg.policy:
        return cfg, None
    weights = find_weights(str(cfg.policy))
    if weights.run is not None and training:
        raise ConfigError(
            f"{training[0]} and a policy of {weights.run}, which has a config of its own; give one of both"
        )
    if weights.run is not None:
        _inherit(cfg, OmegaConf.load(weights.run / "config.yaml"), {*keys, "policy"})
    return cfg, weights


def find_weights(policy: str) -> Weights:
    """What ``policy`` stands for. Raises ConfigError."""
    path = Path(policy).expanduser()
    if not path.exists():
        if policy.count("/") == 1 and policy[0] not in "~./":
            return Weights(policy)
        raise ConfigError(f"policy: no directory {path.absolute()}")
    path = path.resolve()
    if (path / "config.json").is_file():
        if not any(file for pattern in _WEIGHTS[:2] for file in path.glob(pattern)):
            raise ConfigError(f"policy: {path} has a config.json and no weights (*.safetensors, *.bin)")
        return Weights(str(path))
    if (path / "checkpoints").is_dir():
        if not (step := newest(path / "checkpoints")):
            raise ConfigError(f"policy: the run {path} has no whole checkpoint yet")
        path = path / "checkpoints" / f"global_step_{step}"
    actor = path / "actor" if (path / "actor").is_dir() else path
    if not actor.parent.name.startswith("global_step_"):
        raise ConfigError(f"policy: {path} is neither a model directory nor a run or checkpoint of one")
    run = actor.parents[2] if (actor.parents[2] / "config.yaml").is_file() else None
    for model in (actor / "huggingface", actor / "merged"):
        if any(model.glob("*.safetensors")):
            return Weights(str(model), None, run, _step(actor.parent))
    if not (actor / "fsdp_config.json").is_file():
        raise ConfigError(f"policy: {actor} is no FSDP checkpoint; merge it with `python -m verl.model_merger`")
    return Weights(str(actor / "merged"), actor, run, _step(actor.parent))


def _step(directory: Path) -> int:
    number = directory.name.rpartition("_")[2]
    return int(number) if number.isdigit() else 0


def _inherit(cfg: DictConfig, trained: Any, given: Collection[str]) -> None:
    """Put training's settings in the place of our defaults, under what the command line gives."""
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
        said = {one: OmegaConf.select(cfg, one) for one in given if one.startswith(f"{key}.")}
        OmegaConf.update(cfg, key, value, merge=False)
        for one, own in said.items():
            OmegaConf.update(cfg, one, own, merge=False)


def check_evaluation(cfg: DictConfig) -> list[Task]:
    """The tasks, all that is not limited away, when everything that can be known before a server is asked is right.

    Raises ConfigError.
    """
    check_numbers(cfg, _POSITIVE, _POSITIVE_OR_NULL)
    if cfg.protocol not in ("tokens", "messages"):
        raise ConfigError(f"protocol is {cfg.protocol!r}; it must be tokens or messages")
    if cfg.protocol == "messages" and cfg.policy:
        raise ConfigError("protocol=messages is of an endpoint; a policy is served by token ids")
    if cfg.protocol == "messages" and not cfg.model:
        raise ConfigError("protocol=messages needs model=NAME, the model's name at the endpoint")
    if cfg.endpoint and not str(cfg.endpoint).startswith(("http://", "https://")):
        raise ConfigError(f"endpoint is {cfg.endpoint!r}; it must be a URL, such as http://127.0.0.1:8000")
    if cfg.key_env and not os.environ.get(cfg.key_env):
        raise ConfigError(f"key_env names {cfg.key_env}, which is not set")
    check_episodes(cfg)
    return check_task_files(cfg, "tasks")


def key(cfg: DictConfig) -> str | None:
    return os.environ.get(cfg.key_env) if cfg.key_env else None


def name_of(cfg: DictConfig, weights: Weights | None) -> str:
    return str(cfg.name or (weights.name if weights else cfg.model)).replace("/", "__")


def identity(cfg: DictConfig, weights: Weights | None, tasks: Sequence[Task]) -> dict[str, Any]:
    """All that decides how an episode ends. Two evaluations with the same are one."""
    plain: Any = OmegaConf.to_container(cfg, resolve=True)
    found = {name: plain[name] for name in (*_GROUPS, "protocol", "tokenizer", "sampling", "max_context")}
    if weights is not None:
        found |= {"policy": weights.model, "weights": _fingerprint(weights), "serve": plain["serve"]}
        found["serve"].pop("timeout_s")
    else:
        found |= {"endpoint": plain["endpoint"], "model": plain["model"]}
    for path in _UNDECIDING:
        *outer, last = path.split(".")
        inner = found
        for part in outer:
            inner = inner.get(part) or {}
        inner.pop(last, None)
    return found | {"tasks": {task.instance_id: row_hash(task) for task in tasks}}


def row_hash(task: Task) -> str:
    return hashlib.sha256(json.dumps(task.to_row(), sort_keys=True).encode()).hexdigest()[:16]


def digest(found: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:8]


def _fingerprint(weights: Weights) -> str:
    """Of the weight files: a directory that was trained on is not the same policy. The content of large files is not
    read; their size and time of change tell."""
    place = weights.sharded or Path(weights.model)
    if place.name == "merged":  # as before it was merged
        place = place.parent
    files = sorted(file for pattern in _WEIGHTS for file in place.glob(pattern))
    return digest({file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files})


def settings(cfg: DictConfig, max_context: int, out: Path) -> Settings:
    """Return an evaluation's settings of episodes. Raises as ``rl.setup.read_settings`` does."""
    reply = cfg.proxy.max_tokens or min(_REPLY_TOKENS, max_context)
    return read_settings(cfg, max_tokens=reply, max_context=max_context, run=out.name)
