"""rl.plan: sizes are those of real models, parts add up, more never costs less, changes bring what they promise."""

from __future__ import annotations

import functools
import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from rl.checks.model import check_plan
from rl.config.compose import ConfigError
from rl.plan import host, memory, plan, problems
from rl.plan.layout import Layout, layout_of
from rl.plan.memory import GIB
from rl.plan.model import KNOWN, ModelShape, ModelUnknown, load_config, shape_of
from rl.plan.tables import show
from tests.check_kit import composed

ROOT = Path(__file__).parents[3]
DOC = (ROOT / "docs/planning.md").read_text()
GPU_EXPERIMENTS = sorted(path.stem for path in (ROOT / "configs/experiment").glob("qwen3*.yaml"))


@functools.cache
def known(name: str) -> ModelShape:
    return shape_of(load_config(name), name)


def moe() -> ModelShape:
    return known("Qwen3-Coder-30B-A3B-Instruct")


def dense() -> ModelShape:
    return known("Qwen3-8B")


def config(experiment: str = "qwen3_coder_30b", *overrides: str) -> DictConfig:
    return composed(f"+experiment={experiment}", *overrides)


@functools.cache
def read(experiment: str = "qwen3_coder_30b") -> tuple[DictConfig, Layout]:
    """An experiment's config, which nobody changes, and its layout."""
    made = config(experiment)
    return made, layout_of(made)


# ------------------------------------------------------------------ the model


def tiny(kind: str, **values: Any) -> Any:
    from transformers import AutoConfig

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 8,
    }
    if kind == "qwen3_moe":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return AutoConfig.for_model(kind, **sizes, num_key_value_heads=2, vocab_size=128, **values)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("tied", [True, False])
def test_counts_are_those_of_the_real_model(kind: str, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    real: Any = AutoModelForCausalLM.from_config(tiny(kind, tie_word_embeddings=tied))
    shape = shape_of(tiny(kind, tie_word_embeddings=tied), "tiny")
    assert shape.params == shape.trained == sum(p.numel() for p in real.parameters())
    assert shape.layer == sum(p.numel() for p in real.model.layers[0].parameters())
    assert shape.tensor == max(p.numel() for p in real.parameters())
    experts = [p.numel() for key, p in real.named_parameters() if ".experts." in key]
    assert (shape.experts, shape.expert_count) == (sum(experts), 4 if experts else 0)
    assert shape.active == shape.params - sum(experts) // 2


@pytest.mark.parametrize(
    "kind, targets, widths",
    [
        ("qwen3", OmegaConf.create(["q_proj", "v_proj"]), (32 + 32) + (32 + 16)),
        ("qwen3", "all-linear", 2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 64)),
        ("qwen3_moe", ["q_proj", "v_proj"], (32 + 32) + (32 + 16)),
    ],
)
def test_lora_trains_its_adapters(kind: str, targets: Any, widths: int) -> None:
    shape = shape_of(tiny(kind), "tiny", 4, targets)
    assert shape.trained == 2 * 4 * widths and shape.lora


def test_lora_on_all_linear_layers_trains_experts_too() -> None:
    """peft adapts the fused weights of experts; they are most of what is then trained."""
    attention = shape_of(tiny("qwen3_moe"), "tiny", 4, ["q_proj", "k_proj", "v_proj", "o_proj"])
    assert shape_of(tiny("qwen3_moe"), "tiny", 4, "all-linear").trained > 3 * attention.trained


@pytest.mark.parametrize(
    "name, params, active",
    [("Qwen3-Coder-30B-A3B-Instruct", 30.5, 3.3), ("Qwen3-8B", 8.2, 8.2), ("Qwen3-4B-Instruct-2507", 4.0, 4.0)],
)
def test_counts_are_the_published_ones(name: str, params: float, active: float) -> None:
    shape = known(name)
    assert shape.params / 1e9 == pytest.approx(params, abs=0.05)
    assert shape.active / 1e9 == pytest.approx(active, abs=0.06)


def test_a_models_own_directory_wins_over_the_known_shapes(tmp_path: Path) -> None:
    directory = tmp_path / "Qwen3-8B"
    tiny("qwen3").save_pretrained(directory)
    assert shape_of(load_config(str(directory)), "tiny").layers == 2


def test_an_unknown_model_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ModelUnknown, match=r"actor_rollout_ref\.model\.path: no config of nobody/none .*Qwen3-8B"
    ) as caught:
        load_config("nobody/none")
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------ the formulas


@pytest.mark.parametrize("name", ["Qwen3-8B", "Qwen3-Coder-30B-A3B-Instruct"])
def test_activations_are_those_of_the_real_code(name: str) -> None:
    """transformers' modules run at the model's real width, on fake tensors."""
    from tests.activations import measure

    real, tokens = load_config(name), 1 << 19
    real.num_hidden_layers, real.vocab_size = 2, 1024
    shape = replace(shape_of(real, name), layer=0, embeddings=0)
    base = replace(read()[1].trainer, sequence_parallel=1)
    for checkpointing in (True, False):
        trainer = replace(base, checkpointing=checkpointing)
        found = measure(real, tokens, checkpointing)
        assert memory.kept_activations(shape, trainer, tokens) == pytest.approx(found["kept"], rel=0.02)
        if checkpointing:
            planned = memory.one_layer(shape, trainer, tokens, backward=True)
            # What the last norm keeps, 8 bytes a channel, is gone when the last layer is computed again.
            assert planned == pytest.approx(found["backward"] + 8 * shape.hidden * tokens, rel=0.03)
            assert 0.99 < memory.one_layer(shape, trainer, tokens, backward=False) / found["forward"] < 1.15


def test_the_optimizers_step_takes_one_more_copy() -> None:
    """torch's AdamW steps as on a GPU; with few tokens its step is the fullest moment of an update."""
    import torch

    from tests.activations import Alive

    parameters = [torch.nn.Parameter(torch.ones(1000)) for _ in range(8)]
    for parameter in parameters:
        parameter.grad = torch.ones(1000)
    optimizer = torch.optim.AdamW(parameters, foreach=True)
    optimizer.step()  # makes the moments
    with Alive([]) as alive:
        optimizer.step()
    shape, trainer = replace(dense(), params=8000, trained=8000), replace(read()[1].trainer, share=1)
    assert memory.optimizer_step(shape, trainer) == pytest.approx(alive.peak, rel=0.01)
    made, layout = read("qwen3_8b")
    few = replace(layout, trainer=replace(layout.trainer, home=False, tokens=64, fused=True))
    update = next(phase for phase in memory.phases(made, dense(), few) if phase.name == "update")
    assert "the optimizer's step" in update.parts


sizes = st.sampled_from([1, 2, 4, 8])
flags = st.booleans()


class Case(NamedTuple):
    """A Case is what the memory of a GPU is calculated from."""

    config: DictConfig
    shape: ModelShape
    layout: Layout

    def totals(self, **trainer: Any) -> dict[str, int]:
        """The phases' sizes when these values of the trainer are others."""
        changed = replace(self.layout, trainer=replace(self.layout.trainer, **trainer))
        return {phase.name: phase.total for phase in memory.phases(self.config, self.shape, changed)}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A shape, a trainer and an engine of any kind."""
    made, layout = read(draw(st.sampled_from(GPU_EXPERIMENTS)))
    trainer = replace(
        layout.trainer,
        tokens=draw(st.integers(1, 1 << 17)),
        logprob_tokens=draw(st.integers(1, 1 << 17)),
        checkpointing=draw(flags),
        fused=draw(flags),
        flash=draw(flags),
        chunked_entropy=draw(flags),
        compiled=draw(flags),
        entropy_in_update=draw(flags),
        unit_temperature=draw(flags),
    )
    engine = replace(layout.engine, utilization=draw(st.floats(0.1, 0.95)), sleeps=draw(flags))
    shape = draw(st.sampled_from([moe(), dense(), replace(dense(), trained=10**7)]))
    return Case(made, shape, replace(layout, trainer=trainer, engine=engine))


@given(cases())
def test_parts_add_up_and_none_is_negative(case: Case) -> None:
    for phase in memory.phases(*case):
        assert all(size > 0 for size in phase.parts.values())
        assert phase.total == sum(phase.parts.values())
        assert phase.fits == (phase.total <= memory.gpu_bytes(case.config))


@given(cases(), st.integers(1, 1 << 16))
def test_more_tokens_never_take_less(case: Case, more: int) -> None:
    trainer = case.layout.trainer
    less = case.totals()
    now = case.totals(tokens=trainer.tokens + more, logprob_tokens=trainer.logprob_tokens + more)
    assert less.keys() == now.keys() and all(now[key] >= less[key] for key in now)


@given(cases(), sizes)
def test_more_gpus_never_take_more(case: Case, times: int) -> None:
    trainer = case.layout.trainer
    before = case.totals()
    now = case.totals(nodes=trainer.nodes * times, share=trainer.share * times)
    assert all(now[key] <= before[key] for key in now)


@given(cases())
def test_what_saves_memory_saves_it(case: Case) -> None:
    before = case.totals()
    for key in ("checkpointing", "home", "offload_optimizer", "chunked_entropy"):
        now = case.totals(**{key: True})
        slack = memory.ENTROPY_CHUNK * case.shape.vocabulary * 12 if key == "chunked_entropy" else 0
        assert all(now[phase] <= before[phase] + slack for phase in now), key


@given(cases(), st.integers(1, 64))
def test_a_larger_cache_holds_more_tokens(case: Case, more: int) -> None:
    shape, engine = case.shape, case.layout.engine
    room = memory.kv_room(case.config, shape, engine)
    tokens = memory.kv_tokens(shape, engine, room)
    assert tokens % memory.BLOCK == 0 and shape.sequence_bytes(tokens, engine.element, engine.tensor) <= max(0, room)
    assert memory.kv_tokens(shape, engine, room + more * GIB) >= tokens


@functools.cache
def changing(experiment: str) -> DictConfig:
    return config(experiment)


@settings(max_examples=40)
@given(st.integers(1024, 200_000), st.integers(1, 100_000), st.sampled_from(GPU_EXPERIMENTS))
def test_a_longer_context_never_takes_less(response: int, more: int, experiment: str) -> None:
    """GPUs and CPU memory are compared."""
    made, plans = changing(experiment), []
    for length in (response, response + more):
        made.data.max_response_length = length  # all other keys follow it or stay
        layout = layout_of(made)
        ledgers = memory.phases(made, moe(), layout) + host.ledgers(made, moe(), layout)
        plans.append([ledger.total for ledger in ledgers if ledger.name not in (host.DISK, host.CHECKPOINTS)])
    assert all(long >= short for short, long in zip(*plans, strict=True))


def test_a_checkpoint_has_weights_and_two_moments() -> None:
    made = config()
    assert host.checkpoint_bytes(made, moe(), layout_of(made).trainer) == 12 * moe().params
    assert made.trainer.max_actor_ckpt_to_keep == 2
    assert host.checkpoints_kept(made) == 3  # the oldest goes when the new one is whole
    made.trainer.max_actor_ckpt_to_keep = made.run.save_minutes = None
    assert host.checkpoints_kept(made) == made.trainer.total_training_steps // made.trainer.save_freq
    made.trainer.total_training_steps += 1
    assert host.checkpoints_kept(made) == made.trainer.total_training_steps // made.trainer.save_freq + 1
    made.run.save_minutes = 60  # at any step
    assert host.checkpoints_kept(made) == made.trainer.total_training_steps
    made.trainer.total_training_steps, made.trainer.max_actor_ckpt_to_keep = None, 2  # it ends by its epochs
    assert host.checkpoints_kept(made) == 3


# ------------------------------------------------------------------ whole plans


@pytest.mark.parametrize("experiment", GPU_EXPERIMENTS)
def test_shipped_experiments_fit(experiment: str) -> None:
    """The figures are those of the table in docs/planning.md."""
    made = plan(config(experiment))
    pace = made.pace
    assert made.problems == () and made.kv_tokens >= made.layout.engine.context
    assert pace.step_s == pytest.approx(sum(pace.seconds.values())) and pace.tokens > pace.sampled > 0
    sizes = {ledger.name: ledger.total / GIB for ledger in made.node}
    figures = [*(phase.total / GIB for phase in made.gpu), max(sizes[host.START], sizes[host.STEP])]
    figures += [sizes[host.CHECKPOINTS], pace.used, pace.played, pace.step_s / 60]
    (row,) = re.findall(rf"^\| `{experiment}` \| [\d +]+ \| (.+) \|$", DOC, re.MULTILINE)
    cells = row.split(" | ")
    assert [int(cell) for cell in cells if ":" not in cell] == [round(figure) for figure in figures]


ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
REFUSED = {
    "one node": (
        ["trainer.nnodes=1"],
        "GPU memory, rollout",
        f"72.6 GiB with {ACTOR}.fsdp_config.optimizer_offload=true",
    ),
    "engine too large": (
        [f"{ROLLOUT}.gpu_memory_utilization=0.95"],
        "GPU memory, rollout",
        f"{ROLLOUT}.gpu_memory_utilization=",
    ),
    "no sleep": (
        [f"{ROLLOUT}.free_cache_engine=false"],
        "GPU memory, update",
        f"{ROLLOUT}.free_cache_engine=true and {ROLLOUT}.enable_sleep_mode=true",
    ),
    "whole logits": (
        [
            f"{ACTOR}.entropy_from_logits_with_chunking=false",
            f"{ACTOR}.fsdp_config.use_torch_compile=false",
            f"{ACTOR}.ppo_max_token_len_per_gpu=65536",
        ],
        "GPU memory, log-probabilities",
        f"{ACTOR}.entropy_from_logits_with_chunking=true",
    ),
    "long rows on few GPUs": (
        [
            f"{ACTOR}.ppo_max_token_len_per_gpu=131072",
            f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=1",
        ],
        "GPU memory, update",
        "ulysses_sequence_parallel_size=2",
    ),
    "no offload": (
        ["+experiment=qwen3_4b", f"{ACTOR}.fsdp_config.offload_policy=false"],
        "GPU memory, update",
        f"{ACTOR}.fsdp_config.offload_policy=true",
    ),
    "all activations": (
        ["+experiment=qwen3_4b", "actor_rollout_ref.model.enable_gradient_checkpointing=false"],
        "GPU memory, update",
        "actor_rollout_ref.model.enable_gradient_checkpointing=true",
    ),
    "long rows with Megatron": (
        ["+experiment=qwen3_coder_30b_megatron", f"{ACTOR}.ppo_max_token_len_per_gpu=131072"],
        "GPU memory, update",
        f"{ACTOR}.ppo_max_token_len_per_gpu=65536 and {ACTOR}.megatron.context_parallel_size=8",
    ),
    "small hosts": (["cluster.cpu_gb=180"], host.STEP, "sandbox.concurrency=16"),
    "small disks": (["cluster.disk_gb=50"], host.DISK, "sandbox.concurrency=16"),
    "many checkpoints": (
        ["cluster.checkpoint_gb=700", "trainer.max_actor_ckpt_to_keep=5"],
        host.CHECKPOINTS,
        "trainer.max_actor_ckpt_to_keep=1",
    ),
    "too few for any checkpoint": (
        ["cluster.checkpoint_gb=500"],
        host.CHECKPOINTS,
        "682.4 GiB with trainer.max_actor_ckpt_to_keep=1",
    ),
}


def refused(overrides: list[str], problem: str) -> str:
    """The one line of a plan that says this."""
    (line,) = [text for text in plan(composed(*based(overrides))).problems if text.startswith(problem)]
    assert "\n" not in line
    return line


def based(overrides: list[str]) -> list[str]:
    return [*([] if overrides[0].startswith("+experiment") else ["+experiment=qwen3_coder_30b"]), *overrides]


@pytest.mark.parametrize("case", REFUSED)
def test_a_change_brings_what_a_refusal_says(case: str) -> None:
    """Each change that a refusal names is composed into the config; that ledger then has the size that was promised."""
    overrides, problem, change = REFUSED[case]
    line = refused(overrides, problem)
    assert change in line
    named = re.findall(r"([\d.]+) GiB with (\S+)(?: and (\S+=\S+))?", line)
    assert 1 <= len(named) <= 3
    for size, *changes in named:
        better = composed(*based(overrides), *filter(None, changes))
        shape = known(Path(better.actor_rollout_ref.model.path).name)
        assert f"{problems.ledgers(better, shape)[problem].total / GIB:.1f}" == size, changes


@pytest.mark.parametrize(
    "overrides, says",
    [
        ([f"{ROLLOUT}.gpu_memory_utilization=0.2"], f"{ROLLOUT}.gpu_memory_utilization=0.24"),
        (
            ["+experiment=qwen3_8b", "cluster.gpu_gb=24", f"{ROLLOUT}.gpu_memory_utilization=0.95"],
            "data.max_response_length=",
        ),
    ],
)
def test_a_cache_that_is_too_small_for_one_episode(overrides: list[str], says: str) -> None:
    line = refused(overrides, "KV cache")
    assert says in line
    for change in line.split("it needs ")[1].split(" or "):
        if "=" in change:
            better = plan(composed(*based(overrides), change))
            assert not any(text.startswith("KV cache") for text in better.problems), change


@pytest.mark.parametrize(
    "overrides, words",
    [
        ([f"{ROLLOUT}.expert_parallel_size=8"], ["expert_parallel_size=8", "verl refuses"]),
        (["cluster.cpu_gb=128"], ["CPU memory of a node, at the start", "no key that is known here"]),
        (["data.max_response_length=262144"], ["262144 positions", "data.max_response_length"]),
        ([f"{ROLLOUT}.tensor_model_parallel_size=3"], ["tensor_model_parallel_size=3", "heads"]),
        ([f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=5"], ["ulysses", "does not divide"]),
        (
            ["actor_rollout_ref.model.use_fused_kernels=true"],
            ["use_fused_kernels", "entropy_from_logits_with_chunking"],
        ),
    ],
)
def test_refusals_name_their_keys(overrides: list[str], words: list[str]) -> None:
    made = plan(config("qwen3_coder_30b", *overrides))
    assert any(all(word in line for word in words) for line in made.problems), made.problems


def test_images_have_what_boxes_leave_of_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "count_tasks", lambda *_: 500)
    line = refused(["cluster.disk_gb=100"], host.DISK)
    assert "100.0 GiB with sandbox.image_budget_gb=36" in line


def test_a_cache_that_is_too_small_for_the_episodes_is_a_note() -> None:
    made = plan(config("qwen3_8b", "sandbox.concurrency=64"))
    assert not made.problems and any("sandbox.concurrency" in line for line in made.warnings)


def test_checks_make_the_plan_for_gpus_only() -> None:
    made = config("qwen3_coder_30b", "trainer.nnodes=1")
    with pytest.raises(ConfigError, match=r"GPU memory, rollout.*optimizer_offload=true.*plan\.check=false") as caught:
        check_plan(made)
    assert all("\n" not in line and "plan.check=false" in line for line in caught.value.lines)
    made.plan.check = False
    check_plan(made)
    made.plan.check, made.trainer.device = True, "cpu"
    check_plan(made)


def test_the_command(tmp_path: Path) -> None:
    """It exits with 2 and a line per problem; neither verl nor vLLM is imported, and nothing is written."""
    code = """
import sys
from rl.plan.__main__ import main
try:
    main()
finally:
    print("imported:", sorted({"verl", "vllm", "ray"} & set(sys.modules)))
"""
    command = [sys.executable, "-c", code, "+experiment=qwen3_coder_30b", "trainer.nnodes=1"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("plan: GPU memory"), done.stderr
    assert "TOO MUCH" in done.stdout and "It fits" not in done.stdout and "imported: []" in done.stdout
    assert {file.name for file in tmp_path.iterdir()} <= {".nv"}  # which a GPU's driver makes


def test_tables_of_a_plan_that_fits() -> None:
    made = config()
    console = Console(record=True, width=160, file=io.StringIO())
    show(plan(made), made, console)
    text = console.export_text()
    assert "It fits" in text and "TOO MUCH" not in text
    for words in (
        "30.53 billion parameters, 3.35",
        "Least room: 10.1 GiB of a GPU, rollout",
        "21 in the engine, 11 use tools; 100% of the contexts",
        "Minutes a step hang on: 17 to 67 with plan.turns 20 to 100",
        "weight sync",
        "checkpoints of 341 GiB",
        "groups played for them (50% with equal rewards)",
        "assumed",
    ):
        assert words in text


def test_known_shapes_say_where_they_are_from() -> None:
    for file in KNOWN.glob("*.json"):
        assert json.loads(file.read_text())["source"]
