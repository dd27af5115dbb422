from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.proxy.messages import Conversation, MessageMemory, RequestError, conversation, text_key
from rollout.proxy.replies import Reply, reply_events, reply_json
from rollout.proxy.wire import decode_request


def talk(messages: list[dict[str, Any]], **fields: Any) -> Conversation:
    return conversation(
        decode_request(json.dumps({"model": "m", "max_tokens": 9, "messages": messages, **fields}).encode())
    )


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def note(said: str) -> str:
    return f"<system-reminder>\n<task-notification><result>{said}</result></task-notification>\n</system-reminder>"


def result(call: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call, "content": content, **more}


@pytest.mark.parametrize(
    "body, says",
    [
        (b"{", "truncated"),
        (b"[]", "Expected `object`, got `array`"),
        (b"{}", "missing required field `messages`"),
        (b'{"messages": []}', "messages: at least one"),
        (b'{"messages": [{"role": "bot", "content": ""}]}', "`messages[0].role`"),
        (b'{"messages": [{"role": "user", "content": 3}]}', "`messages[0].content`"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": "9"}', "`max_tokens`"),
        (b'{"messages": [{"role": "user", "content": "x"}], "tools": [{}]}', "`tools[0]"),
        (b'{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}', "prefill"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "utf-8"),
        (b'{"messages": [{"role": "user", "content": [{"text": "x"}]}]}', "messages[0].content[0].type"),
        (b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "messages[0].content[0].text"),
        (
            b'{"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t",'
            b' "content": [3]}]}]}',
            "messages[0].content[0].content",
        ),
        (b'{"messages": [{"role": "user", "content": "x"}], "system": 3}', "`system`"),
        (b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"name": 3}]}', "`tools[0].name`"),
        (b'{"messages": [{"role": "user", "content": "x"}], "tool_choice": {"type": "x"}}', "`tool_choice.type`"),
    ],
)
def test_a_bad_body_is_a_400_that_names_the_field(body: bytes, says: str) -> None:
    with pytest.raises(RequestError) as raised:
        conversation(decode_request(body))
    assert raised.value.status == 400 and says.lower() in str(raised.value).lower()


SAME = [
    (user("fix it"), user([text("fix it")])),
    (user("fix it"), user([text("fix", cache_control={"type": "ephemeral"}), text(" it")])),
    (user("fix it"), user([text("  fix it\n"), text("<system-reminder>be kind</system-reminder>")])),
    (user([result("t1", "out")]), user([result("t1", [text("out\n<system-reminder>x</system-reminder>")])])),
    (user([result("t1", "out")]), user([result("t1", "out", is_error=False, cache_control={"type": "ephemeral"})])),
    (user(note("Found.")), user([text(note(" Found.\n"))])),
]
DIFFERENT = [
    (user("fix it"), user("fix that")),
    (user([result("t1", "out")]), user([result("t2", "out")])),
    (user([result("t1", "out")]), user([result("t1", "other")])),
    (user([result("t1", "a"), result("t2", "b")]), user([result("t1", "b"), result("t2", "a")])),
    (user([text("a"), result("t1", "b")]), user([result("t1", "b"), text("a")])),
    # A message that is only a reminder, which is how Claude Code says that a background agent has ended.
    (user(note("Found.")), user(note("Not found."))),
    (user([{"type": "image", "source": {"data": "A"}}]), user([{"type": "image", "source": {"data": "B"}}])),
]


@pytest.mark.parametrize("first, second", SAME)
def test_rewrites_of_an_echo_keep_its_key(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert [s.key for s in talk([first]).spans] == [s.key for s in talk([second]).spans]


@pytest.mark.parametrize("first, second", DIFFERENT)
def test_another_content_has_another_key(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert talk([first]).spans[0].key != talk([second]).spans[0].key


@given(
    st.lists(st.sampled_from(["\ud83d", "\ude00", "\\", "u", "d83d", '"', "x", "\U0001f600"])).map("".join),
    st.booleans(),
)
def test_half_a_surrogate_pair_is_a_replacement_character(said: str, escaped: bool) -> None:
    whole = said.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    body = json.dumps({"model": "m", "max_tokens": 9, "system": said, "messages": [user(said)]}, ensure_ascii=escaped)
    if escaped or whole == said:
        found = conversation(decode_request(body.encode()))
        assert found.spans[0].chat[0]["content"] == whole and found.head.system == whole


def test_system_prompt_and_tools_are_the_head() -> None:
    tool = {"name": "Edit", "description": "d", "input_schema": {"type": "object"}}
    key = talk([user("x")], system="s", tools=[tool]).head.key
    assert key == talk([user("x")], system=[text("s", cache_control={})], tools=[{**tool, "x": 1}]).head.key
    assert key != talk([user("x")], system="other", tools=[tool]).head.key
    assert key != talk([user("x")], system="s").head.key


def test_tool_results_become_tool_messages_in_order() -> None:
    blocks = [
        result("t1", "one"),
        result("t2", [text("two"), {"type": "image", "source": {"media_type": "image/png"}}]),
        text("go on"),
    ]
    (span,) = talk([user(blocks)]).spans
    assert [(m["role"], m["content"]) for m in span.chat] == [
        ("tool", "one"),
        ("tool", "two\n[image (image/png) left out: this model reads text only]"),
        ("user", "go on"),
    ]


def test_adjacent_messages_of_one_side_are_one_span() -> None:
    spans = talk(
        [user("a"), user("b"), {"role": "assistant", "content": "c"}, {"role": "system", "content": "d"}]
    ).spans
    assert [span.assistant for span in spans] == [False, True, False]
    assert [m["role"] for m in spans[2].chat] == ["system"]


def test_events_carry_the_whole_reply() -> None:
    blocks = ({"type": "text", "text": "é\n x"}, {"type": "tool_use", "id": "t", "name": "Edit", "input": {"a": "b\n"}})
    stream = reply_events(Reply("m", blocks, "tool_use", 5, 7)).decode()
    data = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: ")]
    deltas = [event["delta"] for event in data if event["type"] == "content_block_delta"]
    assert deltas[0]["text"] == "é\n x"
    assert json.loads(deltas[1]["partial_json"]) == {"a": "b\n"}
    assert data[-2]["delta"]["stop_reason"] == "tool_use" and data[-1]["type"] == "message_stop"


def test_what_was_seen_is_not_read_again_and_comes_to_the_same() -> None:
    messages = [user("a"), {"role": "assistant", "content": [text("b")]}, user([result("t1", "c")]), user("d")]
    request = decode_request(json.dumps({"messages": messages}).encode())
    seen = MessageMemory()
    first, again = conversation(request, seen), conversation(request, seen)
    assert [(s.assistant, s.key, s.tool_ids, s.chat) for s in again.spans] == [
        (s.assistant, s.key, s.tool_ids, s.chat) for s in first.spans
    ]
    assert again.head is first.head
    assert [len(seen.sides), len(seen.spans)] == [4, 3]


def test_thinking_is_sent_with_a_signature_and_its_echo_changes_no_key() -> None:
    thought = {"type": "thinking", "thinking": "hm"}
    reply = Reply("msg_1", (thought, {"type": "text", "text": "x"}), "end_turn", 1, 2)
    data = [json.loads(line[6:]) for line in reply_events(reply).decode().splitlines() if line.startswith("data: ")]
    kinds = [event["delta"]["type"] for event in data if event["type"] == "content_block_delta"]
    assert kinds == ["thinking_delta", "signature_delta", "text_delta"]
    echo = reply_json(reply, "m")["content"]
    assert echo[0] == {**thought, "signature": "msg_1"}
    with_it = talk([user("q"), {"role": "assistant", "content": echo}, user("r")])
    without = talk([user("q"), {"role": "assistant", "content": echo[1:]}, user("r")])
    assert with_it.spans[1].key == without.spans[1].key == text_key("x")
    assert with_it.spans[1].chat[0]["reasoning_content"] == "hm"


# A few messages, of which some differ only in what clients rewrite, or follow another one of the same side.
few = [
    user("a"),
    user([{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]),
    user("b <system-reminder>x</system-reminder>"),
    user([{"type": "tool_result", "tool_use_id": "t", "content": "ok"}]),
    {"role": "assistant", "content": "a"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "Edit", "input": {}}]},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}]},
]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12), st.lists(st.sampled_from(few), max_size=6)), max_size=12)
)
def test_a_request_is_cut_the_same_whatever_was_seen_before(requests: list[tuple[int, int, list[Any]]]) -> None:
    """Each goes on from the beginning of an earlier one."""
    seen, bodies = MessageMemory(), [list[Any]()]
    for place, kept, more in requests:
        messages = [*bodies[place % len(bodies)][:kept], *more, user("c")]
        bodies.append(messages)
        request = decode_request(json.dumps({"messages": messages}).encode())
        known, fresh = (conversation(request, seen=s) for s in (seen, None))
        seen.entered(request)
        assert seen.new_bytes(request) == len(request.messages[-1])
        assert len(known.spans) == len(fresh.spans)
        for one, other in zip(known.spans, fresh.spans, strict=True):
            assert (one.identity, one.exact, one.chat) == (other.identity, other.exact, other.chat)
            assert (one.first, one.assistant) == (other.first, other.assistant)
        assert known.spans[-1] is known.spans[len(known.spans) - 1] is known.spans[:][-1]
