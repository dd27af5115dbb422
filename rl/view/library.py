"""The library behind the pages: the runs with their indices, and the episodes that were looked at last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from rl.metrics.trained import EpisodeTraining
from rl.metrics.trained import read as read_trained
from rl.view.index import Index, IndexEntry
from rl.view.runs import RunView, advantages, by_deviation, group
from rl.view.tokens import Texts, TreeMap, Vocabulary, tree, vocabulary
from rl.view.turns import EpisodeReading, read
from rollout.records import Record
from rollout.records.reading import CorruptRecordError

_KEPT = 4  # episodes in memory; one of 100,000 tokens takes some tens of MB


class NotFound(LookupError):
    """This is raised when what a link names is not there; the message is one line."""


@dataclass
class EpisodeView:
    """An episode view is one record with all that is made of it when it is shown."""

    run: RunView
    entry: IndexEntry
    record: Record
    words: Vocabulary

    @cached_property
    def reading(self) -> EpisodeReading:
        """Return what a person reads of it."""
        return read(self.record, self.run.masked)

    @cached_property
    def texts(self) -> Texts:
        """Return what its nodes say."""
        return Texts(self.record, self.words)

    @cached_property
    def tree(self) -> TreeMap:
        """Return the map of its tree."""
        return tree(self.record, self.run.masked and self.record.overlong)

    @cached_property
    def trained(self) -> EpisodeTraining | None:
        """Return what the trainer made of it, None if that was not kept."""
        return read_trained(self.run.dir, self.record)

    @property
    def group(self) -> list[IndexEntry]:
        """Return the attempts on its task at its step, itself included."""
        facts = self.entry.facts
        return group(self.run.index.entries, facts["task"], facts["split"], facts["step"])

    @property
    def advantage(self) -> float | None:
        """Return GRPO's advantage in its group: the trainer's where it was kept, else computed from the rewards."""
        if self.trained and self.trained.advantages:
            return next(iter(self.trained.advantages.values()))
        return advantages(self.group, by_deviation(self.run), self.run.masked).get(self.entry.name)


class Library:
    """A library reads the records of runs. model: where the tokenizer is; None for where the records say. who: whose
    labels and comments it writes beside a run; empty for nobody's. ``static``: pages are written as files, so they have
    nothing that only a server can do."""

    def __init__(self, sources: Sequence[Path], cache: Path | None, model: Path | None = None, who: str = "") -> None:
        """Open the runs; nothing is read before ``refresh``. Raises FileNotFoundError."""
        self.runs: list[RunView] = []
        for source in sources:
            self.runs.append(RunView(Index(source, cache), {run.key for run in self.runs}))
        self.model, self.who, self.static = model, who, False
        self._opened = lru_cache(_KEPT)(self._open)

    def refresh(self) -> int:
        """Take in what the runs have written since the last call; return the number of new episodes."""
        return sum(run.index.extend() for run in self.runs)

    def stop(self) -> None:
        """End a refresh that is under way, soon."""
        for run in self.runs:
            run.index.stopped = True

    def close(self) -> None:
        """Write what was indexed into the cache."""
        for run in self.runs:
            run.index.save()

    def run(self, key: str | None) -> RunView:
        """Return a run by its name in links; the first one if that is not given. Raises NotFound."""
        for run in self.runs:
            if key in (None, run.key):
                return run
        raise NotFound(f"there is no run {key}")

    def words(self, model: str) -> Vocabulary:
        """Return the vocabulary of a policy, which records name by its directory."""
        return vocabulary(self.model or Path(model))

    def episode(self, of: str | None, name: str | None) -> EpisodeView:
        """Return an episode by its run and name. Raises NotFound."""
        run = self.run(of)
        entry = run.index.find(name or "")
        if entry is None:
            raise NotFound(f"{run.name} has no episode {name}")
        try:
            return self._opened(run, entry)
        except (CorruptRecordError, OSError) as error:
            raise NotFound(f"the record of {name} cannot be read: {error}") from error

    def _open(self, run: RunView, entry: IndexEntry) -> EpisodeView:
        record = run.index.record(entry)
        return EpisodeView(run, entry, record, self.words(record.model))
