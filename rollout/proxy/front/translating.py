"""Translate what several APIs have: items, calls, tools, images; no I/O."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import msgspec

from rollout.proxy.blocks import Block
from rollout.proxy.replies import Reply
from rollout.proxy.wire import MOST_MESSAGES, RequestError, WireRequest, WireToolChoice, checked, decoded_as, hashed

# The name of the one argument of a tool that takes any text, where an API has such tools.
FREE = "input"
FREE_MARK = ""

# How a translated system message begins; its content is what comes next.
_SYSTEM = b'{"role":"system","content":'
_NOTHING = msgspec.Raw(b'""')


class Tool(msgspec.Struct):
    """A Tool is a function that the client offers; ``free``: it takes any text, and has no schema. ``space``: what its
    API puts it into.
    """

    name: str
    description: str | None = None
    parameters: msgspec.Raw = msgspec.Raw(b"null")
    free: bool = False
    space: str | None = None

    @property
    def wire(self) -> Block:
        """Return the tool in the form of the Messages API."""
        text = {"type": "object", "properties": {FREE: {"type": "string"}}, "required": [FREE]}
        none = {"type": "object", "properties": {}}
        schema = text if self.free else none if bytes(self.parameters) == b"null" else self.parameters
        told = {} if self.description is None else {"description": self.description}
        return {"name": self.name, **told, "input_schema": schema}


def offered(tools: list[Tool]) -> tuple[list[Block], dict[str, str]]:
    """Return tools in the form of the Messages API, and the names of those that are more than functions, each with its
    space or FREE_MARK.
    """
    marks = {tool.name: FREE_MARK if tool.free else tool.space for tool in tools}
    return [tool.wire for tool in tools], {name: mark for name, mark in marks.items() if mark is not None}


class Asked(msgspec.Struct, dict=True):
    """An Asked is a decoded request of a translated API. ``marks``: of its tools (``offered``)."""

    def __post_init__(self) -> None:
        self.marks: dict[str, str] = {}

    @property
    def items(self) -> list[msgspec.Raw]:
        """Return what the conversation consists of."""
        raise NotImplementedError

    @functools.cached_property
    def digests(self) -> list[bytes]:
        """Return a hash of each item."""
        return [hashed(raw) for raw in self.items]


def request_of(
    messages: list[msgspec.Raw], digests: list[bytes], system: msgspec.Raw = _NOTHING, **fields: Any
) -> WireRequest:
    """Return a request whose parts are translated. If there is no system prompt, the first message of several is, if it
    is a system message. Raises RequestError.
    """
    if len(messages) > 1 and bytes(system) == bytes(_NOTHING) and bytes(messages[0]).startswith(_SYSTEM):
        system = msgspec.Raw(bytes(messages[0])[len(_SYSTEM) : -1])
        messages, digests = messages[1:], digests[1:]
    request = WireRequest(messages, system=system, **fields)
    request.digests = digests
    return checked(request)


def message(role: str, content: str | list[Block]) -> Block:
    """Return a message in the form of the Messages API."""
    return {"role": role, "content": content}


def at_most(items: Sequence[Any], field: str) -> None:
    """Raise RequestError if there are too many items to look at."""
    if len(items) > MOST_MESSAGES:
        raise RequestError(f"{field}: at most {MOST_MESSAGES} are possible")


def image(url: str) -> Block:
    """Return the block of an image that is given by a URL, which may hold its data."""
    head, _, data = url.partition(",")
    if head.startswith("data:"):
        source = {"type": "base64", "media_type": head[5:].partition(";")[0], "data": data}
    else:
        source = {"type": "url", "url": url}
    return {"type": "image", "source": source}


_object = msgspec.json.Decoder(dict[str, Any])


def call(call_id: str, name: str, arguments: str) -> Block:
    """Return the block of a call whose arguments are written as JSON. It is a text if they are no object."""
    raw = arguments.encode() or b"{}"
    try:
        decoded_as(_object, raw, "arguments")
    except RequestError:
        return {"type": "text", "text": f"{name}({arguments})"}
    return {"type": "tool_use", "id": call_id, "name": name, "input": msgspec.Raw(raw)}


def arguments_of(block: Block) -> str:
    """Return the arguments of a call as JSON."""
    return json.dumps(block["input"], ensure_ascii=False)


def free_text(block: Block) -> str:
    """Return the text of a call to a tool that takes any text. If it was called in another way, that is the text."""
    given = block["input"]
    return given[FREE] if list(given) == [FREE] and isinstance(given[FREE], str) else arguments_of(block)


def choice(name: str | None) -> WireToolChoice | None:
    """Return the choice of tools that a client names in OpenAI's or Gemini's words; a named tool is "any"."""
    known = {None: "auto", "auto": "auto", "none": "none"}
    return WireToolChoice(known.get(name.lower() if name else None, "any"))  # ty: ignore[invalid-argument-type]


def thinking_of(reply: Reply) -> str:
    """Return all that a reply thinks."""
    return "".join(block["thinking"] for block in reply.blocks if block["type"] == "thinking")


def calls_of(reply: Reply) -> list[Block]:
    """Return the calls of a reply."""
    return [block for block in reply.blocks if block["type"] == "tool_use"]


def refused(field: str, why: str = "is not possible here") -> RequestError:
    """Return the error for a field that cannot be honoured."""
    return RequestError(f"{field} {why}")
