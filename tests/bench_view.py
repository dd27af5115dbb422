"""Measure the viewer: a run of many episodes, and one episode of 100,000 tokens and 300 turns.

    python -m tests.bench_view [--episodes 10000]

Prints the seconds of the index (built, from its cache, extended), of pages as their bytes arrive over HTTP, and in
headless Chromium until they can be used, and the peak memory of the server's process. On a busy machine the seconds of
the server's own CPU say more. The records are synthetic, in a temporary directory.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import multiprocessing
import random
import resource
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from aiohttp import web

from rl.view.library import Library
from rl.view.server import application
from rollout.records import NodeRecord, Record, RecordWriter, RowRecord, pack_floats, pack_ids, row_digest
from tests import browser_kit
from tests.kit import empty_record
from tests.view_kit import bytewise

_FILES = 64  # as many workers have written the large run


def words(lot: random.Random, characters: int) -> str:
    """Return text of about so many characters."""
    known = ["def", "return", "value", "if", "for", "the", "a", "test", "self", "error", "import", "path", "(x)"]
    out, size = [], 0
    while size < characters:
        out.append(lot.choice(known))
        size += len(out[-1]) + 1
    return " ".join(out)[:characters]


def episode(lot: random.Random, number: int, turns: int, read: int, said: int, model: Path) -> Record:
    """Return an episode with so many turns, each of which reads and says so many tokens (characters)."""
    nodes, events = [], []
    path, length = hashlib.sha256(), 0
    for turn in range(turns):
        asked = words(lot, read)
        message: dict[str, Any] = {"role": "user", "content": asked}
        if turn:
            result = {"type": "tool_result", "tool_use_id": f"call_{number}_{turn - 1}", "content": asked}
            message = {"role": "user", "content": [result]}
            events.append({"type": "user", "message": message})
        says = json.dumps([message]).encode()
        nodes.append(NodeRecord(parent=2 * turn - 1, ids=pack_ids(list(map(ord, asked))), says=says))
        text = words(lot, said)
        call = {"type": "tool_use", "id": f"call_{number}_{turn}", "name": "Bash"}
        call |= {"input": {"command": text[: said // 2]}}
        blocks: list[dict[str, Any]] = [{"type": "text", "text": text}, call]
        logprobs = [-lot.expovariate(3) for _ in text]
        node = NodeRecord(parent=2 * turn, ids=pack_ids(list(map(ord, text))), logprobs=pack_floats(logprobs))
        node.text, node.blocks, node.message_id, node.delivered = text, blocks, f"msg_{number}_{turn}", True
        node.versions, node.started = pack_ids([number % 7] * len(text)), float(turn + 1)
        path.update(nodes[-1].ids + node.ids)
        length += len(asked) + len(text)
        seal = path.copy()
        seal.update(pack_floats(logprobs) + node.versions)
        seal.update(struct.pack("<QQQQ?", length - len(text), len(text), len(text), len(text), False))
        node.seal = seal.digest()
        nodes.append(node)
        events.append({"type": "assistant", "message": {"id": node.message_id, "content": blocks}})
    reward = float(lot.random() < 0.4)
    outcome = {"outcome": "resolved" if reward else "unresolved", "reason": None if reward else "tests_failed"}
    return empty_record(
        version=4, episode=f"train-{number // 128}-task-{number % 400}-{number}", task=f"task-{number % 400}",
        step=number // 128, nodes=nodes, rows=[row(nodes)], events=events, model=str(model),
        patch=words(lot, 800).encode(),
        verdict={**outcome, "reward": reward, "detail": "", "flags": []}, agent={"status": "finished", "turns": turns},
        repo=f"repo/{number % 9}",
        timing={"total": 60.0, "agent": 50.0, "boot": 2.0, "grade": 8.0},
    )  # fmt: skip


def row(nodes: list[NodeRecord]) -> RowRecord:
    """Return the one row of a chain of nodes."""
    sizes = [node.length for node in nodes]
    return RowRecord(sizes[0], sum(sizes[1:]), list(range(1, len(nodes), 2)), row_digest([], [], [], []))


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def serve(runs: list[Path], cache: Path, told: Any) -> None:
    """Be the server's process: say what the index took, the address, and at the end the memory."""
    began, used = time.perf_counter(), time.process_time()
    library = Library(runs, cache)
    opened = time.perf_counter() - began
    library.refresh()
    built = time.perf_counter() - began
    library.close()

    async def main() -> None:
        runner = web.AppRunner(application(library), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        told.send((opened, built, time.process_time() - used, f"http://127.0.0.1:{runner.addresses[0][1]}"))
        await asyncio.to_thread(told.recv)
        told.send(_peak_mb())
        await runner.cleanup()

    asyncio.run(main())


def _cpu_s(server: psutil.Process) -> float:
    times = server.cpu_times()
    return times.user + times.system


async def pages(address: str, paths: dict[str, str], server: psutil.Process) -> None:
    """Print how long each page takes over HTTP."""
    async with aiohttp.ClientSession() as session:
        for name, path in paths.items():
            began, used = time.perf_counter(), _cpu_s(server)
            async with session.get(address + path) as answer:
                size = len(await answer.read())
            took = f"{time.perf_counter() - began:7.3f} s  {_cpu_s(server) - used:5.2f} s of CPU"
            print(f"{name:<46} {took}  {size / 1e3:9,.0f} kB  ({answer.status})")


async def browser(address: str, paths: dict[str, tuple[str, str]]) -> None:
    """Print how long each page takes in Chromium, until a condition holds."""
    with browser_kit.browser() as driven:
        async with browser_kit.tab(driven) as page:
            await page.goto(address + "/static/icon.svg")
            for name, (path, ready) in paths.items():
                began = time.perf_counter()
                await page.goto(address + path)
                await page.until(ready)
                print(f"{name:<46} {time.perf_counter() - began:7.3f} s  in Chromium")
            began = time.perf_counter()
            await page.find("error import")
            await page.until("document.querySelectorAll('.hits button').length > 0")
            print(f"{'find in its page':<46} {time.perf_counter() - began:7.3f} s  in Chromium")


def main() -> int:
    """Run the benchmark; return the exit status."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--episodes", type=int, default=10_000, help="episodes of the large run (default: 10,000)")
    args = options.parse_args()
    lot = random.Random(1)
    with tempfile.TemporaryDirectory(prefix="bench-view-") as name:
        run, cache = Path(name, "run"), Path(name, "cache")
        model = bytewise(run / "policy")
        writers = [RecordWriter(run / "episodes", f"worker-{n}", synced=False) for n in range(_FILES)]
        for number in range(args.episodes):
            writers[number % _FILES].append(episode(lot, number, 10, 400, 100, model))
        for writer in writers:
            writer.close()
        one = RecordWriter(run / "episodes", "one", synced=False)
        large = episode(lot, args.episodes, 300, 250, 84, model)
        one.append(large)
        one.close()
        size = sum(path.stat().st_size for path in (run / "episodes").iterdir())
        tokens = sum(node.length for node in large.nodes)
        print(f"{args.episodes:,} episodes of 5,000 tokens in {_FILES} files; {size / 1e6:,.0f} MB with")
        print(f"one episode of {tokens:,} tokens and 300 turns")
        context = multiprocessing.get_context("spawn")
        for attempt in ("built", "from its cache"):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=([run], cache, there), daemon=True)
            process.start()
            opened, built, used, address = here.recv()
            print(f"{'index, ' + attempt:<46} {built:7.3f} s  {used:5.2f} s of CPU  ({opened:.3f} s of it the cache)")
            if attempt == "from its cache":
                of = f"id={large.episode}"
                paths = {
                    "run": "/run", "episodes, the newest": "/episodes",
                    "episodes, filtered and sorted": "/episodes?verdict=resolved&turns=3:&sort=-tokens",
                    "task": "/task?id=task-7", "episode, conversation, first": f"/episode?{of}",
                    "episode, conversation, again": f"/episode?{of}", "episode, tokens": f"/tokens?{of}",
                    "2,000 tokens of a node": f"/strip?{of}&node=0", "find in it: rare": f"/find.json?{of}&q=nowhere",
                    "find in it: frequent": f"/find.json?{of}&q=error",
                    "search all for what is nowhere": "/search?q=nowhere",
                    "search all for what is nowhere, in Greek": "/search?q=%CE%9F%CF%85%CE%B4",
                    "export": f"/export?{of}",
                }  # fmt: skip
                asyncio.run(pages(address, paths, psutil.Process(process.pid)))
                if why := browser_kit.problem():
                    print(f"no Chromium: {why}")
                else:
                    rows = min(200, args.episodes + 1)
                    turns = "document.querySelectorAll('.turn').length === 300"
                    seen = {
                        "episodes": ("/episodes", f"document.querySelectorAll('tbody tr').length === {rows}"),
                        "tokens of 100,000": (f"/tokens?{of}", "document.querySelectorAll('.t').length > 300"),
                        "conversation of 300 turns": (f"/episode?{of}", turns),
                    }
                    asyncio.run(browser(address, seen))
            here.send("end")
            print(f"{'memory of the server, at most':<46} {here.recv():7.0f} MB")
            process.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
