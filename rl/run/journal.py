"""Batches of independent work that survive being killed: a journal of attempts, workers, progress.

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
from collections.abc import Awaitable, Callable, Collection, Iterable
from pathlib import Path
from typing import Any, TypeVar

from rl.run.screen import Screen, to_go
from rollout.sandbox.owner import gone, me

Piece = TypeVar("Piece")


class JournalError(ValueError):
    """A journal cannot be used. The message is one line that says where, and what to do."""


class LostError(RuntimeError):
    """So many attempts in a row were lost to the infrastructure for one cause that the next ones would be lost too."""


class Losses:
    """Losses are attempts in a row that the infrastructure lost for the same cause.

    limit: how many of them end a batch. apart: causes that may concern a single piece of work, such as an image that
    does not exist; it takes ``_APART_LIMIT`` of them in a row to end a batch.
    """

    def __init__(self, limit: int, apart: Collection[str] = ()) -> None:
        self._limit, self._apart = limit, apart
        self._cause: str | None = None
        self._count = 0

    def count(self, cause: str | None, detail: str = "") -> None:
        """Count an attempt. cause: None if it was not lost. Raises LostError, with the cause and its last detail."""
        self._count = self._count + 1 if cause == self._cause else 1
        self._cause = cause
        if cause is not None and self._count >= (_APART_LIMIT if cause in self._apart else self._limit):
            said = " ".join(detail.removeprefix(f"{cause}: ").split())[:300]
            raise LostError(f"the last {self._count} attempts were lost for one cause, {cause}: {said}")


_APART_LIMIT = 60


class Journal:
    """A journal is a file of attempts that one process at a time may have open.

    records: all attempts so far, oldest first. A record whose key "infra" is true is an attempt that was lost to the
    infrastructure, so its work is still to be done.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the journal. Raises JournalError if another process has it open or a line is damaged.

        On a disk without flock, a file beside it names the process that has it open.
        """
        self._path = path
        self._mark: Path | None = None
        self._file = open(path, "a+b")  # noqa: SIM115  held, with the lock, until close
        try:
            self._lock()
            self.records, whole = read_journal(path)
        except JournalError:
            self.close()
            raise
        self._file.truncate(whole)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JournalError(f"{self._path}: another process is writing it") from None
        except OSError as error:
            mark = self._path.with_name(f"{self._path.name}.open")
            try:
                if mark.exists() and gone(mark.read_text(), running=False):
                    mark.unlink()  # left by a killed process of this machine
                with open(mark, "x") as file:
                    file.write(me())
            except FileExistsError:
                raise JournalError(
                    f"{self._path}: this disk has no flock ({error.strerror}), and {mark} says that process "
                    f"{mark.read_text() or '?'} (machine/boot/namespace/id/start) writes it; if it is gone, delete it"
                ) from None
            except OSError as failed:
                raise JournalError(f"{mark}: cannot be written: {failed}") from None
            self._mark = mark

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
        if self._mark is not None:
            self._mark.unlink(missing_ok=True)


def read_journal(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the records of a journal, and how many bytes they take up; an incomplete last line is left out.

    Another process may be writing to the file. Raises JournalError if a line is damaged.
    """
    records, whole = [], 0
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            break
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise JournalError(f"{path}: line {number} is damaged ({error}); delete the file to start over") from None
        whole += len(line)
    return records, whole


def estimate(pieces: int, seconds: float, jobs: int) -> str:
    """Return a phrase for how long pieces of work take, ``jobs`` at a time. seconds: of one piece."""
    whole = pieces * seconds / jobs
    hours, minutes = f"{whole / 3600:.1f} h", f"{whole / 60:.0f} min"
    time_ = hours if whole >= 3600 else minutes if whole >= 90 else f"{whole:.0f} s"
    return f"about {time_}: {pieces} x {seconds:.0f} s, {jobs} at a time"


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


async def run_all(pieces: Iterable[Piece], jobs: int, work: Callable[[Piece], Awaitable[object]]) -> None:
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
