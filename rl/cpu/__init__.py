"""Training on a CPU: what verl needs on a machine without an accelerator.

verl imports this package in every process (entry-point group ``verl.plugins``). That registers a platform named "cpu",
which nothing selects unless ``VERL_PLATFORM=cpu``: on a GPU machine the import is cheap and changes nothing but the
time that process groups have, if the config sets one (``run.collective_timeout_s``).

With ``VERL_PLATFORM=cpu`` it also replaces the rollout replica "vllm" by one whose weight sync works on vLLM's CPU back
end, and repairs one argument of process groups (see ``_gloo_once``). The environment that a CPU run needs is
``rl.config.compose.CPU_ENVIRONMENT``; the patches are listed in docs/architecture.md, "Patches at run time".
"""

import datetime
import os

from verl.plugin.platform.platform_manager import PlatformRegistry

from rl.cpu.platform import PlatformCPU

PlatformRegistry.register(platform="cpu")(PlatformCPU)


def _load_replica():
    from rl.cpu.vllm_replica import CPUReplica

    return CPUReplica


def _gloo_once() -> None:
    """Let ``init_process_group`` accept the backend string that verl builds on a CPU.

    verl (verl/utils/distributed.py) always asks for "cpu:gloo,<device>:<backend>", which on a CPU is
    "cpu:gloo,cpu:gloo"; torch refuses a device that is named twice.
    """
    import torch.distributed as dist

    original = dist.init_process_group

    def init_process_group_cpu(backend=None, *args, **kwargs):
        return original("cpu:gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)

    dist.init_process_group = init_process_group_cpu


def _wait(seconds: float) -> None:
    """Set how long an operation of a process group may take, wherever a group is made without a time of its own.

    So do verl, the meshes of FSDP2, and vLLM; torch looks at these defaults when it makes a group.
    """
    from torch.distributed import distributed_c10d as groups

    groups.default_pg_timeout = groups.default_pg_nccl_timeout = datetime.timedelta(seconds=seconds)


if seconds := os.environ.get("RL_COLLECTIVE_TIMEOUT_S"):
    _wait(float(seconds))
if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
    from verl.workers.rollout import base
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    base._ROLLOUT_REGISTRY["vllm", "async"] = "rl.cpu.vllm_replica.CPUServerAdapter"
    RolloutReplicaRegistry.register("vllm", _load_replica)
    _gloo_once()
