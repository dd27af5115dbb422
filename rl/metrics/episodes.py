"""What a run records about itself, and how it is told to people.

Files under the run directory, one JSON object per line:

``episode_metrics/<host>-<pid>.jsonl``
    one record per episode, appended by the agent loop (``EpisodeLog``); keys in ``EPISODE_KEYS``.
``metrics.jsonl``
    one record per step: ``{"step", "time", <verl's metrics>, <ours>}``, all of them in docs/metrics.md. wandb and
    TensorBoard get the same numbers.

This module imports neither verl nor torch: agent loop, trainer and screen all use it.
"""

import json
import math
import os
import re
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from rollout import files

EPISODE_KEYS = {
    "step": "trainer step (weights) the episode belongs to",
    "split": "'train' or 'val'",
    "episode": "unique id",
    "task": "task id",
    "repo": "of the task",
    "difficulty": "of the task in its set's words; None if its set has none",
    "reward": "float; None for an infrastructure failure",
    "resolved": "bool",
    "failure": "None, or the cause in one word: no_patch, tests, timeout, context_full, ...",
    "dropped": "paths of the patch that were not graded",
    "flags": "list of what is suspicious in the patch, by name",
    "infra": "bool: lost to infrastructure, not trained on",
    "rows": "training sequences made",
    "tokens_sampled": "tokens that the engine sampled",
    "tokens_context": "tokens that the policy read: everything else, counted once",
    "tokens_trained": "tokens with mask 1: what was sampled, delivered and is not served only",
    "turns": "calls of the main thread that were acted on",
    "calls": "requests of all threads, retries included",
    "malformed_calls": "tool calls that were not whole and became text",
    "cut_replies": "replies that ended at max_tokens",
    "cache_queries": "prompt tokens of the calls whose engine told how many it had cached",
    "cache_hits": "those that it had",
    "wall_s": "seconds, sandbox boot to verdict",
    "boot_s": "seconds",
    "agent_s": "seconds",
    "grade_s": "seconds",
    "proxy_overhead_ms": "mean milliseconds per call spent in the proxy outside the engine",
}

_MEANS = (
    "rows",
    "tokens_sampled",
    "tokens_context",
    "tokens_trained",
    "turns",
    "calls",
    "malformed_calls",
    "cut_replies",
    "wall_s",
    "boot_s",
    "agent_s",
    "grade_s",
)
_WALL_PERCENTILES = (50, 90, 99)

# More values than this of one label (repositories, ...) are not told apart: nobody reads as many curves.
MAX_LABELS = 12


class EpisodeLog:
    """Append-only log of episodes of this process. One file per process: no locks, NFS is fine."""

    def __init__(self, run_dir: str | Path):
        directory = Path(run_dir) / "episode_metrics"
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / f"{socket.gethostname()}-{os.getpid()}.jsonl"
        self.path.touch()  # a shared disk takes a while to show the head a new file, but not what is added to one

    def append(self, record: dict) -> None:
        """Write one record, before the episode's rows are handed to verl.

        Raises:
            KeyError: a key is missing from, or not in, ``EPISODE_KEYS``.
        """
        if odd := set(record) ^ set(EPISODE_KEYS):
            raise KeyError(f"episode record: missing or unknown keys {sorted(odd)}")
        with open(self.path, "a") as f:
            f.write(json.dumps(record) + "\n")


class Tail:
    """Reads what was appended to a file of JSON lines since the last call; the file need not exist yet."""

    def __init__(self, path: Path, from_end: bool = False):
        self.path = path
        self.offset = path.stat().st_size if from_end and path.exists() else 0

    def take(self) -> list[dict]:
        if not self.path.exists():
            return []
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self.offset += len(complete)
        return [json.loads(line) for line in complete.splitlines()]


class EpisodeReader:
    """Reads what all ``EpisodeLog`` of a run appended since the last call."""

    def __init__(self, run_dir: str | Path, from_end: bool = True):
        self.directory = Path(run_dir) / "episode_metrics"
        self.pending: list[dict] = []
        self.tails = {path: Tail(path, from_end) for path in self.directory.glob("*.jsonl")}

    def take(self, split: str) -> list[dict]:
        """New records of a split; those of the other split wait for their own call."""
        for path in sorted(self.directory.glob("*.jsonl")):
            self.pending += self.tails.setdefault(path, Tail(path)).take()
        taken = [r for r in self.pending if r["split"] == split]
        self.pending = [r for r in self.pending if r["split"] != split]
        return taken


def fold(records: list[dict], prefix: str, labels: Sequence[str] = ()) -> dict[str, float]:
    """Means over episodes, as metrics named ``<prefix>/...``. Infrastructure failures only count as such.

    Args:
        records: episode records of one step and split.
        prefix: "episode" or "val"; with "val" the counts are prefixed too.
        labels: keys of the records ("difficulty", "repo") by which the resolve rate is split.

    Returns:
        Empty for no records. ``<prefix>/resolve_rate`` and the other means are left out if every episode
        was lost to infrastructure.
    """
    if not records:
        return {}
    outer = "" if prefix == "episode" else f"{prefix}/"
    graded = [r for r in records if not r["infra"]]
    metrics: dict[str, float] = {
        f"{prefix}/count": len(graded),
        f"{outer}infra/failures": len(records) - len(graded),
    }
    causes = Counter((r["failure"], r["infra"]) for r in records if r["failure"])
    for (cause, infra), count in causes.items():
        metrics[f"{outer}{'infra' if infra else 'failure'}/{cause}"] = count
    if not graded:
        return metrics

    def mean(key: str) -> float:
        return sum(float(r[key] or 0) for r in graded) / len(graded)

    metrics[f"{prefix}/resolved"] = sum(bool(r["resolved"]) for r in graded)
    metrics[f"{prefix}/resolve_rate"] = mean("resolved")
    metrics[f"{prefix}/reward_mean"] = mean("reward")
    metrics |= {f"{prefix}/{key}": mean(key) for key in _MEANS}
    walls = [float(r["wall_s"]) for r in graded]
    metrics |= {f"{prefix}/wall_s_p{percent}": percentile(walls, percent) for percent in _WALL_PERCENTILES}
    for label in labels:
        for value in sorted({r[label] for r in graded if r[label]}):
            resolved = [bool(r["resolved"]) for r in graded if r[label] == value]
            metrics[f"{outer}{label}/{metric_name(value)}/resolve_rate"] = sum(resolved) / len(resolved)
    metrics |= _screening(graded, outer)
    overheads = [float(r["proxy_overhead_ms"]) for r in graded if r["proxy_overhead_ms"] is not None]
    if overheads:
        metrics[f"{outer}proxy/overhead_ms"] = sum(overheads) / len(overheads)
        metrics[f"{outer}proxy/overhead_ms_p95"] = percentile(overheads, 95)
    if queries := sum(r["cache_queries"] for r in graded):
        metrics[f"{outer}engine/prefix_cache_hit_rate"] = sum(r["cache_hits"] for r in graded) / queries
    return metrics


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that is not below ``percent`` of them (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def metric_name(text: str) -> str:
    """A label's value as part of a metric's name: "<15 min fix" is under_15_min_fix."""
    text = text.replace("<", " under ").replace(">", " over ")
    return re.sub(r"[^\w./-]+", "_", text).strip("_")


def group_metrics(groups: dict[str, list[tuple[float, bool]]]) -> dict[str, float]:
    """Of the groups that a step trains on. A group whose rewards are all equal teaches nothing: no advantage.

    Args:
        groups: per group (reward, resolved) of its episodes.

    Returns:
        ``group/count``, ``group/episodes`` (mean), and the shares of groups ``group/all_equal`` (one reward),
        ``group/all_resolved``, ``group/none_resolved``. Empty for no groups.
    """
    if not groups:
        return {}

    def share(holds: Callable[[list[tuple[float, bool]]], bool]) -> float:
        return sum(map(holds, groups.values())) / len(groups)

    return {
        "group/count": len(groups),
        "group/episodes": sum(map(len, groups.values())) / len(groups),
        "group/all_equal": share(lambda group: len({reward for reward, _ in group}) == 1),
        "group/all_resolved": share(lambda group: all(resolved for _, resolved in group)),
        "group/none_resolved": share(lambda group: not any(resolved for _, resolved in group)),
    }


def _screening(graded: list[dict], outer: str) -> dict[str, float]:
    """What the rules found: episodes by flag, those with any, those of them that were resolved, and those whose
    patch was not graded whole. Nothing for what was not found."""
    flagged = [r for r in graded if r["flags"]]
    counts = Counter(f"flags/{name}" for r in flagged for name in r["flags"])
    counts["flagged/episodes"] = len(flagged)
    counts["flagged/resolved"] = sum(r["resolved"] for r in flagged)
    counts["dropped/episodes"] = sum(r["dropped"] > 0 for r in graded)
    return {f"{outer}{key}": count for key, count in counts.items() if count}


def append_step(run_dir: str | Path, step: int, time_s: float, metrics: dict) -> None:
    """Append one step to metrics.jsonl. Values that are no finite numbers become null."""
    record: dict = {"step": int(step), "time": time_s}
    for key, value in metrics.items():
        try:
            number = float(value)
        except (TypeError, ValueError):
            continue
        record[key] = number if math.isfinite(number) else None
    with open(Path(run_dir) / "metrics.jsonl", "a") as f:
        f.write(json.dumps(record) + "\n")


def read_jsonl(path: Path) -> list[dict]:
    """Records of a file that may not exist and whose last line may be torn by a kill."""
    if not path.exists():
        return []
    records = []
    for line in path.read_bytes().splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def rewind(run_dir: str | Path, step: int) -> None:
    """Drop what was recorded after the checkpoint of ``step``: it is about to be done again."""
    run_dir = Path(run_dir)
    for path in [run_dir / "metrics.jsonl", *(run_dir / "episode_metrics").glob("*.jsonl")]:
        if not path.exists():
            continue
        kept = [r for r in read_jsonl(path) if r["step"] <= step]
        files.write(path, "".join(json.dumps(r) + "\n" for r in kept))


def has_validation(record: dict) -> bool:
    """Whether a step's record holds held-out results (ours, or verl's own for other agent loops)."""
    return any(key.startswith(("val/", "val-core/")) for key in record)


def resolve_rate(record: dict, split: str) -> float | None:
    """Share of resolved episodes of a step. None: the step has none of that split.

    Falls back to verl's mean reward where the agent loop logs no episodes.
    """
    if split == "train":
        return record.get("episode/resolve_rate", record.get("critic/score/mean"))
    if "val/resolve_rate" in record:
        return record["val/resolve_rate"]
    core = [v for k, v in record.items() if k.startswith("val-core/") and "/mean@" in k]
    return sum(core) / len(core) if core else None
