"""What ends a run from outside, one fault after the other on the same run; it has to come out as one that had none.

Two runs of one config with ``+repeat=exact`` and one warm start. The unbroken one goes through two steps, then Ray's
own process dies. The broken one loses a rollout worker and an engine in its second step, has no disk for the checkpoint
of it, gets through, and is told to end in the third. A third run loses its engine's server and the trainer's worker in
its first step.
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

import psutil
import pytest

from rl.run.checkpoints import TRACKER
from tests.integration.test_train import read_until, start

RUN = [
    "+repeat=exact",
    "agent.timeout_s=600",  # the one thing that a busy machine could change
    "trainer.total_training_steps=4",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.save_freq=1",
    # The policy is too weak to be rewarded: something that moves the weights.
    "actor_rollout_ref.actor.entropy_coeff=0.01",
]
# A fault is told within the watch's period, what an engine may take to answer, and Ray's own end; on a busy machine
# that is minutes.
TOLD_S = 600
# What a step's numbers are, without times and memory.
NUMBERS = re.compile(
    r"actor/(?!perf)|critic/|training/|rollout_corr/|response|prompt_length|num_turns|global_seqlen|failure/|infra/"
    r"|episode/(count|resolve_rate|reward_mean|rows|tokens_|turns)"
)


class Started:
    """A process of ``rl.train`` and the processes that it has started."""

    def __init__(self, root: Path, name: str) -> None:
        self.dir = root / name
        self.process = start(root, *RUN, f"run.dir={self.dir}")
        self.seen: set[psutil.Process] = set()

    def until(self, words: str) -> str:
        return read_until(self.process, words)

    def children(self) -> set[psutil.Process]:
        self.seen |= set(psutil.Process(self.process.pid).children(recursive=True))
        return self.seen

    def in_a_step(self) -> None:
        """Returns when agents are at work."""
        self.find("/claude")

    def find(self, words: str) -> psutil.Process:
        """The process whose command line has ``words``, when there is one."""
        end = time.monotonic() + 900
        while time.monotonic() < end and self.process.poll() is None:
            for child in sorted(self.children(), key=lambda child: child.pid):  # before what it has forked
                if words in _command(child):
                    return child
            time.sleep(0.1)
        code = self.process.poll()
        self.process.kill()
        raise AssertionError(f"no process {words!r}; the run's code: {code}")

    def ends(self, within: float = TOLD_S) -> tuple[str, int]:
        """What is still said, and the exit code; nothing may be left of the run."""
        self.children()
        scratch = (self.dir / "ray_dir").read_text()
        try:
            said, _ = self.process.communicate(timeout=within)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        end = time.monotonic() + 120
        while left := [_command(child) for child in self.seen if child.is_running() and _command(child)]:
            assert time.monotonic() < end, f"left behind: {left}"
            time.sleep(0.2)
        assert not Path(scratch).exists(), f"left behind: {scratch}"
        return said, self.process.returncode


def _command(process: psutil.Process) -> str:
    """The command line; "" of one that has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def leaked(since: float) -> list[str]:
    """Shared memory with weights that was made after ``since`` (seconds since the epoch) and that no process has any
    more. Other tests' vLLM servers run beside this one, and leave some of another kind."""
    held = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            held += maps.read_text()
    made = [file for file in Path("/dev/shm").glob("verl_weights_*") if file.stat().st_ctime > since]
    return [str(file) for file in made if str(file) not in held]


def one_line(said: str) -> str:
    """The one line that is no event and no useful command."""
    (line,) = [line for line in said.splitlines() if line and not re.match(r"\[|continue ", line)]
    return line


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


@pytest.mark.claude
@pytest.mark.engine
@pytest.mark.xdist_group("trainers-2")
@pytest.mark.timeout(4800)
def test_a_run_that_is_broken_again_and_again_comes_out_as_one_that_is_not(tmp_path: Path, small_disk: Path) -> None:
    began = time.time()
    unbroken = Started(tmp_path, "unbroken")
    unbroken.until("step 2/4  resolved")
    unbroken.find("src/ray/raylet/raylet").kill()
    said, code = unbroken.ends()
    assert "the same command continues after step 2" in one_line(said) and code != 0

    broken = Started(tmp_path, "broken")
    broken.until("step 1/4  resolved")
    broken.in_a_step()
    broken.find("ray::AgentLoopWorker").kill()
    said, code = broken.ends()
    assert "AgentLoopWorker" in one_line(said) and "died" in said and code == 1
    assert "the same command continues after step 1" in said and f"{broken.dir}/run.log" in said

    broken = Started(tmp_path, "broken")
    assert "continuing from step 1" in broken.until("starting trainer")
    broken.in_a_step()
    broken.find("VLLM::EngineCore").kill()
    said, code = broken.ends()
    assert "the inference server at" in one_line(said) and "died" in said and code == 1

    # As a process leaves it that is killed while it saves.
    shutil.copytree(small_disk / "global_step_1" / "actor", small_disk / "global_step_2" / "actor")
    (small_disk / TRACKER).write_text("")
    broken = Started(tmp_path, "broken")
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
    broken = Started(tmp_path, "broken")
    broken.until("step 2/4  resolved")
    broken.process.send_signal(signal.SIGTERM)
    said, code = broken.ends()
    assert "stopped by SIGTERM after step" in said.strip().splitlines()[-2] and code == 75

    assert len(metrics(tmp_path / "broken", 2)) > 50
    for step in (1, 2):
        assert metrics(tmp_path / "broken", step) == metrics(tmp_path / "unbroken", step)
    assert metrics(tmp_path / "broken", 2)["actor/grad_norm"] > 0
    assert not leaked(began)


@pytest.mark.claude
@pytest.mark.engine
@pytest.mark.xdist_group("trainers-1")
@pytest.mark.timeout(2400)
def test_a_server_and_a_worker_of_the_trainer(tmp_path: Path) -> None:
    # A busy machine may find that the server does not answer long before Ray says which process has ended.
    for name, words in ("CPUHttpServer", r"CPUHttpServer|the inference server at"), ("WorkerDict", "WorkerDict"):
        run = Started(tmp_path, "run")
        run.until("starting trainer")
        run.in_a_step()
        run.find(f"ray::{name}").kill()
        said, code = run.ends()
        assert re.search(f"({words}) .*died", one_line(said)) and code == 1
        assert "the same command continues from the start" in said
