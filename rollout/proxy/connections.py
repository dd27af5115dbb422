"""Limits on what clients can take of a server: its connections, their time, and the lines of its log.

An operating system gives a process only so many descriptors. If one client can open them all, nobody else is served.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import ClientConnectionResetError, web
from aiohttp.http_exceptions import HttpProcessingError

# The most connections to one session's socket. Claude Code opens one for each call at the same time.
EACH = 64
# The most connections in all, and the share of the process's descriptors that they may take.
_MOST, _SHARE = 4096, 2
# Seconds in which a new connection must bring the head of a request, in which a body must be read, and after which
# a connection without a request is closed. An agent's command, during which it calls nobody, takes 10 minutes at most.
_HEAD_S = 30.0
BODY_S = 60.0
IDLE_S = 660.0
# The time in seconds in which a client must read what it is sent; after that, its connection is cut.
TAKE_S = 60.0

# What a write raises if the client has gone.
_GONE = (ConnectionResetError, BrokenPipeError, ClientConnectionResetError)

Owner = str | tuple[Any, ...]


class Tally(logging.LoggerAdapter):
    """A tally is a logger that writes the first, the tenth, the hundredth ... message of a kind, with their number.

    Messages are of one kind if they have the same format and the same place of their exception. Nothing is written of
    requests that are not HTTP and of clients that hang up: anybody can do that.
    """

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger)
        self._counts: dict[tuple[object, ...], int] = {}

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log as Logger.log does, or count the message only."""
        error = kwargs.get("exc_info")
        if isinstance(error, HttpProcessingError) or type(error) in _GONE:
            return
        kind = msg, type(error), _place(error)
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        if f"{count}".strip("0") == "1":
            super().log(level, f"{msg} ({count} times by now)" if count > 1 else msg, *args, **kwargs)


def _place(error: object) -> tuple[str, int] | None:
    trace = error.__traceback__ if isinstance(error, BaseException) else None
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return (trace.tb_frame.f_code.co_filename, trace.tb_lineno) if trace is not None else None


class Connections:
    """Connections are those of a server: at most ``EACH`` to a unix socket, and ``most`` in all.

    One that is too many makes the server cut one of the same socket; beyond the limit of all, one of the socket or
    address that has the most. The one that is unused for longest is cut; one that is answering a request, only if all
    of them are. So whoever has few connections keeps them, and can open more, whatever others do.

    ``busy``: those with a request in progress.
    """

    def __init__(self, log: Tally) -> None:
        self.busy: set[asyncio.Transport | None] = set()
        self.most = min(_MOST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _SHARE)
        self._log = log
        # By the path of a unix socket or the address of a client; the least recently used connection first.
        self._of: dict[Owner, dict[asyncio.Transport, web.RequestHandler]] = {}
        self._owners: dict[asyncio.Transport | None, Owner] = {}
        self._silent: dict[asyncio.Transport | None, asyncio.TimerHandle] = {}  # those without any request yet

    def watch(
        self, server: web.Server, ended: Callable[[asyncio.Transport | None, BaseException | None], None]
    ) -> None:
        """Limit the connections of a server. ``ended``: called when one ends, with an error if not in order."""
        made, lost = server.connection_made, server.connection_lost

        def begin(handler: web.RequestHandler, transport: asyncio.Transport) -> None:
            made(handler, transport)
            self._add(handler, transport)

        def end(handler: web.RequestHandler, error: BaseException | None = None) -> None:
            ended(handler.transport, error)
            self._remove(handler.transport)
            lost(handler, error)

        server.connection_made = begin
        server.connection_lost = end  # ty: ignore[invalid-assignment]

    def begin(self, transport: asyncio.Transport | None) -> None:
        """Note that a request has begun."""
        self.busy.add(transport)
        if (timer := self._silent.pop(transport, None)) is not None:
            timer.cancel()

    def end(self, transport: asyncio.Transport | None) -> None:
        """Note that a request has ended."""
        self.busy.discard(transport)
        if transport is not None and (owner := self._owners.get(transport)) is not None:
            own = self._of[owner]
            own[transport] = own.pop(transport)  # now the last one

    def close(self, path: str) -> None:
        """Close the connections to a unix socket, each after the request that it is busy with."""
        for transport, handler in list(self._of.get(path, {}).items()):
            handler.close()
            if transport not in self.busy:
                # A client that does not read keeps an ordered end from coming.
                (transport.abort if transport.get_write_buffer_size() else transport.close)()

    def _add(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        owner = self._owners[transport] = _owner(transport)
        own = self._of.setdefault(owner, {})
        own[transport] = handler
        self._silent[transport] = asyncio.get_running_loop().call_later(_HEAD_S, self._cut, transport)
        if isinstance(owner, str) and len(own) > EACH:
            self._log.warning("more than %d connections to a session's socket; those unused for longest are cut", EACH)
            self._cut_one(own)
        elif len(self._owners) > self.most:
            self._log.warning("more than %d connections; some of those who have the most are cut", self.most)
            self._cut_one(max(self._of.values(), key=len))

    def _cut_one(self, own: dict[asyncio.Transport, web.RequestHandler]) -> None:
        self._cut(next((one for one in own if one not in self.busy), next(iter(own))))

    def _cut(self, transport: asyncio.Transport) -> None:
        self._remove(transport)  # now: the end is told later
        transport.abort()

    def _remove(self, transport: asyncio.Transport | None) -> None:
        if (timer := self._silent.pop(transport, None)) is not None:
            timer.cancel()
        if transport is not None and (owner := self._owners.pop(transport, None)) is not None:
            del self._of[owner][transport]
            if not self._of[owner]:
                del self._of[owner]


async def taken(request: web.Request, writing: Awaitable[None]) -> None:
    """Wait for a write. If the client does not read in time, cut its connection and raise ConnectionResetError."""
    try:
        async with asyncio.timeout(TAKE_S):
            await writing
    except TimeoutError:
        request.protocol.logger.warning("a client did not read its reply within %g s; its connection is cut", TAKE_S)
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError from None


def _owner(transport: asyncio.Transport) -> Owner:
    """Return the path of the unix socket that a connection was made to, or else the address that it comes from."""
    path = transport.get_extra_info("sockname")
    return path if isinstance(path, str) else tuple(transport.get_extra_info("peername") or ())[:1]
