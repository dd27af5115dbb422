"""One GPU, one run: engine throughput raw and through whole episodes, step time by phase, memory beside rl.plan.

    python scripts/bench_gpu.py actor_rollout_ref.model.path=DIR [key=value ...]     # on a GPU: +experiment=qwen3_4b
    python scripts/bench_gpu.py --device cpu                                         # the same path with a toy

First real Claude Code episodes, through the proxy, with a vLLM server of the config's settings. Then the very calls
that they made, once more, straight to that server: the same prompts in the same order, replies of the same length, as
many chains at a time, with nothing between two calls. What the first reaches of the second is the figure. Then
``rl.train`` makes a few steps; its phases and its memory stand beside what rl.plan says of the config.

Tasks are the quickstart's (data.train_files=FILE and data.val_files=FILE: your own). Without a GPU it says so in one
line and ends with 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
from measuring import GIB, TRAINER, Watch, error, own, row
from omegaconf import DictConfig, OmegaConf

from rewards.task import Task, load_tasks
from rl.config import CPU_ENVIRONMENT, compose
from rl.metrics.episodes import read_jsonl
from rl.plan import plan
from rl.plan.memory import kv_tokens
from rl.run.vllm_server import vllm_server
from rl.screen import Screen
from rl.setup import load_policy, make_setup, training_settings
from rollout.episode import Episode, play
from rollout.proxy.engine import Completion, Engine
from rollout.proxy.server import ProxyServer
from rollout.proxy.vllm_http import VllmHttpEngine

ROOT = Path(__file__).resolve().parents[1]
# The policy that scale=tiny trains: its episodes have the form of real ones.
TOY = [
    "+experiment=quickstart",
    "quickstart.train_tasks=8",
    "quickstart.heldout_tasks=2",
    "quickstart.warm_episodes=48",
]
TOY += ["quickstart.sft.epochs=6", "data.train_batch_size=2", "actor_rollout_ref.rollout.n=4"]
PHASES = {
    "rollout": "gen",
    "log-probabilities": "old_log_prob",
    "update": "update_actor",
    "weight sync": "update_weights",
}


@dataclass
class Calls:
    """An engine that keeps what it was asked and how many tokens it said, by episode and in order."""

    engine: Engine
    chains: dict[str, list[tuple[list[int], int]]] = field(default_factory=dict)

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Completion:
        done = await self.engine.generate(request_id, prompt_ids, sampling)
        self.chains.setdefault(request_id, []).append((list(prompt_ids), len(done.ids)))
        return done


@dataclass(frozen=True)
class Throughput:
    """Of one pass: wall seconds, calls, tokens sampled."""

    wall: float
    calls: int
    sampled: int

    @property
    def rate(self) -> float:
        return self.sampled / self.wall


async def episodes(
    cfg: DictConfig, tasks: list[Task], url: str, count: int, concurrency: int
) -> tuple[Throughput, Calls, list[Episode]]:
    """``count`` episodes over ``tasks``, ``concurrency`` at a time."""
    from transformers import AutoTokenizer

    path = Path(cfg.actor_rollout_ref.model.path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model_type = json.loads((path / "config.json").read_text())["model_type"]
    http = VllmHttpEngine(url, "policy")
    calls, proxy = Calls(http), ProxyServer()
    settings = training_settings(cfg)
    setup = make_setup(settings, load_policy(settings, str(path), tokenizer, model_type, calls), proxy)
    rollout = cfg.actor_rollout_ref.rollout
    sampling = {"temperature": rollout.temperature, "top_p": rollout.top_p, "top_k": rollout.top_k}
    setup = replace(setup, policy=replace(setup.policy, sampling=sampling))
    slots = asyncio.Semaphore(concurrency)

    async def one(number: int) -> Episode:
        async with slots:
            return await play(setup, tasks[number % len(tasks)], f"bench-{number}", lambda _: None)

    await proxy.start()
    try:
        began = time.perf_counter()
        played = await asyncio.gather(*(one(number) for number in range(count)))
        wall = time.perf_counter() - began
    finally:
        await proxy.stop()
        await http.close()
    chains = calls.chains.values()
    return Throughput(wall, sum(map(len, chains)), sum(n for chain in chains for _, n in chain)), calls, list(played)


async def replay(calls: Calls, url: str, concurrency: int) -> Throughput:
    """The calls of ``calls`` straight to the engine, whose prefix cache is emptied first."""
    http = VllmHttpEngine(url, "policy")
    slots = asyncio.Semaphore(concurrency)

    async def chain(name: str, asked: list[tuple[list[int], int]]) -> int:
        async with slots:
            said = 0
            for prompt_ids, tokens in asked:
                length = {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True}
                said += len((await http.generate(name, prompt_ids, {"temperature": 1.0, **length})).ids)
            return said

    try:
        async with aiohttp.ClientSession() as session, session.post(f"{url}/reset_prefix_cache") as answer:
            answer.raise_for_status()
        began = time.perf_counter()
        said = await asyncio.gather(*(chain(name, asked) for name, asked in calls.chains.items()))
        return Throughput(time.perf_counter() - began, sum(map(len, calls.chains.values())), sum(said))
    finally:
        await http.close()


def engine_arguments(cfg: DictConfig) -> list[str]:
    """vLLM's, as verl would start it for the config."""
    rollout = cfg.actor_rollout_ref.rollout
    arguments = ["--dtype", rollout.dtype, "--max-model-len", str(rollout.max_model_len), "--seed", str(cfg.seed)]
    arguments += ["--max-num-seqs", str(rollout.max_num_seqs), "--logprobs-mode", "processed_logprobs"]
    arguments += ["--max-num-batched-tokens", str(rollout.max_num_batched_tokens)]
    arguments += ["--tensor-parallel-size", str(rollout.tensor_model_parallel_size)]
    if rollout.enforce_eager:
        arguments.append("--enforce-eager")
    if cfg.trainer.device == "cpu":
        arguments += ["--kv-cache-memory-bytes", str(rollout.engine_kwargs.vllm.kv_cache_memory_bytes)]
    else:
        arguments += ["--gpu-memory-utilization", str(rollout.gpu_memory_utilization)]
    return arguments


def prepared(keys: list[str], device: str, work: Path) -> tuple[DictConfig, list[str]]:
    """The config with tasks and model that are there, and the overrides with which ``rl.train`` finds them."""
    base = TOY if device == "cpu" else ["+experiment=qwen3_4b", "sandbox=local"]
    keys = [*base, f"run.root={work}", *keys]
    cfg = compose(keys)
    if cfg.prepare:
        from rl.quickstart.prepare import prepare

        with Screen() as screen:
            made = prepare(cfg, screen)
        for key, value in made.items():
            OmegaConf.update(cfg, key, value)  # rl.train makes nothing anew: it is under run.root
        return cfg, keys
    if not any(key.startswith("data.train_files=") for key in keys):
        from rl.quickstart.tasks import make_tasks

        make_tasks(work / "tasks", cfg.seed)
        keys += [f"data.train_files={work}/tasks/train.parquet", f"data.val_files={work}/tasks/heldout.parquet"]
    return compose(keys), keys


def throughput(cfg: DictConfig, work: Path, count: int) -> None:
    files = cfg.data.train_files
    tasks = [task for name in ([files] if isinstance(files, str) else files) for task in load_tasks(Path(name))]
    extra = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        **(CPU_ENVIRONMENT if cfg.trainer.device == "cpu" else {}),
    }
    concurrent = plan(cfg).episodes.concurrent  # as in the run
    model = cfg.actor_rollout_ref.model.path
    with vllm_server(model, work / "vllm.log", *engine_arguments(cfg), environment=extra) as server:
        url = server.url
        asyncio.run(episodes(cfg, tasks, url, min(4, count), concurrent))  # imports, first compilations, first boxes
        whole, calls, played = asyncio.run(episodes(cfg, tasks, url, count, concurrent))
        raw = asyncio.run(replay(calls, url, concurrent))
        cache = re.search(r"KV cache size: ([0-9,]+) tokens", (work / "vllm.log").read_text())
    lost = sum(episode.verdict.is_infra for episode in played)
    prompt = sum(len(ids) for chain in calls.chains.values() for ids, _ in chain)
    size = f"{whole.calls} calls, {prompt:,} tokens of prompts, {whole.sampled:,} sampled"
    print(f"\n{count} episodes ({lost} lost), {concurrent} at a time: {size}\n")
    row("what", "seconds", "sampled tokens/s")
    row("---", "---", "---")
    row("the engine alone, the same calls", f"{raw.wall:.1f}", f"{raw.rate:.1f}")
    row("whole episodes", f"{whole.wall:.1f}", f"{whole.rate:.1f}")
    row("**episodes / engine**", "", f"**{whole.rate / raw.rate:.2f}**")
    counters = [episode.session.counters for episode in played if episode.session and episode.session.counters.calls]
    if counters:
        overhead = sum(1e3 * one.overhead_s / one.calls for one in counters) / len(counters)
        row("of that the proxy, ms per call", "", f"{overhead:.1f}")
    for phase in ("boot", "agent", "grade"):
        seconds = [e.timing[phase] for e in played if phase in e.timing]
        if seconds:
            row(f"mean {phase} of an episode, s", f"{sum(seconds) / len(seconds):.2f}", "")
    if cache:
        print(f"\nKV cache: {cache[1]} tokens as vLLM says, {cache_tokens(cfg):,} by rl.plan")


def cache_tokens(cfg: DictConfig) -> int:
    """By rl.plan. On a CPU the cache has the bytes that vLLM is told, in blocks of 128 tokens."""
    made = plan(cfg)
    if cfg.trainer.device != "cpu":
        return made.kv_tokens
    room = cfg.actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes
    return kv_tokens(made.shape, made.engine, room, block=128)


def training(cfg: DictConfig, keys: list[str], work: Path, steps: int) -> None:
    directory = work / "run"
    command = [sys.executable, "-m", "rl.train", *keys, f"run.dir={directory}", f"trainer.total_training_steps={steps}"]
    command += ["trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1", "plan.check=false"]
    process = subprocess.Popen(command, cwd=ROOT)
    watch = Watch(process.pid)
    watch.start()
    code = process.wait()
    watch.finish()
    if code:
        log = directory / "run.log"
        raise RuntimeError(log.read_text(errors="replace")[-3000:] if log.exists() else f"rl.train ended with {code}")
    made = plan(cfg)
    found = [r for r in read_jsonl(directory / "metrics.jsonl") if "timing_s/step" in r]
    last = found[-1]  # the first has compilations in it
    print(f"\nstep {last['step']} of {steps}; {last.get('episode/count', 0):.0f} episodes\n")
    row("phase", "measured, s", "rl.plan, s (assumed speeds of a GPU)")
    row("---", "---", "---")
    planned = made.pace.seconds | {"step": made.pace.step_s} if cfg.trainer.device != "cpu" else {}
    for name, key in (PHASES | {"step": "step"}).items():
        row(name, f"{last.get(f'timing_s/{key}', 0):.1f}", f"{planned[name]:.1f}" if name in planned else "")
    print()
    row("memory", "measured, GiB", "rl.plan, GiB", "error")
    row("---", "---", "---", "---")
    update = next(phase for phase in made.gpu if phase.name == "update")
    tensors = own(update)
    if cfg.trainer.device == "cpu":
        # No counter of tensors: resident memory, with the process's own, which no plan knows.
        peak = watch.most(TRAINER)
        row("trainer's process, resident; the plan has its tensors", f"{peak / GIB:.2f}", f"{tensors / GIB:.2f}", "")
        return
    peak = max(r.get("perf/max_memory_allocated_gb", 0) for r in found) * GIB
    row("trainer's tensors, update", f"{peak / GIB:.1f}", f"{tensors / GIB:.1f}", error(tensors, peak))
    most = max(phase.total for phase in made.gpu)
    row("the GPU, at its fullest", f"{watch.gpu / GIB:.1f}", f"{most / GIB:.1f}", error(most, watch.gpu))


def has_gpu() -> bool:
    if shutil.which("nvidia-smi") is None:
        return False
    import torch

    return torch.cuda.is_available()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--episodes", type=int, help="how many are played (64; 16 on a CPU)")
    parser.add_argument("--steps", type=int, default=2, help="of training; 0: none")
    parser.add_argument("keys", nargs="*", help="overrides of the config")
    options = parser.parse_args()
    if options.device == "cuda" and not has_gpu():
        print("bench_gpu: no GPU here, nothing is measured (--device cpu runs the same path with a toy)")
        return
    count = options.episodes or (16 if options.device == "cpu" else 64)
    if options.device == "cpu":
        os.environ.update(CPU_ENVIRONMENT)  # the same threads for all
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        work = Path(name)
        cfg, keys = prepared(options.keys, options.device, work)
        cfg.run.dir = str(work / "bench")
        OmegaConf.resolve(cfg)
        where = platform.machine() if options.device == "cpu" else cfg.cluster.gpu
        model = "the quickstart's policy" if options.device == "cpu" else cfg.actor_rollout_ref.model.path
        print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, {where}: {cfg.trainer.experiment_name}, {model}")
        throughput(cfg, work, count)
        if options.steps:
            training(cfg, keys, work, options.steps)


if __name__ == "__main__":
    main()
