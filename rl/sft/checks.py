"""Checks of a fine-tuning's config: find all that is wrong before anything starts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from omegaconf import DictConfig, ListConfig

from rl.checks import check_values
from rl.checks.data import check_files
from rl.checks.episodes import check_episodes
from rl.checks.keys import check_keys
from rl.checks.machine import check_cpu, check_disk
from rl.checks.model import check_model, check_plan, check_toy
from rl.checks.packages import check_packages
from rl.config.compose import ConfigError, check_all
from rl.config.overrides import nearest
from rl.data.choice import ChoiceRules
from rl.run.weights import adopt
from rl.sft.other import check_environment
from rl.traces.rows import PAIRS, ROWS, RowsError, check_columns
from rollout.records.reading import Reader

TRAINERS = ("verl", "llamafactory", "dpo")
_COLUMNS = {"verl": ROWS, "dpo": PAIRS}  # of files that a trainer takes
check_policy = functools.partial(check_model, synced=False)  # an engine of the rounds loads each policy from the disk


def check_sft(config: DictConfig) -> None:
    """Raise ConfigError with all that is wrong if the config cannot work on this machine.

    As in ``rl.checks.check``, what ``config.prepare`` makes is not looked at.
    """

    def settings(config: DictConfig) -> None:
        check_values(config)  # the other checks rely on them
        checks: list[Callable[[DictConfig], object]] = []
        checks += [adopt, check_cpu, _check_source, check_environment, _check_rules, _check_engine, check_toy]
        checks += [check_episodes] if config.sft.rounds else []
        checks += [] if config.prepare else [check_policy, *([check_files] if config.sft.rounds else [])]
        check_all(config, *checks, check_disk)

    check_all(config, check_keys, settings, check_packages)
    if not config.prepare:
        check_plan(config)


def _check_source(config: DictConfig) -> None:
    sft = config.sft
    if sft.trainer not in TRAINERS:
        raise ConfigError(f"sft.trainer is {sft.trainer!r}; it must be {', '.join(TRAINERS)}")
    if sft.trainer == "dpo" and sft.rounds:
        raise ConfigError("sft.trainer=dpo needs unresolved episodes, too, and rounds select; give data=[DIR,...]")
    if (sft.data is None) == (sft.rounds is None):
        both = "neither is" if sft.data is None else "both are"
        raise ConfigError(f"give data=[DIR,...] to fine-tune once, or rounds=N; {both} set")
    if sft.data is None:
        return
    if not isinstance(sft.data, ListConfig) or not sft.data:
        raise ConfigError(f"sft.data is {sft.data!r}; it must be a list of directories, such as [DIR]")
    check_all(config, *(functools.partial(_check_data, Path(str(name)).expanduser()) for name in sft.data))


def _check_data(place: Path, config: DictConfig) -> None:
    try:
        if place.suffix == ".parquet":
            if config.sft.trainer not in _COLUMNS:
                raise RowsError(f"{place} has token ids; sft.trainer={config.sft.trainer} takes episodes")
            check_columns(place, _COLUMNS[config.sft.trainer])
        elif not Reader(place).files():
            raise RowsError(f"{place.absolute()} has no records of episodes (*.cep)")
    except FileNotFoundError as error:
        raise ConfigError(f"sft.data: no directory {place.absolute()}") from error
    except RowsError as error:
        raise ConfigError(f"sft.data: {error}") from error


def _check_rules(config: DictConfig) -> None:
    known = [field.name for field in fields(ChoiceRules)]
    lines = [
        f"sft.select.{key}: there is no such rule; {nearest(key, known)}"
        for key in config.sft.select
        if key not in known
    ]
    if config.sft.select.get("limit"):
        lines.append("sft.select.limit: set sft.budget, which bounds all rounds together")
    if lines:
        raise ConfigError(*lines)


def _check_engine(config: DictConfig) -> None:
    actor, lines = config.actor_rollout_ref.actor, []
    if "megatron" in actor:
        raise ConfigError("rl.sft trains with FSDP; take an experiment with FSDP2, such as qwen3_coder_30b_lora")
    if config.trainer.nnodes != 1:
        lines.append(
            f"trainer.nnodes is {config.trainer.nnodes}, and rl.sft trains on one node; set trainer.nnodes=1, or take "
            "an experiment with LoRA"
        )
    length, room = max_length(config), actor.ppo_max_token_len_per_gpu
    parallel = actor.fsdp_config.ulysses_sequence_parallel_size
    if length > room * parallel:
        lines.append(
            f"rows of {length} tokens (sft.max_length) do not fit one packed batch: actor_rollout_ref.actor."
            f"ppo_max_token_len_per_gpu = {room} x {parallel} (sequence parallel); lower one or raise the other"
        )
    if config.trainer.n_gpus_per_node % parallel:
        lines.append(
            f"trainer.n_gpus_per_node is {config.trainer.n_gpus_per_node}, which is no multiple of actor_rollout_ref."
            f"actor.fsdp_config.ulysses_sequence_parallel_size = {parallel}"
        )
    if lines:
        raise ConfigError(*lines)


def max_length(config: DictConfig) -> int:
    """Return the longest row that is trained on, in tokens."""
    return config.sft.max_length or config.actor_rollout_ref.rollout.max_model_len
