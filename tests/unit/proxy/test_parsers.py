"""This module tests the strict parsers, with vLLM's own behind them: a reply has whole calls or is text as sampled."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rl.quickstart import policy as quickstart
from rollout.proxy import parsers
from rollout.proxy.engine import Completion
from rollout.proxy.parsers import FORMATS, ParsedReply, ReplyParser
from rollout.proxy.render import ChatTemplateRenderer
from rollout.proxy.session import Policy, Session
from rollout.proxy.wire import decode_request
from rollout.reading import FormatReading
from tests.kit import make_parser

TYPES = {"path": "string", "text": "string", "count": "integer", "all": "boolean", "options": "object"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "",
            "parameters": {"type": "object", "properties": {key: {"type": kind} for key, kind in TYPES.items()}},
        },
    }
    for name in ("Edit", "mcp__files-read")
]
Call = tuple[str, dict[str, Any]]
EDIT: Call = ("Edit", {"path": "a.py", "text": "def f():\n    return '<b>'\n", "count": 2, "all": True})
READ: Call = ("mcp__files-read", {"path": "src/ä b.py", "options": {"deep": [1, None]}})


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def hermes(calls: list[Call], tag: str = "tool_call") -> str:
    bodies = [json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in calls]
    return "\n".join(f"<{tag}>\n{body}\n</{tag}>" for body in bodies)


def qwen(calls: list[Call], tag: str = "tool_call", line: str = "\n") -> str:
    return "\n".join(
        f"<{tag}>\n<function={name}>\n"
        + "".join(f"<parameter={key}>{line}{text_of(value)}{line}</parameter>\n" for key, value in arguments.items())
        + f"</function>\n</{tag}>"
        for name, arguments in calls
    )


def glm(calls: list[Call], line: str) -> str:
    return line.join(
        f"<tool_call>{name}{line}"
        + "".join(
            f"<arg_key>{key}</arg_key>{line}<arg_value>{text_of(value)}</arg_value>{line}"
            for key, value in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in calls
    )


def kimi(calls: list[Call]) -> str:
    bodies = [
        f"<|tool_call_begin|>functions.{name}:{n}<|tool_call_argument_begin|>{text_of(arguments)}<|tool_call_end|>"
        for n, (name, arguments) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(bodies)}<|tool_calls_section_end|>"


def deepseek(calls: list[Call], form: str) -> str:
    bodies = [
        f"<｜tool▁call▁begin｜>{form.format(name=name, arguments=text_of(arguments))}<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(bodies) + "<｜tool▁calls▁end｜>"


def minimax(calls: list[Call]) -> str:
    bodies = [
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{key}">{text_of(value)}</parameter>\n' for key, value in arguments.items())
        + "</invoke>\n"
        for name, arguments in calls
    ]
    return "<minimax:tool_call>\n" + "".join(bodies) + "</minimax:tool_call>"


# Each writes calls as the chat templates of the model family do.
WRITERS: dict[str, Callable[[list[Call]], str]] = {
    "deepseek_v3": lambda calls: deepseek(calls, "function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"),
    "deepseek_v31": lambda calls: deepseek(calls, "{name}<｜tool▁sep｜>{arguments}"),
    "glm45": lambda calls: glm(calls, "\n"),
    "glm47": lambda calls: glm(calls, ""),
    "hermes": hermes,
    "kimi_k2": kimi,
    "longcat": lambda calls: hermes(calls, "longcat_tool_call"),
    "mimo": qwen,
    "minimax_m2": minimax,
    "qwen3_coder": qwen,
    "qwen3_xml": qwen,
    "seed_oss": lambda calls: qwen(calls, "seed:tool_call", line=""),
}
REASONING = {
    "qwen3_coder": "qwen3",
    "hermes": "deepseek_r1",
    "glm45": "glm45",
    "kimi_k2": "kimi_k2",
    "minimax_m2": "minimax_m2",
    "seed_oss": "seed_oss",
}
OPENS = "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
CLOSES = "{% if add_generation_prompt %}<|assistant|><think>\n\n</think>\n\n{% endif %}"


def make_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """Make a tokenizer of bytes, in which every marker of every format is one token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    markers = [marker for make in FORMATS.values() for marker in (*make().starts, *make().ends)]
    more = ["<think>", "</think>", "<seed:think>", "</seed:think>", "<｜tool▁sep｜>", "<|tool_call_argument_begin|>"]
    inner.add_tokens(list(dict.fromkeys([*markers, *more])))
    return PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=template)


class Checked:
    """A parser, each of whose results the audit's own reading must agree with."""

    def __init__(self, spec: str, template: str | None) -> None:
        self.spec, self.inner, self.reading = spec, make_parser(spec, make_tokenizer(template)), FormatReading(spec)

    def parse(self, text: str, tools: Sequence[dict[str, Any]]) -> ParsedReply:
        read = self.inner.parse(text, tools)
        assert self.reading.agrees(text, read.blocks, bool(tools)), (text, read.blocks)
        assert self.reading.malformed(text, read.blocks, bool(tools)) == read.malformed, text
        return read


PARSERS: dict[tuple[str, str | None], ReplyParser] = {}


def parser(spec: str, template: str | None = None) -> ReplyParser:
    if (spec, template) not in PARSERS:
        PARSERS[spec, template] = Checked(spec, template)
    return PARSERS[spec, template]


def use(call: Call) -> dict[str, Any]:
    return {"type": "tool_use", "name": call[0], "input": call[1]}


def said(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}]


every_format = pytest.mark.parametrize("name", sorted(FORMATS))


def test_every_format_is_tested() -> None:
    assert set(WRITERS) == set(FORMATS)


@every_format
def test_whole_calls_are_parsed_and_text_is_kept_unchanged(name: str) -> None:
    write = WRITERS[name]
    for before, after in (("", ""), ("\n\n", "\n"), ("Let me look.\n\n", ""), ("  one ", " and two\n")):
        read = parser(name).parse(before + write([EDIT, READ]) + after, TOOLS)
        wanted = [*said(before), use(EDIT), use(READ), *said(after)]
        assert read.blocks == [block for block in wanted if block.get("text", "x").strip()]
        assert not read.malformed


@pytest.mark.parametrize("name", [name for name in sorted(FORMATS) if FORMATS[name]().key])
def test_strings_are_read_from_the_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.24's parsers strip them; this is what its replies look like under every other version."""
    read: Any = make_parser(name, make_tokenizer())
    vllms = read._reader

    def stripping(tools: Any) -> Callable[[str], list[Any]]:
        def calls_of(text: str) -> list[Any]:
            found = vllms(tools)(text)
            for call in found:
                pairs = json.loads(call.function.arguments).items()
                call.function.arguments = json.dumps({k: v.strip() if isinstance(v, str) else v for k, v in pairs})
            return found

        return calls_of

    monkeypatch.setattr(read, "_reader", stripping)
    edit: Call = ("Edit", {"path": "a.py", "text": "    x = 1\n\n", "count": 3})
    assert read.parse(WRITERS[name]([edit]), TOOLS).blocks == [use(edit)]


@every_format
def test_the_audits_reading_finds_what_differs(name: str) -> None:
    reading = FormatReading(name)
    blocks = parser(name).parse(" one " + WRITERS[name]([EDIT, READ]) + " two", TOOLS).blocks
    text = " one " + WRITERS[name]([EDIT, READ]) + " two"
    assert reading.agrees(text, blocks, True) and not reading.agrees(text, blocks, False)
    first, edit, read, last = blocks
    arguments = edit["input"]
    others = [
        [edit, read, last], [first, edit, read], [first, edit, last], [first, read, edit, last], [*blocks, last],
        [said("one")[0], edit, read, last], [first, {**edit, "name": "Write"}, read, last],
        [first, {**edit, "input": {}}, read, last], said(text[:-1]),
    ]  # fmt: skip
    changed = {"text": arguments["text"].strip(), "count": 3, "all": False, "path": "b.py", "more": 1}
    others += [[first, {**edit, "input": {**arguments, key: value}}, read, last] for key, value in changed.items()]
    options = {**read["input"], "options": {"deep": [2, None]}}
    for other in [*others, [first, edit, {**read, "input": options}, last]]:
        assert not reading.agrees(text, other, True), other


@every_format
def test_text_without_calls_is_text(name: str) -> None:
    for text in ("", "\n", " Done: a < b, <b>bold</b> & [x] {y}. ", "It ends with <"):
        read = parser(name).parse(text, TOOLS)
        assert (read.blocks, read.malformed) == (said(text), False)


@every_format
def test_without_tools_nothing_is_a_call(name: str) -> None:
    text = WRITERS[name]([EDIT])
    read = parser(name).parse(text, [])
    assert (read.blocks, read.malformed) == (said(text), False)


@every_format
def test_a_call_with_a_missing_or_an_additional_marker_is_text(name: str) -> None:
    whole = "Look.\n" + WRITERS[name]([EDIT, READ])
    form = FORMATS[name]()
    markers = {marker for marker in (*form.starts, *form.ends) if marker in whole}
    assert len(markers) >= 2
    for marker in markers:
        broken = [whole.replace(marker, "", 1), whole.replace(marker, marker * 2, 1)]
        at = whole.rindex(marker)
        broken += [whole[:at] + whole[at + len(marker) :], whole + marker, marker + whole]
        for text in broken:
            read = parser(name).parse(text, TOOLS)
            assert (read.blocks, read.malformed) == (said(text), True), text


@pytest.mark.parametrize(
    "name, text",
    [
        ("qwen3_coder", qwen([("Edit", {"path": "a", "text": "b"})]).replace("</parameter>", "", 1)),
        ("qwen3_coder", "<tool_call>\n<function=Edit>\n<parameter=path>a</parameter>junk</function>\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=Edit>\njust words\n</function>\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=>\n</function>\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n</tool_call>"),
        ("qwen3_coder", qwen([("Edit", {"path": "a", "text": "b"})]).replace("=text", "=path")),
        ("qwen3_coder", "<function=Edit>\n<parameter=path>a</parameter>\n</function>"),
        ("hermes", '<tool_call>{"name": "Edit", "arguments": {"path": "a"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "Edit", "arguments": "path"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "Edit"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "Edit", "arguments": {"count": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "Edit", "arguments": {"count": 1e999}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "Edit", "arguments": {"text": "\\ud83d"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "Edit", "arguments": {"count": %s}}</tool_call>' % ("9" * 30)),
        ("hermes", '<tool_call>{"name": "Edit", "arguments": {"options": %s}}</tool_call>' % ("[" * 5000 + "]" * 5000)),
        ("hermes", '<tool_call>{"name": "Edit", "arguments": {"options": %s}}</tool_call>' % ("[" * 300 + "]" * 300)),
        ("hermes", '<tool_call>{"name": "Edit", "arguments": {"options": %s}}</tool_call>' % ("[" * 70 + "]" * 70)),
        ("glm45", "<tool_call>Edit\n<arg_key>path</arg_key>\nno value\n</tool_call>"),
        ("glm45", "<tool_call>NoSuchTool\n</tool_call>"),
        ("kimi_k2", kimi([EDIT]).replace(text_of(EDIT[1]), "")),
        ("kimi_k2", kimi([EDIT]).replace(":0", "")),
        ("deepseek_v31", deepseek([EDIT], "{name}<｜tool▁sep｜>{arguments}").replace("}<", "<")),
        ("deepseek_v3", deepseek([EDIT], "function<｜tool▁sep｜>{name}\n{arguments}")),
    ],
)  # fmt: skip
def test_what_vllm_would_repair_or_drop_is_text(name: str, text: str) -> None:
    read = parser(name).parse(text, TOOLS)
    assert (read.blocks, read.malformed) == (said(text), True)


# What policies write into files, with the characters that the formats are made of.
values = st.text(alphabet=st.sampled_from("a ä\n\t<>/{}\"'\\=|_`"), max_size=12) | st.text(max_size=8)
arguments = st.fixed_dictionaries(
    {}, optional={"path": values, "text": values, "count": st.integers(-9, 9), "all": st.booleans()}
)
calls = st.lists(st.tuples(st.sampled_from(["Edit", "mcp__files-read"]), arguments), min_size=1, max_size=3)


def check_cut(name: str, text: str, full: list[dict[str, Any]]) -> None:
    """Check the beginning ``text`` of a reply with the blocks ``full``: it has its first blocks, or is all text."""
    cut = parser(name).parse(text, TOOLS)
    if any(block["type"] == "tool_use" for block in cut.blocks):
        assert not cut.malformed and cut.blocks == full[: len(cut.blocks)]
    else:
        assert cut.blocks == said(text)
        assert cut.malformed == any(start in text for start in FORMATS[name]().starts)


@every_format
def test_every_cut_of_a_reply(name: str) -> None:
    whole = "Look. " + WRITERS[name]([EDIT, READ])
    for at in range(len(whole) + 1):
        check_cut(name, whole[:at], [*said("Look. "), use(EDIT), use(READ)])


@every_format
@settings(max_examples=100)
@given(wanted=calls, before=st.sampled_from(["", "So:\n", "a < b "]), share=st.floats(0, 1))
def test_any_cut_of_any_reply(name: str, wanted: list[Call], before: str, share: float) -> None:
    form, write = FORMATS[name](), WRITERS[name]
    whole = before + write(wanted)
    if any(marker in text_of(v) for marker in (*form.starts, *form.ends) for _, a in wanted for v in a.values()):
        return
    read = parser(name).parse(whole, TOOLS)
    full = [*(said(before) if before else []), *map(use, wanted)]
    assert read.blocks == full
    check_cut(name, whole[: int(share * len(whole))], full)


STREAMED: dict[str, ReplyParser] = {}


def streamed(name: str) -> ReplyParser:
    """A parser that makes the pieces of a stream, as vLLM's do by themselves."""
    if name not in STREAMED:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parsers, "_unstreamed", lambda parser: parser)
            STREAMED[name] = make_parser(name, make_tokenizer())
            STREAMED[name].parse(WRITERS[name]([EDIT]), TOOLS)  # vLLM's parser for these tools is made here, and kept
    return STREAMED[name]


@every_format
@settings(max_examples=50)
@given(wanted=calls, before=st.sampled_from(["", "So:\n", "a < b "]), cut=st.floats(0, 1), gap=st.floats(0, 1))
def test_a_reply_is_read_the_same_as_with_the_pieces_of_a_stream(
    name: str, wanted: list[Call], before: str, cut: float, gap: float
) -> None:
    whole = before + WRITERS[name](wanted)
    at, skip = int(cut * len(whole)), int(gap * len(whole))
    # Values may spell markers here, and the reply may be cut at its end or miss a piece in the middle.
    for text in (whole, whole[:at], whole[: min(at, skip)] + whole[max(at, skip) :], f"{whole}{before}{whole}"):
        assert parser(name).parse(text, TOOLS) == streamed(name).parse(text, TOOLS), text
        calls = [
            [(call.function.name, call.function.arguments) for call in reader(text)]
            for reader in (made._reader(TOOLS) for made in (parser(name).inner, streamed(name)))
        ]
        assert calls[0] == calls[1], text


def test_a_parser_of_vllm_without_the_switch_is_left_as_it_is() -> None:
    for bare in (SimpleNamespace(), SimpleNamespace(_parser_engine=SimpleNamespace())):
        assert parsers._unstreamed(bare) is bare and not vars(getattr(bare, "_parser_engine", SimpleNamespace()))


@pytest.mark.parametrize("tool", sorted(REASONING))
def test_thinking_is_split_off_and_the_rest_is_parsed_as_usual(tool: str) -> None:
    write, tag = WRITERS[tool], "seed:think" if tool == "seed_oss" else "think"
    read = parser(f"{tool}+{REASONING[tool]}").parse
    thought = {"type": "thinking", "thinking": "\nHm, <b>.\n"}
    reply = f"<{tag}>\nHm, <b>.\n</{tag}>\n\n"
    assert read(reply + "Yes.", TOOLS).blocks == [thought, *said("\n\nYes.")]
    assert read(reply + write([EDIT]), TOOLS).blocks == [thought, use(EDIT)]
    assert read(reply + "So: " + write([EDIT]), TOOLS).blocks == [thought, *said("\n\nSo: "), use(EDIT)]
    assert read(reply, TOOLS).blocks == [thought]
    assert read("Yes.", TOOLS).blocks == said("Yes.")
    broken = write([EDIT])[:-3]
    assert read(reply + broken, TOOLS).blocks == [thought, *said("\n\n" + broken)]
    assert read(reply + broken, TOOLS).malformed
    # The reply was cut, so the thinking has no end.
    assert read(f"<{tag}>Hm", TOOLS).blocks == [{"type": "thinking", "thinking": "Hm"}]
    assert read(f"<{tag}>\n\n</{tag}>\n\nYes.", TOOLS).blocks == said("\n\nYes.")


@pytest.mark.parametrize("tool", ["qwen3_coder", "hermes", "glm45", "kimi_k2"])
def test_a_generation_prompt_that_opens_the_thinking(tool: str) -> None:
    read = parser(f"{tool}+{REASONING[tool]}", OPENS).parse
    assert read("Hm.\n</think>\n\nYes.", TOOLS).blocks == [
        {"type": "thinking", "thinking": "Hm.\n"},
        *said("\n\nYes."),
    ]
    assert read("Hm. Still", TOOLS).blocks == [{"type": "thinking", "thinking": "Hm. Still"}]
    assert read("<think>Hm.</think>Yes.", TOOLS).blocks == [{"type": "thinking", "thinking": "Hm."}, *said("Yes.")]
    assert not read("Hm. Still", TOOLS).malformed


def test_a_generation_prompt_that_closes_the_thinking() -> None:
    assert parser("qwen3_coder+qwen3", CLOSES).parse("Yes.", TOOLS).blocks == said("Yes.")


def test_a_call_ends_unfinished_thinking_in_some_families() -> None:
    thought = {"type": "thinking", "thinking": "I look.\n"}
    text = "I look.\n" + qwen([EDIT])
    assert parser("qwen3_coder+qwen3", OPENS).parse(text, TOOLS).blocks == [thought, use(EDIT)]
    text = "I look.\n" + hermes([EDIT])
    read = parser("hermes+deepseek_r1", OPENS).parse(text, TOOLS)
    assert (read.blocks, read.malformed) == ([{"type": "thinking", "thinking": text}], True)


def test_unknown_names_and_unfit_tokenizers_are_errors() -> None:
    assert parser("qwen3_coder+qwen3").spec == "qwen3_coder+qwen3" and parser("hermes").spec == "hermes"
    with pytest.raises(ValueError, match=r"'pythonic'.*known are: .*qwen3_coder"):
        make_parser("pythonic", make_tokenizer())
    with pytest.raises(ValueError, match=r"'socrates'; known are: .*qwen3"):
        make_parser("hermes+socrates", make_tokenizer())
    with pytest.raises(ValueError, match="no markers around thinking"):
        make_parser("hermes+deepseek_v3", make_tokenizer())
    plain = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"x": 0}, unk_token="x")))
    with pytest.raises(RuntimeError, match="tokenizer"):
        make_parser("deepseek_v31", plain)


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        (["session"], {"aiohttp", "vllm", "torch", "verl", "transformers", "ray"}),  # with messages, tree and replies
        (["parsers", "render", "server", "vllm_http"], {"vllm", "torch", "verl", "transformers", "ray"}),
    ],
)
def test_what_an_import_of_the_proxy_does_not_import(modules: list[str], heavy: set[str]) -> None:
    code = f"import sys, {', '.join('rollout.proxy.' + module for module in modules)}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert heavy.isdisjoint(loaded)


async def test_a_call_is_a_call_however_it_is_spelled_and_keeps_its_own_tokens() -> None:
    """By the control tokens, or by ordinary tokens with the same text, as for vLLM's server. Only a sampled end token
    ends a reply, and not a text that spells one."""
    tokenizer = quickstart.make_tokenizer()
    parser = make_parser("qwen3_coder", tokenizer)
    renderer = ChatTemplateRenderer(tokenizer, "qwen3")
    text = "<|im_end|>" + qwen([("Edit", {"path": "a.py"})])
    as_tokens = tokenizer.encode(text, add_special_tokens=False)
    as_text = renderer.marks.encode(renderer.marks.hide(text), lambda part: tokenizer.encode(part))
    control = {*tokenizer.get_added_vocab().values()}
    assert control & {*as_tokens} and not control & {*as_text}
    assert tokenizer.decode(as_tokens) == tokenizer.decode(as_text) == text
    replies = iter([[*as_tokens, tokenizer.eos_token_id], [*as_text, tokenizer.eos_token_id], as_text, as_tokens])

    class Engine:
        async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Completion:
            ids = next(replies)
            return Completion(ids, [-1.0] * len(ids))

    policy = Policy(Engine(), renderer, parser, tokenizer, frozenset({tokenizer.eos_token_id}), 10_000, 10**6)
    session = Session("e", policy)
    nodes = []
    tools = [{"name": "Edit", "input_schema": TOOLS[0]["function"]["parameters"]}]
    for number in range(3):
        asked = [{"role": "user", "content": f"{number}"}]
        body = {"messages": asked, "tools": tools}
        nodes.append(await session.prepare(decode_request(json.dumps(body).encode()), False).reply())
    said = [[{k: v for k, v in block.items() if k != "id"} for block in node.reply.blocks] for node in nodes]
    assert said[0] == said[1] == said[2] and [block["type"] for block in said[0]] == ["text", "tool_use"]
    assert [node.ids for node in nodes] == [[*as_tokens, *nodes[0].ids[-1:]], [*as_text, *nodes[0].ids[-1:]], as_text]
    assert [node.ended for node in nodes] == [True, True, False]
    result = {"type": "tool_result", "tool_use_id": nodes[1].reply.blocks[1]["id"], "content": "ok"}
    talk = [{"role": "user", "content": "1"}, {"role": "assistant", "content": list(nodes[1].reply.blocks)}]
    body = {"messages": [*talk, {"role": "user", "content": [result]}], "tools": tools}
    after = await session.prepare(decode_request(json.dumps(body).encode()), False).reply()
    assert after.path_ids()[: nodes[1].length] == nodes[1].path_ids()


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_reply_is_read_the_same_whatever_the_parser_has_read_before(name: str) -> None:
    """Parsers on vLLM's parser engine are used again."""
    write = WRITERS[name]
    whole = write([EDIT, READ])
    texts = [whole, whole[: len(whole) // 2], f"a {write([READ])} b", whole[len(whole) // 3 :], "none", whole]
    used = make_parser(name, make_tokenizer())
    for text in texts * 2:
        assert used.parse(text, TOOLS) == make_parser(name, make_tokenizer()).parse(text, TOOLS), text
