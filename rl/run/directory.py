"""The directory of a run: find the one to continue or make a new one, and hold it for one process.

Run directories are ``<run.root>/<trainer.experiment_name>/<date_time>``. Each holds ``run.json`` with a
key, the hash of the composed config without its groups ``run`` and ``store``. ``open_run`` continues the newest
unfinished directory with the same key, so the same command continues after a crash from the last
checkpoint; a finished run (file ``done``) or one that is in use by another process (``rl.run.lease``)
is left alone and a new directory is made. An explicit ``run.dir`` is used as it is, whatever it contains.
"""

import contextlib
import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from rl.config.compose import unresolved
from rl.run.checkpoints import newest
from rl.run.lease import InUse, RunLease
from rollout import files


@dataclass
class RunDirectory:
    """An open run directory. ``close`` ends its ``lease``; call ``lease.renew`` when there may be threads."""

    dir: Path
    checkpoints: Path
    resumed: bool
    lease: RunLease

    @property
    def name(self) -> str:
        """Return a name that no other run has, wherever its directory is."""
        started = json.loads((self.dir / "run.json").read_text())["started"]
        return f"{self.dir.name}-{started * 1000:.0f}"

    @property
    def checkpoint_step(self) -> int:
        """Return the step of the newest complete checkpoint, 0 if there is none."""
        return newest(self.checkpoints)

    def finish(self) -> None:
        """Mark the run as finished: the same command then starts a new run."""
        (self.dir / "done").touch()

    def close(self) -> None:
        """Release the directory."""
        self.lease.release()


def _key(config: DictConfig) -> str:
    decides = {group: value for group, value in unresolved(config).items() if group not in ("run", "store")}
    return hashlib.sha256(json.dumps(decides, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _read_key(directory: Path) -> str | None:
    path = directory / "run.json"
    return json.loads(path.read_text())["key"] if path.exists() else None


def open_run(config: DictConfig) -> RunDirectory:
    """Find or make the run directory, take its lease, and set ``config.run.dir`` to its absolute path.

    Raises:
        RuntimeError: an explicit ``run.dir`` is in use by another process (InUse), the disk can hold no lease, or the
            directory for checkpoints is another run's.
    """
    key = _key(config)
    if config.run.dir:
        directory = Path(config.run.dir).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        return _opened(config, directory, key)

    parent = Path(config.run.root).resolve() / config.trainer.experiment_name
    found = sorted((d for d in parent.iterdir() if d.is_dir()), reverse=True) if parent.is_dir() else []
    for directory in found:
        if _read_key(directory) == key and not (directory / "done").exists():
            with contextlib.suppress(InUse):
                return _opened(config, directory, key)
    return _opened(config, _make(parent, time.strftime("%Y-%m-%d_%H-%M-%S")), key)


def _make(parent: Path, name: str) -> Path:
    """Make a new directory; a number is added to the name if another run started in the same second."""
    directory, number = parent / name, 1
    while True:
        try:
            directory.mkdir(parents=True)
            return directory
        except FileExistsError:
            number += 1
            directory = parent / f"{name}_{number}"


def _opened(config: DictConfig, directory: Path, key: str) -> RunDirectory:
    """Take the lease of a directory, and make it the config's. Raises RuntimeError (InUse)."""
    lease = RunLease(directory)
    lease.take()
    resumed = _read_key(directory) is not None
    config.run.dir = str(directory)
    saved = Path(config.trainer.default_local_dir).resolve()
    if not saved.is_relative_to(directory):  # such as on another disk
        saved.mkdir(parents=True, exist_ok=True)
        owner = saved / "run"
        if owner.exists() and (other := owner.read_text().strip()) != str(directory):
            raise RuntimeError(
                f"trainer.default_local_dir: {saved} has the checkpoints of {other}; give each run a directory of its "
                f"own (if that run was moved to {directory}, remove {owner})"
            )
        files.write(owner, f"{directory}\n", synced=True)
    if not resumed:
        files.write(directory / "run.json", json.dumps({"key": key, "started": time.time()}) + "\n", synced=True)
    return RunDirectory(directory, saved, resumed, lease)
