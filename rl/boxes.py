"""What can be known to be wrong with boxes before one is booted: engine, program, isolation, images.

The part of ``rl.checks`` that asks the machine about its sandboxes.
"""

import os
import shutil
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from rewards.task import Task
from rl.config import ConfigError
from rl.setup import is_snapshot, sif_cache
from rollout.sandbox import SandboxError
from rollout.sandbox.apptainer import cli as apptainer_cli
from rollout.sandbox.docker import images
from rollout.sandbox.docker.engine import checked, engine
from rollout.sandbox.local import bwrap


def box_numbers(cfg: DictConfig) -> tuple[str, ...]:
    """The keys of limits that must be numbers above 0, for boxes that are made from images."""
    if cfg.sandbox.kind == "local":
        return ()
    keys = ("memory_mb", "cpus", "processes", "pull_parallel", *(("disk_mb",) if cfg.sandbox.kind == "docker" else ()))
    return tuple(f"sandbox.{key}" for key in keys)


def check_boxes(cfg: DictConfig) -> None:
    """The engine answers, or the isolation that was asked for is there; ``auto`` decides for itself.

    Raises:
        ConfigError: it does not, or is not.
    """
    if cfg.sandbox.kind != "local":
        (_check_engine if cfg.sandbox.kind == "docker" else _check_apptainer)(cfg)
        return
    if OmegaConf.select(cfg, "sandbox.isolation") != "bwrap":
        return
    if shutil.which("bwrap") is None:
        raise ConfigError(
            "sandbox.isolation=bwrap, but bwrap is not installed; install bubblewrap or set sandbox.isolation=auto"
        )
    if not bwrap.available():
        raise ConfigError(
            "sandbox.isolation=bwrap, but bwrap cannot start here (no user namespaces?); "
            "allow them or set sandbox.isolation=auto"
        )


def _check_engine(cfg: DictConfig) -> None:
    try:
        found = engine()
        base = cfg.sandbox.base_image
        if base is None and "quickstart" in cfg:
            raise ConfigError(
                "sandbox=docker: the quickstart's tasks are local snapshots, which need sandbox.base_image; "
                "scripts/task_images.py --base makes one and prints its name"
            )
        if base is not None and images.missing(found, [base]):
            raise ConfigError(f"sandbox.base_image: no image {base}; scripts/task_images.py --base makes one")
    except SandboxError as error:
        raise ConfigError(
            f"sandbox=docker: {error}; start the engine, set DOCKER_HOST or choose sandbox=local"
        ) from error


def _check_apptainer(cfg: DictConfig) -> None:
    """The program is there and no older than what is used of it; the cache can be written."""
    try:
        apptainer_cli.program()
    except SandboxError as error:
        raise ConfigError(
            f"sandbox=apptainer: {error}; install apptainer, load its module or choose another sandbox"
        ) from error
    base = cfg.sandbox.base_image
    if base is None and "quickstart" in cfg:
        raise ConfigError(
            "sandbox=apptainer: the quickstart's tasks are local snapshots, which need sandbox.base_image: a .sif file "
            "or an image's name"
        )
    if base is not None and base.endswith(".sif") and "://" not in base and not Path(base).is_file():
        raise ConfigError(f"sandbox.base_image: no file {base}")
    writable(sif_cache(cfg).directory, "sandbox.cache_dir", "give a directory that all nodes of the run share")


def writable(wanted: Path, key: str, advice: str) -> Path:
    """The directory, or the one above it in which it will be made. Raises ConfigError where that cannot be written."""
    place = next(p for p in (wanted, *wanted.parents) if p.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"{key}: cannot write in {place}; {advice}")
    return place


def check_images(cfg: DictConfig, tasks: list[Task]) -> None:
    """With sandbox=docker or apptainer: local snapshots have an image to run in. With docker, the first image that is
    not here can be had. The others are known when they are pulled, which is before the run starts too; so are all
    with podman, which cannot ask a registry without a pull.

    Raises:
        ConfigError: a snapshot has none, or the first image cannot be had.
    """
    kind = cfg.sandbox.kind
    if kind == "local":
        return
    snapshots = [task for task in tasks if is_snapshot(task)]
    if snapshots and cfg.sandbox.base_image is None:
        hint = "; scripts/task_images.py --base makes one and prints its name" if kind == "docker" else ""
        raise ConfigError(
            f"{snapshots[0].instance_id} is a local snapshot, which sandbox={kind} needs sandbox.base_image for{hint}"
        )
    if kind != "docker":
        return
    try:
        found = engine()
        lost = images.missing(found, (task.image for task in tasks if not is_snapshot(task)))
        for image in [] if found.podman else lost[:1]:
            checked("missing_image", found.client.inspect_distribution, image)
    except SandboxError as error:
        raise ConfigError(f"sandbox=docker: an image is not here and cannot be pulled: {error}") from error
