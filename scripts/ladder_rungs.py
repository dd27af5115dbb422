"""The rungs of scripts/gpu_ladder.py: each takes a ``Place`` and yields ``Figure``s that it has seen."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import bench_gpu
from gpu_ladder import NEEDS_GPU, Place
from measuring import GIB, ROOT, gpu_used, train
from omegaconf import DictConfig, OmegaConf

from rl.config.compose import CPU_TRAINING, compose
from rl.metrics.episodes import read_jsonl
from rl.metrics.figures import CORRELATION, Figure
from rl.plan import plan
from rl.plan.model import KNOWN
from rl.run.vllm_server import vllm_server
from rollout.records import unpack_ids
from rollout.records.reading import Reader

# The packages whose behaviour, and so whose version, our code depends on.
PINNED = ("torch", "vllm", "transformers", "verl", "ray")
# On a CPU one file, to show that the rung works: running all tests is for make test.
TESTS = {"cuda": ["tests/unit"], "cpu": ["tests/unit/proxy/test_render.py"]}
KL = 0.01  # docs/metrics.md: healthy
# In place of the real widths on a CPU, where a rung only shows that it works.
SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 4096,
    "tie_word_embeddings": False,  # rl.checks requires it on a CPU
}


def versions(place: Place) -> Iterator[Figure]:
    """Compare the versions with the pinned ones and run the unit tests that need no engine."""
    pins = (ROOT / "constraints" / f"{'cpu' if place.device == 'cpu' else 'gpu'}.txt").read_text()
    for name in PINNED:
        found, pinned = importlib.metadata.version(name), re.search(rf"^{name}==(\S+)", pins, re.MULTILINE)
        wanted = pinned[1] if pinned else "any"
        yield Figure(name, wanted, found, found.split("+")[0] == wanted.split("+")[0] if pinned else None)
    report = Path(place.directory, "tests.xml")
    command = [sys.executable, "-m", "pytest", *TESTS[place.device], f"--junitxml={report}", "-p", "no:cacheprovider"]
    if place.device == "cuda" and importlib.util.find_spec("xdist"):
        command += ["-n", str(min(8, os.cpu_count() or 1)), "--dist", "loadgroup"]
    subprocess.run(command, cwd=ROOT)
    cases = ElementTree.parse(report).getroot().findall(".//testcase")
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    seen = f"{len(cases) - len(failed) - skipped} passed, {skipped} skipped, {len(failed)} failed"
    names = ", ".join(f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}" for case in failed[:8])
    yield Figure(f"tests of {', '.join(TESTS[place.device])}", "none fails", f"{seen} {names}".strip(), not failed)


def engine(place: Place) -> Iterator[Figure]:
    """Start vLLM with the config's settings and no training; see its cache, and let it sleep and wake up."""
    model, cpu = Path(place.directory, "model"), place.device == "cpu"
    _apart(_model_without_weights, model, "Qwen3-4B-Instruct-2507", SMALL if cpu else {})
    keys, arguments = ["sandbox=local"], ["--load-format=dummy"]
    if cpu:
        os.environ.update(CPU_TRAINING)
        keys = ["scale=tiny", "prepare=null", "~quickstart"]
    else:
        arguments.append("--enable-sleep-mode")
    config = compose(["+experiment=qwen3_4b", *keys, *_gpu(place), f"actor_rollout_ref.model.path={model}"])
    config.run.dir = place.directory
    OmegaConf.resolve(config)
    arguments += bench_gpu.engine_arguments(config)
    log, before, began = Path(place.directory, "vllm.log"), gpu_used(), time.monotonic()
    with vllm_server(str(model), log, *arguments, environment={"VLLM_SERVER_DEV_MODE": "1"}) as server:
        yield Figure("seconds to start", "", f"{time.monotonic() - began:.0f}")
        planned, printed = bench_gpu.cache_tokens(config, plan(config), log)
        close = abs(printed / planned - 1) < 0.05
        yield Figure("tokens of the KV cache", f"{planned:,} by rl.plan, within 5 %", f"{printed:,}", close)
        if cpu:
            yield Figure("sleep level 2 and wake-up", "", NEEDS_GPU)
            return
        wanted = f"{config.actor_rollout_ref.rollout.gpu_memory_utilization} of it"
        yield Figure("GiB of the GPU, awake", wanted, f"{(gpu_used() - before) / GIB:.1f}")
        yield Figure("seconds to fall asleep", "", f"{_post(f'{server.url}/sleep?level=2'):.1f}")
        kept, assumed = (gpu_used() - before) / GIB, config.plan.engine_asleep_gb
        yield Figure("GiB that it keeps asleep", f"at most {assumed} (plan.*)", f"{kept:.1f}", kept <= assumed)
        yield Figure("seconds to wake up", "", f"{_post(f'{server.url}/wake_up'):.1f}")


def grpo(place: Place) -> Iterator[Figure]:
    """Train the toy, with a look at the engine at each step."""
    steps, looks = _toy(place, "qwen3_4b")
    yield from _agreement(steps)
    rows = [step["episode/rows"] for step in steps]
    yield Figure("rows per episode", "1.00", ", ".join(f"{count:.2f}" for count in rows), set(rows) == {1.0})
    yield _changed("the engine's reply to one prompt, after an update", looks)
    seconds = ", ".join(f"{step['timing_s/update_weights']:.2f}" for step in steps)
    yield Figure("seconds of a weight sync", "", seconds)
    seen, left = looks[0]["running"], looks[0]["left"]
    what = "requests in the engine after a call was cancelled"
    yield Figure(what, "0", f"{left}; {seen} before", seen > 0 and not left)


def lora(place: Place) -> Iterator[Figure]:
    """Train adapters that the engine gets beside its own base weights."""
    # Adapters begin at zero: only a high rate makes two steps of them visible.
    steps, looks = _toy(place, "qwen3_8b", "actor_rollout_ref.actor.optim.lr=1e-2")
    yield from _agreement(steps)
    yield _changed("the engine's reply to one prompt, with trained adapters", looks)
    seconds = ", ".join(f"{step['timing_s/update_weights']:.2f}" for step in steps)
    yield Figure("seconds of sending the adapters", "", seconds)


def hybrid(place: Place) -> Iterator[Figure]:
    """Train a toy with linear attention: were packed rows to read each other, trainer and engine would not agree."""
    steps, looks = _toy(place, "qwen3_5_9b")
    yield from _agreement(steps)
    yield _changed("the engine's reply to one prompt, after an update", looks)


def ahead(place: Place) -> Iterator[Figure]:
    """Train the toy while episodes outlive updates: rows stay within the limit of staleness."""
    # At a thousand times the usual rate, tokens of older weights would hardly be those of the same policy.
    keys = ["actor_rollout_ref.actor.optim.lr=1e-4", "algorithm.rollout_correction.rollout_rs_threshold=1.0"]
    keys += ["algorithm.filter_groups.enable=false", "trainer.total_training_steps=4", "sandbox.concurrency=8"]
    steps, looks = _toy(place, "qwen3_coder_30b_async", *keys)
    yield from _agreement(steps)
    yield _changed("the engine's reply to one prompt, after an update", looks)
    staleness = "training/off_policy/trajectory_staleness_worst"
    most = max(step[f"{staleness}/max"] for step in steps)
    yield Figure("updates that a row is behind, at most", "3", f"{most:.0f}", most <= 3)
    means = ", ".join(f"{step[f'{staleness}/mean']:.2f}" for step in steps)
    yield Figure("the same, mean of each step", "", means)
    replies = [node.versions for record in Reader(Path(place.directory, "run")) for node in record.nodes]
    versions = [set(unpack_ids(some)) for some in replies if some and isinstance(some, bytes)]
    seen = f"{len(versions)}, {sum(len(some) > 1 for some in versions)}"
    yield Figure("replies, and those that two weights have sampled", "", seen)


def size(place: Place) -> Iterator[Figure]:
    """Train all of a dense model with random weights: what it takes beside what rl.plan says."""
    changes = SMALL if place.device == "cpu" else {}
    with _untrained(place, "qwen3_4b", "Qwen3-4B-Instruct-2507", changes, 0.9) as (config, keys):
        made = plan(config)
        peaks, steps = train(Path(place.directory, "run"), *keys)
    seconds, memory = bench_gpu.beside_plan(config, made, peaks, steps)
    on_gpu = place.device == "cuda"
    for what, (planned, measured) in seconds.items():
        yield Figure(f"seconds of {what}", f"{planned:.1f} by rl.plan" if on_gpu else "", f"{measured:.1f}")
    for what, (planned, measured) in memory.items():
        fits = 0 < measured <= planned if on_gpu else None
        expected = f"{'at most ' if on_gpu else ''}{planned / GIB:.2f} by rl.plan"
        yield Figure(f"GiB of {what}", expected, f"{measured / GIB:.2f}", fits)


def experts(place: Place) -> Iterator[Figure]:
    """Compare the engine's and the trainer's log-probabilities of a mixture of experts with random weights."""
    from rl.quickstart.policy import make_tokenizer

    vocabulary = len(make_tokenizer(multiple=64))  # verl bars the engine, but not the trainer, from ids without a token
    changes: dict[str, Any] = {"num_hidden_layers": 4, "vocab_size": vocabulary}
    # With its weights at home in host memory, where qwen3_4b has them, it fits a GPU of 80 GB.
    home = ["fsdp_config.offload_policy=true", "optim.override_optimizer_config={fused:true}"]
    more = [f"actor_rollout_ref.actor.{key}" for key in home]
    if place.device == "cpu":
        changes, more = {**SMALL, "moe_intermediate_size": 64, **changes}, ["trainer.total_training_steps=1"]
    name = "Qwen3-Coder-30B-A3B-Instruct"
    with _untrained(place, "qwen3_coder_30b", name, changes, 0.5, *more) as (_, keys):
        _, steps = train(Path(place.directory, "run"), *keys)
    yield from _agreement(steps)
    for key in ("training/rollout_probs_diff_mean", "training/rollout_probs_diff_max"):
        yield Figure(key, "", f"{max(step[key] for step in steps):.2g}")


def episodes(place: Place) -> Iterator[Figure]:
    """Compare the rate of whole episodes of the toy with the rate of the engine alone."""
    if place.device == "cpu":
        os.environ.update(CPU_TRAINING)
        keys, count = [], 8
    else:
        keys, count = ["data.train_batch_size=8", "sandbox.concurrency=16"], 64
    base = ["+experiment=qwen3_4b", f"scale={_scale(place)}", "quickstart.experts=0", *_gpu(place)]
    config, _ = bench_gpu.prepared(base, [*keys, *place.keys], Path(place.shared))
    config.run.dir = place.directory
    OmegaConf.resolve(config)
    found = bench_gpu.throughput(config, plan(config), Path(place.directory, "vllm.log"), count)
    yield Figure(f"episodes lost of {count}, {found.concurrent} at a time", "0", str(found.lost), found.lost == 0)
    yield Figure("tokens per second, the engine alone", "", f"{found.sampled / found.raw:.0f}")
    yield Figure("tokens per second, whole episodes", "", f"{found.sampled / found.whole:.0f}")
    yield Figure("episodes / engine (a toy: what Claude Code takes counts)", "", f"{found.raw / found.whole:.2f}")
    yield Figure("milliseconds of the proxy in a call", "", f"{found.proxy_ms:.1f}")


def _scale(place: Place) -> str:
    return "tiny" if place.device == "cpu" else "gpu"


def _gpu(place: Place) -> list[str]:
    """Return the keys that tell rl.plan of this GPU."""
    if place.device == "cpu":
        return []
    name, size = _apart(_this_gpu)
    known = [kind for kind in ("a100", "h100", "h200") if kind.upper() in name]
    return [f"cluster={known[0] if known else 'h100'}", f"cluster.gpu_gb={size / GIB:.2f}"]


def _this_gpu() -> tuple[str, int]:
    import torch

    return torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory


def _apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a process of its own: what CUDA takes there is no part of what is measured here."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def _toy(place: Place, experiment: str, *keys: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Train the quickstart's dense policy with an experiment's config; return the metrics of its steps and the looks at
    its engine (ladder_loop)."""
    run, loops = Path(place.directory, "run"), Path(place.directory, "loops.yaml")
    loops.write_text("- name: claude_code\n  _target_: ladder_loop.Loop\n")
    agent = "actor_rollout_ref.rollout.agent"
    given = [f"+experiment={experiment}", f"scale={_scale(place)}", "quickstart.experts=0", f"run.root={place.shared}"]
    given += [f"{agent}.agent_loop_config_path={loops}", f"{agent}.num_workers=1", "trainer.save_freq=-1"]
    given += ["actor_rollout_ref.rollout.disable_log_stats=false", *keys, *place.keys]
    _, steps = train(run, *given)
    return steps, list(read_jsonl(run / "looks.jsonl"))


def _agreement(steps: list[dict[str, Any]]) -> Iterator[Figure]:
    key = "training/rollout_actor_probs_pearson_corr"
    lowest, farthest = min(step[key] for step in steps), max((step["rollout_corr/kl"] for step in steps), key=abs)
    what = f"correlation of the engine's and the trainer's probabilities, lowest of {len(steps)} steps"
    yield Figure(what, f"> {CORRELATION}", f"{lowest:.4f}", lowest > CORRELATION)
    yield Figure("KL from engine to trainer, nats per token", f"< {KL}", f"{farthest:.2g}", abs(farthest) < KL)


def _changed(what: str, looks: list[dict[str, Any]]) -> Figure:
    first, last = looks[0], looks[-1]
    distance = max(abs(a - b) for a, b in zip(first["logprobs"], last["logprobs"], strict=True))
    other = first["ids"] != last["ids"] or distance > KL
    seen = "other tokens" if first["ids"] != last["ids"] else f"log-probabilities {distance:.2g} apart"
    return Figure(what, "another one", seen, len(looks) > 1 and other)


@contextlib.contextmanager
def _untrained(
    place: Place, experiment: str, known: str, changes: dict[str, Any], utilization: float, *more: str
) -> Generator[tuple[DictConfig, list[str]]]:
    """Yield the config, and its overrides, of two steps of an experiment with random weights in the shape of a known
    model; ``changes`` are made to the shape. The weights exist as long as the block.

    Such a model's reply is noise: a limit ends it, and no test passes. So nothing is filtered or masked here.
    """
    with tempfile.TemporaryDirectory(prefix="model-") as model:
        _apart(_random_model, Path(model), known, changes, place.device)
        keys = [f"+experiment={experiment}", f"scale={_scale(place)}", "prepare=null", "~quickstart", *_gpu(place)]
        keys += [f"actor_rollout_ref.model.path={model}", "algorithm.filter_groups.enable=false"]
        keys += ["episode.mask_overlong=false", "agent.max_turns=2", "trainer.save_freq=-1", *more]
        if place.device == "cuda":
            keys += [f"actor_rollout_ref.rollout.gpu_memory_utilization={utilization}"]
        config, keys = bench_gpu.prepared(keys, list(place.keys), Path(place.shared))
        OmegaConf.update(config, "run.dir", place.directory)
        OmegaConf.resolve(config)
        yield config, keys


def _shape(directory: Path, known: str, changes: dict[str, Any]) -> Any:
    """Write the quickstart's tokenizer to ``directory`` and return the config of a known model with ``changes``."""
    from transformers import AutoConfig

    from rl.quickstart.policy import make_tokenizer

    tokenizer = make_tokenizer(multiple=64)
    tokenizer.save_pretrained(directory)
    values = json.loads((KNOWN / f"{known}.json").read_text()) | changes
    del values["source"]
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    return AutoConfig.for_model(**values, **special)


def _model_without_weights(directory: Path, known: str, changes: dict[str, Any]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    config = _shape(directory, known, changes)
    with torch.device("meta"):
        config.architectures = [type(AutoModelForCausalLM.from_config(config)).__name__]
    config.save_pretrained(directory)


def _random_model(directory: Path, known: str, changes: dict[str, Any], device: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    config = _shape(directory, known, changes)
    torch.manual_seed(1)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32 if device == "cpu" else torch.bfloat16)
    ends = {"eos_token_id": config.eos_token_id, "pad_token_id": config.pad_token_id}
    model.generation_config = GenerationConfig(**ends, do_sample=True)
    model.save_pretrained(directory)


def _post(url: str) -> float:
    """Return the seconds that a POST request takes. Raises OSError if it is refused."""
    began = time.monotonic()
    urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=120).read()
    return time.monotonic() - began
