"""vLLM calls this module in every one of its processes (entry-point group ``vllm.general_plugins``), before it looks at
a model: in training, in ``rl.evaluate``, and in a server of this environment that somebody else starts.
"""

import importlib
import sys
import types

_TORCHVISION = [f"torchvision{part}" for part in ("", ".transforms", ".transforms.v2", ".transforms.v2.functional")]


def import_without_torchvision() -> None:
    """Import what vLLM's module of Qwen3.5 imports of transformers: the code for images and videos, which asks for
    torchvision by name. There is none beside a CPU's torch (constraints/cpu-overrides.txt); no agent sends images."""
    from transformers.utils import is_torchvision_available

    if is_torchvision_available():
        return
    sys.modules.update((name, types.ModuleType(name)) for name in _TORCHVISION)
    try:
        for kind in ("image", "video"):  # vLLM 0.24 has both, 0.28 the first
            importlib.import_module(f"transformers.models.qwen2_vl.{kind}_processing_qwen2_vl")
    finally:
        for name in _TORCHVISION:
            del sys.modules[name]
