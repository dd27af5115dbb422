"""This module makes everything that ``+experiment=realcode`` trains on: tasks of packages, a policy, its warm start.

It is the quickstart's preparation with other parts: rl.quickstart.prepare says how it goes on after a kill.

    python -m rl.realcode.prepare [key=value ...]

makes it without training on it. The keys are those of rl.train.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from rewards.task import Task, load_tasks
from rl.quickstart import prepare as quickstart
from rl.quickstart.prepare import Course, Script, prepared, sources_in
from rl.realcode import policy
from rl.realcode.script import TryingScript
from rl.realcode.tasks import make_tasks
from rl.screen import Screen
from rollout import program


def prepare(config: DictConfig, screen: Screen) -> dict[str, Any]:
    """Make what is missing; see ``rl.quickstart.prepare.prepared``. Raises MakeError, SandboxError, RuntimeError."""
    return prepared(REALCODE, config, screen)


def _make_tasks(config: DictConfig, out: Path, screen: Screen) -> None:
    quick, real = config.quickstart, config.realcode
    screen.say(f"making tasks of {len(real.train)} + {len(real.heldout)} packages")
    packages = Path(config.run.root).resolve() / "prepared" / "packages"
    counts = quick.train_tasks, quick.heldout_tasks
    make_tasks(out, config.seed, list(real.train), list(real.heldout), counts, packages, screen.say)


def _make_policy(config: DictConfig, tasks: Path, out: Path) -> None:
    policy.make(out, config.seed, load_tasks(tasks / "train.parquet"))


def _scripts(seed: int, tasks: list[Task]) -> list[Script]:
    return [TryingScript(f"{seed}:{number}") for number in range(len(tasks))]


_HERE = Path(__file__).parent
_BASE = sources_in(Path(quickstart.__file__).parent)
REALCODE = Course("realcode", _make_tasks, _make_policy, _scripts, (*sources_in(_HERE), *_BASE))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    program.end(lambda: quickstart.main(REALCODE, "rl.realcode.prepare"))
