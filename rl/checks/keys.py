"""Checks of a config's keys: those that nothing reads, values of the wrong type, ``${...}`` that lead nowhere.

Hydra refuses an unknown key on the command line, but takes one in an experiment's file for a new key, and verl mostly
never looks at it: a misspelt ``total_training_step`` would train forever. ``check_keys`` compares a config with what
the same groups compose to without any experiment. verl's own yaml files also have keys that no code of verl reads any
more; they are found by looking for their names in verl's code.
"""

from __future__ import annotations

import ast
import difflib
import functools
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl.checks.numbers import POSITIVE, POSITIVE_OR_NULL, agent_limits, is_positive
from rl.checks.types import dataclass_of, fields, wrong_value
from rl.config.compose import CONFIGS, compose, config_folders, package_dir, refuse, unresolved

# What is below these keys belongs to another program (Ray, Megatron), or is named by the user. The same holds below
# every key that is null or empty by default.
OPEN = (
    "ray_kwargs.ray_init",
    "grading.flags",
    "actor_rollout_ref.actor.megatron.override_transformer_config",
    "actor_rollout_ref.ref.megatron.override_transformer_config",
    "hydra",
)
# Groups that verl passes on whole, so that its code does not name the keys in them.
PASSED_ON = (
    *OPEN,
    "actor_rollout_ref.rollout.engine_kwargs",
    "actor_rollout_ref.model.override_config",
    "actor_rollout_ref.model.lora",
    "global_profiler",
    "transfer_queue",
)
# Groups whose keys are read by the kind that they name, which may be another package's.
KINDS = ("agent", "sandbox")


def check_keys(config: DictConfig) -> None:
    """Raise ConfigError with a line for each key that nothing reads, which names the closest known key.

    Known keys are those of configs/train.yaml, its groups and verl's yaml files, and the fields of the dataclass that
    verl makes of the group with the key. This takes half a second; verl is read, not imported.
    """
    given, known = unresolved(config), unresolved(_reference(config))
    if prepare := given.get("prepare"):  # its settings are in a group of the name of its package
        known |= {key: {} for key in given if key in str(prepare).split(":")[0].split(".")}
    lines = []
    for path, siblings in _unknown(given, known, ""):
        parent, _, name = path.rpartition(".")
        if name in _declared(config, path):
            continue
        groups = [] if parent else [folder.name for folder in CONFIGS.iterdir()]
        near = difflib.get_close_matches(name, [*siblings, *groups], n=1)
        hint = f"; did you mean {parent + '.' if parent else ''}{near[0]}?" if near else ""
        lines.append(f"{path}: nothing reads this key{hint}")
    for path, name in _changed(given, known, ""):
        if path.split(".")[0] not in KINDS and name not in _words():
            lines.append(f"{path}: nothing reads this key, although verl's own config has it; leave it out")
    refuse(lines)


def check_types(config: DictConfig, name: str = "train", leave: Collection[str] = POSITIVE + POSITIVE_OR_NULL) -> None:
    """Raise ConfigError with a line for each value whose type is not that of its key (``rl.checks.types``).

    name: of the primary config. leave: keys of which ``check_numbers`` says that they must be numbers, as of limits of
    agents.
    """
    reference = _reference(config, name)
    lines, left = [], {*leave, *agent_limits(config)}
    for path, key in _changed(unresolved(config), unresolved(reference), ""):
        value, default = OmegaConf.select(config, path), OmegaConf.select(reference, path)
        line = wrong_value(path, value, default, _declared(config, path).get(key))
        if line and (path not in left or is_positive(value)):
            lines.append(line)
    refuse(lines)


def check_interpolations(config: DictConfig) -> None:
    """Raise ConfigError with a line for each ``${...}`` that leads nowhere."""
    lines = []
    for path, raw in _texts(unresolved(config), ""):
        try:
            OmegaConf.select(config, path)
        except OmegaConfBaseException as error:
            said = str(error).partition("\n")[0]
            missing = re.search("Interpolation key '(.+)' not found", said)
            if missing is None or missing[1] in raw:  # else its target leads nowhere, which has its own line
                lines.append(f"{path}={raw}: {said}")
    refuse(lines)


def _texts(plain: Mapping[str, Any], path: str) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, value) of each text with a ``${``."""
    for name, value in plain.items():
        if isinstance(value, Mapping):
            yield from _texts(value, f"{path}{name}.")
        elif isinstance(value, str) and "${" in value:
            yield f"{path}{name}", value


def _declared(config: DictConfig, path: str) -> Mapping[str, ast.expr]:
    """Return the fields, with their types, of the dataclass that verl makes of the group with a key: the one that the
    group names, or the one that the group above declares for it."""
    group = path.rpartition(".")[0]
    if not group:
        return {}
    if target := OmegaConf.select(config, f"{group}._target_"):
        return fields(target.rpartition(".")[2])
    declared = _declared(config, group).get(group.rpartition(".")[2])
    return fields(dataclass_of(declared)) if declared is not None else {}


def _changed(given: Mapping[str, Any], known: Mapping[str, Any], path: str) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, name) of each value of ``given`` that differs from the one in ``known``."""
    for name, value in given.items():
        here = f"{path}.{name}" if path else str(name)
        if here in PASSED_ON or name not in known:
            continue
        if isinstance(value, Mapping) and isinstance(known[name], Mapping):
            yield from _changed(value, known[name], here)
        elif value != known[name]:
            yield here, str(name)


@functools.cache
def _words() -> frozenset[str]:
    """Return the words in verl's code and ours, without the dataclasses that hold a config (0.5 s)."""
    verl, ours = Path(package_dir("verl")), Path(__file__).resolve().parents[2]
    files = [file for part in (verl, ours / "rl", ours / "rollout", ours / "rewards") for file in part.rglob("*.py")]
    held = (verl / "workers" / "config", verl / "trainer" / "config")
    read = (file.read_text() for file in files if not any(map(file.is_relative_to, held)))
    return frozenset(word for text in read for word in re.findall(r"\w+", text))


def _reference(config: DictConfig, name: str = "train") -> DictConfig:
    """Return the primary config with the groups of ``config`` and no experiment."""
    groups = {
        group: f"{group}={name}"
        for group, name, kind in _files(*config_folders())
        if kind == OmegaConf.select(config, f"{group}.kind")
    }
    megatron = "megatron" in (OmegaConf.select(config, "actor_rollout_ref.actor") or ())
    return _composed(name, *groups.values(), *(["model_engine=megatron"] if megatron else []))


@functools.cache
def _files(*folders: Path) -> list[tuple[str, str, str]]:
    """Return (group, name, kind) of each file of the groups that name a kind."""
    files = [(group, file) for group in KINDS for folder in folders for file in (folder / group).glob("*.yaml")]
    return [(group, file.stem, OmegaConf.load(file).kind) for group, file in files]


@functools.cache
def _composed(name: str, *groups: str) -> DictConfig:
    return compose(groups, name)


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
