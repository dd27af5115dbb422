"""This module forwards calls to another endpoint: side calls in training, all calls when a hosted model is evaluated.

The request is sent on as it came, except for the model's name, and the reply is returned byte for byte. Nothing of
either enters the session tree. The endpoint's key belongs to the proxy; the agent never sees it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from rollout.proxy.messages import RequestError

# Where a request has a bytearray under this key, the endpoint's reply is added to it.
HEARD = web.RequestKey("heard", bytearray)


class BrokenOffError(ConnectionResetError):
    """The endpoint broke off in the middle of a reply."""


@dataclass
class SideEndpoint:
    """A SideEndpoint is a server of the Anthropic Messages API at ``url``/v1/messages.

    ``model``: its name for the model to use; ``key``: sent as x-api-key unless it is None; ``timeout_s``: the longest
    time for one whole reply, in seconds.
    """

    url: str
    model: str
    key: str | None = field(default=None, repr=False)
    timeout_s: float = 600.0
    _client: aiohttp.ClientSession | None = field(default=None, repr=False)

    def address(self, path: str) -> str:
        """Return the URL of one of the Messages API's paths."""
        return self.url.rstrip("/") + path

    def headers(self) -> dict[str, str]:
        """Return the headers of every request."""
        key = {"x-api-key": self.key} if self.key else {}
        return {"Content-Type": "application/json", "anthropic-version": "2023-06-01", **key}

    def hello(self) -> dict[str, Any]:
        """Return the body of a request that costs next to nothing."""
        return {"model": self.model, "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}

    async def relay(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """Answer ``request`` with the endpoint's reply to ``body``, and return that response.

        An error that the endpoint itself reports is returned as a ``web.Response``. Raises RequestError if the
        endpoint cannot be reached. If it breaks off in the middle of a reply, the agent's connection is cut and
        BrokenOffError is raised; if the agent hangs up first, ConnectionResetError is.
        """
        if self._client is None:
            self._client = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=self.timeout_s), auto_decompress=False
            )
        headers = self.headers() | {"Accept-Encoding": "identity"}
        headers |= {name: request.headers[name] for name in ("anthropic-beta",) if name in request.headers}
        # All other fields stay bytes, which takes a twentieth of the time of decoding them.
        fields: dict[str, Any] = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        changed = msgspec.json.encode(fields | {"model": self.model})
        response: web.StreamResponse | None = None
        heard = request.get(HEARD)
        try:
            async with self._client.post(self.address(request.path), data=changed, headers=headers) as reply:
                if reply.status >= 400:
                    return web.Response(status=reply.status, headers=_kept(reply.headers), body=await reply.read())
                response = web.StreamResponse(status=reply.status, headers=_kept(reply.headers))
                await response.prepare(request)
                async for chunk in reply.content.iter_any():
                    if heard is not None:
                        heard += chunk
                    await response.write(chunk)
                await response.write_eof()
                return response
        except (aiohttp.ClientError, TimeoutError) as error:
            if response is None:
                raise RequestError(f"endpoint {self.url}: {error}", 529, "overloaded_error") from error
            if request.transport is None or request.transport.is_closing():
                raise ConnectionResetError from error  # it was the agent that hung up
            request.transport.abort()
            raise BrokenOffError(f"endpoint {self.url}: {error}") from error

    async def close(self) -> None:
        """Close the connections to the endpoint."""
        if self._client is not None:
            await self._client.close()
            self._client = None


def _kept(headers: Any) -> dict[str, str]:
    wanted = ("Content-Type", "Content-Encoding", "Retry-After", "request-id")
    return {name: headers[name] for name in wanted if name in headers}
