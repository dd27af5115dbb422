"""A model's kinds of attention (full, sliding, linear): what a sequence takes of the engine's cache, and its FLOPs.

Sizes of caches and states are those of vLLM 0.21 (MLAAttentionSpec, MambaStateShapeCalculator).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
# Other names of these, and of layers without a mixer, in the configs of transformers.
KINDS = {"attention": FULL, "chunked_attention": SLIDING, "mamba": LINEAR, "moe": None, "mlp": None}


@dataclass(frozen=True)
class Mixer:
    """A mixer is what ``count`` of a model's layers mix tokens with. ``queries``, ``keys`` and ``values`` are widths
    (heads x head size) in a forward. The engine caches ``cached`` numbers for each of a layer's last ``window`` tokens
    (None: for all), in ``heads`` parts, none of which is split over GPUs. A layer of linear attention has no such cache
    but a state of a fixed size for each sequence: ``state`` numbers of ``state_element`` bytes, and those of its
    convolution (``convolved``) in the engine's precision."""

    count: int
    queries: int
    keys: int
    values: int
    cached: int = 0
    heads: int = 1
    window: int | None = None
    state: int = 0
    state_element: int = 4
    convolved: int = 0

    def sequence_bytes(self, tokens: float, element: int, parallel: int) -> float:
        """Return the bytes that a sequence of so many tokens takes on each of ``parallel`` GPUs, in all ``count``
        layers."""
        kept = tokens if self.window is None else min(tokens, self.window)
        each = self.cached // self.heads * max(1, self.heads // parallel) * element * kept
        return self.count * (each + (self.state * self.state_element + self.convolved * element) / parallel)

    def flops(self, context: float) -> float:
        """Return the FLOPs of mixing per token of a sequence of ``context`` tokens, whose tokens see half of it in the
        mean, and never more than the window. A state decays, is written to and read: three products."""
        window = context if self.window is None else min(context, self.window)
        seen = 0 if self.state else window - window * window / (2 * context) if context else 0
        return self.count * (2 * (self.queries + self.values) * seen + 6 * self.state)


def mixers(text: Any) -> tuple[Mixer, ...]:
    """Return the mixers of a decoder, from its transformers config.

    Raises:
        ValueError: its layers are of a type that is not known here; the message names it.
    """
    types = getattr(text, "layer_types", None) or [FULL] * text.num_hidden_layers
    kinds = Counter(KINDS.get(kind, kind) for kind in types)
    del kinds[None]
    if unknown := kinds.keys() - {FULL, SLIDING, LINEAR}:
        raise ValueError(f"layers of type {', '.join(sorted(map(str, unknown)))}")
    window = getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None)
    makers = {FULL: lambda n: _attention(text, n, None), SLIDING: lambda n: _attention(text, n, window)}
    return tuple((makers | {LINEAR: lambda n: _linear(text, n)})[kind](count) for kind, count in sorted(kinds.items()))


def _attention(text: Any, count: int, window: int | None) -> Mixer:
    heads = text.num_attention_heads
    if latent := getattr(text, "kv_lora_rank", None):  # MLA: all heads share what is cached, and every GPU has it
        query, value = heads * (text.qk_nope_head_dim + text.qk_rope_head_dim), heads * text.v_head_dim
        return Mixer(count, query, (query + value) // 2, value, latent + text.qk_rope_head_dim, 1, window)
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    keys = text.num_key_value_heads * size
    return Mixer(count, heads * size, keys, heads * size, 2 * keys, text.num_key_value_heads, window)


def _linear(text: Any, count: int) -> Mixer:
    precision = str(getattr(text, "mamba_ssm_dtype", None) or "float32")
    element = 2 if "16" in precision else 4
    if heads := getattr(text, "linear_num_value_heads", None):  # gated delta net
        keys = text.linear_num_key_heads * text.linear_key_head_dim
        values, kernel = heads * text.linear_value_head_dim, text.linear_conv_kernel_dim
        state = values * text.linear_key_head_dim
    elif heads := getattr(text, "mamba_num_heads", None) or getattr(text, "mamba_n_heads", None):  # Mamba 2
        size = getattr(text, "mamba_head_dim", None) or text.mamba_d_head
        width = getattr(text, "ssm_state_size", None) or text.mamba_d_state
        keys = (getattr(text, "n_groups", None) or text.mamba_n_groups) * width
        values, kernel = heads * size, getattr(text, "conv_kernel", None) or text.mamba_d_conv
        state = values * width
    else:
        raise ValueError("layers of linear attention that are neither a gated delta net nor Mamba 2")
    return Mixer(count, keys, keys, values, 0, 1, None, state, element, (kernel - 1) * (2 * keys + values))
