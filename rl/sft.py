"""This module does supervised fine-tuning on exact token ids, with verl's SFT trainer.

Rows are ids and masks and are used as they are: nothing is decoded, templated or encoded again. So a warm start
imitates exactly the tokens that the rollouts will produce.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl.config import CPU_TRAINING
from rl.metrics.episodes import read_jsonl
from rl.run.programs import end_of_log, tied
from rollout import files


class TokenRows:
    """A dataset of the columns ``input_ids`` and ``loss_mask`` of parquet files, for verl's ``data.custom_cls``.

    The signature is verl's. Items are tensors ``[tokens]``: input_ids, position_ids, loss_mask.

    Raises:
        ValueError: a row is empty or longer than ``data.max_length``, its mask has another length, or the mask of its
            first token is 1 (no token predicts the first one).
    """

    def __init__(self, parquet_files, tokenizer, config, processor=None, max_samples: int = -1):
        import pyarrow.parquet

        files = [parquet_files] if isinstance(parquet_files, str) else list(parquet_files)
        self.rows: list[tuple[list[int], list[int]]] = []
        for file in files:
            table = pyarrow.parquet.read_table(file, columns=["input_ids", "loss_mask"])
            columns = (table.column(name).to_pylist() for name in ("input_ids", "loss_mask"))
            self.rows += zip(*columns, strict=True)
        if max_samples > 0:
            self.rows = self.rows[:max_samples]
        for i, (ids, mask) in enumerate(self.rows):
            if not 0 < len(ids) <= config.max_length:
                raise ValueError(f"row {i}: {len(ids)} tokens, allowed are 1 to {config.max_length}")
            if len(mask) != len(ids):
                raise ValueError(f"row {i}: {len(ids)} tokens but a mask of {len(mask)}")
            if mask[0]:
                raise ValueError(f"row {i}: the first token cannot be a target")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        ids, mask = self.rows[index]
        return {
            "input_ids": torch.tensor(ids, dtype=torch.long),
            "position_ids": torch.arange(len(ids), dtype=torch.long),
            "loss_mask": torch.tensor(mask, dtype=torch.long),
        }


_METRICS = "sft_metrics.jsonl"
_LOOK_S = 1.0
_SETTINGS = (
    "model.use_remove_padding=false",
    "model.enable_gradient_checkpointing=false",
    "+model.override_config.attn_implementation=sdpa",
    "engine.strategy=fsdp2",
    "engine.use_torch_compile=false",
    "engine.model_dtype=fp32",
    # verl's default is bfloat16 autocast, which most CPUs have to emulate.
    "+engine.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}",
    "optim.weight_decay=0.0",
    "optim.lr_warmup_steps_ratio=0.05",
    "optim.lr_scheduler_type=cosine",
    "optim.min_lr_ratio=0.1",
    "data.pad_mode=no_padding",
    "data.num_workers=0",
    "data.custom_cls.path=pkg://rl.sft",
    "data.custom_cls.name=TokenRows",
    "checkpoint.save_contents=[model,optimizer,extra,hf_model]",
    "trainer.logger=[file]",
    "trainer.resume_mode=auto",
    "trainer.save_freq=after_each_epoch",
    "trainer.device=cpu",
    "hydra.run.dir=.",
    "hydra.output_subdir=null",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
)


def run_sft(
    model_dir: Path,
    rows: Path,
    out_dir: Path,
    epochs: int,
    lr: float,
    batch_size: int,
    max_length: int,
    seed: int,
    log: Path,
    shown: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Fine-tune all weights of a Hugging Face model on token rows, in one process on the CPU.

    If this process is killed, the same call goes on after the last epoch that was finished, with the same result.

    Args:
        model_dir: Hugging Face model and tokenizer; float32 weights are trained.
        rows: parquet with columns input_ids list[int] and loss_mask list[int].
        out_dir: made if missing; the trained model is ``out_dir/model``.
        epochs: passes over the rows; the last incomplete batch of each is dropped.
        lr: peak learning rate of AdamW: warm-up over 5 % of the steps, then a cosine to a tenth.
        batch_size: rows per update; all of them if there are fewer.
        max_length: longest row in tokens.
        seed: of the order of the rows.
        log: the trainer's output is appended to it.
        shown: called every second with the updates that are done, and how many there will be.

    Returns:
        The directory with weights (float32), config and tokenizer, as vLLM and verl load it.

    Raises:
        RuntimeError: the trainer failed; the message ends with the last line of the log.
    """
    import pyarrow.parquet

    out_dir, log = Path(out_dir), Path(log)
    out_dir.mkdir(parents=True, exist_ok=True)
    checkpoints, model = out_dir / "checkpoints", out_dir / "model"
    # Some episodes of a warm start may have made no row; with less than one batch verl divides by zero.
    count = pyarrow.parquet.read_metadata(rows).num_rows
    batch = min(batch_size, count)
    settings = {
        "model.path": model_dir,
        "engine.seed": seed,
        "optim.lr": lr,
        "data.train_files": rows,
        "data.train_batch_size": batch,
        "data.max_length": max_length,
        "data.max_token_len_per_gpu": max(max_length, 8192),
        "trainer.total_epochs": epochs,
        "trainer.seed": seed,
        "trainer.default_local_dir": checkpoints,
    }
    arguments = [*_SETTINGS, *(f"{key}={value}" for key, value in settings.items())]
    _go_on(out_dir, json.dumps(arguments))
    if model.exists():
        return model
    command = tied(sys.executable, "-m", "verl.trainer.sft_trainer", *arguments)
    with tempfile.TemporaryDirectory(prefix="rl-sft-") as scratch, open(log, "ab") as sink:
        environment = {**os.environ, **_environment(scratch, out_dir), **CPU_TRAINING}
        with subprocess.Popen(command, env=environment, stdout=sink, stderr=sink) as trainer:
            try:
                while trainer.poll() is None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        trainer.wait(_LOOK_S)
                    steps = (one["step"] for one in read_jsonl(out_dir / _METRICS))
                    shown(max(steps, default=0), epochs * (count // batch))
            finally:
                trainer.kill()  # if we were interrupted
    if trainer.returncode != 0:
        raise RuntimeError(f"SFT failed, see {log}: {end_of_log(log)}")
    saved = max(checkpoints.glob("global_step_*"), key=lambda d: int(d.name.rpartition("_")[2]))
    # verl writes bfloat16 and the attention implementation into the config, whatever the weights are.
    shutil.copy(Path(model_dir) / "config.json", saved / "huggingface" / "config.json")
    (saved / "huggingface").rename(model)
    shutil.rmtree(checkpoints)
    return model


def _go_on(out_dir: Path, arguments: str) -> None:
    """Prepare ``out_dir`` to go on where an earlier call with the same arguments was; remove what others have left."""
    known = out_dir / "arguments.json"
    if not known.exists() or known.read_text() != arguments:
        for name in ("checkpoints", "model"):
            shutil.rmtree(out_dir / name, ignore_errors=True)
        files.write(known, arguments)
    # Checkpoints are those of an epoch's end. With the loader's state from there, verl would find the next one empty.
    for state in (out_dir / "checkpoints").glob("global_step_*/data_*.pt"):
        state.unlink()


def _environment(scratch: str, out_dir: Path) -> dict[str, str]:
    """Return what torch.distributed.run sets for one process; this saves its start. A file needs no free port."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    meeting = f"file://{scratch}/rendezvous?rank=0&world_size=1"
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "DIST_INIT_METHOD": meeting}
    # A GPU that is here must not be seen: verl would pick its branches for GPUs.
    return alone | address | {"VERL_FILE_LOGGER_PATH": str(out_dir / _METRICS), "CUDA_VISIBLE_DEVICES": ""}
