"""The config composes, and the same command finds its run again."""

import errno
import fcntl

import pytest
from omegaconf import OmegaConf

from rl.run.checkpoints import seal
from rl.run.directory import Run, open_run
from tests.check_kit import composed

OVERRIDES = ["+experiment=quickstart"]


def opened(tmp_path, **changes) -> Run:
    return open_run(composed(*OVERRIDES, run__root=str(tmp_path), **changes))


def test_quickstart_is_a_complete_cpu_config():
    config = composed(*OVERRIDES)
    config.run.dir = "somewhere"
    OmegaConf.resolve(config)
    rollout = config.actor_rollout_ref.rollout
    assert config.trainer.device == "cpu"
    assert rollout.max_model_len == config.data.max_prompt_length + config.data.max_response_length
    assert config.data.train_batch_size % config.actor_rollout_ref.actor.ppo_mini_batch_size == 0
    assert config.trainer.default_local_dir == "somewhere/checkpoints"
    assert rollout.dtype == "float32"
    assert config.actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype == "fp32"


def test_unfinished_run_is_continued_and_finished_one_is_not(tmp_path):
    first = opened(tmp_path)
    assert not first.resumed
    first.close()
    second = opened(tmp_path)
    assert second.resumed and second.dir == first.dir
    second.finish()
    second.close()
    third = opened(tmp_path)
    assert not third.resumed and third.dir != first.dir
    third.close()


def test_other_settings_and_runs_in_use_get_their_own_directory(tmp_path):
    first = opened(tmp_path)
    other = opened(tmp_path, seed=7)
    in_use = opened(tmp_path)
    another = opened(tmp_path)  # most likely in the same second
    assert len({first.dir, other.dir, in_use.dir, another.dir}) == 4
    for run in (first, other, in_use, another):
        run.close()


def test_explicit_directory_is_continued_whatever_the_settings(tmp_path):
    first = opened(tmp_path, run__dir=f"{tmp_path}/mine")
    with pytest.raises(RuntimeError, match="in use"):
        opened(tmp_path, run__dir=f"{tmp_path}/mine")
    first.finish()
    first.close()
    again = opened(tmp_path, run__dir=f"{tmp_path}/mine", trainer__total_training_steps=99)
    assert again.resumed and again.dir == first.dir
    again.close()


def test_a_disk_without_locks_needs_an_explicit_directory(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(RuntimeError, match=r"no file locks.*give run\.dir"):
        opened(tmp_path)
    first = opened(tmp_path, run__dir=f"{tmp_path}/mine")
    assert not first.resumed
    first.close()
    again = opened(tmp_path, run__dir=f"{tmp_path}/mine")
    assert again.resumed
    again.close()


@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_run_finds_its_checkpoints_wherever_they_are(tmp_path, elsewhere):
    run = opened(tmp_path, **({"trainer__default_local_dir": f"{tmp_path}/large"} if elsewhere else {}))
    assert run.checkpoint_step == 0
    checkpoints = tmp_path / "large" if elsewhere else run.dir / "checkpoints"
    (checkpoints / "global_step_4").mkdir(parents=True)
    assert run.checkpoint_step == 0
    seal(checkpoints, 4)
    assert run.checkpoint_step == 4
    run.close()
