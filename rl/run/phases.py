"""The trainer's present phase (rollout, update, ...), noted in the run directory for readers (``rl.run.progress``).

``phase.json`` holds one ``Phase``. It is not synced to the disk: a stale phase does no harm.
"""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rollout import files


@dataclass(frozen=True)
class Phase:
    """A phase is what the trainer does in one part of a step.

    ``name`` is held-out, rollout, log-probs, update, checkpoint or sync. ``episodes`` is the number of episodes that
    the trainer waits for, 0 if it waits for none. ``since`` is a Unix time.
    """

    step: int
    name: str
    episodes: int
    since: float


def note(run_dir: Path, step: int, name: str, episodes: int = 0) -> None:
    """Write the phase that begins now."""
    files.write(run_dir / "phase.json", json.dumps(asdict(Phase(step, name, episodes, time.time()))))


def read(run_dir: Path) -> Phase | None:
    """Return the phase that was noted last; None if no trainer has started in this directory."""
    path = run_dir / "phase.json"
    return Phase(**json.loads(path.read_text())) if path.exists() else None
