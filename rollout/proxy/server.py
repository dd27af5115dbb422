"""The HTTP server of the sessions, for all APIs that have a front end (``rollout.proxy.front``).

One application listens on a TCP port, where the episode's secret (as each API carries its key) selects the session, and
on one unix socket per episode, for agents without any network. The secret is checked on both. A socket gives access
only to its own session: another episode's secret is worth nothing there.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, PayloadEncodingError

from rollout import SIDE_MODEL
from rollout.proxy.connections import BODY_S, IDLE_S, Connections, Tally, taken
from rollout.proxy.delivery import Deliveries
from rollout.proxy.engine import EngineError
from rollout.proxy.front import PATHS, counts, front_of
from rollout.proxy.front.base import Answer, Front
from rollout.proxy.messages import RequestError, WireRequest
from rollout.proxy.replies import Reply, reply_json
from rollout.proxy.roles import AGENT_HEADER, Asked
from rollout.proxy.secret import issued
from rollout.proxy.session import Policy, Session
from rollout.proxy.tree import Node
from rollout.proxy.wire import LARGE, BrokenOffError, closed_error, takes_long

if TYPE_CHECKING:  # not loaded where nothing is forwarded, and no metrics are served
    from rollout.proxy.forward import SideEndpoint
    from rollout.proxy.metrics import Metrics

log = logging.getLogger(__name__)

# The most bytes of the bodies of one session's requests in progress, beyond which no large one is read.
_SESSION_BODIES = 64 << 20

_JSON = "application/json"
_KINDS = {404: "not_found_error", 413: "request_too_large"}


class Holder(Protocol):
    """A Holder is whoever the bodies of requests in progress are held for; ``held``: their bytes."""

    held: int


_ASKED = web.RequestKey("asked", object)
_HELD = web.RequestKey("held", tuple[Holder, int])
Said = asyncio.Future[Node] | asyncio.Future[Reply]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ProxyServer:
    """A ProxyServer serves any number of sessions over HTTP.

    ``ping_s``: the seconds between two pings while a streamed reply is being sampled. ``max_body``: the size of the
    largest request that is read, in bytes; the default is that of Anthropic's API. ``metrics``, if given, are told of
    every request.
    """

    def __init__(self, *, ping_s: float = 5.0, max_body: int = 32 << 20, metrics: Metrics | None = None) -> None:
        self.ping_s = ping_s
        self.max_body = max_body
        self.metrics = metrics
        self.sessions: dict[str, Session] = {}  # secret -> session
        if metrics is not None:
            metrics.sessions = self.sessions
        self.port = 0
        self._sockets: dict[str, tuple[web.UnixSite, Session]] = {}  # path -> listener and session
        self._stopping = False
        self._log = Tally(log)
        self._connections = Connections(self._log)
        self._busy = self._connections.busy
        self._idle = asyncio.Event()
        self._deliveries = Deliveries()
        self._entrance = asyncio.Lock()
        self.app = web.Application(client_max_size=max_body, middlewares=[self._outermost])
        for path in PATHS:
            self.app.router.add_post(path, self._called, expect_handler=self._expect)
        # When a client hangs up, its handler is cancelled, and the generation too unless somebody else waits for it.
        # A compressed body would be unpacked on the event loop, while no other session is answered.
        self._runner = web.AppRunner(
            self.app,
            access_log=None,
            shutdown_timeout=1.0,
            handler_cancellation=True,
            auto_decompress=False,
            keepalive_timeout=IDLE_S,
            logger=self._log,
        )

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen on a TCP port; 0 chooses a free one. The port is then in ``self.port``. Raises OSError."""
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        self._connections.watch(server, self._deliveries.ended)
        # Of connections that wait to be accepted, one too many is tried again by the client's kernel, after 1 and 3 s.
        site = web.TCPSite(self._runner, host, port, backlog=4096)
        await site.start()
        self.port = self._runner.addresses[-1][1]

    async def stop(self, grace_s: float = 0.0) -> None:
        """Accept nothing more, give the requests in progress ``grace_s`` seconds to end, then close every session."""
        self._stopping = True
        for site in list(self._runner.sites):
            await site.stop()
        if self._busy and grace_s > 0:
            self._idle.clear()
            try:
                await asyncio.wait_for(self._idle.wait(), grace_s)
            except TimeoutError:
                log.warning("stopping: %d requests are still in progress after %g s", len(self._busy), grace_s)
        for session in list(self.sessions.values()):
            await self.close_session(session)
        await self._runner.cleanup()

    async def open_session(
        self, episode_id: str, policy: Policy, socket: Path | None = None, relayed: bool = False
    ) -> Session:
        """Open a session, which is also reachable at the unix socket ``socket`` if that is given.

        ``relayed``: what reads from a connection is not the agent, so its reading proves nothing (``Deliveries``).
        Raises OSError if the socket cannot be made or the server is stopped.
        """
        if self._stopping:
            raise OSError("the proxy is stopped")
        session = Session(episode_id, policy)
        session.relayed = relayed
        session.settle = lambda: self._deliveries.look(session)
        if socket is not None:
            path = str(socket)
            if path in self._sockets:  # asyncio would silently take it over
                raise FileExistsError(f"{path} is the socket of another session")
            site = web.UnixSite(self._runner, path)
            await site.start()
            self._sockets[path] = site, session
        self.sessions[session.secret] = session
        return session

    async def close_session(self, session: Session) -> None:
        """Close a session: abort its generations, remove its socket and free its memory. Its secret now gets 410."""
        session.close()
        self._deliveries.forget(session)
        session.settle = lambda: None
        if self.sessions.pop(session.secret, None) is not None and self.metrics is not None:
            self.metrics.retire(session)
        for path in [path for path, (_, owner) in self._sockets.items() if owner is session]:
            site, _ = self._sockets.pop(path)
            if site in self._runner.sites:
                await site.stop()
            Path(path).unlink(missing_ok=True)  # asyncio leaves the file behind
            self._connections.close(path)

    async def receive(self, request: web.Request) -> tuple[Session, bytes]:
        """Return the session that a request belongs to, and the request's body. Raises RequestError.

        It is one of the session's calls from here on, whatever it is: counting encodes a prompt as a call does, and a
        session that may make no more has no body read.
        """
        given = token_of(request)
        if not issued(given):
            raise RequestError("unknown session: this is not an episode's secret", 401, "authentication_error")
        session = self.sessions.get(given)
        # For TCP this is an address, for a unix socket the path that it is bound to.
        sockname = request.transport.get_extra_info("sockname") if request.transport else None
        if isinstance(sockname, str):
            _, owner = self._sockets.get(sockname, (None, None))
            if session is not None and session is not owner:
                raise RequestError("unknown session: not that of this socket", 401, "authentication_error")
        if session is None:
            raise closed_error()
        session.admit()
        return session, await self.body(request, session, _SESSION_BODIES, session.policy.max_body)

    async def body(self, request: web.Request, holder: Holder, together: int, most: int | None = None) -> bytes:
        """Read a request's body, and count it as ``holder``'s until the request ends. Raises RequestError if it is
        broken or late, has more than ``most`` bytes, or is a large one with which the holder's have more than
        ``together``: such a body is not read.
        """
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise RequestError("Content-Encoding: only identity is possible", 415)
        if coding := request.headers.get("Transfer-Encoding", "").strip().lower():
            # Chunks of one byte keep the event loop busy for seconds, and nothing limits their number.
            raise RequestError(
                f"Transfer-Encoding {coding}: send a Content-Length", 411 if coding == "chunked" else 415
            )
        most = min(most or self.max_body, self.max_body)
        size = request.content_length or 0
        if size > most:
            raise _too_large(most)
        if size > LARGE and holder.held + size > together:
            raise RequestError(f"more than {together} bytes of bodies at the same time", 429, "rate_limit_error")
        holder.held += size
        request[_HELD] = holder, size
        try:
            # Most bodies come with their head. A timer would take longer than the reading.
            async with contextlib.nullcontext() if request.content.is_eof() else asyncio.timeout(BODY_S):
                body = await request.read()
        except TimeoutError:
            raise RequestError(f"the body did not arrive within {BODY_S:g} s", 408) from None
        except (HttpProcessingError, PayloadEncodingError, web.RequestPayloadError) as error:
            raise RequestError(f"the body is not what the headers say: {error}") from error
        return body

    async def _expect(self, request: web.Request) -> web.StreamResponse | None:
        """Answer a client that asks whether to send its body: None for yes (100 Continue), else the response.

        aiohttp calls this before the handler.
        """
        if (request.content_length or 0) > self.max_body:
            return _error_response(request, _too_large(self.max_body))
        if request.headers["Expect"].lower() != "100-continue":
            return _error_response(request, RequestError("Expect: only 100-continue is supported", 417))
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # otherwise aiohttp assumes that the response has begun
        return None

    async def asked(self, request: web.Request) -> tuple[Session, Front[Any], Any, WireRequest]:
        """Read a request; return its session, the front end of its API, and what it asks for, in that API's form and
        in that of Messages. What takes long is done in a thread. Raises RequestError.
        """
        front = front_of(request.path)
        session, body = await self.receive(request)
        began = time.perf_counter()
        read = functools.partial(front.read, body, request.path)
        asked = await asyncio.to_thread(read) if takes_long(body) else read()
        request[_ASKED] = asked
        wire = await session.translated(front, asked)
        session.counters.overhead_s += time.perf_counter() - began
        return session, front, asked, wire

    async def _called(self, request: web.Request) -> web.StreamResponse:
        return await (self._count if counts(request.path) else self._reply)(request)

    async def _reply(self, request: web.Request) -> web.StreamResponse:
        session, front, asked, wire = await self.asked(request)
        whose = await session.whose(wire, request.headers.get(AGENT_HEADER, ""))
        if whose.endpoint is not None:
            session.counters.side_calls += wire.model == SIDE_MODEL
            session.counters.calls += session.roles is not None
            session.counters.retries += session.roles is not None and is_retry(request)
            return await self.forward(session, whose.endpoint, request, front, asked, wire, whose)
        before = session.counters.overhead_s
        transport = request.transport
        if transport is None:
            raise ConnectionResetError
        # Without a buffer of our own, a write that was awaited is entirely with the kernel.
        transport.set_write_buffer_limits(high=0)
        with contextlib.ExitStack() as waiting:
            async with session.entrance:
                place = await session.ahead(wire)
                # Requests pass this part one at a time, so that when many arrive at once, the first is sampled while
                # the others are being encoded, and not only after all of them are.
                async with self._entrance:
                    call = session.prepare(wire, is_retry(request), place, whose.role)
                    sampled = waiting.enter_context(session.sampling(call))
                    await asyncio.sleep(0)  # lets the generation begin
            answer = front.answer(asked, call.message_id, call.context.length)
            response, node = await self._answered(request, session, answer, wire.stream, sampled)
        if isinstance(node, Node) and not transport.is_closing():
            self._deliveries.sent(transport, session, node)
        if self.metrics is not None and node is not None:
            self.metrics.reply(_said(node), session.counters.overhead_s - before)
        return response

    async def forward(
        self,
        session: Session,
        endpoint: SideEndpoint,
        request: web.Request,
        front: Front[Any],
        asked: Any,
        wire: WireRequest,
        whose: Asked,
    ) -> web.StreamResponse:
        """Forward a call to an endpoint, and keep what it is and what is answered. Raises what ``relay`` does."""
        began, roles = time.time(), session.roles
        wire.max_tokens = wire.max_tokens or session.policy.max_tokens or None
        with roles.relaying(whose) if roles is not None else contextlib.nullcontext():
            if endpoint.relays and not front.name:  # byte for byte
                heard = bytearray()
                response = await endpoint.relay(request, wire.body, heard, session.talk.ids)
            else:
                name = f"msg_{uuid.uuid4().hex}"

                async def ask() -> Reply:
                    return replace(await endpoint.ask(wire.body), id=name)

                answer, asking = front.answer(asked, name, 0), asyncio.ensure_future(ask())
                try:
                    response, reply = await self._answered(request, session, answer, wire.stream, asking)
                finally:
                    asking.cancel()
                if reply is None:
                    raise BrokenOffError(str(asking.exception()))  # after status 200
                heard = msgspec.json.encode(reply_json(_said(reply), wire.model))
            blocks: list[Any] = []
            if response.status == 200:
                blocks = session.talk.forwarded(wire, bytes(heard), began, time.time() - began, whose.role)
            if roles is not None:
                said = repr(getattr(response, "body", b""))
                roles.answered(whose, response.status, said, blocks)
        return response

    async def _answered(
        self, request: web.Request, session: Session, answer: Answer, stream: bool | None, said: Said
    ) -> tuple[web.StreamResponse, Node | Reply | None]:
        """Send a reply when it is there, and wait until the kernel has taken all of it. It is None if it failed after
        the stream had begun. Raises ConnectionResetError.
        """
        # Until the first ping nothing is sent, so that an engine that fails early is an HTTP 529.
        if not said.done():
            await asyncio.wait([said], timeout=self.ping_s if stream else None)
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        if said.done():
            result = self._result(said)
            began = time.perf_counter()
            if stream:
                out = answer.begin() + answer.rest(_said(result))
            else:
                out, headers = msgspec.json.encode(answer.whole(_said(result))), {"Content-Type": _JSON}
            session.counters.overhead_s += time.perf_counter() - began
            response = web.Response(body=out, headers=headers)
            await response.prepare(request)
            await taken(request, response.write_eof())
            return response, result
        result, out = None, answer.begin()
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        while not said.done():
            await taken(request, response.write(out + answer.ping()))
            out = b""
            await asyncio.wait([said], timeout=self.ping_s)
        began = time.perf_counter()
        try:
            result = self._result(said)
            out += answer.rest(_said(result))
        except Exception as error:
            out += answer.failed(self._as_request_error(error, request))
        session.counters.overhead_s += time.perf_counter() - began
        await taken(request, response.write_eof(out))
        return response, result

    def _result(self, said: Said) -> Node | Reply:
        """Return the reply that has come. Raises RequestError if the session was closed meanwhile."""
        if said.cancelled():
            raise _stopping_error() if self._stopping else closed_error()
        return said.result()

    async def _count(self, request: web.Request) -> web.StreamResponse:
        session, front, _, wire = await self.asked(request)
        async with session.entrance:
            counted = front.counted(session.count(wire, await session.ahead(wire)))
        return web.Response(body=msgspec.json.encode(counted), content_type=_JSON)

    @web.middleware
    async def _outermost(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer every failure in the form of the request's API and never with a stack trace."""
        began, status = time.perf_counter(), 499  # nginx's status for a client that hung up
        self._connections.begin(transport := request.transport)
        try:
            if self._stopping:
                raise _stopping_error()
            response = await handler(request)
            status = response.status
            return response
        except ConnectionError:
            raise
        except Exception as error:
            response = _error_response(request, self._as_request_error(error, request), error)
            status = response.status
            return response
        finally:
            self._connections.end(transport)
            if not request.content.is_eof():
                request.protocol.close()  # what comes of the body is dropped, and not parsed, until the client has read
            if (held := request.get(_HELD)) is not None:
                held[0].held -= held[1]
            if not self._busy:
                self._idle.set()
            if self.metrics is not None:
                self.metrics.request(request.path, status, time.perf_counter() - began)

    def _as_request_error(self, error: Exception, request: web.Request) -> RequestError:
        if isinstance(error, RequestError):
            if error.status == 529 and error.__cause__ is not None:
                self._log.warning("endpoint: %s", error.__cause__)
            return error
        if isinstance(error, EngineError):
            self._log.warning("engine: %s" if error.status is None else f"engine (status {error.status}): %s", error)
            if error.permanent:
                return RequestError(f"the engine refuses this call (status {error.status}); the proxy's log says why")
            return RequestError("the engine has failed; the proxy's log says how", 529, "overloaded_error")
        if isinstance(error, RecursionError):
            return RequestError("the body is nested too deeply")
        if isinstance(error, web.HTTPException) and error.status < 500:
            text = f"{error.reason}: {request.method} {request.path}"
            return RequestError(text, error.status, _KINDS.get(error.status, "invalid_request_error"))
        self._log.error("proxy: %s %r failed", request.method, request.path, exc_info=error)
        return RequestError("internal error of the proxy; see its log", 500, "api_error")


def token_of(request: web.Request) -> str:
    """Return the token that came with a request, "" if there is none."""
    if given := request.headers.get("x-api-key") or request.headers.get("x-goog-api-key"):
        return given
    header = request.headers.get("Authorization", "")
    scheme, _, given = header.partition(" ")
    return given.strip() if scheme.lower() == "bearer" else header or request.query.get("key", "")


def is_retry(request: web.Request) -> bool:
    """Tell whether the client marks a request as a retry."""
    return request.headers.get("x-stainless-retry-count", "0") not in ("", "0")


def _too_large(most: int) -> RequestError:
    return RequestError(f"request body over {most} bytes", 413, "request_too_large")


def _stopping_error() -> RequestError:
    # Clients retry after this error: there may be another proxy by then.
    return RequestError("the proxy is shutting down", 529, "overloaded_error")


def _said(result: Node | Reply) -> Reply:
    reply = result.reply if isinstance(result, Node) else result
    assert reply is not None
    return reply


def _error_response(request: web.Request, error: RequestError, cause: Exception | None = None) -> web.Response:
    status, body = front_of(request.path, request.method).error(error, request.get(_ASKED))
    if isinstance(body, bytes):
        response = web.Response(status=status, body=body, content_type="text/event-stream")
    else:
        response = web.Response(status=status, body=msgspec.json.encode(body), content_type=_JSON)
    if error.status == 529:
        response.headers["Retry-After"] = "1"
    if isinstance(cause, web.HTTPMethodNotAllowed):
        response.headers["Allow"] = cause.headers["Allow"]
    if not request.content.is_eof():
        response.force_close()  # the rest of the body need not, or cannot, be read
    return response
