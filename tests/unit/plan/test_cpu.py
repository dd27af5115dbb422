"""rl.plan plans a run without GPUs: its memory and time are near those that were measured with real models."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from rl.config.compose import cpu_dtype, register_resolvers
from rl.plan import Plan, cpu, plan
from rl.plan.memory import GIB, TUNING
from rl.plan.model import KNOWN
from rl.plan.tables import show
from tests.check_kit import composed

SMALL = {"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
SMALL |= {"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192}
LARGE = json.loads((KNOWN / "Qwen2.5-Coder-0.5B-Instruct.json").read_text())


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, bfloat16_units: None) -> None:
    """The machine of docs/real-model.md."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=int(23.5 * GIB)))
    monkeypatch.setattr(psutil, "cpu_count", lambda: 2)


def planned(directory: Path, model: dict[str, object], *keys: str) -> Plan:
    (directory / "config.json").write_text(json.dumps(model | {"tie_word_embeddings": False}))
    path = f"actor_rollout_ref.model.path={directory}"
    return plan(composed("+experiment=qwen2_5_coder_0_5b", "scale=cpu", path, *keys))


def sizes(made: Plan, phase: str, *parts: str) -> float:
    """GiB of a phase's parts that begin with one of these."""
    (ledger,) = (one for one in made.gpu if one.name == phase)
    return sum(size for part, size in ledger.parts.items() if part.startswith(parts)) / GIB


def test_a_half_billion_with_adapters(tmp_path: Path) -> None:
    """The measured figures are those of docs/real-model.md, and the planned ones those of docs/planning.md."""
    made = planned(tmp_path, LARGE)
    trainer = ("trainer", "gradients", "kept", "logits")
    token = {phase: 1e3 * seconds / made.pace.tokens for phase, seconds in made.pace.seconds.items()}
    found = {
        "trainer": (sizes(made, "update", *trainer), 10.9),
        "engine": (sizes(made, "update", "engine"), 3.8),
        "machine": (sizes(made, "update", ""), 18.7),
        "fine-tuning": (sizes(made, TUNING, ""), 12.0),
        "log-probabilities": (token["log-probabilities"], 6.0),
        "update": (token["update"], 13.0),
        "rollout": (made.pace.seconds["rollout"] / 60, 8.8),
    }
    lines = (Path(__file__).parents[3] / "docs/planning.md").read_text()
    for what, (value, measured) in found.items():
        assert value == pytest.approx(measured, rel=0.15), what
        assert f"| {measured:g} | {value:.1f} | {value / measured - 1:+.0%} |" in lines, (what, value)
    assert not made.problems
    assert any(line.startswith("update: a row of 4096 tokens takes 23.5 GiB") for line in made.warnings)
    assert max(phase.total for phase in made.gpu) == max(p.total for p in made.gpu if p.name == "update")


def test_all_weights_of_a_smaller_model(tmp_path: Path) -> None:
    made = planned(tmp_path, SMALL, "actor_rollout_ref.model.lora_rank=0")
    size = sizes(made, TUNING, "")
    assert size == pytest.approx(9.2, rel=0.15)
    line = f"| 9.2 | {size:.1f} | {size / 9.2 - 1:+.0%} |"
    assert line in (Path(__file__).parents[3] / "docs/planning.md").read_text(), line


def test_what_does_not_fit_is_one_line(tmp_path: Path) -> None:
    (line,) = planned(tmp_path, LARGE, "data.max_response_length=14000").problems
    assert (
        line.startswith("memory, update: a row of 16048 tokens takes 57") and "lower data.max_response_length" in line
    )
    (line,) = planned(tmp_path, LARGE, "actor_rollout_ref.model.lora_rank=0").problems
    assert "lora_rank=32" in line


def test_a_cache_of_a_given_size_that_is_too_small_names_a_size_that_is_not(tmp_path: Path) -> None:
    key = "actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes"
    (line,) = planned(tmp_path, LARGE, f"{key}=10000000").problems
    assert line.startswith(f"KV cache: 800 tokens per GPU at {key}=10000000")
    assert not planned(tmp_path, LARGE, line.split("it needs ")[1].split(" or ")[0]).problems


def test_the_table_says_what_is_not_known(tmp_path: Path) -> None:
    made, console = planned(tmp_path, LARGE), Console(record=True, width=160, file=io.StringIO())
    path = f"actor_rollout_ref.model.path={tmp_path}"
    show(made, cpu.machine(composed("+experiment=qwen2_5_coder_0_5b", "scale=cpu", path)), console)
    text = console.export_text()
    assert "GPU" not in text
    for words in (
        "of this machine (CPU, 2 cores)",
        "rows of up to 2,519 tokens",
        "on a CPU it is not known",
        "It fits, by calculation",
        TUNING,
    ):
        assert words in text
    assert "CPU memory of a node" not in text


@settings(max_examples=20)
@given(st.integers(1, 200), st.floats(0.0, 1.0))
def test_the_longest_row_is_between_the_mean_and_the_limit(turns: int, spread: float) -> None:
    config = composed("+experiment=qwen2_5_coder_0_5b", "scale=cpu", f"plan.turns={turns}", f"plan.spread={spread}")
    layout = cpu.layout_of(config)
    row = cpu.longest_row(config, layout)
    assert cpu.traffic(config, layout).row - 1 <= row <= layout.row
    made = cpu.machine(config)
    assert cpu.layout_of(made).trainer.tokens == row == cpu.layout_of(cpu.machine(made)).trainer.tokens
    assert config.actor_rollout_ref.actor.use_dynamic_bsz is False and config.cluster.gpu != made.cluster.gpu


@pytest.mark.parametrize(
    ("flags", "dtype"), [("avx2 avx512_bf16", "bfloat16"), ("asimd bf16", "bfloat16"), ("avx2", "float32")]
)
def test_a_cpu_computes_in_what_it_has_units_for(
    flags: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(f"flags\t\t: fpu {flags}\n")
    monkeypatch.setattr("rl.config.compose.Path", lambda name: tmp_path / Path(name).name)
    monkeypatch.setattr("rl.config.compose.cpu_dtype", cpu_dtype)
    register_resolvers()
    config = composed("+experiment=qwen2_5_coder_0_5b", "scale=cpu").actor_rollout_ref
    assert (config.rollout.dtype, config.actor.fsdp_config.mixed_precision.param_dtype) == (dtype, dtype)
