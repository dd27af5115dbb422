"""What a run's metrics and journals say of each episode, found by its name and compared with its record."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from rollout.figures import journal_line, line
from rollout.records import SEALED, SUFFIX, Record

_NEW = ("repo", "difficulty", "overlong")  # records before version 5 may lack them


class Lines:
    """Lines are those of ``episode_metrics/*.jsonl``, ``journal.jsonl`` and ``rewound.jsonl`` beside each directory of
    records. Only their places are kept in memory. ``findings``: what is wrong with them by themselves."""

    def __init__(self, run: Path) -> None:
        self.findings: list[str] = []
        self.told: set[Path] = set()  # directories whose records have lines
        self._run = run
        self._files: list[BinaryIO] = []
        self._places: dict[str, list[tuple[int, int, int]]] = defaultdict(list)  # file, number, offset
        for root in sorted({path.parent.parent for path in run.rglob(f"episodes/*{SUFFIX}")} | {run}):
            logs = sorted((root / "episode_metrics").glob("*.jsonl"))
            rest = [path for path in (root / "journal.jsonl", root / "rewound.jsonl") if path.is_file()]
            if logs or rest or (root / "metrics.jsonl").is_file():
                self.told.add(root)
            known: set[str] = set()
            for path in (*logs, *rest):
                self._index(path, known)

    def _index(self, path: Path, known: set[str]) -> None:
        self._files.append(file := path.open("rb"))
        offset, told = 0, path.relative_to(self._run)
        for number, text in enumerate(file, 1):
            try:
                found = json.loads(text)
                episode = found["episode"]
                if not isinstance(episode, str):
                    raise TypeError
            except (ValueError, KeyError, TypeError, RecursionError):
                if text.endswith(b"\n"):  # or else it is the last line of a process that was killed
                    self.findings.append(f"{told}, line {number}: it names no episode")
            else:
                if episode in known and path.name != "rewound.jsonl":  # which several resumed runs may have written
                    self.findings.append(f"{told}, line {number}: episode {episode} is there twice")
                known.add(episode)
                self._places[episode].append((len(self._files) - 1, number, offset))
            offset += len(text)

    def has(self, episode: str) -> bool:
        """Tell whether an episode has a line."""
        return episode in self._places

    def compare(self, record: Record) -> Iterator[str]:
        """Yield what the lines of an episode say differently from its record, all figures of which they must have."""
        wanted: tuple[dict[str, Any], dict[str, Any]] | None = None
        for place, number, offset in self._places.get(record.episode, ()):
            file = self._files[place]
            file.seek(offset)
            told = json.loads(file.readline())
            path = Path(file.name)
            if wanted is None:
                wanted = json.loads(json.dumps((line(record), journal_line(record))))
            figures = wanted[path.name == "journal.jsonl"]
            names = set(figures) | set(told) if record.version >= SEALED else set(figures) & set(told)
            if record.version < SEALED:
                names -= {"record", *(name for name in _NEW if not figures.get(name))}
                if told.get("record"):
                    yield f"{path.name}, line {number}: it tells of a record of version {SEALED} or later"
            if wrong := sorted(name for name in names if not _equal(name, figures, told)):
                yield f"{path.name}, line {number}: {', '.join(wrong)} of {record.episode} are not its record's"

    def left(self, known: Container[str]) -> Iterator[str]:
        """Yield the lines of other episodes than those that are known."""
        for episode, places in self._places.items():
            if episode not in known:
                for place, number, _ in places:
                    yield f"{Path(self._files[place].name).name}, line {number}: episode {episode} has no record"

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()


def _equal(name: str, figures: dict[str, Any], told: dict[str, Any]) -> bool:
    there = name in figures and name in told
    return there and figures[name] == told[name] and isinstance(figures[name], bool) == isinstance(told[name], bool)
