"""Decode requests in the Anthropic Messages wire format; no I/O.

Every request repeats the whole conversation, so most of each body has been seen before, byte for byte. Messages are
cut out of the body without being decoded (``msgspec.Raw``); ``messages.MessageMemory`` knows which are new. While a
JSON text is decoded, no other session is answered, whatever thread does it. That takes long only if there are many
values in it, so a text with too many is refused.

The format is documented at https://docs.anthropic.com/en/api/messages; details follow what Claude Code 2.1 sends.
"""

from __future__ import annotations

import functools
import re
import secrets
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import msgspec
import xxhash

from rollout.proxy.texts import PIECE

# How the message begins by which Claude Code recognizes that a prompt does not fit.
FULL = "prompt is too long"


class RequestError(Exception):
    """A request cannot be answered. ``status`` (HTTP) and ``kind`` are those of Anthropic's table of errors, ``code``
    is OpenAI's if no other API has this error.
    """

    def __init__(
        self, message: str, status: int = 400, kind: str = "invalid_request_error", code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.code = code

    @property
    def full(self) -> bool:
        """Tell whether the prompt does not fit, upon which agents compact."""
        return str(self).startswith(FULL)

    @property
    def told(self) -> dict[str, Any]:
        """Return the body of the error response, in Anthropic's form."""
        return {"type": "error", "error": {"type": self.kind, "message": str(self)}}


class EndpointError(RequestError):
    """Another endpoint failed or refuses a call. (A RequestError of another class is the client's doing.)"""


class BrokenOffError(ConnectionResetError):
    """Another endpoint broke off in the middle of a reply, or said there that it failed."""


def closed_error() -> RequestError:
    """Return the error for a request to a closed session."""
    return RequestError("this session is closed", 410, "not_found_error")


T = TypeVar("T")


class WireMessage(msgspec.Struct):
    """A WireMessage is one message of a request, decoded."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class WireTool(msgspec.Struct, omit_defaults=True):
    """A WireTool is the definition of a tool that the client offers."""

    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None


class WireToolChoice(msgspec.Struct):
    """A WireToolChoice says whether the reply may, must or must not call tools."""

    type: Literal["auto", "any", "tool", "none"]


# The seed is random so that nobody can write a message whose hash is that of another message.
_SEED = secrets.randbits(64)


def hashed(data: bytes | msgspec.Raw) -> bytes:
    """Return a hash of bytes, which nobody can guess."""
    return xxhash.xxh3_128_digest(data, seed=_SEED)


class WireRequest(msgspec.Struct, dict=True):  # dict: for what is computed once
    """A WireRequest holds the fields of a request that are used; all other fields are accepted and ignored."""

    messages: list[msgspec.Raw]
    model: str = ""
    max_tokens: int | float | None = None
    system: msgspec.Raw = msgspec.Raw(b'""')
    tools: msgspec.Raw = msgspec.Raw(b"[]")
    stop_sequences: list[str] | None = None
    tool_choice: WireToolChoice | None = None
    stream: bool | None = None

    @functools.cached_property
    def body(self) -> bytes:
        """Return the whole request as it can be sent on. ``decode_request`` sets it to what came."""
        fields = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        if bytes(self.tools) == b"[]":  # without tools, no choice of them is taken
            fields = {name: value for name, value in fields.items() if name not in ("tools", "tool_choice")}
        return msgspec.json.encode(fields)

    @functools.cached_property
    def digests(self) -> list[bytes]:
        """Return a hash of the bytes of each message."""
        return [hashed(raw) for raw in self.messages]

    @property
    def head_size(self) -> int:
        """Return the number of bytes of system prompt and tools."""
        return len(self.system) + len(self.tools)

    @functools.cached_property
    def head_digest(self) -> bytes:
        """Return a hash of the bytes of system prompt and tools."""
        return hashed(self.system) + hashed(self.tools)


# A body of more bytes than this is decoded in a thread, and checked for too many values. Of one in which a half of a
# surrogate pair may have to be replaced, less than that takes long.
LARGE, _LARGE_WITH_HALVES = 1 << 20, 1 << 16
# The most messages of a request. What is done for each of them, before it is known what is new, takes time.
MOST_MESSAGES = 10_000
# The most values in a message, in the tools and so on (50 ms), and in a body, whose messages are only cut out.
_MOST_VALUES, _MOST_TOGETHER = 50_000, 500_000
# Each stop sequence is searched for in each reply, by the engine with each token, and kept as long as the session. The
# second limit is on the characters of all of them.
_MOST_STOPS, _LONGEST_STOPS = 100, 1 << 12
_request_decoder = msgspec.json.Decoder(WireRequest)
SYSTEM = str | list[dict[str, Any]] | None
TOOLS = list[WireTool] | None


# Any text with its escapes, but no half of a surrogate pair, and then such a half, if there is one. Each match is one
# step of a millisecond, between which other threads get their turn.
_HALF = re.compile(
    rb"((?:[^\\]{1,4096}+|\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\(?!u[dD][89a-fA-F]).){0,4096}+)(\\u[dD][89a-fA-F]..)?",
    re.DOTALL,
)


def _without_halves(body: bytes) -> bytes:
    parts, at = list[bytes](), 0
    while (found := _HALF.match(body, at)) is not None and found.end() > at:
        parts += found[1], b"\\ufffd" if found[2] else b""
        at = found.end()
    return b"".join([*parts, body[at:]])


def takes_long(body: bytes) -> bool:
    """Tell whether a body is to be decoded in a thread."""
    return len(body) > (_LARGE_WITH_HALVES if _may_have_halves(body) else LARGE)


def _may_have_halves(body: bytes) -> bool:
    return b"\\ud" in body or b"\\uD" in body


def decode_request(body: bytes) -> WireRequest:
    """Decode a request's body, except for its messages, system prompt and tools, which ``conversation`` decodes.

    Half of a surrogate pair, which is left where an agent cuts a text in two, is no character, and read as U+FFFD. Both
    functions raise RequestError, which names the field that is wrong.
    """
    request, request.body = read_body(_request_decoder, body)
    return checked(request)


def read_body(decoder: msgspec.json.Decoder[T], body: bytes) -> tuple[T, bytes]:
    """Decode a body; return what it says, and the body without halves of surrogate pairs. Raises RequestError."""
    if _may_have_halves(body):
        body = _without_halves(body)
    return _read(decoder.decode, body, "", _MOST_TOGETHER if len(body) > LARGE else len(body)), body


def checked(request: WireRequest) -> WireRequest:
    """Return a request. Raises RequestError if there is too much of something in it."""
    if not request.messages:
        raise RequestError("messages: at least one message is required")
    if len(request.messages) > MOST_MESSAGES:
        raise RequestError(f"messages: at most {MOST_MESSAGES} messages are possible")
    if len(request.stop_sequences or ()) > _MOST_STOPS:
        raise RequestError(f"stop_sequences: at most {_MOST_STOPS} are possible")
    if sum(map(len, request.stop_sequences or ())) > _LONGEST_STOPS:
        raise RequestError(f"stop_sequences: at most {_LONGEST_STOPS} characters are possible")
    if isinstance(request.max_tokens, float) and not request.max_tokens.is_integer():
        raise RequestError("max_tokens: a whole number is required")
    return request


def _more_values(text: bytes | msgspec.Raw, most: int) -> bool:
    """Tell whether a JSON text has more than ``most`` values, by the commas and brackets outside of strings.

    The text is read in pieces, and only until the answer is clear: counting five million values takes 60 ms.
    """
    view, found, inside, at = memoryview(text), 0, False, 0
    while at < len(view) and found <= most:
        piece = bytes(view[at : at + PIECE])
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # what the last one escapes belongs to it
            piece += bytes(view[at + PIECE : at + PIECE + 1])
        at += max(PIECE, len(piece))
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[inside::2])
        found += sum(map(outside.count, (b",", b"[", b"{")))
        inside ^= len(parts) % 2 == 0
    return found > most


def decoded(kind: Any, data: msgspec.Raw, field: str) -> Any:
    """Decode JSON that is kept as it came, with the fields that are not used: who reads a record has to read them, too.

    Raises RequestError, which names ``field``, also if there are too many values.
    """
    return _read(lambda text: msgspec.convert(msgspec.json.decode(text), kind), data, field, _MOST_VALUES)


def decoded_as(decoder: msgspec.json.Decoder[T], data: bytes | msgspec.Raw, field: str) -> T:
    """Decode JSON of which only what is used will be kept. Raises RequestError as ``decoded`` does."""
    return _read(decoder.decode, data, field, _MOST_VALUES)


def _read(decode: Callable[[Any], Any], data: bytes | msgspec.Raw, field: str, most: int) -> Any:
    if len(data) > most and _more_values(data, most):
        raise RequestError(f"{field or 'the body'}: more than {most} values")
    try:
        return decode(data)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = str(error) or "the body is nested too deeply"
        if field and "`$" not in text:  # the field as a whole is wrong
            text += f" - at `{field}`"
        raise RequestError(text.replace("`$", f"`{field}").replace("`.", "`")) from error
