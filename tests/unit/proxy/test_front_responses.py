"""Responses: what is translated, answered and refused, with OpenAI's own SDK where it takes a client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from rollout.proxy.engine import EngineError
from rollout.proxy.front.base import Translated
from rollout.proxy.front.responses import FRONT
from rollout.proxy.messages import Conversation, RequestError, conversation
from rollout.proxy.replies import Reply
from rollout.proxy.server import ProxyServer
from rollout.proxy.tree import Tree
from rollout.proxy.wire import decode_request
from tests.front_kit import Gate, opened
from tests.kit import char_policy

HELLO: dict[str, Any] = {"model": "policy", "input": "hi"}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def talk(body: dict[str, Any], known: Translated | None = None) -> Conversation:
    asked = FRONT.read(json.dumps(body).encode(), "")
    return conversation(FRONT.wire(asked, known or Translated(), Tree()))


def text(kind: str, said: str) -> dict[str, Any]:
    return {"type": kind, "text": said}


@pytest.fixture
async def client(proxy: ProxyServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{proxy.port}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


# --- requests


def test_a_conversation_is_read_as_it_is_in_messages() -> None:
    items = [
        {"type": "message", "role": "developer", "content": [text("input_text", "Be brief.")]},
        {
            "role": "user",
            "content": [text("input_text", "see"), {"type": "input_image", "image_url": "http://x/a.png"}],
        },
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "msg_7"},
        {"type": "message", "role": "assistant", "content": [text("output_text", "I look.")]},
        {"type": "function_call", "call_id": "c1", "name": "run", "arguments": '{"a": 1}'},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "+x\n"},
        {"type": "function_call", "call_id": "c3", "name": "start", "namespace": "agents", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "out"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [text("input_text", "done")]},
        {"type": "function_call_output", "call_id": "c3", "output": ""},
        {"role": "system", "content": "Hurry."},
    ]
    tools = [
        {"type": "function", "name": "run", "parameters": {"type": "object"}, "strict": True},
        {"type": "custom", "name": "patch", "description": "Apply.", "format": {"type": "grammar"}},
        {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "start", "parameters": {}}]},
        {"type": "web_search"},
    ]
    free = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    ours = {
        "system": [text("text", "Be brief.")],
        "tools": [
            {"name": "run", "input_schema": {"type": "object"}},
            {"name": "patch", "description": "Apply.", "input_schema": free},
            {"name": "agents__start", "input_schema": {}},
        ],
        "messages": [
            {
                "role": "user",
                "content": [
                    text("text", "see"),
                    {"type": "image", "source": {"type": "url", "url": "http://x/a.png"}},
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "", "signature": "msg_7"},
                    text("text", "I look."),
                    {"type": "tool_use", "id": "c1", "name": "run", "input": {"a": 1}},
                    {"type": "tool_use", "id": "c2", "name": "patch", "input": {"input": "+x\n"}},
                    {"type": "tool_use", "id": "c3", "name": "agents__start", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": "out"},
                    {"type": "tool_result", "tool_use_id": "c2", "content": "done"},
                    {"type": "tool_result", "tool_use_id": "c3", "content": ""},
                ],
            },
            {"role": "system", "content": "Hurry."},
        ],
    }
    found, wanted = talk({"input": items, "tools": tools}), conversation(decode_request(json.dumps(ours).encode()))
    assert (found.head.system, found.head.tools) == (wanted.head.system, wanted.head.tools)
    assert [(one.identity, one.chat) for one in found.spans] == [(one.identity, one.chat) for one in wanted.spans]
    both = talk({"input": items, "instructions": "Help."})
    assert both.head.system == "Help." and both.spans[0].chat[0] == {"role": "system", "content": "Be brief."}


TEXTS = st.text(st.characters(codec="utf-8"), max_size=8)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[Any], list[Any]]:
    """The same conversation as items and in the form of Messages."""
    items: list[Any] = []
    ours: list[Any] = []
    for turn in range(draw(st.integers(0, 4))):
        said, thought, calls = draw(TEXTS), draw(TEXTS), draw(st.lists(st.dictionaries(TEXTS, TEXTS), max_size=2))
        blocks: list[Any] = []
        if thought:
            items.append({"type": "reasoning", "id": f"rs_{turn}_0", "content": [text("reasoning_text", thought)]})
            blocks.append({"type": "thinking", "thinking": thought, "signature": f"msg_{turn}"})
        if said or not calls:
            items.append({"type": "message", "role": "assistant", "content": [text("output_text", said)]})
            blocks.append(text("text", said))
        for at, given_ in enumerate(calls):
            name = {"call_id": f"{turn}.{at}", "name": "f", "arguments": json.dumps(given_)}
            items.append({"type": "function_call", **name})
            blocks.append({"type": "tool_use", "id": f"{turn}.{at}", "name": "f", "input": given_})
        ours.append({"role": "assistant", "content": blocks})
        for at, out in [(at, draw(TEXTS)) for at in range(len(calls))]:
            items.append({"type": "function_call_output", "call_id": f"{turn}.{at}", "output": out})
            result = {"type": "tool_result", "tool_use_id": f"{turn}.{at}", "content": out}
            ours.append({"role": "user", "content": [result]})
        if not calls:
            items.append({"role": "user", "content": (more := draw(TEXTS))})
            ours.append({"role": "user", "content": more})
    last = {"role": "user", "content": "go on"}
    return [*items, last], [*ours, last]


@given(conversations(), TEXTS)
def test_any_conversation_is_the_same_in_both_forms_new_or_known(forms: tuple[Any, Any], system: str) -> None:
    items, ours = forms
    wanted = conversation(decode_request(json.dumps({"system": system, "messages": ours}).encode()))
    known = Translated()
    for end in (*range(1, len(items)), len(items), len(items)):  # as it grows, and once more
        if items[end - 1].get("role") == "user" or items[end - 1]["type"].endswith("output"):
            found = talk({"input": items[:end], "instructions": system}, known)
    assert [(one.identity, one.chat) for one in found.spans] == [(one.identity, one.chat) for one in wanted.spans]
    assert found.head.key == wanted.head.key


REFUSED: dict[str, tuple[Any, str]] = {
    "top_logprobs": (3, "top_logprobs"),
    "text": ({"format": {"type": "json_schema", "schema": {}}}, "text.format"),
    "background": (True, "background"),
    "conversation": ("conv_1", "conversation"),
    "prompt": ({"id": "p"}, "prompt"),
    "max_output_tokens": ("9", "`max_output_tokens`"),
    "previous_response_id": ("msg_x", "previous_response_id"),
    "input": ([{"type": "item_reference", "id": "x"}], "input[0].type"),
}
WRONG: list[tuple[Any, str]] = [
    ({"role": "robot", "content": "x"}, "input[1].role"),
    ({"role": "user", "content": 3}, "`input[1].content`"),
    ({"role": "user", "content": [{"type": "hologram"}]}, "input[1].content[0]"),
    ({"role": "assistant", "content": "prefill"}, "prefill"),
    ({"type": "function_call", "call_id": 3}, "`input[1].call_id`"),
]


@pytest.mark.parametrize("field", REFUSED)
def test_what_cannot_be_honoured_is_refused_in_one_line(field: str) -> None:
    value, says = REFUSED[field]
    with pytest.raises(RequestError) as raised:
        talk({**HELLO, field: value})
    assert raised.value.status == 400 and says in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("item, says", WRONG)
def test_a_wrong_item_is_named(item: Any, says: str) -> None:
    with pytest.raises(RequestError) as raised:
        talk({"input": [{"role": "user", "content": "x"}, item]})
    assert raised.value.status == 400 and says in str(raised.value)


# --- replies

USES = [
    {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
    {"type": "tool_use", "id": "u", "name": "free", "input": {"input": "+x"}},
    {"type": "tool_use", "id": "v", "name": "agents__start", "input": {}},
]
BLOCKS = st.one_of(
    st.builds(lambda said: text("text", said), TEXTS.filter(bool)),
    st.builds(
        lambda given: {"type": "tool_use", "id": "t", "name": "f", "input": given}, st.dictionaries(TEXTS, TEXTS)
    ),
    st.builds(lambda said: {"type": "tool_use", "id": "u", "name": "free", "input": {"input": said}}, TEXTS),
    st.builds(lambda: {"type": "tool_use", "id": "v", "name": "agents__start", "input": {}}),
)
TOOLS = [
    {"type": "custom", "name": "free"},
    {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "start"}]},
]


def put_together(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items of a reply, of its deltas alone, which have to be what each end says."""
    items: dict[int, dict[str, Any]] = {}
    for event in events:
        kind, at = event["type"], event.get("output_index", -1)
        if kind == "response.output_item.added":
            items[at] = {**event["item"]}
        elif kind == "response.content_part.added":
            items[at]["content"] = [{**event["part"]}]
        elif kind.endswith(("output_text.delta", "reasoning_text.delta")):
            items[at]["content"][0]["text"] += event["delta"]
        elif kind.endswith("arguments.delta"):
            items[at]["arguments"] += event["delta"]
        elif kind.endswith("input.delta"):
            items[at]["input"] += event["delta"]
        elif kind == "response.output_item.done":
            if "status" in event["item"]:
                items[at]["status"] = event["item"]["status"]
            else:
                items[at].pop("status")
            assert items[at] == event["item"]
    return [items[at] for at in sorted(items)]


@given(TEXTS, st.lists(BLOCKS, max_size=4), st.sampled_from(["end_turn", "max_tokens"]), st.booleans())
def test_the_pieces_of_a_stream_are_the_whole_reply(thought: str, blocks: list[Any], stop: str, codex: bool) -> None:
    first = [{"type": "thinking", "thinking": thought}] if thought else []
    reply = Reply("msg_1", (*first, *blocks), stop, 5, 7)
    more = {"store": False, "include": ["reasoning.encrypted_content"]} if codex else {}
    asked = FRONT.read(json.dumps({**HELLO, "tools": TOOLS, **more}).encode(), "")
    FRONT.wire(asked, Translated(), Tree())
    answer = FRONT.answer(asked, "msg_1", 5)
    whole = json.loads(json.dumps(answer.whole(reply)))
    lines = (answer.begin() + answer.ping() + answer.rest(reply)).decode().splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert put_together(events) == whole["output"] and events[-1]["response"] == whole
    ends = ("response.incomplete", "incomplete") if stop == "max_tokens" else ("response.completed", "completed")
    assert (events[-1]["type"], whole["status"]) == ends
    thoughts = [item for item in whole["output"] if item["type"] == "reasoning"]
    assert [item.get("encrypted_content") for item in thoughts] == (["msg_1" if codex else None] if thought else [])


def test_every_event_is_one_of_openais() -> None:
    blocks = [{"type": "thinking", "thinking": "Hm."}, text("text", "I do."), *USES]
    asked = FRONT.read(json.dumps({**HELLO, "tools": TOOLS, "include": ["reasoning.encrypted_content"]}).encode(), "")
    FRONT.wire(asked, Translated(), Tree())
    for stop in ("tool_use", "max_tokens"):
        reply = Reply("msg_1", (*blocks,), stop, 5, 7)
        answer = FRONT.answer(asked, "msg_1", 5)
        told = answer.begin() + answer.ping() + answer.rest(reply) + answer.failed(RequestError("no"))
        for line in told.decode().splitlines():
            if line.startswith("data: "):
                EVENT.validate_json(line[6:])
        Response.model_validate(answer.whole(reply))


async def test_tools_that_take_any_text_and_those_in_namespaces(proxy: ProxyServer, client: openai.AsyncOpenAI) -> None:
    session = await opened(proxy, '[[free {"input": "*** Begin"}]][[agents__start {"a": 1}]]', "done")
    client.api_key = session.secret
    tools: Any = TOOLS
    reply = await client.responses.create(**HELLO, tools=tools)
    free, start = reply.output
    assert free.type == "custom_tool_call" and (free.name, free.input) == ("free", "*** Begin")
    assert start.type == "function_call" and (start.name, start.namespace) == ("start", "agents")
    outputs = [
        {"type": "custom_tool_call_output", "call_id": free.call_id, "output": "ok"},
        {"type": "function_call_output", "call_id": start.call_id, "output": "ok"},
    ]
    said = [item.model_dump(exclude_none=True) for item in reply.output]
    items: Any = [{"role": "user", "content": "hi"}, *said, *outputs]
    assert (await client.responses.create(model="policy", input=items, tools=tools)).output_text == "done"
    assert len(session.tree.roots) == 1 and session.tree.nodes[1].delivered


async def test_a_response_goes_on_after_another(proxy: ProxyServer, client: openai.AsyncOpenAI) -> None:
    """A client may go on from any of them, as often as it likes, with the system prompt of the first one."""
    session = await opened(proxy, "one", "two", "other")
    client.api_key = session.secret
    rules: Any = [{"role": "developer", "content": "Rules."}, {"role": "user", "content": "hi"}]
    first = await client.responses.create(model="policy", input=rules)
    second = await client.responses.create(model="policy", input="and?", previous_response_id=first.id)
    third = await client.responses.create(model="policy", input="or?", previous_response_id=first.id)
    assert [one.output_text for one in (first, second, third)] == ["one", "two", "other"]
    assert second.previous_response_id == first.id
    assert len(session.tree.roots) == 1 and len(session.tree.children(session.tree.nodes[1])) == 2
    with pytest.raises(openai.BadRequestError) as unknown:
        await client.responses.create(**HELLO, previous_response_id="msg_unknown")
    assert unknown.value.code == "previous_response_not_found"


async def test_tokens_are_counted(proxy: ProxyServer, client: openai.AsyncOpenAI) -> None:
    session = await opened(proxy, "one")
    client.api_key = session.secret
    counted = await client.responses.input_tokens.count(model="policy", input="hi")
    assert session.tree.nodes == []
    reply = await client.responses.create(**HELLO)
    assert reply.usage is not None and reply.usage.input_tokens == counted.input_tokens


async def test_errors_are_openais(proxy: ProxyServer, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.AuthenticationError):
        await client.responses.create(**HELLO)
    session = await opened(proxy, "x", max_context=10)
    client.api_key = session.secret
    with pytest.raises(openai.BadRequestError) as full:
        await client.responses.create(**HELLO)
    assert full.value.code == "context_length_exceeded"
    events = [event async for event in await client.responses.create(**HELLO, stream=True)]
    assert [event.type for event in events] == ["response.created", "response.in_progress", "response.failed"]
    assert events[-1].response.error.code == "context_length_exceeded"
    assert session.counters.context_full == 2
    client.api_key = (await proxy.open_session("e", char_policy(Gate(error=EngineError("down"), open=True)))).secret
    with pytest.raises(openai.InternalServerError) as down:
        await client.responses.create(**HELLO, stream=True)
    assert down.value.status_code == 503


async def test_a_failure_in_a_stream(proxy: ProxyServer, client: openai.AsyncOpenAI) -> None:
    engine = Gate("one", error=EngineError("down"))
    client.api_key = (await proxy.open_session("e", char_policy(engine))).secret
    kinds = []
    async for event in await client.responses.create(**HELLO, stream=True):
        kinds.append(event.type)
        engine.open.set()
    assert kinds[0] == "response.created" and kinds[-1] == "response.failed"
    assert set(kinds[1:-1]) == {"response.in_progress"}


def test_what_has_to_be_put_together_again_counts_as_new() -> None:
    """The items of a reply become one message: one more item, and all of it is translated again."""
    known, tree = Translated(), Tree()
    long = [{"type": "message", "role": "assistant", "content": [text("output_text", "x" * 5000)]}] * 3
    more = [{"type": "message", "role": "assistant", "content": "more"}]
    end = [{"type": "message", "role": "user", "content": "go on"}]

    def new(items: list[Any]) -> int:
        asked = FRONT.read(json.dumps({"model": "policy", "input": items}).encode(), "")
        size = FRONT.new_bytes(asked, known, tree)
        FRONT.wire(asked, known, tree)
        return size

    assert new(long + end) > 15_000 and new(long + end) == 0
    assert new(long + end + more + end) < 500 and new(long + more + end) > 15_000
