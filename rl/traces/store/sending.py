"""Send records to a LightningStore: each attempt once, in the order in which they were written."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rl.traces.collect.spans import about_of, ending_of, spans_of
from rl.traces.store.stores import SOURCE, Store, StoredAttempt, StoreError, StoreRefusal
from rollout.records import Record
from rollout.records.reading import Position, Reader
from rollout.trace import trace

_MODES = {"train": "train", "val": "val", "eval": "test"}
_SICK = 3  # refusals in a row, after which it is the store's fault and no episode's
_LOOK_S, _LONGEST_S = 2.0, 15.0  # between two looks at the records; at most, while the store does not answer


async def send(record: Record, run: str, store: Store, known: dict[str, StoredAttempt]) -> bool:
    """Put an attempt into the store unless it is there; return whether it was put there.

    An episode is a rollout, named by its first attempt. ``run``: where it was played; ``known``: what the store has,
    which is kept up to date. Raises StoreError.
    """
    name = _name(record)
    place, number = known.get(name), record.attempt + 1
    if place is not None and (place.number, place.ended) >= (number, True):
        return False
    if place is None:
        about = about_of(record)
        about.pop("attempt")
        task = {"instance_id": record.task, "repo": record.repo, "difficulty": record.difficulty}
        rollout = {"input": task, "mode": _MODES.get(record.split)}
        place = await store.start(rollout | {"metadata": {**about, "source": SOURCE, "run": run, "episode": name}})
    known[name] = place
    for _ in range(number - place.number):
        if not place.ended:  # its record is lost, or was refused
            await store.end(place, "failed", {})
        known[name] = place = await store.again(place.rollout)
    lost = record.verdict["outcome"] == "infra_failure"
    await store.add(spans_of(trace(record), place.rollout, place.attempt))
    ending = {**about_of(record), **ending_of(record), "started": record.started, "reward": record.verdict["reward"]}
    await store.end(place, "failed" if lost else "succeeded", ending)
    place.ended = True
    return True


def _name(record: Record) -> str:
    """Return the name of an episode, which is that of its first attempt."""
    return record.episode.removesuffix(f".{record.attempt}") if record.attempt else record.episode


class Sender:
    """A sender sends the records of run directories, or of record files, to a store.

    The files are its queue: it holds one record at a time. ``sent``: attempts that it has sent; ``there``: attempts
    that were in the store already; ``refused``: what the store said of the others, by their names; ``damage``: what
    could not be read.
    """

    def __init__(self, sources: Sequence[Path], store: Store) -> None:
        self._sources, self._store = sources, store
        self._positions: dict[Path, Position] = {}
        self._known: dict[str, StoredAttempt] = {}
        self._witness: StoredAttempt | None = None  # an early one: if it is gone, the store has lost its memory
        self._waiting: set[str] = set()  # episodes with a refused attempt
        self._connected = False  # and nothing has failed since
        self.sent = self.there = 0
        self.refused: dict[str, str] = {}
        self.damage: list[str] = []

    async def connect(self) -> None:
        """Ask the store what it has, and begin with the first record again. Raises StoreError."""
        self._known = await self._store.known()
        self._witness = next(iter(self._known.values()), None)
        self._positions, self._waiting, self.there = {}, set(), 0
        self.refused, self.damage = {}, []
        self._connected = True

    async def round(self, looked: Callable[[Sender], None] = lambda _: None) -> None:
        """Send what is there and was not sent. ``looked`` is called after each record. Raises StoreError.

        After an error the next round asks the store first what it has.
        """
        if not self._connected:
            await self.connect()
        await self._send_new(looked)
        if self._witness is not None and not await self._store.has(self._witness.rollout):
            await self.connect()
            await self._send_new(looked)
        self._connected = True

    async def _send_new(self, looked: Callable[[Sender], None]) -> None:
        self._connected = False
        in_a_row = 0
        for source in self._sources:
            run = source.resolve() if source.is_dir() else source.resolve().parent
            damage: list[str] = []
            reader = Reader(source, damage=damage)
            for path in reader.files():
                for offset, record in reader.placed(path, self._positions.setdefault(path, Position())):
                    try:
                        await self._send(record, f"{run.parent.name}/{run.name}")
                        in_a_row = 0
                    except StoreRefusal as error:
                        in_a_row += 1
                        if in_a_row >= _SICK:
                            raise StoreError(str(error)) from error
                        self._waiting.add(_name(record))
                        self.refused[record.episode] = str(error)
                    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
                        damage.append(f"{path}, offset {offset}: not the record of an episode ({error!r})")
                    looked(self)
            self.damage += [line for line in damage if line not in self.damage]

    async def _send(self, record: Record, run: str) -> None:
        name = _name(record)
        if name in self._waiting:
            self.refused[record.episode] = "the attempt before it was refused"
        elif await send(record, run, self._store, self._known):
            self.sent += 1
            self._witness = self._witness or self._known[name]
        else:
            self.there += 1

    @property
    def left(self) -> list[str]:
        """Return what could not be sent, a line each."""
        return [*(f"{name}: {said}" for name, said in self.refused.items()), *self.damage]

    @property
    def files(self) -> list[Path]:
        """Return the record files that are there now."""
        return [path for source in self._sources for path in Reader(source).files()]

    @property
    def read(self) -> int:
        """Return how many bytes of them were read since the store was last asked what it has."""
        return sum(at.offset for at in self._positions.values())

    async def follow(self, ended: asyncio.Event, say: Callable[[str], None]) -> bool:
        """Send what is written until ``ended`` is set, and then once more; return whether that left nothing over.

        A store that fails is tried again, and ``say`` is told.
        """
        wait, said = _LOOK_S, ""
        while True:
            last = ended.is_set()
            try:
                if last and self.left:
                    await self.connect()  # and try them again
                await self.round()
                if said:
                    say(f"the store answers again; {self.sent} attempts sent")
                wait, said = _LOOK_S, ""
            except StoreError as error:
                wait = min(2 * wait, _LONGEST_S)
                if said != (said := str(error)):
                    say(f"{said}; what is not sent stays in the records, and is tried again")
            if last:
                return self._connected and not self.left
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), wait)


async def send_all(sources: Iterable[Path], store: Store) -> Sender:
    """Send all records of run directories, once, and return the sender with its counts. Raises StoreError."""
    sender = Sender([*sources], store)
    await sender.round()
    return sender
