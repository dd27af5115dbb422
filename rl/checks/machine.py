"""Checks of what the machine offers: disk space, an accelerator where one is needed, and loggers."""

import os
import shutil
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from rl.checks.model import local_model
from rl.config.compose import ConfigError
from rl.episodes.boxes import writable
from rl.run.scratch import local_directory

GIB = 2**30
# Logs, traces and metrics of a short run, and Ray's own spill threshold.
MIN_FREE = 1 * GIB
# verl saves fp32 weights and two fp32 moments per parameter; the weights it starts from have 2 or 4 bytes per
# parameter. This is the lower bound, so that nothing is refused that would have fitted.
CHECKPOINT_PER_WEIGHTS = 3


def check_loggers(config: DictConfig) -> None:
    """Raise ConfigError if verl does not know a logger, or if an online wandb has no key; imports verl (seconds).

    Without a key wandb would ask for one on a screen that nobody sees.
    """
    from verl.utils.tracking import Tracking

    if unknown := set(config.trainer.logger) - set(Tracking.supported_backend):
        known = ", ".join(Tracking.supported_backend)
        raise ConfigError(f"trainer.logger: verl has no {', '.join(sorted(unknown))}; it has {known}")
    if "wandb" in config.trainer.logger and os.environ.get("WANDB_MODE") == "online":
        import wandb

        # Silent: else wandb would ask its server for the user's name, for minutes where packets are dropped.
        wandb.setup(wandb.Settings(silent=True))
        if not wandb.login(prompt=False, verify=False):
            raise ConfigError("WANDB_MODE=online, but wandb has no key: set WANDB_API_KEY or run `wandb login`")


def check_cpu(config: DictConfig) -> None:
    """Raise ConfigError if a CPU is asked for what needs an accelerator."""
    if config.trainer.device != "cpu":
        return
    if "megatron" in config.actor_rollout_ref.actor:
        raise ConfigError("Megatron does not run on a CPU; take an experiment with FSDP2, such as qwen3_coder_30b")
    model = config.actor_rollout_ref.model
    if OmegaConf.select(model, "lora_rank") and not OmegaConf.select(model, "lora.merge"):
        raise ConfigError("vLLM on a CPU takes no LoRA adapters; set actor_rollout_ref.model.lora.merge=true")
    weights = config.actor_rollout_ref.rollout.checkpoint_engine.backend
    if config.trainer.v1.trainer_mode == "separate_async" and weights != "zmq":
        raise ConfigError(
            f"actor_rollout_ref.rollout.checkpoint_engine.backend={weights} sends weights between GPUs; on a CPU it is "
            "zmq, as in configs/cpu.yaml"
        )
    sharing = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size"
    if OmegaConf.select(config, sharing) > 1:
        raise ConfigError(f"verl splits rows in flash attention only, which has no CPU build; set {sharing}=1")
    executor = "actor_rollout_ref.rollout.engine_kwargs.vllm.distributed_executor_backend"
    if config.actor_rollout_ref.rollout.tensor_model_parallel_size > 1 and OmegaConf.select(config, executor) != "mp":
        raise ConfigError(f"tensor parallel needs a process per worker; set {executor}=mp, as scale=tiny_tp2 does")


def check_disk(config: DictConfig) -> None:
    """Raise ConfigError if run directory or checkpoints cannot be written or lack room for logs and one checkpoint, or
    if there can be no sockets in ``cluster.local_dir``."""
    if config.cluster.local_dir:
        local_directory(config.cluster.local_dir)
    run = Path(config.run.dir or config.run.root).absolute()
    checkpoints = Path(OmegaConf.merge(config, {"run": {"dir": str(run)}}).trainer.default_local_dir).absolute()
    run = writable(run, "run.dir / run.root", "give another directory")
    checkpoints = writable(checkpoints, "trainer.default_local_dir", "give another directory")
    saved, model = 0, None if config.prepare else local_model(config)
    if config.trainer.save_freq > 0 and model is not None and model.is_dir():
        saved = CHECKPOINT_PER_WEIGHTS * sum(f.stat().st_size for f in model.glob("*.safetensors"))
    if run.stat().st_dev == checkpoints.stat().st_dev:
        _check_free(run, MIN_FREE + saved, "logs and one checkpoint", "run.root")
    else:
        _check_free(run, MIN_FREE, "logs", "run.root")
        _check_free(checkpoints, saved, "one checkpoint", "trainer.default_local_dir")


def _check_free(place: Path, needed: int, what: str, key: str) -> None:
    free = shutil.disk_usage(place).free
    if free < needed:
        raise ConfigError(
            f"{place} has {free / GIB:.1f} GiB free, the run needs at least {needed / GIB:.1f} ({what}); make room or "
            f"set {key} to another disk"
        )
