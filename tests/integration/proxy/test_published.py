"""Sessions write what the published chat templates of the families write, with a real BPE tokenizer."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from rollout.audit import closing_of
from rollout.proxy.fits import check_fits, differences
from rollout.proxy.marks import control_texts
from rollout.proxy.parsers import FORMATS, VllmReplyParser
from rollout.proxy.render import ChatTemplateRenderer
from rollout.reading import FormatReading
from tests.published import MODELS, REFUSED, tokenizer_of

TYPES = {"path": "string", "text": "string", "count": "integer", "ratio": "number", "all": "boolean", "map": "object"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Edit.",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind, "description": "It."} for key, kind in TYPES.items()},
                "required": [],
            },
        },
    }
    for name in ("Edit", "mcp__files-read")
]
BRIEF = "".join(f'\n{{"name": "{tool["function"]["name"]}", "arguments": []}}' for tool in TOOLS)
TEXTS = [
    "x", "", "\n", "\n two\n", "  both  ", "def f():\n    return '<b>' \\ \"q\"\n", "ä 漢 🙂", "null", "12", "true",
    '{"a": 1}', "&lt;&amp; <i>", "a\tb\rc", "[1, 2]",
]  # fmt: skip
VALUES: list[dict[str, Any]] = [
    *({"text": text} for text in TEXTS),
    {},
    {"path": "b", "count": 2, "all": True, "ratio": 1.5},
    {"all": False, "count": -1},
]
ASK = [{"role": "system", "content": "s"}, {"role": "user", "content": "fix it"}]


@functools.cache
def renderer(model: str) -> ChatTemplateRenderer:
    return ChatTemplateRenderer(tokenizer_of(model), (MODELS | REFUSED)[model][2])


@pytest.mark.parametrize("model", MODELS)
def test_a_session_writes_what_the_template_writes(model: str) -> None:
    # DeepSeek's own templates leave it to the system prompt to describe tools.
    without = ["a first prompt: the model's chat template leaves out the tools"] * model.startswith("DeepSeek")
    assert [*differences(renderer(model))] == without
    for parser in MODELS[model][3]:
        with pytest.raises(ValueError, match=without[0]) if without else contextlib.nullcontext():
            check_fits(renderer(model), parser, any_family=False)


@pytest.mark.parametrize("model", MODELS)
def test_the_audit_knows_what_closes_a_turn(model: str, tmp_path: Path) -> None:
    render = renderer(model)
    (tmp_path / "chat_template.jinja").write_text(render.tokenizer.chat_template)
    told = {"bos_token": render.tokenizer.bos_token, "eos_token": render.tokenizer.eos_token}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    assert [closing_of(tmp_path, render.tokenizer.backend_tokenizer)] == (render.closing or [None])


def test_our_template_of_smollm2_writes_what_that_of_qwen2_5_does() -> None:
    """But of tools only the name and the arguments that must be given."""
    call = {"type": "function", "function": {"name": "Edit", "arguments": {"text": "<b>"}}}
    said = [
        *ASK,
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        *[{"role": "tool", "content": "a"}] * 2,
    ]
    said += [{"role": "assistant", "content": "So.", "tool_calls": [call]}, {"role": "tool", "content": "b"}, ASK[1]]
    said += [{"role": "assistant", "content": "Done."}]
    ours, theirs = (renderer(model).tokenizer.apply_chat_template for model in ("SmolLM2", "Qwen2.5"))
    for count in range(1, len(said) + 1):
        for given in ({"tools": TOOLS}, {}, {"tools": TOOLS, "add_generation_prompt": True}):
            text = theirs(said[:count], tokenize=False, **given)
            brief = re.sub("<tools>\\n{.*}\\n</tools>", f"<tools>{BRIEF}\\n</tools>", text, flags=re.DOTALL)
            assert ours(said[:count], tokenize=False, **given) == brief


@pytest.mark.parametrize("model", REFUSED)
def test_a_template_that_cannot_be_rendered_is_refused(model: str) -> None:
    with pytest.raises(ValueError, match=r"a first prompt with a call: .*'append' of 'list' object is unsafe"):
        check_fits(renderer(model), "kimi_k2", any_family=False)


@pytest.mark.parametrize("model", MODELS)
def test_a_reply_that_ended_with_another_token_is_closed_as_the_template_closes_it(model: str) -> None:
    """After that token, which stays because it was sampled, all is as it would be without it."""
    render = renderer(model)
    user = [{"role": "user", "content": "on"}]
    (other, *_) = [id for id in render.tokenizer.all_special_ids if [id] != render.closing]
    ended = render.extend([5, other], True, user)
    assert ended == render.extend([5], False, user)
    assert render.closing == ended[: len(render.closing)]


@pytest.mark.parametrize("model", MODELS)
def test_calls_that_the_template_writes_are_read_to_the_byte(model: str) -> None:
    """Also by the audit's own reading."""
    render, parsers = renderer(model), MODELS[model][3]
    end = render.tokenizer.decode(render.closing)
    for name in parsers:
        parser, reading = VllmReplyParser(name, None, render.tokenizer), FormatReading(name)
        starts = FORMATS[name]().starts
        for values in VALUES:
            for calls in ([("Edit", values)], [("mcp__files-read", values), ("Edit", {"path": "z"})]):
                written = [
                    {"type": "function", "id": f"call_{n}", "function": {"name": tool, "arguments": given}}
                    for n, (tool, given) in enumerate(calls)
                ]
                reply = {"role": "assistant", "content": "", "tool_calls": written}
                text = render.text([*ASK, reply], TOOLS).removeprefix(render.text(ASK, TOOLS))
                text = text[min(text.index(start) for start in starts if start in text) :]
                text = text.partition(end)[0] if end else text
                read = parser.parse(text, TOOLS)
                assert [(b["name"], b["input"]) for b in read.blocks if b["type"] == "tool_use"] == calls, (name, text)
                assert reading.agrees(text, read.blocks, True), (name, text)


@pytest.mark.parametrize("model", MODELS)
def test_what_a_text_spells_is_no_control_token(model: str) -> None:
    render = renderer(model)
    spelled = "".join(control_texts(render.tokenizer))
    control = set(render.tokenizer.added_tokens_decoder)

    def controls(text: str) -> list[int]:
        tool = json.loads(json.dumps(TOOLS[0]).replace("Edit.", json.dumps(text)[1:-1]))
        result = {"role": "tool", "tool_call_id": "c", "name": "Edit", "content": text}
        ids = render.start([ASK[0], {"role": "user", "content": text}], [tool])
        for more in ([result], [{"role": "user", "content": text}]):
            ids += render.extend([5, *render.closing], True, more)
        return [id for id in ids if id in control]

    assert controls(spelled) == controls("nothing")
    assert spelled in render.tokenizer.decode(render.extend([5], False, [{"role": "user", "content": spelled}]))
