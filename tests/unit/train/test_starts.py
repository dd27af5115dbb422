"""A requeued run without progress ends, what SLURM says of the job is read, and a foreign Ray is left alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rl.run import slurm
from rl.run.checkpoints import seal
from rl.run.directory import RunDirectory
from rl.train import __main__ as train
from rl.train import starts, unfinished
from rollout.records import RecordWriter
from tests.check_kit import composed
from tests.unit.view.test_index import record


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    (tmp_path / "run.json").write_text('{"key": "", "started": 1.0}')
    return RunDirectory(tmp_path, tmp_path / "checkpoints", True, open(tmp_path / "run.lock", "w"))


def start(run: RunDirectory, requeued: bool, prepared: Path | None = None) -> None:
    """Start the job again, or by hand."""
    number = starts.following(run.dir, "7") if requeued else 0
    starts.note(run, "7", number, prepared)


def save(run: RunDirectory, step: int) -> None:
    (run.checkpoints / f"global_step_{step}").mkdir(parents=True)
    seal(run.checkpoints, step)


def test_two_starts_without_progress_end_the_third_with_what_to_do(run: RunDirectory) -> None:
    start(run, requeued=False)
    start(run, requeued=True)
    with pytest.raises(starts.NoProgress, match=r"stays at its beginning; give .*--time.*run.save_minutes") as caught:
        start(run, requeued=True)
    assert "\n" not in str(caught.value) and str(run.dir) in str(caught.value)
    with pytest.raises(starts.NoProgress):
        start(run, requeued=True)
    start(run, requeued=False)  # by hand it starts, and counts anew
    start(run, requeued=True)
    with pytest.raises(starts.NoProgress):
        start(run, requeued=True)


def test_a_checkpoint_or_a_kept_episode_is_progress_and_a_step_that_was_not_saved_is_none(run: RunDirectory) -> None:
    def kept(after: int, *sessions: str) -> None:
        group = unfinished.DrawnGroup("u", 3, "running", list(sessions))
        unfinished.write(run.dir, unfinished.UnfinishedStep(after, [group]), lambda _: [])

    for requeued in (False, True):
        start(run, requeued)
    save(run, 2)
    for _ in range(2):
        start(run, requeued=True)
    kept(2, "u_0")
    for _ in range(2):
        start(run, requeued=True)
    kept(2, "u_0", "u_1")
    start(run, requeued=True)
    (run.dir / "metrics.jsonl").write_text('{"step": 3}\n')
    start(run, requeued=True)
    with pytest.raises(starts.NoProgress, match="stays at step 2"):
        start(run, requeued=True)
    kept(1, "u_0", "u_1", "u_2")  # of another checkpoint: nobody will use it
    start(run, requeued=True)
    assert len(json.loads((run.dir / "starts.json").read_text())) == 3


def test_an_image_that_a_node_has_pulled_is_progress(run: RunDirectory) -> None:
    def pulled(node: str, images: int) -> None:
        (run.dir / "logs" / node).mkdir(parents=True, exist_ok=True)
        (run.dir / "logs" / node / starts.IMAGES).write_text(f"{images}\n")

    pulled("n1", 3)
    for requeued in (False, True):
        start(run, requeued)
    pulled("n2", 1)
    for _ in range(2):
        start(run, requeued=True)
    with pytest.raises(starts.NoProgress):
        start(run, requeued=True)


def test_what_a_preparation_keeps_is_progress(run: RunDirectory, tmp_path: Path) -> None:
    """Scripted episodes that ended, and passes of the imitation; not an episode that failed and is played again."""
    making = tmp_path / "prepared" / "quickstart-1-0" / ".warm"

    def play(name: str, outcome: str) -> None:
        writer = RecordWriter(making / "episodes", name)
        writer.append(msgspec.structs.replace(record(1), verdict={"outcome": outcome}))
        writer.close()

    def save_pass(step: int) -> None:
        tracker = making / "model.sft" / "checkpoints" / "latest_checkpointed_iteration.txt"
        tracker.parent.mkdir(parents=True, exist_ok=True)
        tracker.write_text(str(step))

    def again() -> None:
        start(run, True, tmp_path / "prepared")

    start(run, False, tmp_path / "prepared")
    again()
    for made in (
        lambda: play("a", "resolved"),
        lambda: play("b", "unresolved"),
        lambda: save_pass(8),
        lambda: save_pass(16),
        lambda: making.rename(making.with_name("warm")),
    ):
        made()
        again()
        again()
        with pytest.raises(starts.NoProgress):
            again()
    making.mkdir()
    (making / "episodes").mkdir()
    again()
    again()
    play("c", "infra_failure")
    with pytest.raises(starts.NoProgress):
        again()


def test_starts_that_noted_nothing_count_and_those_of_other_jobs_do_not(run: RunDirectory) -> None:
    starts.note(run, "7", 0)
    save(run, 2)
    starts.check(run, "7", 2)  # the first start got on, the second noted nothing
    with pytest.raises(starts.NoProgress, match=r"the last 2 starts of .* stays at step 2"):
        starts.check(run, "7", 3)
    starts.note(run, "7", 2)
    save(run, 4)
    starts.note(run, "7", 3)
    starts.note(run, "7", 4)
    with pytest.raises(starts.NoProgress, match="the last 3 starts"):  # SLURM has started it once more
        starts.note(run, "7", 6)
    starts.check(run, "8", 1)
    with pytest.raises(starts.NoProgress, match=r"the last 2 starts of .* stays at step 4"):
        starts.check(run, "8", 2)


def test_starts_by_hand_are_never_held(run: RunDirectory) -> None:
    for _ in range(5):
        start(run, requeued=False)


def test_whether_a_job_was_requeued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    assert not slurm.is_requeued()
    for count, requeued in (("0", False), ("1", True), ("12", True)):
        monkeypatch.setenv("SLURM_RESTART_COUNT", count)
        assert slurm.is_requeued() is requeued


@pytest.mark.parametrize(
    ("said", "variable", "expected"),
    [
        ("2031-05-06T07:08:09\n", None, "2031-05-06T07:08:09"),
        ("2031-05-06T07:08:09\n", "1", "2031-05-06T07:08:09"),  # a changed limit counts
        ("N/A\n", None, None),
        ("", "1000000000", 1e9),
        ("exit 1", "1000000000", 1e9),
        (None, "1000000000", 1e9),  # no squeue here
        (None, None, None),
    ],
)
def test_the_end_of_the_job(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: str | None,
    variable: str | None,
    expected: str | float | None,
) -> None:
    """squeue is a script here; the real one is asked in tests/integration/cluster/test_slurm.py."""
    if said is not None:
        script = said if said.startswith("exit") else f"[ $2 = --jobs=17 ] && printf '{said}'"
        (tmp_path / "squeue").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin" if said is not None else str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    if variable is not None:
        monkeypatch.setenv("SLURM_JOB_END_TIME", variable)
    end = slurm.job_end()
    if isinstance(expected, str):
        assert end is not None and time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(end)) == expected
    else:
        assert end == expected
    monkeypatch.delenv("SLURM_JOB_ID")
    assert slurm.job_end() is None


@pytest.mark.parametrize(("lease", "ends"), [(None, "noted"), ("token", "trains")])
def test_the_trainer_of_a_job_leaves_the_count_to_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lease: str | None, ends: str
) -> None:
    """By what is called first: the note, or what comes behind it."""

    def called(name: str) -> Any:
        def call(*_: Any, **__: Any) -> None:
            raise InterruptedError(name)

        return call

    monkeypatch.setattr(sys, "argv", ["rl.train", "+experiment=quickstart", f"run.root={tmp_path}"])
    monkeypatch.setattr(train, "check_all", lambda *_: None)
    monkeypatch.setattr(starts, "note", called("noted"))
    monkeypatch.setattr(train.checkpoints, "tidy", called("trains"))
    if lease is not None:
        monkeypatch.setenv("RL_RUN_LEASE", lease)
    with pytest.raises(InterruptedError, match=ends):
        train.main()


@pytest.mark.parametrize("address", [None, "10.0.0.1:6379"])
def test_only_a_ray_of_its_own_gets_a_token_from_a_run(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, address: str | None
) -> None:
    """A cluster that is there has its own, or none."""
    monkeypatch.setattr(os, "environ", {"RAY_ADDRESS": address} if address else {})
    train.set_environment(composed("+experiment=quickstart"), run)
    assert ("RAY_AUTH_TOKEN" in os.environ) == (address is None)


def test_runs_of_the_same_name_are_not_one_in_wandb(tmp_path: Path) -> None:
    """Runs in RUN/grpo and OTHER/grpo were, and so were the steps of both."""
    names = []
    for place in ("a", "b"):
        (tmp_path / place / "grpo").mkdir(parents=True)
        started = {"key": "", "started": 1e9 + len(names)}
        (tmp_path / place / "grpo" / "run.json").write_text(json.dumps(started))
        names.append(RunDirectory(tmp_path / place / "grpo", tmp_path, False, None).name)  # type: ignore[arg-type]
    assert names == ["grpo-1000000000000", "grpo-1000000001000"]


def test_to_validate_only_is_not_to_train(run: RunDirectory) -> None:
    """verl looks at val_only only where it validates before the first step."""
    config = composed("+experiment=quickstart", run__dir=str(run.dir), trainer__val_only=True)
    save(run, 4)
    train.complete(config, run, "/ray")
    assert config.trainer.val_before_train


def test_a_start_imports_nothing_that_takes_long() -> None:
    """The config is checked and signals are heard before. The nodes of a cluster import the same module of starts."""
    code = "import sys, rl.train.__main__; print(*{'torch', 'ray', 'verl', 'vllm', 'docker'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert (run.returncode, run.stdout.strip()) == (0, ""), run.stderr
