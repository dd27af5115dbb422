"""The environment of a node's processes: network, caches, model hub, no reports to anyone.

Ray and all that it starts inherit the environment of the process that calls ``set_up``. What the user has set stays,
except where the config has a key for it: the config is what runs.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from omegaconf import DictConfig

from rl.checks.model import local_model
from rl.cluster.network import use_interface
from rl.config.compose import NO_REPORTS, ConfigError

CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "VLLM_CACHE_ROOT": "vllm",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "CUDA_CACHE_PATH": "cuda",
}
"""The variables that move a cache of compiled code (by default in the home directory), and its directory's name."""


def set_up(config: DictConfig) -> list[str]:
    """Set the environment of this node's processes, and return the overrides that rl.train needs besides.

    A model that is given by the hub's name becomes the directory of its snapshot, in ``config`` too.

    Raises:
        ConfigError: the interface cannot be used, the place for the caches is not ours, or the model is not here.
    """
    use_interface(config)
    local = config.cluster.local_dir or tempfile.gettempdir()
    place = private(Path(local, f"claude-code-rl-{os.getuid()}"))
    caches = {variable: str(place / name) for variable, name in CACHES.items()}
    for variable, value in {**NO_REPORTS, "HF_HUB_OFFLINE": "1", **caches}.items():
        os.environ.setdefault(variable, value)
    if config.prepare or local_model(config) is not None:
        return []
    config.actor_rollout_ref.model.path = snapshot(config.actor_rollout_ref.model.path)
    return [f"actor_rollout_ref.model.path={config.actor_rollout_ref.model.path}"]


def private(directory: Path) -> Path:
    """Return a directory that nobody else can write to, made if it is missing: compiled code is run from there.

    Raises ConfigError if it is another user's.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ConfigError(f"{directory}: another user could write there; remove it, or set TMPDIR to another disk")
    return directory


def snapshot(name: str) -> str:
    """Return the directory of a model of the hub that was downloaded before. Nothing is downloaded.

    Raises ConfigError if it is not there.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return snapshot_download(name, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise ConfigError(
            f"actor_rollout_ref.model.path: {name} is not in {HF_HUB_CACHE}; on the login node "
            f"`HF_HOME=/shared/hf .venv/bin/hf download {name}`, and submit with the same HF_HOME"
        ) from error
