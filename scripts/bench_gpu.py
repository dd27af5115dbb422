"""Measure one GPU in one run: engine throughput, raw and through whole episodes; step time and memory beside rl.plan.

    python scripts/bench_gpu.py actor_rollout_ref.model.path=DIR [key=value ...]     # on a GPU: +experiment=qwen3_4b
    python scripts/bench_gpu.py --device cpu                                         # the same path with a toy

Real Claude Code episodes run first, through the proxy, against a vLLM server with the config's settings. Then the very
calls that they made go straight to that server: the same prompts in the same order, replies of the same length, as many
chains at a time, and nothing between two calls. The figure is the share of that rate which whole episodes reach. Then
``rl.train`` makes a few steps; their phases and their memory stand beside what rl.plan says of the config.

Tasks are the quickstart's; data.train_files=FILE and data.val_files=FILE name others. Without a GPU the script says so
in one line and exits with 0.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import re
import shutil
import statistics
import tempfile
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from measuring import GIB, TRAINER, compare, head, peak, row, tensors, train
from omegaconf import DictConfig, OmegaConf

from rewards.task import Task, load_tasks
from rl.config.compose import CPU_TRAINING, compose
from rl.episodes.setup import load_policy, make_setup, training_settings
from rl.plan import Plan, plan
from rl.plan.memory import kv_tokens
from rl.run.journal import run_all
from rl.run.screen import Screen
from rl.run.vllm_server import SERVED_AS, vllm_server
from rollout import program
from rollout.episode import Episode, play
from rollout.proxy.engine import Completion, Engine
from rollout.proxy.server import ProxyServer
from rollout.proxy.vllm_http import VllmHttpEngine

# The policy that scale=tiny trains: its episodes have the form of real ones.
TOY = ["+experiment=quickstart", "quickstart.train_tasks=8", "quickstart.heldout_tasks=2"]
TOY += ["quickstart.warm_episodes=48", "quickstart.sft.epochs=6"]
TOY += ["data.train_batch_size=2", "actor_rollout_ref.rollout.n=4"]
GPU = ["+experiment=qwen3_4b", "sandbox=local"]
# The plan's names of the phases, and verl's.
PHASES = {"rollout": "gen", "log-probabilities": "old_log_prob", "update": "update_actor"}
PHASES |= {"weight sync": "update_weights", "step": "step"}
Chain = list[tuple[list[int], int]]  # of each call of an episode: the prompt, and how many tokens the reply has


@dataclass
class Recorder:
    """This engine notes the calls that it passes on to another one, by episode and in order."""

    engine: Engine
    chains: dict[str, Chain] = field(default_factory=dict)

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Completion:
        """Return the other engine's reply."""
        done = await self.engine.generate(request_id, prompt_ids, sampling)
        self.chains.setdefault(request_id, []).append((list(prompt_ids), len(done.ids)))
        return done


async def episodes(
    config: DictConfig, tasks: list[Task], url: str, count: int, concurrency: int
) -> tuple[float, dict[str, Chain], list[Episode]]:
    """Play ``count`` episodes; return wall seconds, their calls and the episodes."""
    from transformers import AutoTokenizer

    path, rollout = Path(config.actor_rollout_ref.model.path), config.actor_rollout_ref.rollout
    model_type = json.loads((path / "config.json").read_text())["model_type"]
    http, proxy, settings = VllmHttpEngine(url, SERVED_AS), ProxyServer(), training_settings(config)
    recorder = Recorder(http)
    policy = load_policy(settings, str(path), AutoTokenizer.from_pretrained(path), model_type, recorder)
    sampling = {key: rollout[key] for key in ("temperature", "top_p", "top_k")}
    setup = make_setup(settings, replace(policy, sampling=sampling), proxy)
    played: list[Episode] = []

    async def one(number: int) -> None:
        played.append(await play(setup, tasks[number % len(tasks)], f"bench-{number}", lambda _: None))

    await proxy.start()
    try:
        began = time.perf_counter()
        await run_all(range(count), concurrency, one)
        return time.perf_counter() - began, recorder.chains, played
    finally:
        await proxy.stop()
        await http.close()


async def replay(chains: dict[str, Chain], url: str, concurrency: int) -> float:
    """Make the same calls straight to the engine, with an empty prefix cache; return wall seconds."""
    http = VllmHttpEngine(url, SERVED_AS)
    urllib.request.urlopen(urllib.request.Request(f"{url}/reset_prefix_cache", method="POST")).close()

    async def one(named: tuple[str, Chain]) -> None:
        name, calls = named
        for prompt_ids, tokens in calls:
            length = {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True}
            await http.generate(name, prompt_ids, {"temperature": 1.0, **length})

    try:
        began = time.perf_counter()
        await run_all(chains.items(), concurrency, one)
        return time.perf_counter() - began
    finally:
        await http.close()


def engine_arguments(config: DictConfig) -> list[str]:
    """Return vLLM's arguments as verl would give them for the config."""
    rollout = config.actor_rollout_ref.rollout
    keys = ("dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size")
    values = {key: rollout["tensor_model_parallel_size" if key.startswith("tensor") else key] for key in keys}
    values |= {"seed": config.seed, "logprobs_mode": "processed_logprobs"}
    if executor := rollout.engine_kwargs.vllm.get("distributed_executor_backend"):
        values["distributed_executor_backend"] = executor
    if config.trainer.device != "cpu":
        values["gpu_memory_utilization"] = rollout.gpu_memory_utilization
    arguments = [f"--{key.replace('_', '-')}={value}" for key, value in values.items()]
    return arguments + ["--enforce-eager"] * rollout.enforce_eager


def prepared(base: list[str], keys: list[str], work: Path) -> tuple[DictConfig, list[str]]:
    """Return the config of a run whose tasks and model exist, and its overrides: ``base``, then ``keys``. A config
    that neither prepares nor names tasks gets the quickstart's."""
    from rl.quickstart.prepare import prepare
    from rl.quickstart.tasks import make_tasks

    keys = [*base, f"run.root={work}", *keys]
    config = compose(keys)
    if config.prepare:
        with Screen() as screen:
            made = prepare(config, screen)
        keys += ["prepare=null", "~quickstart", *(f"{key}={value}" for key, value in made.items())]
    elif not any(key.startswith("data.train_files=") for key in keys):
        if not (work / "tasks" / "heldout.parquet").exists():  # the file that is made last
            make_tasks(work / "tasks", config.seed)
        keys += [f"data.train_files={work}/tasks/train.parquet", f"data.val_files={work}/tasks/heldout.parquet"]
        keys.append("allow_overlap=[repo,diff,statement]")
    return compose(keys), keys


@dataclass(frozen=True)
class Throughput:
    """This is the throughput of an engine with ``concurrent`` episodes at a time: the ``calls`` of all episodes
    (``lost``: those that the infrastructure failed), their tokens of ``prompts`` and those ``sampled``, seconds through
    whole episodes (``whole``) and without them (``raw``), milliseconds of the proxy in a call, and mean seconds of the
    ``phases`` of an episode."""

    lost: int
    concurrent: int
    calls: int
    prompts: int
    sampled: int
    whole: float
    raw: float
    proxy_ms: float
    phases: dict[str, float]


def cache_tokens(config: DictConfig, made: Plan, log: Path) -> tuple[int, int]:
    """Return the tokens of the KV cache by the plan and by the server's log; 0 where the log does not say."""
    planned = made.kv_tokens
    if config.trainer.device == "cpu":  # where rl.run.vllm_server tells vLLM the GiB, and its blocks have 128 tokens
        room = GIB * int(os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"))
        planned = kv_tokens(made.shape, made.layout.engine, room, block=128)
    found = re.search(r"KV cache size: ([0-9,]+) tokens", log.read_text())
    return planned, int(found[1].replace(",", "")) if found else 0


def throughput(config: DictConfig, made: Plan, log: Path, count: int) -> Throughput:
    """Measure the engine through ``count`` whole episodes and alone. ``log`` is the server's."""
    files, model = config.data.train_files, config.actor_rollout_ref.model.path
    tasks = [task for name in ([files] if isinstance(files, str) else files) for task in load_tasks(Path(name))]
    extra, concurrent = {"HF_HUB_OFFLINE": "1", "VLLM_SERVER_DEV_MODE": "1"}, made.layout.concurrent  # as in the run
    with vllm_server(model, log, *engine_arguments(config), environment=extra) as server:
        # Imports, first compilations and first boxes do not count.
        asyncio.run(episodes(config, tasks, server.url, min(4, count), concurrent))
        whole, chains, played = asyncio.run(episodes(config, tasks, server.url, count, concurrent))
        raw = asyncio.run(replay(chains, server.url, concurrent))
    calls = [call for chain in chains.values() for call in chain]
    counters = [episode.session.counters for episode in played if episode.session and episode.session.counters.calls]
    seconds = {
        phase: [episode.timing[phase] for episode in played if phase in episode.timing]
        for phase in ("boot", "agent", "grade")
    }
    return Throughput(
        lost=sum(episode.verdict.is_infra for episode in played),
        concurrent=concurrent,
        calls=len(calls),
        prompts=sum(len(ids) for ids, _ in calls),
        sampled=sum(tokens for _, tokens in calls),
        whole=whole,
        raw=raw,
        proxy_ms=statistics.mean(1e3 * one.overhead_s / one.calls for one in counters) if counters else 0.0,
        phases={phase: statistics.mean(found) for phase, found in seconds.items() if found},
    )


def show(found: Throughput, count: int) -> None:
    """Print tokens a second, of the engine alone and through whole episodes."""
    print(f"\n{count} episodes ({found.lost} lost), {found.concurrent} at a time: {found.calls} calls", end="")
    print(f", {found.prompts:,} tokens of prompts, {found.sampled:,} sampled")
    head("what", "seconds", "sampled tokens/s")
    row("the engine alone, the same calls", f"{found.raw:.1f}", f"{found.sampled / found.raw:.1f}")
    row("whole episodes", f"{found.whole:.1f}", f"{found.sampled / found.whole:.1f}")
    row("**episodes / engine**", "", f"**{found.raw / found.whole:.2f}**")
    row("the proxy's part of a call, ms", f"{found.proxy_ms:.1f}", "")
    for phase, seconds in found.phases.items():
        row(f"mean {phase} of an episode, s", f"{seconds:.2f}", "")


Pairs = dict[str, tuple[float, float]]  # planned and measured, by what; measured is 0 if it was not


def beside_plan(
    config: DictConfig, made: Plan, peaks: Counter[str], found: list[dict[str, Any]]
) -> tuple[Pairs, Pairs]:
    """Return the seconds of the last step by phase, and bytes of memory, as ``measuring.train`` found them."""
    last = found[-1]  # the first step has compilations in it
    outside = made.pace.seconds.get("validation", 0.0)  # verl's step does not contain it
    planned = made.pace.seconds | {"step": made.pace.step_s - outside}
    seconds = {name: (planned[name], last.get(f"timing_s/{key}", 0)) for name, key in PHASES.items()}
    update = next(tensors(phase) for phase in made.gpu if phase.name == "update")
    if config.trainer.device == "cpu":
        # A CPU has no counter of tensors: this is resident memory, with the process's own, of which the plan knows
        # nothing.
        return seconds, {"trainer's tensors; its process": (update, peak(peaks, TRAINER))}
    tensors_gb = max(step.get("actor/perf/max_memory_allocated_gb", 0) for step in found)
    fullest = max(phase.total for phase in made.gpu)
    return seconds, {
        "trainer's tensors": (update, tensors_gb * GIB),
        "the GPU, at its fullest": (fullest, peak(peaks, "GPU")),
    }


def training(config: DictConfig, made: Plan, keys: list[str], work: Path, steps: int) -> None:
    """Print seconds by phase and memory of a few training steps, beside the plan."""
    peaks, found = train(work / "run", *keys, f"trainer.total_training_steps={steps}", "trainer.save_freq=-1")
    last, cpu = found[-1], config.trainer.device == "cpu"
    seconds, memory = beside_plan(config, made, peaks, found)
    print(f"\nstep {last['step']} of {steps}; {last.get('episode/count', 0):.0f} episodes")
    head("phase", "measured, s", "rl.plan, s (assumed speeds of a GPU)")
    for name, (planned, measured) in seconds.items():
        row(name, f"{measured:.1f}", "" if cpu else f"{planned:.1f}")
    head("memory, GiB", "rl.plan", "measured", "error")
    for name, (planned, measured) in memory.items():
        if cpu:  # no error, because the plan lacks the largest part of what was measured
            row(name, f"{planned / GIB:.2f}", f"{measured / GIB:.2f}", "")
        else:
            compare(name, planned, measured, GIB)


def main() -> None:
    """Measure what the command line asks for."""
    parser = program.parser("python scripts/bench_gpu.py", __doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--episodes", type=int, help="how many are played (64; 16 on a CPU)")
    parser.add_argument("--steps", type=int, default=2, help="of training; 0: none")
    parser.add_argument("keys", nargs="*", help="overrides of the config")
    options = parser.parse_args()
    cpu = options.device == "cpu"
    if not cpu and shutil.which("nvidia-smi") is None:
        print("bench_gpu: no GPU here, nothing is measured (--device cpu runs the same path with a toy)")
        return
    if cpu:
        os.environ.update(CPU_TRAINING)  # the same threads for all
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        work = Path(name)
        named = any(key.startswith("+experiment=") for key in options.keys)
        config, keys = prepared(TOY if cpu else GPU[named:], options.keys, work)
        config.run.dir = str(work / "bench")
        OmegaConf.resolve(config)
        where = f"{os.cpu_count()} cores, {platform.machine() if cpu else config.cluster.gpu}"
        model = "the quickstart's policy" if cpu else config.actor_rollout_ref.model.path
        print(f"{time.strftime('%Y-%m-%d')}, {where}: {config.trainer.experiment_name}, {model}")
        made = plan(config)
        count = options.episodes or (16 if cpu else 64)
        show(throughput(config, made, work / "vllm.log", count), count)
        planned, printed = cache_tokens(config, made, work / "vllm.log")
        print(f"\nKV cache: {printed:,} tokens as vLLM says, {planned:,} by rl.plan")
        if options.steps:
            training(config, made, keys, work, options.steps)


if __name__ == "__main__":
    main()
