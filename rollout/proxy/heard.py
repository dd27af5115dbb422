"""This module is the proxy of a collection, or of a run with a store: one that keeps what was said (``calls``)."""

from __future__ import annotations

import time
import weakref
from typing import Any, Protocol

from aiohttp import web

from rollout import SIDE_MODEL
from rollout.proxy.calls import CallRecord, Conversation, reply_in
from rollout.proxy.forward import HEARD
from rollout.proxy.messages import WireRequest
from rollout.proxy.passthrough import PassThrough
from rollout.proxy.server import ProxyServer
from rollout.proxy.session import Call, Session
from rollout.proxy.wire import decode_request


class Spoken(Protocol):
    """A Spoken can hold a conversation; it stands for a record, which belongs to a higher layer."""

    parts: list[bytes]
    calls: list[CallRecord]


_NODE = web.RequestKey("node", int)


class Hearing(ProxyServer):
    """A Hearing is a proxy that keeps the conversations of its sessions as long as these are in use."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._talks: weakref.WeakKeyDictionary[Session, Conversation] = weakref.WeakKeyDictionary()

    def conversation(self, session: Session) -> Conversation:
        """Return what was said in a session so far."""
        return self._talks.setdefault(session, Conversation())

    def tell(self, record: Spoken, session: Session | None) -> Conversation:
        """Add what was said in a session to the episode's record, and return it."""
        talk = Conversation() if session is None else self.conversation(session)
        record.parts, record.calls = talk.parts, talk.calls
        return talk

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        request[HEARD] = heard = bytearray()
        began = time.time()
        session, body = await self.receive(request)
        response = await super()._messages(request)
        if _NODE in request or (heard and response.status == 200):
            wire, talk = decode_request(body), self.conversation(session)
            call = CallRecord([], side=wire.model == SIDE_MODEL, started=began, seconds=time.time() - began)
            if _NODE in request:
                call.node = request[_NODE]
            elif (reply := reply_in(bytes(heard))) is None:
                talk.lost += 1
                return response
            else:
                call.reply = reply
            talk.add(wire, call)
        return response

    async def _whole(self, request: web.Request, wire: WireRequest, call: Call, sampled: Any) -> Any:
        return self._noted(request, await super()._whole(request, wire, call, sampled))

    async def _stream(self, request: web.Request, wire: WireRequest, call: Call, sampled: Any) -> Any:
        return self._noted(request, await super()._stream(request, wire, call, sampled))

    def _noted(self, request: web.Request, done: Any) -> Any:
        if done[1] is not None:
            request[_NODE] = done[1].index
        return done


class HearingPassThrough(Hearing, PassThrough):
    """A HearingPassThrough forwards all calls, and keeps the conversations."""
