"""An index over the record files of a run: of each episode its figures, and where its record is.

A file of records is only ever appended to, so the index is built once and then extended by what is new. It is kept in a
cache file outside of the run, and checked against the files before it is believed. A torn tail (or a frame that is just
being written) is looked at again with the next extension.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import zstandard

from rl.view.search import Query
from rollout import files
from rollout.audit import audit_heard, audit_tokens
from rollout.figures import line
from rollout.records import Record, unpacked
from rollout.records.reading import CorruptRecordError, Reader, decode, payload_at, record_at

_FORM = 3  # of the cache file; another one is built anew
_EACH = 500  # new episodes after which the cache file is written again
_HEADER = 12  # bytes of a frame before its payload: magic, length, checksum


def caches() -> Path:
    """Return the directory of the user's cache files."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollout-view"


class IndexEntry(msgspec.Struct, frozen=True, array_like=True, eq=False):
    """An index entry is one attempt: the record's ``file`` (below the run) and ``offset``, and its figures. It equals
    only itself.

    ``facts`` are those of ``rollout.figures.line``, and ``model``, ``attempt``, ``started`` (Unix seconds),
    ``agent`` (how it ended), ``verdict`` (the reason, or resolved) and ``patch`` (a digest, empty for no patch).
    """

    file: str
    offset: int
    facts: dict[str, Any]

    @property
    def name(self) -> str:
        """Return the episode's name."""
        return self.facts["episode"]


class _FileState(msgspec.Struct):
    """A _FileState says how far a file was read: up to ``end``. ``last``: where the last frame that was read begins;
    ``header``: that frame's header."""

    end: int = 0
    last: int = 0
    header: bytes = b""


class _Cache(msgspec.Struct, tag=_FORM, tag_field="form"):
    read: dict[str, _FileState]
    entries: list[IndexEntry]
    damage: list[str]


class Index:
    """An index is over one run directory or record file.

    ``entries`` only grows, unless a file was replaced by another one; ``torn`` and ``damage`` are lines about what
    cannot be read. An episode that is there twice (a selection inside of the run has copies) counts once. One thread
    extends it; others may read it meanwhile.
    """

    def __init__(self, source: Path, cache: Path | None = None) -> None:
        """Make an empty index. cache: the directory of cache files; None keeps it in memory. Raises
        FileNotFoundError."""
        self.source = source.resolve()
        self.base = self.source.parent if self.source.is_file() else self.source
        Reader(self.source).files()
        self.entries: list[IndexEntry] = []
        self.torn: list[str] = []
        self.damage: list[str] = []
        self._done = self._total = 0  # bytes of records: those that were read, and those of all files
        self.stopped = False  # ends an extension that is under way
        self._read: dict[str, _FileState] = {}
        self._named: dict[str, IndexEntry] = {}
        self._saved = 0
        self._lock = threading.Lock()
        name = hashlib.sha256(os.fsencode(self.source)).hexdigest()[:24]
        self._cache = cache / f"{name}.msgpack" if cache else None
        self._load()

    def extend(self) -> int:
        """Take in what was appended since the last call; return the number of new episodes."""
        with self._lock:
            before = len(self.entries)
            reader = Reader(self.source, damage=[])
            paths = reader.files() if self.source.exists() else []
            sizes = {path: path.stat().st_size for path in paths}
            for path, size in sizes.items():
                if size < self._of(path).end:
                    self._forget({self._name(path)})
            self._done, self._total = sum(self._of(path).end for path in paths), sum(sizes.values())
            for path in paths:
                if sizes[path] > self._of(path).end:
                    self._extend(reader, path)
            self.torn = [f"{t.path.name}, offset {t.offset}: incomplete record, {t.lost} bytes" for t in reader.torn]
            self.damage += [text for text in reader.damage or () if text not in self.damage]
            if len(self.entries) - self._saved >= _EACH:
                self.save()
            return len(self.entries) - before

    def _extend(self, reader: Reader, path: Path) -> None:
        read, name = self._of(path), self._name(path)
        for offset, end, payload in reader.payloads(path, read.end):
            try:
                self._add(IndexEntry(name, offset, facts(decode(payload, f"{path}, offset {offset}"))))
            except (CorruptRecordError, KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
                told = isinstance(error, CorruptRecordError)
                self.damage.append(str(error) if told else f"{path}, offset {offset}: no episode ({error!r})")
            self._done += end - read.end
            read.end, read.last = end, offset
            if self.stopped:
                break
        read.header = _header(path, read.last)

    def _add(self, entry: IndexEntry) -> None:
        if self._named.setdefault(entry.name, entry) is entry:
            self.entries.append(entry)

    @property
    def share(self) -> float:
        """Return which part of the bytes of all records was read."""
        return self._done / self._total if self._total else 1.0

    def find(self, episode: str) -> IndexEntry | None:
        """Return the entry of an episode."""
        return self._named.get(episode)

    def record(self, entry: IndexEntry) -> Record:
        """Read the record of an entry. Raises CorruptRecordError and OSError."""
        return record_at(self.base / entry.file, entry.offset)

    def having(self, entries: list[IndexEntry], query: Query) -> Iterator[IndexEntry | None]:
        """Iterate over the entries in whose record the query finds its text; None for each other one."""
        place, unpack = functools.cache(self.base.joinpath), zstandard.ZstdDecompressor()
        for entry in entries:
            found = False
            with contextlib.suppress(CorruptRecordError, OSError, zstandard.ZstdError, msgspec.DecodeError):
                found = query.finds(unpacked(payload_at(place(entry.file), entry.offset), unpack))
            yield entry if found else None

    def save(self) -> None:
        """Write the cache file, if there is one; if the disk cannot be written, the next start only takes longer."""
        self._saved = len(self.entries)
        if self._cache is None:
            return
        with contextlib.suppress(OSError):
            self._cache.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with files.replacing(self._cache) as new:
                new.write_bytes(msgspec.msgpack.encode(_Cache(self._read, self.entries, self.damage)))

    def _load(self) -> None:
        if self._cache is None:
            return
        try:
            kept = msgspec.msgpack.decode(self._cache.read_bytes(), type=_Cache)
        except (OSError, msgspec.MsgspecError):
            return
        self._read, self.damage = kept.read, kept.damage
        for entry in kept.entries:
            self._add(entry)
        self._forget({name for name, read in kept.read.items() if _header(self.base / name, read.last) != read.header})
        self._saved = len(self.entries)

    def _forget(self, names: set[str]) -> None:
        """Drop what was read of files that have become others."""
        if names:
            kept = [entry for entry in self.entries if entry.file not in names]
            places = tuple(f"{self.base / name}," for name in names)  # as the lines begin
            self.damage = [text for text in self.damage if not text.startswith(places)]
            self._read = {name: read for name, read in self._read.items() if name not in names}
            self.entries, self._named = [], {}
            for entry in kept:
                self._add(entry)

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self.base))

    def _of(self, path: Path) -> _FileState:
        return self._read.setdefault(self._name(path), _FileState())


def facts(record: Record) -> dict[str, Any]:
    """Return the figures of an attempt, see ``IndexEntry``."""
    figures = line(record)
    return figures | {
        "model": record.model,
        "attempt": record.attempt,
        "started": record.started,
        "agent": str(record.agent.get("status", "")),
        "verdict": figures["reason"] or record.verdict["outcome"],
        "patch": hashlib.sha256(record.patch).hexdigest()[:12] if record.patch else "",
        "findings": sum(1 for check in (audit_tokens, audit_heard) for _ in check(record)),
    }


def _header(path: Path, offset: int) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(_HEADER)
    except OSError:
        return b""
