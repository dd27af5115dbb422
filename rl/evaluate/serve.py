"""Where the policy answers: a checkpoint's weights in one piece, a vLLM server of our own, or an endpoint that is asked
whether it is what the config says."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from rl.config import CPU_ENVIRONMENT, ConfigError
from rl.run.programs import end_of_log
from rl.run.vllm_server import ServeError, VllmServer
from rollout.proxy.engine import EngineError
from rollout.proxy.forward import SideEndpoint
from rollout.proxy.vllm_http import VllmHttpEngine

_ASK_S = 60.0


@dataclass(frozen=True)
class Served:
    """What a vLLM server says of its model: its name there, where it is from, its longest context in tokens."""

    name: str
    root: str
    max_context: int


def merge(sharded: Path, target: Path, log: Path) -> None:
    """Write the weights of an FSDP checkpoint to ``target`` as a Hugging Face model, by verl's merger, unless they are
    there. Weights come out as bfloat16; an adapter (LoRA) is added to what it adapts. Raises ServeError."""
    with open(target.with_name(".merge.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (target / "config.json").is_file():
            return
        making = target.with_name(f".{target.name}")
        shutil.rmtree(making, ignore_errors=True)
        command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
        command += ["--local_dir", str(sharded), "--target_dir", str(making)]
        try:
            with open(log, "ab") as out:
                done = subprocess.run(command, env={**os.environ, **CPU_ENVIRONMENT}, stdout=out, stderr=out)
            if done.returncode:
                raise ServeError(f"{sharded} cannot be merged: {end_of_log(log)}; the whole log: {log}")
            _add_adapter(making)
            making.rename(target)
        finally:
            shutil.rmtree(making, ignore_errors=True)


def _add_adapter(model: Path) -> None:
    """verl's merger leaves an adapter beside the weights that it adapts: served so, nothing of it would be there."""
    adapter = model / "lora_adapter"
    if not adapter.is_dir():
        return
    if not json.loads((adapter / "adapter_config.json").read_text())["lora_alpha"]:
        raise ServeError(f"{model.parent} has no lora_train_meta.json: the scale of its adapter is not known")
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    adapted: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model, dtype="auto"), adapter)
    adapted.merge_and_unload().save_pretrained(model)
    shutil.rmtree(adapter)


def start_server(model: str, max_context: int | None, serve: Any, log: Path) -> VllmServer:
    """Start a vLLM server of ``model`` as the config's group ``serve`` says."""
    arguments = ["--dtype", serve.dtype, "--tensor-parallel-size", str(serve.tensor_parallel_size)]
    arguments += ["--logprobs-mode", "processed_logprobs"]
    if serve.enforce_eager:
        arguments.append("--enforce-eager")
    if max_context is not None:
        arguments += ["--max-model-len", str(max_context)]
    return VllmServer(model, log, *arguments, *serve.args)


async def ask_server(url: str, model: str | None, key: str | None) -> Served:
    """What the vLLM server at ``url`` serves as ``model``, or the only one it has, after one token from it. Raises
    ConfigError."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    models = await _get(f"{url.rstrip('/')}/v1/models", headers)
    try:
        # An adapter that a server has beside its model does not tell a length of its own.
        longest = max((one["max_model_len"] or 0 for one in models["data"]), default=0)
        found = {one["id"]: Served(one["id"], one["root"], one["max_model_len"] or longest) for one in models["data"]}
    except (KeyError, TypeError):
        raise ConfigError(f"endpoint: {url} is no vLLM server; protocol=messages is for other endpoints") from None
    if model is None and len(found) != 1:
        raise ConfigError(f"model: {url} serves {_list(found)}; set model=NAME")
    if model is not None and model not in found:
        raise ConfigError(f"model: {url} has no {model!r}; it serves {_list(found)}")
    served = found[model] if model is not None else next(iter(found.values()))
    engine = VllmHttpEngine(url, served.name, key)
    try:
        async with asyncio.timeout(_ASK_S):
            await engine.generate("check", [0], {"max_tokens": 1})
    except (EngineError, TimeoutError) as error:
        raise ConfigError(f"endpoint: {error or f'{url} gives no reply in {_ASK_S:g} s'}") from None
    finally:
        await engine.close()
    return served


async def ask_endpoint(endpoint: SideEndpoint) -> None:
    """One token from an endpoint of Anthropic's Messages API: address, key and model are right. Raises ConfigError."""
    body = {"model": endpoint.model, "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
    headers = {"anthropic-version": "2023-06-01"} | ({"x-api-key": endpoint.key} if endpoint.key else {})
    url = f"{endpoint.url.rstrip('/')}/v1/messages"
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ASK_S)) as http,
            http.post(url, json=body, headers=headers) as reply,
        ):
            said = " ".join((await reply.text(errors="replace")).split())[:300]
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ConfigError(f"endpoint: {url} does not answer: {error or type(error).__name__}") from None
    if reply.status in (401, 403):
        where = "key_env names a key that it does not take" if endpoint.key else "it wants a key; set key_env=VARIABLE"
        raise ConfigError(f"endpoint: {url}: status {reply.status}; {where}: {said}")
    if reply.status != 200:
        raise ConfigError(f"endpoint: {url} does not answer as {endpoint.model!r}: status {reply.status}: {said}")


async def _get(url: str, headers: dict[str, str]) -> Any:
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ASK_S)) as http,
            http.get(url, headers=headers) as reply,
        ):
            if reply.status in (401, 403):
                raise ConfigError(f"endpoint: {url}: status {reply.status}; set key_env to the server's --api-key")
            return json.loads(await reply.text()) if reply.status == 200 else None
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ConfigError(f"endpoint: {url} does not answer: {error or type(error).__name__}") from None
    except ValueError:
        return None


def _list(names: Sequence[str] | dict[str, Any]) -> str:
    return ", ".join(repr(name) for name in names) or "nothing"
