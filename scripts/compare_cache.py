"""Play conversations against vLLM's prefix cache, and in a simulation of it; print the table of docs/planning.md.

    python scripts/compare_cache.py [--tools S ...] [--size SHARE ...]

32 conversations, each with one request after another, share a vLLM server on the CPU (the quickstart's random policy)
whose KV cache is smaller than all that they have said. Beside the hits that vLLM reports are those of a simulation with
vLLM's rules, those of rl.plan's formula with the requests in the engine as measured, and those of a formula that is
linear in the cache's size. Takes three minutes for each row on two cores.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import tempfile
import time
from collections import OrderedDict, deque
from pathlib import Path
from typing import NamedTuple

from rl.plan.engine import kept
from rl.quickstart.policy import make_policy
from rl.run.vllm_server import SERVED_AS, vllm_server
from rollout import program
from rollout.proxy.vllm_http import VllmHttpEngine

WORDS = 100, 700  # ids of the policy that are plain text


class Setting(NamedTuple):
    """``count`` conversations play at a time, each with ``turns`` requests: the first has ``first`` tokens, of which
    ``head`` are the same in all; each reply has ``sampled``, and ``read`` more follow it. Tools take exponential times.
    An ended conversation is followed by a new one. ``block``: tokens of a block of the cache."""

    count: int = 32
    head: int = 1024
    first: int = 1280
    sampled: int = 64
    read: int = 192
    turns: int = 16
    tool_s: float = 2.0
    block: int = 32

    @property
    def own(self) -> float:
        """Return the tokens of a conversation that are its own, in the mean over its requests."""
        return self.first - self.head + (self.turns - 1) / 2 * (self.sampled + self.read) + self.sampled


class Seen(NamedTuple):
    """Seen is the share of the prompts' tokens that were in the cache, and the requests in the engine."""

    hits: float
    inside: float


class Cache:
    """A simulation of vLLM's cache: it admits a request if its whole prompt fits beside those that run, when the prompt
    before it is read; it evicts what was freed first, the end of a conversation first."""

    def __init__(self, setting: Setting, blocks: int, prefill_s: float, decode_s: float, seed: int = 1) -> None:
        self.setting, self.prefill_s, self.decode_s = setting, prefill_s, decode_s
        self.random = random.Random(seed)
        self.free = blocks - setting.head // setting.block  # not held by requests; idle prefixes are in them
        self.idle: OrderedDict[int, int] = OrderedDict()  # blocks of conversations, the oldest first
        self.held: dict[int, int] = {}
        self.waiting: deque[int] = deque()
        self.turn = [self.random.randrange(setting.turns) for _ in range(setting.count)]
        self.now, self.reads_until, self.ended = 0.0, 0.0, 0
        # Time, conversation, whether its tool (not its reply) has ended.
        self.events: list[tuple[float, int, bool]] = []
        self.prompts = self.found = self.area = 0.0

    def play(self, requests: int) -> Seen:
        """Play so many requests; the first third of them only fills the cache."""
        for number in range(self.setting.count):
            self._use_tools(number)
        done, began = 0, 0.0
        while done < requests:
            now, number, asks = heapq.heappop(self.events)
            self.area += (now - self.now) * (len(self.held) + len(self.waiting))
            self.now = now
            if asks:
                self.waiting.append(number)
            elif number >= 0:
                done += 1
                self._free(number)
                if done == requests // 3:
                    self.prompts, self.found, self.area, began = 0, 0, 0, now
            self._admit()
        return Seen(self.found / self.prompts, self.area / (self.now - began))

    def _use_tools(self, number: int) -> None:
        tool_s = self.random.expovariate(1 / self.setting.tool_s)
        heapq.heappush(self.events, (self.now + tool_s, number, True))

    def _free(self, number: int) -> None:
        blocks = self.held.pop(number)
        self.free += blocks
        self.turn[number] = (self.turn[number] + 1) % self.setting.turns
        # What an ended conversation leaves is evicted in its turn, like all else.
        self.ended -= not self.turn[number]
        self.idle[number if self.turn[number] else self.ended] = blocks
        self._use_tools(number)

    def _admit(self) -> None:
        setting = self.setting
        while self.waiting and self.reads_until <= self.now:
            number = self.waiting[0]
            prompt = setting.first - setting.head + self.turn[number] * (setting.sampled + setting.read)
            blocks = -(-(prompt + setting.sampled) // setting.block)
            if blocks > self.free:
                return
            self.waiting.popleft()
            # The last token of all has no keys and values yet, and a block is found only if it is full.
            found = min(prompt, max(0, self.idle.pop(number, 0) - 1) * setting.block)
            self.held[number] = blocks
            self.free -= blocks
            while (over := sum(self.idle.values()) - self.free) > 0:
                oldest, size = next(iter(self.idle.items()))
                self.idle[oldest] = size - over
                if over >= size:
                    del self.idle[oldest]
            self.prompts += setting.head + prompt
            self.found += setting.head + found
            self.reads_until = self.now + (prompt - found) * self.prefill_s
            heapq.heappush(self.events, (self.reads_until + setting.sampled * self.decode_s, number, False))
            heapq.heappush(self.events, (self.reads_until, -1, False))


class Measured(NamedTuple):
    """Measured is what a server did: what was seen, and its seconds per token that it read, and per token sampled."""

    seen: Seen
    prefill_s: float
    decode_s: float


async def measure(setting: Setting, url: str, requests: int) -> Measured:
    """Play so many requests against a server; the first third of them only fills its cache."""
    draw, engine = random.Random(2), VllmHttpEngine(url, SERVED_AS)
    fixed = {"max_tokens": setting.sampled, "min_tokens": setting.sampled, "ignore_eos": True, "temperature": 1.0}
    done, seconds, prompts, found, began, before = 0, 0.0, 0, 0, 0.0, {}

    def text(tokens: int) -> list[int]:
        return [draw.randrange(*WORDS) for _ in range(tokens)]

    head = text(setting.head)

    async def converse(number: int) -> None:
        nonlocal done, seconds, prompts, found, began, before
        turn = draw.randrange(setting.turns)
        prompt = head + text(setting.first - setting.head + turn * (setting.sampled + setting.read))
        while done < requests:
            await asyncio.sleep(draw.expovariate(1 / setting.tool_s))
            start = time.perf_counter()
            reply = await engine.generate(str(number), prompt, fixed)
            end = time.perf_counter()
            done += 1
            if began and done <= requests:
                seconds += end - max(start, began)
                prompts += len(prompt)
                found += reply.cached or 0
            if done == requests // 3:
                began, before = end, await totals(url)
            turn = (turn + 1) % setting.turns
            prompt = [*prompt, *reply.ids, *text(setting.read)]
            if not turn:
                prompt = head + text(setting.first - setting.head)

    async with asyncio.TaskGroup() as group:
        for number in range(setting.count):
            group.create_task(converse(number))
    span, after = time.perf_counter() - began, await totals(url)
    await engine.close()
    spent = {name: value - before[name] for name, value in after.items()}
    return Measured(
        Seen(found / prompts, seconds / span),
        spent["request_prefill_time_seconds_sum"] / max(1, prompts - found),
        spent["request_decode_time_seconds_sum"] / spent["generation_tokens_total"],
    )


async def totals(url: str) -> dict[str, float]:
    """Return the counters of a server."""
    import aiohttp

    async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if line.startswith("vllm:")]
    return {name.removeprefix("vllm:").split("{")[0]: float(value) for name, value in pairs}


def main() -> None:
    """Print a row for each pair of a cache's size and a time of tools."""
    parser = program.parser("python scripts/compare_cache.py", __doc__)
    parser.add_argument("--tools", type=float, nargs="+", default=[8.0, 2.0], help="seconds of tools (default: 8 2)")
    sizes = "of the cache, as shares of all conversations (default: 0.8)"
    parser.add_argument("--size", type=float, nargs="+", default=[0.8], help=sizes)
    options = parser.parse_args()
    plain = Setting()
    requests = 2 * plain.count * plain.turns
    print("| cache | tools, s | in the engine: vLLM | simulation | hits: vLLM | simulation | formula | linear |")
    print("|" + " --- |" * 8)
    with tempfile.TemporaryDirectory() as work:
        make_policy(Path(work) / "model", seed=1)
        for size in options.size:
            blocks = str(blocks_of(plain, size) + 1)  # one stays empty
            given = ["--num-gpu-blocks-override", blocks, "--block-size", str(plain.block)]
            given += ["--max-model-len", "8192", "--max-num-seqs", str(plain.count), "--enable-prompt-tokens-details"]
            given += ["--enforce-eager", "--dtype", "float32"]
            with vllm_server(str(Path(work) / "model"), Path(work) / "server.log", *given) as server:
                for tool_s in options.tools:
                    setting = plain._replace(tool_s=tool_s)
                    print(row(setting, size, asyncio.run(measure(setting, server.url, requests))), flush=True)


def blocks_of(setting: Setting, size: float) -> int:
    """Return the blocks of a cache with room for the common head and such a share of all conversations."""
    return int((setting.head + size * setting.count * setting.own) // setting.block)


def hits(setting: Setting, share: float) -> float:
    """Return the share of prompts' tokens that are hits if such a share of earlier turns is still there."""
    old = (1 - 1 / setting.turns) * (setting.own - setting.sampled - setting.read / 2)
    return (setting.head + share * old) / (setting.head + setting.own - setting.sampled)


def row(setting: Setting, size: float, measured: Measured) -> str:
    """Return a row of the table."""
    count, blocks = setting.count, blocks_of(setting, size)
    played = Cache(setting, blocks, measured.prefill_s, measured.decode_s).play(20 * count * setting.turns)
    formula, linear = (hits(setting, share) for share in (kept(size * count, count, measured.seen.inside), size))
    inside = f"{measured.seen.inside:.0f} | {played.inside:.0f}"
    told = " | ".join(f"{share:.2f}" for share in (measured.seen.hits, played.hits, formula, linear))
    return f"| {size:.0%} | {setting.tool_s:g} | {inside} | {told} |"


if __name__ == "__main__":
    program.end(main)
