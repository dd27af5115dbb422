"""A proxy without a policy of its own: every call is forwarded to an endpoint of Messages or chat completions.

It is used to evaluate hosted and frozen models. Tokens are not known here: sessions have counters but an empty tree,
so their episodes have no training rows.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from aiohttp import web

from rollout import SIDE_MODEL
from rollout.proxy.forward import SideEndpoint
from rollout.proxy.roles import AGENT_HEADER, endpoints
from rollout.proxy.server import ProxyServer, is_retry
from rollout.proxy.session import Policy
from rollout.proxy.wire import FULL, BrokenOffError, EndpointError, RequestError


class PassThrough(ProxyServer):
    """A PassThrough forwards the calls of its sessions to ``endpoint``, and side calls to ``side_endpoint`` if given.

    Its sessions are opened with its ``policy``, a placeholder. ``max_calls``: of each session. ``max_tokens``: of a
    reply whose request names no limit.
    """

    def __init__(
        self,
        endpoint: SideEndpoint,
        side_endpoint: SideEndpoint | None = None,
        max_calls: int | None = None,
        max_tokens: int = 0,
    ) -> None:
        super().__init__()
        self.endpoint = endpoint
        nothing: Any = SimpleNamespace(spec="")  # nothing is sampled, encoded or parsed here
        self.policy = Policy(
            engine=nothing,
            renderer=nothing,
            parser=nothing,
            tokenizer=nothing,
            end_ids=frozenset(),
            max_tokens=max_tokens,
            max_context=0,
            side_endpoint=side_endpoint,
            max_calls=max_calls,
        )

    async def stop(self, grace_s: float = 0.0) -> None:
        """Stop as ProxyServer does, and close the connections to the endpoints."""
        await super().stop(grace_s)
        for endpoint in (self.endpoint, *endpoints(self.policy.roles, self.policy.side_endpoint)):
            await endpoint.close()

    async def _reply(self, request: web.Request) -> web.StreamResponse:
        """Forward a call. ``engine_errors`` counts the failures since the last success.

        A call that succeeded when the agent asked again was not a failure of the episode.
        """
        session, front, asked, wire = await self.asked(request)
        side = wire.model == SIDE_MODEL
        session.counters.calls += 1
        session.counters.side_calls += side
        session.counters.retries += is_retry(request)
        whose = await session.whose(wire, request.headers.get(AGENT_HEADER, ""))
        endpoint = whose.endpoint or self.endpoint
        try:
            response = await self.forward(session, endpoint, request, front, asked, wire, whose)
        except (EndpointError, BrokenOffError) as error:
            full = FULL in str(error)
            session.counters.context_full += full
            session.counters.engine_errors += not full
            raise
        if response.status < 300:
            session.counters.engine_errors = 0
        elif isinstance(response, web.Response) and isinstance(response.body, bytes) and FULL.encode() in response.body:
            session.counters.context_full += 1
        else:
            session.counters.engine_errors += 1
        return response

    async def _count(self, request: web.Request) -> web.StreamResponse:
        _, front, _, wire = await self.asked(request)
        if front.name or not self.endpoint.relays:
            raise RequestError("tokens are not counted here", 404, "not_found_error")
        return await self.endpoint.relay(request, wire.body, bytearray(), set())
