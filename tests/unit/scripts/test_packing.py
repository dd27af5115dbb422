"""Packed rows of models with linear attention: verl's own packing, against each row alone, on the CPU."""

import inspect
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rl.checks.model import check_model, stateful
from rl.config.compose import ConfigError, package_dir
from rl.quickstart.policy import make_policy
from tests.check_kit import composed

ROWS = (5, 70, 40)  # the rule works in chunks of 64 tokens
TYPES = ("qwen3_5", "qwen3_5_moe")
PACKING = "actor_rollout_ref.model.use_remove_padding"


@pytest.fixture(autouse=True)
def unpatched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """verl patches classes and functions of transformers for the whole process; take that back."""
    from transformers.integrations import flash_attention
    from transformers.models.qwen3_5 import modeling_qwen3_5 as dense
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as moe

    monkeypatch.setattr(flash_attention, "_flash_attention_forward", flash_attention._flash_attention_forward)
    for module, name in ((dense, "Qwen3_5"), (moe, "Qwen3_5Moe")):
        for part in ("Model", "DecoderLayer", "GatedDeltaNet", "ForConditionalGeneration"):
            made = getattr(module, name + part)
            monkeypatch.setattr(made, "forward", made.forward)
        vision = getattr(module, f"{name}VisionModel")
        monkeypatch.setattr(vision, "fast_pos_embed_interpolate", None, raising=False)
    yield


def model_directory(kind: str, out: Path) -> Path:
    """A policy of scale=tiny; of a type that ends with _text, its decoder alone."""
    make_policy(out, seed=1, experts=4 if "moe" in kind else 0, head_dim=128, hybrid=True)
    if kind.endswith("_text"):
        config = json.loads((out / "config.json").read_text())
        text = {
            **config["text_config"],
            "architectures": [config["architectures"][0].replace("ConditionalGeneration", "CausalLM")],
        }
        (out / "config.json").write_text(json.dumps(text))
    return out


def loaded(directory: Path) -> Any:
    from transformers import AutoConfig
    from verl.utils.model import get_hf_auto_model_class

    config = AutoConfig.from_pretrained(directory)
    torch.manual_seed(0)
    return get_hf_auto_model_class(config).from_config(config, attn_implementation="sdpa").eval()


def as_verl_packs(model: Any, rows: list[torch.Tensor]) -> dict[str, Any]:
    """Return what the trainer's engine gives a model that it has patched."""
    from verl.models.transformers.monkey_patch import apply_monkey_patch
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    apply_monkey_patch(model, use_remove_padding=True)
    engine: Any = object.__new__(FSDPEngineWithLMHead)
    engine.module, engine.pad_to_length, engine.use_ulysses_sp = model, False, False
    engine.pass_packed_cu_seqlens = "cu_seqlens" in inspect.signature(model.forward).parameters
    nested = [
        torch.nested.as_nested_tensor(parts, layout=torch.jagged)
        for parts in (rows, [torch.arange(len(row)) for row in rows])
    ]
    batch = TensorDict(
        {"input_ids": nested[0], "position_ids": nested[1], "temperature": torch.ones(len(rows))}, len(rows)
    )
    inputs, _ = engine.prepare_model_inputs(batch)
    return inputs


def with_borders(rule: Any) -> Any:
    """A rule for linear attention that starts anew at each border, as flash-linear-attention's kernel does."""

    def kernel(query: Any, key: Any, value: Any, g: Any, beta: Any, cu_seqlens: Any = None, **more: Any) -> Any:
        borders = [0, query.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
        more.pop("cu_seqlens_cpu", None)
        parts = [
            rule(
                *(tensor[:, start:end] for tensor in (query, key, value)),
                g=g[:, start:end],
                beta=beta[:, start:end],
                **more,
            )[0]
            for start, end in itertools.pairwise(borders)
        ]
        return torch.cat(parts, dim=1), None

    return kernel


def apart(directory: Path, borders: bool) -> tuple[float, float]:
    """The largest difference of packed logits from those of rows alone, and of the gradients of the first layer,
    relative to the largest of them."""
    model = loaded(directory)
    rows = [torch.randint(0, 500, (length,)) for length in ROWS]
    first = next(p for name, p in model.named_parameters() if name.endswith("layers.0.linear_attn.in_proj_qkv.weight"))

    def pass_through(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (gradient,) = torch.autograd.grad(torch.log_softmax(logits, -1)[..., :7].mean(), first)
        return logits.detach(), gradient

    alone, wanted = pass_through(torch.cat([model(input_ids=row[None], use_cache=False).logits for row in rows], 1))
    inputs = as_verl_packs(model, rows)
    for module in model.modules():
        if borders and hasattr(module, "chunk_gated_delta_rule"):
            module.chunk_gated_delta_rule = with_borders(module.chunk_gated_delta_rule)
    packed, gradient = pass_through(model(**inputs, use_cache=False).logits)
    return (packed - alone).abs().max().item(), ((gradient - wanted).abs().max() / wanted.abs().max()).item()


@pytest.mark.parametrize("kind", TYPES)
def test_packed_rows_are_rows_alone(kind: str, tmp_path: Path) -> None:
    """With a kernel that knows borders. transformers' own rule in plain torch is told of them, too, and ignores them:
    therefore rl.checks.packages wants flash-linear-attention."""
    directory = model_directory(kind, tmp_path / "model")
    logits, gradients = apart(directory, borders=True)
    assert logits < 1e-4 and gradients < 1e-4
    assert apart(directory, borders=False)[0] > 1e-3
    check_model(composed(f"actor_rollout_ref.model.path={directory}", f"{PACKING}=true"))


@pytest.mark.parametrize("kind", [f"{kind}_text" for kind in TYPES])
def test_rows_that_read_each_other_are_refused(kind: str, tmp_path: Path) -> None:
    """verl packs a decoder that was published alone without a word, whatever the kernel."""
    directory = model_directory(kind, tmp_path / "model")
    assert apart(directory, borders=True)[0] > 1e-3
    model = f"actor_rollout_ref.model.path={directory}"
    with pytest.raises(
        ConfigError, match=rf"linear attention of {kind} .* set {PACKING}=false, or .* \({kind[:-5]}\)$"
    ):
        check_model(composed(model, f"{PACKING}=true"))
    check_model(composed(model, f"{PACKING}=false"))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Qwen/Qwen3.5-9B", "qwen3_5"),
        ("Qwen/Qwen3.5-35B-A3B", "qwen3_5_moe"),
        ("Qwen/Qwen3-8B", None),
        ("somebody/something", None),
    ],
)
def test_models_of_the_hub_whose_layers_carry_a_state(name: str, kind: str | None) -> None:
    assert stateful(composed(f"actor_rollout_ref.model.path={name}")) == kind


def test_other_models_with_a_state(tmp_path: Path) -> None:
    for number, (values, kind) in enumerate(
        [
            ({"model_type": "nemotron_h", "mamba_num_heads": 4, "ssm_state_size": 8}, "nemotron_h"),
            ({"model_type": "seen", "text_config": {"model_type": "heard", "linear_num_key_heads": 2}}, "seen"),
            ({"model_type": "qwen3", "head_dim": 32}, None),
        ]
    ):
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(values))
        assert stateful(composed(f"actor_rollout_ref.model.path={directory}")) == kind


def test_vllms_qwen3_5_still_imports_torchvision() -> None:
    """Through code of transformers for images, which names it without asking whether it is there."""
    transformers, vllm = (Path(package_dir(name)) for name in ("transformers", "vllm"))
    images = (transformers / "models/qwen2_vl/image_processing_qwen2_vl.py").read_text()
    assert "\nfrom torchvision" in images
    assert (
        "models.qwen2_vl.image_processing_qwen2_vl import" in (vllm / "model_executor/models/qwen3_vl.py").read_text()
    )
