"""The config composes, and the same command finds its run again."""

import pytest
from omegaconf import OmegaConf

from rl.config import Run, compose, open_run

OVERRIDES = ["+experiment=quickstart"]


def opened(tmp_path, *overrides: str) -> Run:
    return open_run(compose([*OVERRIDES, f"run.root={tmp_path}", *overrides]))


def test_quickstart_is_a_complete_cpu_config():
    cfg = compose(OVERRIDES)
    cfg.run.dir = "somewhere"
    OmegaConf.resolve(cfg)
    rollout = cfg.actor_rollout_ref.rollout
    assert cfg.trainer.device == "cpu"
    assert rollout.max_model_len == cfg.data.max_prompt_length + cfg.data.max_response_length
    assert cfg.data.train_batch_size % cfg.actor_rollout_ref.actor.ppo_mini_batch_size == 0
    assert cfg.trainer.default_local_dir == "somewhere/checkpoints"
    assert rollout.dtype == "float32"
    assert cfg.actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype == "fp32"


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
    other = opened(tmp_path, "seed=7")
    in_use = opened(tmp_path)
    assert len({first.dir, other.dir, in_use.dir}) == 3
    for run in (first, other, in_use):
        run.close()


def test_explicit_directory_is_continued_whatever_the_settings(tmp_path):
    first = opened(tmp_path, f"run.dir={tmp_path}/mine")
    with pytest.raises(RuntimeError, match="in use"):
        opened(tmp_path, f"run.dir={tmp_path}/mine")
    first.finish()
    first.close()
    again = opened(tmp_path, f"run.dir={tmp_path}/mine", "trainer.total_training_steps=99")
    assert again.resumed and again.dir == first.dir
    again.close()


@pytest.mark.parametrize("written", ["4", ""])
def test_checkpoint_step_survives_a_tracker_cut_short(tmp_path, written):
    run = opened(tmp_path)
    assert run.checkpoint_step == 0
    checkpoints = run.dir / "checkpoints"
    for step in (2, 4):
        (checkpoints / f"global_step_{step}").mkdir(parents=True)
    (checkpoints / "latest_checkpointed_iteration.txt").write_text(written)
    assert run.checkpoint_step == 4
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "4"
    run.close()
