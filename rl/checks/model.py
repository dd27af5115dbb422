"""Checks of the model: its directory, chat template and teacher, and whether the plan for it (``rl.plan``) fits."""

import json
import math
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rl.config.compose import ConfigError, refuse

_TOYS = 512
"""The largest hidden size of a toy."""
PACKING = "actor_rollout_ref.model.use_remove_padding"
# What verl 0.9.1 tells the borders of packed rows (verl/models/transformers/monkey_patch.py).
_BORDERS = ("qwen3_5", "qwen3_5_moe")
# How keys begin in the config of a model with layers that carry a state from token to token.
_STATEFUL = ("linear_", "mamba_", "ssm_")


def check_model(config: DictConfig, synced: bool = True) -> None:
    """Raise ConfigError if the model's directory cannot be trained from; names of hub models are not looked up.

    synced: an engine gets the trainer's weights while it runs.
    """
    path = local_model(config)
    if path is None:
        return
    if not (path / "config.json").is_file():
        raise ConfigError(f"actor_rollout_ref.model.path: {path} is no model directory (no config.json there)")
    kind = stateful(config)
    packed = OmegaConf.select(config, PACKING) and "megatron" not in config.actor_rollout_ref.actor
    if packed and kind and kind not in _BORDERS:
        published = kind.removesuffix("_text")
        other = f", or take the model in its published form ({published})" if published in _BORDERS else ""
        raise ConfigError(
            f"{path}: verl does not tell the linear attention of {kind} where a packed row begins, so that rows would "
            f"read each other; set {PACKING}=false{other}"
        )
    if not synced or OmegaConf.select(config, "trainer.device") != "cpu":
        return
    model = _config(path)
    if model.get("tie_word_embeddings"):
        raise ConfigError(
            f"{path} has tied embeddings, and vLLM on a CPU does not load lm_head again when weights are synced; "
            "take a model with tie_word_embeddings=false"
        )
    # Shared memory takes whole tensors only; the largest one is the embeddings.
    key = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
    whole = OmegaConf.select(config, "actor_rollout_ref.actor.fsdp_config.model_dtype") in ("fp32", "float32")
    needed = (4 if whole else 2) * (model.get("vocab_size") or 0) * (model.get("hidden_size") or 0) / 2**20
    if needed > (bucket := OmegaConf.select(config, key) or 0):
        raise ConfigError(f"{key}={bucket} is less than one tensor of {path}; set it to {math.ceil(needed)} or more")


def stateful(config: DictConfig) -> str | None:
    """Return the ``model_type`` of a model whose layers carry a state from token to token (linear attention, Mamba);
    None for others, and for hub models whose shape is not in rl/plan/models."""
    model = model_config(config)
    return model["model_type"] if any(key.startswith(_STATEFUL) for key in model) else None


def model_config(config: DictConfig) -> dict[str, Any]:
    """Return the config.json of a config's model, or what rl/plan/models has of a hub model; {} if neither is here."""
    from rl.plan.model import KNOWN

    path, name = local_model(config), Path(config.actor_rollout_ref.model.path).name
    if path is not None:
        return _config(path) if (path / "config.json").is_file() else {}
    # The shapes are those of decoders; the models are published with an encoder of images.
    known = KNOWN / f"{name}.json"
    model = json.loads(known.read_text()) if known.is_file() else {}
    return model | {"model_type": str(model.get("model_type")).removesuffix("_text")}


def check_memory(config: DictConfig) -> None:
    """Raise ConfigError if a CPU run of a model that is no toy needs more memory than the machine has, by rl.plan: Ray
    would kill its workers, minutes later. plan.check=false leaves this to the user."""
    path = local_model(config)
    model = _config(path) if path and (path / "config.json").is_file() else {}
    if OmegaConf.select(config, "trainer.device") == "cpu" and model.get("hidden_size", 0) > _TOYS:
        _check_plan(config)


def check_toy(config: DictConfig) -> None:
    """Raise ConfigError if the recipe of the quickstart or of a toy's scale is to train a policy that is no toy."""
    policy, made, model = (
        OmegaConf.select(config, key) for key in ("policy", "prepare", "actor_rollout_ref.model.path")
    )
    if not (policy and model and str(made).startswith("rl.quickstart.")):
        return
    path = local_model(config)
    if path is None or ((path / "config.json").exists() and _config(path).get("hidden_size", 0) > _TOYS):
        raise ConfigError(
            f"policy={policy} would be trained with a toy's recipe (learning rate "
            f"{config.actor_rollout_ref.actor.optim.lr:g}, replies of {config.proxy.max_tokens} tokens, generated "
            "tasks); take its own experiment, with scale=full on GPUs or scale=cpu"
        )


def check_teacher(config: DictConfig) -> None:
    """Raise ConfigError if a teacher (``+distill=on_policy``) is not there or gives tokens other ids than the policy.

    Only tokenizer.json is compared, and names of hub models are not looked up.
    """
    if not OmegaConf.select(config, "distillation.enabled"):
        return
    policy = local_model(config)
    ids = _ids(policy) if policy else None
    for name, teacher in config.distillation.teacher_models.items():
        key = f"distillation.teacher_models.{name}.model_path"
        if OmegaConf.is_missing(teacher, "model_path") or not teacher.model_path:
            raise ConfigError(f"{key} is not set: give the directory or hub name of the teacher")
        path = Path(teacher.model_path).expanduser()
        if teacher.model_path[0] in "~./" and not (path / "config.json").is_file():
            raise ConfigError(f"{key}: {path} is no model directory (no config.json there)")
        if ids and path.is_dir() and (theirs := _ids(path)) and theirs != ids:
            raise ConfigError(f"{key}: {path} has another tokenizer than the policy; a teacher must have the same")


def _ids(model: Path) -> dict[str, int] | None:
    """Return the id of each token; None if the model has no tokenizer.json or has it in another form."""
    try:
        found = json.loads((model / "tokenizer.json").read_text())
        return {**found["model"]["vocab"], **{token["content"]: token["id"] for token in found["added_tokens"]}}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def check_plan(config: DictConfig) -> None:
    """Raise ConfigError if the plan (``rl.plan``) does not fit the cluster.

    On a CPU (``check_memory``) and with plan.check=false no plan is made.
    """
    if OmegaConf.select(config, "trainer.device") != "cpu":
        _check_plan(config)


def _check_plan(config: DictConfig) -> None:
    from rl.plan import plan

    problems = plan(config).problems if OmegaConf.select(config, "plan.check") else ()
    refuse([f"{problem}; plan.check=false starts it all the same" for problem in problems])


def check_family(config: DictConfig) -> None:
    """Raise ConfigError if the proxy writes other tokens between turns than the model's chat template, or if the tool
    parser does not read its calls; imports verl (seconds).

    proxy.any_family=true accepts any.
    """
    path = local_model(config)
    if config.proxy.any_family or path is None:
        return
    from rollout.proxy.fits import check_fits
    from rollout.proxy.render import ChatTemplateRenderer

    model_type = str(_config(path).get("model_type"))
    if (path / "tokenizer_config.json").exists():  # else there is no template to look at
        from transformers import AutoTokenizer

        trusted = bool(OmegaConf.select(config, "actor_rollout_ref.model.trust_remote_code"))
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trusted)
        try:
            check_fits(ChatTemplateRenderer(tokenizer, model_type), config.proxy.tool_parser, any_family=False)
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from error


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
    """Return a model's config.json, with what a model that also reads images says of its part for text."""
    found = json.loads((model / "config.json").read_text())
    return (found.get("text_config") or {}) | found
