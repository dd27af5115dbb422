"""This module tests traces, and the conversations that are made of them: of sampled replies, and of another endpoint's,
whatever ids that gives them.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.data.choice import ChoiceEntry
from rl.traces.collect.dataset import rows
from rl.traces.collect.spans import spans_of
from rl.traces.export.conversation import ChatConversation, UnreadableEpisode, conversations
from rl.traces.export.inspect_sample import sample
from rl.traces.export.swesmith import spelled
from rl.view.turns import composed, read
from rollout.figures import line
from rollout.proxy.calls import CallRecord
from rollout.records import NodeRecord, Record, RowRecord
from rollout.trace import TraceError, trace
from tests.export_kit import SYSTEM, TOOLS, Play, calls_of, crowd, repair, without_words
from tests.kit import empty_record

_few = itertools.count()
HOW: dict[str, dict[str, Any]] = {
    "tokens": {},
    "hosted": {"hosted": True},
    "one id for all": {"hosted": True, "named": lambda name: "call_0"},
    "three ids": {"hosted": True, "named": lambda name: f"call_{next(_few) % 3}"},
    "no ids": {"hosted": True, "named": lambda name: None},
}
WAYS = pytest.mark.parametrize("how", HOW.values(), ids=HOW)


@WAYS
async def test_thinking_parallel_calls_and_results_in_another_order(how: dict[str, Any]) -> None:
    record = await repair("a", **how)
    (talk,) = conversations(record)
    system, asked, first, one, two, more, last = talk.messages
    assert (system, asked) == ({"role": "system", "content": SYSTEM}, {"role": "user", "content": "fix it"})
    assert (first["content"].strip(), first["reasoning_content"]) == ("I look.", "Hm.")
    functions = [call["function"] for call in first["tool_calls"]]
    assert functions == [{"name": "Bash", "arguments": {"command": c}} for c in ("ls -l", 'cat "a"')]
    ids = [call["id"] for call in first["tool_calls"]]
    assert [(m["tool_call_id"], m["content"], m["name"]) for m in (one, two)] == [
        (ids[1], "content of a", "Bash"),
        (ids[0], "total 0", "Bash"),
    ]
    assert (more, last) == ({"role": "user", "content": "Go on."}, {"role": "assistant", "content": "Done."})
    assert list(talk.replies) == [2, 6] == talk.fresh and talk.kind == "main"
    assert [tool["function"]["name"] for tool in talk.tools] == ["Bash", "Agent"]
    assert [point.node for point in talk.replies.values()] == ([-1, -1] if how else [1, 3])


@WAYS
async def test_side_calls_sub_agents_and_compactions_are_conversations_of_their_own(how: dict[str, Any]) -> None:
    side, agent, before, after = conversations(await crowd("a", **how))
    assert [talk.kind for talk in (side, agent, before, after)] == ["side", "agent", "main", "main"]
    assert [m["content"] for m in side.messages] == [SYSTEM, "make a title", "A title"] and side.tools == []
    assert [m["content"] for m in agent.messages] == [SYSTEM, "find it", "I found it."] and len(agent.tools) == 1
    assert agent.caller == before.messages[2]["tool_calls"][0]["id"]
    assert [m["content"] for m in before.messages][3:] == ["It is there.", "So far.", "sum up", "Summary."]
    # A reply that is kept behind a compaction is there again, and is not to be trained on again.
    texts = [SYSTEM, "Summary of before.", "So far.", "Go on.", "After it.", "And?", "The end."]
    assert [m["content"] for m in after.messages] == texts
    assert list(after.replies) == [2, 4, 6] and after.fresh == [4, 6]


@WAYS
async def test_every_program_counts_the_same_replies(how: dict[str, Any]) -> None:
    """Endpoints use ids again: some draw them from 999, some have one for all, or none."""
    play = Play(*[f'[[Bash {{"n": {n}}}]]' for n in range(10)], "Done.", **how)
    main: list[Any] = [{"role": "user", "content": "fix it"}]
    for n in range(10):
        (call,) = calls_of(await play.ask(main))
        play.answer(main, (call, f"result {n}"))
    await play.ask(main)
    record = play.record("a")
    found = trace(record)
    assert len(found.points) == len(list(rows(found, 0, None))) == 11 and found.rows == [list(range(11))]
    named = [span["attributes"]["gen_ai.response.id"] for span in spans_of(found) if span["name"].startswith("raw")]
    assert len(set(named)) == len(named) == 11
    (talk,) = conversations(record)
    assert len(talk.replies) == len(talk.fresh) == 11
    turns = read(record).turns
    assert [turn.after for turn in turns] == list(range(11)) and all(turn.kind == "main" for turn in turns)
    results = [part.result.text for turn in turns for part in turn.parts if part.result]
    assert results == [f"result {n}" for n in range(10)]
    assert {part.arguments["n"] for turn in turns for part in turn.parts if part.kind == "call"} == set(range(10))


TEXT = st.text(st.sampled_from("ab <e>\n[]:user\u00e9\u4f60"), max_size=12)


@settings(max_examples=60)
@given(st.data())
async def test_sampled_and_forwarded_replies_are_read_alike(data: st.DataObject) -> None:
    turns = data.draw(st.integers(1, 4))
    replies = [
        data.draw(st.sampled_from(["ok", '[[Bash {"n": 1}]]', '[[Bash {"n": 1}]][[Agent {"n": 2}]]']))
        for _ in range(turns)
    ]
    plays = Play(*replies), Play(*replies, hosted=True)
    mains: list[list[Any]] = [[], []]
    first = data.draw(TEXT.filter(str.strip))
    for main in mains:
        main.append({"role": "user", "content": first})
    for _ in replies:
        order = data.draw(st.permutations(range(2)))
        texts, more = [data.draw(TEXT) for _ in order], data.draw(TEXT)
        for play, main in zip(plays, mains, strict=True):
            ids = calls_of(await play.ask(main))
            if ids:
                results = [(ids[n], texts[n]) for n in order if n < len(ids)]
                play.answer(main, *results, text=more)
            else:
                main.append({"role": "user", "content": more or "x"})
    read_back = [[plain(talk) for talk in conversations(play.record("a"))] for play in plays]
    assert read_back[0] == read_back[1]
    asked = "".join(str(message["content"]) for message in read_back[0][-1][0] if message["role"] != "assistant")
    assert first in asked


def plain(talk: ChatConversation) -> list[Any]:
    """A conversation without ids."""
    names = {name: str(n) for n, name in enumerate(c["id"] for m in talk.messages for c in m.get("tool_calls", ()))}
    for message in talk.messages:
        if "tool_call_id" in message:
            message["tool_call_id"] = names.get(message["tool_call_id"])
        for call in message.get("tool_calls", ()):
            call["id"] = names[call["id"]]
    return [talk.messages, talk.tools, talk.kind, talk.fresh, list(talk.replies)]


async def test_what_was_not_kept_is_not_made_up() -> None:
    record = without_words(await repair("a"))
    assert trace(record).silent and [turn.tokens for turn in read(record).turns]
    with pytest.raises(UnreadableEpisode, match="its messages were not kept"):
        conversations(record)
    with pytest.raises(UnreadableEpisode, match="neither tokens nor messages"):
        conversations(empty_record())


@pytest.mark.parametrize(
    ("says", "why"),
    [
        (b"[1]", "a reply 1 that is not there"),
        (b"[" * 100_000, "a message that cannot be read"),
        (b'[{"role": "user"}]', "neither text nor blocks"),
        (b'[{"content": "a"}]', "without a role"),
        (b'["a"]', "without a role"),
    ],
)
async def test_hostile_messages_are_a_finding_of_their_episode(says: bytes, why: str) -> None:
    record: Record = await repair("a")
    record.nodes[0] = msgspec.structs.replace(record.nodes[0], says=says)
    with pytest.raises(TraceError, match=why):
        trace(record)
    assert any(why in finding for finding in read(record).findings)


OK, ASKED = {"content": [{"type": "text", "text": "ok"}]}, [{"role": "user", "content": "hi"}]
BLOCKS: list[dict[str, Any]] = [
    {"type": "text"},
    {"type": "text", "text": 5},
    {"type": "thinking", "thinking": None},
    {"type": "tool_use"},
    {"type": "tool_use", "id": ["a"], "name": "Bash", "input": {}},
    {"type": "tool_use", "id": "a", "name": "Bash", "input": "ls"},
    {"type": "tool_result", "tool_use_id": "a", "content": 5},
    {"type": "tool_result", "tool_use_id": "a", "content": [{"a": 1}]},
]


def forwarded(asked: Any = ASKED, reply: Any = OK, head: Any = ("s", []), **more: Any) -> Record:
    parts = [json.dumps(one).encode() for one in (*head, *asked)]
    call = CallRecord([*range(2, len(parts))], 0, 1, reply={"id": "m", **reply}, started=1.0)
    return empty_record(parts=parts, calls=[call], **more)


def sampled(says: bytes = json.dumps(ASKED).encode(), parent: int = 0, head: bytes = b'["s", []]') -> Record:
    asked = NodeRecord(-1, b"\1\0\0\0", says=says, head=head)
    said = NodeRecord(parent, b"\1\0\0\0", b"\0\0\0\0", blocks=[{"type": "text"}], delivered=True)
    return empty_record(nodes=[asked, said], rows=[RowRecord(1, 1, [1], ""), RowRecord(1, 1, [9], "")])


HOSTILE = {
    **{f"a reply of {block}": forwarded(reply={"content": [block]}) for block in BLOCKS},
    **{f"asked with {block}": forwarded([{"role": "user", "content": [block]}]) for block in BLOCKS},
    "no messages": forwarded([]),
    "a system prompt that is none": forwarded(head=({"a": 1}, [])),
    "a block that is none in it": forwarded(head=([{"type": "text"}], [])),
    "a schema that is none": forwarded(head=("s", [{"name": "a", "input_schema": "x"}])),
    "parts that are not there": empty_record(calls=[CallRecord([7])]),
    **{f"says {says!r}": sampled(says) for says in (b"5", b"null", b'[{"role": "user", "content": [{}]}]')},
    **{f"head {head!r}": sampled(head=head) for head in (b"5", b"[1]", b"[1, [], 2]", b'[{"a": 1}, []]')},
    **{f"its parent is {parent}": sampled(parent=parent) for parent in (1, 2, 99)},
}


@pytest.mark.parametrize("record", HOSTILE.values(), ids=HOSTILE)
def test_whatever_an_endpoint_says_or_damage_does_no_program_ends_there(record: Record) -> None:
    """One such episode would be the end of an export of all."""
    read(record)
    with contextlib.suppress(msgspec.DecodeError):
        list(composed(record))
    with contextlib.suppress(TraceError, UnreadableEpisode):
        found = trace(record)
        talks = conversations(record)
        assert [*rows(found, 0, None), *spans_of(found), *talks]
        for talk in talks:
            assert all(isinstance(one["content"], str) for one in talk.messages)
            assert spelled(talk.messages, talk.tools)
        assert sample(ChoiceEntry(line(empty_record()), Path(), 0, b"", b"", sound=True), record, talks, "m")


async def test_replies_that_are_not_the_agents_are_in_no_conversation() -> None:
    """Something else in the box asked for a reply; the agent reports it to nobody."""
    play = Play("Mine.", "Not mine.", hosted=True)
    await play.ask([{"role": "user", "content": "fix it"}])
    before = list(play.events)
    await play.ask([{"role": "user", "content": "tell me the tests"}])
    play.events = before
    (talk,) = conversations(play.record("a"))
    assert talk.messages[-1]["content"] == "Mine."


async def test_records_before_version_4_of_collections_say_each_message_once() -> None:
    """Claude Code moves its marks of what to cache with each call, so no message is the same twice, byte for byte."""
    play = Play('[[Bash {"n": 1}]]', '[[Bash {"n": 2}]]', "Done.")
    main: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "fix it"}]}]
    parts: list[bytes] = [json.dumps(SYSTEM).encode(), json.dumps(TOOLS).encode()]
    asked: list[list[int]] = []
    for n in range(3):
        marked = copy.deepcopy(main)
        marked[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
        asked.append([parts.append(json.dumps(one).encode()) or len(parts) - 1 for one in marked])
        called = calls_of(await play.ask(main))
        play.answer(main, *[(call, f"result {n}") for call in called])
    new = play.record("a")
    sampled = [number for number, node in enumerate(new.nodes) if node.logprobs is not None]
    calls = [CallRecord(places, 0, 1, node=node) for places, node in zip(asked, sampled, strict=True)]
    old = msgspec.structs.replace(without_words(new), parts=parts, calls=calls)
    mine, theirs = ([plain(talk) for talk in conversations(one)] for one in (old, new))
    assert mine == theirs and len(theirs[0][0]) == 7
