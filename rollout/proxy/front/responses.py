"""The front end for OpenAI's Responses; no I/O.

The format is documented at https://platform.openai.com/docs/api-reference/responses; details follow what Codex sends. A
request's input consists of items, of which those of one reply (reasoning, texts, calls) become one message.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from rollout.proxy.blocks import Block
from rollout.proxy.front import openai
from rollout.proxy.front.base import Answer, Front, Translated
from rollout.proxy.front.translating import (
    FREE,
    FREE_MARK,
    Asked,
    Tool,
    arguments_of,
    at_most,
    call,
    choice,
    free_text,
    image,
    message,
    offered,
    refused,
    request_of,
)
from rollout.proxy.replies import Reply, reply_json, sse
from rollout.proxy.tree import Node, Tree
from rollout.proxy.wire import RequestError, WireRequest, decoded_as, hashed, read_body

# What ``include`` asks for: reasoning that comes back with what tells us whose it is.
_ENCRYPTED = "reasoning.encrypted_content"
# What stands between the name of a namespace and that of a tool in it, where the policy reads them.
_IN = "__"
_UNKNOWN = "previous_response_not_found"


class _Typed(msgspec.Struct):
    type: str = "text"
    mode: str | None = None  # of allowed_tools


class _Text(msgspec.Struct):
    format: _Typed | None = None


class _Request(Asked):
    input: str | list[msgspec.Raw] = ""
    model: str = ""
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: msgspec.Raw = msgspec.Raw(b"null")
    tool_choice: str | _Typed | None = None
    stream: bool | None = None
    store: bool | None = None
    include: list[str] | None = None
    previous_response_id: str | None = None
    text: _Text | None = None
    top_logprobs: int | None = None
    background: bool | None = None
    conversation: str | _Typed | None = None
    prompt: _Typed | None = None

    @property
    def items(self) -> list[msgspec.Raw]:
        if isinstance(self.input, str):  # made once: the hash is of these bytes
            self.input = [msgspec.Raw(msgspec.json.encode(message("user", self.input)))]
        return self.input


class _Part(msgspec.Struct):
    type: str = ""
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None


class _Item(msgspec.Struct):
    type: str = "message"
    role: str = ""
    id: str | None = None
    content: str | list[msgspec.Raw] | None = None
    summary: list[_Part] | None = None
    encrypted_content: str | None = None
    call_id: str = ""
    name: str = ""
    namespace: str | None = None
    arguments: str = ""
    input: str = ""
    output: str | list[msgspec.Raw] = ""


class _Tool(msgspec.Struct):
    type: str
    name: str = ""
    description: str | None = None
    parameters: msgspec.Raw = msgspec.Raw(b"null")
    tools: list[_Tool] = []


_request = msgspec.json.Decoder(_Request)
_item = msgspec.json.Decoder(_Item)
_part = msgspec.json.Decoder(_Part)
_tools = msgspec.json.Decoder(list[_Tool] | None)
_says = msgspec.json.Decoder(list[msgspec.Raw])


class _Answer(Answer):
    def __init__(self, asked: _Request, reply_id: str, input_tokens: int) -> None:
        super().__init__(reply_id, asked.model, input_tokens)
        self._asked, self._sent = asked, 0

    def whole(self, reply: Reply) -> Any:
        cut = reply.stop_reason == "max_tokens"
        return self._response("incomplete" if cut else "completed") | {
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [self._item(block, at) for at, block in enumerate(reply.blocks)],
            "usage": {
                "input_tokens": reply.input_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": reply.output_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": reply.input_tokens + reply.output_tokens,
            },
        }

    def begin(self) -> bytes:
        return self._event("created", response=self._response("in_progress")) + self.ping()

    def ping(self) -> bytes:
        # An event, not a comment: Codex gives up on a stream that has none for five minutes.
        return self._event("in_progress", response=self._response("in_progress"))

    def rest(self, reply: Reply) -> bytes:
        whole = self.whole(reply)
        events = [event for at, item in enumerate(whole["output"]) for event in self._item_events(item, at)]
        return b"".join([*events, self._event(whole["status"], response=whole)])

    def failed(self, error: RequestError) -> bytes:
        told = openai.failure(error)
        failure = {"code": told["code"] if error.full else "server_error", "message": told["message"]}
        return self._event("failed", response=self._response("failed") | {"error": failure})

    def _event(self, name: str, /, **fields: Any) -> bytes:
        self._sent += 1
        return sse(f"response.{name}", {"sequence_number": self._sent - 1, **fields})

    def _response(self, status: str) -> Block:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "model": self.model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "parallel_tool_calls": True,
            "previous_response_id": self._asked.previous_response_id,
            "store": self._asked.store is not False,
            "tool_choice": "auto",
            "tools": [],
            "usage": None,
        }

    def _item(self, block: Block, at: int) -> Block:
        name = f"{self.id.removeprefix('msg_')}_{at}"
        if block["type"] == "thinking":
            item = {"type": "reasoning", "id": f"rs_{name}", "summary": []}
            item["content"] = [{"type": "reasoning_text", "text": block["thinking"]}]
            return item | ({"encrypted_content": self.id} if _ENCRYPTED in (self._asked.include or ()) else {})
        if block["type"] == "text":
            text = {"type": "output_text", "text": block["text"], "annotations": [], "logprobs": []}
            return {
                "type": "message",
                "id": f"msg_{name}",
                "role": "assistant",
                "status": "completed",
                "content": [text],
            }
        space = self._asked.marks.get(block["name"])
        said = {"status": "completed", "call_id": block["id"], "name": block["name"]}
        if space == FREE_MARK:
            return {"type": "custom_tool_call", "id": f"ctc_{name}", **said, "input": free_text(block)}
        if space is not None:
            said |= {"name": block["name"].removeprefix(space + _IN), "namespace": space}
        return {"type": "function_call", "id": f"fc_{name}", **said, "arguments": arguments_of(block)}

    def _item_events(self, item: Block, at: int) -> Iterator[bytes]:
        place = {"output_index": at, "item_id": item["id"]}
        started: Block = {**item, "status": "in_progress"}
        if item["type"] in ("message", "reasoning"):
            part = item["content"][0]
            kind = part["type"]
            more = {**place, "content_index": 0} | ({"logprobs": []} if kind == "output_text" else {})
            started |= {"content": []}
            yield self._event("output_item.added", output_index=at, item=started)
            yield self._event("content_part.added", **place, content_index=0, part={**part, "text": ""})
            yield self._event(f"{kind}.delta", **more, delta=part["text"])
            yield self._event(f"{kind}.done", **more, text=part["text"])
            yield self._event("content_part.done", **place, content_index=0, part=part)
        else:
            field = "arguments" if item["type"] == "function_call" else "input"
            kind = "function_call_arguments" if field == "arguments" else "custom_tool_call_input"
            named = {"name": item["name"]} if field == "arguments" else {}  # openai 2 asks for it, 3 does not know it
            started |= {field: ""}
            yield self._event("output_item.added", output_index=at, item=started)
            yield self._event(f"{kind}.delta", **place, delta=item[field])
            yield self._event(f"{kind}.done", **place, **named, **{field: item[field]})
        yield self._event("output_item.done", output_index=at, item=item)


class Responses(Front[_Request]):
    """A Responses answers POST /v1/responses and /v1/responses/input_tokens."""

    name = "responses"

    def read(self, body: bytes, path: str) -> _Request:
        """Decode a body. Raises RequestError, also for what a reply cannot be made to be."""
        asked = read_body(_request, body)[0]
        at_most(asked.items, "input")
        if asked.text is not None and asked.text.format is not None and asked.text.format.type != "text":
            raise refused("text.format: only text")
        if asked.top_logprobs:
            raise refused("top_logprobs", "are not given")
        kept = {"background": asked.background or None, "conversation": asked.conversation, "prompt": asked.prompt}
        for field, given in kept.items():
            if given is not None:
                raise refused(field)
        return asked

    def new_bytes(self, asked: _Request, known: Translated, tree: Tree) -> int:
        """Return how many bytes of a request have to be translated, or put together again."""
        sides = [known.sides.get(one, True) for one in asked.digests]
        new = known.new_heads(asked.tools)
        for start, end, key in _groups(asked.digests, sides):
            new += 0 if key in known.units else sum(map(len, asked.items[start:end]))
        if asked.previous_response_id is None:
            return new
        return new + sum(len(node.says) for node in _replied(tree, asked.previous_response_id).path())

    def wire(self, asked: _Request, known: Translated, tree: Tree) -> WireRequest:
        """Return a request in the form of the Messages API. Raises RequestError."""
        tools, asked.marks = known.tools(asked.tools, lambda raw: offered(_offered(raw)))
        messages, digests = _messages(asked, known)
        system = msgspec.Raw(msgspec.json.encode(asked.instructions or ""))
        if asked.previous_response_id is not None:
            before, head = _before(tree, _replied(tree, asked.previous_response_id))
            messages, digests = before + messages, [*map(hashed, before), *digests]
            system = system if asked.instructions else head
        chosen = asked.tool_choice
        return request_of(
            messages,
            digests,
            system,
            model=asked.model,
            max_tokens=asked.max_output_tokens,
            tools=tools,
            tool_choice=choice(chosen if chosen is None or isinstance(chosen, str) else chosen.mode or chosen.type),
            stream=asked.stream,
        )

    def answer(self, asked: _Request, reply_id: str, input_tokens: int) -> Answer:
        """Return what writes the reply to a request."""
        return _Answer(asked, reply_id, input_tokens)

    def error(self, error: RequestError, asked: _Request | None = None) -> tuple[int, Any]:
        """Return the status and the body of an error. A streaming client learns from an event that its context is
        full; Codex looks nowhere else.
        """
        if error.full and asked is not None and asked.stream:
            answer = _Answer(asked, "resp_none", 0)
            return 200, answer.begin() + answer.failed(error)
        return openai.failed(error)

    def counted(self, tokens: int) -> Any:
        """Return the body of a count of tokens."""
        return {"object": "response.input_tokens", "input_tokens": tokens}


FRONT = Responses()


def _replied(tree: Tree, name: str) -> Node:
    """Return the node of a reply by its id. Raises RequestError."""
    for node in reversed(tree.nodes):
        if node.reply is not None and node.reply.id == name:
            return node
    raise RequestError(f"previous_response_id: no reply {name!r} is known here", code=_UNKNOWN)


def _before(tree: Tree, node: Node) -> tuple[list[msgspec.Raw], msgspec.Raw]:
    """Return the messages that a reply and what came before it consist of, and the system prompt."""
    path, out = node.path(), list[msgspec.Raw]()
    for one in path:
        if one.reply is not None:
            out.append(_echo(one.reply))
        elif not one.says:
            raise RequestError("this conversation is too long to be continued", code=_UNKNOWN)
        else:
            for raw in _says.decode(one.says):
                text = bytes(raw)
                replied = None if text.startswith(b"{") else tree.nodes[int(text)].reply  # a reply in a new place
                out.append(raw if replied is None else _echo(replied))
    return out, _says.decode(path[0].head)[0] if path[0].head else msgspec.Raw(b'""')


def _echo(reply: Reply) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(message("assistant", reply_json(reply, "")["content"])))


def _offered(raw: msgspec.Raw) -> list[Tool]:
    tools = list[Tool]()
    for tool in decoded_as(_tools, raw, "tools") or ():
        if tool.type in ("function", "custom"):
            tools.append(Tool(tool.name, tool.description, tool.parameters, free=tool.type == "custom"))
        elif tool.type == "namespace":
            name = f"{tool.name}{_IN}%s"
            tools += [Tool(name % one.name, one.description, one.parameters, space=tool.name) for one in tool.tools]
        # Others run on OpenAI's own servers (web_search), and the policy cannot use them.
    return tools


def _messages(asked: _Request, known: Translated) -> tuple[list[msgspec.Raw], list[bytes]]:
    items, digests, sides, units = asked.items, asked.digests, known.sides, known.units
    found = [_side(asked, at, known) if (side := sides.get(one)) is None else side for at, one in enumerate(digests)]
    messages, hashes = list[msgspec.Raw](), list[bytes]()
    for start, end, key in _groups(digests, found):
        unit = units.get(key) or known.keep(key, _translate(items[start:end], start))
        messages.append(unit[0])
        hashes.append(unit[1])
    return messages, hashes


def _groups(digests: list[bytes], sides: list[bool]) -> Iterator[tuple[int, int, bytes]]:
    """Yield where each message begins and ends among the items, and its key. A reply's items follow each other."""
    start = 0
    for end, side in enumerate(sides, 1):
        if side and end < len(sides) and sides[end]:
            continue
        yield start, end, digests[start] if start + 1 == end else hashed(b"".join(digests[start:end]))
        start = end


def _side(asked: _Request, at: int, known: Translated) -> bool:
    """Tell whether an item is the assistant's, and remember it."""
    item = decoded_as(_item, asked.items[at], f"input[{at}]")
    side = item.type in ("reasoning", "function_call", "custom_tool_call") or item.role == "assistant"
    known.keep_side(asked.digests[at], side)
    return side


def _translate(raws: list[msgspec.Raw], start: int) -> Block:
    """Return the message that an item of the context, or all items of a reply, become."""
    blocks = list[Block]()
    for at, raw in enumerate(raws, start):
        field = f"input[{at}]"
        item = decoded_as(_item, raw, field)
        if item.type in ("function_call_output", "custom_tool_call_output"):
            result = {"type": "tool_result", "tool_use_id": item.call_id, "content": _content(item.output, field)}
            return message("user", [result])
        if item.type == "message" and item.role != "assistant":
            if item.role not in ("user", "system", "developer"):
                raise RequestError(f"{field}.role: {item.role!r} is not a role")
            return message("user" if item.role == "user" else "system", _content(item.content or "", field))
        blocks += _said(item, field)
    return message("assistant", blocks)


def _said(item: _Item, field: str) -> list[Block]:
    if item.type == "message":
        content = _content(item.content or "", field)
        return ([{"type": "text", "text": content}] if content else []) if isinstance(content, str) else content
    name = f"{item.namespace}{_IN}{item.name}" if item.namespace else item.name
    if item.type == "function_call":
        return [call(item.call_id, name, item.arguments)]
    if item.type == "custom_tool_call":
        return [call(item.call_id, name, msgspec.json.encode({FREE: item.input}).decode())]
    if item.type == "reasoning":
        parts = [decoded_as(_part, raw, field) for raw in item.content] if isinstance(item.content, list) else []
        thought = "".join(part.text or "" for part in parts or item.summary or ())
        # Whose it is, says what came with it, or else its own id (``_Answer._item``).
        number = (item.id or "").removeprefix("rs_").rpartition("_")[0]
        return [{"type": "thinking", "thinking": thought, "signature": item.encrypted_content or f"msg_{number}"}]
    raise RequestError(f"{field}.type: {item.type!r} is not an item that can be read")


def _content(content: str | list[msgspec.Raw], field: str) -> str | list[Block]:
    if isinstance(content, str):
        return content
    return [_block(raw, f"{field}.content[{at}]") for at, raw in enumerate(content)]


def _block(raw: msgspec.Raw, field: str) -> Block:
    part = decoded_as(_part, raw, field)
    said = part.refusal if part.text is None else part.text
    if part.type in ("input_text", "output_text", "text", "refusal") and said is not None:
        return {"type": "text", "text": said}
    if part.type == "input_image" and part.image_url is not None:
        return image(part.image_url)
    if part.type in ("input_image", "input_file", "input_audio"):
        return {"type": part.type, "source": {"data": bytes(raw).decode("utf-8", "replace")}}
    raise RequestError(f"{field}: {part.type!r} is not a part that can be read")
