"""This module checks the model and the plan for it."""

import json
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rl.config import ConfigError


def check_model(config: DictConfig) -> None:
    """Raise ConfigError if the model's directory cannot be trained from; names of hub models are not looked up."""
    path = local_model(config)
    if path is None:
        return
    if not (path / "config.json").is_file():
        raise ConfigError(f"actor_rollout_ref.model.path: {path} is no model directory (no config.json there)")
    if OmegaConf.select(config, "trainer.device") == "cpu" and _config(path).get("tie_word_embeddings"):
        raise ConfigError(
            f"{path} has tied embeddings, and vLLM on a CPU does not load lm_head again when weights are synced; "
            "take a model with tie_word_embeddings=false"
        )


def check_plan(config: DictConfig) -> None:
    """Raise ConfigError if the plan (``rl.plan``) does not fit the cluster.

    On a CPU and with plan.check=false no plan is made.
    """
    if OmegaConf.select(config, "trainer.device") == "cpu" or not OmegaConf.select(config, "plan.check"):
        return
    from rl.plan import plan

    if problems := plan(config).problems:
        raise ConfigError(*(f"{problem}; plan.check=false starts it all the same" for problem in problems))


def check_family(config: DictConfig) -> None:
    """Raise ConfigError if the chat template is of no family that is known to keep prefixes; imports verl (seconds).

    proxy.any_family=true accepts any.
    """
    path = local_model(config)
    if config.proxy.any_family or path is None:
        return
    from rollout.proxy.render import known_family, unknown_family

    model_type = str(_config(path).get("model_type"))
    if known_family(model_type) is None:
        raise ConfigError(f"{path}: {unknown_family(model_type)}")


def local_model(config: DictConfig) -> Path | None:
    """Return the model's directory if the config names one, None for a hub name such as ``Qwen/Qwen3-8B``.

    Raises:
        ConfigError: the key is not set.
    """
    name = OmegaConf.select(config, "actor_rollout_ref.model.path")
    if not name:
        raise ConfigError(
            "actor_rollout_ref.model.path is not set; choose an experiment (+experiment=NAME), or give a directory or "
            "hub name"
        )
    path = Path(name).expanduser()
    is_path = name[0] in "~./" or name.count("/") > 1 or path.exists()
    return path.absolute() if is_path else None


def _config(model: Path) -> dict[str, Any]:
    return json.loads((model / "config.json").read_text())
