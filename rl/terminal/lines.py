"""This module makes lines from records, for lists and for reading. It knows no terminal; all text in it is hostile."""

from __future__ import annotations

import json
import math
import operator
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.cells import chop_cells

from rl.metrics.episodes import Line, line
from rollout.records import NodeRecord, Reader, Record, unpack_floats, unpack_ids

# Characters of one text; the rest of a longer one is counted.
LONGEST = 100_000
_COMPARISON = re.compile(r"(\w+)(<=|>=|=|<|>)(.+)")
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
}

Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class Entry:
    """An entry is an attempt on a task: its figures (``rl.metrics.episodes.line``), and where its record is."""

    run: Path
    path: Path
    offset: int
    figures: Line


@dataclass(frozen=True)
class Row:
    """A row is a line of a list. ``figures``: what it can be filtered by; ``about``: what it opens."""

    cells: tuple[str, ...]
    figures: Mapping[str, Any] = field(default_factory=dict)
    about: Any = None
    style: str = ""

    def fits(self, words: Sequence[str]) -> bool:
        """Tell whether all words are in the row; ``turns>20`` compares a figure, if there is one of that name."""
        text = " ".join(self.cells).lower()
        return all(self._compares(word, text) for word in words)

    def _compares(self, word: str, text: str) -> bool:
        found = _COMPARISON.fullmatch(word)
        if found is None or found[1] not in self.figures:
            return word.lower() in text
        have, sign, wanted = self.figures[found[1]], found[2], found[3]
        try:
            return have is not None and _OPERATORS[sign](float(have), float(wanted))
        except (TypeError, ValueError):
            return sign == "=" and str(have).lower() == wanted.lower()


def shown(text: str) -> str:
    """Return a text with all characters visible: control characters, escape codes and marks of direction are spelled.

    What a terminal would obey, or show in another order, becomes its code (``\\x1b``, ``\\u202e``).
    """
    text = text.replace("\t", "    ")
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def folded(text: str, width: int) -> Iterator[str]:
    """Yield the lines of a text, none wider than ``width`` cells of the terminal."""
    left = len(text) - LONGEST
    for part in text[:LONGEST].split("\n"):
        yield from chop_cells(shown(part.removesuffix("\r")), width) or [""]
    if left > 0:
        yield f"[{left:,} more characters]"


def entries(run: Path, damage: list[str]) -> Iterator[Entry]:
    """Yield what is in a run's records, in their order. ``damage`` gets a line for each thing that cannot be read.

    Raises FileNotFoundError.
    """
    reader = Reader(run, damage=damage)
    for path in reader.files():
        for offset, record in reader.placed(path):
            yield Entry(run, path, offset, line(record))
    damage += [f"{torn.path}: its last record is incomplete; {torn.lost} bytes" for torn in reader.torn]


def verdict(figures: Line) -> str:
    """Return what an attempt came to, in a word."""
    return "resolved" if figures["resolved"] else str(figures["reason"])


TASKS = ("task", "resolved", "episodes", "reward", "turns", "not resolved because")


def tasks(found: Iterable[Entry]) -> list[Row]:
    """Return a row for each task; a row's ``about`` is the task's name."""
    groups: dict[str, list[Entry]] = defaultdict(list)
    for entry in found:
        groups[entry.figures["task"]].append(entry)
    return [_task(name, group) for name, group in sorted(groups.items())]


def _task(name: str, group: list[Entry]) -> Row:
    lines = [entry.figures for entry in group]
    rewards = [one["reward"] for one in lines if one["reward"] is not None]
    figures: dict[str, Any] = {
        "task": name,
        "repo": lines[0]["repo"],
        "episodes": len(lines),
        "resolved": sum(one["resolved"] for one in lines),
        "reward": statistics.fmean(rewards) if rewards else None,
        "turns": statistics.fmean(one["turns"] for one in lines),
    }
    causes = Counter(verdict(one) for one in lines if not one["resolved"])
    cells = (
        name,
        f"{figures['resolved']}",
        f"{figures['episodes']}",
        _number(figures["reward"]),
        f"{figures['turns']:.1f}",
        ", ".join(f"{cause} {count}" for cause, count in causes.most_common()),
    )
    return Row(cells, figures, name)


EPISODES = ("split", "step", "verdict", "reward", "turns", "rows", "sampled", "seconds", "episode", "flags")


def episodes(group: Iterable[Entry]) -> list[Row]:
    """Return a row for each attempt; a row's ``about`` is its entry."""
    rows = []
    for entry in group:
        one = entry.figures
        texts = (one["split"], str(one["step"]), verdict(one), _number(one["reward"]))
        counts = (str(one["turns"]), str(one["rows"]), str(one["tokens_sampled"]), f"{one['wall_s']:.0f}")
        names = (one["episode"], " ".join(map(str, one["flags"])))
        more = {"verdict": verdict(one), "sampled": one["tokens_sampled"], "seconds": one["wall_s"]}
        rows.append(Row((*texts, *counts, *names), {**one, **more}, entry, "green" if one["resolved"] else ""))
    return rows


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def conversation(record: Record, decode: Decode | None, width: int) -> list[Row]:
    """Return an episode as lines; in the lines of a node of its session tree, ``about`` is the node's number.

    ``decode``: of the policy's tokenizer; None if it cannot be had. Then only the number of tokens is shown of what the
    policy has read, and the agent's own events follow.
    """
    rows = [Row((part,), style="bold") for text in _about(record) for part in folded(text, width)]
    trains = {number: at for at, row in enumerate(record.rows) for number in row.nodes}
    for number, node in enumerate(record.nodes):
        heading = _heading(record.nodes, number, trains)
        rows += [Row((part,), about=number, style="bold reverse") for part in folded(heading, width)]
        text = node.text if node.logprobs is not None else decode(unpack_ids(node.ids)) if decode else None
        style = "green" if node.logprobs is not None and number in trains else ""
        if text is not None:
            rows += [Row((part,), about=number, style=style) for part in folded(text, width)]
    if decode is None or not record.nodes:
        rows.append(Row(("events of the agent",), style="bold reverse"))
        rows += [Row((part,)) for event in record.events for part in folded(json.dumps(event), width)]
    for title, text in (
        ("patch", record.patch.decode("utf-8", "replace")),
        ("end of the log of the tests", str(record.verdict.get("log_tail") or "")),
    ):
        rows.append(Row((title,), style="bold reverse"))
        rows += [Row((part,)) for part in folded(text or "(empty)", width)]
    return rows


def _about(record: Record) -> Iterator[str]:
    one = record.verdict
    yield f"task {record.task}, {record.split} step {record.step}, attempt {record.attempt}"
    told = (one.get("outcome"), one.get("reason"), f"reward {one.get('reward')}", one.get("detail"))
    yield ", ".join(str(part) for part in told if part)
    if one.get("flags") or one.get("dropped"):
        yield f"flags {one.get('flags')}, not graded: {one.get('dropped')}"
    yield f"agent {json.dumps(record.agent)}"
    yield ", ".join(f"{name} {value:.1f} s" for name, value in record.timing.items())
    yield from (f"row {at}: {one.prompt_tokens} + {one.response_tokens} tokens" for at, one in enumerate(record.rows))


def _heading(nodes: Sequence[NodeRecord], number: int, trains: Mapping[int, int]) -> str:
    node = nodes[number]
    place = "a conversation begins" if node.parent < 0 else f"after {node.parent}"
    if node.parent not in (-1, number - 1):
        place += " (branch)"
    if node.logprobs is None:
        return f"{number}: {node.length} tokens read, {place}"
    known = [
        f"{number}: {node.length} tokens sampled, {place}",
        node.stop_reason,
        f"row {trains[number]}" if number in trains else "not trained",
        "" if node.delivered else "not delivered",
        "side call" if node.side else "",
        versions(node),
    ]
    return ", ".join(part for part in known if part)


def versions(node: NodeRecord) -> str:
    """Return the weight versions that a reply was sampled with; empty if they are not known."""
    if not node.versions:
        return ""
    found = unpack_ids(node.versions) if isinstance(node.versions, bytes) else node.versions
    low, high = min(found), max(found)
    return f"version {low}" if low == high else f"versions {low} to {high}"


TOKENS = ("place", "id", "token", "logprob", "probability", "version")


def tokens(node: NodeRecord, decode: Decode | None) -> list[Row]:
    """Return a row for each token of a node."""
    ids = unpack_ids(node.ids)
    logprobs = unpack_floats(node.logprobs) if node.logprobs is not None else []
    loaded = unpack_ids(node.versions) if isinstance(node.versions, bytes) else []
    rows = []
    for place, number in enumerate(ids):
        logprob = logprobs[place] if place < len(logprobs) else None
        version = loaded[place] if place < len(loaded) else None
        told = (_number(logprob), "-" if logprob is None else f"{math.exp(min(logprob, 0.0)):.4f}")
        text = repr(decode([number])) if decode else ""
        figures = {"place": place, "id": number, "logprob": logprob, "version": version}
        rows.append(Row((str(place), str(number), text, *told, _number(version)), figures))
    return rows
