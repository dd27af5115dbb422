"""The front end for Gemini's generateContent, streamGenerateContent and countTokens; no I/O.

The format is documented at https://ai.google.dev/api/generate-content; details follow what Gemini CLI and Google's SDKs
send. Streams are server-sent events, as with ``alt=sse``.

Calls need not have ids in this API. Those without are found by what came before them: the reply that was made for the
same contents, or the one that the signature of one of the parts names. Their results belong to them by name and order.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

import msgspec

from rollout import storable
from rollout.proxy.blocks import Block, blocks_of
from rollout.proxy.front.base import Answer, Front, Translated
from rollout.proxy.front.translating import (
    Asked,
    Tool,
    at_most,
    calls_of,
    choice,
    message,
    offered,
    refused,
    request_of,
)
from rollout.proxy.replies import Reply, data_event
from rollout.proxy.tree import Tree
from rollout.proxy.wire import RequestError, WireMessage, WireRequest, decoded_as, hashed, read_body

_VERBS = {"generateContent": False, "streamGenerateContent": True, "countTokens": False}
_STATUS = {529: 503}
_NAMES = {401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND", 408: "DEADLINE_EXCEEDED"}
_NAMES |= {410: "NOT_FOUND", 429: "RESOURCE_EXHAUSTED", 500: "INTERNAL", 503: "UNAVAILABLE"}
_FULL = "The input token count exceeds the maximum number of tokens allowed: "
_ROLES = {"user": "user", "function": "user", "tool": "user", "": "user", "model": "assistant"}
# Under these names clients put what a function has returned.
_OUTPUT = ("output", "result", "error")
_NOTHING = msgspec.Raw(b"null")


class _Camel(msgspec.Struct, rename="camel"):
    pass


class _Config(_Camel):
    max_output_tokens: int | None = None
    stop_sequences: list[str] | None = None
    candidate_count: int | None = None
    response_mime_type: str | None = None
    response_schema: msgspec.Raw = _NOTHING
    response_json_schema: msgspec.Raw = _NOTHING
    response_logprobs: bool | None = None


class _Calling(_Camel):
    mode: str | None = None


class _ToolConfig(_Camel):
    function_calling_config: _Calling | None = None


class _Request(Asked, rename="camel"):
    contents: list[msgspec.Raw] = msgspec.field(default_factory=list)
    system_instruction: msgspec.Raw = _NOTHING
    tools: msgspec.Raw = _NOTHING
    tool_config: _ToolConfig | None = None
    generation_config: _Config | None = None
    cached_content: str | None = None
    generate_content_request: msgspec.Raw = _NOTHING

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model, self.stream = "", False  # in the path
        self.known, self.place = Translated(), b""  # for what contents the reply is made

    @property
    def items(self) -> list[msgspec.Raw]:
        return self.contents


class _Call(_Camel):
    name: str = ""
    id: str | None = None
    args: msgspec.Raw = _NOTHING

    @property
    def given(self) -> msgspec.Raw:
        return msgspec.Raw(b"{}") if bytes(self.args) == b"null" else self.args


class _Blob(_Camel):
    mime_type: str = ""
    data: str | None = None
    file_uri: str | None = None

    @property
    def block(self) -> Block:
        source = {"type": "base64", "media_type": self.mime_type, "data": self.data}
        if self.data is None:
            source = {"type": "url", "media_type": self.mime_type, "url": self.file_uri}
        return {"type": "image" if self.mime_type.startswith("image/") else "document", "source": source}


class _Media(_Camel):
    inline_data: _Blob | None = None
    file_data: _Blob | None = None


class _Response(_Camel):
    name: str = ""
    id: str | None = None
    response: msgspec.Raw = _NOTHING
    parts: list[_Media] = []


class _Part(_Media):
    text: str | None = None
    thought: bool | None = None
    thought_signature: str | None = None
    function_call: _Call | None = None
    function_response: _Response | None = None


class _Content(_Camel):
    role: str = ""
    parts: list[_Part] = []


class _Function(_Camel):
    name: str
    description: str | None = None
    parameters: Any = None
    parameters_json_schema: msgspec.Raw = _NOTHING


class _Tool(_Camel):
    function_declarations: list[_Function] = []


_request = msgspec.json.Decoder(_Request)
_content = msgspec.json.Decoder(_Content)
_tools = msgspec.json.Decoder(list[_Tool] | None)
_output = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)
_message = msgspec.json.Decoder(WireMessage)
_args = msgspec.json.Decoder(dict[str, Any])
_string = msgspec.json.Decoder(str)


class _Answer(Answer):
    def whole(self, reply: Reply) -> Any:
        parts = [part for block in reply.blocks if (part := _part(block)) is not None]
        signed = next((part for part in parts if "thought" not in part), parts[-1] if parts else {})
        signed["thoughtSignature"] = base64.b64encode(self.id.encode()).decode()
        finished = "MAX_TOKENS" if reply.stop_reason == "max_tokens" else "STOP"
        return {
            "candidates": [{"content": {"role": "model", "parts": parts}, "finishReason": finished, "index": 0}],
            "usageMetadata": {
                "promptTokenCount": reply.input_tokens,
                "candidatesTokenCount": reply.output_tokens,
                "totalTokenCount": reply.input_tokens + reply.output_tokens,
            },
            "modelVersion": self.model,
            "responseId": self.id,
        }

    def ping(self) -> bytes:
        return b"\n\n"  # Google's JavaScript SDK reads no comments

    def rest(self, reply: Reply) -> bytes:
        return data_event(self.whole(reply))

    def failed(self, error: RequestError) -> bytes:
        return msgspec.json.encode(_failure(error)[1]) + b"\n"  # not an event: so Google's SDKs see it


class Gemini(Front[_Request]):
    """A Gemini answers POST VERSION/models/MODEL:generateContent, :streamGenerateContent and :countTokens; VERSION is
    /v1beta or /v1.
    """

    name = "gemini"

    def read(self, body: bytes, path: str) -> _Request:
        """Decode a body. Raises RequestError, also for what a reply cannot be made to be."""
        model, _, verb = path.partition("/models/")[2].rpartition(":")
        if verb not in _VERBS:
            raise RequestError(f"there is no {path}", 404, "not_found_error")
        asked = read_body(_request, body)[0]
        if bytes(asked.generate_content_request) != b"null":
            asked = decoded_as(_request, asked.generate_content_request, "generateContentRequest")
        asked.model, asked.stream = model.removeprefix("models/"), _VERBS[verb]
        at_most(asked.contents, "contents")
        config = asked.generation_config or _Config()
        if config.candidate_count not in (None, 1):
            raise refused("generationConfig.candidateCount: only 1")
        if config.response_logprobs:
            raise refused("generationConfig.responseLogprobs", "are not given")
        schemas = {bytes(config.response_schema), bytes(config.response_json_schema)}
        if config.response_mime_type not in (None, "", "text/plain") or schemas != {b"null"}:
            raise refused("generationConfig: only text/plain, without a schema,")
        if asked.cached_content:
            raise refused("cachedContent")
        return asked

    def new_bytes(self, asked: _Request, known: Translated, tree: Tree) -> int:
        """Return how many bytes of a request have to be translated."""
        new, place = known.new_heads(asked.tools, asked.system_instruction), b""
        for raw, digest in zip(asked.items, asked.digests, strict=True):
            key = hashed(digest + place) if known.sides.get(digest, True) else digest
            new += 0 if key in known.units else len(raw)
            place = hashed(place + digest)
        return new

    def wire(self, asked: _Request, known: Translated, tree: Tree) -> WireRequest:
        """Return a request in the form of the Messages API. Raises RequestError."""
        tools = known.tools(asked.tools, lambda raw: offered(_offered(raw)))[0]
        system = known.tools(asked.system_instruction, _system)[0]
        messages, digests, place = list[msgspec.Raw](), list[bytes](), b""
        named: dict[str, Reply] | None = None
        for at, digest in enumerate(asked.digests):
            raw, field = asked.contents[at], f"contents[{at}]"
            bound = known.sides.get(digest)
            if bound is None:
                known.keep_side(digest, bound := _bound(decoded_as(_content, raw, field)))
            key = hashed(digest + place) if bound else digest
            unit = known.units.get(key)
            if unit is None:
                if named is None:
                    named = {node.reply.id: node.reply for node in tree.nodes if node.reply is not None}
                before = messages[-1] if bound and messages else None
                made = [named[name] for name in reversed(known.replied.get(place, ())) if name in named]
                unit = known.keep(key, _translate(decoded_as(_content, raw, field), field, before, made, named, key))
            messages.append(unit[0])
            digests.append(unit[1])
            place = hashed(place + digest)
        asked.place, asked.known = place, known
        config = asked.generation_config or _Config()
        calling = asked.tool_config.function_calling_config if asked.tool_config is not None else None
        return request_of(
            messages,
            digests,
            system,
            model=asked.model,
            max_tokens=config.max_output_tokens,
            tools=tools,
            stop_sequences=config.stop_sequences,
            tool_choice=choice(calling.mode if calling else None),
            stream=asked.stream,
        )

    def answer(self, asked: _Request, reply_id: str, input_tokens: int) -> Answer:
        """Return what writes the reply to a request, and remember for which contents it is made."""
        asked.known.keep_reply(asked.place, reply_id)
        return _Answer(reply_id, asked.model, input_tokens)

    def error(self, error: RequestError, asked: _Request | None = None) -> tuple[int, Any]:
        """Return the status and the body of an error."""
        return _failure(error)

    def counted(self, tokens: int) -> Any:
        """Return the body of a count of tokens."""
        return {"totalTokens": tokens}


FRONT = Gemini()


def _failure(error: RequestError) -> tuple[int, Any]:
    status = _STATUS.get(error.status, error.status)
    said = f"{_FULL}{error}" if error.full else str(error)
    return status, {"error": {"code": status, "message": said, "status": _NAMES.get(status, "INVALID_ARGUMENT")}}


def _part(block: Block) -> Block | None:
    if block["type"] == "thinking":
        return {"text": block["thinking"], "thought": True}
    if block["type"] == "text":
        return {"text": block["text"]} if block["text"] else None
    if block["type"] != "tool_use":
        return None
    # Gemini CLI puts the name before each id that does not begin with it.
    call_id = f"{block['name']}__{block['id']}"
    return {"functionCall": {"id": call_id, "name": block["name"], "args": block["input"]}}


def _offered(raw: msgspec.Raw) -> list[Tool]:
    tools = list[Tool]()
    for at, tool in enumerate(decoded_as(_tools, raw, "tools") or ()):
        for function in tool.function_declarations:  # others run on Google's own servers
            schema = function.parameters_json_schema
            if bytes(schema) == b"null":
                if not storable(function.parameters):
                    raise RequestError(f"tools[{at}]: {function.name} has parameters that nobody can read")
                schema = msgspec.Raw(msgspec.json.encode(_lowered(function.parameters)))
            tools.append(Tool(function.name, function.description, schema))
    return tools


def _lowered(schema: Any) -> Any:
    """Return a schema with the types' names as JSON schemas have them: Google's are in capitals."""
    if isinstance(schema, list):
        return [_lowered(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    lowered = {name: _lowered(value) for name, value in schema.items()}
    return lowered | {"type": kind.lower()} if isinstance(kind, str) else lowered


def _system(raw: msgspec.Raw) -> tuple[list[Block], dict[str, str]]:
    if bytes(raw) == b"null":
        return [], {}
    parts = decoded_as(_content, raw, "systemInstruction").parts
    return [{"type": "text", "text": part.text} for part in parts if part.text is not None], {}


def _bound(content: _Content) -> bool:
    """Tell whether what a content means depends on its place: whether it has a call or a result without an id."""
    inner = [part.function_call or part.function_response for part in content.parts]
    return any(one is not None and not one.id for one in inner)


def _translate(
    content: _Content, field: str, before: msgspec.Raw | None, replies: list[Reply], named: dict[str, Reply], key: bytes
) -> Block:
    """Return the message that a content becomes. ``before``: the message before it, and ``replies``: those that were
    made in its place, the newest first, if the place matters. ``named``: all replies, by their ids. ``key``: makes ids
    for calls of nobody's.
    """
    role = _ROLES.get(content.role)
    if role is None:
        raise RequestError(f"{field}.role: {content.role!r} is not a role")
    signatures = [name for part in content.parts if (name := _named(part.thought_signature))]
    blocks, ids, made = list[Block](), iter(list[str]()), list[Block]()
    if role == "assistant":
        blocks += [{"type": "thinking", "thinking": "", "signature": name} for name in dict.fromkeys(signatures)]
        calls = [part.function_call for part in content.parts if part.function_call is not None]
        ids = iter(_ids(calls, [named[name] for name in signatures if name in named] + replies, key))
    elif before is not None:
        made = [block for block in blocks_of(_message.decode(before).content) if block["type"] == "tool_use"]
    for at, part in enumerate(content.parts):
        if part.function_call is not None and role == "assistant":
            called = part.function_call
            blocks.append({"type": "tool_use", "id": next(ids), "name": called.name, "input": called.given})
        elif part.function_response is not None and role == "user":
            blocks.append(_result(part.function_response, made, f"{field}.parts[{at}]"))
        elif part.text is not None:
            kind = "thinking" if part.thought else "text"
            blocks.append({"type": kind, kind: part.text})
        elif (blob := part.inline_data or part.file_data) is not None:
            blocks.append(blob.block)
        elif part.thought_signature is None:
            raise RequestError(f"{field}.parts[{at}]: this is not a part that can be read")
    return message(role, blocks)


def _named(signature: str | None) -> str | None:
    """Return the id of the reply that a signature is; None if it is none of ours."""
    try:
        name = base64.b64decode(signature or "", altchars=b"-_").decode()
    except (binascii.Error, ValueError):
        return None
    return name if name.startswith("msg_") else None


def _ids(calls: list[_Call], replies: list[Reply], key: bytes) -> list[str]:
    """Return our ids of calls, of which some may have lost them."""
    given = [call.id.removeprefix(f"{call.name}__") if call.id else "" for call in calls]
    if all(given):
        return given
    asked = [(call.name, decoded_as(_args, call.given, "args")) for call in calls]
    for reply in replies:
        made = calls_of(reply)
        if [(block["name"], block["input"]) for block in made] == asked:
            return [block["id"] for block in made]
    return [name or f"call_{key.hex()}_{at}" for at, name in enumerate(given)]


def _result(response: _Response, made: list[Block], field: str) -> Block:
    """Return the block of a result. One without an id takes the first of the calls ``made`` that has its name."""
    call_id = response.id.removeprefix(f"{response.name}__") if response.id else ""
    if not call_id:
        own = next((block for block in made if block["name"] == response.name), None)
        if own is None:
            raise RequestError(f"{field}.functionResponse: no call of {response.name!r} comes before it")
        made.remove(own)
        call_id = own["id"]
    said = decoded_as(_output, response.response, f"{field}.functionResponse.response") or {}
    name, value = next(iter(said.items()), ("", _NOTHING))
    text = bytes(response.response).decode("utf-8", "replace") if said else ""
    if len(said) == 1 and name in _OUTPUT and bytes(value)[:1] == b'"':
        text = decoded_as(_string, value, field)
    media = [blob.block for part in response.parts if (blob := part.inline_data or part.file_data) is not None]
    content = [{"type": "text", "text": text}, *media] if media else text
    return {"type": "tool_result", "tool_use_id": call_id, "content": content}
