"""rl.plan's seconds stand beside those of published runs, and most of them are near.

Each run is planned as an episode of one reply, with its published GPUs, rows and lengths and the constants of
configs/plan. docs/planning.md has the table."""

from __future__ import annotations

import functools
import math
import pickle
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from rl.config.compose import compose
from rl.plan.layout import layout_of
from rl.plan.model import load_config, shape_of
from rl.plan.throughput import forward, pace
from tests.unit.plan.test_plan import dense, moe

ROOT = Path(__file__).parents[3]
SPEEDS = OmegaConf.create({"plan": {"mfu_attention": 0.55}, "cluster": {"tflops": 989}})
PROMPT = 128  # tokens of a prompt, where a run says only how long its rows are
PRIME = "https://github.com/PrimeIntellect-ai/prime-rl/blob/559b447/benchmarks/results/BENCHMARKS.md"
NEMO = "https://github.com/NVIDIA-NeMo/RL/blob/7ea279a/docs/about/performance-summary.md"
NEMO_0_4 = "https://github.com/NVIDIA-NeMo/RL/blob/06beed9/docs/about/performance-summary.md"
VERL = "https://github.com/verl-project/verl/blob/1dda039/docs/advance/v1_async_trainer.md"
SMALL = "matrices of 1,024 columns do not fill a GPU"
FIXED = "38 s more than with LoRA at 16k and 64k tokens: only two rows per GPU"
STAGES = "8 pipeline stages and engines over two nodes are not in the plan"


class Run(NamedTuple):
    """A run has ``rows`` training rows a step of ``mean`` tokens, ``longest`` at most; its engine's replicas have
    ``tensor`` GPUs. ``seconds`` are those of a whole step if ``whole``, else of the update. ``why`` it is off."""

    source: str
    name: str
    model: str
    cluster: str
    gpus: int
    tensor: int
    rows: int
    mean: int
    longest: int
    whole: bool
    seconds: float
    why: str = ""


def _trained(name: str, model: str, cluster: str, gpus: int, length: int, rate: float, why: str = "") -> Run:
    """Return a run of prime-rl's benchmark: two rows per GPU, ``rate`` tokens a second on all GPUs."""
    rows = 2 * gpus
    source, seconds = f"[prime-rl]({PRIME})", rows * length / rate
    return Run(source, name, model, cluster, gpus, 1, rows, length, length, False, seconds, why)


SMALLEST, SMALLER, MIXED = "Qwen3-0.6B", "Qwen3-4B-Instruct-2507", "Qwen3-Coder-30B-A3B-Instruct"
RUNS = (
    _trained("Qwen3-0.6B, RL", SMALLEST, "h100", 1, 65_536, 10_150, SMALL),
    _trained("Qwen3-4B, SFT", SMALLER, "h100", 8, 16_384, 49_720),
    _trained("Qwen3-4B, RL, LoRA", SMALLER, "h100", 8, 16_384, 48_720),
    _trained("Qwen3-4B, RL, LoRA", SMALLER, "h100", 8, 65_536, 32_800),
    _trained("Qwen3-30B-A3B, SFT", MIXED, "h200", 8, 16_384, 35_030),
    _trained("Qwen3-30B-A3B, RL, LoRA", MIXED, "h100", 8, 16_384, 33_100),
    _trained("Qwen3-30B-A3B, RL, LoRA", MIXED, "h100", 8, 65_536, 23_390),
    _trained("Qwen3-30B-A3B, RL, LoRA", MIXED, "h200", 8, 65_536, 24_410),
    _trained("Qwen3-30B-A3B, RL, full", MIXED, "h200", 8, 65_536, 12_750, FIXED),
    Run(f"[NeMo RL]({NEMO_0_4})", "Llama-3.1-8B", "Llama-3.1-8B", "h100", 16, 1, 2048, 1060, 4096, True, 97.7),
    Run(f"[NeMo RL]({NEMO_0_4})", "Qwen3-32B", "Qwen3-32B", "h100", 32, 4, 2048, 3206, 4096, True, 393),
    Run(f"[NeMo RL]({NEMO})", "Qwen3-30B-A3B", MIXED, "h100", 32, 2, 2048, 3203, 4096, True, 192),
    Run(f"[NeMo RL]({NEMO})", "Qwen3-235B", "Qwen3-235B-A22B", "h100", 128, 16, 512, 5698, 8192, True, 395, STAGES),
    Run(f"[verl]({VERL})", "Qwen3.5-35B-A3B, sync", "Qwen3.5-35B-A3B", "h100", 32, 4, 512, 12_870, 34_816, True, 547),
)


@functools.cache
def _base(cluster: str) -> DictConfig:
    """Return a synchronous experiment on such GPUs whose episodes are one reply, and nothing else."""
    nothing = [f"plan.{key}=0" for key in ("read", "tool_s", "boot_s", "grade_s", "episode_cpu_s", "timeouts")]
    other = ["algorithm.filter_groups.enable=false", "trainer.test_freq=-1", "trainer.val_before_train=false"]
    sizes = [f"plan.first_prompt={PROMPT}", f"data.max_prompt_length={PROMPT}", "plan.turns=1"]
    return compose(["+experiment=qwen3_coder_30b", f"cluster={cluster}", *nothing, *other, *sizes])


def planned(run: Run) -> float:
    """Return the seconds that the plan says for a run."""
    config, replicas = pickle.loads(pickle.dumps(_base(run.cluster))), run.gpus // run.tensor
    config.actor_rollout_ref.model.path = run.model
    config.trainer.nnodes, config.trainer.n_gpus_per_node = max(1, run.gpus // 8), min(8, run.gpus)
    config.data.train_batch_size, config.data.max_response_length = run.rows, run.longest - PROMPT
    config.sandbox.concurrency, config.plan.sampled = math.ceil(run.rows / replicas), run.mean - PROMPT
    rollout = config.actor_rollout_ref.rollout
    rollout.n, rollout.max_num_seqs, rollout.agent.num_workers = 1, 1024, replicas
    rollout.tensor_model_parallel_size, rollout.expert_parallel_size = run.tensor, 1
    found = pace(config, shape_of(load_config(run.model), run.model), layout_of(config))
    return found.step_s if run.whole else found.seconds["update"]


def table() -> list[str]:
    """Return the lines of the table: prime-rl's seconds are of the update, the others of the step."""
    lines = ["| run | GPUs | rows x tokens | published, s | planned, s | off | why |", "|" + " --- |" * 7]
    for run in RUNS:
        seconds = planned(run)
        gpus, rows = f"{run.gpus} {run.cluster.upper()}", f"{run.rows} x {run.mean:,}"
        times = f"{run.seconds:.3g} | {seconds:.3g} | {seconds / run.seconds - 1:+.0%}"
        lines.append(f"| {run.source} {run.name} | {gpus} | {rows} | {times} | {run.why} |")
    return lines


def test_the_table_is_the_calculation_and_says_why_a_run_is_off() -> None:
    """At least eight runs are within a quarter; each other one has its reason. If the calculation changes, the table
    that docs/planning.md must have is printed."""
    made = "\n".join(table())
    print(made)
    assert made in (ROOT / "docs/planning.md").read_text()
    near = [abs(planned(run) / run.seconds - 1) <= 0.25 for run in RUNS]
    assert [bool(run.why) for run in RUNS] == [not close for close in near]
    assert sum(near) >= 8


@given(st.floats(1, 1e6), st.floats(1, 1e6), st.sampled_from([moe, dense]))
def test_attention_has_a_rate_of_its_own(context: float, more: float, made: object) -> None:
    """Longer contexts cost more, and what they add does not depend on the rate of matrices."""
    shape = made()  # ty: ignore[call-non-callable]
    slow, fast = (
        forward(SPEEDS, shape, context + more, share) - forward(SPEEDS, shape, context, share) for share in (0.1, 0.4)
    )
    assert 0 < slow == pytest.approx(fast, rel=1e-3, abs=1e-15)
