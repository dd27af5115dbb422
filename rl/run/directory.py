"""This module finds, makes and locks the directory of a run.

Run directories are ``<run.root>/<trainer.experiment_name>/<date_time>``. Each holds ``run.json`` with a
key, the hash of the composed config without its ``run`` group. ``open_run`` continues the newest
unfinished directory with the same key, so the same command continues after a crash from the last
checkpoint; a finished run (file ``done``) or one that is in use by another process (locked ``run.lock``)
is left alone and a new directory is made. An explicit ``run.dir`` is used as it is, whatever it contains.
"""

import errno
import fcntl
import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from omegaconf import DictConfig, OmegaConf

from rl.run.checkpoints import newest


@dataclass
class Run:
    """An open run directory; ``lock`` is held until ``close`` or the end of the process."""

    dir: Path
    checkpoints: Path
    resumed: bool
    lock: IO

    @property
    def checkpoint_step(self) -> int:
        """Return the step of the newest complete checkpoint, 0 if there is none."""
        return newest(self.checkpoints)

    def finish(self) -> None:
        """Mark the run as finished: the same command then starts a new run."""
        (self.dir / "done").touch()

    def close(self) -> None:
        """Release the lock."""
        self.lock.close()


def _key(config: DictConfig) -> str:
    plain: Any = OmegaConf.to_container(config, resolve=False)
    plain.pop("run", None)
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _try_lock(directory: Path, required: bool = True) -> IO | None:
    """Return the open, locked file; None if another process has locked it.

    On a disk without file locks the file is returned unlocked or, if ``required``, RuntimeError is raised.
    """
    lock = open(directory / "run.lock", "w")  # noqa: SIM115  held until the process ends
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            lock.close()
            return None
        if required:
            lock.close()
            raise RuntimeError(
                f"{directory}: this disk has no file locks (Lustre without `flock`?); give run.dir"
            ) from error
    return lock


def _read_key(directory: Path) -> str | None:
    path = directory / "run.json"
    return json.loads(path.read_text())["key"] if path.exists() else None


def open_run(config: DictConfig) -> Run:
    """Find or make the run directory, lock it, and set ``config.run.dir`` to its absolute path.

    Raises:
        RuntimeError: an explicit ``run.dir`` is in use by another process; or it is not given and the disk has no file
            locks, so that a run in use cannot be recognised.
    """
    key = _key(config)
    if config.run.dir:
        directory = Path(config.run.dir).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        lock = _try_lock(directory, required=False)
        if lock is None:
            raise RuntimeError(f"run directory {directory} is in use by another process")
        return _opened(config, directory, key, lock)

    parent = Path(config.run.root).resolve() / config.trainer.experiment_name
    found = sorted((d for d in parent.iterdir() if d.is_dir()), reverse=True) if parent.is_dir() else []
    for directory in found:
        unfinished = _read_key(directory) == key and not (directory / "done").exists()
        if unfinished and (lock := _try_lock(directory)):
            return _opened(config, directory, key, lock)
    directory = _make(parent, time.strftime("%Y-%m-%d_%H-%M-%S"))
    lock = _try_lock(directory)
    assert lock is not None, "nobody else locks a directory without run.json"
    return _opened(config, directory, key, lock)


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


def _opened(config: DictConfig, directory: Path, key: str, lock: IO) -> Run:
    resumed = _read_key(directory) is not None
    if not resumed:
        (directory / "run.json").write_text(json.dumps({"key": key, "started": time.time()}) + "\n")
    config.run.dir = str(directory)
    return Run(directory, Path(config.trainer.default_local_dir).resolve(), resumed, lock)
