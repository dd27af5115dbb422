"""rl.cpu registers a platform and changes nothing elsewhere; with VERL_PLATFORM=cpu verl's parts for a CPU are ours."""

import importlib.metadata
import os
import subprocess
import sys

import pytest

from rl.config.compose import CPU_ENVIRONMENT

ON_A_CPU = "cpu" in importlib.metadata.version("vllm")
PROBE = """
import verl, rl.cpu, sys, torch.distributed as dist
from verl.plugin.platform import get_platform
from verl.plugin.platform.platform_manager import PlatformRegistry
replica = sys.modules.get("verl.workers.rollout.replica")
loader = replica.RolloutReplicaRegistry._registry["vllm"].__module__ if replica else None
print(PlatformRegistry.get("cpu").__name__, get_platform().device_name, loader, dist.init_process_group.__name__)
print("default", dist.distributed_c10d.default_pg_timeout.total_seconds())
"""
WAITS = """
import os, tempfile, time
from datetime import timedelta
from verl.utils.distributed import initialize_global_process_group_ray

def pair(limit, late):
    # Two processes, of which the second one comes late to a barrier. Returns the first one's id; it exits with 0 if it
    # met the other one, with 3 if its time was up.
    rl.cpu._wait(limit)
    os.environ.update(WORLD_SIZE="2", DIST_INIT_METHOD="file://" + tempfile.mktemp())
    came, gone = os.pipe()
    for rank in (1, 0):
        if child := os.fork():
            continue
        try:
            os.environ["RANK"] = str(rank)
            initialize_global_process_group_ray(timeout_second=None)
            if rank == 1:
                os.close(gone)
                late(came)
            dist.barrier()
            os._exit(0)
        except RuntimeError as error:
            os._exit(3 if "imed out" in str(error) else 4)
    os.close(came), os.close(gone)
    return child

read = dist.distributed_c10d.default_pg_timeout, dist.distributed_c10d.default_pg_nccl_timeout
print("read", {timedelta(seconds=2)}.issuperset(read))
short = pair(2, lambda came: os.read(came, 1))  # until the first one has gone
longer = pair(60, lambda _: time.sleep(2.5))
print("waited", *(os.waitstatus_to_exitcode(os.waitpid(one, 0)[1]) for one in (short, longer)))
"""
SAVED = """
import types
import torch
from torch.distributed.fsdp import fully_shard
from verl.experimental.separation.engine_workers import DetachActorWorker
from rl.cpu.actor import CPUDetachActorWorker

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
meshes = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
groups = (dist.group.WORLD, dist.new_group([0]), *meshes.get_all_groups())
print("times", *{group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups})

def goes_back(kind):
    model = torch.nn.Linear(2, 2)
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
    worker = object.__new__(kind)
    worker.config = types.SimpleNamespace(actor=types.SimpleNamespace(strategy="fsdp2"))
    worker.actor = types.SimpleNamespace(engine=types.SimpleNamespace(module=model))
    worker._strategy_handlers = None
    before = model.weight.full_tensor().clone()
    worker.save_model_to_cpu(0)
    with torch.no_grad():
        model.weight.add_(1)
    worker.restore_model_from_cpu(0)
    return torch.equal(before, model.weight.full_tensor())

print("saved", goes_back(CPUDetachActorWorker), goes_back(DetachActorWorker))
dist.destroy_process_group()
"""

EXPERTS = """
import torch
from rl.cpu.vllm_replica import CPUExperts, _local_experts
from vllm._custom_ops import cpu_fused_moe, cpu_prepack_moe_weight
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import select_experts
from vllm.platforms import current_platform

current_platform.import_kernels()
torch.manual_seed(0)
hidden, logits = torch.randn(16, 64), torch.randn(16, 4)
w13, w2 = torch.randn(4, 128, 64), torch.randn(4, 64, 64)

def kernel(own, weights, experts):
    packed = (cpu_prepack_moe_weight(w[own].contiguous(), "vec") for w in (w13, w2))
    return cpu_fused_moe(hidden, *packed, None, None, weights, experts, "silu", "vec")

def half(rank):
    places = torch.full((4,), -1, dtype=torch.int32)
    own = slice(2 * rank, 2 * rank + 2)
    places[own] = torch.arange(2, dtype=torch.int32)
    return kernel(own, *_local_experts(places, hidden, logits, topk=2, renormalize=True))

whole = kernel(slice(4), *select_experts(hidden, logits, 2, use_grouped_topk=False, renormalize=True))
print(torch.allclose(whole, half(0) + half(1), atol=1e-3), torch.allclose(whole, half(0), atol=1e-3))
print(op_registry_oot["UnquantizedFusedMoEMethod"] is CPUExperts)
"""


def run(code: str, **environment: str) -> list[list[str]]:
    """Return the words of each line that a Python program prints, without this process's verl and vLLM variables."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("VERL_", "VLLM_"))}
    done = subprocess.run([sys.executable, "-c", code], env=clean | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return [line.split() for line in done.stdout.strip().splitlines()]


def test_without_the_switch_only_a_name_is_registered() -> None:
    (name, device, loader, group), default = run(PROBE)[-2:]
    assert (name, loader, group) == ("PlatformCPU", "None", "init_process_group")
    assert device != "cpu" and default == ["default", "1800.0"]


@pytest.fixture(scope="module")
def with_the_switch() -> list[list[str]]:
    # Importing verl takes seconds: once for all tests.
    code = PROBE + WAITS + SAVED + (EXPERTS if ON_A_CPU else "")
    return run(code, **CPU_ENVIRONMENT, RL_COLLECTIVE_TIMEOUT_S="2")


def test_with_the_switch_platform_replica_and_backend_are_ours(with_the_switch: list[list[str]]) -> None:
    assert ["PlatformCPU", "cpu", "rl.cpu", "init_process_group_cpu"] in with_the_switch


def test_a_process_that_comes_late_is_waited_for_as_long_as_the_key_says(with_the_switch: list[list[str]]) -> None:
    assert ["read", "True"] in with_the_switch and ["waited", "3", "0"] in with_the_switch
    # The last value that was set holds for a default group, another one, and the groups of a mesh.
    assert ["times", "60.0"] in with_the_switch


def test_saved_weights_are_copies_and_verls_own_still_are_not(with_the_switch: list[list[str]]) -> None:
    assert [words[1:] for words in with_the_switch if words[0] == "saved"] == [["True", "False"]]


@pytest.mark.skipif(not ON_A_CPU, reason="vLLM is not its CPU build")
def test_experts_of_two_workers_add_up_to_all_experts(with_the_switch: list[list[str]]) -> None:
    assert with_the_switch[-2:] == [["True", "False"], ["True"]]
