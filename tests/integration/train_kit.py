"""This module has real training runs for tests: the smallest quickstart, how it is started, and the warm start that all
share.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pyarrow
import pyarrow.parquet
import pytest
from filelock import FileLock

from rl.config.compose import compose
from rl.quickstart.prepare import directory_of
from tests.integration.process_kit import ROOT, command_line, plain_environment, read_until

# The warm start depends on these, on the seed, and on the groups `agent` and `proxy`. They are those of scale=tiny.
WARM = [
    "seed=30",
    "quickstart.train_tasks=4",
    "quickstart.heldout_tasks=2",
    "quickstart.warm_episodes=8",
    "quickstart.sft.epochs=30",
    "quickstart.sft.batch_size=4",
]
TINY = [
    *WARM,
    "actor_rollout_ref.rollout.n=4",
    "data.train_batch_size=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=1",
    "trainer.total_training_steps=2",
    "trainer.save_freq=1",
    "episode.infra_retries=1",
    "trainer.logger=[wandb,tensorboard]",
]
# A fault is told within the watch's period, what an engine may take to answer, and Ray's own end; on a busy machine
# that is minutes.
TOLD_S = 600


@dataclass(frozen=True)
class WarmStart:
    """A warm-started policy and its tasks, made by the quickstart's own ``prepare`` under ``root``."""

    root: Path

    @classmethod
    def make(cls, root: Path, *more: str) -> WarmStart:
        """Prepare the quickstart at its smallest; what is there already is used."""
        command = [sys.executable, "-m", "rl.quickstart.prepare", *WARM, *more, f"run.root={root}"]
        subprocess.run(command, cwd=ROOT, env=plain_environment(), check=True)
        return cls(root)

    @property
    def directory(self) -> Path:
        """The one directory below ``prepared``: tasks/, policy/ and warm/."""
        (found,) = (self.root / "prepared").iterdir()
        return found

    def given(self) -> list[str]:
        """Return overrides by which a run takes model and tasks from here and prepares nothing itself."""
        tasks = self.directory / "tasks"
        return [
            "prepare=null",
            "~quickstart",
            f"data.train_files=[{tasks / 'train.parquet'}]",
            f"data.val_files=[{tasks / 'heldout.parquet'}]",
            f"actor_rollout_ref.model.path={self.directory / 'warm' / 'model'}",
        ]

    def lend_to(self, root: Path, *command: str) -> None:
        """Let a run with this command and ``root`` as its run.root find this one, or, if its policy is another, tasks
        and episodes. It then imitates these itself: they do not depend on the policy."""
        own = compose(["+experiment=quickstart", *WARM])
        others = compose([*command, f"run.root={root}"])
        assert all(own[name] == others[name] for name in ("seed", "agent", "proxy"))
        sizes = ("train_tasks", "heldout_tasks", "warm_episodes")
        assert all(own.quickstart[name] == others.quickstart[name] for name in sizes)
        theirs = directory_of(others)
        if theirs.name == self.directory.name:
            shutil.copytree(self.directory, theirs, symlinks=True)
            return
        shutil.copytree(self.directory / "tasks", theirs / "tasks", symlinks=True)
        (theirs / ".warm").mkdir()
        shutil.copy(self.directory / "warm" / "rows.parquet", theirs / ".warm")


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Start ``python -m rl.train`` with these arguments; its output is read through the pipe."""
    command = [sys.executable, "-m", "rl.train", *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=plain_environment() | environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip


def replace_image(file: Path, image: str, instance_id: str | None = None) -> None:
    """Give one task of a parquet file (the first, unless it is named) another image."""
    rows = pyarrow.parquet.read_table(file)
    names, images = rows["instance_id"].to_pylist(), rows["image"].to_pylist()
    images[names.index(instance_id) if instance_id else 0] = image
    rows = rows.set_column(rows.column_names.index("image"), "image", [images])
    pyarrow.parquet.write_table(rows, file.with_suffix(".new"))
    file.with_suffix(".new").replace(file)


class RunProcess:
    """A process of ``rl.train`` that writes to ``run_dir``, and the processes that it has started."""

    def __init__(self, run_dir: Path, *arguments: str) -> None:
        self.dir = run_dir
        self.process = start(*arguments)
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
                if words in command_line(child):
                    return child
            time.sleep(0.1)
        code = self.process.poll()
        self.process.kill()
        raise AssertionError(f"no process {words!r}; the run's code: {code}")

    def ends(self, within: float = TOLD_S) -> tuple[str, int]:
        """Return what is still said, and the exit code; nothing may be left of the run."""
        self.children()
        scratch = (self.dir / "ray_dir").read_text()
        try:
            said, _ = self.process.communicate(timeout=within)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        end = time.monotonic() + 120
        while left := [command_line(child) for child in self.seen if child.is_running() and command_line(child)]:
            assert time.monotonic() < end, f"left behind: {left}"
            time.sleep(0.2)
        assert not Path(scratch).exists(), f"left behind: {scratch}"
        return said, self.process.returncode


@pytest.fixture(scope="session")
def warm_start(tmp_path_factory: pytest.TempPathFactory) -> WarmStart:
    """The one warm start of a test session. The first worker that wants it makes it, the others wait."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with FileLock(shared / "warm.lock"):
        return WarmStart.make(shared / "warm")
