"""This module tests what becomes of another server's replies, in whatever form it gives them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from rollout.proxy.calls import reply_in
from rollout.proxy.chat import ChatEndpoint, reply_of
from rollout.proxy.forward import SideEndpoint
from rollout.proxy.passthrough import PassThrough
from rollout.proxy.replies import Reply, reply_events, reply_json, reply_start_event
from tests.endpoint_kit import StandIn, standing_in

HALF = '{"choices": [{"message": {"content": "a\\ud83d b\\udc00", "reasoning_content": "\\ud83d\\ude00"}}]}'


def reply(**message: Any) -> Reply:
    return reply_of(json.dumps({"choices": [{"message": message}]}).encode())


def call(arguments: Any) -> Any:
    (block,) = reply(tool_calls=[{"function": {"name": "f", "arguments": arguments}}]).blocks
    return block["input"] if block["type"] == "tool_use" else block["text"]


def text(said: str, kind: str = "text") -> dict[str, str]:
    return {"type": kind, kind: said}


def test_half_a_surrogate_pair_is_a_replacement_character() -> None:
    assert reply_of(HALF.encode()).blocks == (text("\U0001f600", "thinking"), text("a\ufffd b\ufffd"))
    assert (
        call({"p": "\ud83d"}) == {"p": "\ufffd"} and reply_of(b'{"choices": [{"message": {"content": "\xed"}}]}').text
    )


@pytest.mark.parametrize(
    ("content", "blocks"),
    [
        ([text(" a "), text("b\n")], [text(" a "), text("b\n")]),
        ([{"type": "thinking", "thinking": [text("x"), text("y")]}, text("b")],
         [text("x", "thinking"), text("y", "thinking"), text("b")]),
        ([{"type": "reasoning", "text": "x"}, {"type": "output_text", "text": "b"}],
         [text("x", "thinking"), text("b")]),
        ([{"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]}], [text("x", "thinking")]),
        ([{"type": "refusal", "refusal": "no"}], [text("no")]),
        (["a", "b"], [text("a"), text("b")]),
        ({"type": "text", "text": "a"}, [text("a")]),
        ([{"type": "image_url", "image_url": {"url": "u"}}],
         [text('{"type": "image_url", "image_url": {"url": "u"}}')]),
        ([{"type": "text", "text": 3}, None, 5],
         [text('{"type": "text", "text": 3}'), text("null"), text("5")]),
        (None, []), ("", []), ([], []),
    ],
)  # fmt: skip
def test_content_in_parts_keeps_its_text_and_thinking(content: Any, blocks: list[Any]) -> None:
    assert list(reply(content=content).blocks) == blocks


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ('{"a": 1}', {"a": 1}), ({"a": 1}, {"a": 1}), (None, {}), ("", {}), ({}, {}),
        ("null", "f(null)"), ([1], "f([1])"), ("[1]", "f([1])"), (3, "f(3)"), ('{"a": ', 'f({"a": )'),
        ('"{}"', 'f("{}")'), ('{"a": NaN}', 'f({"a": NaN})'), ({"a": float("nan")}, 'f({"a": NaN})'),
        ('{"a": "\\ud83d"}', 'f({"a": "\\ud83d"})'), ({"a": 1 << 70}, f'f({{"a": {1 << 70}}})'),
        (f'{{"a": {1 << 70}}}', f'f({{"a": {1 << 70}}})'),
    ],
)  # fmt: skip
def test_arguments_are_read_or_told_as_what_they_are(arguments: Any, read: Any) -> None:
    assert call(arguments) == read


def test_what_is_no_call_of_a_function_is_text() -> None:
    assert reply(tool_calls="f()").blocks == (text("f()"),)
    odd = [{"type": "custom", "custom": {"name": "f"}}, {"function": {"arguments": "{}"}}, 7, {"function": "f"}]
    assert [json.loads(block["text"]) for block in reply(tool_calls=odd).blocks] == odd
    assert reply(tool_calls={"function": {"name": "f"}}).blocks[0]["input"] == {}


leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5),
    st.sampled_from(["text", "thinking", "reasoning", "f", "\ud83d", "{}", "[" * 2000]),
)  # fmt: skip
names = st.sampled_from(["type", "text", "thinking", "summary", "function", "name", "arguments", "content", "\udc00"])
values = st.recursive(leaves, lambda v: st.lists(v, max_size=3) | st.dictionaries(names, v, max_size=4), max_leaves=12)
calls = st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": leaves, "arguments": values})})
messages = st.fixed_dictionaries(
    {},
    optional={
        "content": values, "reasoning_content": values, "reasoning": values, "refusal": values,
        "tool_calls": values | st.lists(calls, max_size=3),
    },
)  # fmt: skip


@given(messages, values, values)
def test_whatever_a_message_says_is_a_reply_that_can_be_sent_and_kept(message: Any, finish: Any, usage: Any) -> None:
    body = {"choices": [{"message": message, "finish_reason": finish}], "usage": usage}
    made = reply_of(json.dumps(body).encode())
    heard = reply_start_event(made.id, "m", made.input_tokens) + reply_events(made)
    for kept in (reply_in(heard), reply_in(orjson.dumps(reply_json(made, "m")))):
        assert kept is not None
        said = [{name: value for name, value in block.items() if name != "signature"} for block in kept["content"]]
        assert said == list(made.blocks)


@pytest.mark.parametrize("levels", [62, 300, 1000, 100_000])
def test_deep_values_are_a_reply_that_can_be_kept_or_no_json(levels: int) -> None:
    deep = "[" * levels + "]" * levels
    asked = f'{{"choices": [{{"message": {{"tool_calls": [{{"function": {{"name": "f", "arguments": {{"a": {deep}}}'
    for raw in (asked + "}}]}}]}", f'{{"choices": [{{"message": {{"content": {deep}}}}}]}}'):
        try:
            made = reply_of(raw.encode())
        except Exception as error:
            assert levels > 300 and "not a chat completion" in str(error)
        else:
            assert reply_in(orjson.dumps(reply_json(made, "m"))) is not None


@pytest.mark.parametrize("stream", [True, False])
async def test_an_odd_reply_is_asked_for_once_and_is_nobodys_failure(stream: bool) -> None:
    """The agent gets it, the record has it."""
    asked: list[Any] = []

    async def completions(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.Response(text=HALF, content_type="application/json")

    app = web.Application()
    app.router.add_post("/chat/completions", completions)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    proxy = PassThrough(ChatEndpoint(f"http://127.0.0.1:{runner.addresses[0][1]}", "large"))
    await proxy.start()
    try:
        session = await proxy.open_session("e", proxy.policy)
        body = '{"model": "policy", "max_tokens": 9, "stream": %s, "messages": [{"role": "user", "content": "x"}]}'
        async with (
            aiohttp.ClientSession() as http,
            http.post(
                f"http://127.0.0.1:{proxy.port}/v1/messages",
                data=body % str(stream).lower(),
                headers={"x-api-key": session.secret},
            ) as answer,
        ):
            assert answer.status == 200
            said = reply_in(await answer.read())
        assert said is not None and said["content"][-1] == text("a\ufffd b\ufffd")
        assert [one["messages"][-1]["content"] for one in asked] == ["x"]
        assert (session.counters.engine_errors, session.talk.lost, len(session.talk.calls)) == (0, 0, 1)
    finally:
        await proxy.stop()
        await runner.cleanup()


@pytest.mark.parametrize("kind", [SideEndpoint, ChatEndpoint])
async def test_all_calls_at_once_have_connections_and_learn_the_limits_name(kind: type[SideEndpoint]) -> None:
    """A call that waited for a connection would run out of the time that the endpoint has."""
    calls = 130

    def mood(number: int) -> tuple[int, dict[str, str], str] | None:
        named = kind is SideEndpoint or "max_tokens" not in there.heard[number - 1]
        return None if named else (400, {}, "Unsupported: 'max_tokens'. Use 'max_completion_tokens' instead.")

    there = StandIn(lambda said: [text("ok")], mood, frozenset(range(1, calls + 1)))
    body = json.dumps({"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}).encode()
    async with standing_in(there), asyncio.timeout(60):
        end = kind(there.url, "m")
        asked = [asyncio.ensure_future(end.ask(body)) for _ in range(calls)]
        while there.under_way < calls:
            await asyncio.sleep(0.01)
        there.over.set()
        assert {answer.text for answer in await asyncio.gather(*asked)} == {"ok"}
        await end.close()
