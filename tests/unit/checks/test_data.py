"""This module tests what is checked of task files before a run starts."""

from pathlib import Path

import pytest
from omegaconf import DictConfig

from rl.checks import check
from rl.checks.data import check_tasks
from rl.checks.model import check_model
from rl.config.compose import ConfigError
from tests.check_kit import good_config, refused, write
from tests.datasets import snapshot_row as row

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DictConfig:
    return good_config(tmp_path, monkeypatch)


@pytest.mark.parametrize("key", ["data.train_files", "data.val_files"])
@pytest.mark.parametrize("value", [None, [], "/nowhere/x.parquet"])
def test_missing_task_files(config, key, value):
    refused(config, key, **{key: value})


def test_tasks_that_are_like_held_out_ones(config):
    refused(
        config, "8 of 8 training tasks", "8 repo, 8 statement", "train-0", "val-0", "rl.data.overlap", allow_overlap=[]
    )
    refused(config, "8 statement", "100% of its statement", "[repo,statement]", allow_overlap=["repo"])
    refused(config, "allow_overlap=['files']", "verified, repo, diff, statement", allow_overlap=["files", "repo"])


def test_tasks_of_benchmark_repositories(config, tmp_path):
    write(tmp_path / "train.parquet", [row(f"train-{i}", repo="fork/sympy") for i in range(8)])
    refused(config, "8 verified", "fork/sympy", allow_overlap=["repo", "diff", "statement"])


def test_file_that_is_not_parquet(config, tmp_path):
    (tmp_path / "train.parquet").write_text("no")
    refused(config, "data.train_files", "train.parquet", "parquet")


def test_row_without_tests(config, tmp_path):
    write(tmp_path / "val.parquet", [row("val-0"), row("val-1", FAIL_TO_PASS="[]")])
    refused(config, "data.val_files", "val.parquet", "row 1", "FAIL_TO_PASS")


def test_missing_snapshot(config, tmp_path):
    write(tmp_path / "val.parquet", [row("val-0", image="dir:elsewhere")])
    refused(config, "val-0", "elsewhere")


def test_image_that_a_local_sandbox_cannot_use(config, tmp_path):
    write(tmp_path / "val.parquet", [row("val-0", image="some/image:1")])
    refused(config, "val-0", "some/image:1")


def test_held_out_task_in_training(config, tmp_path):
    write(tmp_path / "val.parquet", [row("val-0"), row("train-3")])
    refused(config, "train-3", "train.parquet", "val.parquet")


def test_task_in_two_training_files(config, tmp_path):
    more = write(tmp_path / "more.parquet", [row("train-0")])
    refused(config, "train-0", "more.parquet", "train.parquet", data__train_files=[config.data.train_files, more])


def test_fewer_tasks_than_a_batch(config):
    refused(
        config,
        "is 16",
        "only 8 tasks",
        data__train_batch_size=16,
        actor_rollout_ref__actor__ppo_mini_batch_size=16,
    )


def test_held_out_tasks_are_one_batch(config):
    """If one of several were lost, verl would end the validation, and the figures would be of the others."""
    refused(config, "data.val_batch_size", data__val_batch_size=1)


def test_a_run_does_not_end_before_its_last_step(config):
    """Its last checkpoint and validation are those of trainer.total_training_steps."""
    size = config.data.train_batch_size
    config.data.train_max_samples = size - 1
    refused(config, "train_max_samples", f"only {size - 1} tasks")
    config.data.train_max_samples = -1
    refused(config, "ends the run after", trainer__total_epochs=2, trainer__total_training_steps=10**6)


def test_what_prepare_makes_is_not_looked_at(config):
    config.prepare = "module:function"
    config.data.train_files = "/nowhere/x.parquet"
    config.actor_rollout_ref.model.path = "/nowhere"
    check(config)
    with pytest.raises(ConfigError):
        check_tasks(config)
    with pytest.raises(ConfigError):
        check_model(config)
