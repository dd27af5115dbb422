"""agentlightning 1.0's server: ``python gateway_lightning1.py ENGINE MODEL``.

The server runs in the environment that setup.sh made. The rows are those of its own functions for verl, with its
default ``trace_aggregator.level``; they need torch and verl, which this process has.
"""

from __future__ import annotations

import asyncio
import importlib
import subprocess
import sys

import torch
from talk import answer, row

from rl.run.programs import free_port, tied
from rl.run.vllm_server import answers
from rollout import POLICY_MODEL
from rollout.sandbox.docker.engine import cache_dir

PLACE, LONGEST = cache_dir("exactness"), 65_536


async def main(engine: str, model: str) -> None:
    """Serve rollouts, each of which is a path."""
    sys.path.insert(0, str(PLACE / "functions"))  # in place of the version that this project has
    manager = importlib.import_module("agentlightning.verl.agl_rollout_manager")
    adapter = importlib.import_module("agentlightning.verl.rollout_adapter")
    url = f"http://127.0.0.1:{(port := free_port())}"
    told = ["host=127.0.0.1", f"port={port}", "key=x", f"default_proxy.model_name={POLICY_MODEL}"]
    no_files = ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none"]
    command = tied(str(PLACE / "lightning1/bin/python"), "-m", "agentlightning.server", *told, *no_files)
    server = subprocess.Popen(command, stdout=sys.stderr)
    calls = manager.AglRolloutManager(agl_base_url=url, agl_key="x", model=POLICY_MODEL, step=0)
    while not answers(f"{url}/healthz"):
        if server.poll() is not None:
            raise RuntimeError("the server has ended")
        await asyncio.sleep(0.1)
    calls.register_model([f"{engine}/v1"])
    lengths = {"max_prompt_length": LONGEST, "max_response_length": LONGEST, "pad_token_id": 0}
    made = adapter.RolloutAdapter(**lengths, device=torch.device("cpu"), trace_aggregator_level="trajectory")
    rollouts: list[str] = []

    async def opened() -> list[str]:
        rollouts.append(calls.client.post("/api/rollouts", json=[{"input": {}}]).json()[0]["rollout_id"])
        return [f"{url}/proxy/rollout/{rollouts[-1]}/attempt/0/mode/train/openai", "x"]

    async def rows() -> list:
        where = {"data_id": "", "rollout_id": rollouts[-1], "step": 0, "sample_idx_in_step": 0, "enqueue_time": 0.0}
        asked = manager.EnqueuedRollout(**where)
        done = calls._build_completed_rollout(asked, calls._get_rollout(rollouts[-1]))
        batch = made.get_train_data_batch([done])[0].batch
        columns = ("input_ids", "attention_mask", "response_mask", "rollout_log_probs")
        found = []
        for ids, there, mask, known in zip(*(batch[name] for name in columns), strict=True):
            whole = (ids, torch.cat([torch.zeros_like(mask), mask]), torch.cat([torch.zeros_like(known), known]))
            found.append(row(*(one[there.bool()].tolist() for one in whole)))
        return found

    await answer(opened, rows)


asyncio.run(main(*sys.argv[1:]))
