"""Gemini: what is translated, answered and refused, with Google's own SDK where it takes a client."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.proxy.engine import EngineError
from rollout.proxy.front.base import Translated
from rollout.proxy.front.gemini import FRONT
from rollout.proxy.messages import Conversation, RequestError, conversation
from rollout.proxy.replies import Reply
from rollout.proxy.server import ProxyServer
from rollout.proxy.session import Session
from rollout.proxy.tree import Tree
from rollout.proxy.wire import decode_request
from tests.front_kit import ForgettingAgent, Gate, as_json, genai, opened
from tests.kit import char_policy

PATH = "/v1beta/models/policy:generateContent"
HELLO: dict[str, Any] = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}


def talk(body: dict[str, Any], known: Translated | None = None) -> Conversation:
    asked = FRONT.read(json.dumps(body).encode(), PATH)
    return conversation(FRONT.wire(asked, known or Translated(), Tree()))


def client_of(proxy: ProxyServer, session: Session | str) -> Any:
    secret = session if isinstance(session, str) else session.secret
    return genai().Client(api_key=secret, http_options={"base_url": f"http://127.0.0.1:{proxy.port}"}).aio.models


# --- requests


def test_a_conversation_is_read_as_it_is_in_messages() -> None:
    signature = base64.b64encode(b"msg_7").decode()
    image = {"inlineData": {"mimeType": "image/png", "data": "AAAA"}}
    call = {"functionCall": {"id": "run__c1", "name": "run", "args": {"a": [1, "é"]}}, "thoughtSignature": signature}
    made = {"id": "run__c1", "name": "run"}
    body = {
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "contents": [
            {"parts": [{"text": "see"}, image]},
            {"role": "model", "parts": [{"text": "Hm.", "thought": True}, {"text": "I look."}, call]},
            {"role": "user", "parts": [{"functionResponse": {**made, "response": {"output": "o"}}}]},
            {"role": "model", "parts": [{"functionCall": {"id": "c2", "name": "run"}}]},
            {"role": "function", "parts": [{"functionResponse": {"id": "c2", "response": {"a": 1}}}, image]},
        ],
        "tools": [
            {
                "functionDeclarations": [
                    {"name": "run", "parameters": {"type": "OBJECT", "properties": {"type": {"type": "STRING"}}}},
                    {"name": "stop", "parametersJsonSchema": {"type": "object"}},
                ]
            },
            {"googleSearch": {}},
        ],
        "generationConfig": {"maxOutputTokens": 7, "stopSequences": ["END"], "temperature": 1},
    }  # fmt: skip
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    ours = {
        "system": "Be brief.",
        "tools": [
            {"name": "run", "input_schema": {"type": "object", "properties": {"type": {"type": "string"}}}},
            {"name": "stop", "input_schema": {"type": "object"}},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "see"}, picture]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "msg_7"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "c1", "name": "run", "input": {"a": [1, "é"]}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "o"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c2", "name": "run", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c2", "content": '{"a": 1}'}, picture]},
        ],
    }
    found, wanted = talk(body), conversation(decode_request(json.dumps(ours).encode()))
    assert (found.head.system, found.head.tools) == (wanted.head.system, wanted.head.tools)
    assert [(one.key, one.tool_ids, one.chat) for one in found.spans] == [
        (one.key, one.tool_ids, one.chat) for one in wanted.spans
    ]
    assert "msg_7" in found.spans[1].signatures
    request = FRONT.wire(FRONT.read(json.dumps(body).encode(), PATH), Translated(), Tree())
    assert (request.model, request.max_tokens, request.stop_sequences) == ("policy", 7, ["END"])


TEXTS = st.text(st.characters(codec="utf-8"), max_size=8)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[Any], list[Any]]:
    """The same conversation as contents and in the form of Messages."""
    contents: list[Any] = []
    ours: list[Any] = []
    for turn in range(draw(st.integers(0, 3))):
        said, calls = draw(TEXTS), draw(st.lists(st.dictionaries(TEXTS, TEXTS), max_size=2))
        parts: list[Any] = [{"text": said}]
        blocks: list[Any] = [{"type": "text", "text": said}]
        for at, told in enumerate(calls):
            parts.append({"functionCall": {"id": f"{turn}.{at}", "name": "f", "args": told}})
            blocks.append({"type": "tool_use", "id": f"{turn}.{at}", "name": "f", "input": told})
        contents.append({"role": "model", "parts": parts})
        ours.append({"role": "assistant", "content": blocks})
        outputs = [draw(TEXTS) for _ in calls]
        parts = [
            {"functionResponse": {"id": f"{turn}.{at}", "name": "f", "response": {"output": out}}}
            for at, out in enumerate(outputs)
        ]
        blocks = [
            {"type": "tool_result", "tool_use_id": f"{turn}.{at}", "content": out} for at, out in enumerate(outputs)
        ]
        contents.append({"role": "user", "parts": parts or [{"text": "go"}]})
        ours.append({"role": "user", "content": blocks or "go"})
    last = draw(TEXTS)
    return [*contents, {"role": "user", "parts": [{"text": last}]}], [*ours, {"role": "user", "content": last}]


@given(conversations(), TEXTS)
def test_any_conversation_is_the_same_in_both_forms_new_or_known(forms: tuple[Any, Any], system: str) -> None:
    contents, ours = forms
    wanted = conversation(decode_request(json.dumps({"system": system, "messages": ours}).encode()))
    known, body = Translated(), {"contents": contents, "systemInstruction": {"parts": [{"text": system}]}}
    for _ in range(2):
        found = talk(body, known)
        assert [(one.identity, one.chat) for one in found.spans] == [(one.identity, one.chat) for one in wanted.spans]
        assert found.head.key == wanted.head.key


def test_calls_of_nobody_get_ids_to_which_their_results_belong() -> None:
    calls = [{"functionCall": {"name": name, "args": {}}} for name in ("a", "b", "a")]
    outs = [{"functionResponse": {"name": name, "response": {"output": out}}} for name, out in ("a1", "a2", "b3")]
    found = talk({"contents": [{"role": "model", "parts": calls}, {"role": "user", "parts": outs}]})
    ids = [call["id"] for call in found.spans[0].chat[0]["tool_calls"]]
    assert len(set(ids)) == 3
    assert [(m["tool_call_id"], m["content"]) for m in found.spans[1].chat] == [
        (ids[0], "1"), (ids[2], "2"), (ids[1], "3")
    ]  # fmt: skip


REFUSED: dict[str, tuple[Any, str]] = {
    "candidateCount": ({"generationConfig": {"candidateCount": 2}}, "candidateCount"),
    "responseLogprobs": ({"generationConfig": {"responseLogprobs": True}}, "responseLogprobs"),
    "json": ({"generationConfig": {"responseMimeType": "application/json"}}, "text/plain"),
    "schema": ({"generationConfig": {"responseJsonSchema": {}}}, "schema"),
    "cachedContent": ({"cachedContent": "cachedContents/1"}, "cachedContent"),
    "role": ({"contents": [{"role": "robot", "parts": []}]}, "contents[0].role"),
    "part": ({"contents": [{"parts": [{"executableCode": {}}]}]}, "contents[0].parts[0]"),
    "wrong": ({"contents": [{"parts": [{"text": 3}]}]}, "`contents[0].parts[0].text`"),
    "result": ({"contents": [{"parts": [{"functionResponse": {"name": "f"}}]}]}, "no call of 'f'"),
    "output": ({"contents": [{"parts": [{"functionResponse": {"id": "c", "response": [1]}}]}]}, "response"),
    "args": ({"contents": [{"role": "model", "parts": [{"functionCall": {"name": "f", "args": [1]}}]}]}, "args"),
    "prefill": ({"contents": [{"role": "model", "parts": [{"text": "x"}]}]}, "prefill"),
    "nothing": ({"contents": []}, "at least one"),
    "parameters": ({"tools": [{"functionDeclarations": [{"name": "f", "parameters": {"a": 1 << 70}}]}]}, "parameters"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_honoured_is_refused_in_one_line(case: str) -> None:
    fields, says = REFUSED[case]
    with pytest.raises(RequestError) as raised:
        talk({**HELLO, **fields})
    assert raised.value.status == 400 and says in str(raised.value) and "\n" not in str(raised.value)


# --- replies

BLOCKS = st.one_of(
    st.builds(lambda said: {"type": "text", "text": said}, TEXTS),
    st.builds(lambda told: {"type": "tool_use", "id": "t", "name": "f", "input": told}, st.dictionaries(TEXTS, TEXTS)),
)


@given(TEXTS, st.lists(BLOCKS, max_size=4), st.sampled_from(["end_turn", "max_tokens"]))
def test_a_streamed_reply_is_the_whole_one(thought: str, blocks: list[Any], stop: str) -> None:
    first = [{"type": "thinking", "thinking": thought}] if thought else []
    reply = Reply("msg_1", (*first, *blocks), stop, 5, 7)
    asked = FRONT.read(json.dumps(HELLO).encode(), PATH)
    FRONT.wire(asked, Translated(), Tree())
    answer = FRONT.answer(asked, "msg_1", 5)
    whole = json.loads(json.dumps(answer.whole(reply)))
    told = (answer.begin() + answer.ping() + answer.rest(reply)).decode()
    assert [json.loads(line[6:]) for line in told.splitlines() if line] == [whole]
    only = whole["candidates"][0]
    assert only["finishReason"] == ("MAX_TOKENS" if stop == "max_tokens" else "STOP")
    signed = [part for part in only["content"]["parts"] if "thoughtSignature" in part]
    assert len(signed) == bool(only["content"]["parts"]) and whole["responseId"] == "msg_1"


async def test_the_same_call_made_again_belongs_to_each_of_its_replies(proxy: ProxyServer) -> None:
    """Without ids, by what came before; and a call that was never answered is nobody's."""
    again = '[[run {"command": "make"}]]'
    session = await opened(proxy, again, again, "Done.")
    agent = ForgettingAgent(proxy, session)
    assert await agent.play() == "Done."
    assert len(session.tree.roots) == 1 and len(session.tree.nodes) == 6
    other = ForgettingAgent(proxy, await opened(proxy, "New."))
    other.contents = agent.contents[:-1]
    assert await other.play() == "New."


async def test_a_reply_its_usage_and_its_limits(proxy: ProxyServer) -> None:
    session = await opened(proxy, "hello", "abcdef")
    models = client_of(proxy, session)
    counted = await models.count_tokens(model="policy", contents="hi")
    assert session.tree.nodes == []
    reply = await models.generate_content(model="policy", contents="hi")
    assert reply.text == "hello" and reply.usage_metadata.prompt_token_count == counted.total_tokens
    assert as_json(reply)["responseId"] == session.tree.nodes[1].reply.id
    cut = await models.generate_content(model="policy", contents="hi", config={"max_output_tokens": 3})
    assert cut.text == "abc" and cut.candidates[0].finish_reason == "MAX_TOKENS"


async def test_errors_are_googles(proxy: ProxyServer) -> None:
    errors = genai().errors
    down = await proxy.open_session("e", char_policy(Gate(error=EngineError("down"), open=True)))
    cases: list[tuple[Any, int, str]] = [
        ("guess", 401, "UNAUTHENTICATED"),
        (await opened(proxy, "x", max_context=10), 400, "INVALID_ARGUMENT"),
        (down, 503, "UNAVAILABLE"),
    ]
    for session, code, status in cases:
        for ask in ("generate_content", "generate_content_stream"):
            with pytest.raises(errors.APIError) as raised:
                said = await getattr(client_of(proxy, session), ask)(model="policy", contents="hi")
                _ = [chunk async for chunk in said]
            assert (raised.value.code, raised.value.status) == (code, status)
            if code == 400:
                assert "input token count exceeds the maximum" in str(raised.value)
    with pytest.raises(errors.APIError) as raised:
        await client_of(proxy, down).embed_content(model="policy", contents="hi")
    assert (raised.value.code, raised.value.status) == (404, "NOT_FOUND")


async def test_a_failure_in_a_stream(proxy: ProxyServer) -> None:
    engine = Gate(error=EngineError("down"))
    models = client_of(proxy, await proxy.open_session("e", char_policy(engine)))
    with pytest.raises(genai().errors.APIError, match="engine"):
        stream = await models.generate_content_stream(model="policy", contents="hi")
        engine.open.set()
        async for _ in stream:
            pass


def test_calls_are_translated_again_after_another_beginning_and_count_as_new() -> None:
    known, tree = Translated(), Tree()
    calls = {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {"a": "x" * 5000}}}]}

    def new(first: str) -> int:
        contents = [*HELLO["contents"], {"role": "user", "parts": [{"text": first}]}, calls]
        asked = FRONT.read(json.dumps({"contents": contents}).encode(), PATH)
        size = FRONT.new_bytes(asked, known, tree)
        FRONT.wire(asked, known, tree)
        return size

    assert new("a") > 5000 and new("a") == 0 and new("b") > 5000
