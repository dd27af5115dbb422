"""A run of several nodes while it is written: a process per node, one of which is killed in the middle of a frame."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from rl.view import server
from rl.view.index import Index
from rollout.records.reading import Reader
from tests.view_kit import served

EACH = 12  # records of a process
WRITE = """
import signal, sys
from pathlib import Path
from rollout.records import RecordWriter
from tests.kit import empty_record

directory, name, torn = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
writer = RecordWriter(directory, name)

class Half:
    def __init__(self, file):
        self.file, self.tell = file, file.tell
    def write(self, data):
        self.file.write(data[: len(data) // 2])
        print("half", flush=True)
        signal.pause()

for number in range(int(sys.argv[4])):
    if number == torn:
        writer._file = Half(writer._file)
    episode = f"train-1-{name}-{number}"
    writer.append(empty_record(version=3, episode=episode, patch=bytes(range(256)) * number))
"""
NODES = {"node-0": -1, "node-1": -1, "node-2": -1, "node-3": 5}  # the record that is torn


async def test_four_writers_of_which_one_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_PAUSE_S", 0.01)
    episodes = tmp_path / "run" / "episodes"
    episodes.mkdir(parents=True)

    async def start(name: str, torn: int) -> asyncio.subprocess.Process:
        arguments = ("-c", WRITE, str(episodes), name, str(torn), str(EACH))
        return await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=subprocess.PIPE)

    async with served(tmp_path / "run") as address, aiohttp.ClientSession() as session, asyncio.timeout(100):

        async def get(path: str) -> str:
            async with session.get(address + path) as answer:
                assert answer.status == 200
                return await answer.text()

        seen = []

        async def grows_to(count: int) -> None:
            while not seen or seen[-1] != count:
                async with session.get(f"{address}/state.json") as answer:
                    seen.append((await answer.json())["episodes"])
                await asyncio.sleep(0.01)

        writers = [await start(name, torn) for name, torn in NODES.items()]
        try:
            *others, last = writers
            assert last.stdout is not None and await last.stdout.readline() == b"half\n"
            last.kill()
            assert [await one.wait() for one in others] == [0, 0, 0] and await last.wait() == -9
            await grows_to(3 * EACH + 5)
            assert "node-3.cep, offset" in await get("/run")
            again = await start("node-3-again", -1)  # a process that is started again has a file of its own
            writers.append(again)
            assert await again.wait() == 0
            await grows_to(4 * EACH + 5)
        finally:
            for one in writers:
                if one.returncode is None:
                    one.kill()
                    await one.wait()
        assert all(a <= b for a, b in itertools.pairwise(seen)), "episodes are never lost from sight"
        assert "incomplete record" in await get("/run")
        page = await get("/episodes")
        names = {record.episode for record in Reader(tmp_path / "run")}
        assert len(names) == 4 * EACH + 5
        assert all(f"id={name}" in page for name in names)
        assert all([await get(f"/episode?id={name}") for name in sorted(names)[::9]])
    whole = Index(tmp_path / "run")
    whole.extend()
    assert {entry.name for entry in whole.entries} == names and len(whole.torn) == 1 and not whole.damage
