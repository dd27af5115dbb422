"""Forward calls to an endpoint of OpenAI's chat completions, translating them to and from Anthropic's Messages.

Nothing that a model said or is told is changed: texts stay as they are, to the last blank; thinking goes both ways
(``reasoning_content``), and so do images, parallel calls and the ids of calls. Calls whose arguments are no JSON object
are text, as in training, and so is all that is of no known form. Half of a surrogate pair, which is no character,
becomes U+FFFD. What the format has no place for is left out: ``cache_control``, signatures, the mark ``is_error``
beside an error's text, and tools that Anthropic's own servers run.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from rollout import storable
from rollout.proxy.forward import PLAIN, EndpointError, SideEndpoint, read
from rollout.proxy.messages import RequestError
from rollout.proxy.replies import Reply

_STOPPED = {"length": "max_tokens", "content_filter": "refusal"}
_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
# The types of parts that are texts, and the names under which these have them, as a text or as parts.
_TEXTS = ("text", "output_text", "summary_text", "thinking", "reasoning", "reasoning_text", "refusal")
_NAMES = ("text", "thinking", "reasoning", "refusal", "content", "summary")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# How servers say that a prompt does not fit: OpenAI's code, and the words of vLLM and those that copy it.
_FULL = ("context_length_exceeded", "maximum context length")


class ChatEndpoint(SideEndpoint):
    """A ChatEndpoint is a server of OpenAI's chat completions at ``url``/chat/completions; see ``SideEndpoint``.

    ``key`` is sent as ``Authorization: Bearer``. Replies are asked for whole; the agent is sent pings meanwhile.
    """

    relays = False
    _limit = "max_tokens"  # OpenAI's own newer models want another name, which their error message gives

    def address(self, path: str) -> str:
        """Return the URL of chat completions."""
        return f"{self.url.rstrip('/')}/chat/completions"

    def headers(self) -> dict[str, str]:
        """Return the headers of every request."""
        key = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return {**PLAIN, **key}

    def hello(self) -> dict[str, Any]:
        """Return the body of a small request. It sets no token limit: the limit's name and minimum differ by model."""
        return {"model": self.model, "messages": [{"role": "user", "content": "hi"}]}

    async def ask(self, body: bytes) -> Reply:
        """Return the endpoint's whole reply to a request of the Messages API. Raises RequestError, and EndpointError
        with the endpoint's own status and words.
        """
        sent = chat_request(read(body), self.model)
        limit = sent.pop("max_tokens", None)
        while True:
            named = self._limit  # calls at once may learn the other name meanwhile
            limited = sent if limit is None else {**sent, named: limit}
            status, raw = await self.post(json.dumps(limited).encode())
            if status != 400 or named != "max_tokens" or b"max_completion_tokens" not in raw:
                break
            self._limit = "max_completion_tokens"
        if status == 200:
            return reply_of(raw)
        said = " ".join(raw.decode("utf-8", "replace").split())[:2000]
        if status in (400, 413) and any(words in said for words in _FULL):
            raise EndpointError(f"prompt is too long: {said}")  # upon which Claude Code compacts
        status = status if 400 <= status < 600 else 529  # others are no errors to clients, and no replies
        raise EndpointError(said, status, _KINDS.get(status, "overloaded_error" if status == 529 else "api_error"))


def chat_request(asked: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Return the body of a chat completion that asks ``model`` for the same as ``asked``, a Messages request's body.

    Raises RequestError if ``asked`` is not such a body.
    """
    try:
        system = _text(asked.get("system") or "")
        messages = [{"role": "system", "content": system}] if system else []
        for message in asked["messages"]:
            content = message["content"]
            blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
            messages += _said(blocks) if message["role"] == "assistant" else _heard(message["role"], blocks)
        out: dict[str, Any] = {"model": model, "messages": messages}
        functions = [_function(tool) for tool in asked.get("tools") or () if "input_schema" in tool]
        if functions:
            out["tools"] = [{"type": "function", "function": function} for function in functions]
            if choice := asked.get("tool_choice"):
                named = {"type": "function", "function": {"name": choice.get("name")}}
                out["tool_choice"] = _CHOICES.get(choice["type"], named)
    except (KeyError, TypeError, AttributeError) as error:
        raise RequestError(f"this is not a request of the Messages API: {error!r}") from error
    names = {"max_tokens": "max_tokens", "stop_sequences": "stop", "temperature": "temperature", "top_p": "top_p"}
    return out | {new: asked[name] for name, new in names.items() if asked.get(name) is not None}


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": tool["name"], "description": tool.get("description", ""), "parameters": tool["input_schema"]}


def _said(blocks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return an assistant message."""
    message: dict[str, Any] = {"role": "assistant", "content": _joined(blocks, "text")}
    if thinking := _joined(blocks, "thinking"):
        message["reasoning_content"] = thinking
    calls = [
        {"id": b["id"], "type": "function", "function": {"name": b["name"], "arguments": json.dumps(b["input"])}}
        for b in blocks
        if b["type"] == "tool_use"
    ]
    return [message | {"tool_calls": calls} if calls else message]


def _joined(blocks: Sequence[Mapping[str, Any]], kind: str) -> str:
    return "".join(block[kind] for block in blocks if block["type"] == kind)


def _heard(role: str, blocks: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a tool message per result, then one message with the rest, to which the results' images move."""
    parts: list[dict[str, Any]] = []
    for block in sorted(blocks, key=lambda block: block["type"] != "tool_result"):  # results follow the calls directly
        if block["type"] == "tool_result":
            content = block.get("content") or ""
            yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": _text(content)}
            parts += [_part(one) for one in content if not isinstance(content, str) and one["type"] == "image"]
        else:
            parts.append(_part(block))
    if all(part["type"] == "text" for part in parts):
        if parts:
            yield {"role": role, "content": "\n".join(part["text"] for part in parts)}
    else:
        yield {"role": role, "content": parts}


def _part(block: Mapping[str, Any]) -> dict[str, Any]:
    source = block.get("source") or {}
    if block["type"] == "image" and source.get("type") in ("base64", "url"):
        url = source["url"] if source["type"] == "url" else f"data:{source['media_type']};base64,{source['data']}"
        return {"type": "image_url", "image_url": {"url": url}}
    return {"type": "text", "text": _text([block])}


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    """Return content as text: "[image]" stands for an image, which follows the results; other blocks become JSON."""
    if isinstance(content, str):
        return content
    known = {"text": lambda one: one["text"], "image": lambda one: "[image]"}
    return "\n".join(known.get(one["type"], json.dumps)(one) for one in content)


def reply_of(raw: bytes) -> Reply:
    """Return the reply of a chat completion's body. Raises EndpointError if that is not one; what its message says, in
    whatever form, is no reason."""
    try:
        body = _read(raw)
        choice = body["choices"][0]
        message, usage = choice["message"], body.get("usage")
        thought = message.get("reasoning_content") or message.get("reasoning")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        said = f"the reply is not a chat completion: {error!r}: {raw[:200].decode('utf-8', 'replace')}"
        raise EndpointError(said, 529, "overloaded_error") from error
    blocks = [*_parts(thought, "thinking"), *_parts(message.get("content") or message.get("refusal"), "text")]
    blocks += [_call(call) for call in _listed(message.get("tool_calls"))]
    uses = any(block["type"] == "tool_use" for block in blocks)
    return Reply(
        id=f"msg_{uuid.uuid4().hex}",  # ours: servers use theirs again, or send none
        blocks=tuple(blocks),
        stop_reason=_STOPPED.get(str(choice.get("finish_reason")), "tool_use" if uses else "end_turn"),
        input_tokens=_count(usage, "prompt_tokens"),
        output_tokens=_count(usage, "completion_tokens"),
    )


def _read(text: bytes) -> Any:
    """Return what a JSON text says. Raises ValueError."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        # The standard library takes half of a surrogate pair, NaN, infinity and more levels.
        try:
            found = json.loads(text.decode("utf-8", "replace"), parse_int=_number)
            whole = json.dumps(found, ensure_ascii=False).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            return json.loads(whole, parse_int=_number)
        except RecursionError as error:
            raise ValueError("it is nested too deep") from error


def _number(digits: str) -> float:
    return int(digits) if len(digits) < 4000 else float(digits)  # Python reads no longer integers


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _parts(content: Any, kind: str, levels: int = 4) -> Iterator[dict[str, Any]]:
    """Yield the blocks of a text or of a list of parts; ``kind``: text or thinking, of what does not say it itself."""
    for part in _listed(content):
        named = part if isinstance(part, dict) and part.get("type", "text") in _TEXTS else {}
        own = "thinking" if named.get("type") in ("thinking", "reasoning", "reasoning_text") else kind
        said = next((named[name] for name in _NAMES if isinstance(named.get(name), str | list)), part)
        if isinstance(said, list) and levels:
            yield from _parts(said, own, levels - 1)
        elif text := _told(said):
            yield {"type": own, own: text}


def _told(value: Any) -> str:
    try:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return "[this is nested too deep to be shown]"


def _count(usage: Any, name: str) -> int:
    count = usage.get(name) if isinstance(usage, dict) else None
    return int(count) if isinstance(count, int | float) and 0 <= count < 1 << 63 else 0


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        return {"type": "text", "text": _told(call)}
    arguments = function.get("arguments")
    said = "{}" if arguments is None or arguments == "" else _told(arguments)
    try:
        given = msgspec.json.decode(said)  # as in training: no NaN, no half of a surrogate pair
    except (msgspec.MsgspecError, ValueError, RecursionError):
        given = None
    if not isinstance(given, dict) or not storable(given, 60):  # a record has the levels around it, too
        return {"type": "text", "text": f"{name}({said})"}
    return {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex}", "name": name, "input": given}
