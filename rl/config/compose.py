"""The config, composed from configs/, and the error for a config that cannot work.

The environment variables that the processes of a run need are here, too.
"""

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

# What every process of a run with trainer.device=cpu needs in its environment. It is here and not in rl.cpu because
# importing rl.cpu imports verl, which reads the environment when it is imported.
CPU_ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    # verl's FSDP engine is registered for "cuda" and "npu" only; through the platform interface it works on a CPU too.
    "VERL_ENGINE_DEVICE": "cuda",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # training and generation take turns on the same cores
    "VLLM_NO_USAGE_STATS": "1",
    # Idle OpenMP threads sleep instead of spinning: engine, trainer and agents share the cores.
    "OMP_WAIT_POLICY": "PASSIVE",
    # All processes are on one machine: a host name that does not resolve must not matter.
    "GLOO_SOCKET_IFNAME": "lo",
    # Ray would start Python processes in advance that no actor of the run can use, because their environment differs.
    "RAY_prestart_worker_first_driver": "0",
}
# No program of a run reports its use to anybody.
NO_REPORTS = {
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
}
# For training runs; a config's `cpu_threads` sets the threads. vLLM would also compile a function for the first reply
# that it samples (12 s).
CPU_TRAINING = {**CPU_ENVIRONMENT, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
# A model that takes all cores has tensors of 5 to 30 MB, of another length in each row. glibc would keep the holes that
# they leave in its heap: 5 GB by the second step of a model of half a billion parameters. A toy loses time by this.
_RETURNED = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576"}

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def workers_environment(config: DictConfig) -> dict[str, str]:
    """Return the variables that a run's workers need when they start, because Python and libraries read them then."""
    rollout, values = config.actor_rollout_ref.rollout, {}
    if rollout.full_determinism:  # as verl.trainer.main_ppo sets them; its vLLM servers set VLLM_BATCH_INVARIANT
        values |= {"VERL_FULL_DETERMINISM": "1", "PYTHONHASHSEED": str(rollout.seed)}
    if config.run.collective_timeout_s is not None:  # read by rl.cpu
        values["RL_COLLECTIVE_TIMEOUT_S"] = str(config.run.collective_timeout_s)
    return values | cpu_training(config)


def cpu_training(config: DictConfig) -> dict[str, str]:
    """Return the variables of a CPU run's processes; none on a GPU."""
    if config.trainer.device != "cpu":
        return {}
    threads = config.cpu_threads
    return CPU_TRAINING | {"OMP_NUM_THREADS": str(threads or os.cpu_count() or 1)} | ({} if threads else _RETURNED)


class ConfigError(Exception):
    """The program cannot work as configured; each of ``lines`` says what, where and what to do."""

    def __init__(self, *lines: str) -> None:
        super().__init__(*lines)
        self.lines = lines

    def __str__(self) -> str:
        return "\n".join(self.lines)

    def tell(self, program: str = "config") -> None:
        """Print the lines to stderr, each after the name of what found them."""
        for line in self.lines:
            print(f"{program}: {line}", file=sys.stderr)


def refuse(lines: Sequence[str]) -> None:
    """Raise ConfigError with the lines, if there are any."""
    if lines:
        raise ConfigError(*lines)


def check_all(config: DictConfig, *checks: Callable[[DictConfig], object]) -> None:
    """Call each check with the config, and raise one ConfigError with the lines of all that raised one."""
    lines: list[str] = []
    for check in checks:
        try:
            check(config)
        except ConfigError as error:
            lines += error.lines
    refuse([*dict.fromkeys(lines)])  # several checks may need the same thing


def package_dir(name: str) -> str:
    """Return the directory of an installed top-level package without importing it.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"package {name!r} is not installed")
    return spec.submodule_search_locations[0]


def cpu_dtype() -> str:
    """Return the dtype in which this machine's CPU computes fastest: without units for it, bfloat16 takes six times as
    long as float32."""
    return "bfloat16" if {"avx512_bf16", "bf16"} & {*Path("/proc/cpuinfo").read_text().split()} else "float32"


def unresolved(config: DictConfig) -> Any:
    """Return a config as dicts and lists, with its ``${...}`` as they are written."""
    return OmegaConf.to_container(config, resolve=False)


def register_resolvers() -> None:
    """Register ``${rl.package:name}``, ``${rl.cpu_dtype:}``, ``${rl.add:a,b}`` and ``${rl.div:a,b}`` (at least 1) with
    OmegaConf."""
    OmegaConf.register_new_resolver("rl.cpu_dtype", cpu_dtype, replace=True)
    OmegaConf.register_new_resolver("rl.package", package_dir, replace=True)
    OmegaConf.register_new_resolver("rl.add", lambda *terms: sum(terms), replace=True)
    OmegaConf.register_new_resolver("rl.div", lambda a, b: max(1, a // b), replace=True)


def config_folders() -> list[Path]:
    """Return the directories of config groups: ours, then those that other packages bring."""
    from rl.config.plugins import brought

    return [CONFIGS, *brought()]


def compose(
    overrides: Sequence[str] = (), name: str = "train", check: Callable[[DictConfig], object] | None = None
) -> DictConfig:
    """Return the config that ``python -m rl.train <overrides>`` composes, or that of another program (``name``).

    check: is called with the config if some overrides are wrong, so that one error names all mistakes; the config is
    then made without those overrides.

    Raises:
        ConfigError: with a line for each override that is wrong.
    """
    import hydra

    from rl.config.overrides import leave_out, read

    register_resolvers()
    with hydra.initialize_config_dir(config_dir=str(CONFIGS), version_base=None):
        verls = [Path(package_dir("verl"), "trainer", "config")] if name == "train" else []
        config, wrong = read(name, overrides, [*config_folders(), *verls])
        with open_dict(config):
            agent = config.pop("hydra").runtime.choices.get("agent")
        if not wrong and config.get("agent", {}).get("kind", "claude_code") != "claude_code":
            leave_out(config, agent, overrides)
    if wrong:
        check_all(config, lambda _: refuse(wrong), *([check] if check else []))
    return config
