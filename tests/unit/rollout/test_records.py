"""Records survive crashes and report damage."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import zstandard

from rollout.figures import line
from rollout.proxy.session import Session
from rollout.proxy.wire import decode_request
from rollout.records import (
    VERSION,
    NodeRecord,
    Record,
    RecordWriter,
    content_of,
    node_records,
    pack_ids,
    row_records,
    seal_of,
    unpacked,
)
from rollout.records.reading import CorruptRecordError, Reader
from tests.kit import QueueEngine, char_policy, empty_record


async def played() -> Record:
    """One reply."""
    session = Session("e", char_policy(QueueEngine("hello")))
    request = {"messages": [{"role": "user", "content": "hi"}]}
    node = await session.prepare(decode_request(json.dumps(request).encode()), retry=False).reply()
    node.delivered = True
    rows = row_records(session.tree.sequences())
    return empty_record(version=3, nodes=node_records(session.tree), rows=rows)


async def written(tmp_path: Path, count: int = 3) -> tuple[Path, Record]:
    record = await played()
    writer = RecordWriter(tmp_path, "w")
    for _ in range(count):
        writer.append(record)
    writer.close()
    return writer.path, record


async def test_records_come_back_as_written(tmp_path: Path) -> None:
    _, record = await written(tmp_path)
    first, *others = Reader(tmp_path)
    assert first == record and [other.number for other in others] == [1, 2]
    assert [msgspec.structs.replace(other, number=0, previous=b"") for other in others] == [record] * 2


async def test_records_of_earlier_versions_are_read(tmp_path: Path) -> None:
    """Version 1 had a pair of weight versions per reply; neither version had what is optional now."""
    one = msgspec.msgpack.decode(msgspec.msgpack.encode(empty_record(version=1, nodes=[NodeRecord(-1, pack_ids([1]))])))
    two = {**one, "version": 2, "verdict": {"outcome": "resolved", "reason": None, "reward": 1.0, "detail": ""}}
    one["nodes"] = [one["nodes"][0], {"parent": 0, "ids": pack_ids([2, 3]), "logprobs": b"", "versions": [4, 5]}]
    writer = RecordWriter(tmp_path, "old")
    for old in (one, two):
        assert not {"repo", "difficulty", "events"} & set(old)
        writer._write(msgspec.msgpack.encode(old))
    writer.close()
    first, second = Reader(tmp_path)
    assert first.nodes[1].versions == (4, 5) and (first.repo, first.difficulty) == ("", None)
    assert line(first)["tokens_sampled"] == 2
    assert line(second)["resolved"] and (line(second)["dropped"], line(second)["flags"]) == (0, [])


async def test_every_torn_tail_is_dropped_and_reported(tmp_path: Path) -> None:
    path, record = await written(tmp_path, 2)
    data = path.read_bytes()
    frame = data.index(b"CEP1", 1)
    for cut in range(1, len(data) - frame):
        path.write_bytes(data[:-cut])
        reader = Reader(path)
        assert list(reader) == [record]
        assert [(t.offset, t.lost) for t in reader.torn] == [(frame, len(data) - frame - cut)]


async def test_a_flipped_byte_is_an_error_that_names_the_place(tmp_path: Path) -> None:
    path, _ = await written(tmp_path, 2)
    data = path.read_bytes()
    for at in (0, 9, 20, len(data) // 2 + 1, len(data) - 1):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(CorruptRecordError, match=rf"{path.name}, offset \d+"):
            list(Reader(path))


def test_a_full_disk_leaves_no_part_of_a_record(tmp_path: Path) -> None:
    """A writer goes on when there is room again, and what it writes then can be read."""
    code = """
import resource, signal, sys
from pathlib import Path
from rollout.records import RecordWriter
from rollout.records.reading import Reader
from tests.kit import empty_record
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer = RecordWriter(Path(sys.argv[1]), "w")
writer.append(empty_record(episode="a"))
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (writer.path.stat().st_size + 100, hard))
try:
    writer.append(empty_record(episode="b"))
except OSError:
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    writer.append(empty_record(episode="c"))
print([record.episode for record in Reader(writer.path)])
"""
    process = subprocess.run(
        [sys.executable, "-B", "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=Path(__file__).parents[3]
    )
    assert process.stdout == "['a', 'c']\n", process.stderr


async def test_a_seal_is_over_all_that_a_record_says_wherever_it_is_written(tmp_path: Path) -> None:
    """Reading, writing and copying keep it, also with fields of a later version; any change breaks it."""
    record = await played()
    record.version = VERSION
    for place, writes in (("a", 2), ("b", 1)):
        writer = RecordWriter(tmp_path / place, "w")
        for _ in range(writes):
            writer.append(record)
        writer.close()
    reader = Reader(tmp_path)
    payloads = [payload for path in reader.files() for _, _, payload in reader.payloads(path)]
    assert {content_of(payload) for payload in payloads} == {record.seal} == {seal_of(record)}
    read = next(iter(reader))
    assert read.seal == seal_of(read)
    later = {**msgspec.msgpack.decode(unpacked(payloads[0])), "later": [1]}
    writer = RecordWriter(tmp_path / "c", "w")
    writer.copy(zstandard.compress(msgspec.msgpack.encode(later)))
    writer.close()
    (payload,) = (payload for _, _, payload in reader.payloads(writer.path))
    assert content_of(payload) != record.seal and next(iter(Reader(writer.path))).seal == record.seal
