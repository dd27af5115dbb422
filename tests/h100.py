"""This module pretends that a machine has H100s: a platform for vLLM, found as a plugin (tests.engine_configs).

It answers what vLLM asks when it makes a config. Whatever would compute fails.
"""

from __future__ import annotations

import sys
import types

import torch

# vLLM's CUDA kernels, which a machine without CUDA cannot load. No config needs one; at its import, vLLM only asks two
# questions of them.
for kernels in ("_C_stable_libtorch", "_moe_C_stable_libtorch", "_qutlass_C"):
    sys.modules.setdefault(f"vllm.{kernels}", types.ModuleType(kernels))
for kernels in ("_vllm_fa2_C", "_vllm_fa3_C"):
    sys.modules.setdefault(f"vllm.vllm_flash_attn.{kernels}", types.ModuleType(kernels))
OPERATORS = torch.library.Library("_C", "FRAGMENT")
for question in ("cutlass_scaled_mm_supports_fp8", "cutlass_scaled_mm_supports_block_fp8"):
    OPERATORS.define(f"{question}(int capability) -> bool")
    OPERATORS.impl(question, lambda capability: True, "CompositeImplicitAutograd")

from vllm.platforms.cuda import CudaPlatformBase  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402


class H100(CudaPlatformBase):
    """A node with eight H100s of 80 GB, which NVLink connects."""

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(9, 0)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "NVIDIA H100 80GB HBM3"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return 80 << 30

    def is_cumem_allocator_available(self) -> bool:
        return True  # what sleep mode needs, one more kernel

    @classmethod
    def is_fully_connected(cls, device_ids: list[int]) -> bool:
        return True

    @classmethod
    def device_count(cls) -> int:
        return 8

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return 132


def class_name() -> str:
    """Return what vLLM wants of a platform plugin: the name of its class."""
    return f"{H100.__module__}.{H100.__qualname__}"
