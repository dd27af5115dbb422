"""The shipped experiments: they compose at both scales, pass our checks, and verl reads every key of theirs."""

import shutil
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from omegaconf import DictConfig, OmegaConf

from rl.checks import check
from rl.checks.keys import check_keys
from rl.checks.machine import check_packages
from rl.config import CONFIGS, ConfigError, compose
from tests.check_kit import composed
from tests.datasets import snapshot_row

EXPERIMENTS = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))
FULL = [name for name in EXPERIMENTS if name != "quickstart"]
NOT_ON_A_CPU = "qwen3_coder_30b_megatron"


def resolved(name: str, *overrides: str) -> DictConfig:
    config = composed(f"+experiment={name}", "run.dir=/nowhere", *overrides)
    OmegaConf.resolve(config)
    return config


@pytest.fixture
def inputs(tmp_path: Path) -> list[str]:
    """Overrides that name task files."""
    (tmp_path / "snapshot").mkdir()
    files = {}
    for split, count in (("train", 32), ("heldout", 1)):
        rows = [snapshot_row(f"{split}-{i}") for i in range(count)]
        files[split] = tmp_path / f"{split}.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), files[split])
    return [f"data.train_files={files['train']}", f"data.val_files={files['heldout']}"]


@pytest.mark.parametrize("name", FULL)
def test_our_checks_pass(name: str, inputs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewards.task.log_parsers", lambda: frozenset({"parse_log_pytest"}))
    config = composed(f"+experiment={name}", f"run.root={tmp_path}", *inputs)
    config.sandbox = OmegaConf.load(CONFIGS / "sandbox" / "local.yaml")  # no container engine is needed
    check(config)


@pytest.mark.parametrize("name", [name for name in FULL if name != NOT_ON_A_CPU])
def test_tiny_runs_on_a_cpu_and_keeps_the_recipe(name: str, tmp_path: Path) -> None:
    check(composed(f"+experiment={name}", "scale=tiny", f"run.root={tmp_path}"))
    full, tiny = resolved(name), resolved(name, "scale=tiny")
    assert tiny.trainer.device == "cpu" and tiny.prepare and tiny.sandbox.kind == "local"
    # Of the trainer's mode, only this is smaller.
    tiny.trainer.v1.separate_async.parameter_sync_step = full.trainer.v1.separate_async.parameter_sync_step
    for key in ("algorithm", "episode", "trainer.v1", "trainer.experiment_name", "actor_rollout_ref.model.lora_rank"):
        assert OmegaConf.select(tiny, key) == OmegaConf.select(full, key)
    for key in ("clip_ratio_low", "clip_ratio_high", "loss_agg_mode", "use_kl_loss", "strategy"):
        assert tiny.actor_rollout_ref.actor[key] == full.actor_rollout_ref.actor[key]


@pytest.mark.parametrize(
    ("name", "key", "says"),
    [
        (NOT_ON_A_CPU, "", "Megatron does not run on a CPU"),
        ("qwen3_coder_30b_lora", "model.lora.merge=false", "no LoRA adapters"),
        ("qwen3_coder_30b_separate", "rollout.checkpoint_engine.backend=nccl", "backend=nccl sends weights between"),
    ],
)
def test_what_a_cpu_cannot_run_is_refused(name: str, key: str, says: str) -> None:
    more = [f"actor_rollout_ref.{key}"] if key else []
    with pytest.raises(ConfigError, match=says):
        check(composed(f"+experiment={name}", "scale=tiny", *more))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_verl_reads_every_key(name: str) -> None:
    """Its dataclasses refuse what they do not know; its validation looks at how values go together."""
    from verl.utils.config import omega_conf_to_dataclass, validate_config
    from verl.workers.config import HFModelConfig

    config = resolved(name)
    for part in ("actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm"):
        omega_conf_to_dataclass(OmegaConf.select(config, part))
    assert set(config.actor_rollout_ref.model) <= set(HFModelConfig.__dataclass_fields__)
    validate_config(config, use_reference_policy=False, use_critic=False)


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("trainer.total_training_step", "trainer.total_training_steps"),
        ("algorithm.filter_groups.enabled", "enable"),
        ("episode.mask_overlog", "episode.mask_overlong"),
        ("clip_ratio_high", ""),
        ("actor_rollout_ref.rollout.expert_paralel_size", "expert_parallel_size"),
        ("sandbox.disk_mbs", "sandbox.disk_mb"),
    ],
)
def test_a_key_that_nothing_reads_is_named(key: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}: nothing reads this key") as caught:
        check_keys(composed("+experiment=qwen3_coder_30b", f"+{key}=1"))
    assert near in str(caught.value)


def test_keys_that_only_verls_dataclasses_or_other_programs_know() -> None:
    more = [
        "+actor_rollout_ref.rollout.limit_images=1",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype=fp8",
        "+ray_kwargs.ray_init.dashboard_port=1",
        "+grading.flags.mine.path=x",
    ]
    check_keys(composed("+experiment=qwen3_coder_30b", *more))
    check_keys(composed("+experiment=qwen3_coder_30b_megatron", "sandbox=apptainer"))
    check_keys(composed("+experiment=quickstart", "quickstart.experts=4"))


def test_keys_of_another_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(CONFIGS, tmp_path / "configs")
    (tmp_path / "configs" / "agent" / "other.yaml").write_text("kind: other\nletters: 1\n")
    for module in ("rl.config", "rl.checks.keys"):
        monkeypatch.setattr(f"{module}.CONFIGS", tmp_path / "configs")
    check_keys(compose(["agent=other"]))
    with pytest.raises(ConfigError, match=r"agent\.leters: nothing reads this key; do you mean agent\.letters"):
        check_keys(compose(["agent=other", "+agent.leters=1"]))


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("qwen3_coder_30b", "flash-attn"),
        ("qwen3_coder_30b_megatron", "megatron-core, transformer-engine, flash-attn"),
        ("qwen3_coder_30b_separate", "flash-attn, cupy"),
        ("quickstart", ""),
    ],
)
def test_what_the_extra_does_not_install_is_named(name: str, needed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = composed(f"+experiment={name}")
    monkeypatch.setattr("importlib.util.find_spec", lambda module: object())
    check_packages(config)
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    if needed:
        with pytest.raises(ConfigError, match=f"on GPUs: {needed}; docs/experiments.md"):
            check_packages(config)
    else:
        check_packages(config)
