"""This module asks endpoints what they would reply in a state: OpenAI's chat completions, or Anthropic's Messages API.

If an endpoint is too busy for a request, that is made again after the time that the endpoint names (Retry-After), or
else after longer and longer pauses. Until then the endpoint gets no other request.
"""

from __future__ import annotations

import asyncio
import email.utils
import random
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from rl.ingest.states import Message, State
from rollout.proxy.calls import reply_in
from rollout.proxy.chat import chat_request, reply_of
from rollout.proxy.messages import RequestError

_TRIES = 6
_LONGEST_PAUSE_S = 120.0  # between two tries, where the endpoint names none
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
        asked |= {"system": system["content"]} if system["content"] else {}
        asked |= {"tools": state.tools} if state.tools else {}
        if self.temperature is not None:
            asked["temperature"] = self.temperature
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

    async def ask(self, client: aiohttp.ClientSession, state: State) -> Answer:
        """Return the endpoint's reply to a state. Raises DeadError, RefusedError and BusyError."""
        body, said = self.body(state), ""
        for number in range(_TRIES):
            await asyncio.sleep(max(0.0, self._not_before - time.monotonic()))
            began = time.monotonic()
            try:
                async with client.post(self._address(), json=self._limited(body), headers=self._headers()) as reply:
                    raw = await _whole(reply)
            except (aiohttp.ClientConnectorError, aiohttp.InvalidURL) as error:
                raise DeadError(f"{self.name}: {self.url} cannot be reached: {error}") from error
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                said = str(error) or f"no reply in {self.patience_s:g} s"
                self._wait(number, None)
                continue
            if reply.status == 200:
                try:
                    return self._answer(raw, time.monotonic() - began)
                except RequestError as error:
                    said = str(error)
                    self._wait(number, None)
                    continue
            said = f"status {reply.status}: {' '.join(raw[:2000].decode('utf-8', 'replace').split())[:300]}"
            if reply.status in _DEAD:
                raise DeadError(f"{self.name}: {self.url}: {said}")
            if reply.status in _BUSY or reply.status >= 500:
                self._wait(number, reply.headers.get("Retry-After"))
            elif self._limit == "max_tokens" and b"max_completion_tokens" in raw:
                self._limit = "max_completion_tokens"  # newer models of OpenAI
            else:
                raise RefusedError(said)
        raise BusyError(f"asked {_TRIES} times: {said}")

    def _answer(self, raw: bytes, seconds: float) -> Answer:
        if self.protocol == "chat":
            reply = reply_of(raw)
            made, used = list(reply.blocks), (reply.input_tokens, reply.output_tokens)
        else:
            message = reply_in(raw)
            if message is None:
                raise RequestError(f"the reply is no message: {raw[:200].decode('utf-8', 'replace')}")
            usage = message.get("usage") or {}
            names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
            made, used = (
                message["content"],
                (sum(_count(usage.get(n)) for n in names), _count(usage.get("output_tokens"))),
            )
        return Answer({"role": "assistant", "content": made}, *used, seconds)

    def _wait(self, number: int, named: str | None) -> None:
        """Ask nothing more for as long as the endpoint has named, else for a growing time."""
        pause = min(_LONGEST_PAUSE_S, 2.0**number * (0.5 + random.random())) * self.pause
        if named is not None and (told := _seconds(named)) is not None:
            pause = told
        self._not_before = max(self._not_before, time.monotonic() + pause)

    def _limited(self, body: dict[str, Any]) -> dict[str, Any]:
        if self._limit == "max_tokens":
            return body
        return {self._limit if key == "max_tokens" else key: value for key, value in body.items()}

    def _address(self) -> str:
        return self.url.rstrip("/") + ("/v1/messages" if self.protocol == "messages" else "/chat/completions")

    def _headers(self) -> dict[str, str]:
        if self.protocol == "messages":
            return {"anthropic-version": "2023-06-01", **({"x-api-key": self.key} if self.key else {})}
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}


async def _whole(reply: aiohttp.ClientResponse) -> bytes:
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
        return min(max(0.0, float(named)), 3600.0)
    except ValueError:
        pass
    try:
        return min(max(0.0, email.utils.parsedate_to_datetime(named).timestamp() - time.time()), 3600.0)
    except (TypeError, ValueError):
        return None
