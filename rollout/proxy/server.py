"""HTTP in front of the sessions: POST /v1/messages (streamed or not) and /v1/messages/count_tokens.

Two ways in, one application: a TCP port where the episode's secret (``Authorization: Bearer`` or ``x-api-key``)
picks the session, and one unix socket per episode, for agents that have no network at all. The secret is checked
on both.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.client_exceptions import ClientConnectionResetError

from rollout.proxy.engine import EngineError
from rollout.proxy.messages import (
    RequestError,
    WireRequest,
    decode_request,
    reply_events,
    reply_json,
    reply_start_event,
    sse,
)
from rollout.proxy.session import Policy, Session, Turn
from rollout.proxy.tree import Node

log = logging.getLogger(__name__)

_MAX_BODY = 64 << 20  # bytes; Claude Code's largest requests (images) stay far below


class ProxyServer:
    """Serves any number of sessions. ``ping_s``: a streamed reply that takes longer gets pings this far apart."""

    def __init__(self, *, ping_s: float = 5.0) -> None:
        self.ping_s = ping_s
        self.sessions: dict[str, Session] = {}
        self.port = 0
        self._sites: dict[str, tuple[web.UnixSite, Path]] = {}
        app = web.Application(client_max_size=_MAX_BODY, middlewares=[_errors_as_json])
        app.router.add_post("/v1/messages", self._messages)
        app.router.add_post("/v1/messages/count_tokens", self._count_tokens)
        app.router.add_route("*", "/{rest:.*}", _not_found)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen on TCP; port 0 takes a free one. ``self.port`` is the one taken."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        self.port = self._runner.addresses[-1][1]

    async def stop(self) -> None:
        for session in list(self.sessions.values()):
            await self.close_session(session)
        await self._runner.cleanup()

    async def open_session(self, episode_id: str, policy: Policy, socket: Path | None = None) -> Session:
        """A new session; with ``socket`` it is also reachable there."""
        session = Session(episode_id, policy)
        if socket is not None:
            site = web.UnixSite(self._runner, str(socket))
            await site.start()
            self._sites[session.secret] = site, socket
        self.sessions[session.secret] = session
        return session

    async def close_session(self, session: Session) -> None:
        session.close()
        self.sessions.pop(session.secret, None)
        if session.secret in self._sites:
            site, socket = self._sites.pop(session.secret)
            await site.stop()
            socket.unlink(missing_ok=True)  # asyncio leaves it

    def _session(self, request: web.Request) -> Session:
        given = request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        found = self.sessions.get(given)
        # The dict look-up finds a candidate; the comparison that decides takes the same time for all secrets.
        if found is None or not hmac.compare_digest(found.secret.encode(), given.encode()):
            raise RequestError(
                "unknown session: the episode's secret is wrong or its session is closed", 401, "authentication_error"
            )
        return found

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        body = await request.read()
        began = time.perf_counter()
        wire = decode_request(body)
        session.counters.overhead_s += time.perf_counter() - began
        turn = session.prepare(wire, retry=request.headers.get("x-stainless-retry-count", "0") not in ("", "0"))
        if wire.stream:
            return await self._stream(request, wire, turn)
        node = await _sampled(turn)
        response = web.Response(
            body=msgspec.json.encode(reply_json(_reply(node), wire.model)), content_type="application/json"
        )
        await response.prepare(request)
        await response.write_eof()
        node.delivered = True
        return response

    async def _stream(self, request: web.Request, wire: WireRequest, turn: Turn) -> web.StreamResponse:
        waiting = asyncio.ensure_future(turn.reply())
        # Within the first ping the status is still open, so that a failing engine is an HTTP 529.
        await asyncio.wait([waiting], timeout=self.ping_s)
        if waiting.done():
            _raise_engine_error(waiting)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        try:
            await response.prepare(request)
            start = reply_start_event(turn.message_id, wire.model, turn.context.length)
            if not waiting.done():
                await response.write(start)
                start = b""
                while not waiting.done():
                    await response.write(sse("ping", {}))
                    await asyncio.wait([waiting], timeout=self.ping_s)
                try:
                    _raise_engine_error(waiting)
                except RequestError as error:
                    await response.write(sse("error", {"error": {"type": error.kind, "message": str(error)}}))
                    await response.write_eof()
                    return response
            began = time.perf_counter()
            out = start + reply_events(_reply(waiting.result()))
            turn.session.counters.overhead_s += time.perf_counter() - began
            await response.write(out)
            await response.write_eof()
            waiting.result().delivered = True
        except (ClientConnectionResetError, ConnectionResetError):
            log.debug("client of %s hung up before its reply was delivered", turn.session.episode_id)
            waiting.cancel()
        return response

    async def _count_tokens(self, request: web.Request) -> web.Response:
        session = self._session(request)
        return web.json_response({"input_tokens": session.count(decode_request(await request.read()))})


def _reply(node: Node) -> Any:
    assert node.reply is not None
    return node.reply


async def _sampled(turn: Turn) -> Node:
    waiting = asyncio.ensure_future(turn.reply())
    await asyncio.wait([waiting])
    _raise_engine_error(waiting)
    return waiting.result()


def _raise_engine_error(done: asyncio.Future[Node]) -> None:
    if done.cancelled():
        raise RequestError("session closed", 410, "not_found_error")
    error = done.exception()
    if isinstance(error, EngineError):
        raise RequestError(f"engine: {error}", 529, "overloaded_error") from error
    if error is not None:
        raise error


@web.middleware
async def _errors_as_json(request: web.Request, handler: Any) -> web.StreamResponse:
    """Every failure in Anthropic's error format, never a stack trace on the wire."""
    try:
        return await handler(request)
    except RequestError as error:
        headers = {"Retry-After": "1"} if error.status == 529 else None
        return web.Response(status=error.status, body=error.body(), content_type="application/json", headers=headers)
    except web.HTTPRequestEntityTooLarge:
        error = RequestError(f"request body over {_MAX_BODY >> 20} MiB", 413, "request_too_large")
        return web.Response(status=413, body=error.body(), content_type="application/json")
    except web.HTTPException:
        raise
    except Exception:
        log.exception("proxy: %s %s failed", request.method, request.path)
        failed = RequestError("internal error of the proxy; its log has the details", 500, "api_error")
        return web.Response(status=500, body=failed.body(), content_type="application/json")


async def _not_found(request: web.Request) -> web.Response:
    raise RequestError(f"no such endpoint: {request.method} {request.path}", 404, "not_found_error")
