"""The constants of ``plan.*``, fitted to a run: ``python -m rl.plan from=RUN ...``.

What episodes do is read from the records of the newest of them, speeds from the timings of steps. A run may be running.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl.config.compose import CONFIGS, ConfigError
from rl.metrics.episodes import read_jsonl
from rl.plan.cpu import machine
from rl.plan.doubt import MOST_EQUAL
from rl.plan.engine import forward
from rl.plan.host import checkpoint_bytes
from rl.plan.layout import MODEL, layout_of, select
from rl.plan.model import ModelUnknown, load_config, shape_of
from rl.plan.throughput import update_passes
from rollout.figures import line
from rollout.records import Record
from rollout.records.reading import Reader

NEWEST = 512  # episodes that are read
FEWEST = 8  # of which a spread says something


class FittedConstant(NamedTuple):
    """A FittedConstant is one of ``plan.*`` with the 10th and the 90th percentile of what it was fitted to: ``count``
    episodes or steps."""

    key: str
    value: float
    low: float
    high: float
    count: int
    of: str


def fitted(run: Path) -> list[FittedConstant]:
    """Return the constants that a run directory tells. Raises ConfigError if it tells none."""
    if not run.is_dir():
        raise ConfigError(f"from={run}: there is no such run directory")
    steps = [one for one in read_jsonl(run / "metrics.jsonl") if "timing_s/step" in one]
    records = list(islice(_records(run), NEWEST))
    found = [*(_of_episodes(records) if records else _of_means(steps)), *_of_steps(run, steps)]
    if not found:
        raise ConfigError(f"from={run}: it has neither episodes (episodes/*.cep) nor steps (metrics.jsonl) yet")
    return found


def apply(config: DictConfig, found: Sequence[FittedConstant]) -> None:
    """Replace the constants of ``config.plan``."""
    for one in found:
        config.plan[one.key] = round(one.value) if one.key == "first_prompt" else one.value


def own_config(run: Path) -> DictConfig:
    """Return the config of a run, with constants that it did not have yet. Raises ConfigError."""
    try:
        config = OmegaConf.load(run / "config.yaml")
        assumed = OmegaConf.load(CONFIGS / "plan/default.yaml")
        assert isinstance(config, DictConfig)
        config.plan = OmegaConf.merge(assumed, config.get("plan") or {})
    except (OSError, OmegaConfBaseException, AssertionError) as error:
        raise ConfigError(
            f"from={run}: its config.yaml cannot be read; name an experiment (+experiment=NAME)"
        ) from error
    return config


def _records(run: Path) -> Iterator[Record]:
    """Yield the training episodes whose policy answered, those of the newest files first."""
    if not (run / "episodes").is_dir():
        return
    reader = Reader(run / "episodes", damage=[])
    for path in sorted(reader.files(), key=lambda file: file.stat().st_mtime, reverse=True):
        for record in reader.read(path):
            figures = line(record)
            if record.split == "train" and not figures["infra"] and figures["turns"] and record.nodes:
                yield record


def _fit(key: str, values: Sequence[float], of: str, value: float | None = None) -> FittedConstant:
    """Return a constant with the spread of its values; ``value``: what it is if not their mean."""
    cuts = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else [values[0]]
    return FittedConstant(key, statistics.fmean(values) if value is None else value, cuts[0], cuts[-1], len(values), of)


def _of_means(steps: Sequence[dict[str, float]]) -> Iterator[FittedConstant]:
    """Yield what the means of steps tell where the episodes' records are not here: not what a turn reads."""
    told = [one for one in steps if one.get("episode/turns")]
    if not told:
        return
    yield _fit("sampled", [one["episode/tokens_sampled"] / one["episode/turns"] for one in told], "steps")
    for key in ("turns", "rows", "boot_s", "grade_s"):
        yield _fit(key, [one[f"episode/{key}"] for one in told], "steps")


def _of_episodes(records: Sequence[Record]) -> Iterator[FittedConstant]:
    figures, of = [line(record) for record in records], "episodes"
    turns = [float(one["turns"]) for one in figures]
    first = [float(_first_prompt(record)) for record in records]
    read = [one["tokens_context"] - start for one, start in zip(figures, first, strict=True)]
    sampled, total = [float(one["tokens_sampled"]) for one in figures], sum(turns)

    def per_turn(key: str, values: Sequence[float]) -> FittedConstant:
        each = [max(0.0, value) / count for value, count in zip(values, turns, strict=True)]
        return _fit(key, each, of, max(0.0, sum(values)) / total)

    yield _fit("first_prompt", first, of)
    yield _fit("turns", turns, of)
    yield per_turn("sampled", sampled)
    yield per_turn("read", read)
    yield _fit("rows", [float(one["rows"]) for one in figures], of)
    # What an agent does beside waiting for the engine, its own start included.
    waits = [record.counters.get("engine_s", 0.0) + record.counters.get("overhead_s", 0.0) for record in records]
    yield per_turn("tool_s", [one["agent_s"] - wait for one, wait in zip(figures, waits, strict=True)])
    yield _fit("boot_s", [one["boot_s"] for one in figures], of)
    yield _fit("grade_s", [one["grade_s"] for one in figures], of)
    walls = [math.log(one["wall_s"]) for one in figures if one["wall_s"] > 0]
    if len(walls) >= FEWEST:
        deviation = statistics.stdev(walls)
        far = 1.3 * (deviation / math.sqrt(2 * len(walls)))
        yield FittedConstant("spread", deviation, max(0.0, deviation - far), deviation + far, len(walls), of)
        ended = [float(record.agent.get("status") == "timeout") for record in records]
        yield _fit("timeouts", ended, of)


def _first_prompt(record: Record) -> int:
    """Return the tokens before the first reply that is no side call's."""
    before: list[int] = []
    for node in record.nodes:
        start = before[node.parent] if node.parent >= 0 else 0
        if node.logprobs is not None and not node.side:
            return start
        before.append(start + node.length)
    return 0


def _of_steps(run: Path, steps: Sequence[dict[str, float]]) -> Iterator[FittedConstant]:
    if equal := [min(MOST_EQUAL, one["group/all_equal"]) for one in steps if "group/all_equal" in one]:
        yield _fit("all_equal_groups", equal, "steps")
    try:
        config = machine(own_config(run))
        name, targets = config.actor_rollout_ref.model.path, select(config, f"{MODEL}.target_modules")
        shape = shape_of(load_config(name), name, select(config, f"{MODEL}.lora_rank", 0), targets)
    except (ConfigError, ModelUnknown, OmegaConfBaseException):
        return  # its model is not here: speeds say nothing without its sizes
    layout = layout_of(config)
    trainer, passes = layout.trainer, update_passes(config, shape, layout.trainer)
    rates = []
    for one in steps:
        tokens, seconds = one.get("perf/total_num_tokens", 0), one.get("timing_s/update_actor", 0)
        if tokens and seconds:
            row = one.get("prompt_length/mean", 0) + one.get("response_length/mean", 0)
            context, each = row or tokens / layout.per_step, seconds * trainer.gpus / (passes * tokens)
            mixing = forward(config, shape, context, math.inf)
            if trainer.cpu:
                rates.append(config.plan.cpu_gflops * forward(config, shape, context, 1.0) / each)
            elif each > mixing:
                rates.append((forward(config, shape, context, 1.0) - mixing) / (each - mixing))
    if rates:
        key = "cpu_gflops" if trainer.cpu else "mfu_moe" if shape.experts else "mfu_dense"
        yield _fit(key, rates, "steps", statistics.median(rates))
    for key, timing, size in (
        # Adapters are so small that the rate is not what their sync takes.
        ("sync_gbs", "timing_s/update_weights", 0 if shape.lora else trainer.stored * shape.trained),
        ("save_gbs", "timing_s/save_checkpoint", checkpoint_bytes(config, shape, trainer)),
    ):
        if speeds := [size / 1e9 / one[timing] for one in steps if size and one.get(timing)]:
            yield _fit(key, speeds, "steps", statistics.median(speeds))
