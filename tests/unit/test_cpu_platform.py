"""rl.cpu registers a platform and changes nothing elsewhere."""

import os
import subprocess
import sys

from rl.config import CPU_ENVIRONMENT


def run(code: str, **environment: str) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("VERL_", "VLLM_"))}
    done = subprocess.run([sys.executable, "-c", code], env=clean | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1]


PROBE = """
import verl, rl.cpu, sys, torch.distributed as dist
from verl.plugin.platform import get_platform
from verl.plugin.platform.platform_manager import PlatformRegistry
replica = sys.modules.get("verl.workers.rollout.replica")
loader = replica.RolloutReplicaRegistry._registry["vllm"].__module__ if replica else None
print(PlatformRegistry.get("cpu").__name__, get_platform().device_name, loader, dist.init_process_group.__name__)
"""


def test_without_the_switch_only_a_name_is_registered():
    name, device, loader, group = run(PROBE).split()
    assert (name, loader, group) == ("PlatformCPU", "None", "init_process_group")
    assert device != "cpu"


def test_with_the_switch_platform_replica_and_backend_are_ours():
    assert run(PROBE, **CPU_ENVIRONMENT).split() == ["PlatformCPU", "cpu", "rl.cpu", "init_process_group_cpu"]
