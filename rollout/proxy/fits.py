"""Compare a session's tokens with those of the model's own chat template, before an episode is played.

A session encodes each message once, after what was sampled; the template encodes a conversation as a whole. Where they
differ, the policy is trained on prompts that nothing else would give it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rollout.proxy.messages import ChatMessage
from rollout.proxy.parsers import FORMATS
from rollout.proxy.render import as_user

if TYPE_CHECKING:
    from rollout.proxy.render import ChatTemplateRenderer

log = logging.getLogger(__name__)

_SCHEMA = {"type": "object", "properties": {"text": {"type": "string", "description": "What?"}}, "required": ["text"]}
_TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look it up.", "parameters": _SCHEMA}}]
_ASK: list[ChatMessage] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is it?"}]
_USER: ChatMessage = {"role": "user", "content": "Go on."}
_SYSTEM: ChatMessage = {"role": "system", "content": "Note this."}
_PROMPT = {"add_generation_prompt": True}
_WORD = "zq7"  # the last word that a reply says


def check_fits(renderer: ChatTemplateRenderer, tool_parser: str, any_family: bool) -> None:
    """Raise ValueError if ``tool_parser`` (a key of ``FORMATS``) cannot read the calls that the chat template writes,
    or if the renderer writes other tokens than the template.

    With ``any_family``, calls are not looked at, and other tokens are only logged.
    """
    written = "" if any_family or tool_parser not in FORMATS else _written(renderer)
    if written and not _reads(tool_parser, written):
        others = [name for name in FORMATS if _reads(name, written)]
        raise ValueError(
            f"proxy.tool_parser={tool_parser} does not read calls as the model's chat template writes them: "
            f"{written!r}; {'take ' + ' or '.join(others) if others else 'no known parser does'} (docs/models.md)"
        )
    for difference in differences(renderer):
        if not any_family:
            raise ValueError(f"{difference} (docs/models.md); proxy.any_family=true plays it all the same")
        log.warning(difference)


def differences(renderer: ChatTemplateRenderer) -> Iterator[str]:
    """Yield a line for each case in which the renderer writes other text or ids than the chat template, or fails."""
    said, call = {"role": "assistant", "content": f"It is {_WORD}"}, _call()
    for case, reply, more, ended in (
        ("a first prompt", None, [], True),
        ("a first prompt with a call", None, [call, _result()], True),
        ("after a call, its result", call, [_result()], True),
        ("after two calls, their results", _call(2), [_result(), _result(1)], True),
        ("after a call, its result and the user's text", call, [_result(), _USER], True),
        ("after a reply, the user's text", said, [_USER], True),
        ("after a reply, a system message", said, [_SYSTEM], True),
        ("after a cut reply, the user's text", said, [_USER], False),
        ("after a reply, a call that it did not make", said, [_USER, _call(text="b"), _result()], True),
    ):
        try:
            if reply is None:
                text = renderer.text([*_ASK, *more], _TOOLS, **_PROMPT)
                if (_WORD if more else "look") not in text:
                    yield f"{case}: the model's chat template leaves out {'the call' if more else 'the tools'}"
                    continue
                ours, theirs = renderer.start([*_ASK, *more], _TOOLS), renderer.encode(text)
                found = [] if ours == theirs else [tuple(map(renderer.tokenizer.decode, (ours, theirs)))]
            else:
                found = after(renderer, reply, more, ended)
            for ours, theirs in found:
                yield f"{case}: the proxy writes {ours!r}, the model's chat template {theirs!r}"
        except Exception as error:  # jinja's and the template's own have no common class
            yield f"{case}: {error}"


def after(
    renderer: ChatTemplateRenderer, reply: ChatMessage, more: list[ChatMessage], ended: bool
) -> Iterator[tuple[str, str]]:
    """Yield what the renderer writes after a reply and what the chat template does, if they differ."""
    tokenizer = renderer.tokenizer
    users = [*map(as_user, more)]
    allowed: list[str] = []
    for messages in [more] if users == more else [more, users]:  # a template may refuse later system messages
        try:
            allowed.append(_rest(renderer.text([*_ASK, reply, *messages], _TOOLS, **_PROMPT)))
        except Exception:
            if messages is users:
                raise
    alone = _rest(renderer.text([*_ASK, reply], _TOOLS))
    if not alone and not allowed[0]:
        return  # it does not write calls
    sampled = renderer.encode(_WORD + alone) if ended else renderer.encode(_WORD)
    if ended and renderer.closing:
        sampled = sampled[: sampled.index(renderer.closing[0]) + 1]
    elif ended:  # what begins the turn that is expected next ends this one
        expected = _result() if reply.get("tool_calls") else _USER
        following = _rest(renderer.text([*_ASK, reply, expected], _TOOLS))
        sampled += renderer.encode(following.removeprefix(alone))[:1]
    added = renderer.extend(sampled[-8:], ended, more)
    ours = tokenizer.decode([*sampled, *added])[len(_WORD) :]
    if ours not in allowed or renderer.encode(_WORD + ours)[-len(added) :] != added:
        yield ours, allowed[-1]


def _rest(text: str) -> str:
    return text.rpartition(_WORD)[2] if _WORD in text else ""


def _call(count: int = 1, text: str = _WORD) -> ChatMessage:
    calls = [
        {"type": "function", "id": f"call_{n}", "function": {"name": "look", "arguments": {"text": text}}}
        for n in range(count)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _result(number: int = 0) -> ChatMessage:
    return {"role": "tool", "tool_call_id": f"call_{number}", "name": "look", "content": "here"}


_VALUE = f"\n {_WORD}\n"


def _written(renderer: ChatTemplateRenderer) -> str:
    """Return what the template writes for a reply that is one call, without its end; "" if it writes none."""
    try:
        before, whole = (renderer.text([*_ASK, *said], _TOOLS) for said in ([], [_call(text=_VALUE)]))
    except Exception:  # the cases say why
        return ""
    said = whole.removeprefix(before)
    end = renderer.tokenizer.decode(renderer.closing)
    return (said.partition(end)[0] if end else said) if "look" in said else ""


def _reads(tool_parser: str, written: str) -> bool:
    format = FORMATS[tool_parser]()
    call = format.call.search(written)
    if call is None:
        return False
    text, name = call.group(), call.groupdict().get("name")
    if format.key:
        return (name, format.values(text)) == ("look", [("text", _VALUE)])
    try:
        read = json.loads(text[text.index("{") : text.rindex("}") + 1])
    except ValueError:
        return False
    if name is None and isinstance(read, dict):
        name, read = read.get("name"), read.get("arguments")
    return (name, read) == ("look", {"text": _VALUE})
