"""Labels and comments: what people say of episodes, in files beside a run's records.

RUN/labels/<who>.<host>-<pid>.jsonl has a line per saying; each process appends to a file of its own, so several people
may write at once and nothing is lost. Of what one person says of the same place, the last counts; an empty label and
comment takes it back.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import msgspec

from rollout import files

_LONGEST = 10_000  # characters of a comment
_WHO = re.compile(r"[\w-]{1,40}")


class Label(msgspec.Struct, frozen=True):
    """A label is on an ``episode``, or on one of its turns (``turn``, from 1). ``by``: who says it; ``at``: Unix
    time."""

    episode: str
    label: str
    comment: str = ""
    turn: int = 0
    by: str = ""
    at: float = 0.0


_DECODER = msgspec.json.Decoder(Label)


class Labels:
    """These are the labels of one run. ``read`` takes in what was written since the last call."""

    def __init__(self, run: Path) -> None:
        self._place = run / "labels"
        self._ends: dict[Path, int] = {}
        self._said: dict[tuple[str, str, int], Label] = {}

    def read(self) -> dict[str, list[Label]]:
        """Return what counts now, by episode, in the order of time."""
        for path in sorted(self._place.glob("*.jsonl")):
            start = self._ends.get(path, 0)  # a viewer's threads read at once
            try:
                with files.opened(path) as file:
                    file.seek(start)
                    data = file.read()
            except OSError:
                continue
            whole = data.rpartition(b"\n")[0]
            self._ends[path] = start + len(whole) + bool(whole)
            for line in whole.splitlines():
                try:
                    one = _DECODER.decode(line)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                    continue
                key = one.by, one.episode, one.turn
                if key not in self._said or self._said[key].at <= one.at:
                    self._said[key] = one
        found: dict[str, list[Label]] = defaultdict(list)
        for one in sorted(list(self._said.values()), key=lambda one: one.at):
            if one.label or one.comment:
                found[one.episode].append(one)
        return dict(found)


def of_runs(runs: Iterable[Path]) -> dict[str, list[Label]]:
    """Return the labels of runs, by episode."""
    found: dict[str, list[Label]] = defaultdict(list)
    for run in runs:
        for episode, said in Labels(run if run.is_dir() else run.parent).read().items():
            found[episode] += said
    return dict(found)


def say(run: Path, label: Label) -> None:
    """Append a label to this process's file; it is on the disk when this returns. Raises ValueError and OSError."""
    if not _WHO.fullmatch(label.by):
        raise ValueError("a name has 1 to 40 letters, digits, - and _")
    if len(label.label) > 60 or len(label.comment) > _LONGEST or label.turn < 0:
        raise ValueError(f"a label has at most 60 characters, a comment {_LONGEST}")
    place = run / "labels"
    place.mkdir(exist_ok=True)
    # What stands before may be torn.
    line = b"\n%b\n" % msgspec.json.encode(msgspec.structs.replace(label, at=time.time()))
    path = place / f"{label.by}.{socket.gethostname()}-{os.getpid()}.jsonl"
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        if os.write(fd, line) < len(line):
            raise OSError(f"{path}: the disk is full")
        os.fsync(fd)
    finally:
        os.close(fd)
