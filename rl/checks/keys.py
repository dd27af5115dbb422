"""This module finds keys of a config that nothing reads.

Hydra refuses an unknown key on the command line, but takes one in an experiment's file for a new key, and verl mostly
never looks at it: a misspelt ``total_training_step`` would train forever. ``check_keys`` compares a config with what
the same groups compose to without any experiment.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from rl.config import CONFIGS, ConfigError, compose

# What is below these keys is another program's own (Ray's, Megatron's), or names that the user chooses. The same holds
# below every key that is null or empty by default.
OPEN = (
    "ray_kwargs.ray_init",
    "grading.flags",
    "actor_rollout_ref.actor.megatron.override_transformer_config",
    "actor_rollout_ref.ref.megatron.override_transformer_config",
    "hydra",
)


def check_keys(config: DictConfig) -> None:
    """Raise ConfigError, naming the closest known key, if a key of ``config`` is not known.

    Known keys are those of configs/train.yaml, its groups and verl's yaml files, and the fields of the dataclass that
    verl makes of the key's place. A good config takes half a second; verl is imported (ten seconds) for a key that its
    yaml files lack.
    """
    plain: Any = OmegaConf.to_container(config, resolve=False)
    kinds = {group: plain.get(group, {}).get("kind") for group in ("agent", "sandbox")}
    groups = [f"{group}={kind}" for group, kind in kinds.items() if (CONFIGS / group / f"{kind}.yaml").exists()]
    groups += ["model_engine=megatron"] if "megatron" in _actor(plain) else []
    known = {**_reference(*groups)}
    if prepare := plain.get("prepare"):  # its settings are in a group of the name of its package
        known |= {key: {} for key in plain if key in str(prepare).split(":")[0].split(".")}
    for path, siblings in _unknown(plain, known, ""):
        parent, _, name = path.rpartition(".")
        target = OmegaConf.select(config, f"{parent}._target_") if parent else None
        if target is not None and name in _fields(target):
            continue
        near = difflib.get_close_matches(name, siblings, n=1)
        hint = f"; do you mean {parent + '.' if parent else ''}{near[0]}?" if near else ""
        raise ConfigError(f"{path}: nothing reads this key{hint}")


def _actor(plain: Mapping[str, Any]) -> Mapping[str, Any]:
    return plain.get("actor_rollout_ref", {}).get("actor", {})


@functools.cache
def _reference(*groups: str) -> dict[str, Any]:
    """Return the primary config with these groups and no experiment."""
    # In a Hydra application a second Hydra is refused, and the first one knows the same files.
    running = GlobalHydra.instance().is_initialized()
    config = hydra.compose("train", list(groups)) if running else compose(list(groups))
    plain: Any = OmegaConf.to_container(config, resolve=False)
    return plain


def _unknown(given: Mapping[str, Any], known: Mapping[str, Any], path: str) -> Iterator[tuple[str, list[str]]]:
    """Yield (dotted key, its known siblings) for each key of ``given`` that ``known`` lacks."""
    for name, value in given.items():
        here = f"{path}.{name}" if path else str(name)
        if here in OPEN:
            continue
        if name not in known:
            yield here, list(known)
        elif isinstance(value, Mapping) and isinstance(known[name], Mapping) and known[name]:
            yield from _unknown(value, known[name], here)


def _fields(target: str) -> set[str]:
    """Return the names of the fields of a dataclass, given by its full name."""
    module, _, name = target.rpartition(".")
    return {field.name for field in dataclasses.fields(getattr(importlib.import_module(module), name))}
