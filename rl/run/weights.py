"""The weights that ``policy=...`` stands for: find them, and merge a checkpoint's shards or add an adapter."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from rl.config.compose import CPU_ENVIRONMENT, ConfigError
from rl.run.checkpoints import newest
from rl.run.programs import end_of_log
from rl.run.vllm_server import ServeError

_WHOLE = ("*.safetensors", "*.bin")


def name_of(model: str) -> str:
    """Return a model's name for tables, directories and predictions. ``model``: a directory or a hub name."""
    place = Path(model)
    if not place.is_absolute() and not place.exists():
        return model.replace("/", "__")
    general = place.name in ("model", "merged", "huggingface")  # which say nothing: its run does
    return f"{place.parents[1].name}-{place.parent.name}" if general and len(place.parts) > 3 else place.name


@dataclass(frozen=True)
class Weights:
    """Weights are what a policy is loaded from.

    model: a Hugging Face directory or hub name. sharded: the FSDP checkpoint of verl that must be merged into ``model``
    first, or None. run: the training run that made the weights, or None. step: the run's step.
    """

    model: str
    sharded: Path | None = None
    run: Path | None = None
    step: int = 0

    @property
    def name(self) -> str:
        """Return a name for tables and directories."""
        if self.run is not None:
            return f"{self.run.parent.name}-{self.run.name}-step{self.step}"
        return name_of(self.model)

    def stamps(self) -> dict[str, list[int]]:
        """Return size in bytes and time of change in ns of the weight files, by name; empty for a name on the hub.

        They tell whether training has changed a directory since, without reading large files. A merged checkpoint has
        the stamps of its shards.
        """
        place = self.sharded or Path(self.model)
        if place.name == "merged":
            place = place.parent
        files = sorted(file for pattern in (*_WHOLE, "model_world_size_*.pt") for file in place.glob(pattern))
        return {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}


def find_weights(policy: str) -> Weights:
    """Return the weights that ``policy`` stands for. Raises ConfigError.

    A run of rl.train stands for its newest checkpoint, one of rl.sft for its model, that of its last round.
    """
    path = Path(policy).expanduser()
    if not path.exists():
        if policy.count("/") == 1 and policy[0] not in "~./":
            return Weights(policy)
        raise ConfigError(f"policy: no directory {path.absolute()}")
    path = path.resolve()
    if (path / "config.json").is_file():
        if not any(file for pattern in _WHOLE for file in path.glob(pattern)):
            raise ConfigError(f"policy: {path} has a config.json but no weights ({', '.join(_WHOLE)})")
        return Weights(str(path))
    if tuned := _tuned(path):
        return tuned
    if (path / "checkpoints").is_dir():
        if not (newest_step := newest(path / "checkpoints")):
            raise ConfigError(f"policy: the run {path} has no complete checkpoint yet")
        path = path / "checkpoints" / f"global_step_{newest_step}"
    actor = path / "actor" if (path / "actor").is_dir() else path
    if not actor.parent.name.startswith("global_step_"):
        raise ConfigError(f"policy: {path} is neither a model directory nor a run or one of its checkpoints")
    run = actor.parents[2] if (actor.parents[2] / "config.yaml").is_file() else None
    number = actor.parent.name.removeprefix("global_step_")
    step = int(number) if number.isdigit() else 0
    for model in (actor / "huggingface", actor / "merged"):
        if any(model.glob("*.safetensors")):
            return Weights(str(model), None, run, step)
    if not (actor / "fsdp_config.json").is_file():
        raise ConfigError(f"policy: {actor} is not an FSDP checkpoint; merge it with `python -m verl.model_merger`")
    return Weights(str(actor / "merged"), actor, run, step)


def _tuned(path: Path) -> Weights | None:
    """Return the weights of a run of rl.sft or of one of its rounds, None if ``path`` is neither."""
    rounds = {int(place.parent.name.rpartition("_")[2]): place for place in path.glob("iteration_*/model")}
    last = max(rounds, default=0)
    model = rounds.get(last, path / "model")
    if not (model / "config.json").is_file():
        return None
    step = last or (int(path.name.rpartition("_")[2]) if path.name.startswith("iteration_") else 0)
    run = next((place for place in (path, path.parent) if (place / "config.yaml").is_file()), None)
    return Weights(str(model), None, run, step)


def merge(sharded: Path, target: Path, log: Path) -> None:
    """Merge an FSDP checkpoint's shards into a Hugging Face model in ``target``, with verl's merger.

    Does nothing if the model is already there. The weights become bfloat16; an adapter (LoRA) is added to the weights
    that it adapts. ``log`` gets the merger's output. Raises ServeError.
    """
    with open(target.with_name(".merge.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (target / "config.json").is_file():
            return
        making = target.with_name(f".{target.name}")
        shutil.rmtree(making, ignore_errors=True)
        try:
            run_merger(sharded, making, log)
            _add_adapter(making)
            making.rename(target)
        finally:
            shutil.rmtree(making, ignore_errors=True)


def run_merger(sharded: Path, target: Path, log: Path) -> None:
    """Let verl's merger make ``target`` of an FSDP checkpoint; ``log`` gets its output. Raises ServeError."""
    command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
    command += ["--local_dir", str(sharded), "--target_dir", str(target)]
    with open(log, "ab") as out:
        done = subprocess.run(command, env={**os.environ, **CPU_ENVIRONMENT}, stdout=out, stderr=out)
    if done.returncode:
        raise ServeError(f"{sharded} cannot be merged: {end_of_log(log)}; the whole log: {log}")


def _add_adapter(model: Path) -> None:
    """Add an adapter to the weights that it adapts. verl's merger leaves it beside them, where a server ignores it."""
    adapter = model / "lora_adapter"
    if not adapter.is_dir():
        return
    if not json.loads((adapter / "adapter_config.json").read_text())["lora_alpha"]:
        raise ServeError(f"{model.parent} has no lora_train_meta.json, so the scale of its adapter is unknown")
    add_adapter(str(model), adapter, model)
    shutil.rmtree(adapter)


def add_adapter(base: str, adapter: Path, out: Path) -> None:
    """Write the weights of ``base``, a directory or hub name, with an adapter in PEFT's format added to them."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    adapted: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), str(adapter))
    adapted.merge_and_unload().save_pretrained(out)


def adopt(config: DictConfig) -> Weights | None:
    """Let ``policy`` take the place of the experiment's model, and return its weights, None if it is not set.

    Until shards are merged, the model is the directory that has their config and tokenizer. Raises ConfigError.
    """
    if not config.policy:
        return None
    weights = find_weights(str(config.policy))
    sharded = weights.sharded if not (Path(weights.model) / "config.json").is_file() else None
    config.actor_rollout_ref.model.path = str(sharded / "huggingface") if sharded else weights.model
    return weights
