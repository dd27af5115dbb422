"""What a trainer is doing now, in its run directory, for whoever looks (``rl.run.progress``).

``phase.json`` holds one ``Phase``. It is not synced to the disk: a stale one harms nobody.
"""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rollout import files


@dataclass(frozen=True)
class Phase:
    """``name``: held-out, rollout, log-probs, update, checkpoint or sync. ``episodes``: how many it waits for, 0 if it
    waits for none. ``since``: Unix time."""

    step: int
    name: str
    episodes: int
    since: float


def note(run_dir: Path, step: int, name: str, episodes: int = 0) -> None:
    files.write(run_dir / "phase.json", json.dumps(asdict(Phase(step, name, episodes, time.time()))))


def read(run_dir: Path) -> Phase | None:
    """None: no trainer has begun yet."""
    path = run_dir / "phase.json"
    return Phase(**json.loads(path.read_text())) if path.exists() else None


class Phases:
    """Mix-in before a ``PPOTrainer`` subclass that notes its phases. Needs ``run_dir``."""

    run_dir: Path

    def _phase(self, name: str, episodes: int = 0) -> None:
        note(self.run_dir, self.global_steps, name, episodes)

    def on_validate_begin(self):
        self._phase("held-out", len(self.val_dataset) * self.config.actor_rollout_ref.rollout.val_kwargs.n)
        super().on_validate_begin()

    def on_sample_begin(self):
        groups = self.config.data.train_batch_size // self.parameter_sync_step
        self._phase("rollout", groups * self.config.actor_rollout_ref.rollout.n)
        super().on_sample_begin()

    def on_sample_end(self):
        self._phase("log-probs")
        super().on_sample_end()

    def _update_actor(self, batch, metrics: dict):
        self._phase("update")
        return super()._update_actor(batch, metrics)

    def _save_checkpoint(self):
        self._phase("checkpoint")
        super()._save_checkpoint()

    def on_step_end(self):
        self._phase("sync")
        super().on_step_end()
