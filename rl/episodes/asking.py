"""Ask endpoints whether they answer, before anything starts."""

from __future__ import annotations

from typing import Any

import aiohttp

from rl.config.compose import ConfigError
from rollout.proxy.forward import SideEndpoint

ASK_S = 60.0


async def ask_endpoint(endpoint: SideEndpoint, key: str = "endpoint") -> None:
    """Ask an endpoint for a short reply, to check address, API key and model. Raises ConfigError.

    key: of the config, which names the endpoint. With it, errors begin.
    """
    url = endpoint.address("/v1/messages")
    status, text = await ask(url, endpoint.headers(), endpoint.hello(), key)
    said = " ".join(text.split())[:300]
    if status in (401, 403):
        where = "it does not accept the key in key_env" if endpoint.key else "it needs a key; set key_env=VARIABLE"
        raise ConfigError(f"{key}: {url}: status {status}; {where}: {said}")
    if status != 200:
        raise ConfigError(f"{key}: {url} does not answer as {endpoint.model!r}: status {status}: {said}")


async def ask(
    url: str, headers: dict[str, str], body: dict[str, Any] | None = None, key: str = "endpoint"
) -> tuple[int, str]:
    """Return status and text of the answer to a GET, or to a POST of ``body``. Raises ConfigError if there is none."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ASK_S)) as http,
            http.request("POST" if body else "GET", url, json=body, headers=headers) as reply,
        ):
            return reply.status, await reply.text(errors="replace")
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ConfigError(f"{key}: {url} does not answer: {str(error) or type(error).__name__}") from None
