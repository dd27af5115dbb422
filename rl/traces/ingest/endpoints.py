"""Ask endpoints what they would reply in a state: OpenAI's chat completions, or Anthropic's Messages API.

If an endpoint is too busy for a request, that is made again after the time that the endpoint names (Retry-After), or
else after longer and longer pauses. Until then the endpoint gets no other request.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import random
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from rl.traces.ingest.states import Message, State
from rollout.proxy.calls import reply_in
from rollout.proxy.chat import ChatEndpoint, chat_request, reply_of
from rollout.proxy.forward import SideEndpoint
from rollout.proxy.messages import RequestError, check_blocks

_TRIES = 6
_LONGEST_PAUSE_S = 120.0  # between two tries, where the endpoint names none
_LONGEST_WAIT_S = 3600.0  # that an endpoint can name
_LONGEST_ANSWER = 32 << 20  # bytes of a body
# A server that answers with such a status may answer the same request later.
_BUSY = {408, 409, 425, 429}
_DEAD = {401, 403, 404, 405}


class DeadError(Exception):
    """An endpoint answers nothing: not there, or it refuses us. The message says what, in one line."""


class RefusedError(Exception):
    """An endpoint refuses one request (it is too long, or has what the model cannot read)."""


class BusyError(Exception):
    """An endpoint has not answered a request, however often it was asked."""


class Answer(msgspec.Struct):
    """An answer is a reply to a state. ``seconds``: of the request that succeeded."""

    action: Message
    input_tokens: int
    output_tokens: int
    seconds: float


@dataclass
class Endpoint:
    """An endpoint is a model behind a URL.

    ``protocol``: chat (``url``/chat/completions) or messages (``url``/v1/messages). ``key``: its key or None. Prices
    are in dollars per million tokens, None if they are not known. ``patience_s``: the longest time for one reply, in
    seconds. ``pause``: a factor for the seconds between two tries.
    """

    name: str
    url: str
    model: str
    protocol: str = "chat"
    key: str | None = field(default=None, repr=False)
    price_in: float | None = None
    price_out: float | None = None
    concurrency: int = 4
    max_tokens: int = 4096
    temperature: float | None = None
    patience_s: float = 300.0
    pause: float = 1.0
    _limit: str = "max_tokens"
    _not_before: float = 0.0

    def body(self, state: State) -> dict[str, Any]:
        """Return the request that asks for a reply to ``state``. Raises RefusedError."""
        system, *talk = state.messages
        asked: dict[str, Any] = {"messages": talk, "max_tokens": self.max_tokens}
        asked |= {} if self.temperature is None else {"temperature": self.temperature}
        asked |= {"system": system["content"]} if system["content"] else {}
        asked |= {"tools": state.tools} if state.tools else {}
        if self.protocol == "messages":
            # Only some models take system messages within a conversation.
            asked["messages"] = [{**one, "role": "user"} if one["role"] == "system" else one for one in talk]
            return {**asked, "model": self.model}
        try:
            return chat_request(asked, self.model)
        except RequestError as error:
            raise RefusedError(str(error)) from error

    def cost(self, input_tokens: int, output_tokens: int) -> float:
        """Return the price of tokens in dollars, 0 for what has no known price."""
        return (input_tokens * (self.price_in or 0.0) + output_tokens * (self.price_out or 0.0)) / 1e6

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncGenerator[aiohttp.ClientSession]:
        """Yield what makes this endpoint's requests, with its key, until the block is left. It takes nothing from the
        environment."""
        key = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers=self._server.headers() | key,
            timeout=aiohttp.ClientTimeout(total=self.patience_s),
            auto_decompress=False,  # what is packed can be any size
        ) as client:
            yield client

    async def ask(self, client: aiohttp.ClientSession, state: State) -> Answer:
        """Return the endpoint's reply to a state. client: see ``connected``.

        Raises DeadError, RefusedError and BusyError.
        """
        body, said = self.body(state), ""
        for number in range(_TRIES):
            await asyncio.sleep(max(0.0, self._not_before - time.monotonic()))
            began, named = time.monotonic(), None
            sent = self._limit  # requests at once may learn the other name meanwhile
            limited = {sent if key == "max_tokens" else key: value for key, value in body.items()}
            try:
                asked = client.post(self._server.address("/v1/messages"), json=limited, allow_redirects=False)
                async with asked as reply:
                    raw = await _whole(reply)
                if reply.status < 300:
                    return self._answer(raw, time.monotonic() - began)
                said = f"status {reply.status}: {' '.join(raw[:2000].decode('utf-8', 'replace').split())[:300]}"
                named = reply.headers.get("Retry-After")
                if reply.status in _DEAD or reply.status < 400:  # it leads elsewhere
                    raise DeadError(f"{self.name}: {self.url}: {said}")
                if reply.status not in _BUSY and reply.status < 500:
                    if sent != "max_tokens" or b"max_completion_tokens" not in raw:
                        raise RefusedError(said)
                    self._limit = "max_completion_tokens"  # newer models of OpenAI
                    continue
            except (aiohttp.ClientConnectorError, aiohttp.InvalidURL) as error:
                raise DeadError(f"{self.name}: {self.url} cannot be reached: {error}") from error
            except (aiohttp.ClientError, RequestError, ValueError) as error:
                said = str(error) or type(error).__name__
            except TimeoutError:
                said = f"no reply in {self.patience_s:g} s"
            self._wait(number, named)
        raise BusyError(f"asked {_TRIES} times: {said}")

    @property
    def _server(self) -> SideEndpoint:
        """Return the endpoint as the proxy would ask it."""
        return (ChatEndpoint if self.protocol == "chat" else SideEndpoint)(self.url, self.model)

    def _answer(self, raw: bytes, seconds: float) -> Answer:
        """Return the answer in a body. Raises RequestError."""
        if self.protocol == "chat":
            reply = reply_of(raw)
            action: Message = {"role": "assistant", "content": [*reply.blocks]}
            return Answer(action, reply.input_tokens, reply.output_tokens, seconds)
        message = reply_in(raw)
        if message is None:
            raise RequestError(f"the reply is no message: {raw[:200].decode('utf-8', 'replace')}")
        check_blocks(message["content"], "content")
        usage = used if isinstance(used := message.get("usage"), dict) else {}
        read = [usage.get(f"{kind}input_tokens") for kind in ("", "cache_creation_", "cache_read_")]
        action = {"role": "assistant", "content": message["content"]}
        return Answer(action, sum(map(_count, read)), _count(usage.get("output_tokens")), seconds)

    def _wait(self, number: int, named: str | None) -> None:
        """Ask nothing more for as long as the endpoint has named, else for a growing time."""
        pause = _seconds(named) if named is not None else None
        if pause is None:
            pause = min(_LONGEST_PAUSE_S, 2.0**number * (0.5 + random.random())) * self.pause
        self._not_before = max(self._not_before, time.monotonic() + pause)


async def _whole(reply: aiohttp.ClientResponse) -> bytes:
    """Return the body of a response, be it an error's, up to a limit. Raises ValueError."""
    raw = bytearray()
    async for chunk in reply.content.iter_any():
        raw += chunk
        if len(raw) > _LONGEST_ANSWER:
            raise ValueError(f"a reply of more than {_LONGEST_ANSWER >> 20} MiB")
    return bytes(raw)


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def _seconds(named: str) -> float | None:
    """Return the seconds that a Retry-After header names, as a number or as a date; None if it names none."""
    try:
        seconds = float(named)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(named).timestamp() - time.time()
        except (TypeError, ValueError):
            return None
    return min(max(0.0, seconds), _LONGEST_WAIT_S)
