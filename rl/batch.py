"""Many independent pieces of work: a journal of what is done, and workers that share what is left.

A journal has one JSON line per piece. A line is written at once and synced before it counts. A process that is killed
leaves at most an incomplete last line, which the next one cuts off; lines before it are never touched.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any


class JournalError(ValueError):
    """A journal that cannot be used; the message is one line that says where and what to do."""


class Journal:
    """An open journal; `records` are its lines so far. Another process that opens it gets a JournalError."""

    def __init__(self, path: Path) -> None:
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
                    f"{path}: line {number} is damaged ({error}); delete the file to begin anew"
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

    def close(self) -> None:
        self._file.close()


async def workers(count: int, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run ``work`` ``count`` times side by side. Raises what the first of them raised; it has ended the others."""

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(work())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
