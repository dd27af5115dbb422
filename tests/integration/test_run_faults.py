"""What ends a run from outside, one fault after the other on the same run; it has to come out as one that had none.

Two runs of one config with ``+repeat=exact`` from the session's warm start. The unbroken one takes two steps, then
Ray's own process dies. The broken one loses a rollout worker in its second step, has no disk for that step's checkpoint
when it goes on, gets through it the third time, and loses its engine's server in the step after. What else ends a run
is tested elsewhere: the trainer killed (test_train.py), its worker killed (test_experiments.py), a signal
(test_slurm.py), an engine's process killed (test_vllm_server.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from rl.run.checkpoints import TRACKER
from tests.integration.train_kit import TINY, RunProcess, WarmStart, one_line

EXACT = [
    "+repeat=exact",
    "agent.timeout_s=600",  # the one thing that a busy machine could change
    "trainer.total_training_steps=4",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.save_freq=1",
    # The policy is too weak to be rewarded: something that moves the weights.
    "actor_rollout_ref.actor.entropy_coeff=0.01",
]
# What a step's numbers are, without times and memory.
NUMBERS = re.compile(
    r"actor/(?!perf)|critic/|training/|rollout_corr/|response|prompt_length|num_turns|global_seqlen|failure/|infra/"
    r"|episode/(count|resolve_rate|reward_mean|rows|tokens_|turns)"
)


def leaked(since: float) -> list[str]:
    """Shared memory with weights that was made after ``since`` (seconds since the epoch) and that no process has any
    more. Other tests' vLLM servers run beside this one, and leave some of another kind."""
    held = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            held += maps.read_text()
    made = [file for file in Path("/dev/shm").glob("verl_weights_*") if file.stat().st_ctime > since]
    return [str(file) for file in made if str(file) not in held]


def metrics(run: Path, step: int) -> dict[str, float]:
    (record,) = [
        r for line in (run / "metrics.jsonl").read_text().splitlines() if (r := json.loads(line))["step"] == step
    ]
    return {key: value for key, value in record.items() if NUMBERS.match(key)}


@pytest.fixture
def small_disk(tmp_path: Path) -> Generator[Path]:
    """A file system of 32 MB, for the checkpoints of the broken run."""
    if os.geteuid() != 0:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("a full disk needs root: it is mounted")
    place = tmp_path / "broken" / "checkpoints"
    place.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "none", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


@pytest.mark.long
@pytest.mark.claude
@pytest.mark.engine
@pytest.mark.xdist_group("trainers-2")
@pytest.mark.timeout(4800)
def test_a_run_that_is_broken_again_and_again_comes_out_as_one_that_is_not(
    warm_start: WarmStart, tmp_path: Path, small_disk: Path
) -> None:
    def run(name: str) -> RunProcess:
        arguments = [argument for argument in TINY if not argument.startswith("quickstart.")]
        arguments += [*warm_start.given(), *EXACT, f"run.dir={tmp_path / name}"]
        return RunProcess(tmp_path / name, "+experiment=quickstart", *arguments)

    began = time.time()
    unbroken = run("unbroken")
    unbroken.until("step 2/4  resolved")
    unbroken.find("src/ray/raylet/raylet").kill()
    said, code = unbroken.ends()
    assert "the same command continues after step 2" in one_line(said) and code != 0

    broken = run("broken")
    broken.until("step 1/4  resolved")
    broken.in_a_step()
    broken.find("ray::AgentLoopWorker").kill()
    said, code = broken.ends()
    assert "AgentLoopWorker" in one_line(said) and "died" in said and code == 1
    assert "the same command continues after step 1" in said and f"{broken.dir}/run.log" in said

    # As a process leaves it that is killed while it saves.
    shutil.copytree(small_disk / "global_step_1" / "actor", small_disk / "global_step_2" / "actor")
    (small_disk / TRACKER).write_text("")
    broken = run("broken")
    begun = broken.until("starting trainer")
    assert "removed the checkpoint of step 2" in begun and "continuing from step 1" in begun
    balloon = small_disk / "balloon"
    free = shutil.disk_usage(small_disk).free
    balloon.write_bytes(bytes(free - 2**20))
    said, code = broken.ends(within=600)
    assert "the checkpoint of step 2 could not be written with" in one_line(said) and code == 1
    assert "the same command continues after step 1" in said
    assert [place.name for place in small_disk.glob("global_step_*")] == ["global_step_1"]

    balloon.unlink()
    broken = run("broken")
    assert "continuing from step 1" in broken.until("starting trainer")
    broken.until("step 2/4  resolved")
    broken.in_a_step()
    broken.find("ray::CPUHttpServer").kill()
    said, code = broken.ends()
    # A busy machine may find that the server does not answer long before Ray says which process has ended.
    assert re.search(r"(CPUHttpServer|the inference server at) .*died", one_line(said)) and code == 1
    assert "the same command continues after step 2" in said

    assert len(metrics(tmp_path / "broken", 2)) > 50
    for step in (1, 2):
        assert metrics(tmp_path / "broken", step) == metrics(tmp_path / "unbroken", step)
    assert metrics(tmp_path / "broken", 2)["actor/grad_norm"] > 0
    assert not leaked(began)
