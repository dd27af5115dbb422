"""Bytes of activations of real models, without a GPU: transformers' own modules run forward and backward at their real
size on fake tensors, which take no memory, and the storages that are alive are added up."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class Alive(TorchDispatchMode):
    """This mode counts the bytes of the storages that live ``now`` and their ``peak``; ``known`` ones do not count."""

    def __init__(self, known: list[Any]) -> None:
        super().__init__()
        self.sizes = {tensor.untyped_storage()._cdata: 0 for tensor in known}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count the storages that it makes."""
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.sizes:
                storage = tensor.untyped_storage()
                self.sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._drop, storage._cdata)
        return out

    def _drop(self, key: int) -> None:
        self.now -= self.sizes.pop(key, 0)


def fake_model(config: Any, dtype: torch.dtype, checkpointing: bool) -> Any:
    """Return the model of ``config`` for training. Its attention is one fused kernel without a mask, which keeps what
    flash-attn's keeps: its inputs, its output and one number per head and token."""

    def fused(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: Any = None, **_: Any) -> tuple[Any, None]:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register("fused", fused)
    ALL_MASK_ATTENTION_FUNCTIONS.register("fused", lambda *_, **__: None)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="fused")
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def measure(config: Any, tokens: int, checkpointing: bool) -> dict[str, float]:
    """Return bytes of activations of the decoder of ``config`` (bf16) for one packed row of ``tokens``: those ``kept``
    between forward and backward, and the peaks over that in ``forward`` and ``backward``."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = fake_model(config, torch.bfloat16, checkpointing)
        for parameter in model.parameters():  # as with FSDP, a gradient goes when it is whole
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        alive = Alive([*model.parameters(), *model.buffers()])
        ids = torch.zeros(1, tokens, dtype=torch.long)
        with alive:
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
            kept, forward = alive.now, alive.peak
            alive.peak = alive.now
            hidden.sum().backward()
    return {"kept": kept, "forward": forward - kept, "backward": alive.peak - kept}
