"""Copies of model and task files on a disk of the node, so that they are read from the shared disk once."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig, ListConfig, OmegaConf

from rl.config.compose import ConfigError

Say = Callable[[str], None]


def stage(config: DictConfig, say: Say) -> dict[str, object]:
    """Copy model and task files to ``cluster.stage_dir``, and return the config keys that point there. Blocks.

    The keys are the same on every node.

    Raises:
        ConfigError: there is no room, or the model is not a directory.
    """
    place = Path(config.cluster.stage_dir).expanduser().absolute()
    model = Path(config.actor_rollout_ref.model.path).expanduser().absolute()
    if not model.is_dir():
        raise ConfigError(
            f"cluster.stage_dir: actor_rollout_ref.model.path={config.actor_rollout_ref.model.path} is not a "
            "directory; download the model first and give its directory"
        )
    keys: dict[str, object] = {
        "actor_rollout_ref.model.path": str(copy(model, place, say)),
        # Episode records name a model that still exists after the job.
        "cluster.staged_from": str(model),
    }
    for key in ("data.train_files", "data.val_files"):
        files = OmegaConf.select(config, key)
        names = files if isinstance(files, ListConfig) else [files]
        keys[key] = [str(copy(Path(name).expanduser().absolute(), place, say)) for name in names]
    return keys


def copy(source: Path, place: Path, say: Say) -> Path:
    """Copy a file or directory to ``place``, wholly or not at all, and return the copy; an existing one is used.

    The copy is named by the original's path and by sizes and times of its files.
    """
    files = [file for file in sorted(source.rglob("*")) if file.is_file()] if source.is_dir() else [source]
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    digest = hashlib.sha256(json.dumps(stats).encode()).hexdigest()[:12]
    target = place / f"{source.stem}-{digest}{source.suffix}"
    if target.exists():
        return target
    size = sum(entry[1] for entry in stats)
    try:
        place.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(place).free) < size:
            raise ConfigError(f"cluster.stage_dir: {place} has {free >> 20} MiB free, {source} takes {size >> 20}")
        say(f"copying {source} ({size >> 20} MiB) to {place}")
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=place, ignore_cleanup_errors=True) as building:
            made = Path(building) / "copy"
            (shutil.copytree if source.is_dir() else shutil.copy2)(source, made)
            made.rename(target)
    except OSError as error:
        if not target.exists():  # else another process has made the same copy
            raise ConfigError(f"cluster.stage_dir: copying {source} to {place}: {error}") from error
    return target
