"""The shipped experiments: they compose at all scales, pass our checks, and verl reads every key of theirs."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
from omegaconf import DictConfig, OmegaConf

from rl.checks import check
from rl.checks.keys import check_keys
from rl.config.compose import CONFIGS, ConfigError, compose
from tests.check_kit import composed
from tests.datasets import snapshot_row

EXPERIMENTS = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))
FULL = [name for name in EXPERIMENTS if name != "quickstart"]
NOT_ON_A_CPU = "qwen3_coder_30b_megatron"
FSDP = [name for name in FULL if name != NOT_ON_A_CPU]


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
    alike = "allow_overlap=[repo,diff,statement]"
    return [f"data.train_files={files['train']}", f"data.val_files={files['heldout']}", alike]


@pytest.mark.parametrize("name", FULL)
def test_our_checks_pass(name: str, inputs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewards.task.log_parsers", lambda: frozenset({"parse_log_pytest"}))
    config = composed(f"+experiment={name}", f"run.root={tmp_path}", *inputs)
    boxes = config.sandbox.concurrency  # how long a step takes depends on them
    config.sandbox = OmegaConf.load(CONFIGS / "sandbox" / "local.yaml")  # no container engine is needed
    config.sandbox.concurrency = boxes
    check(config)


@pytest.mark.parametrize("scale", ["tiny", "tiny_tp2", "gpu"])
@pytest.mark.parametrize("name", FSDP)
def test_a_toy_keeps_the_recipe(name: str, scale: str, tmp_path: Path) -> None:
    check(composed(f"+experiment={name}", f"scale={scale}", f"run.root={tmp_path}"))
    full, toy = resolved(name), resolved(name, f"scale={scale}")
    assert toy.prepare and toy.sandbox.kind == "local"
    assert (toy.trainer.nnodes, toy.trainer.n_gpus_per_node) == (1, 2 if scale == "tiny_tp2" else 1)
    # Of the trainer's mode, only this is smaller.
    toy.trainer.v1.separate_async.parameter_sync_step = full.trainer.v1.separate_async.parameter_sync_step
    for key in ("algorithm", "episode", "trainer.v1", "trainer.experiment_name", "actor_rollout_ref.model.lora_rank"):
        assert OmegaConf.select(toy, key) == OmegaConf.select(full, key)
    for key in ("clip_ratio_high", "clip_ratio_low", "loss_agg_mode", "strategy", "use_kl_loss"):
        assert toy.actor_rollout_ref.actor[key] == full.actor_rollout_ref.actor[key]
    assert (toy.trainer.device == "cpu") == (scale != "gpu")


@pytest.mark.parametrize("scale", ["smoke", "smoke_tiny"])
@pytest.mark.parametrize("name", FSDP)
def test_the_smoke_test_is_for_all_nodes_of_a_job(
    name: str, scale: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    check(composed(f"+experiment={name}", f"scale={scale}", f"run.root={tmp_path}"))
    toy = resolved(name, f"scale={scale}")
    assert (toy.trainer.nnodes, toy.trainer.n_gpus_per_node) == (3, 8 if scale == "smoke" else 1)
    assert (toy.data.train_batch_size, toy.quickstart.train_tasks) == (6, 12)
    assert toy.actor_rollout_ref.rollout.agent.num_workers == 3
    assert toy.cluster.program == "rl.smoke" and toy.trainer.total_training_steps == 3


@pytest.mark.parametrize("name", FSDP)
def test_the_toy_on_a_gpu_keeps_what_only_a_gpu_can_do(name: str) -> None:
    full, toy = resolved(name).actor_rollout_ref, resolved(name, "scale=gpu").actor_rollout_ref
    full.model.path = toy.model.path
    full.actor.fsdp_config.ulysses_sequence_parallel_size = 1
    assert toy.model == full.model and toy.actor.fsdp_config == full.actor.fsdp_config
    for key in ("dtype", "enable_sleep_mode", "enforce_eager", "free_cache_engine", "load_format", "engine_kwargs"):
        assert toy.rollout[key] == full.rollout[key]
    assert not toy.rollout.enforce_eager and toy.model.use_remove_padding


@pytest.mark.parametrize(
    ("name", "key", "says"),
    [
        (NOT_ON_A_CPU, "", "Megatron does not run on a CPU"),
        ("qwen3_coder_30b_lora", "model.lora.merge=false", "no LoRA adapters"),
        ("qwen3_coder_30b_separate", "rollout.checkpoint_engine.backend=nccl", "backend=nccl sends weights between"),
        ("qwen3_coder_30b", "actor.fsdp_config.ulysses_sequence_parallel_size=2", "in flash attention only"),
        ("qwen3_coder_30b", "rollout.tensor_model_parallel_size=2", "needs a process per worker"),
    ],
)
def test_what_a_cpu_cannot_run_is_refused(name: str, key: str, says: str) -> None:
    more = [f"actor_rollout_ref.{key}"] if key else []
    with pytest.raises(ConfigError, match=says):
        check(composed(f"+experiment={name}", "scale=tiny", *more))


@pytest.mark.parametrize("name", FSDP)
def test_no_step_trains_with_rate_0(name: str) -> None:
    """The rates are those of the schedule that verl's own engine makes of the config."""
    import torch
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    settings = omega_conf_to_dataclass(resolved(name).actor_rollout_ref.actor.optim)
    object.__setattr__(settings, "total_training_steps", 200)  # as verl's trainer does
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=settings.lr)
    schedule = FSDPEngine._build_lr_scheduler(SimpleNamespace(optimizer_config=settings, rank=1), optimizer)  # ty: ignore
    rates = []
    for _ in range(200):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    warm = settings.lr_warmup_steps
    assert rates == pytest.approx([settings.lr * min(1, step / max(1, warm)) for step in range(1, 201)])


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


@pytest.mark.parametrize("key", ["actor_rollout_ref.nccl_timeout", "actor_rollout_ref.rollout.over_sample_rate"])
def test_a_key_of_verls_yaml_that_its_code_does_not_read_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}: nothing reads this key, although verl's own config has it"):
        check_keys(composed("+experiment=qwen3_coder_30b", f"{key}=0.5"))


def test_keys_that_only_verls_dataclasses_or_other_programs_know() -> None:
    more = [
        "+actor_rollout_ref.rollout.limit_images=1",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype=fp8",
        "+ray_kwargs.ray_init.dashboard_port=1",
        "+grading.flags.mine.path=x",
    ]
    check_keys(composed("+experiment=qwen3_coder_30b", *more))
    check_keys(composed("+experiment=qwen3_coder_30b_megatron", "sandbox=docker"))
    check_keys(composed("+experiment=quickstart", "quickstart.experts=4"))


def test_keys_of_another_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(CONFIGS, tmp_path / "configs")
    (tmp_path / "configs" / "agent" / "other.yaml").write_text("kind: other\nletters: 1\nneeded: ???\n")
    for module in ("rl.config.compose", "rl.checks.keys"):
        monkeypatch.setattr(f"{module}.CONFIGS", tmp_path / "configs")
    check_keys(compose(["agent=other"]))
    with pytest.raises(ConfigError, match=r"agent\.leters: nothing reads this key; did you mean agent\.letters"):
        check_keys(compose(["agent=other", "+agent.leters=1"]))
    # What an experiment sets for Claude Code is not for another agent, but what the command line sets is.
    own = ["+experiment=quickstart", "agent=other"]
    assert compose(own).agent == {"kind": "other", "letters": 1, "needed": "???"}
    given = {"kind": "other", "letters": 1, "needed": "???", "timeout_s": 7}
    assert compose([*own, "agent.timeout_s=7"]).agent == given
    mine = "# @package _global_\ndefaults: [quickstart, override /agent: other, _self_]\nagent: {letters: 2, typo: 1}\n"
    (tmp_path / "configs" / "experiment" / "mine.yaml").write_text(mine)
    assert compose(["+experiment=mine"]).agent == {"kind": "other", "letters": 2, "needed": "???", "typo": 1}
    codex = compose(["+experiment=qwen3_8b", "agent=codex"]).agent
    assert codex.keys() == compose(["agent=codex"]).agent.keys() and codex.timeout_s == 3600
    assert "max_turns" not in compose(["+experiment=qwen3_8b", "agent=mixed"]).agent
