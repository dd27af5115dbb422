"""Reading records: all of a run or a file, or one by its place.

Nothing is believed unseen: a reader checks each frame's checksum, that a record follows the one before it, and that its
values can be held and written again.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zstandard

from rollout import files, storable
from rollout.records import HEADER, MAGIC, READABLE, SUFFIX, Record, unpacked

_DEEPEST = 100  # levels of lists and objects in what agents and policies have written


class CorruptRecordError(Exception):
    """A complete frame is not what was written. The message names file and offset."""


@dataclass
class TornTail:
    """A torn tail is an incomplete last frame, left by a process that died while it wrote. ``lost``: its bytes, which
    readers drop."""

    path: Path
    offset: int
    lost: int


@dataclass
class Position:
    """A position says how far a file was read: to ``offset``, which comes after ``number`` records.

    ``previous``: the hash of the last one, None if it was damaged.
    """

    offset: int = 0
    number: int = 0
    previous: bytes | None = b""


@dataclass
class Reader:
    """A reader iterates over all records of a run directory or a single file, and fills ``torn`` on the way.

    Raises CorruptRecordError for a complete frame that does not check out or does not follow the one before it,
    FileNotFoundError for a missing path. If ``damage`` is a list, a corrupt frame is noted there as a line instead, and
    reading continues after it. Where no frame starts as expected, the rest of the file is left out.
    """

    source: Path
    torn: list[TornTail] = field(default_factory=list)
    damage: list[str] | None = None

    def files(self) -> list[Path]:
        """Return the record files. Raises FileNotFoundError."""
        if self.source.is_file():
            return [self.source]
        if not self.source.is_dir():
            raise FileNotFoundError(f"{self.source}: no such run directory or record file")
        return sorted(path for path in self.source.rglob(f"*{SUFFIX}") if path.is_file())

    def __iter__(self) -> Iterator[Record]:
        for path in self.files():
            yield from self.read(path)

    def read(self, path: Path) -> Iterator[Record]:
        """Iterate over the records of one of the files. Raises CorruptRecordError."""
        return (record for _, record in self.placed(path))

    def placed(self, path: Path, at: Position | None = None) -> Iterator[tuple[int, Record]]:
        """Iterate over (offset, record) of one of the files, beginning at ``at``, and move ``at`` along: a record
        counts as read when the next one is asked for. Raises CorruptRecordError."""
        return ((offset, record) for offset, _, record in self.whole(path, at))

    def whole(self, path: Path, at: Position | None = None) -> Iterator[tuple[int, bytes, Record]]:
        """Iterate as ``placed`` does over (offset, payload, record)."""
        at = Position() if at is None else at
        for offset, end, payload in self.payloads(path, at.offset):
            place, number = f"{path}, offset {offset}", at.number
            try:
                record = decode(payload, place)
            except CorruptRecordError as error:
                self._damaged(str(error))
            else:
                follows = record.number == number and at.previous in (record.previous, None)
                if record.version >= 3 and not follows:
                    self._damaged(f"{place}: this record does not follow the one before it")
                    number = record.number
                yield offset, payload or b"", record
            at.offset, at.number = end, number + 1
            at.previous = hashlib.sha256(payload).digest() if payload else None

    def payloads(self, path: Path, start: int = 0) -> Iterator[tuple[int, int, bytes | None]]:
        """Iterate over (offset, end, payload) of whole frames from ``start`` on; payload: None for a wrong checksum."""
        with files.opened(path) as file:
            offset, size = start, os.fstat(file.fileno()).st_size
            while offset < size:
                file.seek(offset)
                frame = file.read(HEADER.size)
                if frame[:4] != MAGIC[: len(frame)]:
                    self._damaged(f"{path}, offset {offset}: no record starts here", size - offset)
                    return
                end = size + 1
                if len(frame) == HEADER.size:
                    _, length, checksum = HEADER.unpack(frame)
                    end = offset + HEADER.size + length
                if end > size:
                    self.torn.append(TornTail(path, offset, size - offset))
                    return
                payload = file.read(length)
                yield offset, end, payload if zlib.crc32(payload) == checksum else None
                offset = end

    def _damaged(self, finding: str, lost: int = 0) -> None:
        if self.damage is None:
            raise CorruptRecordError(finding)
        self.damage.append(f"{finding}; the rest of the file, {lost} bytes, is left out" if lost else finding)


def payload_at(path: Path, offset: int) -> bytes:
    """Return the payload of a frame that a reader found at ``offset``. Raises CorruptRecordError if it has changed."""
    with files.opened(path) as file:  # past its buffer, which would be filled for each record
        header = os.pread(file.fileno(), HEADER.size, offset)
        magic, length, checksum = HEADER.unpack(header.ljust(HEADER.size))
        payload = os.pread(file.fileno(), length, offset + HEADER.size) if magic == MAGIC else b""
    if zlib.crc32(payload) != checksum or len(payload) != length:
        raise CorruptRecordError(f"{path}, offset {offset}: the record has changed since it was read")
    return payload


def record_at(path: Path, offset: int) -> Record:
    """Return the record that a reader found at ``offset``. Raises CorruptRecordError if it has changed."""
    return decode(payload_at(path, offset), f"{path}, offset {offset}")


def decode(payload: bytes | None, place: str) -> Record:
    """Return the record of a frame; None stands for a wrong checksum. ``place``: for messages. Raises
    CorruptRecordError."""
    if payload is None:
        raise CorruptRecordError(f"{place}: the record's checksum is wrong")
    try:
        record = msgspec.msgpack.decode(unpacked(payload), type=Record)
        said = (record.events, record.verdict, record.agent, *(node.blocks for node in record.nodes))
    except (zstandard.ZstdError, msgspec.DecodeError, RecursionError) as error:
        raise CorruptRecordError(f"{place}: {error}") from error
    if not all(storable(one, _DEEPEST) for one in (*said, *(call.reply for call in record.calls))):
        raise CorruptRecordError(f"{place}: nested more than {_DEEPEST} deep")
    if record.version not in READABLE:
        raise CorruptRecordError(f"{place}: record version {record.version}; readable are {READABLE}")
    return record
