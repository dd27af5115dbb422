"""Runs that faults from outside end, one after the other, have to come out as one that had none.

All have one config with ``+repeat=exact`` and begin with the session's warm start. The unbroken one loses wandb's own
process, which ends nothing, takes two steps, then Ray's own process dies. The broken one has no disk for the checkpoint
of its second step, and is warned while it plays that step's episodes again: it ends within seconds. Then it plays those
that are missing, and loses its engine's server in the step after. What else ends a run is tested elsewhere: the trainer
killed (test_train.py), its worker or a rollout worker killed (test_experiments.py), a signal (test_slurm.py), an
engine's process killed (test_vllm_server.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from rl.metrics.episodes import read_jsonl
from rl.run import checkpoints
from rl.run.checkpoints import TRACKER
from rl.train import unfinished
from rollout import audit
from tests.integration.process_kit import one_line, until
from tests.integration.train_kit import TINY, RunProcess, WarmStart
from tests.lacks import lacks

pytestmark = [
    pytest.mark.claude,
    pytest.mark.engine,
    pytest.mark.timeout(4800),
]
EPISODES = 8  # of a step: two tasks with four episodes

EXACT = [
    "+repeat=exact",
    "agent.timeout_s=600",  # the one thing that a busy machine could change
    "trainer.total_training_steps=4",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.save_freq=1",
    # The rewards of a group may all be equal: something that moves the weights.
    "actor_rollout_ref.actor.entropy_coeff=0.01",
]
# What a step's numbers are, without times and memory.
NUMBERS = re.compile(
    r"actor/(?!perf)|critic/|training/|rollout_corr/|response|prompt_length|num_turns|global_seqlen|failure/|infra/"
    r"|episode/(count|resolve_rate|reward_mean|rows|tokens_|turns)"
)


def leaked(since: float) -> set[str]:
    """Shared memory with weights that was made after ``since`` (seconds since the epoch) and that no process has any
    more. Other tests' runs and servers go on beside this one: what is theirs is there in one look, and held or gone in
    the next."""
    found = _unheld(since)
    for _ in range(20):
        if found:
            time.sleep(0.5)
            found &= _unheld(since)
    return found


def _unheld(since: float) -> set[str]:
    held = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            held += maps.read_text()
    made = set()
    for file in Path("/dev/shm").glob("verl_weights_*"):
        with contextlib.suppress(FileNotFoundError):
            if file.stat().st_ctime > since:
                made.add(file)
    return {str(file) for file in made if str(file) not in held}


def metrics(run: Path, step: int) -> dict[str, float]:
    (record,) = [
        r for line in (run / "metrics.jsonl").read_text().splitlines() if (r := json.loads(line))["step"] == step
    ]
    return {key: value for key, value in record.items() if NUMBERS.match(key)}


def run(directory: Path, warm_start: WarmStart, *more: str) -> RunProcess:
    arguments = [argument for argument in TINY if not argument.startswith("quickstart.")]
    arguments += [*warm_start.given(), *EXACT, f"run.dir={directory}", *more]
    return RunProcess(directory, "+experiment=quickstart", *arguments)


@pytest.fixture(scope="module")
def unbroken(warm_start: WarmStart, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of at least two steps, at the end of which Ray's own process dies."""
    began = time.time()
    process = run(tmp_path_factory.mktemp("unbroken") / "run", warm_start)
    process.until("step 1/4  resolved")
    process.find("wandb-core").kill()
    # Which of the next figures finds no process depends on what the system has taken of them before.
    lost, step = "wandb failed and gets nothing more; the run goes on", 2
    if lost not in process.until("step 2/4  resolved"):
        step = 3
        assert lost in process.until("step 3/4  resolved")
    process.find("src/ray/raylet/raylet").kill()
    said, code = process.ends()
    assert f"the same command continues after step {step}" in one_line(said) and code != 0
    assert not leaked(began)
    return process.dir


def logs(directory: Path) -> set[Path]:
    """The files with the lines of episodes; each start has its own."""
    return set((directory / "episode_metrics").glob("*.jsonl"))


def played(directory: Path, step: int, without: set[Path]) -> list[dict[str, Any]]:
    """The lines of a step's training episodes that count, of starts that made other files than these."""
    lines = [line for file in logs(directory) - without for line in read_jsonl(file)]
    return [line for line in lines if line["step"] == step and line["split"] == "train"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Generator[Path]:
    """A file system of 32 MB, for the checkpoints of the broken run."""
    if os.geteuid() != 0:
        lacks("root: a full disk is mounted")
    place = tmp_path / "broken" / "checkpoints"
    place.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "none", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


def test_a_run_that_is_broken_again_and_again_comes_out_as_one_that_is_not(
    warm_start: WarmStart, unbroken: Path, tmp_path: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.time()
    broken = run(tmp_path / "broken", warm_start)
    broken.until("step 1/4  resolved")
    until(broken.process, lambda: checkpoints.newest(small_disk) == 1)
    balloon = small_disk / "balloon"
    free = shutil.disk_usage(small_disk).free
    balloon.write_bytes(bytes(free - 2**20))
    said, code = broken.ends(within=600)
    assert "the checkpoint of step 2 could not be written with" in one_line(said) and code == 1
    assert "the same command continues after step 1" in said and f"{broken.dir}/run.log" in said
    assert [place.name for place in small_disk.glob("global_step_*")] == ["global_step_1"]

    balloon.unlink()
    # As a process leaves it that is killed while it saves.
    shutil.copytree(small_disk / "global_step_1" / "actor", small_disk / "global_step_2" / "actor")
    (small_disk / TRACKER).write_text("")
    warned = run(tmp_path / "broken", warm_start)
    begun = warned.until("starting trainer")
    assert "removed the checkpoint of step 2" in begun and "continuing from step 1" in begun
    before = logs(warned.dir)
    until(warned.process, lambda: len(played(warned.dir, 2, before)) >= 3)
    warned.process.send_signal(signal.SIGUSR1)
    said, code = warned.ends()
    assert code == 75 and "stopped by SIGUSR1 after step 1; the same command continues" in said, said
    kept = int(re.findall(r"step 2: (\d+) episodes are done and kept", said)[0])
    assert 0 < kept < EPISODES, "it has waited for the rollout"
    assert unfinished.count(warned.dir, 1) == kept
    assert checkpoints.newest(small_disk) == 1

    broken = run(tmp_path / "broken", warm_start)
    assert "continuing from step 1" in broken.until("starting trainer")
    so_far = logs(broken.dir)
    broken.until("step 2/4  resolved")
    assert len(played(broken.dir, 2, so_far)) == EPISODES - kept
    lines = played(broken.dir, 2, before)
    assert len(lines) == EPISODES == len({line["session"] for line in lines})
    broken.in_a_step()
    broken.find("ray::CPUHttpServer").kill()
    said, code = broken.ends()
    # A busy machine may find that the server does not answer long before Ray says which process has ended.
    assert re.search(r"(CPUHttpServer|the inference server at) .*died", one_line(said)) and code == 1
    assert "the same command continues after step 2" in said

    assert len(metrics(broken.dir, 2)) > 50
    for step in (1, 2):
        assert metrics(broken.dir, step) == metrics(unbroken, step)
    assert metrics(broken.dir, 2)["actor/grad_norm"] > 0
    assert audit.main([str(broken.dir)]) == 0 and "ok:" in capsys.readouterr().out
    assert not leaked(began)
