"""Check that the packages which the trainer needs on GPUs are there, and that its attention can work.

Which attention computes what, and what each costs, is in docs/recipe.md#attention.
"""

import importlib
import importlib.metadata

from omegaconf import DictConfig, OmegaConf

from rl.checks.model import PACKING, stateful
from rl.config.compose import ConfigError
from rl.metrics.nvml import cards
from rl.run.programs import last_lines

ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"
ULYSSES = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size"
# The choices (docs/recipe.md#attention), with what each needs beside the `gpu` extra.
ATTENTIONS = {"flash_attention_2": ["flash-attn"], "flash_attention_4": ["flash-attn-4"], "sdpa": []}
_MEGATRON = "--no-deps --no-build-isolation -r constraints/megatron.txt"
# Arguments of `uv pip install`.
INSTALL = {
    "flash-attn": "--no-deps -r constraints/flash-attn.txt",
    "flash-attn-4": "--no-deps flash-attn-4==4.0.0b15",
    "flash-linear-attention": "flash-linear-attention==0.5.2",
    "kernels": "kernels==0.12.3",
    "cupy-cuda13x": "cupy-cuda13x==14.0.1",
    "megatron-core": _MEGATRON,
    "megatron-bridge": _MEGATRON,
    "transformer-engine": _MEGATRON,
}


def check_packages(config: DictConfig) -> None:
    """Raise ConfigError if a package that an experiment on GPUs needs is missing; the line says how to install it."""
    if config.trainer.device == "cpu":
        return
    actor, needed = config.actor_rollout_ref.actor, []
    if "megatron" in actor:
        needed += ["megatron-core", "megatron-bridge", "transformer-engine", "flash-attn"]
    else:
        needed += _attention(config)
        if OmegaConf.select(config, PACKING) and stateful(config):
            # Without it transformers computes linear attention in plain torch, which ignores where a packed row begins
            # and says nothing; with Ulysses, verl fails in the first forward.
            needed.append("flash-linear-attention")
    if config.trainer.v1.trainer_mode == "separate_async":
        needed.append("cupy-cuda13x")
    for package in needed:
        if problem := _problem(package):
            command = f".venv/bin/uv pip install --python .venv {INSTALL[package]}"
            raise ConfigError(f"{package} is needed on GPUs, but {problem}: {command}")


def _attention(config: DictConfig) -> list[str]:
    """Return the distributions that the trainer's attention needs (FSDP); raise ConfigError if it cannot work."""
    chosen = OmegaConf.select(config, ATTENTION) or "flash_attention_2"  # verl's default
    if chosen not in ATTENTIONS and "/" not in chosen:
        raise ConfigError(f"{ATTENTION}={chosen}: take {', '.join(ATTENTIONS)}, or a kernel ORG/NAME of the hub")
    if chosen == "sdpa" and (OmegaConf.select(config, ULYSSES) or 1) > 1:
        raise ConfigError(
            f"{ATTENTION}=sdpa: with {ULYSSES}>1 each GPU would see only its own part of a row, because verl exchanges "
            "the parts inside flash attention; take flash_attention_2 or set that key to 1"
        )
    old = [card.name for card in cards() if card.generation < 9] if chosen == "flash_attention_4" else []
    if old:
        raise ConfigError(f"{ATTENTION}={chosen} needs Hopper or newer, and this is {old[0]}; take flash_attention_2")
    return ATTENTIONS.get(chosen, ["kernels"])


def _problem(package: str) -> str:
    """Return what is wrong with a distribution, "" if nothing is. flash-attn is imported here, because a build for
    another torch would otherwise fail only in the trainer's workers. The module alone does not show that flash-attn is
    installed: flash-attn-4 has modules of the same names."""
    try:
        importlib.metadata.distribution(package)
        if package == "flash-attn":
            importlib.import_module("flash_attn")
    except importlib.metadata.PackageNotFoundError:
        return "is not installed"
    except ImportError as error:
        return f"does not load ({last_lines(str(error), 1)}); install it again"
    return ""
