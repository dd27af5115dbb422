"""Encode chat messages with the policy's chat template, each message once.

What stands between two turns differs from one model family to the next. verl has one builder per family
(``verl.utils.tokenizer.continuous_token``) that encodes only what is appended to a conversation. It is the only part
of verl that ``rollout`` uses, and it is imported when a renderer is made, not with this module.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import logging
from collections.abc import Callable, Sequence
from datetime import date
from typing import Any, Protocol

import msgspec

from rollout.proxy.encode import Encoder
from rollout.proxy.marks import Marks
from rollout.proxy.messages import ChatMessage, RequestError
from rollout.proxy.texts import NoRoom

log = logging.getLogger(__name__)

# The encodings of this many conversations of at most this many bytes are remembered (see _prepared).
_REMEMBERED, _SHORT = 1000, 2000
# Control tokens that only one family's templates write, and a model type of it.
_ALIKE = {"<|observation|>": "glm4_moe", "<｜Assistant｜>": "deepseek_v3"}


class Renderer(Protocol):
    """A Renderer turns chat messages into the token ids of prompts, within the room that there is (``texts.Room``)."""

    def start(self, messages: list[ChatMessage], tools: list[dict[str, Any]]) -> list[int]:
        """Return the ids of a first prompt, which ends with the generation prompt. Raises RequestError and NoRoom."""
        ...

    def extend(self, tail: Sequence[int], ended: bool, messages: list[ChatMessage]) -> list[int]:
        """Return the ids that add ``messages`` and a generation prompt to a path whose last ids are ``tail``.

        ``ended`` is False if the last reply was cut, so that its turn must be closed first. Raises RequestError and
        NoRoom.
        """
        ...


def _builder(tokenizer: Any, model_type: str, template: str) -> Any:
    """Return verl's builder for ``model_type`` (from config.json), or the one that the template seems to need."""
    from verl.utils.tokenizer.continuous_token_wiring import (
        ContinuousTokenModelFamily,
        create_continuous_token_builder,
        infer_continuous_token_model_family,
    )

    known = infer_continuous_token_model_family(hf_model_type=model_type) is not ContinuousTokenModelFamily.DEFAULT
    alike = [kind for mark, kind in _ALIKE.items() if mark in template]
    for kind in [model_type] * known + alike:
        with contextlib.suppress(ValueError):  # its control tokens are missing, or it is for pictures
            return create_continuous_token_builder(tokenizer, hf_model_type=kind)
    return create_continuous_token_builder(tokenizer, hf_model_type="")


def generation_config(model: str) -> dict[str, Any]:
    """Read a model's generation_config.json; return {} if there is none. ``model`` is a directory or hub name."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(model).to_diff_dict()
    except OSError:
        return {}


def vocabulary(model: str) -> int:
    """Return the number of ids of a model, which is often more than its tokenizer has. ``model`` as above."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model).get_text_config().vocab_size


def end_ids(tokenizer: Any, generation: dict[str, Any]) -> frozenset[int]:
    """Return the ids that end a reply: the tokenizer's end-of-sequence id, at which vLLM stops by itself, those that
    ``generation`` names (see generation_config), and those of the chat template's own end of turn (``turn_ends``).
    Warns if that is not the tokenizer's (``end_note``)."""
    if note := end_note(tokenizer, generation):
        log.warning(note)
    ends = {tokenizer.eos_token_id, *_named(generation), *turn_ends(tokenizer)}
    return frozenset(ends - {None})


def _named(generation: dict[str, Any]) -> list[int]:
    named = generation.get("eos_token_id") or []
    return [named] if isinstance(named, int) else named


def end_note(tokenizer: Any, generation: dict[str, Any]) -> str:
    """Return a line that says so if the tokenizer's end-of-sequence token is not what ends a turn in its chat template;
    "" if it is. ``generation``: see generation_config."""
    ends, eos = turn_ends(tokenizer), tokenizer.eos_token_id
    if eos in ends:
        return ""
    own = "has no end-of-sequence token" if eos is None else f"says that {tokenizer.decode([eos])!r} ends a sequence"
    if not ends:
        return f"the model's chat template ends a turn with no control token, and its tokenizer {own}"
    by = "only its generation_config.json names" if set(ends) <= {*_named(generation)} else "no file of it names"
    names = " or ".join(repr(tokenizer.decode([id])) for id in ends)
    return f"the model's tokenizer {own}, but its chat template ends a turn with {names}, which {by}: replies end there"


def end_of_turn(tokenizer: Any) -> list[int]:
    """Return the id with which a chat template closes a turn of the assistant: the first one after its text; none if
    that is no special token. A tokenizer that was converted often names another one as its end-of-sequence token."""
    asked = {"role": "user", "content": "x"}
    one, other = (_templated(tokenizer, asked, {"role": "assistant", "content": said}) for said in ("yes", "no"))
    common = next((n for n, (a, b) in enumerate(zip(one[::-1], other[::-1], strict=False)) if a != b), 0)
    return [int(one[-common])] if common and one[-common] in _special(tokenizer) else []


def _templated(tokenizer: Any, *messages: ChatMessage) -> list[int]:
    return tokenizer.apply_chat_template([*messages], tokenize=True, return_dict=False)


def _special(tokenizer: Any) -> set[int]:
    # A tokenizer that was saved again may name few special tokens; the others know it themselves.
    return {*tokenizer.all_special_ids, *(id for id, one in tokenizer.added_tokens_decoder.items() if one.special)}


def turn_end(tokenizer: Any) -> int:
    """Return the id that a scripted reply ends with: what closes a turn (``end_of_turn``), or else the tokenizer's
    end-of-sequence id."""
    return next(iter(end_of_turn(tokenizer)), tokenizer.eos_token_id)


def turn_ends(tokenizer: Any) -> list[int]:
    """Return the ids that end an assistant's turn in a chat template: that which closes it (``end_of_turn``), or else
    those that begin the next one, the user's or a tool's (GLM); none if these are no special tokens."""
    if closing := end_of_turn(tokenizer):
        return closing
    said, found = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "yes"}], list[int]()
    for role in ("user", "tool"):
        with contextlib.suppress(Exception):  # jinja's and the template's own have no common class
            before = _templated(tokenizer, *said)
            after = _templated(tokenizer, *said, {"role": role, "content": "x"})
            if after[: len(before)] == before and after[len(before)] in _special(tokenizer):
                found.append(int(after[len(before)]))
    return found


_Form = Callable[[ChatMessage], ChatMessage]


def call_form(tokenizer: Any, closing: list[int]) -> _Form:
    """Return a function that gives messages with calls the form in which the chat template writes them: some want
    arguments as JSON text, and some no content at all beside a call. Any other form they refuse, or leave out.
    ``closing``: see ``end_of_turn``."""
    given = {"file": "a.py"}
    call = {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": given}}
    reply = {"role": "assistant", "content": "", "tool_calls": [call]}

    def turns(form: _Form) -> int:
        """Return how many turns are written for a call; -1 if it is not written."""
        asked = {"role": "user", "content": "?"}
        ids, other = _templated(tokenizer, asked, form(reply)), _templated(tokenizer, asked)
        count = sum(ids.count(id) - other.count(id) for id in closing)
        text = tokenizer.decode(ids)
        return count if "look" in text and str(given) not in text else -1  # which is no JSON

    forms = [functools.partial(_called, text=text, none=none) for none in (False, True) for text in (False, True)]
    for form in forms:
        with contextlib.suppress(Exception):  # jinja's and the template's own have no common class
            if turns(form) == len(closing):
                return form
    return forms[0]


def _called(message: ChatMessage, text: bool, none: bool) -> ChatMessage:
    calls = message.get("tool_calls")
    if not calls or not (text or none):
        return message

    def written(function: dict[str, Any]) -> dict[str, Any]:
        given = function["arguments"]
        as_text = text and not isinstance(given, str)
        return function | {"arguments": json.dumps(given, ensure_ascii=False) if as_text else given}

    content = message["content"] or (None if none else "")
    calls = [call | {"function": written(call["function"])} for call in calls]
    return message | {"content": content, "tool_calls": calls}


class ChatTemplateRenderer:
    """A ChatTemplateRenderer uses a Hugging Face tokenizer and verl's builder for ``model_type`` (from config.json).
    ``closing``: see ``end_of_turn``.

    A model type without a builder that takes its tokenizer gets that of the family whose control tokens the template
    writes, else the generic one. Whether the ids between two turns are then those that the template writes is for
    ``fits.check_fits`` to say. Raises ValueError if the template fails.
    """

    def __init__(self, tokenizer: Any, model_type: str) -> None:
        from verl.utils.tokenizer.chat_template import apply_chat_template
        from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder

        self.tokenizer = tokenizer
        self.marks = Marks(tokenizer)
        self._encoder = Encoder(tokenizer)
        template = str(tokenizer.chat_template)
        said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        try:
            self.closing = end_of_turn(tokenizer)
            self._form = call_form(tokenizer, self.closing)
            between = self.text(said, []).rpartition(tokenizer.decode(self.closing) or "!")[2]
        except Exception as error:  # jinja's and the template's own have no common class
            raise ValueError(f"the model's chat template fails: {error}") from error
        prepared = _prepared(tokenizer, self._form, self.marks, self._encoder)
        self.builder = _builder(prepared, model_type, template)
        # Other builders write themselves what stands between the token that closes a turn and the next turn.
        own = type(self.builder) is not ContinuousTokenBuilder
        self._between = [] if own or not self.closing else self.encode(between)
        # If a builder renders first prompts in its own way, their text is not known.
        plain = type(self.builder).build_initial_tokens is ContinuousTokenBuilder.build_initial_tokens
        self._render: Any = None
        if plain:
            self._render = functools.partial(apply_chat_template, prepared, tokenize=False)
            self._by_comparison = self.builder.render_delta_token_id
            self.builder.render_delta_token_id = self._added
        self._ids_are_written = any(word in template for word in ("tool_call_id", ".id", "'id'", '"id"'))
        self._system_anywhere = True  # until the template refuses a system message that is not the first message

    def text(self, messages: list[ChatMessage], tools: list[dict[str, Any]], **options: Any) -> str:
        """Return a conversation as the model's own chat template writes it. Raises whatever the template does."""
        said = [self._form(message) for message in messages]
        return self.tokenizer.apply_chat_template(said, tools=tools, tokenize=False, **options)

    def encode(self, text: str) -> list[int]:
        """Return the tokenizer's ids of a text of the template's."""
        return self._encoder.encode(text)

    def start(self, messages: list[ChatMessage], tools: list[dict[str, Any]]) -> list[int]:
        """Implement Renderer.start."""

        def build(first: list[ChatMessage]) -> list[int]:
            hidden = self.marks.hide(tools) or None
            if self._render is None:
                return list(self.builder.build_initial_tokens(first, tools=hidden))
            text = self._render(first, add_generation_prompt=True, tools=hidden)
            return self.marks.encode(text, self._encoder.encode_prompt)

        return self._written(build, messages, first=1)

    def extend(self, tail: Sequence[int], ended: bool, messages: list[ChatMessage]) -> list[int]:
        """Implement Renderer.extend."""
        # A reply may have ended with another token than the one that closes a turn, as a base model's do.
        closed = list(tail) if ended and list(tail[-1:]) == self.closing[:1] else [*tail, *self.closing]
        closed += self._between
        if not self._ids_are_written:
            messages = [
                m if m["role"] != "tool" else {**m, "tool_call_id": f"call_{i}"} for i, m in enumerate(messages)
            ]

        def build(more: list[ChatMessage]) -> list[int]:
            merged = self.builder.merge_context_tokens([], more, closed)
            # If the token that ends a turn also begins the next one (GLM), the builder removes it from the prefix.
            # Sampled tokens must stay, so the context is appended after it, without that token if it is the same.
            keep = len(closed) - merged.removed_prefix_token_count
            appended = merged.token_ids[keep:]
            same = 0
            while keep + same < len(closed) and appended[same : same + 1] == closed[keep + same : keep + same + 1]:
                same += 1
            if keep + same < len(closed) and more and more[0]["role"] == "system":
                return build([as_user(more[0]), *more[1:]])  # which is what the policy has begun
            return [*closed[len(tail) :], *appended[same:]]

        return self._written(build, messages, first=0)

    def _added(self, before: list[ChatMessage], added: list[ChatMessage], **options: Any) -> list[int]:
        """Return the ids that the messages ``added`` add to those of the messages ``before``.

        verl's builders encode both texts and compare the ids. Where the longer text can be cut after the shorter one,
        only what it adds is encoded.
        """
        start = self._render(before, **options | {"add_generation_prompt": False})
        text = self._render(before + added, **{"add_generation_prompt": False} | options)
        if added and added[-1]["role"] == "assistant":
            # Some templates write the last message in another way, and here another one always comes next.
            next_one = {"role": "tool" if added[-1].get("tool_calls") else "user", "content": "?"}
            with contextlib.suppress(Exception):  # they may refuse it after what is before
                after = self._render([*before, next_one], **options | {"add_generation_prompt": False})[len(start) :]
                longer = self._render([*before, *added, next_one], **options | {"add_generation_prompt": False})
                text = longer.removesuffix(after) if longer.endswith(after) else text
        if self._encoder.can_cut(text, start):
            return self.marks.encode(text[len(start) :], self._encoder.encode)
        return self._by_comparison(before, added, **options)

    def _written(self, build: Any, messages: list[ChatMessage], first: int) -> list[int]:
        """Call ``build``; if the template refuses system messages from index ``first`` on, make them the user's."""
        messages = self.marks.hide(messages)
        users = [*messages[:first], *(as_user(message) for message in messages[first:])]
        try:
            if self._system_anywhere and users != messages:
                try:
                    return build(messages)
                except NoRoom:
                    raise
                except Exception:  # of jinja or verl; if the system message is not the cause, build fails again
                    ids = build(users)
                    self._system_anywhere = False
                    return ids
            return build(users)
        except NoRoom:
            raise
        except Exception as error:
            raise RequestError(f"messages: the model's chat template refuses them: {error}") from error


def _prepared(tokenizer: Any, form: _Form, marks: Marks, encoder: Encoder) -> Any:
    """Return a copy of the tokenizer that encodes texts with ``encoder`` and the placeholders in them with ``marks``,
    and that gives its template messages in the ``form`` that it wants.

    verl's builders find what a turn adds by comparing with a synthetic conversation, which is the same in every turn.
    So the copy remembers short conversations without a generation prompt, until the date changes, because some
    templates write the date.
    """
    apply = tokenizer.apply_chat_template

    def encoded(text: str, **options: Any) -> list[int]:
        return marks.encode(text, encoder.encode)  # verl asks for no other option than add_special_tokens=False

    @functools.lru_cache(_REMEMBERED)
    def known(key: bytes, day: date) -> tuple[str, tuple[int, ...]]:
        conversation, options = msgspec.json.decode(key)
        text = apply(conversation, **options)
        return text, tuple(encoded(text))

    def applied(conversation: Any, **options: Any) -> Any:
        conversation = [form(message) for message in conversation]
        wants_ids = options.get("tokenize", True)
        if wants_ids and options.get("return_dict", True):
            return apply(conversation, **options)
        options["tokenize"] = False
        if not options.get("add_generation_prompt"):
            key = msgspec.json.encode([conversation, options])
            if len(key) <= _SHORT:
                text, ids = known(key, date.today())
                return list(ids) if wants_ids else text
        text = apply(conversation, **options)
        return encoded(text) if wants_ids else text

    copied = copy.copy(tokenizer)
    copied.apply_chat_template, copied.encode = applied, encoded
    return copied


def as_user(message: ChatMessage) -> ChatMessage:
    """Return a message as the user's if it is a system message."""
    return {**message, "role": "user"} if message.get("role") == "system" else message
