"""rl.checks: a good config passes; each thing that can be wrong is one clear line."""

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from omegaconf import DictConfig, OmegaConf

from rl.checks import check, check_values
from rl.checks.keys import check_types
from rl.checks.machine import GIB
from rl.checks.model import check_memory, check_model, check_toy
from rl.checks.numbers import POSITIVE, POSITIVE_OR_NULL, check_schedule
from rl.config.compose import ConfigError
from rl.plan.model import KNOWN
from tests.check_kit import composed, good_config, refused, write
from tests.datasets import snapshot_row as row

REPOSITORY = Path(__file__).resolve().parents[3]


LOGGERS = """
import os
from omegaconf import OmegaConf
from rl.checks.machine import check_loggers
from rl.config.compose import ConfigError
for loggers, variables in (
    (["wandb", "tensorbord"], {}),
    (["tensorboard"], {"WANDB_MODE": "online"}),
    (["wandb"], {"WANDB_MODE": "offline"}),
    (["wandb"], {"WANDB_MODE": "online"}),
    (["wandb"], {"WANDB_MODE": "online", "WANDB_API_KEY": "0" * 40}),
):
    os.environ.update(variables)
    try:
        check_loggers(OmegaConf.create({"trainer": {"logger": loggers}}))
        print("TOLD", "fine")
    except ConfigError as error:
        print("TOLD", error)
"""


def test_loggers(tmp_path: Path) -> None:
    """In one process of its own: verl takes seconds to import, and wandb looks for a key at home.

    wandb's server here is one that never answers: looking for a key does not ask it (it did, and hung).
    """
    command = [sys.executable, "-c", LOGGERS]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "VERL_PLATFORM": "cpu", "WANDB_BASE_URL": url}
        out = subprocess.run(
            command, env=environment, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True
        ).stdout
        silent.setblocking(False)
        with pytest.raises(BlockingIOError):
            silent.accept()
    told = [line.removeprefix("TOLD ") for line in out.splitlines() if line.startswith("TOLD ")]
    assert told[0].startswith("trainer.logger: verl has no tensorbord; it has wandb, ")
    assert told[1:3] == ["fine", "fine"] and "wandb has no key" in told[3] and told[4] == "fine"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DictConfig:
    return good_config(tmp_path, monkeypatch)


def test_good_config_passes(config):
    check(config)


def test_unknown_keys(config):
    refused(
        config,
        "actor_rollout_ref.actor.clip_ratio_hihg",
        "clip_ratio_high",
        actor_rollout_ref__actor__clip_ratio_hihg=1,
    )


def test_lists_of_files_pass(config, tmp_path):
    more = write(tmp_path / "more.parquet", [row("more-0")])
    config.data.train_files = [config.data.train_files, more]
    check(config)


@pytest.mark.parametrize("key", ("agent.max_turns", "agent.timeout_s", *POSITIVE))
@pytest.mark.parametrize("value", [0, -1, "many", None, True])
def test_numbers_must_be_positive(config, key, value):
    refused(config, key, repr(value), **{key: value})


@pytest.mark.parametrize("key", POSITIVE_OR_NULL)
def test_optional_numbers(config, key):
    refused(config, key, "0", **{key: 0})


def test_negative_retries(config):
    refused(config, "episode.infra_retries", episode__infra_retries=-1)


@pytest.mark.parametrize("name", [None, "qwen"])
def test_unknown_tool_parser(config, name):
    refused(config, "proxy.tool_parser", repr(name), "qwen3_coder", proxy__tool_parser=name)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("trainer.save_freq", "abc", "it must be a number"),
        ("trainer.save_freq", None, "it must be a number"),
        ("actor_rollout_ref.actor.optim.lr", "abc", "it must be a number"),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps", 0.5, "it must be a whole number or null"),
        ("actor_rollout_ref.rollout.n", 2.5, "it must be a whole number"),
        ("actor_rollout_ref.actor.use_kl_loss", "yes please", "it must be true or false"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "two", "it must be a whole number or null"),
        ("trainer.logger", "wandb", "it must be a list"),
        ("sandbox.image_budget_gb", [1], "it must be a number"),
        ("trainer.max_actor_ckpt_to_keep", "all", "it must be a number or null"),
        ("ray_kwargs.ray_init.anything", "at all", ""),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps", None, ""),
        ("actor_rollout_ref.actor.optim.lr", 1, ""),
        ("trainer.v1.separate_async.num_warmup_batches", 1.5, ""),
        ("trainer.experiment_name", 2024, ""),
        ("trainer.max_actor_ckpt_to_keep", None, ""),
    ],
)
def test_a_value_has_the_type_that_its_key_has(key: str, value: object, said: str) -> None:
    made = composed("+experiment=qwen3_4b", **{key: value})
    if not said:
        check_types(made)
        return
    with pytest.raises(ConfigError) as caught:
        check_values(made)
    assert caught.value.lines[0].startswith(f"{key} is {value!r}; it must be ") and said in caught.value.lines[0]
    assert len(caught.value.lines) == 1


def test_all_that_is_wrong_is_told_at_once(config: DictConfig, tmp_path: Path) -> None:
    """A line each, and none that only follows from another."""
    wrong: dict[str, object] = {
        "agent.binary": "/no/claude",
        "data.val_files": "/no/val.parquet",
        "actor_rollout_ref.actor.clip_ratio_hihg": 1,
        "actor_rollout_ref.model.path": None,
        "actor_rollout_ref.rollout.n": 1,
    }
    for key, value in wrong.items():
        OmegaConf.update(config, key, value)
    with pytest.raises(ConfigError) as caught:
        check(config)
    lines = caught.value.lines
    assert len(lines) == 5 and str(caught.value) == "\n".join(lines)
    for part in (
        "clip_ratio_hihg: nothing",
        "rollout.n is 1",
        "/no/claude",
        "model.path is not set",
        "/no/val.parquet",
    ):
        assert sum(part in line for line in lines) == 1, (part, lines)
    # Where a value is of the wrong type, what would be calculated from it is not looked at.
    config.data.train_batch_size, config.trainer.save_freq = "many", "often"
    with pytest.raises(ConfigError) as caught:
        check(config)
    assert [line.split(" is ")[0] for line in caught.value.lines][1:] == ["data.train_batch_size", "trainer.save_freq"]


def test_references_that_lead_nowhere() -> None:
    made = composed("+experiment=quickstart", **{"trainer.experiment_name": "${no.such}", "data.seed": "${nor_this}"})
    with pytest.raises(ConfigError) as caught:
        check(made)
    assert sorted(line.split(": ")[0] for line in caught.value.lines) == [
        "data.seed=${nor_this}",
        "trainer.experiment_name=${no.such}",
    ]


# --- batch sizes and lengths


def test_grpo_needs_a_group(config):
    refused(config, "rollout.n is 1", "grpo", actor_rollout_ref__rollout__n=1)


def test_other_estimators_take_single_episodes(config):
    config.algorithm.adv_estimator = "reinforce_plus_plus"
    config.actor_rollout_ref.rollout.n = 1
    check(config)


@pytest.mark.parametrize("mini", [3, 8])
def test_mini_batches_divide_the_batch(config, mini):
    refused(config, "train_batch_size is 4", str(mini), actor_rollout_ref__actor__ppo_mini_batch_size=mini)


def test_a_key_that_verls_trainer_does_not_read_is_refused(config):
    """The module that reads it is one that the V1 trainer does not import; if it does, this check goes."""
    refused(config, "has no effect", actor_rollout_ref__actor__use_prefix_grouper=True)
    verl = Path(importlib.util.find_spec("verl").submodule_search_locations[0])
    readers = [path for path in verl.rglob("*.py") if "use_prefix_grouper" in path.read_text()]
    assert readers and not any({"v1", "engine"} & {*path.relative_to(verl).parts} for path in readers)


def test_separate_async_ties_the_sizes(config):
    refused(config, "4 x 4 = 16", trainer__v1__trainer_mode="separate_async")
    config.actor_rollout_ref.actor.ppo_mini_batch_size = 1
    check(config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.v1.trainer_mode", "colocate_async"),
        ("algorithm.filter_groups.enable", True),
        ("trainer.v1.sampler.sync_refill_failed_groups", True),
    ],
)
def test_determinism_is_not_promised_where_there_is_none(config, key, value):
    config.actor_rollout_ref.rollout.full_determinism = True
    check(config)
    refused(config, key, "full_determinism", **{key: value})


GOOD_WARM_UP = {"lr_scheduler_type": "cosine", "zero_indexed_step": False}


@pytest.mark.parametrize(
    ("strategy", "wrong"),
    [
        ("fsdp2", {"lr_scheduler_type": "constant"}),
        ("fsdp2", {"zero_indexed_step": True}),
        ("megatron", {"lr_warmup_init": 0.0}),
    ],
)
def test_a_warm_up_does_not_begin_with_rate_0(strategy, wrong):
    def schedule(**changes):
        optim = {"lr_warmup_steps": 5, "lr_warmup_steps_ratio": 0.0} | changes
        check_schedule(OmegaConf.create({"actor_rollout_ref": {"actor": {"strategy": strategy, "optim": optim}}}))

    good = {"lr_warmup_init": 1e-7} if strategy == "megatron" else GOOD_WARM_UP
    schedule(**good)
    with pytest.raises(ConfigError, match="begins with a step of rate 0"):
        schedule(**good | wrong)
    schedule(**good | wrong, lr_warmup_steps=-1)


def test_a_run_goes_on_from_its_own_checkpoints(config):
    refused(config, "trainer.resume_mode=disable", trainer__resume_mode="disable")


def test_a_directory_for_sockets_is_looked_at_before_the_run(config, tmp_path):
    refused(config, "cluster.local_dir", "too long", cluster__local_dir=f"{tmp_path}/{'x' * 99}")


def test_groups_that_limits_empty_are_replaced(config):
    refused(config, "sync_refill_failed_groups=true", **{"episode.mask_overlong": True})
    config.trainer.v1.sampler.sync_refill_failed_groups = True
    config.episode.mask_overlong = True
    check(config)


def test_tensor_parallel_divides_the_devices(config):
    refused(
        config,
        "tensor_model_parallel_size is 3",
        "8 devices",
        actor_rollout_ref__rollout__tensor_model_parallel_size=3,
        trainer__n_gpus_per_node=8,
    )


def test_fixed_batches_divide_over_devices(config):
    refused(
        config,
        "32 episodes",
        "5 devices",
        actor_rollout_ref__actor__use_dynamic_bsz=False,
        trainer__n_gpus_per_node=5,
    )


def test_fixed_batches_need_a_micro_batch(config):
    refused(config, "ppo_micro_batch_size_per_gpu", actor_rollout_ref__actor__use_dynamic_bsz=False)
    config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu = 1
    check(config)


def test_the_loss_is_divided_by_what_it_adds_up(config):
    config.actor_rollout_ref.actor.loss_agg_mode = "token-mean"
    refused(config, "loss_agg_mode is token-mean", "weigh_by_episode=false")
    config.episode.weigh_by_episode = False
    check(config)
    refused(config, "loss_scale_factor", actor_rollout_ref__actor__loss_agg_mode="seq-mean-token-sum-norm")
    config.actor_rollout_ref.actor.loss_scale_factor = 500
    check(config)


def test_row_longer_than_the_model(config):
    refused(config, "1500 tokens", "max_model_len = 1499", actor_rollout_ref__rollout__max_model_len=1499)


def test_unset_model_length_is_the_engines(config):
    config.actor_rollout_ref.rollout.max_model_len = None
    check(config)


@pytest.mark.parametrize("key", ["actor.ppo_max_token_len_per_gpu", "rollout.log_prob_max_token_len_per_gpu"])
def test_row_longer_than_a_packed_batch(config, key):
    refused(config, key, "at least 1500", **{f"actor_rollout_ref.{key}": 1000})
    config.actor_rollout_ref.actor.ulysses_sequence_parallel_size = 2
    check(config)


# --- agent and sandbox


def test_binary_that_cannot_be_executed(config):
    Path(config.agent.binary).chmod(0o644)
    refused(config, config.agent.binary)


# --- model and disk


@pytest.mark.parametrize("path", ["/nowhere/model", "~/nowhere", "./nowhere", "out/puts/model"])
def test_missing_model_directory(config, path):
    refused(config, "model.path", "config.json", actor_rollout_ref__model__path=path)


def test_tied_embeddings_on_a_cpu(config):
    model = Path(config.actor_rollout_ref.model.path) / "config.json"
    for tied in (True, False):
        model.write_text(f'{{"tie_word_embeddings": {str(tied).lower()}}}')
        check_model(config)
    model.write_text('{"tie_word_embeddings": true}')
    config.trainer.device = "cpu"
    with pytest.raises(ConfigError, match="tied embeddings"):
        check_model(config)


@pytest.mark.parametrize(("dtype", "needed"), [("fp32", 520), ("bf16", 260)])
def test_weights_that_one_message_of_a_cpu_cannot_hold(config, dtype, needed):
    model = Path(config.actor_rollout_ref.model.path) / "config.json"
    model.write_text('{"tie_word_embeddings": false, "vocab_size": 151936, "hidden_size": 896}')
    key = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
    OmegaConf.update(config, key, needed - 1, force_add=True)
    OmegaConf.update(config, "actor_rollout_ref.actor.fsdp_config.model_dtype", dtype, force_add=True)
    check_model(config)
    config.trainer.device = "cpu"
    with pytest.raises(ConfigError, match=rf"bucket_megabytes={needed - 1} .* set it to {needed} or more"):
        check_model(config)
    OmegaConf.update(config, key, needed)
    check_model(config)


def test_hub_names_are_not_looked_up(config):
    config.actor_rollout_ref.model.path = "Qwen/Qwen3-8B"
    check(config)


@pytest.fixture
def free(monkeypatch):
    """Sets the free space, in GiB, that the machine seems to have."""

    def set_free(gib: float) -> None:
        usage = type("Usage", (), {"free": int(gib * GIB)})
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)

    return set_free


def test_full_disk(config, free):
    free(0.5)
    refused(config, "0.5 GiB free", "at least 1.0")


def test_no_room_for_a_checkpoint(config, free):
    with open(Path(config.actor_rollout_ref.model.path) / "model.safetensors", "wb") as weights:
        weights.truncate(GIB)  # sparse: takes no space
    free(3.9)
    refused(config, "3.9 GiB free", "at least 4.0")
    free(4)
    check(config)
    free(1)
    config.trainer.save_freq = -1
    check(config)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="a second file system is needed")
def test_checkpoints_on_a_disk_of_their_own(config, free):
    with open(Path(config.actor_rollout_ref.model.path) / "model.safetensors", "wb") as weights:
        weights.truncate(GIB)
    config.trainer.default_local_dir = "/dev/shm/checkpoints"
    free(2.9)
    refused(config, "/dev/shm has 2.9 GiB free", "at least 3.0 (one checkpoint)", "set trainer.default_local_dir")
    free(3)
    check(config)
    config.trainer.default_local_dir = "/dev/null/checkpoints"
    refused(config, "trainer.default_local_dir: cannot write in /dev/null")


def test_run_directory_under_a_file(config, tmp_path):
    refused(config, "train.parquet", run__dir=str(tmp_path / "train.parquet" / "run"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_run_directory_that_cannot_be_written(config, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o555)
    refused(config, "locked", run__root=str(tmp_path / "locked"))


# --- proxy


def test_side_calls(config, monkeypatch):
    refused(config, "proxy.side_calls is 'drop'", proxy__side_calls="drop")
    config.proxy.side_calls = "forward"
    refused(config, "proxy.side_endpoint.url")
    config.proxy.side_endpoint = {"url": "http://127.0.0.1:1", "model": "m", "key_env": "SIDE_KEY"}
    refused(config, "SIDE_KEY, which is not set")
    monkeypatch.setenv("SIDE_KEY", "k")
    check(config)


# --- as a whole


def test_quickstart_passes():
    from rl.config.compose import compose

    check(compose(["+experiment=quickstart"]))


def test_imports_nothing_heavy():
    code = "import sys, rl.checks; print(*{'torch', 'ray', 'verl', 'vllm', 'swebench'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("keys", [["+experiment=quickstart"], ["+experiment=qwen3_4b", "scale=gpu"]], ids=str)
def test_a_real_policy_is_not_trained_with_a_toys_recipe(keys, tmp_path):
    for told in ({"hidden_size": 128}, {"hidden_size": 896}, {"text_config": {"hidden_size": 896}}):
        (tmp_path / "config.json").write_text(json.dumps(told))
        config = composed(*keys, f"policy={tmp_path}", f"actor_rollout_ref.model.path={tmp_path}")
        if told == {"hidden_size": 128}:
            check_toy(config)
        else:
            with pytest.raises(ConfigError, match=r"toy's recipe.*scale=cpu"):
                check_toy(config)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ([], ""),
        (["data.max_response_length=14000"], "a row of 16048 tokens takes .*data.max_response_length"),
        (["actor_rollout_ref.model.lora_rank=0"], "a row of 2519 tokens takes 26.*lora_rank=32"),
        (["actor_rollout_ref.model.lora_rank=0", "plan.check=false"], ""),
    ],
    ids=str,
)
@pytest.mark.usefixtures("bfloat16_units")
def test_memory_of_a_real_model_on_a_cpu(keys, said, tmp_path, monkeypatch):
    """It is rl.plan's estimate."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=24 * 2**30))
    sizes = json.loads((KNOWN / "Qwen2.5-Coder-0.5B-Instruct.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"tie_word_embeddings": False}))
    model = f"actor_rollout_ref.model.path={tmp_path}"
    config = composed("+experiment=qwen2_5_coder_0_5b", "scale=cpu", model, *keys)
    if said:
        with pytest.raises(ConfigError, match=said):
            check_memory(config)
    else:
        check_memory(config)
