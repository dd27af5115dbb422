"""A proxy whose policy is somewhere else: every call goes on to an endpoint of Anthropic's Messages API.

For evaluating hosted and frozen models. Nothing is known of tokens here: sessions keep counters and no tree, so their
episodes have no training rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from aiohttp import web

from rollout import SIDE_MODEL
from rollout.proxy.forward import BrokenOffError, SideEndpoint
from rollout.proxy.messages import RequestError, decode_request
from rollout.proxy.server import ProxyServer
from rollout.proxy.session import Policy

# Anthropic's words for a prompt that does not fit. Claude Code compacts on it: the policy's affair, not a failure.
_FULL = b"prompt is too long"


class PassThrough(ProxyServer):
    """Sessions are opened with ``policy``. ``side_endpoint``: where calls on the small model's slot
    go, if not there."""

    def __init__(self, endpoint: SideEndpoint, side_endpoint: SideEndpoint | None = None) -> None:
        super().__init__()
        self.endpoint = endpoint
        nothing: Any = _Elsewhere()
        self.policy = Policy(
            engine=nothing,
            renderer=nothing,
            parser=nothing,
            tokenizer=nothing,
            end_ids=frozenset(),
            max_tokens=0,
            max_context=0,
            side_endpoint=side_endpoint,
        )

    async def stop(self, grace_s: float = 0.0) -> None:
        await super().stop(grace_s)
        for endpoint in (self.endpoint, self.policy.side_endpoint):
            if endpoint is not None:
                await endpoint.close()

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        """The endpoint's reply. ``engine_errors`` counts those since the last reply that was none: what the agent
        tried again with success was no failure."""
        session, body = await self.open(request)
        side = decode_request(body).model == SIDE_MODEL
        session.counters.calls += 1
        session.counters.side_calls += side
        session.counters.retries += request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
        endpoint = (side and session.policy.side_endpoint) or self.endpoint
        try:
            response = await endpoint.relay(request, body)
        except (RequestError, BrokenOffError):
            session.counters.engine_errors += 1
            raise
        if response.status < 400:
            session.counters.engine_errors = 0
        elif isinstance(response, web.Response) and isinstance(response.body, bytes) and _FULL in response.body:
            session.counters.context_full += 1
        else:
            session.counters.engine_errors += 1
        return response

    async def _count_tokens(self, request: web.Request) -> web.StreamResponse:
        _, body = await self.open(request)
        return await self.endpoint.relay(request, body)


class _Elsewhere:
    """Stands for the policy's engine, renderer, parser and tokenizer, none of which is asked for anything."""

    spec = ""

    async def generate(self, *_: Any, **__: Any) -> NoReturn:
        raise AssertionError("the policy is elsewhere")

    def start(self, *_: Sequence[Any]) -> NoReturn:
        raise AssertionError("the policy is elsewhere")

    extend = parse = encode = decode = start
