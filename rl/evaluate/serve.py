"""The policy to be evaluated: start a vLLM server, or ask an endpoint whether it is what the config says."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rl.config.compose import ConfigError
from rl.episodes.asking import ASK_S, ask
from rl.run.forks import Forks
from rl.run.vllm_server import VllmServer
from rollout.proxy.engine import EngineError
from rollout.proxy.vllm_http import VllmHttpEngine


@dataclass(frozen=True)
class ServedModel:
    """A served model is what a vLLM server reports: the model's name, its directory or hub name (``root``), its
    longest context in tokens, and whether its logprobs are those of what it samples from (``processed``)."""

    name: str
    root: str
    max_context: int
    processed: bool | None = None


def start_server(model: str, max_context: int | None, serve: Any, log: Path, forks: Forks | None = None) -> VllmServer:
    """Start a vLLM server of ``model`` as the config's group ``serve`` says. forks: see ``VllmServer``."""
    arguments = ["--dtype", serve.dtype, "--tensor-parallel-size", str(serve.tensor_parallel_size)]
    arguments += ["--logprobs-mode", "processed_logprobs"]
    if serve.enforce_eager:
        arguments.append("--enforce-eager")
    if max_context is not None:
        arguments += ["--max-model-len", str(max_context)]
    return VllmServer(model, log, *arguments, *serve.args, forks=forks)


async def ask_server(url: str, model: str | None, key: str | None) -> ServedModel:
    """Return what the vLLM server at ``url`` reports of ``model``, after sampling a few tokens from it.

    model: None for the only model that the server has. key: the server's API key. Raises ConfigError.
    """
    status, text = await ask(f"{url.rstrip('/')}/v1/models", {"Authorization": f"Bearer {key}"} if key else {})
    if status in (401, 403):
        raise ConfigError(f"endpoint: {url}: status {status}; set key_env to the server's --api-key")
    try:
        models = json.loads(text)["data"]
        # A LoRA adapter that a server has beside its model reports no length of its own.
        longest = max((one["max_model_len"] or 0 for one in models), default=0)
        found = {one["id"]: ServedModel(one["id"], one["root"], one["max_model_len"] or longest) for one in models}
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"endpoint: {url} is no vLLM server; use protocol=messages for other endpoints") from None
    names = ", ".join(map(repr, found)) or "nothing"
    if model is None and len(found) != 1:
        raise ConfigError(f"model: {url} serves {names}; set model=NAME")
    if model is not None and model not in found:
        raise ConfigError(f"model: {url} has no {model!r}; it serves {names}")
    served = found[model] if model is not None else next(iter(found.values()))
    engine = VllmHttpEngine(url, served.name, key)
    try:
        async with asyncio.timeout(ASK_S):
            return replace(served, processed=await engine.processed([0]))
    except TimeoutError:
        raise ConfigError(f"endpoint: {url} gives no reply in {ASK_S:g} s") from None
    except EngineError as error:
        raise ConfigError(f"endpoint: {error}") from None
    finally:
        await engine.close()
