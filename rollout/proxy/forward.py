"""Forward calls to another endpoint: side calls in training, all calls when a hosted model is evaluated.

The request is sent on as it came, except for the model's name, and the reply is returned byte for byte, except for an
id that is missing or was there before. Nothing of either enters the session tree. The endpoint's key belongs to the
proxy; the agent never sees it.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass, field
from typing import Any, ClassVar

import aiohttp
import msgspec
from aiohttp import web

from rollout.proxy.calls import reply_in
from rollout.proxy.connections import taken
from rollout.proxy.messages import RequestError, check_blocks
from rollout.proxy.replies import Reply
from rollout.proxy.wire import BrokenOffError, EndpointError

_BEGUN = re.compile(rb'"message_start".*?\n\r?\n', re.DOTALL)  # the end of the event that has a reply's id
_FAILED = re.compile(rb"^event: ?error\r?\n(.{0,2000})", re.MULTILINE)  # a reply that begins with status 200 may end so
_LATEST = 1 << 20  # bytes of a line in which it is looked for
_JSON = re.compile(rb"\s*\{")
_LARGEST = 32 << 20  # bytes of a reply
PLAIN = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
_REFUSED = (400, 413, 422)  # statuses that blame the request
_ENDLESS = f"a reply of more than {_LARGEST >> 20} MiB"


@dataclass
class SideEndpoint:
    """A SideEndpoint is a server of the Anthropic Messages API at ``url``/v1/messages.

    ``model``: its name for the model to use; ``key``: sent as x-api-key unless it is None; ``timeout_s``: the longest
    time for one whole reply, in seconds. ``relays``: whether its replies can be returned byte for byte.
    """

    relays: ClassVar[bool] = True
    url: str
    model: str
    key: str | None = field(default=None, repr=False)
    timeout_s: float = 600.0
    _answers: bool = field(default=False, repr=False)
    _client: aiohttp.ClientSession | None = field(default=None, repr=False)

    def address(self, path: str) -> str:
        """Return the URL of one of the Messages API's paths."""
        return self.url.rstrip("/") + path

    def headers(self) -> dict[str, str]:
        """Return the headers of every request."""
        key = {"x-api-key": self.key} if self.key else {}
        return {**PLAIN, "anthropic-version": "2023-06-01", **key}

    def hello(self) -> dict[str, Any]:
        """Return the body of a request that costs next to nothing."""
        return {"model": self.model, "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}

    def blamed(self, status: int) -> bool:
        """Take in the status of an answer; return whether it is a failure of the endpoint.

        Any program in an agent's box can ask what every endpoint refuses. So a refusal counts only until a call was
        answered: an endpoint that is set up wrongly answers none.
        """
        self._answers |= status < 300
        return status >= 300 and not (self._answers and status in _REFUSED)

    async def relay(self, request: web.Request, body: bytes, heard: bytearray, ids: set[str]) -> web.StreamResponse:
        """Answer ``request`` with the endpoint's reply to ``body``, and return that response; ``heard`` gets its body.

        ids: those of replies before, to which this one's is added. Claude Code takes replies with one id for one reply.
        An error that the endpoint itself reports is returned as a ``web.Response``. Raises RequestError if the body
        cannot be read, EndpointError if the endpoint cannot be reached. If it breaks off in the middle of a reply, the
        agent's connection is cut and BrokenOffError is raised, as after a reply that ends with the event of an error;
        if the agent hangs up first, or does not read, ConnectionResetError is.
        """
        beta = request.headers.get("anthropic-beta")
        headers = self.headers() | ({"anthropic-beta": beta} if beta else {})
        # All other fields stay bytes, which takes a twentieth of the time of decoding them.
        fields: dict[str, Any] = read(body, dict[str, msgspec.Raw])
        changed = msgspec.json.encode(fields | {"model": self.model})
        response: web.StreamResponse | None = None
        try:
            # The key is for this endpoint, not for where that leads.
            asked = self.http().post(self.address(request.path), data=changed, headers=headers, allow_redirects=False)
            async with asked as reply:
                if reply.status >= 300:
                    told = bytes(await body_of(reply))
                    return web.Response(status=reply.status, headers=_kept(reply.headers), body=told)
                response = web.StreamResponse(status=reply.status, headers=_kept(reply.headers))
                await response.prepare(request)
                head: bytearray | None = bytearray()  # what was not sent on yet, until the id is known
                async for chunk in reply.content.iter_any():
                    if len(heard) + len(head or b"") + len(chunk) > _LARGEST:
                        raise aiohttp.ClientPayloadError(_ENDLESS)
                    if head is not None:
                        head += chunk
                        if _JSON.match(head):
                            continue
                        lines = head.rfind(b"\n") + 1
                        if b'"message_start"' not in head and len(head) - lines < _LATEST:
                            chunk, head = bytes(head[:lines]), head[lines:]  # comments and pings, which keep it open
                        elif _BEGUN.search(head) or len(head) >= _LATEST:
                            chunk, head = _named(bytes(head), ids), None
                        else:
                            continue
                    heard += chunk
                    await taken(request, response.write(chunk))
                rest = _named(bytes(head), ids) if head else b""
                heard += rest
                await taken(request, response.write_eof(rest))
                if failed := _FAILED.search(heard):
                    raise BrokenOffError(failed[1].decode("utf-8", "replace"))
                return response
        except (aiohttp.ClientError, TimeoutError) as error:
            if response is None:
                raise EndpointError("the endpoint cannot be reached", 529, "overloaded_error") from error
            if request.transport is None or request.transport.is_closing():
                raise ConnectionResetError from error  # it was the agent that hung up
            request.transport.abort()
            raise BrokenOffError(f"endpoint {self.url}: {error}") from error

    async def ask(self, body: bytes) -> Reply:
        """Return the endpoint's whole reply to a request of the Messages API. Raises RequestError and EndpointError."""
        fields: dict[str, Any] = read(body, dict[str, msgspec.Raw])
        changed = msgspec.json.encode(fields | {"model": self.model, "stream": False})
        status, raw = await self.post(changed)
        if status >= 300:
            said = raw[:2000].decode("utf-8", "replace")
            try:
                failure = msgspec.json.decode(raw, type=_Failed).error
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                failure = _Failure("api_error", said)
            raise EndpointError(failure.message, status if status >= 400 else 529, failure.type)
        told = reply_in(raw) or {}
        try:
            check_blocks(told.get("content", ""), "content")
            usage = msgspec.convert(told.get("usage"), _Usage)
            reason = msgspec.convert(told.get("stop_reason"), str)
        except (RequestError, msgspec.ValidationError) as error:
            raise EndpointError("the reply is not a message of the Messages API", 529, "overloaded_error") from error
        return Reply(f"msg_{uuid.uuid4().hex}", (*told["content"],), reason, usage.input_tokens, usage.output_tokens)

    async def post(self, body: bytes) -> tuple[int, bytes]:
        """Send a request; return the answer's status and body. Raises EndpointError if there is none."""
        url = self.address("/v1/messages")
        try:
            # The key is for this endpoint, not for where that leads.
            async with self.http().post(url, data=body, headers=self.headers(), allow_redirects=False) as answer:
                return answer.status, bytes(await body_of(answer))
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EndpointError("the endpoint cannot be reached", 529, "overloaded_error") from error

    def http(self) -> aiohttp.ClientSession:
        """Return what makes requests. Each call may have a connection: waiting for one is not its failure."""
        if self._client is None:
            self._client = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0),
                timeout=aiohttp.ClientTimeout(total=self.timeout_s),
                auto_decompress=False,
            )
        return self._client

    async def close(self) -> None:
        """Close the connections to the endpoint."""
        if self._client is not None:
            await self._client.close()
            self._client = None


class _Failure(msgspec.Struct):
    type: str
    message: str


class _Failed(msgspec.Struct):
    error: _Failure


class _Usage(msgspec.Struct):
    input_tokens: int = 0
    output_tokens: int = 0


def read(body: bytes, kind: Any = Any) -> Any:
    """Return what a request's body says, as a ``kind``. Raises RequestError."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body cannot be read: {error}") from error


async def body_of(reply: aiohttp.ClientResponse) -> bytearray:
    """Return the body of a response. Raises aiohttp.ClientPayloadError if it has no end."""
    body = bytearray()
    async for chunk in reply.content.iter_any():
        body += chunk
        if len(body) > _LARGEST:
            raise aiohttp.ClientPayloadError(_ENDLESS)
    return body


def _kept(headers: Any) -> dict[str, str]:
    wanted = ("Content-Type", "Content-Encoding", "Retry-After", "request-id")
    return {name: headers[name] for name in wanted if name in headers}


def _named(head: bytes, ids: set[str]) -> bytes:
    """Return a reply, or the beginning of one that is streamed, with an id that is not among ``ids``."""
    whole = head.lstrip()[:1] == b"{"
    lines = [head] if whole else head.splitlines(keepends=True)
    for number, line in enumerate(lines):
        if not whole and b'"message_start"' not in line:
            continue
        try:
            told = msgspec.json.decode(line if whole else line.removeprefix(b"data:"))
            message = told if whole else told["message"]
            name = message.get("id")
            if "content" in message and (not name or not isinstance(name, str) or name in ids):
                message["id"] = f"msg_{uuid.uuid4().hex}"
                changed = msgspec.json.encode(told)
                lines[number] = changed if whole else b"data: " + changed + b"\n"
            ids.add(message["id"])
        except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError, AttributeError, RecursionError):
            continue  # what is no reply goes on as it is
    return b"".join(lines)
