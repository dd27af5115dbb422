"""Fine-tuning with programs other than verl: LLaMA-Factory, and TRL for preferences (DPO).

Both come from the environment that scripts/llamafactory.sh makes. An interrupted training of theirs begins anew.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rl.config.compose import CONFIGS, NO_REPORTS, ConfigError
from rl.metrics.episodes import Tail
from rl.sft.adapter import merge_apart
from rl.sft.episodes import write_pairs
from rl.sft.trainer import Passes, Watch, on_device, python_of, run_logged
from rollout import files

PROGRAMS = CONFIGS.parent / ".llamafactory" / "bin"
_TRL = PROGRAMS.parent / "trl"  # in front of .venv's packages


def check_environment(config: DictConfig) -> None:
    """Raise ConfigError if the trainer needs the environment of LLaMA-Factory and TRL, and it is not there."""
    if config.sft.trainer != "verl" and not (PROGRAMS.parent / ".setup").exists():
        raise ConfigError(
            f"sft.trainer={config.sft.trainer} needs an environment of its own; make it with scripts/llamafactory.sh"
        )


def run_llamafactory(
    config: DictConfig, model: str, sources: Sequence[Path], out: Path, passes: Passes, watch: Watch
) -> dict[str, Any]:
    """Export the episodes and train with ``llamafactory-cli``; ``out/model`` is the result. Return figures.

    Raises RuntimeError if nothing can be exported or the training fails.
    """
    data, lora = out / "export", _lora(config)
    given: dict[str, Any] = {
        "model_name_or_path": model,
        "finetuning_type": "lora" if lora else "full",
        "output_dir": str(out / "trained"),
        "overwrite_output_dir": True,
        "cutoff_len": passes.max_length,
        "num_train_epochs": float(passes.epochs),
        "learning_rate": passes.lr,
        "gradient_accumulation_steps": max(1, passes.batch_size // config.trainer.n_gpus_per_node),
        "seed": passes.seed,
        "val_size": 0.0,
        "eval_strategy": "no",
        "save_strategy": "no",
        "logging_steps": 1,
        "plot_loss": False,
    }
    if lora:
        given |= {"lora_rank": lora["r"], "lora_alpha": lora["lora_alpha"], "lora_target": _target(lora)}
    if config.trainer.device == "cpu":
        given |= {"bf16": False, "use_cpu": True, "preprocessing_num_workers": 1}
    given |= _plain(config.sft.llamafactory)
    overrides = [f"++{key}={json.dumps(value)}" for key, value in given.items()]
    again = ["--overwrite"] if data.exists() else []
    export = [sys.executable, "-m", "rl.export", "llamafactory", *map(str, sources), "--out", str(data), *again]
    run_logged([*export, *overrides], {}, out / "sft.log", lambda: None)
    rows = sum(json.loads((data / "export.json").read_text())["rows"].values())
    command = [str(PROGRAMS / "llamafactory-cli"), "train", str(data / "train.yaml")]
    # Packages that come before .venv's in this process must not come before LLaMA-Factory's own.
    return {"rows": rows, **_train(command, "", config, model, out, watch)}


def run_dpo(
    config: DictConfig, model: str, sources: Sequence[Path], out: Path, passes: Passes, watch: Watch
) -> dict[str, Any]:
    """Train with TRL's DPO on pairs that are given or made of episodes; ``out/model`` is the result. Return figures.

    Raises RowsError if there is no pair, RuntimeError if the training fails.
    """
    from transformers import AutoTokenizer

    data = out / "pairs.parquet"
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    pairs, too_long = write_pairs(sources, data, passes.max_length, tokenizer)
    cpu = config.trainer.device == "cpu"
    dpo = {
        "output_dir": str(out / "trained"),
        "num_train_epochs": passes.epochs,
        "learning_rate": passes.lr,
        "gradient_accumulation_steps": max(1, min(passes.batch_size, pairs) // config.trainer.n_gpus_per_node),
        "beta": config.sft.beta,
        "seed": passes.seed,
        "use_cpu": cpu,
        "bf16": not cpu,
        "gradient_checkpointing": not cpu,
    }
    settings = {"model": model, "data": str(data), "lora": _lora(config), "dpo": dpo}
    files.write(out / "dpo.json", json.dumps(settings, indent=1) + "\n")
    command = [*python_of(config), str(Path(__file__).with_name("dpo.py")), str(out / "dpo.json")]
    return {"pairs": pairs, "too_long": too_long, **_train(command, str(_TRL), config, model, out, watch)}


def _train(
    command: Sequence[str], packages: str, config: DictConfig, model: str, out: Path, watch: Watch
) -> dict[str, Any]:
    """Run a trainer that leaves its result in ``out/trained``; return steps and losses."""
    from transformers import AutoTokenizer

    log, trained = out / "sft.log", out / "trained"
    for name in ("trained", "model", "adapter"):
        shutil.rmtree(out / name, ignore_errors=True)
    lines = Tail(trained / "trainer_log.jsonl")  # LLaMA-Factory's

    def look() -> None:
        for line in lines.take():
            if "loss" in line:
                watch(line["current_steps"], line["total_steps"], {"train/loss": line["loss"]})

    run_logged(command, {**NO_REPORTS, **on_device(config), "PYTHONPATH": packages}, log, look)
    told = json.loads((trained / "trainer_state.json").read_text())["log_history"]  # of Hugging Face's trainer
    losses = [entry["loss"] for entry in told if "loss" in entry]
    if config.actor_rollout_ref.model.lora_rank:
        merge_apart(model, trained, out / "model", log)
        shutil.copytree(trained, out / "adapter", ignore=shutil.ignore_patterns("*.bin", "tokenizer*", "*.jinja"))
    else:
        tokenizer: Any = AutoTokenizer.from_pretrained(model)  # with the template that episodes are played with
        tokenizer.save_pretrained(trained)
        trained.rename(out / "model")
    return {"steps": len(losses), "loss": {"first": losses[0], "last": losses[-1]}}


def _lora(config: DictConfig) -> dict[str, Any] | None:
    """Return the fields of PEFT's LoraConfig, None if all weights are trained."""
    model = config.actor_rollout_ref.model
    if not model.lora_rank:
        return None
    return {"r": model.lora_rank, "lora_alpha": model.lora_alpha, "target_modules": _plain(model.target_modules)}


def _target(lora: Mapping[str, Any]) -> str:
    modules = lora["target_modules"]
    return "all" if modules == "all-linear" else modules if isinstance(modules, str) else ",".join(modules)


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
