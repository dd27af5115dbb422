"""rl.plan's engine: what stays in its cache while tools run, and how many episodes it serves at a time."""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict, deque
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.plan import plan
from rl.plan.engine import kept
from tests.unit.plan.test_plan import config


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


def blocks_of(setting: Setting, size: float) -> int:
    """Return the blocks of a cache with room for the common head and such a share of all conversations."""
    return int((setting.head + size * setting.count * setting.own) // setting.block)


def hits(setting: Setting, share: float) -> float:
    """Return the share of prompts' tokens that are hits if such a share of earlier turns is still there."""
    old = (1 - 1 / setting.turns) * (setting.own - setting.sampled - setting.read / 2)
    return (setting.head + share * old) / (setting.head + setting.own - setting.sampled)


@pytest.mark.parametrize("tool_s", [2.0, 8.0, 20.0])
@pytest.mark.parametrize("size", [1.2, 0.9, 0.7, 0.5, 0.3])
def test_the_formula_is_near_a_simulation_of_vllms_cache(tool_s: float, size: float) -> None:
    """A cache keeps, for conversations whose tools run, what requests in the engine do not take of it."""
    setting = Setting(tool_s=tool_s)
    seen = Cache(setting, blocks_of(setting, size), 1 / 8000, 0.03).play(4 * 32 * 16)
    assert hits(setting, kept(32 * size, 32, seen.inside)) == pytest.approx(seen.hits, abs=0.15)
    if tool_s > 2:  # else nearly all are in the engine, and a little decides
        assert hits(setting, kept(32 * size, 32, seen.inside)) == pytest.approx(seen.hits, abs=0.07)


def test_a_simulated_cache_that_holds_all_reads_only_what_is_new() -> None:
    setting = Setting(count=4)
    seen = Cache(setting, 4 * blocks_of(setting, 2.0), 1 / 8000, 0.03).play(4 * 16 * 4)
    assert seen.hits == pytest.approx(hits(setting, 1.0), abs=0.02) and 0 < seen.inside < 4


@given(st.floats(0, 200), st.floats(1, 100), st.floats(0, 1), st.floats(0, 50))
def test_more_room_keeps_more_and_more_requests_keep_less(held: float, asked: float, busy: float, more: float) -> None:
    inside = busy * asked
    share = kept(held, asked, inside)
    assert 0 <= share <= 1 and kept(held + more, asked, inside) >= share
    assert kept(asked + more, asked, inside) == 1
    assert kept(held, asked, min(asked, inside + more)) <= share or held >= asked
    assert kept(inside / 2, asked, inside) == 0 or not inside


def test_a_cache_that_is_a_little_too_small_keeps_nearly_nothing_where_tools_are_quick() -> None:
    """Of 100 turns with tools of 2 s nine tenths are read again, though four contexts of five fit."""
    made = plan(config("qwen3_coder_30b_lora", "plan.turns=100", "plan.tool_s=2", "sandbox.concurrency=11"))
    load = made.pace.load
    assert load.held / load.asked == pytest.approx(0.83, abs=0.01) and load.stays < 0.1
    assert load.running <= load.held and load.running + load.waiting <= load.asked
    assert any(line.startswith("KV cache of each 4 GPUs holds 37 contexts; of 44 ep") for line in made.warnings)


def test_the_first_prompt_is_in_the_cache_once() -> None:
    longer = plan(config("qwen3_coder_30b", "plan.first_prompt=20000", "plan.turns=31")).pace.load
    assert longer.held == pytest.approx(plan(config("qwen3_coder_30b", "plan.turns=31")).pace.load.held, rel=0.4)
