"""This module has configs for tests: one that passes ``rl.checks``, and composed ones."""

from __future__ import annotations

import functools
import pickle
import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from rl.checks import check
from rl.config.compose import ConfigError, compose
from tests.datasets import PARSER
from tests.datasets import snapshot_row as row

REPOSITORY = Path(__file__).resolve().parents[1]


def write(path: Path, rows: list[dict]) -> str:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


@functools.cache
def _composed(*overrides: str) -> bytes:
    return pickle.dumps(compose(overrides))


def composed(*overrides: str, **changes: object) -> DictConfig:
    """Return a composed config of its own.

    Composing takes a second of CPU time and is done once per process for the overrides that choose files; those with a
    dotted key are set on a copy. ``changes``: more values of keys, with ``__`` for the dots.
    """
    dotted = [text for text in overrides if re.match(r"\+?\w+\.", text)]
    config = pickle.loads(_composed(*(text for text in overrides if text not in dotted)))  # faster than copy.deepcopy
    for override in OverridesParser.create().parse_overrides(dotted):
        OmegaConf.update(config, override.key_or_group, override.value(), force_add=override.is_add())
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
    return config


def good_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DictConfig:
    """Return a config that passes, with the keys that the checks read."""
    monkeypatch.setattr("rewards.task.log_parsers", lambda: frozenset({PARSER}))
    (tmp_path / "snapshot").mkdir()
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    binary = tmp_path / "claude"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    return OmegaConf.create(
        {
            "run": {"dir": None, "root": str(tmp_path / "outputs"), "grace_s": 60, "save_minutes": None},
            "cluster": {"local_dir": "/tmp", "start_timeout_s": 60},
            "prepare": None,
            "allow_overlap": ["repo", "diff", "statement"],
            "episode": {"infra_retries": 2, "mask_overlong": False, "weigh_by_episode": True},
            "curriculum": OmegaConf.load(REPOSITORY / "configs/train.yaml").curriculum,
            "agent": OmegaConf.merge(
                OmegaConf.load(REPOSITORY / "configs/agent/claude_code.yaml"), {"binary": str(binary)}
            ),
            "sandbox": {
                "kind": "local",
                "isolation": "auto",
                "cpu_s": 10,
                "file_mb": 16,
                "memory_mb": 512,
                "processes": 64,
                "disk_mb": 64,
                "concurrency": 4,
            },
            "grading": OmegaConf.load(REPOSITORY / "configs/grading/default.yaml"),
            "store": OmegaConf.load(REPOSITORY / "configs/store/default.yaml"),
            "sft": OmegaConf.load(REPOSITORY / "configs/sft/default.yaml"),
            "proxy": {
                "max_tokens": None,
                "max_calls": 100,
                "max_body_mb": 16,
                "max_session_tokens": 1_000_000,
                "tool_parser": "qwen3_coder",
                "side_calls": "train",
                "side_endpoint": {"url": None, "model": None, "key_env": None},
                "any_family": False,
            },
            "algorithm": {"adv_estimator": "grpo"},
            "data": {
                "train_files": write(tmp_path / "train.parquet", [row(f"train-{i}") for i in range(8)]),
                "val_files": write(tmp_path / "val.parquet", [row("val-0")]),
                "train_batch_size": 4,
                "max_prompt_length": 1000,
                "max_response_length": 500,
            },
            "actor_rollout_ref": {
                "model": {"path": str(model)},
                "actor": {
                    "strategy": "fsdp2",
                    "optim": {"lr_warmup_steps": -1, "lr_warmup_steps_ratio": 0.0},
                    "ppo_mini_batch_size": 4,
                    "use_dynamic_bsz": True,
                    "ppo_max_token_len_per_gpu": 4096,
                    "ppo_micro_batch_size_per_gpu": None,
                    "ulysses_sequence_parallel_size": 1,
                    "loss_agg_mode": "seq-mean-token-mean",
                    "loss_scale_factor": None,
                },
                "rollout": {
                    "n": 8,
                    "tensor_model_parallel_size": 1,
                    "max_model_len": 1500,
                    "log_prob_max_token_len_per_gpu": 4096,
                    "val_kwargs": {"n": 1},
                },
            },
            "trainer": {
                "device": "cuda",
                "nnodes": 1,
                "n_gpus_per_node": 1,
                "total_training_steps": None,
                "total_epochs": 1,
                "resume_mode": "auto",
                "save_freq": 5,
                "default_local_dir": "${run.dir}/checkpoints",
                "v1": {
                    "trainer_mode": "sync",
                    "separate_async": {"parameter_sync_step": 4},
                    "sampler": {"sync_refill_failed_groups": False},
                },
            },
        }
    )


def refused(config: DictConfig, *parts: str, **changes) -> None:
    """Assert that ``check`` refuses the changed config with a line that contains all parts."""
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value)
    with pytest.raises(ConfigError) as caught:
        check(config)
    assert any(all(part in line for part in parts) for line in caught.value.lines), caught.value
    assert not any("\n" in line for line in caught.value.lines)
