"""Compare rl.plan's formulas for activations with real models, without a GPU: python scripts/calibrate_plan.py

It runs transformers' own modules forward and backward at their real size on fake tensors, which take no memory, adds up
the storages that are alive, and prints a Markdown table. What a training run takes is measured by bench_gpu.py.
"""

from __future__ import annotations

import os
import platform
import time
import weakref
from dataclasses import replace
from typing import Any

import torch
from measuring import compare, head
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rl.config.compose import compose
from rl.plan import memory
from rl.plan.layout import trainer_of
from rl.plan.model import KNOWN, load_config, shape_of
from rollout import program


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


def main() -> None:
    """Print bytes of activations per token of each known model."""
    program.parser("python scripts/calibrate_plan.py", __doc__).parse_args()
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, {platform.machine()}")
    base = replace(trainer_of(compose(["+experiment=qwen3_4b"])), computed=2, sequence_parallel=1)
    head("bytes per token, bf16", "plan", "measured", "error")
    tokens = 1 << 19  # so many that the one gradient that is there at a time does not count
    for file in sorted(KNOWN.glob("*.json")):
        config = load_config(file.stem)
        config.vocab_size = 1024  # an embedding's gradient is no activation
        for checkpointing in (True, False):
            trainer, found = replace(base, checkpointing=checkpointing), {}
            for layers in (2, 4):
                config.num_hidden_layers = layers
                shape = replace(shape_of(config, file.stem), layer=0, embeddings=0)
                found[layers] = measure(config, tokens, checkpointing), memory.kept_activations(shape, trainer, 1)
            planned, measured = found[4][1] - found[2][1], (found[4][0]["kept"] - found[2][0]["kept"]) / tokens
            name = f"{file.stem}: kept of a layer, {'' if checkpointing else 'no '}checkpointing"
            compare(name, planned / 2, measured / 2)
            if checkpointing:
                layer = {b: memory.one_layer(shape, trainer, tokens, b) / tokens for b in (False, True)}
                work = found[4][0]["forward"] / tokens, found[4][0]["backward"] / tokens
                compare(f"{file.stem}: layer at work, forward", layer[False], work[0])
                # What the last norm keeps, 8 bytes a channel, is gone when the last layer is computed again.
                compare(f"{file.stem}: layer at work, backward", layer[True], work[1] + 8 * shape.hidden)


if __name__ == "__main__":
    main()
