"""This module runs batches of independent work that survive being killed: a journal of attempts, workers, progress.

A journal has one line of JSON per attempt. A line is written at once and counts when it has reached the disk. A process
that is killed leaves at most one incomplete line, the last, which the next process cuts off; complete lines are never
changed.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from rl.screen import Screen, to_go

Piece = TypeVar("Piece")


class JournalError(ValueError):
    """A journal cannot be used. The message is one line that says where, and what to do."""


class Journal:
    """A journal is a file of attempts that one process at a time may have open.

    records: all attempts so far, oldest first. The key "infra" of a record tells that the attempt was lost to the
    infrastructure, so the work is still to be done.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the journal. Raises JournalError if another process has it open or a line is damaged."""
        self._path = path
        self._file = open(path, "a+b")  # noqa: SIM115  held, with the lock, until close
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise JournalError(f"{path}: another process is writing it") from None
        self.records: list[dict[str, Any]] = []
        self._file.seek(0)
        whole = 0
        for number, line in enumerate(self._file.read().splitlines(keepends=True), 1):
            if not line.endswith(b"\n"):
                break
            try:
                self.records.append(json.loads(line))
            except ValueError as error:
                self._file.close()
                raise JournalError(
                    f"{path}: line {number} is damaged ({error}); delete the file to start over"
                ) from None
            whole += len(line)
        self._file.truncate(whole)

    def append(self, record: dict[str, Any]) -> None:
        """Write a record; it is on the disk when this returns. Raises JournalError."""
        try:
            self._file.write(json.dumps(record).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise JournalError(f"{self._path}: cannot be written: {error}") from error
        self.records.append(record)

    def finished(self, *fields: str) -> set[tuple[Any, ...]]:
        """Return the values of `fields` of every record that was not lost to the infrastructure."""
        return {tuple(record[field] for field in fields) for record in self.records if not record["infra"]}

    def close(self) -> None:
        """Close the file and release the lock."""
        self._file.close()


class Progress:
    """A progress display counts the attempts of a batch by outcome and estimates the time to go."""

    def __init__(self, screen: Screen, what: str, total: int) -> None:
        """Show `what` with nothing done yet. total: pieces of work."""
        self.done = 0
        self.total = total
        self._screen, self._what = screen, what
        self._outcomes = Counter[str]()
        self._began = time.monotonic()
        screen.show(what, 0, total)

    def count(self, outcome: str, final: bool) -> None:
        """Count an attempt and show the result. final: the attempt finishes its piece of work."""
        self.done += final
        self._outcomes[outcome] += 1
        notes = [f"{count} {outcome}" for outcome, count in self._outcomes.items()]
        if self.done >= 2:
            left = (self.total - self.done) * (time.monotonic() - self._began) / self.done
            notes.append(to_go(left))
        self._screen.show(self._what, self.done, self.total, ", ".join(notes))


async def run_all(pieces: Iterable[Piece], jobs: int, work: Callable[[Piece], Awaitable[None]]) -> None:
    """Call `work` for every piece, in order, with `jobs` calls at the same time.

    If a call raises, the others are cancelled and its exception is raised.
    """
    left = iter(pieces)

    async def worker() -> None:
        for piece in left:  # shared by the workers
            await work(piece)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(jobs):
                group.create_task(worker())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
