"""The simulated replicas of an engine: what they keep, and what the ways to choose one have in common."""

from __future__ import annotations

import inspect
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from rl.checks.numbers import engine_notes
from rl.plan.routing import WAYS, Replica, RoutingSetting, SimulatedCall, SimulatedEpisode, drawn, play, recorded
from rollout.records import NodeRecord, RecordWriter, pack_ids
from tests.kit import empty_record

SMALL = RoutingSetting(replicas=2, room=40, boxes=4, block=4, read=100)
SIZES = st.builds(
    RoutingSetting,
    replicas=st.integers(1, 3),
    room=st.integers(40, 4_000),
    boxes=st.integers(1, 6),
    block=st.sampled_from([1, 4, 16]),
)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(WAYS)), SIZES, st.integers(0, 3))
def test_what_holds_for_every_way(way: str, setting: RoutingSetting, seed: int) -> None:
    """Every call is answered, nothing is cached twice, and one replica is chosen alike in all ways."""
    episodes = drawn(2, 3, setting, calls=4, head=30, task=9, read=7, sampled=5, seed=seed)
    found = play(episodes, way, setting, seed)
    assert 0 <= found.cached <= 1 and found.again >= -1e-9 and found.cached + found.again <= 1
    assert 1 - 1e-9 <= found.busiest <= setting.replicas + 1e-9
    slowest = max(sum(call.after + call.sampled * setting.step_ms / 1e3 for call in one.calls) for one in episodes)
    assert found.seconds >= slowest
    if setting.replicas == 1:
        assert found == play(episodes, "at random", setting, seed)


def test_with_room_for_everything_only_what_another_replica_has_read_is_read_again() -> None:
    setting = RoutingSetting(replicas=2, room=10**9, boxes=8, block=16)
    episodes = drawn(2, 4, setting, calls=6, head=320, task=80)
    prompts = sum(call.prompt for one in episodes for call in one.calls)
    heads = (320 + 2 * 80) / prompts  # the second replica reads them once more, at most
    for way in ("the episode's, at first fewest calls (verl)", "the episode's, at first its group's"):
        assert play(episodes, way, setting).again <= heads
    assert play(episodes, "at random", setting).again > 2 * heads


def call(names: str, asked: int, sampled: int = 1) -> SimulatedCall:
    return SimulatedCall(0.0, list(names), asked, 4 * asked, sampled)


def answer(replica: Replica, one: SimulatedCall) -> int:
    """Send a call and wait for its reply; return how many blocks of the prompt were cached."""
    before = replica.hits
    replica.send(SimulatedEpisode("g", [one]), one)
    while not list(replica.advance(replica.due())):
        pass
    return (replica.hits - before) // 4


def test_what_was_used_least_recently_is_dropped_and_the_end_of_a_conversation_first() -> None:
    replica = Replica(SMALL)  # ten blocks
    assert answer(replica, call("abcdef", 5)) == 0
    assert answer(replica, call("abcdefg", 7)) == 6
    assert answer(replica, call("vwxyz", 5)) == 0  # two of them take the place of f and g
    assert answer(replica, call("abcdefg", 7)) == 5
    assert answer(replica, call("vwxyz", 5)) == 3


def test_a_call_waits_for_room_and_what_is_held_is_not_dropped() -> None:
    replica = Replica(SMALL)
    first, second = SimulatedEpisode("g", []), SimulatedEpisode("g", [])
    replica.send(first, call("abcdef", 6, sampled=50))
    replica.send(second, call("vwxyz", 5))
    assert list(replica.waiting) == [second] and replica.running == 2
    done = []
    while len(done) < 2:
        done += replica.advance(replica.due())
    assert done == [first, second] and replica.due() == float("inf")


def test_recorded_calls_share_the_names_of_what_they_share(tmp_path: Path) -> None:
    """A call of a sub-agent has the first call's head only, and the gap is what lies between reply and next call."""

    def node(parent: int, ids: list[int], started: float = 0.0) -> NodeRecord:
        logprobs = b"\0" * 4 * len(ids) if started else None
        return NodeRecord(parent, pack_ids(ids), logprobs, started=started, seconds=2.0)

    nodes = [node(-1, [1, 2, 3, 4, 5]), node(0, [6, 7, 8], 11.0), node(1, [9, 9, 9, 9]), node(2, [1], 16.5)]
    nodes += [node(-1, [1, 2, 3, 4, 6]), node(4, [2], 14.0)]
    record = empty_record(nodes=nodes)
    record.started, record.task = 10.0, "t"
    writer = RecordWriter(tmp_path / "episodes", "x")
    writer.append(record)
    writer.close()
    (one,) = recorded(tmp_path, SMALL)
    first, agent, second = one.calls
    assert one.group == "t" and [c.after for c in one.calls] == pytest.approx([1.0, 1.0, 0.5])
    assert [(c.prompt, c.asked, c.sampled) for c in one.calls] == [(5, 1, 3), (5, 1, 1), (12, 3, 1)]
    assert first.blocks[:1] == agent.blocks and second.blocks[:2] == first.blocks


def test_vllms_ranks_still_get_calls_by_their_number_whoever_has_read_the_prompt() -> None:
    """Why data_parallel_size is noted at the start. If this fails, vLLM may keep conversations together."""
    from vllm.v1.engine.core_client import DPLBAsyncMPClient

    client: Any = DPLBAsyncMPClient.__new__(DPLBAsyncMPClient)
    client.client_count, client.eng_start_index, client.engine_inflight = 1, 0, Counter()
    old = "kv_cache_usage" not in inspect.getsource(DPLBAsyncMPClient.get_core_engine_for_request)  # vLLM 0.24
    client.lb_engines = [[0, 0] if old else [0, 0, 0.0] for _ in range(2)]
    client.core_engines, client.reqs_in_flight = [b"0", b"1"], {}
    asked = [SimpleNamespace(data_parallel_rank=None, pooling_params=None, request_id=str(i)) for i in range(4)]
    assert {client.get_core_engine_for_request(one) for one in asked} == {b"0", b"1"}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"data_parallel_size": 8}}})
    assert "data_parallel_size=8" in engine_notes(config)[0]
    config.actor_rollout_ref.rollout.data_parallel_size = 1
    assert engine_notes(config) == []
