"""The platform "cpu": verl's device interface on a machine without an accelerator.

Each process sees one device, index 0, and it is the host. Ray is told of GPUs (``num_gpus``), because Ray hands out
accelerator ids only for kinds that it knows, and verl places its workers by such an id: one for each of the trainer's,
and one for an engine that does not share it (trainer.v1.trainer_mode=separate_async). All of them are the host.
"""

import types
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase


def _host_memory() -> tuple[int, int]:
    """Return (free, total) bytes of the host."""
    import psutil

    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _rss(*_args) -> int:
    """Return the bytes resident in this process, the closest thing to an allocator's counter."""
    import psutil

    return psutil.Process().memory_info().rss


class _HostDevice(types.ModuleType):
    """This is ``torch.cpu`` with the functions of ``torch.cuda`` that verl calls and torch.cpu lacks."""

    def __init__(self):
        super().__init__("torch.cpu")

    def __getattr__(self, name: str):
        return getattr(torch.cpu, name)

    memory_allocated = memory_reserved = max_memory_allocated = max_memory_reserved = staticmethod(_rss)
    get_rng_state = staticmethod(lambda *_: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, *_: torch.set_rng_state(state))
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    mem_get_info = staticmethod(lambda *_: _host_memory())
    get_device_name = staticmethod(lambda *_: "cpu")
    empty_cache = ipc_collect = reset_peak_memory_stats = staticmethod(lambda *_: None)


class PlatformCPU(PlatformBase):
    """This platform gives verl the host as its only device. Profiling and allocator settings do nothing."""

    device_name = vendor_name = "cpu"
    device_module = _HostDevice()

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check=False) -> bool:
        return False  # never auto-detected: VERL_PLATFORM=cpu asks for it

    def current_device(self) -> str:  # ty: ignore[incompatible-method-override]  to tensor.to() an int is an accelerator
        return "cpu"

    def device_count(self) -> int:
        return 1

    def _nothing(self, *_: Any, **__: Any) -> None:
        return None

    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False  # weights then travel through shared memory

    @contextmanager
    def nvtx_range(self, msg: str):
        yield
