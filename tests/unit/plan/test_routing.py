"""Which of an engine's ranks gets a call: why ``data_parallel_size`` above 1 is noted at the start of a run."""

from __future__ import annotations

import inspect
from collections import Counter
from types import SimpleNamespace
from typing import Any

from omegaconf import OmegaConf

from rl.checks.numbers import engine_notes


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
