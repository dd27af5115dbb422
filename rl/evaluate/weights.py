"""This module finds the weights that ``policy=...`` stands for: a model, a training run or one of its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rl.config import ConfigError
from rl.run.checkpoints import newest

_WHOLE = ("*.safetensors", "*.bin")


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
        return Path(self.model).name if Path(self.model).exists() else self.model.replace("/", "__")

    def stamps(self) -> dict[str, list[int]]:
        """Return size in bytes and time of change in ns of the weight files, by name; empty for a name on the hub.

        They tell whether a directory was trained on since, without reading large files. A merged checkpoint has the
        stamps of its shards.
        """
        place = self.sharded or Path(self.model)
        if place.name == "merged":
            place = place.parent
        files = sorted(file for pattern in (*_WHOLE, "model_world_size_*.pt") for file in place.glob(pattern))
        return {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}


def find_weights(policy: str) -> Weights:
    """Return the weights that ``policy`` stands for; a run stands for its newest checkpoint. Raises ConfigError."""
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
