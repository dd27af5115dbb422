"""The player of episodes outside of training: it keeps a directory of them, and plays those that it lacks.

An evaluation, a collection and the quickstart's warm start are such directories.

    evaluation.json    everything that decides how an episode ends; a player with another one is refused
    journal.jsonl      one line per attempt, derived from its record
    episodes/*.cep     the records (docs/records.md)
    shards/I-of-N/     the same three, for each part of a batch that is played in parts

A record is on the disk before its line in the journal. If the process is killed between the two, the next start derives
the line from the record. So an episode that was graded is never played again.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rewards.task import Task
from rl.config.compose import ConfigError
from rl.run.journal import Journal, LostError, run_all
from rollout import files
from rollout.episode import Episode, Setup, play
from rollout.figures import Line, journal_line
from rollout.records import SUFFIX, Record, RecordWriter, record_of
from rollout.records.reading import Reader

_NAMES = {"eval": "evaluation", "collect": "collection", "warm": "preparation"}


class Player:
    """A player holds a directory of episodes open, locked for other processes until ``close``."""

    def __init__(self, directory: Path, identity: Mapping[str, Any], split: str = "eval") -> None:
        """Open or create the directory. ``identity``: everything that decides how an episode ends. ``split``: that of
        the records: eval, collect or warm.

        Raises ConfigError if the directory belongs to another identity, JournalError if it is in use or damaged,
        CorruptRecordError if a record is.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self.dir, self.split, name = directory, split, _NAMES[split]
        self._journal = Journal(directory / "journal.jsonl")
        try:
            about = directory / f"{name}.json"
            played = self.lines or any(directory.rglob(f"*{SUFFIX}"))
            for one in [about, *directory.glob(f"shards/*/{about.name}")] if played else ():
                if one.exists() and (other := changed(json.loads(one.read_text()), identity)):
                    raise ConfigError(f"out: {one.parent} belongs to another {name} ({other}); use another directory")
            if not about.exists() or not played:  # as long as nothing was played, the directory is free
                files.write(about, json.dumps(identity, indent=1) + "\n", synced=True)
            known = {one["episode"] for one in self.lines}
            for record in Reader(directory):  # those of shards, too
                if record.episode not in known:
                    self._journal.append(journal_line(record))
        except BaseException:
            self._journal.close()
            raise

    @property
    def lines(self) -> list[Line]:
        """Return the journal's lines (see ``rollout.figures.journal_line``), one per attempt."""
        return self._journal.records

    def wanted(self, tasks: Sequence[Task], samples: int) -> list[tuple[Task, int]]:
        """Return the (task, number of the sample) of all episodes without a verdict.

        The first samples of all tasks come first, so that an interrupted player still covers many tasks.
        """
        graded = self._journal.finished("task", "sample")
        return [(task, n) for n in range(samples) for task in tasks if (task.instance_id, n) not in graded]

    async def play(
        self,
        setup: Setup,
        wanted: Sequence[tuple[Task, int]],
        *,
        concurrency: int,
        step: int,
        model: str,
        done: Callable[[Line], None],
        check: Callable[[], None] = lambda: None,
        kept: Callable[[Episode, Record], None] = lambda episode, record: None,
        setup_of: Callable[[Task, int], Setup] | None = None,
        pause_s: float = 0.0,
    ) -> None:
        """Play the episodes ``wanted``, ``concurrency`` of them at the same time, with ``pause_s`` after each.

        ``step`` and ``model`` are written to the records. ``done`` is called with the line of every attempt. ``check``
        is called after an attempt was lost to the infrastructure, and raises if no further attempt can succeed.
        ``kept`` is given each attempt, in a thread, before its record is written: it may add to the record, and it
        writes whatever else must be on the disk by the time the record is. ``setup_of``: returns the set-up of a (task,
        sample), if not all have the same.

        Raises LostError when all episodes of about three rounds in a row were lost (at least nine), and JournalError or
        OSError when the directory cannot be written.
        """
        parser = setup.policy.parser.spec
        writer = RecordWriter(self.dir / "episodes", f"{time.time_ns()}-{os.getpid()}")
        lost = 0  # episodes in a row

        async def keep(episode: Episode) -> None:
            record = record_of(episode, self.split, step, model, parser)
            await asyncio.to_thread(kept, episode, record)
            writer.append(record)
            played = journal_line(record)
            self._journal.append(played)
            done(played)
            if played["infra"]:
                check()

        async def work(piece: tuple[Task, int]) -> None:
            nonlocal lost
            task, sample = piece
            name = f"{self.split}-{sample}-{task.instance_id}-{uuid.uuid4().hex[:8]}"
            episode = await play(setup_of(task, sample) if setup_of else setup, task, name, keep)
            lost = lost + 1 if episode.verdict.is_infra else 0
            if lost >= 3 * max(concurrency, 3):
                reason = f"{episode.verdict.reason}: {' '.join(episode.verdict.detail.split())[:300]}"
                raise LostError(f"the last {lost} episodes had no verdict; the last one: {reason}")
            await asyncio.sleep(pause_s)

        try:
            await run_all(wanted, concurrency, work)
        finally:
            writer.close()

    def close(self) -> None:
        """Release the directory."""
        self._journal.close()


def changed(before: Any, now: Any, path: str = "") -> str:
    """Return the first differences with both values, or "" if there is none."""
    if isinstance(before, dict) and isinstance(now, dict):
        inner = (changed(before.get(k), now.get(k), f"{path}.{k}".strip(".")) for k in sorted({*before, *now}))
        found = [text for text in inner if text]
        if path == "tasks" and found:
            return f"{len(found)} tasks have other rows or are in only one of them"
        return ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
    if json.dumps(before) == json.dumps(now):
        return ""
    there, here = (text if len(text := json.dumps(value)) < 60 else f"{text[:57]}..." for value in (before, now))
    return f"{path} is {there} there and {here} here"
