"""A run's tables and curves for the pages, made of its records' figures, its config, metrics and task files."""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from rl.data.labels import Labels
from rl.metrics.episodes import Line, fold, read_jsonl
from rl.metrics.panels import SECTIONS, names_of
from rl.run import phases
from rl.view.index import Index, IndexEntry
from rollout.figures import suspicious
from rollout.sandbox import lease

BINS = 10  # of the histogram of rewards
MEANS = ("resolved", "reward", "turns", "tokens_sampled", "tokens_context", "wall_s")  # of a step's episodes
Kind = TypeVar("Kind")
_EPSILON = 1e-6  # verl's, added to the standard deviation of a group


class RunView:
    """A run view is what the pages show of one directory. ``key``: its name in links, which no other run has."""

    def __init__(self, index: Index, known: Container[str] = ()) -> None:
        self.index, self.dir = index, index.base
        parent, name = self.dir.parent.name, self.dir.name
        self.name = self.key = index.source.name if index.source.is_file() else f"{parent}/{name}"
        if self.key in known:
            self.key = str(index.source)
        self.labels = Labels(self.dir)
        self._tasks: dict[str, dict[str, Any]] = {}

    @cached_property
    def config(self) -> dict[str, Any]:
        """Return the composed config; empty if there is none."""
        import yaml

        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        try:
            read = yaml.load((self.dir / "config.yaml").read_bytes(), loader)
        except (OSError, yaml.YAMLError):
            return {}
        return read if isinstance(read, dict) else {}

    def setting(self, path: str, default: Any = None) -> Any:
        """Return a value of the config by its dotted key."""
        value: Any = self.config
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return default if value is None else value

    @property
    def masked(self) -> bool:
        """Tell whether the run leaves out training episodes that a limit ended."""
        return bool(self.setting("episode.mask_overlong", False))

    @property
    def phase(self) -> str:
        """Return what the run is doing, in words."""
        if (self.dir / "done").exists():
            return "finished"
        try:
            phase = phases.read(self.dir)
        except (OSError, ValueError, TypeError):
            phase = None
        if phase is None:
            return ""
        # Whoever works on a run renews its lease.
        seen = lease.read(self.dir / "run.lease")
        ended = seen is None or time.time() - seen[1] / 1e9 > lease.STALE_S
        return f"{'ended in ' if ended else ''}step {phase.step}: {phase.name}"

    def metrics(self) -> list[Line]:
        """Return the lines of metrics.jsonl, or, where there is none, what the episodes of each step tell."""
        found = [one for one in read_jsonl(self.dir / "metrics.jsonl") if isinstance(one.get("step"), int)]
        if found:
            return found
        told: dict[int, Line] = defaultdict(dict)
        for (split, step), lines in sorted(by_step(self.index.entries).items()):
            told[step] |= fold(lines, "episode" if split == "train" else "val")
        return [{"step": step, **values} for step, values in sorted(told.items())]

    def attempts(self, task: str) -> list[IndexEntry]:
        """Return the attempts of a task."""
        return [one for one in self.index.entries if one.facts["task"] == task]

    def task(self, name: str) -> dict[str, Any]:
        """Return the row of a task: statement, gold patch and names of hidden tests; empty if it cannot be found."""
        if name not in self._tasks:
            self._tasks[name] = next(filter(None, (_row(path, name) for path in self._task_files())), {})
        return self._tasks[name]

    def _task_files(self) -> Iterable[Path]:
        for key in ("data.train_files", "data.val_files", "tasks", "val_tasks"):
            given = self.setting(key, [])
            for one in [given] if isinstance(given, str) else given if isinstance(given, list) else []:
                if isinstance(one, str) and one.endswith(".parquet"):
                    yield Path(one)
        yield self.dir / "tasks.parquet"


def _row(path: Path, name: str) -> dict[str, Any]:
    import pyarrow
    import pyarrow.parquet

    columns = ["instance_id", "problem_statement", "patch", "FAIL_TO_PASS", "PASS_TO_PASS", "difficulty", "image"]
    try:
        known = pyarrow.parquet.read_schema(path).names
        table = pyarrow.parquet.read_table(
            path, columns=[one for one in columns if one in known], filters=[("instance_id", "=", name)]
        )
    except (OSError, ValueError, pyarrow.ArrowException):
        return {}
    return next(iter(table.to_pylist()), {})


# --- tables of episodes


def grouped(found: Iterable[Kind], key: Callable[[Kind], Any]) -> dict[Any, list[Kind]]:
    """Return what has the same key together, in the order in which it comes."""
    groups: dict[Any, list[Kind]] = defaultdict(list)
    for one in found:
        groups[key(one)].append(one)
    return groups


def by_step(entries: Iterable[IndexEntry]) -> dict[tuple[str, int], list[Line]]:
    """Return the figures of episodes by (split, step)."""
    return grouped((one.facts for one in entries), lambda line: (line["split"], line["step"]))


def steps(entries: Iterable[IndexEntry]) -> list[dict[str, Any]]:
    """Return a row per step and split, the newest first: counts and means of graded episodes."""
    rows = []
    for (split, step), lines in sorted(by_step(entries).items(), key=lambda one: (-one[0][1], one[0][0])):
        graded = [one for one in lines if not one["infra"]]
        row: dict[str, Any] = {"split": split, "step": step, "episodes": len(lines), "infra": len(lines) - len(graded)}
        for key in MEANS:
            values = [float(one[key]) for one in graded if one[key] is not None]
            row[key] = statistics.fmean(values) if values else None
        row["flagged"] = sum(bool(suspicious(one)) for one in lines)
        row["causes"] = Counter(one["reason"] for one in lines if one["reason"]).most_common(3)
        rows.append(row)
    return rows


@dataclass(frozen=True)
class Bin:
    """A bin of the histogram counts episodes with a reward in [low, high), the last one's end included; or, if the two
    are the same, with just this reward."""

    low: float
    high: float
    count: int
    height: float  # share of the largest bin


def histogram(entries: Iterable[IndexEntry]) -> list[Bin]:
    """Return the rewards of graded episodes in ``BINS`` bins; or one for each reward if there are fewer."""
    values = sorted(float(one.facts["reward"]) for one in entries if one.facts["reward"] is not None)
    if not values:
        return []
    if len(known := Counter([0.0, 1.0, *values])) <= BINS:
        counts = {value: count - (value in (0.0, 1.0)) for value, count in sorted(known.items())}
        return [Bin(value, value, count, count / max(counts.values())) for value, count in counts.items()]
    low, high = min(0.0, values[0]), max(1.0, values[-1])
    width = (high - low) / BINS
    counts = Counter(min(BINS - 1, int((value - low) / width + 1e-9)) for value in values)
    most = max(counts.values())
    return [Bin(low + n * width, low + (n + 1) * width, counts[n], counts[n] / most) for n in range(BINS)]


def group(entries: Iterable[IndexEntry], task: str, split: str, step: int) -> list[IndexEntry]:
    """Return the attempts of a task at a step."""
    return [one for one in entries if _group_of(one.facts) == (task, split, step)]


def _compared(members: Iterable[IndexEntry], masked: bool) -> list[IndexEntry]:
    """Return those that GRPO compares: graded and, in a run that is ``masked``, not ended by a limit."""
    return [one for one in members if one.facts["reward"] is not None and not (masked and one.facts["overlong"])]


def advantages(members: Sequence[IndexEntry], by_deviation: bool, masked: bool = False) -> dict[str, float]:
    """Return GRPO's advantage of each graded episode of a group, by name: the reward less the group's mean.

    by_deviation: divided by the standard deviation. masked: as the run is. A group with fewer than two episodes has
    none, nor has one that is not trained on.
    """
    if any(one.facts["split"] != "train" for one in members):
        return {}
    rewards = {one.name: float(one.facts["reward"]) for one in _compared(members, masked)}
    if len(rewards) < 2:
        return {}
    mean = statistics.fmean(rewards.values())
    scale = statistics.stdev(rewards.values()) + _EPSILON if by_deviation else 1.0
    return {name: (reward - mean) / scale for name, reward in rewards.items()}


def taught_nothing(members: Sequence[IndexEntry], masked: bool = False) -> str:
    """Return why GRPO learns nothing from a group, in a sentence; "" if it does, or is not trained on. masked: as the
    run is."""
    if any(one.facts["split"] != "train" for one in members):
        return ""
    graded = _compared(members, masked)
    if len(graded) < 2:
        lost = f"{len(members) - len(graded)} of its {len(members)} episodes were lost"
        lost += " or ended by a limit (episode.mask_overlong)" if masked else ""
        return f"This group taught nothing: {lost}, and one alone has nothing to be compared with."
    if len({one.facts["reward"] for one in graded}) > 1:
        return ""
    if all(one.facts["resolved"] for one in graded):
        return "This group taught nothing: all its episodes resolved the task, so none is better than the others."
    cause, count = Counter(str(one.facts["reason"]) for one in graded).most_common(1)[0]
    why = f"{cause.replace('_', ' ')} in {count} of {len(graded)}"
    return f"This group taught nothing: all its episodes have the same reward, and none resolved the task ({why})."


def by_deviation(run: RunView) -> bool:
    """Tell whether the run divides advantages by the group's deviation."""
    return bool(run.setting("algorithm.norm_adv_by_std_in_grpo", True))


@dataclass
class HiddenTest:
    """A hidden test has its kind, and by episode whether it passed; None for no result."""

    name: str
    kind: str
    passed: dict[str, bool | None] = field(default_factory=dict)

    @property
    def differs(self) -> bool:
        """Tell whether the episodes do not all have the same result."""
        return len(set(self.passed.values())) > 1


def hidden_tests(verdicts: dict[str, dict[str, Any]]) -> list[HiddenTest]:
    """Return the results of hidden tests, those in which episodes differ first, then those that failed."""
    found: dict[tuple[str, str], HiddenTest] = {}
    for episode, verdict in verdicts.items():
        for kind, results in (verdict.get("tests") or {}).items():
            for result, names in results.items():
                for name in names:
                    one = found.setdefault((kind, name), HiddenTest(str(name), kind, dict.fromkeys(verdicts)))
                    one.passed[episode] = result == "success"
    return sorted(found.values(), key=lambda one: (not one.differs, all(one.passed.values()), one.kind, one.name))


# --- choosing episodes

_TEXT = ("split", "verdict", "repo", "task", "agent")
_RANGE = {
    "step": "step", "turns": "turns", "tokens": "tokens_sampled", "reward": "reward", "seconds": "wall_s",
    "malformed": "malformed_calls", "unread": "unread_replies",
}  # fmt: skip
_FIGURES = {**_RANGE, **{name: name for name in _RANGE.values()}, "rows": "rows"}
SORTS = {**_FIGURES, "task": "task", "verdict": "verdict"}
FILTERS = {*_TEXT, *_FIGURES, "audit", "flag", "group", "q", "sort"}


class FilterError(ValueError):
    """A filter cannot be read. The message is one line."""


def chosen(entries: Sequence[IndexEntry], query: dict[str, str], masked: bool = False) -> list[IndexEntry]:
    """Return the entries that a query asks for, in its order. masked: as the run is.

    Keys: those of ``_TEXT`` (the value itself), of ``_FIGURES`` ("3", "3:", ":3", "3:5", bounds included), ``audit``
    ("sound" or "findings"), ``flag`` (a name, or "any"), ``group`` ("taught nothing" or "taught"), ``q`` (part of the
    episode's name), ``sort`` (a key of SORTS, with "-" the greatest first). Raises FilterError.
    """
    tests: list[Callable[[Line], bool]] = []
    for key, value in query.items():
        if not value:
            continue
        if key in _TEXT:
            tests.append(lambda one, k=key, v=value: _is(one, k, v))
        elif key in _FIGURES:
            low, high = _bounds(key, value)
            tests.append(lambda one, k=_FIGURES[key], a=low, b=high: one[k] is not None and a <= one[k] <= b)
        elif key == "audit":
            tests.append(lambda one, v=value: (one["findings"] > 0) == (v == "findings"))
        elif key == "flag":
            tests.append(lambda one, v=value: bool(suspicious(one)) if v == "any" else v in one["flags"])
        elif key == "group":
            groups = grouped(entries, lambda one: _group_of(one.facts))
            flat = {place for place, members in groups.items() if taught_nothing(members, masked)}
            mine = {place for place in groups if place[1] == "train" and (place in flat) == (value != "taught")}
            tests.append(lambda one, m=mine: _group_of(one) in m)
        elif key == "q":
            tests.append(lambda one, v=value: v.lower() in one["episode"].lower())
    found = [one for one in entries if all(test(one.facts) for test in tests)]
    sort = query.get("sort", "")
    if figure := SORTS.get(sort.removeprefix("-")):
        missing = [one for one in found if one.facts[figure] is None]
        known = [one for one in found if one.facts[figure] is not None]
        return sorted(known, key=lambda one: one.facts[figure], reverse=sort.startswith("-")) + missing
    return found[::-1]


def _group_of(line: Line) -> tuple[Any, ...]:
    return line["task"], line["split"], line["step"]


def _is(line: Line, key: str, value: str) -> bool:
    if key == "verdict" and value in ("unresolved", "infra"):
        return bool(line["infra"]) if value == "infra" else not line["infra"] and not line["resolved"]
    return line[key] == value


def _bounds(key: str, text: str) -> tuple[float, float]:
    low, colon, high = text.partition(":")
    try:
        return float(low or "-inf"), float(high or "inf") if colon else float(low)
    except ValueError:
        raise FilterError(f"{key}={text}: not a number or a range such as 3, 3:, :8 or 3:8") from None


def values_of(entries: Iterable[IndexEntry]) -> dict[str, list[str]]:
    """Return what there is to choose from: splits, verdicts, repositories, flags and so on."""
    facts = [one.facts for one in entries]
    return {
        **{key: sorted({one[key] for one in facts} - {""}) for key in ("split", "verdict", "repo")},
        "audit": ["sound", "findings"],
        "flag": sorted({flag for one in facts for flag in one["flags"]}),
        "group": ["taught nothing", "taught"],
    }


# --- curves


def curves(runs: dict[str, list[Line]]) -> list[dict[str, Any]]:
    """Return the panels that have data, as plain values: title, section, unit, bounds, stacked, steps, series.

    runs: lines of metrics by the run's name; with several, each series has the run's name in front.
    """
    out = []
    for section, panels in SECTIONS.items():
        for panel in panels:
            shown: list[tuple[str, dict[int, float]]] = []
            for name, lines in runs.items():
                for metric, label in panel.curves(names_of(lines)).items():
                    values = {one["step"]: one[metric] for one in lines if one.get(metric) is not None}
                    shown.append((f"{name}: {label}" if len(runs) > 1 else label, values))
            if at := sorted({step for _, values in shown for step in values}):
                series = [{"label": label, "values": [values.get(step) for step in at]} for label, values in shown]
                out.append(
                    {"section": section, "title": panel.title, "unit": panel.unit, "bounds": list(panel.bounds),
                     "stacked": panel.stacked and len(runs) == 1, "steps": at, "series": series}
                )  # fmt: skip
    return out
