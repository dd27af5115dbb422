"""This module tests what keeps alike replies and alike requests apart: signatures, parameters, white space,
neighbours.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from rollout import SIDE_MODEL
from rollout.proxy.engine import Completion, EngineError
from rollout.proxy.messages import RequestError
from rollout.proxy.replies import reply_json
from rollout.proxy.session import Session
from rollout.proxy.tree import Node
from rollout.proxy.wire import decode_request
from tests.kit import CharTokenizer, QueueEngine, char_policy

CALL = '[[Edit {"file_path": "a"}]]'
TOOLS = [{"name": "Edit", "input_schema": {"type": "object"}}]


async def ask(session: Session, *messages: Any, retry: bool = False, delivered: bool = True, **fields: Any) -> Node:
    turns = [m if isinstance(m, dict) else {"role": "user", "content": m} for m in messages]
    body = json.dumps({"model": "policy", "messages": turns, "tools": TOOLS, **fields}).encode()
    node = await session.prepare(decode_request(body), retry).reply()
    node.delivered = node.delivered or delivered
    return node


def echo(node: Node, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": reply_json(node.reply, "m")["content"], **more}


def unsigned(node: Node) -> dict[str, Any]:
    return {"role": "assistant", "content": [b for b in node.reply.blocks if b["type"] != "thinking"]}


def prompt(node: Node) -> str:
    return CharTokenizer().decode(node.parent.path_ids())


def session_of(*replies: str, **policy: Any) -> tuple[Session, QueueEngine]:
    engine = QueueEngine(*replies)
    return Session("e", replace(char_policy(engine), **policy)), engine


async def test_replies_with_equal_words_are_told_apart_by_the_signature_of_their_thinking() -> None:
    session, _ = session_of("((one))Done.", "((two))Done.", "a", "b")
    twins = [await ask(session, "q") for _ in range(2)]
    for twin in reversed(twins):
        after = await ask(session, "q", echo(twin), "go on")
        assert after.parent.parent is twin
    assert len(session.tree.sequences()) == 2


async def test_the_thinking_of_another_reply_with_equal_words_is_no_echo() -> None:
    """A reply of another branch stands in this place: its own tokens are there, and not those of the twin."""
    session, _ = session_of("((one))Done.", "((two))Done.", "a")
    here, elsewhere = await ask(session, "q"), await ask(session, "other")
    after = await ask(session, "q", echo(elsewhere), "go on")
    assert here not in after.path() and "((two))Done." in prompt(after) and "((one))" not in prompt(after)


async def test_a_reply_in_a_new_place_is_the_one_that_its_signature_names() -> None:
    session, _ = session_of("((one))Done.", "((two))Done.", "((three))Done.", "a", "b", "c")
    first, second = await ask(session, "p"), await ask(session, "q")
    lost = await ask(session, "r", delivered=False)
    after = await ask(session, "A summary.", echo(first), "go on")
    assert "((one))Done." in prompt(after) and "((two))" not in prompt(after)
    # Without a signature it is the one that followed the same message, and never one that nobody has received.
    after = await ask(session, "A summary.", "p", unsigned(first), "go on", unsigned(second), "and on")
    assert "((three))" not in prompt(after) and not lost.delivered
    summed = await ask(session, "In short.", {"role": "assistant", "content": "ok"}, "q", unsigned(second), "x")
    assert "((two))Done." in prompt(summed)


class Slow(QueueEngine):
    """Answers when ``go`` is set."""

    def __init__(self, *replies: str) -> None:
        super().__init__(*replies)
        self.go = asyncio.Event()

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Completion:
        await self.go.wait()
        return await super().generate(request_id, prompt_ids, sampling)


OTHERWISE = [
    {"model": SIDE_MODEL},
    {"max_tokens": 3},
    {"stop_sequences": ["x"]},
    {"tool_choice": {"type": "none"}},
]


@pytest.mark.parametrize("other", OTHERWISE, ids=lambda fields: next(iter(fields)))
async def test_requests_that_ask_for_something_else_share_no_reply(other: dict[str, Any]) -> None:
    """Not while they are sampled, not after one was lost, and not by a retry."""
    engine = Slow("1", "2", "3", "4")
    session = Session("e", replace(char_policy(engine), train_side_calls=False))
    asking = [asyncio.create_task(ask(session, "q", **fields)) for fields in ({}, other, {}, other)]
    await asyncio.sleep(0.01)
    engine.go.set()
    one, two, *joined = await asyncio.gather(*asking)
    assert joined == [one, two] and one is not two and one.reply.id != two.reply.id
    assert one.trained and two.trained == ("model" not in other)
    assert one.parent is two.parent  # the prompt is encoded once
    one.delivered = two.delivered = False  # both were lost
    assert await ask(session, "q", delivered=False, **other) is two
    assert await ask(session, "q", delivered=False) is one
    one.delivered = two.delivered = True
    assert await ask(session, "q", retry=True, **other) is two
    assert await ask(session, "q", retry=True) is one
    assert engine.replies == ["3", "4"]


async def test_requests_that_ask_for_something_else_have_seeds_and_calls_of_their_own() -> None:
    class Seeds(Slow):
        async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Completion:
            seeds.append(sampling["seed"])
            return await super().generate(request_id, prompt_ids, sampling)

    seeds: list[int] = []
    engine = Seeds(*[CALL] * 4)
    session = Session("e", replace(char_policy(engine), sampling={"seed": 5}))
    asking = [asyncio.create_task(ask(session, "q", stop_sequences=stop)) for stop in (["x"], ["y"], [])]
    await asyncio.sleep(0.01)
    engine.go.set()
    replies = [node.reply for node in await asyncio.gather(*asking)]
    assert (
        len({*seeds}) == len({reply.id for reply in replies}) == len({*replies[0].tool_ids, *replies[1].tool_ids}) + 1
    )


async def test_a_main_reply_that_waited_with_a_side_call_is_trained_and_the_side_call_is_no_foreign_one() -> None:
    session, _ = session_of("title", "main", train_side_calls=False)
    side = await ask(session, "q", model=SIDE_MODEL)
    main = await ask(session, "q")
    assert [[*row.nodes] for row in session.tree.sequences()] == [[main.index]]
    session.disown({main.reply.id})
    assert session.counters.foreign_calls == 0 and not side.trained
    session.disown({side.reply.id})  # the main one is on the longest path of the first conversation, or else foreign
    assert session.counters.foreign_calls <= 1


class Failing(QueueEngine):
    """Fails while ``down``."""

    down = False

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Completion:
        if self.down:
            raise EngineError("down")
        return await super().generate(request_id, prompt_ids, sampling)


async def test_a_retry_gets_what_was_sampled_for_it_and_not_its_twins() -> None:
    engine = Failing("first", "second", "third", "fourth")
    session = Session("e", char_policy(engine))
    await ask(session, "q")
    engine.down = True
    with pytest.raises(EngineError):
        await ask(session, "q")  # another client's, or the same one's once more
    engine.down = False
    second = await ask(session, "q", retry=True)
    assert second.reply.text == "second"
    lost = await ask(session, "q", delivered=False)
    assert await ask(session, "q", retry=True) is lost and lost.reply.text == "third"
    # Both twins have arrived, and nothing says which one this would be the retry of: neither.
    assert (await ask(session, "q", retry=True)).reply.text == "fourth"


async def test_a_reply_without_a_single_token_is_the_engines_failure() -> None:
    class Empty:
        async def generate(self, *_: Any) -> Completion:
            return Completion([], [])

    session = Session("e", char_policy(Empty()))
    with pytest.raises(EngineError, match="zero tokens"):
        await ask(session, "q")
    assert session.counters.engine_errors == 1 and session.tree.sampled_tokens() == 0


@pytest.mark.parametrize("wrong", [-1, 1000, 1 << 40])
async def test_ids_that_are_none_of_the_models_are_the_engines_failure(wrong: int) -> None:
    class Broken:
        async def generate(self, *_: Any) -> Completion:
            return Completion([5, wrong, 6], [-1.0] * 3)

    session = Session("e", replace(char_policy(Broken()), vocabulary=1000))
    with pytest.raises(EngineError, match=f"returned {wrong}, which is no id"):
        await ask(session, "q")
    assert session.counters.engine_errors == 1 and session.tree.sampled_tokens() == 0


BRANCHES = [
    ("def f():\n    return 1", "def f():\n\treturn 1"),
    ("a b", "ab"),
    ("do it", "do it<system-reminder>but not so</system-reminder>"),
    ("do it<system-reminder>now</system-reminder>", "do it<system-reminder>never</system-reminder>"),
]


@pytest.mark.parametrize("one, other", BRANCHES)
async def test_branches_that_differ_only_in_white_space_or_reminders_have_their_own_tokens(
    one: str, other: str
) -> None:
    session, _ = session_of("Done.", "Done.", "a", "b", "c")
    first = await ask(session, one, delivered=False)
    second = await ask(session, other)
    assert first is not second and one in prompt(first) and other in prompt(second)
    # Each goes on from its own tokens, also when the client has rewritten what is old.
    for text, reply in ((one, first), (other, second)):
        after = await ask(session, text, {"role": "assistant", "content": "Done."}, "next")
        assert after.parent.parent is reply
    rewritten = [{"type": "text", "text": other}, {"type": "text", "text": "<system-reminder>x</system-reminder>"}]
    again = await ask(session, {"role": "user", "content": rewritten}, unsigned(second), "and then")
    assert again.parent.parent in (first, second)


async def test_what_was_counted_is_not_taken_for_a_branch_that_differs_in_white_space() -> None:
    session, _ = session_of("x")
    body = {"messages": [{"role": "user", "content": "a b"}], "tools": TOOLS}
    session.count(decode_request(json.dumps(body).encode()))
    assert "user: ab<e>" in prompt(await ask(session, "ab"))


async def test_system_prompts_and_tools_that_differ_in_white_space_are_different() -> None:
    session, _ = session_of(*"abcd")
    for system in ("be good", "begood", "be good<system-reminder>x</system-reminder>"):
        node = await ask(session, "q", system=system)
        assert f"{system}<e>" in prompt(node)
    assert len(session.tree.roots) == 3


@pytest.mark.parametrize("split", [True, False], ids=["two messages", "one message"])
@pytest.mark.parametrize("ours", [CALL, f"I look. {CALL}", "((hm))I look."])
async def test_what_stands_beside_our_reply_is_read_by_the_policy(ours: str, split: bool) -> None:
    session, _ = session_of(ours, "next", "last", "other", "end")
    first = await ask(session, "q")
    beside = [{"type": "text", "text": "No response requested."}]
    said = [echo(first), {"role": "assistant", "content": beside}]
    if not split:
        said = [{"role": "assistant", "content": [*echo(first)["content"], *beside]}]
    calls = [*first.reply.tool_ids]
    result = [{"type": "tool_result", "tool_use_id": name, "content": "ok"} for name in calls] or "go on"
    after = await ask(session, "q", *said, {"role": "user", "content": result})
    assert first in after.path() and "assistant: No response requested.<e>" in prompt(after)
    last = await ask(session, "q", *said, {"role": "user", "content": result}, echo(after), "more")
    assert [node for node in last.path() if node.sampled] == [first, after, last]
    # What is put before it is no part of it either.
    other = await ask(
        session, "q", {"role": "assistant", "content": beside}, echo(first), {"role": "user", "content": result}
    )
    assert first not in other.path() and prompt(other).count("No response requested.") == 1
    assert first.text + "<e>" in prompt(other)  # its own tokens, in a new place
    alone = await ask(session, "q", echo(first), {"role": "user", "content": result})
    assert alone.parent.parent is first and "No response" not in prompt(alone)


@pytest.mark.parametrize(
    "fields",
    [
        {
            "stop_sequences": None,
            "stream": None,
            "tools": None,
            "system": None,
            "tool_choice": None,
            "max_tokens": None,
        },
        {"max_tokens": 10.0},
        {"tools": [{"name": "Edit", "description": None, "input_schema": None}]},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
    ],
)
async def test_null_and_whole_numbers_are_taken_as_they_are_meant(fields: dict[str, Any]) -> None:
    session, _ = session_of("x" * 50)
    node = await ask(session, "q", **fields)
    assert len(node.ids) == (10 if fields.get("max_tokens") else 51)


@pytest.mark.parametrize("number", [10.5, -0.5])
async def test_half_a_token_is_refused(number: float) -> None:
    session, _ = session_of("x")
    with pytest.raises(RequestError, match="max_tokens"):
        await ask(session, "q", max_tokens=number)
