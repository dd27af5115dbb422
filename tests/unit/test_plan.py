"""rl.plan: sizes are those of real models, parts add up, more never costs less, what it says to change is enough."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig
from rich.console import Console

from rl.checks.model import check_plan
from rl.config import ConfigError, compose
from rl.plan import host, memory, plan
from rl.plan.layout import engine_of, episodes_of, trainer_of
from rl.plan.memory import GIB, Room
from rl.plan.model import KNOWN, ModelUnknown, Shape, load_config, shape_of
from rl.plan.tables import show

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs/planning.md").read_text()
GPU_EXPERIMENTS = sorted(path.stem for path in (ROOT / "configs/experiment").glob("qwen3*.yaml"))
ROOM = Room(80 * GIB, 3 * GIB, 2 * GIB)


def known(name: str) -> Shape:
    return shape_of(load_config(name), name)


MOE, DENSE = known("Qwen3-Coder-30B-A3B-Instruct"), known("Qwen3-8B")


def config(experiment: str = "qwen3_coder_30b", *overrides: str) -> DictConfig:
    return compose([f"+experiment={experiment}", *overrides])


CONFIGS = {experiment: config(experiment) for experiment in GPU_EXPERIMENTS}


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


def test_lora_counts_are_pefts() -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    for targets in ("all-linear", ["q_proj", "v_proj"]):
        real: Any = AutoModelForCausalLM.from_config(tiny("qwen3"))
        adapted = get_peft_model(real, LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
        shape = shape_of(tiny("qwen3"), "tiny", 4, targets)
        assert shape.trained == adapted.get_nb_trainable_parameters()[0] and shape.lora


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


def test_keys_and_values_of_a_token() -> None:
    # 2 x 48 layers x 4 heads x 128 x 2 bytes; a head is never split
    assert [MOE.kv_bytes(2, parallel) for parallel in (1, 2, 4, 8)] == [98304, 49152, 24576, 24576]


# ------------------------------------------------------------------ the formulas


def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    spec = importlib.util.spec_from_file_location("calibrate_plan", ROOT / "scripts" / "calibrate_plan.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["Qwen3-8B", "Qwen3-Coder-30B-A3B-Instruct"])
def test_activations_are_those_of_the_real_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of transformers' modules at the model's real width, on fake tensors."""
    real, tokens = load_config(name), 1 << 19
    real.num_hidden_layers, real.vocab_size = 2, 1024
    shape = replace(shape_of(real, name), layer=0, embeddings=0)
    base = replace(trainer_of(config()), sequence_parallel=1)
    for checkpointing in (True, False):
        trainer = replace(base, checkpointing=checkpointing)
        found = script(monkeypatch).measure(real, tokens, checkpointing)
        assert memory.kept_activations(shape, trainer, tokens) == pytest.approx(found["kept"], rel=0.02)
        if checkpointing:
            planned = memory.one_layer(shape, trainer, tokens, backward=True)
            assert planned == pytest.approx(found["backward"] + 8 * shape.hidden * tokens, rel=0.03)


def test_the_optimizers_step_takes_one_more_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of torch's AdamW as it is on a GPU; with few tokens it is the fullest moment of an update."""
    import torch

    parameters = [torch.nn.Parameter(torch.ones(1000)) for _ in range(8)]
    for parameter in parameters:
        parameter.grad = torch.ones(1000)
    optimizer = torch.optim.AdamW(parameters, foreach=True)
    optimizer.step()  # makes the moments
    with script(monkeypatch).Alive([]) as alive:
        optimizer.step()
    shape, trainer = replace(DENSE, params=8000, trained=8000), replace(trainer_of(config()), share=1)
    assert memory.optimizer_step(shape, trainer) == pytest.approx(alive.peak, rel=0.01)
    few = replace(trainer_of(config("qwen3_8b")), home=False, tokens=64, fused=True)
    update = next(
        phase for phase in memory.phases(DENSE, few, engine_of(config("qwen3_8b"), few), ROOM) if phase.name == "update"
    )
    assert "the optimizer's step" in {part.name for part in update.parts}


sizes = st.sampled_from([1, 2, 4, 8])
flags = st.booleans()


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Shape, Any, Any]:
    """A shape, a trainer and an engine of any kind."""
    cfg = CONFIGS[draw(st.sampled_from(GPU_EXPERIMENTS))]
    trainer = trainer_of(cfg)
    engine = engine_of(cfg, trainer)
    trainer = replace(
        trainer,
        tokens=draw(st.integers(1, 1 << 17)),
        logprob_tokens=draw(st.integers(1, 1 << 17)),
        checkpointing=draw(flags),
        fused=draw(flags),
        chunked_entropy=draw(flags),
        compiled=draw(flags),
        entropy_in_update=draw(flags),
        unit_temperature=draw(flags),
    )
    engine = replace(engine, utilization=draw(st.floats(0.1, 0.95)), sleeps=draw(flags))
    return draw(st.sampled_from([MOE, DENSE, replace(DENSE, trained=10**7)])), trainer, engine


def totals(shape: Shape, trainer: Any, engine: Any) -> dict[str, int]:
    return {phase.name: phase.total for phase in memory.phases(shape, trainer, engine, ROOM)}


@given(layouts())
def test_parts_add_up_and_none_is_negative(layout: tuple[Shape, Any, Any]) -> None:
    for phase in memory.phases(*layout, ROOM):
        assert all(part.bytes > 0 for part in phase.parts)
        assert phase.total == sum(part.bytes for part in phase.parts) and phase.fits == (phase.total <= ROOM.gpu)


@given(layouts(), st.integers(1, 1 << 16))
def test_more_tokens_never_take_less(layout: tuple[Shape, Any, Any], more: int) -> None:
    shape, trainer, engine = layout
    longer = replace(trainer, tokens=trainer.tokens + more, logprob_tokens=trainer.logprob_tokens + more)
    less, now = totals(shape, trainer, engine), totals(shape, longer, engine)
    assert less.keys() == now.keys() and all(now[key] >= less[key] for key in now)


@given(layouts(), sizes)
def test_more_gpus_never_take_more(layout: tuple[Shape, Any, Any], times: int) -> None:
    shape, trainer, engine = layout
    wider = replace(trainer, nodes=trainer.nodes * times, share=trainer.share * times)
    before, now = totals(shape, trainer, engine), totals(shape, wider, engine)
    assert all(now[key] <= before[key] for key in now)


@given(layouts())
def test_what_saves_memory_saves_it(layout: tuple[Shape, Any, Any]) -> None:
    shape, trainer, engine = layout
    saving = [{"checkpointing": True}, {"home": True}, {"offload_optimizer": True}, {"chunked_entropy": True}]
    for values in saving:
        before, now = totals(shape, trainer, engine), totals(shape, replace(trainer, **values), engine)
        slack = memory.ENTROPY_CHUNK * shape.vocabulary * 12 if "chunked_entropy" in values else 0
        assert all(now[key] <= before[key] + slack for key in now), values


@given(layouts(), st.integers(1, 64))
def test_a_longer_context_needs_a_larger_cache(layout: tuple[Shape, Any, Any], more: int) -> None:
    shape, _, engine = layout
    room = memory.kv_room(shape, engine, ROOM.gpu)
    tokens = memory.kv_tokens(shape, engine, room)
    assert tokens % memory.BLOCK == 0 and tokens * shape.kv_bytes(engine.element, engine.tensor) <= max(0, room)
    assert memory.kv_tokens(shape, engine, room + more * GIB) >= tokens


@settings(max_examples=40)
@given(st.integers(1024, 200_000), st.integers(1, 100_000), st.sampled_from(GPU_EXPERIMENTS))
def test_a_longer_context_never_takes_less(response: int, more: int, experiment: str) -> None:
    """Of a whole plan: GPU, CPU memory and time."""
    plans = []
    for length in (response, response + more):
        cfg = copy.deepcopy(CONFIGS[experiment])
        cfg.data.max_response_length = length  # all other keys follow it or stay
        trainer = trainer_of(cfg)
        engine = engine_of(cfg, trainer)
        rows = episodes_of(cfg, trainer, engine)
        ledgers = memory.phases(MOE, trainer, engine, ROOM) + host.cpu_memory(cfg, MOE, trainer, engine, rows, rows.row)
        plans.append([ledger.total for ledger in ledgers])
    assert all(long >= short for short, long in zip(*plans, strict=True))


def test_a_checkpoint_has_weights_and_two_moments() -> None:
    cfg = config()
    assert host.checkpoint_bytes(cfg, MOE, trainer_of(cfg)) == 12 * MOE.params
    assert cfg.trainer.max_actor_ckpt_to_keep == 2
    assert host.checkpoints_kept(cfg) == 3  # the oldest goes when the new one is whole
    cfg.trainer.max_actor_ckpt_to_keep = None
    assert host.checkpoints_kept(cfg) == cfg.trainer.total_training_steps // cfg.trainer.save_freq


# ------------------------------------------------------------------ whole plans


@pytest.mark.parametrize("experiment", GPU_EXPERIMENTS)
def test_shipped_experiments_fit(experiment: str) -> None:
    made = plan(config(experiment))
    assert made.problems == () and made.fits
    assert made.kv_tokens >= made.engine.context
    assert (
        made.pace.step_s == pytest.approx(sum(made.pace.seconds.values())) and made.pace.tokens > made.pace.sampled > 0
    )
    sizes = {ledger.name: ledger.total / GIB for ledger in made.node}
    figures = [*(phase.total / GIB for phase in made.gpu), max(sizes[host.START], sizes[host.STEP])]
    figures += [sizes[host.CHECKPOINTS], made.pace.step_s / 60]
    (row,) = re.findall(rf"^\| `{experiment}` \| [\d +]+ \| (.+) \|$", DOC, re.MULTILINE)
    cells = row.split(" | ")
    assert [int(cell) for cell in cells if ":" not in cell] == [round(figure) for figure in figures]


REFUSED = {
    "one node": ("qwen3_coder_30b", ["trainer.nnodes=1"], "GPU memory, rollout", "fsdp_config.optimizer_offload=true"),
    "engine too large": (
        "qwen3_coder_30b",
        ["actor_rollout_ref.rollout.gpu_memory_utilization=0.95"],
        "GPU memory, rollout",
        "actor_rollout_ref.rollout.gpu_memory_utilization=",
    ),
    "whole logits": (
        "qwen3_coder_30b",
        [
            "actor_rollout_ref.actor.entropy_from_logits_with_chunking=false",
            "actor_rollout_ref.actor.fsdp_config.use_torch_compile=false",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=65536",
        ],
        "GPU memory, log-probabilities",
        "actor_rollout_ref.actor.entropy_from_logits_with_chunking=true",
    ),
    "long rows on few GPUs": (
        "qwen3_coder_30b",
        [
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=131072",
            "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=1",
        ],
        "GPU memory, update",
        "ulysses_sequence_parallel_size=",
    ),
    "no offload": (
        "qwen3_4b",
        ["actor_rollout_ref.actor.fsdp_config.offload_policy=false"],
        "GPU memory, update",
        "actor_rollout_ref.actor.fsdp_config.offload_policy=true",
    ),
    "no cache": (
        "qwen3_coder_30b",
        ["actor_rollout_ref.rollout.gpu_memory_utilization=0.2"],
        "KV cache",
        "gpu_memory_utilization=0.24 or actor_rollout_ref.rollout.tensor_model_parallel_size=8 with "
        "actor_rollout_ref.rollout.expert_parallel_size=8",
    ),
    "too little for any cache": (
        "qwen3_8b",
        ["cluster.gpu_gb=24", "actor_rollout_ref.rollout.gpu_memory_utilization=0.95"],
        "KV cache",
        "it would fit with data.max_response_length=",
    ),
    "small hosts": ("qwen3_coder_30b", ["cluster.cpu_gb=180"], host.STEP, "sandbox.concurrency=16"),
    "small disks": ("qwen3_coder_30b", ["cluster.disk_gb=50"], host.DISK, "sandbox.concurrency=16"),
    "many checkpoints": (
        "qwen3_coder_30b",
        ["cluster.checkpoint_gb=700", "trainer.max_actor_ckpt_to_keep=5"],
        host.CHECKPOINTS,
        "trainer.max_actor_ckpt_to_keep=1",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_names_what_is_enough(case: str) -> None:
    """Each change that a refusal names is composed into the config and makes that problem go away."""
    experiment, overrides, problem, change = REFUSED[case]
    made = plan(config(experiment, *overrides))
    (line,) = [text for text in made.problems if text.startswith(problem)]
    assert "\n" not in line and change in line
    for changes in line.split("it would fit with ")[1].split(" or "):
        better = plan(config(experiment, *overrides, *changes.split(" with ")))
        assert not any(text.startswith(problem) for text in better.problems), changes


@pytest.mark.parametrize(
    "overrides, words",
    [
        (["actor_rollout_ref.rollout.expert_parallel_size=8"], ["expert_parallel_size=8", "verl refuses"]),
        (["cluster.cpu_gb=128"], ["CPU memory of a node, at the start"]),
        (["cluster.checkpoint_gb=500"], ["disk of run.root", "no change that is known here is enough"]),
        (["data.max_response_length=262144"], ["262144 positions", "data.max_response_length"]),
        (["actor_rollout_ref.rollout.tensor_model_parallel_size=3"], ["tensor_model_parallel_size=3", "heads"]),
        (["actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=5"], ["ulysses", "does not divide"]),
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
    monkeypatch.setattr(host, "count_tasks", lambda _: 500)
    (line,) = plan(config("qwen3_coder_30b", "cluster.disk_gb=100")).problems
    assert line.endswith("it would fit with sandbox.image_budget_gb=36")


def test_a_cache_that_is_too_small_for_the_episodes_is_a_note() -> None:
    made = plan(config("qwen3_8b", "sandbox.concurrency=64"))
    assert made.fits and any("sandbox.concurrency" in line for line in made.warnings)


def test_checks_make_the_plan_for_gpus_only() -> None:
    cfg = config("qwen3_coder_30b", "trainer.nnodes=1")
    with pytest.raises(ConfigError, match=r"GPU memory, rollout.*optimizer_offload=true.*plan\.check=false") as caught:
        check_plan(cfg)
    assert "\n" not in str(caught.value)
    cfg.plan.check = False
    check_plan(cfg)
    cfg.plan.check, cfg.trainer.device = True, "cpu"
    check_plan(cfg)


def test_the_command(tmp_path: Path) -> None:
    """2 and a line per problem; neither verl nor vLLM is imported, and nothing is written."""
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
    assert "TOO MUCH" in done.stdout and "It fits" not in done.stdout
    assert "imported: []" in done.stdout and not list(tmp_path.iterdir())


def test_tables_of_a_plan_that_fits() -> None:
    cfg = config()
    console = Console(record=True, width=160, file=io.StringIO())
    show(plan(cfg), cfg, console)
    text = console.export_text()
    assert "It fits" in text and "TOO MUCH" not in text
    for words in (
        "30.53 billion parameters, 3.35",
        "Least room: 10.1 GiB of a GPU, rollout",
        "weight sync",
        "KV cache",
        "checkpoints of 341 GiB",
        "assumed",
    ):
        assert words in text


def test_known_shapes_say_where_they_are_from() -> None:
    for file in KNOWN.glob("*.json"):
        assert json.loads(file.read_text())["source"]


def test_the_measuring_script_says_that_there_is_no_gpu() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command = [sys.executable, ROOT / "scripts" / "bench_gpu.py"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith("bench_gpu: no GPU here")


def test_memory_of_processes_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    measuring = importlib.import_module("measuring")
    watch = measuring.Watch(os.getpid())
    watch.start()
    code = "kept = bytearray(1 << 26)\nimport time\nfor i in range(0, 1 << 26, 4096): kept[i] = 1\ntime.sleep(1)"
    subprocess.run([sys.executable, "-c", code], check=True)
    watch.finish()
    assert max(watch.processes.values()) > 1 << 26 and watch.most("nobody") == 0
