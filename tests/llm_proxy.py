"""Run agentlightning's LLMProxy in front of a chat-completions server: ``python -m tests.llm_proxy PORT``.

PORT is the server's, on this machine. Printed are the proxy's own port and the path below which it serves /v1/messages.
Middlewares and callbacks are the default ones, and the store is in memory."""

from __future__ import annotations

import asyncio
import os
import sys

from rl.run.programs import free_port


async def lightning(backend: int) -> None:
    """Run it in this process, in front of ``backend``."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    os.environ["LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY"] = "true"  # on loopback only
    from agentlightning.llm_proxy import LLMProxy
    from agentlightning.store.memory import InMemoryLightningStore

    params = {"model": "hosted_vllm/policy", "api_base": f"http://127.0.0.1:{backend}/v1", "api_key": "x"}
    store = InMemoryLightningStore(thread_safe=True)
    rollout = await store.start_rollout(input={})  # the path of a request says to which rollout it belongs
    proxy = LLMProxy(
        host="127.0.0.1",
        port=(port := free_port()),
        model_list=[{"model_name": "policy", "litellm_params": params}],
        store=store,
        launch_mode="thread",
    )
    await proxy.start()
    print(port, f"/rollout/{rollout.rollout_id}/attempt/{rollout.attempt.attempt_id}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(lightning(int(sys.argv[1])))
