"""This module tests that calls which are read without vLLM's parser are those that it reads."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.proxy import parsers
from rollout.proxy.parsers import FORMATS
from tests.unit.proxy.test_parsers import EDIT, READ, TOOLS, WRITERS, Call, parser, said, use

# What may stand between the markers of a call, and what a policy may say instead.
blanks = st.sampled_from(["", "\n", " ", "\n\n", "\t", "\u2003", "\x0b"])
plain_values = st.text(alphabet=st.sampled_from("a ä\n\t>/{}\"'\\=|_`&;\0\u2028"), max_size=12) | st.sampled_from(
    [
        "true",
        "1",
        "[]",
        "{}",
        "None",
        "&lt;b&gt;",
        "function=Edit>",
        "/parameter>",
        "]]>",
        "<",
        "</b>",
        "<think>",
        "null",
    ]
)
junk = st.sampled_from(
    ["x", ">", "=", "<", "\ud800", "</think>", "</parameter>", "<parameter=path>", "<tool_call>", "nUll"]
)


@st.composite
def written_calls(draw: st.DrawFn) -> str:
    """Write calls as the Qwen families do, or nearly so."""
    parts: list[str] = [draw(st.sampled_from(["", "Look.\n", " 1 > 0 "]))]
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(["Edit"] * 6 + ["Odd", "No", ""]))
        parts += "<tool_call>", draw(blanks), f"<function={name}>", draw(blanks)
        for key in draw(st.lists(st.sampled_from(["path", "text"]), max_size=2, unique=True)):
            parts += f"<parameter={key}>", draw(plain_values), "</parameter>", draw(blanks)
        if draw(st.integers(0, 9)) == 0:
            parts += (
                f"<parameter={draw(st.sampled_from(['path', 'count', 'kind', 'any', 'a b']))}>",
                "1",
                "</parameter>",
            )
        parts += "</function>", draw(blanks), "</tool_call>", draw(blanks)
    if draw(st.integers(0, 3)) == 0:
        at = draw(st.integers(0, len(parts) - 1))
        parts[at : at + draw(st.integers(0, 1))] = draw(st.lists(junk, max_size=1))
    return "".join(parts)


ODD = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": {"properties": properties}}}
    for name, properties in (
        (
            "Edit",
            {"path": {"type": "string"}, "text": {"type": "string", "description": "d"}, "count": {"type": "int"}},
        ),
        ("Odd", {"kind": {"type": "string", "enum": ["a", 1, None]}, "any": {}, "path": {"type": ["string", "null"]}}),
        ("Odd", {"text": {"type": "string"}}),
    )
]


@pytest.mark.parametrize("name", [name for name in sorted(FORMATS) if FORMATS[name]().plain])
@settings(max_examples=400)
@given(text=written_calls(), tools=st.sampled_from([ODD, ODD[:2], ODD[:1], TOOLS]))
def test_what_is_read_without_vllms_parser_is_what_it_reads(name: str, text: str, tools: list[dict[str, Any]]) -> None:
    if name == "seed_oss":
        text = text.replace("tool_call>", "seed:tool_call>")
    quick = parsers._read_plain(text, FORMATS[name](), parsers._strings(tools))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parsers, "_read_plain", lambda *_: None)
        full = parser(name).parse(text, tools)
    if quick is not None:
        assert not full.malformed and [*map(repr, quick)] == [*map(repr, full.blocks)]  # in the same order, too


@pytest.mark.parametrize("name", [name for name in sorted(FORMATS) if FORMATS[name]().plain])
def test_most_calls_are_read_without_vllms_parser(name: str) -> None:
    format, strings = FORMATS[name](), parsers._strings(TOOLS)
    run: Call = ("Edit", {"path": "a.py", "text": "cat > b && echo '\u00e4'\n\n  x"})
    assert parsers._read_plain("So: " + WRITERS[name]([run, run]) + "\n", format, strings) == [
        *said("So: "),
        *[use(run)] * 2,
    ]
    for other in (EDIT, READ, ("Other", {"path": "a"}), ("Edit", {"path": "Null"})):
        assert parsers._read_plain(WRITERS[name]([run, other]), format, strings) is None
