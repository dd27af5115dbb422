"""Figures of a run's episodes and steps: written to and read from files of one JSON object per line, and averaged.

``episode_metrics/<host>-<pid>.jsonl``
    a line per attempt, made from its record (``rollout.figures.line``) and written by the agent loop (``EpisodeLog``).
``rewound.jsonl``
    the lines of those attempts that a resumed run plays again.
``metrics.jsonl``
    a line per step: ``{"step", "time", <verl's metrics>, <ours>}``, all of them in docs/metrics.md. wandb and
    TensorBoard get the same numbers.
``saved_step.json``
    such a line, of the last step whose checkpoint was saved, with what was known of the step then. If the run is killed
    between this checkpoint and the end of the step, it resumes after the step, and this line becomes the step's line in
    metrics.jsonl.

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
from typing import Any

from rollout import files
from rollout.figures import Line, suspicious

_MEANS = ("rows", "turns", "calls", "malformed_calls", "cut_replies", "wall_s", "boot_s", "agent_s", "grade_s")
_MEANS += ("no_call", "refused_calls", "foreign_calls", "unread_replies", "overlong")
_MEANS += ("tokens_sampled", "tokens_context", "tokens_trained")
_WALL_PERCENTILES = (50, 90, 99)
_BY_AGENT = {"resolve_rate": "resolved", "turns": "turns", "rows": "rows", "tokens_sampled": "tokens_sampled"}

# A label with more values than this (repositories, ...) is not split by value: nobody reads as many curves.
MAX_LABELS = 12


class EpisodeLog:
    """A log takes the lines of this process's episodes. Each process has a file of its own in ``folder``, so there are
    no locks and the run directory may be on NFS."""

    def __init__(self, run_dir: Path, folder: str = "episode_metrics"):
        directory = run_dir / folder
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / f"{socket.gethostname()}-{os.getpid()}.jsonl"
        self.path.touch()  # a shared disk shows a new file late, but additions to a known one soon

    def append(self, line: Line) -> None:
        """Write an attempt's line; to be called before the episode's rows are handed to verl."""
        with open(self.path, "a") as f:
            f.write(json.dumps(line) + "\n")


class Tail:
    """A tail reads what was appended to a file of JSON lines since the last call. The file need not exist yet."""

    def __init__(self, path: Path, from_end: bool = False):
        self.path = path
        self.offset = path.stat().st_size if from_end and path.exists() else 0

    def take(self) -> list[Line]:
        """Return the new complete lines."""
        if not self.path.exists():
            return []
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self.offset += len(complete)
        return [json.loads(text) for text in complete.splitlines()]


class Tails:
    """These are the tails of all files of JSON lines in a directory: of what was appended since this was made."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._known = {path: Tail(path, from_end=True) for path in directory.glob("*.jsonl")}

    def take(self) -> list[Line]:
        """Return the new complete lines."""
        paths = sorted(self._directory.glob("*.jsonl"))
        return [one for path in paths for one in self._known.setdefault(path, Tail(path)).take()]


class EpisodeReader:
    """A reader takes in what all logs of a run appended since it was made, and what they hold of steps after ``after``:
    episodes that an interrupted step has left (``rl.train.unfinished``)."""

    def __init__(self, run_dir: Path, after: float = math.inf):
        paths = sorted((run_dir / "episode_metrics").glob("*.jsonl"))
        self.pending = [one for path in paths for one in read_jsonl(path) if one["step"] > after]
        self.tails = Tails(run_dir / "episode_metrics")

    def look(self, split: str) -> list[Line]:
        """Return the new lines of a split, which stay new."""
        self.pending += self.tails.take()
        return [one for one in self.pending if one["split"] == split]

    def take(self, split: str) -> list[Line]:
        """Return the new lines of a split; those of the other split wait for their own call."""
        taken = self.look(split)
        self.pending = [one for one in self.pending if one["split"] != split]
        return taken


def fold(lines: Sequence[Line], prefix: str, labels: Sequence[str] = ()) -> dict[str, float]:
    """Return means over episodes, as metrics named ``<prefix>/...``. Infrastructure failures are only counted.

    Args:
        lines: episodes of one step and split.
        prefix: "episode" or "val"; with "val" the names of counts begin with it, too.
        labels: keys of the lines ("difficulty", "repo") by whose values the resolve rate is split.

    Returns:
        The metrics, none if there are no lines; a few are split by agent if several have played.
        ``<prefix>/resolve_rate`` and the other means are left out if every episode was lost to the infrastructure.
    """
    if not lines:
        return {}
    outer = "" if prefix == "episode" else f"{prefix}/"
    graded = [one for one in lines if not one["infra"]]
    metrics: dict[str, float] = {f"{prefix}/count": len(graded), f"{outer}infra/failures": len(lines) - len(graded)}
    causes = Counter((one["reason"], one["infra"]) for one in lines if one["reason"])
    for (cause, infra), count in causes.items():
        metrics[f"{outer}{'infra' if infra else 'failure'}/{cause}"] = count
    if not graded:
        return metrics

    def mean(key: str) -> float:
        return sum(float(one.get(key) or 0) for one in graded) / len(graded)

    metrics[f"{prefix}/resolved"] = sum(one["resolved"] for one in graded)
    metrics[f"{prefix}/resolve_rate"] = mean("resolved")
    metrics[f"{prefix}/reward_mean"] = mean("reward")
    metrics |= {f"{prefix}/{key}": mean(key) for key in _MEANS}
    walls = [float(one["wall_s"]) for one in graded]
    metrics |= {f"{prefix}/wall_s_p{percent}": percentile(walls, percent) for percent in _WALL_PERCENTILES}
    for label in labels:
        for value in sorted({one[label] for one in graded if one[label]}):
            resolved = [one["resolved"] for one in graded if one[label] == value]
            metrics[f"{outer}{label}/{metric_name(value)}/resolve_rate"] = sum(resolved) / len(resolved)
    kinds = sorted({one.get("agent_kind", "") for one in graded})
    for kind in kinds if len(kinds) > 1 else ():
        own, name = [one for one in graded if one.get("agent_kind") == kind], f"{outer}agent/{metric_name(kind)}"
        metrics[f"{name}/count"] = len(own)
        metrics |= {f"{name}/{as_}": sum(float(one[key]) for one in own) / len(own) for as_, key in _BY_AGENT.items()}
    if boots := sum(one.get("boots", 0) for one in lines):
        metrics[f"{outer}boxes/warm_hits"] = sum(one.get("warm_boots", 0) for one in lines) / boots
        metrics[f"{outer}boxes/boot_s"] = sum(one.get("booting_s", 0.0) for one in lines) / boots
    metrics |= _screening(graded, outer)
    for name in sorted({name for one in graded for name in one.get("own", ())}):
        values = [one["own"][name] for one in graded if name in one["own"]]
        metrics[f"{outer}own/{name}"] = sum(values) / len(values)
    counts = {(role, name) for one in graded for role, told in one.get("roles", {}).items() for name in told}
    for role, name in sorted(counts):
        total = sum(one.get("roles", {}).get(role, {}).get(name, 0) for one in graded)
        metrics[f"{outer}role/{metric_name(role)}/{name}"] = total / len(graded)
    overheads = [float(one["proxy_overhead_ms"]) for one in graded if one["proxy_overhead_ms"] is not None]
    if overheads:
        metrics[f"{outer}proxy/overhead_ms"] = sum(overheads) / len(overheads)
        metrics[f"{outer}proxy/overhead_ms_p95"] = percentile(overheads, 95)
    if queries := sum(one["cache_queries"] for one in graded):
        metrics[f"{outer}engine/prefix_cache_hit_rate"] = sum(one["cache_hits"] for one in graded) / queries
    return metrics


def _screening(graded: Sequence[Line], outer: str) -> dict[str, float]:
    """Return what the rules found: episodes by flag, those with anything suspicious, those of them that were resolved,
    and episodes whose patch was not graded whole. Counts of 0 are left out."""
    flagged = [one for one in graded if suspicious(one)]
    counts = Counter(f"flags/{name}" for one in graded for name in one["flags"])
    counts["flagged/episodes"] = len(flagged)
    counts["flagged/resolved"] = sum(one["resolved"] for one in flagged)
    counts["dropped/episodes"] = sum(one["dropped"] > 0 for one in graded)
    return {f"{outer}{key}": count for key, count in counts.items() if count}


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile, interpolated between neighbours as numpy does by default: the 50th is the median."""
    ordered = sorted(values)
    at = percent / 100 * (len(ordered) - 1)
    low, high = ordered[math.floor(at)], ordered[math.ceil(at)]
    return low + (high - low) * (at - math.floor(at))


def metric_name(text: str) -> str:
    """Return a label's value as part of a metric's name: "<15 min fix" becomes under_15_min_fix."""
    text = text.replace("<", " under ").replace(">", " over ")
    return re.sub(r"[^\w./-]+", "_", text).strip("_")


def group_metrics(
    groups: dict[str, list[tuple[float, bool]]],
    filtered: dict[float, int] | None = None,
    surplus: int = 0,
    alone: int = 0,
) -> dict[str, float]:
    """Return figures of the groups that were played for a step, whether it trains on them or not. A group whose rewards
    are all equal teaches nothing: its advantages are 0.

    Args:
        groups: of the step's batch, by group: (reward, resolved) of its episodes.
        filtered: by reward, the groups that dynamic filtering replaced because all their episodes had this reward.
        surplus: groups with different rewards that were played for dynamic filtering and not needed.
        alone: groups that had fewer than two episodes to compare, because the others were left out or lost.

    Returns:
        ``group/played``, ``group/used`` and ``group/alone``, counts; ``group/episodes``, mean of the used ones; and, as
        shares of the played groups that were not alone, ``group/all_equal`` (one reward), ``group/all_resolved`` and
        ``group/none_resolved``. A filtered group counts as resolved if its reward is above 0. No metrics if there are
        no groups.
    """
    if not groups:
        return {}
    replaced = filtered or {}
    won = sum(count for reward, count in replaced.items() if reward > 0)
    lost = sum(replaced.values()) - won
    compared = len(groups) + won + lost + surplus
    equal = sum(len({reward for reward, _ in group}) == 1 for group in groups.values())
    resolved = [[resolved for _, resolved in group] for group in groups.values()]
    return {
        "group/played": compared + alone,
        "group/used": len(groups),
        "group/alone": alone,
        "group/episodes": sum(map(len, groups.values())) / len(groups),
        "group/all_equal": (equal + won + lost) / compared,
        "group/all_resolved": (sum(map(all, resolved)) + won) / compared,
        "group/none_resolved": (sum(not any(group) for group in resolved) + lost) / compared,
    }


def _json_line(step: int, time_s: float, metrics: dict[str, Any]) -> str:
    """Return a step's line with the metrics that can be read as numbers; null stands for one that is not finite."""
    values: Line = {"step": int(step), "time": time_s}
    for key, value in metrics.items():
        try:
            number = float(value)
        except (TypeError, ValueError):
            continue
        values[key] = number if math.isfinite(number) else None
    return json.dumps(values) + "\n"


def append_step(run_dir: Path, step: int, time_s: float, metrics: dict[str, Any]) -> None:
    """Append one step to metrics.jsonl; it is on the disk when this returns."""
    with open(run_dir / "metrics.jsonl", "a") as f:
        f.write(_json_line(step, time_s, metrics))
        f.flush()
        os.fsync(f.fileno())


def keep_step(run_dir: Path, step: int, time_s: float, metrics: dict[str, Any]) -> None:
    """Keep what is known of a step whose checkpoint is being saved; ``rewind`` uses it if the step got no line."""
    files.write(run_dir / "saved_step.json", _json_line(step, time_s, metrics), synced=True)


def read_jsonl(path: Path) -> list[Line]:
    """Return the lines of a file that may not exist, and whose last line may have been torn by a kill."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_bytes().splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines


def rewind(run_dir: Path, step: int, keeps: Callable[[str], bool] = lambda _: False) -> None:
    """Drop the lines of steps after the checkpoint of ``step``: these steps are about to be done again.

    The step itself has a line afterwards, at least with what was known when its checkpoint was saved. ``keeps`` is
    given the key of an episode of the next step, and tells whether that episode need not be played again.
    """
    steps = run_dir / "metrics.jsonl"
    known = [one for one in read_jsonl(run_dir / "saved_step.json") if one["step"] == step]
    if known and all(one["step"] != step for one in read_jsonl(steps)):
        files.write(steps, "".join(json.dumps(one) + "\n" for one in [*read_jsonl(steps), *known]))
    for path in [steps, *(run_dir / "episode_metrics").glob("*.jsonl")]:
        if path.exists():
            parts: dict[bool, list[str]] = {True: [], False: []}
            for one in read_jsonl(path):
                kept = one["step"] <= step or ("session" in one and keeps(one["session"]))
                parts[bool(kept)].append(json.dumps(one) + "\n")
            if path != steps:
                with open(run_dir / "rewound.jsonl", "a") as rewound:  # their records stay, and the audit asks for them
                    rewound.writelines(parts[False])
            files.write(path, "".join(parts[True]))


def has_validation(step: Line) -> bool:
    """Tell whether a step's metrics hold held-out results (ours, or verl's own for other agent loops)."""
    return any(key.startswith(("val/", "val-core/")) for key in step)


def resolve_rate(step: Line, split: str) -> float | None:
    """Return the share of a step's episodes that resolved, None if it has none of that split.

    Where the agent loop logs no episodes, verl's mean reward stands in for it.
    """
    if split == "train":
        return step.get("episode/resolve_rate", step.get("critic/score/mean"))
    if "val/resolve_rate" in step:
        return step["val/resolve_rate"]
    core = [value for key, value in step.items() if key.startswith("val-core/") and "/mean@" in key]
    return sum(core) / len(core) if core else None
