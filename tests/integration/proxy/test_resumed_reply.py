"""This module tests a reply that a weight update interrupts, with vLLM itself: verl's server and client and our engine,
without Ray.
"""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from rl.quickstart.policy import make_policy
from tests.integration.vllm_kit import ONE_PROCESS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PROMPT = list(range(100, 140))
TOKENS = 1500  # a second of work at least


class Balancer:
    """Has one server."""

    def __init__(self, server: Any) -> None:
        async def generate(**arguments: Any) -> Any:
            return await server.generate(**copy.deepcopy(arguments))  # the server changes them; Ray sends copies

        self.acquire_server = _remote(lambda request_id: ("s", handle))
        self.release_server = _remote(lambda server_id: None)
        self.require_acquire_fields = self.require_release_fields = _remote(list)
        handle = SimpleNamespace(generate=SimpleNamespace(remote=lambda **a: asyncio.ensure_future(generate(**a))))


def _remote(function: Any) -> Any:
    """A method as Ray's: ``method.remote(...)`` can be awaited, or not."""

    def remote(*given: Any, **named: Any) -> asyncio.Future[Any]:
        done = asyncio.get_running_loop().create_future()
        done.set_result(function(*given, **named))
        return done

    return SimpleNamespace(remote=remote)


def make_server(engine: Any, config: Any) -> Any:
    """verl's server of an engine that runs already."""
    from rl.cpu.vllm_replica import CPUHttpServer

    server = CPUHttpServer.__new__(CPUHttpServer)
    server._disaggregation_role, server._pd_decode_peers = "null", []
    server.config, server.model_config = config, SimpleNamespace(processor=None, lora_rank=0, lora={})
    server.engine, server.node_rank, server.replica_rank, server.global_steps = engine, 0, 0, 3
    server._submission_paused = server._rejecting = False
    server._admitting, server._resume_event = 0, asyncio.Event()
    server._resume_event.set()
    return server


async def test_a_reply_goes_on_after_an_update_with_the_same_tokens_and_the_versions_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine neither loses nor samples again what it sampled before the update: the log-probability of each token
    is that after all tokens before it."""
    for name, value in {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from rl.train.engine import VerlEngine

    make_policy(tmp_path, seed=1)
    given = {"model": str(tmp_path), "dtype": "float32", "max_model_len": 8192, "enforce_eager": True}
    given |= {"distributed_executor_backend": ONE_PROCESS[1], "logprobs_mode": "processed_logprobs"}
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**given))
    try:
        rollout = {"max_model_len": 8192, "response_length": TOKENS, "prompt_length": 4096, "name": "vllm"}
        rollout |= {"full_determinism": False, "enable_rollout_routing_replay": False, "mtp": None, "ignore_eos": True}
        server = make_server(engine, OmegaConf.create(rollout))
        config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})
        asked = VerlEngine(FullyAsyncLLMServerClient(config, Balancer(server)))
        sampling = {"max_tokens": TOKENS, "temperature": 1.0, "logprobs": True}
        reply = asyncio.create_task(asked.generate("e", PROMPT, sampling))
        running = engine.output_processor.request_states
        while not any(one.detokenizer.num_output_tokens() >= 20 for one in running.values()):
            await asyncio.sleep(0.01)
        aborted = await server.abort_all_requests()
        await server.set_global_steps(4)
        assert aborted["aborted_count"] == 1 and not reply.done()
        await server.resume_generation()
        done = await reply

        old = done.versions.count(3)
        assert 0 < old < TOKENS and done.versions == (3,) * old + (4,) * (TOKENS - old)
        assert len(done.ids) == len(done.logprobs) == TOKENS
        whole = SamplingParams(max_tokens=1, prompt_logprobs=0)
        async for out in engine.generate({"prompt_token_ids": PROMPT + done.ids}, whole, "again"):
            found = out
        told = [
            place[token].logprob for place, token in zip(found.prompt_logprobs[len(PROMPT) :], done.ids, strict=True)
        ]
        assert done.logprobs == pytest.approx(told, abs=1e-3)
    finally:
        engine.shutdown()
