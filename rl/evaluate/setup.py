"""The set-up of an evaluation's episodes, whose policy is behind a vLLM server or another endpoint, or is a script."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import cast

from omegaconf import DictConfig

from rl.config.compose import ConfigError
from rl.episodes.asking import ask_endpoint
from rl.episodes.setup import ENDPOINTS, load_policy, make_setup, roles_from, side_endpoint_from
from rl.evaluate.config import endpoint_key, settings_of
from rl.evaluate.serve import ServedModel, ask_server
from rl.run.vllm_server import SERVED_AS, VllmServer
from rl.run.weights import Weights
from rollout.episode import Setup
from rollout.proxy.engine import Engine
from rollout.proxy.forward import SideEndpoint
from rollout.proxy.passthrough import PassThrough
from rollout.proxy.render import generation_config
from rollout.proxy.roles import endpoints
from rollout.proxy.server import ProxyServer
from rollout.proxy.session import Policy

# The context of a hosted model, which is not reported: what Claude Code assumes for a model that it does not know.
_HOSTED_CONTEXT = 200_000
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


async def ask(config: DictConfig) -> ServedModel | None:
    """Check that the endpoint answers and has the model, and return what it serves; None if a policy is evaluated.

    Sets ``config.model`` if it was null. Raises ConfigError.
    """
    if config.policy:
        return None
    if config.protocol in ENDPOINTS:
        await ask_endpoint(_endpoint(config))
        return ServedModel(config.model, "", _HOSTED_CONTEXT)
    served = await ask_server(config.endpoint, config.model, endpoint_key(config))
    config.model = served.name
    return served


def model_of(config: DictConfig, weights: Weights | None, served: ServedModel | None) -> str:
    """Return the directory or hub name of the policy's tokenizer; without ``protocol=tokens``, the model's name."""
    if config.protocol in ENDPOINTS:
        return config.model
    if config.tokenizer or weights is None:
        return str(config.tokenizer or (served.root if served else ""))
    return str(weights.sharded / "huggingface") if weights.sharded else weights.model


def _endpoint(config: DictConfig) -> SideEndpoint:
    return ENDPOINTS[config.protocol](config.endpoint, config.model, endpoint_key(config))


def forwarding_setup(config: DictConfig, name: str) -> Setup:
    """Return the set-up in which all calls of the agent go on to the endpoint. name: marks the boxes."""
    settings = settings_of(config, config.max_context or _HOSTED_CONTEXT, name)
    proxy = PassThrough(_endpoint(config), side_endpoint_from(config), config.proxy.max_calls, settings.max_tokens)
    proxy.policy = replace(proxy.policy, roles=roles_from(config))
    return make_setup(settings, proxy.policy, proxy)


def scripted_setup(config: DictConfig, model: str, name: str) -> Setup:
    """Return the set-up in which a script says what a policy could; each episode has an engine of its own.

    model: where the tokenizer is. name: marks the boxes. Raises ConfigError.
    """
    policy = _load(config, model, cast(Engine, None), name)
    return make_setup(settings_of(config, policy.max_context, name), policy, ProxyServer())


async def token_setup(
    config: DictConfig,
    model: str,
    served: ServedModel | None,
    server: VllmServer | None,
    name: str,
    stack: contextlib.AsyncExitStack,
) -> Setup:
    """Return the set-up in which the proxy asks a vLLM server by token ids.

    model: where the tokenizer is. served: what the endpoint serves, or None for a ``server`` of our own; while that
    starts, slow imports are done. name: marks the boxes. stack: closes connections. Raises ConfigError and ServeError.
    """
    from rollout.proxy.vllm_http import VllmHttpEngine

    url, served_as = (server.url, SERVED_AS) if server else (str(config.endpoint), str(config.model))
    engine = VllmHttpEngine(url, served_as, endpoint_key(config) if server is None else None)
    stack.push_async_callback(engine.close)
    policy = await asyncio.to_thread(_load, config, model, engine, name)
    for endpoint in endpoints(policy.roles, policy.side_endpoint):
        stack.push_async_callback(endpoint.close)
    if server is not None:
        await asyncio.to_thread(server.wait, config.serve.timeout_s)
        served = await ask_server(url, served_as, None)
    assert served is not None
    engine.known = served.processed
    settings = settings_of(config, min(config.max_context or served.max_context, served.max_context), name)
    policy = replace(policy, max_context=settings.max_context, max_tokens=settings.max_tokens)
    return make_setup(settings, policy, ProxyServer())


def _load(config: DictConfig, model: str, engine: Engine, name: str) -> Policy:
    """Return the policy with its sampling parameters. Its context length is set once the server reports it."""
    from transformers import AutoConfig, AutoTokenizer

    settings = settings_of(config, config.max_context or _HOSTED_CONTEXT, name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
        model_type = AutoConfig.from_pretrained(model).model_type
    except (OSError, ValueError) as error:
        raise ConfigError(f"tokenizer: {model} cannot be loaded: {' '.join(str(error).split())}") from error
    try:
        policy = load_policy(settings, model, tokenizer, model_type, engine)
    except ValueError as error:  # an unknown parser or chat template
        raise ConfigError(f"{model}: {' '.join(str(error).split())}") from error
    said = generation_config(model)
    sampling = {name: said[name] for name in _SAMPLING if said.get(name) is not None}
    sampling |= {name: value for name, value in config.sampling.items() if value is not None}
    return replace(policy, sampling=sampling)
