"""Ask endpoints what they would reply in a state: chat completions (OpenAI's SDK) or the Messages API (Anthropic's).

If an endpoint is too busy for a request, that is made again after the time that the endpoint names (Retry-After), or
else after longer and longer pauses. Until then the endpoint gets no other request, which is why the SDKs, which know of
one request only, try nothing again here; OpenAI's would also give up where more than two minutes are named.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import importlib
import os
import random
import re
import ssl
import time
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rl.traces.ingest.states import Message, State
from rollout.proxy.calls import reply_in
from rollout.proxy.chat import chat_request, reply_of
from rollout.proxy.messages import RequestError, check_blocks

_TRIES = 6
_LONGEST_PAUSE_S = 120.0  # between two tries, where the endpoint names none
_LONGEST_WAIT_S = 3600.0  # that an endpoint can name
_LONGEST_ANSWER = 32 << 20  # bytes of a body
# A server that answers with such a status may answer the same request later.
_BUSY = {408, 409, 425, 429}
_HTTP: dict[str, Any] = {"trust_env": False, "timeout": None, "follow_redirects": False}
_HTTP["headers"] = {"Accept-Encoding": "identity"}
_DEAD = {401, 403, 404, 405}
# What the SDKs would take from the environment for what they are not given, and what leads requests elsewhere.
_SETTINGS = re.compile("OPENAI_.*|ANTHROPIC_.*|.*_PROXY", re.IGNORECASE)


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
    async def connected(self) -> AsyncGenerator[Any]:
        """Yield the SDK's client for this endpoint until the block is left. Raises DeadError.

        It has the address and the key that it is given here; nothing comes from the environment.
        """
        sdk, verify = self._sdk(), ssl.create_default_context()
        try:
            with _no_settings():
                http = sdk.DefaultAsyncHttpxClient(verify=verify, event_hooks={"response": [_whole]}, **_HTTP)
                given = {"api_key": self.key or "none", "base_url": self.url, "http_client": http}
                given |= {"timeout": None, "max_retries": 0}
                chat = self.protocol == "chat"
                made = sdk.AsyncOpenAI(**given) if chat else sdk.AsyncAnthropic(**given, open_telemetry=False)
        except Exception as error:  # of the HTTP package, which is not the same for both SDKs
            raise DeadError(f"{self.name}: {self.url} cannot be reached: {error}") from error
        async with made as client:
            yield client

    async def ask(self, client: Any, state: State) -> Answer:
        """Return the endpoint's reply to a state. client: see ``connected``.

        Raises DeadError, RefusedError and BusyError.
        """
        sdk, body, said = self._sdk(), self.body(state), ""
        # Raw: bodies are read as the proxy reads them, for servers add what the SDKs don't know, and send broken ones.
        create = (client.messages if self.protocol == "messages" else client.chat.completions).with_raw_response.create
        # Anthropic's SDK has no argument for a temperature, which its own newer models don't take.
        more: dict[str, Any] = {"extra_body": {} if self.temperature is None else {"temperature": self.temperature}}
        more |= {} if self.key else {"extra_headers": {"Authorization": sdk.Omit()}}
        for number in range(_TRIES):
            await asyncio.sleep(max(0.0, self._not_before - time.monotonic()))
            began, named = time.monotonic(), None
            sent = self._limit  # requests at once may learn the other name meanwhile
            limited = {sent if key == "max_tokens" else key: value for key, value in body.items()}
            try:
                async with asyncio.timeout(self.patience_s):
                    reply = await create(**limited, **more)
                return self._answer(reply.http_response.content, time.monotonic() - began)
            except sdk.APIStatusError as error:
                told = error.response.text
                said = f"status {error.status_code}: {' '.join(told[:2000].split())[:300]}"
                named = error.response.headers.get("Retry-After")
                if error.status_code in _DEAD or error.status_code < 400:  # it leads elsewhere
                    raise DeadError(f"{self.name}: {self.url}: {said}") from error
                if error.status_code not in _BUSY and error.status_code < 500:
                    if sent != "max_tokens" or "max_completion_tokens" not in told:
                        raise RefusedError(said) from error
                    self._limit = "max_completion_tokens"  # newer models of OpenAI
                    continue
            except sdk.APIConnectionError as error:
                why = error.__cause__ or error
                if type(why).__name__ in ("ConnectError", "UnsupportedProtocol"):
                    raise DeadError(f"{self.name}: {self.url} cannot be reached: {why}") from error
                said = str(why) or type(why).__name__
            except (RequestError, ValueError) as error:
                said = str(error)
            except TimeoutError:
                said = f"no reply in {self.patience_s:g} s"
            self._wait(number, named)
        raise BusyError(f"asked {_TRIES} times: {said}")

    def _sdk(self) -> Any:
        """Return the SDK. It is imported late: that takes seconds."""
        return importlib.import_module("anthropic" if self.protocol == "messages" else "openai")

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


@contextlib.contextmanager
def _no_settings() -> Generator[None]:
    """Take the SDKs' settings out of the environment until the block is left."""
    hidden = {name: os.environ.pop(name) for name in [*os.environ] if _SETTINGS.fullmatch(name)}
    try:
        yield
    finally:
        os.environ.update(hidden)


async def _whole(response: Any) -> None:
    """Read the body of a response, be it an error's, as the SDK would do it, up to a limit. Raises ValueError."""
    raw = bytearray()
    async for chunk in response.aiter_raw():  # what is packed can be any size
        raw += chunk
        if len(raw) > _LONGEST_ANSWER:
            raise ValueError(f"a reply of more than {_LONGEST_ANSWER >> 20} MiB")
    response._content = bytes(raw)  # as ``aread`` keeps it


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
