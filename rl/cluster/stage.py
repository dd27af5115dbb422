"""Model and task files on a disk of the node: what many processes read at once is read from the shared disk once."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig, ListConfig, OmegaConf

from rl.config import ConfigError

Say = Callable[[str], None]


def stage(cfg: DictConfig, say: Say) -> dict[str, object]:
    """Copy what ``cluster.stage_dir`` is for; the config keys that point there, the same on every node. Blocks.

    Raises:
        ConfigError: there is no room, or the model is no directory.
    """
    place = Path(cfg.cluster.stage_dir).expanduser().absolute()
    model = Path(cfg.actor_rollout_ref.model.path).expanduser().absolute()
    if not model.is_dir():
        raise ConfigError(
            f"cluster.stage_dir: actor_rollout_ref.model.path={cfg.actor_rollout_ref.model.path} is no directory; "
            "download the model first and give its directory"
        )
    keys: dict[str, object] = {
        "actor_rollout_ref.model.path": str(copy(model, place, say)),
        # Episode records name a model that is still there after the job.
        "cluster.staged_from": str(model),
    }
    for key in ("data.train_files", "data.val_files"):
        files = OmegaConf.select(cfg, key)
        names = files if isinstance(files, ListConfig) else [files]
        keys[key] = [str(copy(Path(name).expanduser().absolute(), place, say)) for name in names]
    return keys


def copy(source: Path, place: Path, say: Say) -> Path:
    """A copy of a file or directory below ``place``, made whole or not at all; one that is there already is used.

    It is named by the original's path and its files' sizes and times.
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
        if not target.exists():  # else another process was faster with the same
            raise ConfigError(f"cluster.stage_dir: copying {source} to {place}: {error}") from error
    return target
