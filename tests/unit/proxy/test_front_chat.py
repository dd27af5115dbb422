"""Chat completions: what is translated, answered and refused, with OpenAI's own SDK where it takes a client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout import SIDE_MODEL
from rollout.proxy.engine import EngineError
from rollout.proxy.front.base import Translated
from rollout.proxy.front.chat import FRONT
from rollout.proxy.messages import Conversation, RequestError, conversation
from rollout.proxy.replies import Reply
from rollout.proxy.server import ProxyServer
from rollout.proxy.tree import Tree
from rollout.proxy.wire import decode_request
from tests.front_kit import Gate, chat_message, opened
from tests.kit import char_policy

HELLO: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def talk(body: dict[str, Any], known: Translated | None = None) -> Conversation:
    asked = FRONT.read(json.dumps(body).encode(), "")
    return conversation(FRONT.wire(asked, known or Translated(), Tree()))


@pytest.fixture
async def client(proxy: ProxyServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{proxy.port}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


# --- requests


def test_a_conversation_is_read_as_it_is_in_messages() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "run", "arguments": '{"a": [1, "\\u00e9"]}'}}
    chat = {
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
            {"role": "user", "content": [{"type": "text", "text": "see"}, IMAGE]},
            {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "out"}]},
            {"role": "system", "content": "Hurry."},
            {"role": "assistant", "content": "Done.", "tool_calls": None},
            {"role": "user", "content": "more"},
        ],
        "tools": [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}, "strict": True}}],
        "stop": "END",
        "max_completion_tokens": 7,
    }
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    use = {"type": "tool_use", "id": "c1", "name": "run", "input": {"a": [1, "é"]}}
    ours = {
        "system": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}],
        "tools": [{"name": "run", "input_schema": {"type": "object"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image", "source": source}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}, use]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "out"}]},
            {"role": "system", "content": "Hurry."},
            {"role": "assistant", "content": "Done."},
            {"role": "user", "content": "more"},
        ],
    }
    found, wanted = talk(chat), conversation(decode_request(json.dumps(ours).encode()))
    assert (found.head.system, found.head.tools) == (wanted.head.system, wanted.head.tools)
    assert [span.key for span in found.spans] == [span.key for span in wanted.spans]
    assert [span.chat for span in found.spans] == [span.chat for span in wanted.spans]
    request = FRONT.wire(FRONT.read(json.dumps(chat).encode(), ""), Translated(), Tree())
    assert (request.max_tokens, request.stop_sequences) == (7, ["END"])


TEXTS = st.text(st.characters(codec="utf-8"), max_size=8)
CALLS = st.lists(st.dictionaries(TEXTS, TEXTS | st.integers(-9, 9) | st.lists(TEXTS), max_size=2), max_size=2)


@st.composite
def both(draw: st.DrawFn) -> tuple[list[Any], list[Any]]:
    """The same conversation in both forms."""
    chat: list[Any] = []
    ours: list[Any] = []
    for turn in range(draw(st.integers(0, 3))):
        if said := draw(TEXTS):
            chat.append({"role": "user", "content": said})
            ours.append({"role": "user", "content": said})
        text, calls = draw(TEXTS), draw(CALLS)
        uses = [{"type": "tool_use", "id": f"{turn}.{at}", "name": "f", "input": one} for at, one in enumerate(calls)]
        functions = [
            {
                "id": f"{turn}.{at}",
                "function": {"name": "f", "arguments": json.dumps(one, ensure_ascii=draw(st.booleans()))},
            }
            for at, one in enumerate(calls)
        ]
        chat.append({"role": "assistant", "content": text, **({"tool_calls": functions} if functions else {})})
        ours.append({"role": "assistant", "content": [*([{"type": "text", "text": text}] if text else []), *uses]})
        results = [(use["id"], draw(TEXTS)) for use in uses]
        chat += [{"role": "tool", "tool_call_id": name, "content": out} for name, out in results]
        blocks = [{"type": "tool_result", "tool_use_id": name, "content": out} for name, out in results]
        ours += [{"role": "user", "content": blocks}] if blocks else []
    last = {"role": "user", "content": "go on"}
    return [*chat, last], [*ours, last]


@given(both(), TEXTS)
def test_any_conversation_is_the_same_in_both_forms_new_or_known(forms: tuple[Any, Any], system: str) -> None:
    chat, ours = forms
    wanted = conversation(decode_request(json.dumps({"system": system, "messages": ours}).encode()))
    known, body = Translated(), {"messages": [{"role": "system", "content": system}, *chat]}
    for _ in range(2):
        found = talk(body, known)
        assert found.head.key == wanted.head.key
        assert [(one.assistant, one.identity, one.chat) for one in found.spans] == [
            (one.assistant, one.identity, one.chat) for one in wanted.spans
        ]


def test_what_was_translated_is_not_read_again_and_little_of_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    known, messages, tree = Translated(), [{"role": "user", "content": "x" * 100}], Tree()
    talk(HELLO, known)  # has no tools, as those that follow
    for turn in range(5):
        asked = FRONT.read(json.dumps({"messages": messages}).encode(), "")
        assert FRONT.new_bytes(asked, known, tree) == sum(len(json.dumps(one)) for one in messages[-2:])
        FRONT.wire(asked, known, tree)
        messages += [{"role": "assistant", "content": f"a{turn}"}, {"role": "user", "content": f"{turn}" * 100}]
    monkeypatch.setattr("rollout.proxy.front.base._MOST", 300)
    FRONT.wire(FRONT.read(json.dumps({"messages": messages}).encode(), ""), known, tree)
    assert sum(len(raw) for raw, _ in known.units.values()) <= 300


REFUSED: dict[str, tuple[Any, str]] = {
    "n": (2, "n: only 1"),
    "logprobs": (True, "logprobs"),
    "response_format": ({"type": "json_object"}, "response_format"),
    "functions": ([{"name": "f"}], "tools"),
    "messages": ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
    "tools": ([{"type": "web_search"}], "tools[0]"),
    "max_tokens": ("9", "`max_tokens`"),
    "tool_choice": (3, "`tool_choice`"),
    "stop": (["x"] * 101, "stop_sequences"),
}
WRONG: list[tuple[Any, str]] = [
    ({"role": "function", "content": "x"}, "`messages[1].role`"),
    ({"role": "user", "content": 3}, "`messages[1].content`"),
    ({"role": "user", "content": [{"type": "hologram"}]}, "messages[1].content[0]"),
    ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0]"),
    ({"role": "assistant", "content": "prefill"}, "prefill"),
    ({"role": "assistant", "tool_calls": [{"id": 3}]}, "`messages[1].tool_calls[0].id`"),
]


@pytest.mark.parametrize("field", REFUSED)
def test_what_cannot_be_honoured_is_refused_in_one_line(field: str) -> None:
    value, says = REFUSED[field]
    with pytest.raises(RequestError) as raised:
        talk({**HELLO, field: value})
    assert raised.value.status == 400 and says in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("message, says", WRONG)
def test_a_wrong_message_is_named(message: Any, says: str) -> None:
    with pytest.raises(RequestError) as raised:
        talk({"messages": [{"role": "user", "content": "x"}, message]})
    assert raised.value.status == 400 and says in str(raised.value)


def test_what_may_be_there_without_effect() -> None:
    more = {"n": 1, "logprobs": False, "response_format": {"type": "text"}, "tools": [], "temperature": 0.1, "seed": 3}
    assert talk({**HELLO, **more, "parallel_tool_calls": False, "tool_choice": "required"}).spans[0].text == "hi"
    assert talk({"messages": [{"role": "system", "content": "alone"}]}).spans[0].chat[0]["role"] == "system"


def test_arguments_that_are_no_object_are_a_text() -> None:
    for arguments in ("{", "[1]", '"x"', '{"a": NaN}', "[" * 5000, '{"a":' * 5000):
        call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
        spans = talk(
            {"messages": [{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "x"}]}
        ).spans
        assert spans[0].text == f"f({arguments})" and not spans[0].tool_ids


# --- replies

BLOCKS = st.one_of(
    st.builds(lambda text: {"type": "text", "text": text}, TEXTS.filter(bool)),
    st.builds(
        lambda given: {"type": "tool_use", "id": "t", "name": "f", "input": given}, st.dictionaries(TEXTS, TEXTS)
    ),
    st.builds(lambda text: {"type": "tool_use", "id": "u", "name": "free", "input": {"input": text}}, TEXTS),
)
FREE = [{"type": "custom", "custom": {"name": "free", "description": "any text"}}]


@given(TEXTS, st.lists(BLOCKS, max_size=4), st.sampled_from(["end_turn", "tool_use", "max_tokens", "stop_sequence"]))
def test_the_pieces_of_a_stream_are_the_whole_reply(thought: str, blocks: list[Any], stop: str) -> None:
    first = [{"type": "thinking", "thinking": thought}] if thought else []
    reply = Reply("msg_1", (*first, *blocks), stop, 5, 7)
    asked = FRONT.read(json.dumps({**HELLO, "tools": FREE, "stream_options": {"include_usage": True}}).encode(), "")
    FRONT.wire(asked, Translated(), Tree())
    answer = FRONT.answer(asked, "msg_1", 5)
    whole = json.loads(json.dumps(answer.whole(reply)))
    lines = (answer.begin() + answer.ping() + answer.rest(reply)).decode().splitlines()
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line[6:]) for line in lines[:-2] if line.startswith("data: ")]
    said = chat_message([chunk["choices"][0]["delta"] for chunk in chunks[:-1]])
    assert said | {"content": said["content"] or None} == whole["choices"][0]["message"]
    assert chunks[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], whole["usage"])
    assert {chunk["id"] for chunk in chunks} == {whole["id"]} == {"msg_1"}


async def test_a_reply_its_usage_and_its_limits(proxy: ProxyServer, client: openai.AsyncOpenAI) -> None:
    session = await opened(proxy, "hello", "abcdef", "ab END cd", '[[run {"a": 1}]]')
    client.api_key = session.secret
    reply = await client.chat.completions.create(**HELLO)
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("hello", "stop")
    sampled = session.tree.nodes[1]
    assert reply.usage is not None and sampled.reply is not None and reply.id == sampled.reply.id
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (sampled.reply.input_tokens, 6)
    cut = await client.chat.completions.create(**HELLO, max_completion_tokens=3)
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("abc", "length")
    stopped = await client.chat.completions.create(**HELLO, stop=["END"])
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("ab ", "stop")
    tools: Any = [{"type": "function", "function": {"name": "run"}}]
    await client.chat.completions.create(**HELLO, tool_choice="none", tools=tools)
    assert not session.tree.nodes[-1].tools_allowed


async def test_a_tool_that_takes_any_text(proxy: ProxyServer, client: openai.AsyncOpenAI) -> None:
    session = await opened(proxy, '[[patch {"input": "*** Begin\\n+x"}]]', "done")
    client.api_key = session.secret
    tools: Any = [{"type": "custom", "custom": {"name": "patch", "description": "Apply."}}]
    reply = (await client.chat.completions.create(**HELLO, tools=tools)).choices[0].message
    assert reply.tool_calls is not None and reply.tool_calls[0].type == "custom"
    assert (reply.tool_calls[0].custom.name, reply.tool_calls[0].custom.input) == ("patch", "*** Begin\n+x")
    more: Any = [*HELLO["messages"], reply.model_dump(exclude_none=True)]
    more.append({"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "ok"})
    await client.chat.completions.create(model="policy", messages=more, tools=tools)
    assert len(session.tree.roots) == 1 and session.tree.nodes[1].delivered


async def test_errors_are_openais(proxy: ProxyServer, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.AuthenticationError) as unknown:
        await client.chat.completions.create(**HELLO)
    assert unknown.value.code == "invalid_api_key"
    for stream in (False, True):
        session = await opened(proxy, "x", max_context=10)
        client.api_key = session.secret
        with pytest.raises(openai.BadRequestError) as full:
            await client.chat.completions.create(**HELLO, stream=stream)
        assert full.value.code == "context_length_exceeded" and full.value.type == "invalid_request_error"
        assert "maximum context length" in full.value.message and session.counters.context_full == 1
    client.api_key = (await proxy.open_session("e", char_policy(Gate(error=EngineError("down"), open=True)))).secret
    with pytest.raises(openai.InternalServerError) as down:
        await client.chat.completions.create(**HELLO)
    assert down.value.status_code == 503 and down.value.response.headers["Retry-After"] == "1"
    with pytest.raises(openai.NotFoundError):
        await client.post("/chat/nothing", cast_to=object)
    await proxy.close_session(session)
    client.api_key = session.secret
    with pytest.raises(openai.APIStatusError, match="closed"):
        await client.chat.completions.create(**HELLO)


async def test_a_failure_in_a_stream_and_a_retry(proxy: ProxyServer, client: openai.AsyncOpenAI) -> None:
    engine = Gate("one", "two", error=EngineError("down"))
    session = await proxy.open_session("e", char_policy(engine))
    client.api_key = session.secret
    with pytest.raises(openai.APIError, match="engine"):
        async for _ in await client.chat.completions.create(**HELLO, stream=True):
            engine.open.set()  # the stream has begun
    engine.error = None
    first = await client.chat.completions.create(**HELLO, extra_headers={"x-stainless-retry-count": "1"})
    again = await client.chat.completions.create(**HELLO, extra_headers={"x-stainless-retry-count": "1"})
    assert (first.id, first.choices[0].message.content) == (again.id, "one")


async def test_side_calls_go_where_they_are_sent(proxy: ProxyServer, client: openai.AsyncOpenAI) -> None:
    session = await opened(proxy, "title")
    client.api_key = session.secret
    await client.chat.completions.create(**{**HELLO, "model": SIDE_MODEL})
    assert session.counters.side_calls == 1 and session.tree.nodes[1].side
