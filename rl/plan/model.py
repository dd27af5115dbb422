"""The sizes of a model, from its real config on the meta device: no weights are loaded, no memory is taken."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KNOWN = Path(__file__).resolve().with_name("models")


class ModelUnknown(Exception):
    """There is no config of the model here; the message is one line."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder. Counts are of parameters; ``layer`` is the largest layer, ``experts`` all experts' together,
    ``active`` what one token passes through, ``tensor`` the largest single tensor. ``queries`` and ``keys`` are widths:
    heads x head size. ``intermediate`` is one expert's, or the dense layer's with ``routed`` = 1 and no ``experts``.
    ``trained`` is less than ``params`` with LoRA."""

    name: str
    params: int
    active: int
    experts: int
    embeddings: int
    layer: int
    tensor: int
    trained: int
    layers: int
    hidden: int
    queries: int
    keys: int
    key_heads: int
    intermediate: int
    expert_count: int
    routed: int
    vocabulary: int
    tied: bool
    context: int

    @property
    def lora(self) -> bool:
        return self.trained < self.params

    def kv_bytes(self, element: int, parallel: int = 1) -> int:
        """Bytes of a token's keys and values on each of ``parallel`` GPUs. A head is never split, but copied."""
        heads = max(1, self.key_heads // parallel)
        return 2 * self.layers * heads * (self.keys // self.key_heads) * element


def load_config(name: str) -> Any:
    """The transformers config of a directory, a model whose shape is in rl/plan_models, or a hub name.

    Raises:
        ModelUnknown: none of these can be read.
    """
    from transformers import AutoConfig

    path = Path(name).expanduser()
    known = KNOWN / f"{path.name}.json"
    if not (path / "config.json").is_file() and known.is_file():
        values = json.loads(known.read_text())
        return AutoConfig.for_model(**{k: v for k, v in values.items() if k != "source"})
    try:
        return AutoConfig.from_pretrained(str(path) if path.exists() else name)
    except (OSError, ValueError) as error:
        cause = str(error).strip().splitlines()[0]
        raise ModelUnknown(
            f"actor_rollout_ref.model.path: no config of {name} here or on the hub ({cause}); give a directory with a "
            f"config.json. Known without a hub: {', '.join(sorted(f.stem for f in KNOWN.glob('*.json')))}"
        ) from error


def shape_of(config: Any, name: str, lora_rank: int = 0, lora_targets: Any = None) -> Shape:
    """Sizes of the model that ``config`` describes, counted on the meta device."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    text = config.get_text_config()
    counts = {key: p.numel() for key, p in model.named_parameters()}
    experts = sum(n for key, n in counts.items() if ".experts." in key)
    expert_count = _expert_count(text) if experts else 0
    routed = text.num_experts_per_tok if experts else 1
    params = sum(counts.values())
    layers: dict[str, int] = {}
    for key, n in counts.items():
        if ".layers." in key:
            number = key.split(".layers.")[1].split(".")[0]
            layers[number] = layers.get(number, 0) + n
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return Shape(
        name=name,
        params=params,
        active=params - experts + (experts * routed // expert_count if experts else 0),
        experts=experts,
        embeddings=model.get_input_embeddings().weight.numel(),
        layer=max(layers.values()),
        tensor=max(counts.values()),
        trained=_lora(model, lora_rank, lora_targets) if lora_rank else params,
        layers=len(layers),
        hidden=text.hidden_size,
        queries=text.num_attention_heads * head,
        keys=text.num_key_value_heads * head,
        key_heads=text.num_key_value_heads,
        intermediate=text.moe_intermediate_size if experts else text.intermediate_size,
        expert_count=expert_count,
        routed=routed,
        vocabulary=text.vocab_size,
        tied=bool(text.tie_word_embeddings),
        context=text.max_position_embeddings,
    )


def _expert_count(text: Any) -> int:
    for key in ("num_experts", "n_routed_experts", "num_local_experts"):
        if count := getattr(text, key, None):
            return count
    raise ModelUnknown(f"config of type {text.model_type}: it has experts, but does not say how many")


def _lora(model: Any, rank: int, targets: Any) -> int:
    """Parameters of the two adapters of each linear layer that ``targets`` names, as peft chooses them."""
    from torch import nn

    wanted = None if targets in (None, "all-linear") else {targets} if isinstance(targets, str) else set(targets)
    return sum(
        rank * (module.in_features + module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and (name != "lm_head" if wanted is None else name.split(".")[-1] in wanted)
    )
