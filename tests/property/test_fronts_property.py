"""Whatever is sent to a front end, it is read as a conversation or refused with an error that says why."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.proxy.front import front_of
from rollout.proxy.front.base import Translated
from rollout.proxy.messages import RequestError, conversation
from rollout.proxy.tree import Tree

DATA, SCHEMA = {"inlineData": {"mimeType": "image/png", "data": "AA"}}, {"type": "OBJECT", "properties": {}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]},
            {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": '{"a": 1}'}}]},
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "o"}]},
        ],
        "tools": [{"function": {"name": "f", "parameters": {}}}, {"custom": {"name": "p"}}],
        "tool_choice": {"type": "function"},
        "stop": ["x"],
    },
    "/v1/responses": {
        "instructions": "i",
        "input": [
            {"type": "reasoning", "summary": [{"text": "t"}], "content": [{"text": "t"}], "encrypted_content": "msg_1"},
            {"type": "function_call", "call_id": "c", "name": "f", "namespace": "n", "arguments": "{}"},
            {"type": "custom_tool_call", "call_id": "d", "name": "p", "input": "x"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "o"}]},
        ],
        "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "g"}]}],
        "text": {"format": {"type": "text"}},
    },
    "/v1beta/models/policy:generateContent": {
        "systemInstruction": {"parts": [{"text": "s"}]},
        "contents": [
            {"role": "user", "parts": [{"text": "a"}, DATA]},
            {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {}}, "thoughtSignature": "bXNnXzE="}]},
            {"parts": [{"functionResponse": {"name": "f", "response": {"output": "o"}, "parts": [DATA]}}]},
        ],
        "tools": [{"functionDeclarations": [{"name": "f", "parameters": SCHEMA}]}],
        "generationConfig": {"stopSequences": ["x"]},
    },
}
VALUES = st.sampled_from(
    [
        None,
        True,
        -1,
        2**63,
        10**400,
        1e308,
        float("nan"),
        "",
        "\ud800",
        "\0",
        "model",
        "x" * 3000,
        [],
        {},
        [[]],
        {"a": 1},
    ]
).map(copy.deepcopy)  # a later one may be put into an earlier one


@pytest.mark.parametrize("path", BODIES)
@given(st.data())
def test_a_body_with_anything_in_it_is_read_or_refused(path: str, data: st.DataObject) -> None:
    body, front, known, tree = json.loads(json.dumps(BODIES[path])), front_of(path), Translated(), Tree()
    for _ in range(data.draw(st.integers(0, 3))):
        place, key = data.draw(st.sampled_from([*_places(body)] or [({"": 0}, "")]))
        place[key] = data.draw(VALUES)
    sent = json.dumps(body).encode("utf-8", "surrogatepass")
    if junk := data.draw(st.sampled_from([b""] * 5 + [b"\xff", b"{", b"[" * 5000])):
        at = data.draw(st.integers(0, len(sent)))
        sent = sent[:at] + junk + sent[at:]
    with contextlib.suppress(RequestError):
        asked = front.read(sent, path)
        assert front.new_bytes(asked, known, tree) <= len(sent) + 64
        request = front.wire(asked, known, tree)
        assert [message for span in conversation(request).spans for message in span.chat]
        assert json.loads(request.body)["messages"]


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from _places(inner)
