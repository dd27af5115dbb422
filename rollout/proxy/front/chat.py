"""The front end for OpenAI's chat completions; no I/O.

The format is documented at https://platform.openai.com/docs/api-reference/chat. Thinking is ``reasoning_content``, as
vLLM, DeepSeek and Qwen have it, for which OpenAI's own format has no place.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from rollout.proxy.blocks import Block
from rollout.proxy.front import openai
from rollout.proxy.front.base import Answer, Front, Translated
from rollout.proxy.front.translating import (
    FREE_MARK,
    Asked,
    Tool,
    arguments_of,
    at_most,
    call,
    calls_of,
    choice,
    free_text,
    image,
    message,
    offered,
    refused,
    request_of,
    thinking_of,
)
from rollout.proxy.replies import Reply, data_event
from rollout.proxy.tree import Tree
from rollout.proxy.wire import RequestError, WireRequest, decoded_as, read_body

FINISHED = {"max_tokens": "length", "tool_use": "tool_calls"}
# Parts that a text policy reads a placeholder for.
_MEDIA = ("input_audio", "file", "video_url")


class _Typed(msgspec.Struct):
    type: str = "text"


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Request(Asked):
    messages: list[msgspec.Raw]
    model: str = ""
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    tools: msgspec.Raw = msgspec.Raw(b"null")
    tool_choice: str | _Typed | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: int | None = None
    logprobs: bool | None = None
    response_format: _Typed | None = None
    functions: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def items(self) -> list[msgspec.Raw]:
        return self.messages


class _Function(msgspec.Struct):
    name: str
    arguments: str = ""
    description: str | None = None
    parameters: msgspec.Raw = msgspec.Raw(b"null")


class _Free(msgspec.Struct):
    name: str
    input: str = ""
    description: str | None = None


class _Call(msgspec.Struct):
    id: str = ""
    function: _Function | None = None
    custom: _Free | None = None


class _Url(msgspec.Struct):
    url: str


class _Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: _Url | None = None


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[msgspec.Raw] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


_request = msgspec.json.Decoder(_Request)
_message = msgspec.json.Decoder(_Message)
_part = msgspec.json.Decoder(_Part)
_tools = msgspec.json.Decoder(list[_Call] | None)


class _Answer(Answer):
    def __init__(self, asked: _Request, reply_id: str, input_tokens: int) -> None:
        super().__init__(reply_id, asked.model, input_tokens)
        self._marks = asked.marks
        self._usage = bool(asked.stream_options and asked.stream_options.include_usage)

    def whole(self, reply: Reply) -> Any:
        said = {"role": "assistant", "content": reply.text or None, **self._thought(reply)}
        if calls := [self._call(block) for block in calls_of(reply)]:
            said["tool_calls"] = calls
        finished = FINISHED.get(reply.stop_reason, "stop")
        only = {"index": 0, "message": said, "logprobs": None, "finish_reason": finished}
        return self._body("chat.completion", [only]) | {"usage": usage(reply)}

    def begin(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def rest(self, reply: Reply) -> bytes:
        deltas: list[Block] = [thought] if (thought := self._thought(reply)) else []
        if reply.text:
            deltas.append({"content": reply.text})
        deltas += [{"tool_calls": [{"index": at, **self._call(b)}]} for at, b in enumerate(calls_of(reply))]
        out = [*map(self._chunk, deltas), self._chunk({}, FINISHED.get(reply.stop_reason, "stop"))]
        if self._usage:
            out.append(data_event(self._body("chat.completion.chunk", []) | {"usage": usage(reply)}))
        return b"".join([*out, b"data: [DONE]\n\n"])

    def failed(self, error: RequestError) -> bytes:
        return data_event({"error": openai.failure(error)})

    def _body(self, kind: str, choices: list[Block]) -> Block:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _chunk(self, delta: Block, finished: str | None = None) -> bytes:
        only = {"index": 0, "delta": delta, "finish_reason": finished}
        return data_event(self._body("chat.completion.chunk", [only]))

    def _thought(self, reply: Reply) -> Block:
        return {"reasoning_content": thought} if (thought := thinking_of(reply)) else {}

    def _call(self, block: Block) -> Block:
        if self._marks.get(block["name"]) == FREE_MARK:
            said = {"name": block["name"], "input": free_text(block)}
            return {"id": block["id"], "type": "custom", "custom": said}
        function = {"name": block["name"], "arguments": arguments_of(block)}
        return {"id": block["id"], "type": "function", "function": function}


class Chat(Front[_Request]):
    """A Chat answers POST /v1/chat/completions."""

    name = "chat"

    def read(self, body: bytes, path: str) -> _Request:
        """Decode a body. Raises RequestError, also for what a reply cannot be made to be."""
        asked = read_body(_request, body)[0]
        at_most(asked.messages, "messages")
        if asked.n not in (None, 1):
            raise refused("n: only 1")
        if asked.logprobs:
            raise refused("logprobs", "are not given")
        if asked.response_format is not None and asked.response_format.type != "text":
            raise refused("response_format: only text")
        if bytes(asked.functions) not in (b"null", b"[]"):
            raise RequestError("functions are not supported: offer them as tools")
        return asked

    def new_bytes(self, asked: _Request, known: Translated, tree: Tree) -> int:
        """Return how many bytes of a request have to be translated."""
        units = known.units
        new = [len(raw) for raw, at in zip(asked.items, asked.digests, strict=True) if at not in units]
        return sum(new) + known.new_heads(asked.tools)

    def wire(self, asked: _Request, known: Translated, tree: Tree) -> WireRequest:
        """Return a request in the form of the Messages API. Raises RequestError."""
        tools, asked.marks = known.tools(asked.tools, lambda raw: offered(_offered(raw)))
        units = [
            known.units.get(digest) or known.keep(digest, _translate(raw, f"messages[{at}]"))
            for at, (raw, digest) in enumerate(zip(asked.messages, asked.digests, strict=True))
        ]
        chosen = asked.tool_choice
        return request_of(
            [raw for raw, _ in units],
            [digest for _, digest in units],
            model=asked.model,
            max_tokens=asked.max_completion_tokens or asked.max_tokens,
            tools=tools,
            stop_sequences=[asked.stop] if isinstance(asked.stop, str) else asked.stop,
            tool_choice=choice(chosen if chosen is None or isinstance(chosen, str) else chosen.type),
            stream=asked.stream,
        )

    def answer(self, asked: _Request, reply_id: str, input_tokens: int) -> Answer:
        """Return what writes the reply to a request."""
        return _Answer(asked, reply_id, input_tokens)

    def error(self, error: RequestError, asked: _Request | None = None) -> tuple[int, Any]:
        """Return the status and the body of an error."""
        return openai.failed(error)


FRONT = Chat()


def usage(reply: Reply) -> dict[str, Any]:
    """Return what a reply took."""
    total = reply.input_tokens + reply.output_tokens
    return {"prompt_tokens": reply.input_tokens, "completion_tokens": reply.output_tokens, "total_tokens": total}


def _offered(raw: msgspec.Raw) -> list[Tool]:
    tools: list[Tool] = []
    for at, tool in enumerate(decoded_as(_tools, raw, "tools") or ()):
        if tool.function is not None:
            tools.append(Tool(tool.function.name, tool.function.description, tool.function.parameters))
        elif tool.custom is not None:
            tools.append(Tool(tool.custom.name, tool.custom.description, free=True))
        else:
            raise RequestError(f"tools[{at}]: a function or a custom tool is required")
    return tools


def _translate(raw: msgspec.Raw, field: str) -> Block:
    said = decoded_as(_message, raw, field)
    content = said.content
    if isinstance(content, list):
        content = [_block(part, f"{field}.content[{at}]") for at, part in enumerate(content)]
    if said.role == "tool":
        if not said.tool_call_id:
            raise RequestError(f"{field}.tool_call_id: a tool message names its call")
        return message("user", [{"type": "tool_result", "tool_use_id": said.tool_call_id, "content": content or ""}])
    if said.role != "assistant":
        return message("user" if said.role == "user" else "system", content or "")
    blocks: list[Block] = []
    if thought := said.reasoning_content or said.reasoning:
        blocks.append({"type": "thinking", "thinking": thought})
    if content:
        blocks += [{"type": "text", "text": content}] if isinstance(content, str) else content
    for made in said.tool_calls or ():
        if made.function is not None:
            blocks.append(call(made.id, made.function.name, made.function.arguments))
        elif made.custom is not None:
            blocks.append(call(made.id, made.custom.name, msgspec.json.encode({"input": made.custom.input}).decode()))
    return message("assistant", blocks)


def _block(raw: msgspec.Raw, field: str) -> Block:
    part = decoded_as(_part, raw, field)
    if part.type in ("text", "refusal") and (said := part.refusal if part.text is None else part.text) is not None:
        return {"type": "text", "text": said}
    if part.type == "image_url" and part.image_url is not None:
        return image(part.image_url.url)
    if part.type in _MEDIA:
        return {"type": part.type, "source": {"data": bytes(raw).decode("utf-8", "replace")}}
    raise RequestError(f"{field}: {part.type!r} is not a part that can be read")
