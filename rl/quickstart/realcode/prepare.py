"""This module makes everything that ``+experiment=realcode`` trains on: tasks of packages, a policy, its warm start.

It is the quickstart's preparation with other parts: rl.quickstart.prepare says how it goes on after a kill.

    python -m rl.quickstart.realcode.prepare [key=value ...]

makes it without training on it. The keys are those of rl.train.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from rewards.task import Task
from rl.quickstart import prepare as quickstart
from rl.quickstart.policy import rendered
from rl.quickstart.prepare import Course, Row, Script, prepared, sources_in
from rl.quickstart.realcode import policy
from rl.quickstart.realcode.drills import TOOLS, Drills
from rl.quickstart.realcode.script import TryingScript
from rl.quickstart.realcode.tasks import make_tasks
from rl.screen import Screen
from rollout import program


def prepare(config: DictConfig, screen: Screen) -> dict[str, Any]:
    """Make what is missing; see ``rl.quickstart.prepare.prepared``. Raises MakeError, SandboxError, RuntimeError."""
    return prepared(REALCODE, config, screen)


def _make_tasks(config: DictConfig, out: Path, screen: Screen) -> None:
    quick, real = config.quickstart, config.realcode
    screen.say(f"making tasks of {len(real.train)} + {len(real.heldout)} packages")
    counts = quick.train_tasks, quick.heldout_tasks
    make_tasks(out, config.seed, list(real.train), list(real.heldout), counts, _packages(config), screen.say)


def _make_policy(config: DictConfig, tasks: Path, out: Path) -> None:
    drills = Drills.of(config.realcode.train, _packages(config))
    texts = (rendered(drills.messages(f"tokenizer {number}"), TOOLS) for number in range(_FOR_THE_TOKENIZER))
    policy.make(out, config.seed, [*texts, *drills.lines])


def _drills(config: DictConfig, tokenizer: Any) -> list[Row]:
    drills = Drills.of(config.realcode.train, _packages(config))
    return list(drills.rows(tokenizer, config.seed, config.realcode.drills))


def _packages(config: DictConfig) -> Path:
    return Path(config.run.root).resolve() / "prepared" / "packages"


def _scripts(seed: int, tasks: list[Task]) -> list[Script]:
    return [TryingScript(f"{seed}:{number}") for number in range(len(tasks))]


_FOR_THE_TOKENIZER = 1000  # drills
_HERE = Path(__file__).parent
_BASE = sources_in(Path(quickstart.__file__).parent)
_SOURCES = (*sources_in(_HERE), *_BASE)
REALCODE = Course("realcode", _make_tasks, _make_policy, _scripts, _SOURCES, _drills)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    program.end(lambda: quickstart.main(REALCODE, "rl.quickstart.realcode.prepare"))
