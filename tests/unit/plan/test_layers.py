"""rl.plan reads a model's layers: what a sequence takes of the engine's cache, and the FLOPs of mixing its tokens."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.plan import memory, plan
from rl.plan.layers import mixers
from rl.plan.model import ModelShape, ModelUnknown, load_config, shape_of
from tests.check_kit import composed


def text(kind: str, **values: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **values).get_text_config()


def mixing(shape: ModelShape, context: int) -> float:
    """The FLOPs that mixing takes per token; those of matrices do not depend on the context."""
    return sum(mixer.flops(context) for mixer in shape.mixers)


@functools.cache
def known(name: str) -> ModelShape:
    return shape_of(load_config(name), name)


@pytest.mark.parametrize("name, params, active", [("Qwen3.5-9B", 8.95, 8.95), ("Qwen3.5-35B-A3B", 34.66, 3.45)])
def test_counts_are_the_published_ones(name: str, params: float, active: float) -> None:
    shape = known(name)
    assert shape.params / 1e9 == pytest.approx(params, abs=0.01) and shape.active / 1e9 == pytest.approx(
        active, abs=0.01
    )


def a_token(config: Any, parallel: int = 1) -> float:
    """The bytes that the last token of a long sequence adds to a bf16 cache."""
    return sum(
        one.sequence_bytes(200_001, 2, parallel) - one.sequence_bytes(200_000, 2, parallel) for one in mixers(config)
    )


@pytest.mark.parametrize(
    "config, wanted",
    [
        (
            load_config("Qwen3-Coder-30B-A3B-Instruct"),
            {1: 98304, 2: 49152, 4: 24576, 8: 24576},
        ),  # a head is never split
        (load_config("Qwen3.5-9B"), {1: 32768, 4: 8192, 8: 8192}),  # 8 of 32 layers x 2 x 4 heads x 256 x 2 bytes
        (load_config("Qwen3.5-35B-A3B"), {1: 20480, 2: 10240, 8: 10240}),
        (text("deepseek_v3"), {1: 70272, 8: 70272}),  # 61 layers x (512 + 64) x 2 bytes, on every GPU
        (text("gpt_oss"), {1: 36864}),  # 18 of 36 layers: the others have a window of 128 tokens
        (text("nemotron_h"), {1: 4096}),  # one of four layers
    ],
    ids=["qwen3_moe", "qwen3_5", "qwen3_5_moe", "mla", "windows", "mamba"],
)
def test_a_token_takes_what_the_layers_with_a_growing_cache_keep(config: Any, wanted: dict[int, int]) -> None:
    assert {parallel: a_token(config, parallel) for parallel in wanted} == wanted


@pytest.mark.parametrize("parallel", [1, 2, 4])
def test_a_state_is_as_large_as_vllms(parallel: int) -> None:
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Calculator

    gated, mamba = text("qwen3_5_text"), text("nemotron_h")
    wanted = [
        (gated, Calculator.gated_delta_net_state_shape(
            parallel, gated.linear_num_key_heads, gated.linear_num_value_heads, gated.linear_key_head_dim,
            gated.linear_value_head_dim, gated.linear_conv_kernel_dim,
        )),
        (mamba, Calculator.mamba2_state_shape(
            parallel, mamba.mamba_num_heads * mamba.mamba_head_dim, mamba.n_groups, mamba.mamba_num_heads,
            mamba.mamba_head_dim, mamba.ssm_state_size, mamba.conv_kernel,
        )),
    ]  # fmt: skip
    for config, (convolved, state) in wanted:
        (linear,) = [one for one in mixers(config) if one.state]
        assert linear.sequence_bytes(5, 2, parallel) == linear.count * (2 * math.prod(convolved) + 4 * math.prod(state))


def test_windows_and_states_do_not_grow() -> None:
    (_, sliding), (_, linear) = mixers(text("gpt_oss")), mixers(load_config("Qwen3.5-9B"))
    assert sliding.sequence_bytes(128, 2, 1) == sliding.sequence_bytes(10**6, 2, 1) == 18 * 128 * 2 * 8 * 64 * 2
    assert linear.sequence_bytes(0, 2, 1) == linear.sequence_bytes(10**6, 2, 1) > 48 * 2**20


def test_an_unknown_kind_of_layer_is_one_line() -> None:
    with pytest.raises(ModelUnknown, match=r"^config of type falcon_h1: rl.plan does not know layers of type hybrid$"):
        shape_of(text("falcon_h1", num_hidden_layers=2), "x")


@given(st.integers(1, 300_000), st.integers(1, 300_000))
def test_attention_costs_more_in_longer_contexts_and_no_more_than_plain_attention(one: int, other: int) -> None:
    shorter, longer = sorted((one, other))
    hybrid, dense = known("Qwen3.5-9B"), known("Qwen3-8B")
    for shape in (hybrid, dense):
        assert mixing(shape, shorter) <= mixing(shape, longer)
    # 8 layers of 16 heads of 256 in place of 36 of 32 of 128, and the states' share, which no length changes.
    grown = [mixing(shape, longer) - mixing(shape, shorter) for shape in (hybrid, dense)]
    assert grown[0] * 36 == pytest.approx(grown[1] * 8)


def test_a_window_is_what_tokens_see() -> None:
    (full, sliding) = mixers(text("gpt_oss"))
    assert sliding.flops(100) == full.flops(100)  # within the window
    seen = sum(min(position, 128) for position in range(10_000)) / 10_000
    assert sliding.flops(10_000) == pytest.approx(18 * 4 * 64 * 64 * seen, rel=0.001)


def test_four_times_as_many_episodes_fit_beside_a_hybrid() -> None:
    """A plan says of the cache what follows from the layers: tokens, episodes, and the length that would fit."""
    keys = ["+experiment=qwen3_8b", "actor_rollout_ref.model.path=Qwen3.5-9B"]
    made = plan(composed(*keys))
    engine, room = made.layout.engine, memory.kv_room(composed(*keys), made.shape, made.layout.engine)
    longest = made.shape.sequence_bytes(engine.context, 2, 1)
    assert made.kv_tokens / engine.context == pytest.approx(room / longest, rel=0.001)
    assert made.pace.load.held > room / (131_072 * engine.context) * 3  # were all layers plain attention


def test_a_length_that_is_named_fits() -> None:
    """A state takes its room however short the sequence is."""
    model = "actor_rollout_ref.model.path=Qwen3.5-9B"
    keys = ["+experiment=qwen3_8b", model, "actor_rollout_ref.rollout.gpu_memory_utilization=0.253"]
    (problem,) = [text for text in plan(composed(*keys)).problems if text.startswith("KV cache")]
    (length,) = re.findall(r"data.max_response_length=(\d+)", problem)
    again = plan(composed(*keys, f"data.max_response_length={length}"))
    assert not [text for text in again.problems if text.startswith("KV cache")], (problem, again.kv_tokens)
