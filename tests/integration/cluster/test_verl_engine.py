"""This module tests verl's own clients and balancer over Ray behind VerlEngine; of the server only vLLM itself is left
out.
"""

from __future__ import annotations

import asyncio
import functools
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from rl.run.fork_server import ForkServer
from rollout.proxy.engine import EngineError

pytestmark = pytest.mark.timeout(300)

SAMPLING = {"max_tokens": 10, "temperature": 1.0, "logprobs": True}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Ray, whose workers are forked as those of a run on a CPU are: each would import verl."""
    import ray

    with tempfile.TemporaryDirectory(prefix="fork-") as directory:
        forks = ForkServer(directory)
        forks.wait()
        ray.init(
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"py_executable": forks.executable},
        )
        yield
        ray.shutdown()
        forks.close()


def make_server(plan: list[Any]) -> Any:
    """An actor that answers generate() with the parts of ``plan`` in turn: (ids, stop_reason, step); None hangs."""
    import ray

    class Server:
        def __init__(self) -> None:
            self.plan, self.seen, self.cancelled = list(plan), [], 0

        async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any) -> Any:
            import asyncio

            from verl.workers.rollout.replica import TokenOutput

            self.seen.append((prompt_ids, sampling_params))
            part = self.plan.pop(0)
            if isinstance(part, str):
                raise RuntimeError(part)
            if part is None:
                try:
                    await asyncio.sleep(600)
                except asyncio.CancelledError:
                    self.cancelled += 1
                    raise
            ids, stop, step = part
            logprobs = [-i / 4 for i in ids]
            extra = {"global_steps": step, "num_cached_tokens": len(prompt_ids) - 1}
            routing = None
            if (start := sampling_params.get("routed_experts_prompt_start")) is not None:
                routing = np.array([*prompt_ids, *ids][start:-1])[:, None, None]  # as vLLM
            return TokenOutput(
                token_ids=ids, log_probs=logprobs, stop_reason=stop, routed_experts=routing, extra_fields=extra
            )

        async def state(self) -> tuple[list[Any], int]:
            return self.seen, self.cancelled

    return ray.remote(num_cpus=0)(Server).remote()


def make_engine(server: Any, kind: str = "LLMServerClient") -> Any:
    from verl.workers.rollout import llm_server
    from verl.workers.rollout.router import get_router_handle

    from rl.train.engine import VerlEngine

    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "vllm", "response_length": 64}}})
    balancer = get_router_handle(servers={"s": server})
    return VerlEngine(getattr(llm_server, kind)(config, balancer))


async def test_ids_logprobs_and_versions(cluster: None) -> None:
    engine = make_engine(server := make_server([([7, 8], "completed", 3), ([9], "completed", None)]))
    done = await engine.generate("e", [1, 2], SAMPLING)
    assert (done.ids, done.logprobs, done.versions, done.cached) == ([7, 8], [-1.75, -2.0], (3, 3), 1)
    assert (await engine.generate("e", [1, 2], SAMPLING)).versions == ()  # before the first step it is not known
    assert (await server.state.remote())[0] == [([1, 2], SAMPLING)] * 2


async def test_an_update_in_the_middle_is_one_reply_and_every_token_knows_its_weights(cluster: None) -> None:
    plan = [([7, 8], "aborted", 3), ([], "aborted", 3), ([9, 5, 6], "completed", 4)]
    engine = make_engine(server := make_server(plan), "FullyAsyncLLMServerClient")
    done = await engine.generate("e", [1, 2], SAMPLING)
    # The second attempt finds what the first one computed: that is no hit.
    assert (done.ids, done.versions, done.cached) == ([7, 8, 9, 5, 6], (3, 3, 4, 4, 4), 1)
    prompts = [prompt for prompt, _ in (await server.state.remote())[0]]
    assert prompts == [[1, 2], [1, 2, 7, 8], [1, 2, 7, 8]]


async def test_routing_begins_where_it_was_asked_for_after_an_update_too(cluster: None) -> None:
    plan = [([7, 8], "aborted", 3), ([9, 5], "completed", 4), ([6], "completed", 4)]
    engine = make_engine(make_server(plan), "FullyAsyncLLMServerClient")
    done = await engine.generate("e", [1, 2, 3], {**SAMPLING, "routed_experts_prompt_start": 2})
    assert done.experts[:, 0, 0].tolist() == [3, 7, 8, 9]
    engine.client.generate = functools.partial(_first_token_lost, engine.client.generate)
    with pytest.raises(EngineError, match="routing of 1 tokens where 2 were asked for"):
        await engine.generate("e", [1, 2, 3], {**SAMPLING, "routed_experts_prompt_start": 1})


async def _first_token_lost(generate: Any, **arguments: Any) -> Any:
    out = await generate(**arguments)
    out.routed_experts = out.routed_experts[1:]
    return out


async def test_a_reply_that_was_ended_for_good_and_a_failing_server_are_engine_errors(cluster: None) -> None:
    engine = make_engine(make_server([([7], "aborted", 3), "out of\nmemory"]))
    with pytest.raises(EngineError, match="ended the reply after 1 tokens"):
        await engine.generate("e", [1], SAMPLING)
    with pytest.raises(EngineError, match=r"^RayTaskError.*: memory$"):
        await engine.generate("e", [1], SAMPLING)


@pytest.mark.parametrize("kind", ["LLMServerClient", "FullyAsyncLLMServerClient"])
async def test_cancelling_ends_the_generation_on_the_server_and_no_other(cluster: None, kind: str) -> None:
    engine = make_engine(server := make_server([None, None, ([7], "completed", 3)]), kind)
    first, second = (asyncio.create_task(engine.generate("e", [n], SAMPLING)) for n in (1, 2))
    async with asyncio.timeout(120):
        while len((await server.state.remote())[0]) < 2:
            await asyncio.sleep(0.05)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    async with asyncio.timeout(120):
        while (await server.state.remote())[1] != 1:
            await asyncio.sleep(0.05)
    assert not second.done()
    assert (await engine.generate("e", [3], SAMPLING)).ids == [7]
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)


async def test_verls_client_alone_neither_cancels_nor_tells_versions(cluster: None) -> None:
    """Why servers are watched (`_watched`). If this fails, verl does it itself: use that instead."""
    plan = [None, ([7, 8], "aborted", 3), ([9], "completed", 4)]
    client = make_engine(server := make_server(plan), "FullyAsyncLLMServerClient").client
    client._acquire_server = type(client)._acquire_server.__get__(client)  # as verl made it
    asking = asyncio.create_task(client.generate("e", prompt_ids=[1], sampling_params=SAMPLING))
    async with asyncio.timeout(120):
        while not (await server.state.remote())[0]:
            await asyncio.sleep(0.05)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    out = await client.generate("e", prompt_ids=[1], sampling_params=SAMPLING)
    assert (await server.state.remote())[1] == 0  # what was cancelled still runs there
    assert sorted(out.extra_fields) == ["global_steps", "max_global_steps", "min_global_steps", "num_cached_tokens"]
