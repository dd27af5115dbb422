"""Compose the config, and find the directory of a run.

Run directories are ``<run.root>/<trainer.experiment_name>/<date_time>``. Each holds ``run.json`` with a
key, the hash of the composed config without its ``run`` group. ``open_run`` continues the newest
unfinished directory with the same key, so the same command after a crash goes on from the last
checkpoint; a finished run (file ``done``) or one that is in use by another process (locked ``run.lock``)
is left alone and a new directory is made. An explicit ``run.dir`` is used as it is, whatever is in it.
"""

import importlib.util
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

# What all processes of a run with trainer.device=cpu need in their environment. Here and not in rl.cpu,
# because importing that imports verl, for which the environment must be complete.
CPU_ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    # verl's FSDP engine is registered for "cuda" and "npu" only; all it does through the platform
    # interface works on the CPU.
    "VERL_ENGINE_DEVICE": "cuda",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # training and generation take turns on the same cores
    "VLLM_NO_USAGE_STATS": "1",
    # Idle OpenMP threads sleep instead of spinning: engine, trainer and agents share the cores, and a
    # spinning thread takes half of them (measured: half the CPU time, 1.5 to 2 times the speed).
    "OMP_WAIT_POLICY": "PASSIVE",
    # One machine: a host name that does not resolve must not matter.
    "GLOO_SOCKET_IFNAME": "lo",
}

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


class ConfigError(Exception):
    """The run cannot work as configured; the message is one line: what, where, what to do."""


def package_dir(name: str) -> str:
    """Directory of an installed top-level package, without importing it.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"package {name!r} is not installed")
    return spec.submodule_search_locations[0]


def register_resolvers() -> None:
    """Make ``${rl.package:name}``, ``${rl.add:a,b}`` and ``${rl.div:a,b}`` (rounded down) known to OmegaConf."""
    OmegaConf.register_new_resolver("rl.package", package_dir, replace=True)
    OmegaConf.register_new_resolver("rl.add", lambda *terms: sum(terms), replace=True)
    OmegaConf.register_new_resolver("rl.div", lambda a, b: a // b, replace=True)


def compose(overrides: list[str] = (), name: str = "train") -> DictConfig:
    """The config that ``python -m rl.train <overrides>`` composes, or another program's; for tests and tools."""
    import hydra

    register_resolvers()
    with hydra.initialize_config_dir(config_dir=str(CONFIGS), version_base=None):
        return hydra.compose(name, overrides=list(overrides))
