"""This module reads the context of a session tree, which is token ids, back as the chat messages that were encoded.

The chat template is not taken apart: it is asked. Messages with holes in place of their texts are rendered by the
renderer that encoded the context, what stands between the holes is looked for in the context, and what is found there
must give exactly the same ids when it is rendered. So a result is right or there is none. Control tokens, which only
the template can have written (``rollout.proxy.marks``), are what tells messages apart.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollout.proxy.marks import control_texts
from rollout.proxy.messages import ChatMessage, RequestError
from rollout.proxy.render import ChatTemplateRenderer, Renderer

# Texts to render in place of a content; a tokenizer need not have a token for each letter.
_HOLES = ("\u2980hole\u2980", "zqxholeqz", "7431957", "qz")
_FIRST_MARK, _LAST_MARK = 0xD800, 0xDFFF  # lone surrogates, which no decoded text has
_STARTS = ("su", "u", "suu", "uu", "sus", "ss")
# With messages that the agent attributes to the assistant ("No response requested.").
_TOLD = tuple(start + more for more in ("au", "a", "auau", "auu", "aus") for start in _STARTS)
_MORE_TOLD = ("au", "uau", "sau", "aus", "suau", "usau", "uaus", "auau")
_MORE = ("", "u", "s", "uu", "us", "su", "uuu")
_OTHER = {"type": "function", "function": {"name": "x", "description": "", "parameters": {}}}
_ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}


class Unreadable(ValueError):
    """The messages of a context cannot be told from its ids. The message is one line."""


class Unrenderer:
    """An Unrenderer reads what ``renderer`` has encoded with ``tokenizer``. Raises ValueError for a tokenizer that it
    cannot ask."""

    def __init__(self, tokenizer: Any, renderer: Renderer) -> None:
        self._tokenizer, self._renderer = tokenizer, renderer
        ids = sorted({int(tokenizer.convert_tokens_to_ids(text)) for text in control_texts(tokenizer)})
        if len(ids) > _LAST_MARK - _FIRST_MARK:
            raise ValueError(f"{len(ids)} control tokens are too many to read contexts with")
        self._marks = {token: chr(_FIRST_MARK + number) for number, token in enumerate(ids)}
        good = (hole for hole in _HOLES if self._spelled(tokenizer.encode(hole, add_special_tokens=False)) == hole)
        self._hole = next(good, "")
        if not self._hole:
            raise ValueError("this tokenizer encodes none of the texts that contexts are read with")
        self._between: dict[Any, list[str] | None] = {}
        self._tools: dict[bytes, str] = {}

    def start(
        self, ids: list[int], tools: list[dict[str, Any]], told: bool = False
    ) -> tuple[list[ChatMessage], list[dict[str, Any]]]:
        """Return the messages of a first prompt, and those of ``tools`` that it offers. Raises Unreadable.

        told: there may be messages of the assistant among them.
        """
        text = self._spelled(ids)
        places = [(text.find(self._written(tool)), tool) for tool in tools]
        shown = [tool for _, tool in sorted(((at, tool) for at, tool in places if at >= 0), key=lambda one: one[0])]
        for offered, shape in itertools.product((shown, []), _TOLD if told else _STARTS):
            key = "start", shape, tuple(tool["function"]["name"] for tool in offered)

            def render(messages: list[ChatMessage], offered: list[dict[str, Any]] = offered) -> list[int]:
                return self._renderer.start(messages, offered)

            if (found := self._read(key, _messages(shape, []), text, ids, render)) is not None:
                return found, offered
        raise Unreadable("the chat template does not write such a first prompt")

    def extend(
        self,
        tail: Sequence[int],
        ended: bool,
        ids: list[int],
        calls: Sequence[ChatMessage],
        told: bool = False,
    ) -> list[ChatMessage]:
        """Return the messages that come after a reply with the last ids ``tail``; ``calls``: its calls, in chat form.

        told: as for ``start``. Raises Unreadable.
        """
        text = self._spelled(ids)
        for count in (*range(len(calls), 0, -1), 0):
            for more in _MORE_TOLD if told else _MORE:
                shape = "t" * count + more
                key = "extend", shape, tuple(tail[-2:]), ended, tuple(call["id"] for call in calls[:count])
                if not shape:
                    continue

                def render(messages: list[ChatMessage]) -> list[int]:
                    return self._renderer.extend(tail, ended, messages)

                if (found := self._read(key, _messages(shape, calls), text, ids, render)) is not None:
                    return found
        raise Unreadable("the chat template does not write such a context after a reply")

    def _written(self, tool: dict[str, Any]) -> str:
        """Return what the template writes for a tool: what a prompt gains if the tool is offered beside another."""
        key = msgspec.json.encode(tool)
        if key not in self._tools:
            asked = [{"role": "user", "content": self._hole}]
            one, both = (self._spelled(self._renderer.start(asked, tools)) for tools in ([_OTHER], [_OTHER, tool]))
            before = _common(one, both)
            after = min(_common(one[::-1], both[::-1]), len(one) - before)
            self._tools[key] = both[before : len(both) - after].strip(" ,\n")
        return self._tools[key]

    def _spelled(self, ids: Sequence[int]) -> str:
        """Decode ids, with a character of its own for each control token."""
        decode = functools.partial(
            self._tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        texts = []
        for mark, group in itertools.groupby(ids, lambda token: self._marks.get(token)):
            found = list(group)
            texts.append(mark * len(found) if mark else decode(found))
        return "".join(texts)

    def _read(
        self, key: Any, messages: list[ChatMessage], text: str, ids: list[int], render: Any
    ) -> list[ChatMessage] | None:
        """Fill the holes of ``messages`` from ``text``; None if they do not fit or render to other ids."""
        if key not in self._between:
            holed = [{**message, "content": self._hole} for message in messages]
            self._between[key] = None
            try:
                between = self._spelled(render(holed)).split(self._hole)
            except RequestError:
                return None
            if len(between) == len(messages) + 1:
                self._between[key] = between
        between = self._between[key]
        if between is None:
            return None
        hole = f"([^{chr(_FIRST_MARK)}-{chr(_LAST_MARK)}]*)"
        found = re.fullmatch(hole.join(map(re.escape, between)), text)
        if found is None:
            return None
        filled = [{**message, "content": said} for message, said in zip(messages, found.groups(), strict=True)]
        try:
            return filled if render(filled) == ids else None
        except RequestError:
            return None


def _messages(shape: str, calls: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return messages without contents. ``shape``: a letter for each role; the n-th tool answers the n-th call."""

    def made() -> Iterator[ChatMessage]:
        answered = iter(calls)
        for letter in shape:
            message: ChatMessage = {"role": _ROLES[letter], "content": ""}
            if letter == "t":
                call = next(answered)
                message |= {"tool_call_id": call["id"], "name": call["function"]["name"]}
            yield message

    return list(made())


def _common(one: str, other: str) -> int:
    """Return how many characters two texts have in common at their beginning."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@functools.lru_cache(4)
def load(model: str) -> Unrenderer:
    """Return what reads the contexts of a policy; ``model``: the directory of its tokenizer. Raises Unreadable."""
    from transformers import AutoConfig, AutoTokenizer

    if not Path(model).is_dir():
        raise Unreadable(f"the policy's tokenizer is not at {model}; say with --model where it is")
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
        kind = AutoConfig.from_pretrained(model).model_type
        return Unrenderer(tokenizer, ChatTemplateRenderer(tokenizer, kind))
    except (OSError, ValueError) as error:
        raise Unreadable(f"the policy's tokenizer at {model} cannot be used: {' '.join(str(error).split())}") from error
