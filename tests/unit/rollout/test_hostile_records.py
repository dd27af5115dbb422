"""This module gives every program that reads runs a hostile one: nesting, sizes and kinds of files that no writer of
ours makes, and escape codes wherever somebody else can put a text.
"""

from __future__ import annotations

import asyncio
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard

from rl.view.index import Index
from rollout import program
from rollout.records import Record
from rollout.records.reading import CorruptRecordError, Reader, decode
from tests.export_kit import repair, write
from tests.kit import empty_record
from tests.view_kit import hostile

ROOT = Path(__file__).parents[3]
COMMANDS = {
    "records": ["rollout.records", "{run}"],
    "an episode": ["rollout.records", "{run}", "train-1-"],
    "audit": ["rollout.audit", "{run}"],
    "select": ["rl.data.select", "{run}", "--out", "{out}"],
    "export": ["rl.export", "messages", "{run}", "--out", "{out}"],
    "ingest": ["rl.ingest", "run", "{run}", "--out", "{out}.jsonl"],
    "ingest, a name": ["rl.ingest", "claude-code", "{run}/\x1b]0;x\x07.jsonl", "--out", "{out}.jsonl"],
}


def frame(path: Path, payload: bytes) -> None:
    head = struct.pack("<4sII", b"CEP1", len(payload), zlib.crc32(payload))
    path.write_bytes(head + payload)


def nested(depth: int) -> bytes:
    """A record with lists in lists, which no decoder of ours would write."""
    fields = msgspec.to_builtins(empty_record(episode="deep", events=[{"a": 7}]), builtin_types=(bytes,))
    data = msgspec.msgpack.encode(fields)
    return zstandard.compress(data.replace(b"\xa1a\x07", b"\xa1a" + b"\x91" * depth + b"\x07"))


def bomb() -> bytes:
    packer = zstandard.ZstdCompressor().compressobj(size=6 << 30)
    block = bytes(64 << 20)
    return b"".join([*(packer.compress(block) for _ in range(96)), packer.flush()])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("hostile") / "run"
    asyncio.run(hostile(place, size=1000))
    write(place, asyncio.run(repair("good")), name="good")
    frame(place / "episodes" / "deep.cep", nested(100_000))
    frame(place / "episodes" / "deeper.cep", nested(500))
    frame(place / "episodes" / "bomb.cep", bomb())
    os.mkfifo(place / "episodes" / "pipe.cep")
    return place


@pytest.mark.parametrize("name", COMMANDS)
def test_every_program_goes_on_and_prints_no_escape_code(run: Path, tmp_path: Path, name: str) -> None:
    module, *arguments = (part.format(run=run, out=tmp_path / "out") for part in COMMANDS[name])
    command = [sys.executable, "-m", module, *arguments]
    environment = {**os.environ, "HOME": str(tmp_path), "FORCE_COLOR": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=120)
    said = done.stdout + done.stderr
    assert b"Traceback" not in said and b"\x1b" not in said and b"\x07" not in said, said.decode()[-3000:]
    assert "\u202e".encode() not in said
    if name in ("records", "select", "export"):
        assert b"good" in said or (tmp_path / "out").exists()
        assert sum(line.count(b".cep, offset 0: ") for line in done.stderr.splitlines()) == 3, done.stderr.decode()


async def test_a_bad_file_costs_itself_and_a_line(run: Path) -> None:
    index = Index(run)
    index.extend()
    assert "good" in {entry.name for entry in index.entries} and len(index.damage) == 3
    damage: list[str] = []
    names = [record.episode for path in Reader(run).files() for record in Reader(run, damage=damage).read(path)]
    assert "good" in names and "deep" not in names and len(damage) == 3


@pytest.mark.parametrize(("depth", "fits"), [(90, True), (500, False), (100_000, False)])
def test_a_record_is_only_so_deep(depth: int, fits: bool) -> None:
    def read() -> Record:
        return decode(nested(depth), "here")

    if fits:
        assert read().episode == "deep"
    else:
        with pytest.raises(CorruptRecordError, match="here: "):
            read()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("plain\n\tt\u00e9xt \u4f60\u597d \U0001f600 a\u3000b", None),
        ("\x1b]0;x\x07", "\\x1b]0;x\\x07"),
        ("a\rb\x9b31m", "a\\rb\\x9b31m"),
        ("\u202egnp.exe\u2066", "\\u202egnp.exe\\u2066"),
        ("\ud800\U000e0041", "\\ud800\\U000e0041"),
    ],
)
def test_what_a_terminal_would_obey_is_spelled_out(text: str, wanted: Any) -> None:
    assert program.shown(text) == (text if wanted is None else wanted)
