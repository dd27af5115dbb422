"""The config composes, and the same command finds its run again."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from rl.config.command import read_command
from rl.config.compose import CONFIGS, ConfigError, compose, cpu_training, workers_environment
from rl.quickstart.tasks import make_tasks
from rl.run.checkpoints import seal
from rl.run.directory import RunDirectory, open_run
from tests.check_kit import composed

OVERRIDES = ["+experiment=quickstart"]


def opened(tmp_path, **changes) -> RunDirectory:
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


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "+experiment=qwen3_9b",
            "there is no experiment 'qwen3_9b'; did you mean qwen3_5_9b? there are quickstart,",
        ),
        ("sandbox=dcker", "there is no sandbox 'dcker'; did you mean docker? there are docker, local, ssh"),
        ("experiment=quickstart", "nothing is chosen here yet; write +experiment=quickstart"),
        ("experimnt=quickstart", "there is no such key; did you mean +experiment=quickstart?"),
        ("+sandbox=docker", "sandbox has a choice already; leave out the +"),
        ("data.train_file=x", "there is no such key; did you mean data.train_files?"),
        ("save_freq=abc", "there is no such key; did you mean trainer.save_freq?"),
        ("optim.lr=1", "did you mean actor_rollout_ref.actor.optim.lr or critic.optim.lr?"),
        ("+data.seed=1", "the key is there; leave out the +"),
        ("~trainer.nope", "there is no such key"),
        ("trainer.save_freq=1,2", "this is several values; write a list as [a,b]"),
        ("quickstart", "write key=value; did you mean +experiment=quickstart?"),
        ("data.train_files=[a", "the value cannot be read ("),
        ("model_engine=torchtitan", "Could not find 'engine_defaults/torchtitan'"),
        ("hydra/foo=bar", ""),
    ],
)
def test_a_wrong_override_is_one_line(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([override])
    [line] = caught.value.lines
    assert "\n" not in line and (line.startswith(f"{override}: ") if said else line) and said in line


def told(*arguments: str, program: str = "rl.train") -> tuple[int, str, str]:
    command = [sys.executable, "-m", program, *arguments]
    done = subprocess.run(command, cwd=CONFIGS.parent, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_a_command_tells_all_that_is_wrong_with_it() -> None:
    """Overrides that Hydra would refuse, and values that it takes, with the lines of each."""
    wrong = ["data.train_file=x", "trainer.save_freq=abc", "actor_rollout_ref.actor.optim.lr=abc", "sandbox=dcker"]
    code, out, err = told("+experiment=quickstart", *wrong, "agent.max_turns=0")
    assert code == 2 and not out
    assert err.splitlines() == [
        "config: sandbox=dcker: there is no sandbox 'dcker'; did you mean docker? there are docker, local, ssh",
        "config: data.train_file=x: there is no such key; did you mean data.train_files?",
        "config: agent.max_turns is 0; it must be a number above 0",
        "config: actor_rollout_ref.actor.optim.lr is 'abc'; it must be a number",
        "config: trainer.save_freq is 'abc'; it must be a number",
    ]


@pytest.mark.parametrize("program", ["rl.plan", "rl.boxes", "rl.data.admit"])
def test_every_program_tells_its_wrong_overrides(program: str, tmp_path: Path) -> None:
    make_tasks(tmp_path, seed=5, n_train=1, n_heldout=1)
    tasks = {"rl.boxes": [f"{tmp_path}/train.parquet"]}
    tasks["rl.data.admit"] = [*tasks["rl.boxes"], "--out", f"{tmp_path}/a.parquet"]
    code, out, err = told(*tasks.get(program, []), "sandbox=dcker", "agent.max_turn=1", program=program)
    assert code == 2 and not out
    assert [line.split(": ", 1)[1].split(":")[0] for line in err.splitlines()] == ["sandbox=dcker", "agent.max_turn=1"]


def test_without_a_word_the_experiments_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, code in ([], 2), (["agent.max_turns=9"], 2), (["--help"], 0):
        with pytest.raises(SystemExit) as ended:
            read_command("rl.train", "Train a policy.", arguments)
        said = capsys.readouterr()
        text = said.out if code == 0 else said.err
        assert ended.value.code == code
        for file in (CONFIGS / "experiment").glob("*.yaml"):
            (told,) = re.findall(rf"^  {file.stem} +(.+(?:\n {{9,}}.+)*)", text, re.MULTILINE)  # long lines are folded
            assert len(told.split()) > 4 and told.endswith("."), told
    assert "sandbox=docker|local" in text and "Train a policy." in text
    for wrong in (["--cgf", "job"], ["--cfg", "hydra"], ["--cfg", "job", "--package", "trianer"]):
        with pytest.raises(SystemExit) as ended:
            read_command("rl.train", "Train a policy.", wrong)
        assert ended.value.code == 2 and capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["+experiment=qwen3_4b", "scale=tiny", "actor_rollout_ref.model.path=M"], "give policy=MODEL"),
        (["+experiment=quickstart", "data.train_files=[a]"], "with prepare=null policy=MODEL it takes yours"),
    ],
)
def test_what_a_run_would_make_anew_is_not_taken_silently(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        read_command("rl.train", "", given)
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and f"{given[-1]}: rl.quickstart.prepare:prepare makes this" in line and said in line
    read_command("rl.train", "", [*given, "prepare=null"])


def test_the_config_is_shown_with_our_groups_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read_command("rl.train", "", ["--cfg", "job", "+experiment=quickstart", "run.grace_s=7"])
    assert not ended.value.code
    shown = yaml.safe_load(capsys.readouterr().out)
    groups = {
        "agent",
        "allow_overlap",
        "cluster",
        "cpu_threads",
        "curriculum",
        "episode",
        "grading",
        "model_engine",
        "plan",
        "policy",
        "prepare",
    }
    groups |= {"proxy", "quickstart", "run", "sandbox", "seed", "sft", "store"}
    assert {*[*shown][: len(groups)]} == groups and "actor_rollout_ref" in shown
    assert shown["run"]["grace_s"] == 7
    with pytest.raises(SystemExit):
        read_command("rl.train", "", ["--cfg", "job", "--resolve", "-p", "data", "seed=5"])
    assert yaml.safe_load(capsys.readouterr().out)["seed"] == 5


def test_a_model_that_takes_all_cores_gives_large_tensors_back() -> None:
    large, toy = (
        cpu_training(compose([*keys, "actor_rollout_ref.model.path=m"]))
        for keys in (["+experiment=qwen2_5_coder_0_5b", "scale=cpu"], ["+experiment=quickstart"])
    )
    assert large["MALLOC_TRIM_THRESHOLD_"] == large["MALLOC_MMAP_THRESHOLD_"] == str(1 << 20)
    assert toy.keys() == large.keys() - {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"}


def test_the_time_of_collective_operations_is_in_the_workers_environment_if_the_config_sets_it() -> None:
    given, default = (workers_environment(compose(keys)) for keys in (["run.collective_timeout_s=7200"], []))
    assert given == {**default, "RL_COLLECTIVE_TIMEOUT_S": "7200"} and "RL_COLLECTIVE_TIMEOUT_S" not in default


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


def test_a_disk_that_can_hold_no_lease_is_one_line(tmp_path, monkeypatch):
    def link(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(RuntimeError, match=r"cannot lease the run directory: .*not permitted.*another disk"):
        opened(tmp_path)


def test_two_runs_do_not_share_a_directory_for_checkpoints(tmp_path):
    """The second one would go on from the first one's weights, and remove what that is writing."""
    large = {"trainer__default_local_dir": f"{tmp_path}/large"}
    first = opened(tmp_path, run__dir=f"{tmp_path}/one", **large)
    first.close()
    with pytest.raises(RuntimeError, match=rf"large has the checkpoints of {tmp_path}/one; give each run"):
        opened(tmp_path, run__dir=f"{tmp_path}/other", **large)
    opened(tmp_path, run__dir=f"{tmp_path}/one", **large).close()


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
