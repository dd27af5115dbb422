"""The sizes of a model, read from its config on the meta device: no weights are loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.config.compose import ConfigError
from rl.plan.layers import Mixer, mixers

KNOWN = Path(__file__).resolve().with_name("models")


class ModelUnknown(ConfigError):
    """There is no config of the model here; the message is one line."""


@dataclass(frozen=True)
class ModelShape:
    """A shape holds the sizes of a decoder. Numbers of parameters: ``params`` of all, ``trained`` (less with LoRA),
    ``active`` of what one token passes through, ``experts`` of all experts, ``layer`` of the largest layer, ``tensor``
    of the largest tensor. ``heads`` and ``head``: attention heads and the size of one. ``intermediate`` is one expert's
    width; without experts it is the dense layer's, and ``routed`` (experts per token) is 1."""

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
    heads: int
    head: int
    mixers: tuple[Mixer, ...]
    intermediate: int
    expert_count: int
    routed: int
    vocabulary: int
    tied: bool
    context: int

    @property
    def lora(self) -> bool:
        """Tell whether only adapters are trained."""
        return self.trained < self.params

    @property
    def queries(self) -> int:
        """Return the largest width of queries and values, which is that of the attention at work."""
        return max(max(mixer.queries, mixer.values) for mixer in self.mixers)

    @property
    def keys(self) -> int:
        """Return the largest width of keys."""
        return max(mixer.keys for mixer in self.mixers)

    def sequence_bytes(self, tokens: float, element: int, parallel: int = 1) -> float:
        """Return the bytes of the engine's cache that a sequence of so many tokens takes on each of ``parallel`` GPUs:
        keys and values, and the states of linear attention."""
        return sum(mixer.sequence_bytes(tokens, element, parallel) for mixer in self.mixers)

    def shared_bytes(self, tokens: float, element: int, parallel: int = 1) -> float:
        """Return the bytes of these that sequences which begin with the same tokens have once: keys and values of all
        layers without a window."""
        whole = [mixer for mixer in self.mixers if mixer.window is None and not mixer.state]
        return sum(mixer.sequence_bytes(tokens, element, parallel) for mixer in whole)


def turn_notes(name: str | None) -> list[str]:
    """Return a line if the tokenizer in a model's directory ends sequences with another token than the one with which
    its chat template ends a turn (``rollout.proxy.render.end_note``)."""
    from rollout.proxy.render import end_note, generation_config

    path = Path(name or "?").expanduser()
    if not (path / "tokenizer_config.json").is_file():
        return []
    from transformers import AutoTokenizer

    try:
        note = end_note(AutoTokenizer.from_pretrained(path), generation_config(str(path)))
    except Exception:  # a plan is of sizes; that a tokenizer or its template fails is for the start to say
        return []
    return [note] if note else []


def load_config(name: str | None) -> Any:
    """Return the transformers config of a directory, of a model whose shape is in rl/plan/models, or of a hub name.

    Raises:
        ModelUnknown: none of these can be read, or there is no name.
    """
    from transformers import AutoConfig

    if not name or name == "?":
        raise ModelUnknown("actor_rollout_ref.model.path is not set; choose an experiment (+experiment=NAME)")

    path = Path(name).expanduser()
    known = KNOWN / f"{path.name}.json"
    if not (path / "config.json").is_file() and known.is_file():
        values = json.loads(known.read_text())
        return AutoConfig.for_model(**{key: value for key, value in values.items() if key != "source"})
    try:
        return AutoConfig.from_pretrained(str(path) if path.exists() else name)
    except (OSError, ValueError) as error:
        cause = str(error).strip().splitlines()[0]
        raise ModelUnknown(
            f"actor_rollout_ref.model.path: no config of {name} here or on the hub ({cause}); give a directory with a "
            f"config.json. Known without a hub: {', '.join(sorted(f.stem for f in KNOWN.glob('*.json')))}"
        ) from error


def shape_of(config: Any, name: str, lora_rank: int = 0, lora_targets: Any = None) -> ModelShape:
    """Return the sizes of the model that a transformers config describes.

    Raises:
        ModelUnknown: the model has experts, but its config does not say how many, or layers of an unknown type.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    text = config.get_text_config()
    counts = {key: p.numel() for key, p in model.named_parameters()}
    params, experts = sum(counts.values()), sum(n for key, n in counts.items() if ".experts." in key)
    expert_count = _expert_count(text) if experts else 0
    routed = text.num_experts_per_tok if experts else 1
    layers = [sum(p.numel() for p in layer.parameters()) for layer in model.get_decoder().layers]
    try:
        mixed = mixers(text)
    except ValueError as error:
        raise ModelUnknown(f"config of type {text.model_type}: rl.plan does not know {error}") from error
    return ModelShape(
        name=name,
        params=params,
        active=params - experts + (experts * routed // expert_count if experts else 0),
        experts=experts,
        embeddings=model.get_input_embeddings().weight.numel(),
        layer=max(layers),
        tensor=max(counts.values()),
        trained=_trained(model, lora_rank, lora_targets) if lora_rank else params,
        layers=len(layers),
        hidden=text.hidden_size,
        heads=text.num_attention_heads,
        head=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        mixers=mixed,
        intermediate=(experts and getattr(text, "moe_intermediate_size", None)) or text.intermediate_size,
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


def _trained(model: Any, rank: int, targets: Any) -> int:
    """Return the parameters that LoRA trains; puts its adapters into ``model``."""
    from peft import LoraConfig, get_peft_model

    modules = targets if isinstance(targets, str | None) else list(targets)
    adapters = LoraConfig(r=rank, target_modules=modules or "all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, adapters, low_cpu_mem_usage=True).get_nb_trainable_parameters()[0]
