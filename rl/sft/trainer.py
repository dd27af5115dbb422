"""Supervised fine-tuning on rows of exact token ids, with verl's SFT trainer.

verl is told the model, the engine and the devices of an experiment's actor, so what fits in training fits here.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import psutil
import pyarrow.parquet
from omegaconf import DictConfig, OmegaConf

from rl.config.compose import cpu_training, package_dir
from rl.metrics.episodes import Tail
from rl.run.forks import Fork, Forks
from rl.run.programs import end_of_log, tied
from rl.run.scratch import compile_cache
from rl.sft.adapter import split_adapter
from rollout import files

# What is the same for all models. verl's default: gradients clipped at 1.0.
_SETTINGS: dict[str, Any] = {
    "optim": {"weight_decay": 0.0, "lr_warmup_steps_ratio": 0.05, "lr_scheduler_type": "cosine", "min_lr_ratio": 0.1},
    "data": {
        "pad_mode": "no_padding",
        "num_workers": 0,
        "custom_cls": {"path": "pkg://rl.traces.rows", "name": "TokenRows"},
    },
    "trainer": {"resume_mode": "auto", "max_ckpt_to_keep": 2, "nnodes": 1},
}
# Saving takes half a second of a core for the smallest model, which is most of the time of a short epoch.
_MOST_SAVED = 8
_HYDRA = ("hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none")
_LOOK_S = 0.5
_END_OF_LOG = 4000  # characters
TRAINER = "verl.trainer.sft_trainer"


@dataclass(frozen=True)
class Passes:
    """Passes say how rows are trained on.

    epochs: passes over the rows; the last incomplete batch of each is dropped. lr: peak learning rate of AdamW: warm-up
    over 5 % of the steps, then a cosine to a tenth. batch_size: rows per update; all of them if there are fewer.
    max_length: longest row in tokens. seed: of the order of the rows.
    """

    epochs: int
    lr: float
    batch_size: int
    max_length: int
    seed: int


Watch = Callable[[int, int, Mapping[str, float]], object]


def run_sft(
    config: DictConfig,
    model: str,
    rows: Path,
    out: Path,
    passes: Passes,
    watch: Watch = lambda step, steps, metrics: None,
    forks: Forks | None = None,
) -> Path:
    """Fine-tune a Hugging Face model on token rows: all weights, or an adapter if the experiment has a ``lora_rank``.

    If this process is killed, the same call goes on after the last epoch that was saved, with the same result. Every
    epoch is saved; if there are more than eight, only every second, third, ... one, so that eight are saved at most.

    Args:
        config: a training config. Its model's settings, its actor's engine, its devices on one node and its loggers are
            used.
        model: directory or hub name of the model; float32 weights are trained unless the engine says otherwise.
        rows: parquet with columns input_ids list[int] and loss_mask list[int].
        out: made if missing; the trained model is ``out/model``, an adapter also ``out/adapter``. The metrics of each
            step go to ``out/sft_metrics.jsonl``, what the trainer prints is appended to ``out/sft.log``.
        passes: see ``Passes``.
        watch: called with step, number of steps and metrics after each step.
        forks: what starts the trainer on a CPU, faster than as a new Python process.

    Returns:
        The directory with weights, config and tokenizer, as vLLM and verl load it.

    Raises:
        RuntimeError, ServeError: the trainer failed, or verl's merger; the message has the last line of the log.
    """
    out = Path(out).absolute()
    out.mkdir(parents=True, exist_ok=True)
    checkpoints, made, log = out / "checkpoints", out / "model", out / "sft.log"
    settings = _settings(config, model, Path(rows).absolute(), checkpoints, passes)
    _go_on(out, settings)
    if made.exists():
        return made
    batches = pyarrow.parquet.read_metadata(rows).num_rows // settings.data.train_batch_size
    lines = Tail(out / "sft_metrics.jsonl")
    lines.path.unlink(missing_ok=True)  # verl writes it anew

    def look() -> None:
        for line in lines.take():
            watch(line["step"], batches * passes.epochs, line["data"])

    arguments = [*_HYDRA, "--config-path", str(out), "--config-name", "verl"]
    with tempfile.TemporaryDirectory(prefix="rl-sft-") as scratch:
        own = {**_environment(scratch, lines.path, config.trainer.n_gpus_per_node), **on_device(config)}
        if forks is not None and config.trainer.n_gpus_per_node == 1:
            attend(forks.start(TRAINER, arguments, {**os.environ, **own}, log), log, look)
        else:
            run_logged([*python_of(config), "-m", TRAINER, *arguments], own, log, look)
    saved = max(checkpoints.glob("global_step_*"), key=lambda d: int(d.name.rpartition("_")[2]))
    if config.actor_rollout_ref.model.lora_rank:
        split_adapter(saved, model, out, log)
    else:
        from transformers.utils.hub import cached_file

        # verl writes bfloat16 and the attention implementation into the config, whatever the weights are.
        shutil.copy(str(cached_file(model, "config.json")), saved / "huggingface" / "config.json")
        (saved / "huggingface").rename(made)
    shutil.rmtree(checkpoints)
    return made


def _settings(config: DictConfig, model: str, rows: Path, checkpoints: Path, passes: Passes) -> Any:
    """Return the config of verl's SFT trainer. Raises RuntimeError if there are fewer rows than devices."""
    with hydra.initialize_config_dir(str(Path(package_dir("verl"), "trainer", "config")), version_base=None):
        verls = hydra.compose("sft_trainer_engine")
    OmegaConf.set_struct(verls, False)
    actor, trainer = config.actor_rollout_ref.actor, config.trainer
    plain = {
        "model": OmegaConf.to_container(config.actor_rollout_ref.model, resolve=True),
        "engine": OmegaConf.to_container(actor.fsdp_config, resolve=True),
    }
    side_by_side = trainer.n_gpus_per_node // actor.fsdp_config.ulysses_sequence_parallel_size
    count = pyarrow.parquet.read_metadata(rows).num_rows
    if count < side_by_side:
        raise RuntimeError(f"{count} rows cannot be split over {side_by_side} devices; use fewer, or more episodes")
    # Few episodes may have fewer rows than a batch; with less than one batch, verl divides by zero.
    batch = max(min(passes.batch_size, count) // side_by_side * side_by_side, side_by_side)
    whole = [] if config.actor_rollout_ref.model.lora_rank else ["hf_model"]
    own = {
        "model": {"path": model},
        "engine": {"strategy": actor.strategy, "use_torch_compile": actor.use_torch_compile, "seed": passes.seed},
        "optim": {"lr": passes.lr},
        "data": {
            "train_files": str(rows),
            "train_batch_size": batch,
            "max_length": passes.max_length,
            "max_token_len_per_gpu": max(actor.ppo_max_token_len_per_gpu, 8192),
            # A CPU pads rows that it computes together, so an actor may take them one by one.
            "use_dynamic_bsz": actor.use_dynamic_bsz,
            "micro_batch_size_per_gpu": actor.ppo_micro_batch_size_per_gpu,
        },
        "checkpoint": {"save_contents": ["model", "optimizer", "extra", *whole]},
        "trainer": {
            "total_epochs": passes.epochs,
            "save_freq": -(-passes.epochs // _MOST_SAVED) * (count // batch),
            "seed": passes.seed,
            "default_local_dir": str(checkpoints),
            "logger": [*trainer.logger, "file"],
            **{key: trainer[key] for key in ("device", "n_gpus_per_node", "project_name", "experiment_name")},
        },
    }
    return OmegaConf.merge(verls, plain, _SETTINGS, own)


def python_of(config: DictConfig) -> list[str]:
    """Return the command that runs Python, once for each of the config's devices."""
    ranks = config.trainer.n_gpus_per_node
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return [sys.executable, *launcher]


def on_device(config: DictConfig) -> dict[str, str]:
    """Return the variables of a trainer on the config's device."""
    # A GPU that is here must not be seen: verl would pick its branches for GPUs.
    return {**own, "CUDA_VISIBLE_DEVICES": ""} if (own := cpu_training(config)) else {}


def run_logged(command: Sequence[str], environment: Mapping[str, str], log: Path, look: Callable[[], object]) -> None:
    """Run a trainer, which ends together with this process; ``log`` gets what it prints.

    environment: more variables. look: called twice a second, and at the end. Raises RuntimeError if it fails.
    """
    with open(log, "ab") as sink:
        process = subprocess.Popen(tied(*command), env={**os.environ, **environment}, stdout=sink, stderr=sink)
    attend(process, log, look)


def attend(process: subprocess.Popen[bytes] | Fork, log: Path, look: Callable[[], object]) -> None:
    """Wait for a trainer's end. look: see ``run_logged``. Raises RuntimeError if it fails."""
    try:
        while process.poll() is None:
            time.sleep(_LOOK_S)
            look()
    finally:
        process.terminate()
        process.wait()
    if process.returncode != 0:
        why = end_of_log(log)
        # torch.distributed.run outlives the process that it has started, and tells of it in its own words.
        if process.returncode == -signal.SIGKILL or "(SIGKILL)" in log.read_text(errors="replace")[-_END_OF_LOG:]:
            free = psutil.virtual_memory().available / 2**30
            why = f"SIGKILL ended it, as the kernel does when memory runs out ({free:.0f} GiB are free now); lower "
            why += "sft.batch_size or sft.max_length, or take LoRA"
        raise RuntimeError(f"fine-tuning failed, see {log}: {why}")


def _go_on(out: Path, settings: Any) -> None:
    """Prepare ``out`` to go on where an earlier call with the same settings was; remove what others have left."""
    known, text = out / "verl.yaml", OmegaConf.to_yaml(settings)
    if not known.exists() or known.read_text() != text:
        for name in ("checkpoints", "model", "adapter"):
            shutil.rmtree(out / name, ignore_errors=True)
        files.write(known, text)
    # Checkpoints are those of an epoch's end. With the loader's state from there, verl would find the next epoch empty.
    for state in (out / "checkpoints").glob("global_step_*/data_*.pt"):
        state.unlink()


def _environment(scratch: str, metrics: Path, ranks: int) -> dict[str, str]:
    """Return the trainer's variables; for one process also what torch.distributed.run sets, which saves its start."""
    # verl leaves a lock file behind for each checkpoint; torch's compile cache is for the next trainer, too.
    own = {"TMPDIR": scratch, "TORCHINDUCTOR_CACHE_DIR": compile_cache(tempfile.gettempdir())}
    own["VERL_FILE_LOGGER_PATH"] = str(metrics)
    if "WANDB_RUN_ID" in os.environ:
        own["WANDB_RUN_ID"] = f"{os.environ['WANDB_RUN_ID']}-{metrics.parent.name}"
    if ranks > 1:
        return own
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    # A file needs no free port.
    meeting = f"file://{scratch}/rendezvous?rank=0&world_size=1"
    return own | alone | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "DIST_INIT_METHOD": meeting}
