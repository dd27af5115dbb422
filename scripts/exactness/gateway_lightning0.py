"""agentlightning 0.3's LLMProxy, which is LiteLLM: ``python gateway_lightning0.py ENGINE MODEL``, in the environment
that setup.sh made.

Middlewares and callbacks are the default ones. Its trainer's default is a row for each triplet of the adapter
(``trace_aggregator.level: transition``).
"""

from __future__ import annotations

import asyncio
import sys

from agentlightning.adapter.triplet import LlmProxyTraceToTriplet
from agentlightning.llm_proxy import LLMProxy
from agentlightning.store.memory import InMemoryLightningStore
from talk import answer, row

from rl.run.programs import free_port
from rollout import POLICY_MODEL


async def main(engine: str, model: str) -> None:
    """Serve rollouts, each of which is a path."""
    params = {"model": f"hosted_vllm/{POLICY_MODEL}", "api_base": f"{engine}/v1", "api_key": "x"}
    models = [{"model_name": POLICY_MODEL, "litellm_params": params}]
    store, rollouts, port = InMemoryLightningStore(thread_safe=True), [], free_port()
    await LLMProxy(host="127.0.0.1", port=port, model_list=models, store=store, launch_mode="thread").start()

    async def opened() -> list[str]:
        rollouts.append(one := await store.start_rollout(input={}))
        return [f"http://127.0.0.1:{port}/rollout/{one.rollout_id}/attempt/{one.attempt.attempt_id}", "x"]

    async def rows() -> list:
        await asyncio.sleep(3)  # spans are exported in the background
        triplets = LlmProxyTraceToTriplet().adapt(await store.query_spans(rollouts[-1].rollout_id))
        calls = [(one.prompt["token_ids"], one.response["token_ids"]) for one in triplets]
        return [row([*asked, *said], [0] * len(asked) + [1] * len(said)) for asked, said in calls]

    await answer(opened, rows)


asyncio.run(main(*sys.argv[1:]))
