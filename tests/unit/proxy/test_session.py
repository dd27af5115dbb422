"""This module tests what a session does besides matching: stop sequences, tool_choice, side calls, shared generations,
seeds.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest
from vllm import SamplingParams

from rl.quickstart.policy import make_tokenizer
from rollout import SIDE_MODEL
from rollout.proxy.engine import Completion
from rollout.proxy.messages import RequestError
from rollout.proxy.parsers import ParsedReply
from rollout.proxy.session import Policy, Session, call_seed
from rollout.proxy.tree import Node
from rollout.proxy.wire import decode_request
from tests.kit import END, CallParser, CharRenderer, CharTokenizer, QueueEngine, char_policy

EDIT = {"name": "Edit", "description": "", "input_schema": {"type": "object"}}
CALL = '[[Edit {"file_path": "a"}]]'


def body(*messages: Any, **fields: Any) -> bytes:
    turns = [m if isinstance(m, dict) else {"role": "user", "content": m} for m in messages]
    return json.dumps({"model": "policy", "messages": turns, "tools": [EDIT], **fields}).encode()


async def ask(session: Session, *messages: Any, retry: bool = False, **fields: Any) -> Node:
    node = await session.prepare(decode_request(body(*messages, **fields)), retry).reply()
    node.delivered = True
    return node


async def settle() -> None:
    """Let all tasks run until they wait."""
    for _ in range(50):
        await asyncio.sleep(0)


class SlowEngine:
    """Answers when ``go`` is set; counts the calls that were begun and those that were cancelled."""

    def __init__(self) -> None:
        self.begun = self.cancelled = 0
        self.go = asyncio.Event()

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Completion:
        self.begun += 1
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return Completion([ord("x"), END], [-1.0, -2.0])


async def test_hits_of_the_engines_prefix_cache_are_counted() -> None:
    class Caching:
        def __init__(self) -> None:
            self.cached = iter([0, 7, None])  # in the last call the engine does not say

        async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Completion:
            assert request_id == "e"  # whatever the thread, so that all calls of an episode find one cache
            return Completion([ord("x"), END], [-1.0, -2.0], cached=next(self.cached))

    session = Session("e", char_policy(Caching()))
    nodes = [await ask(session, question) for question in ("a", "b", "c")]
    asked = sum(node.parent.length for node in nodes[:2])
    assert (session.counters.cache_queries, session.counters.cache_hits) == (asked, 7)


async def test_the_engine_is_told_the_ends_of_replies_at_which_it_does_not_stop_by_itself() -> None:
    """A base model's end of sequence is not what closes a turn: without that it would go on and play the user, too."""
    told: list[Any] = []

    class Telling:
        async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Completion:
            told.append(sampling.get("stop_token_ids"))
            return Completion([ord("x"), ord("!")], [-1.0, -2.0])

    for ends in ({END}, {END, ord("!"), ord("?")}):
        policy = replace(char_policy(Telling()), end_ids=frozenset(ends))
        node = await ask(Session("e", policy), "a")
        assert node.ended is (ord("!") in ends)
    assert told == [None, [ord("!"), ord("?")]]


async def test_a_reply_ends_at_the_agents_stop_sequence_and_keeps_the_tokens_up_to_it() -> None:
    session = Session("e", char_policy(QueueEngine("one STOP two", "fine")))
    node = await ask(session, "q", stop_sequences=["never", "STOP"])
    assert (node.reply.text, node.reply.stop_reason, node.reply.stop_sequence) == ("one ", "stop_sequence", "STOP")
    # The engine went on after the stop sequence; what the client is not sent is not kept.
    assert CharTokenizer().decode(node.ids) == node.text == "one STOP"
    assert len(node.logprobs) == len(node.ids) and not node.ended
    after = await ask(session, "q", {"role": "assistant", "content": "one"}, "go on")
    assert after.path_ids()[: node.length] == node.path_ids()  # the echo, without the stop sequence, is matched
    (row,) = session.tree.sequences()
    assert sum(row.mask) == len(node.ids) + len(after.ids)


async def test_half_a_character_is_no_stop_sequence() -> None:
    """A tokenizer says U+FFFD of a character whose tokens are not all there; that may be a stop sequence."""
    tokenizer = make_tokenizer()
    ids = tokenizer.encode("a🙂\ufffd and on", add_special_tokens=False)
    assert "\ufffd" in tokenizer.decode(ids[:2])
    engine = SimpleNamespace(generate=AsyncMock(return_value=Completion(ids, [-0.1] * len(ids))))
    session = Session("e", replace(char_policy(engine), tokenizer=tokenizer))
    node = await ask(session, "q", stop_sequences=["\ufffd"])
    assert (node.text, node.reply.text) == ("a🙂\ufffd", "a🙂")


class OfferedCalls(CallParser):
    """Without tools there are no calls, as with vLLM's parsers."""

    def parse(self, text: str, tools: Any) -> ParsedReply:
        return super().parse(text, tools) if tools else ParsedReply([{"type": "text", "text": text}])


async def test_forbidden_tools_leave_what_looks_like_a_call_as_text() -> None:
    session = Session("e", replace(char_policy(QueueEngine(CALL, CALL)), parser=OfferedCalls()))
    node = await ask(session, "q", tool_choice={"type": "none"})
    assert [block["type"] for block in node.reply.blocks] == ["text"] and node.reply.text == CALL
    assert not node.tools_allowed
    assert [b["type"] for b in (await ask(session, "p", tool_choice={"type": "auto"})).reply.blocks] == ["tool_use"]


@pytest.mark.parametrize("trained", [True, False])
async def test_side_calls_are_trained_or_only_served(trained: bool) -> None:
    policy: Policy = replace(char_policy(QueueEngine("main", "title", "more")), train_side_calls=trained)
    session = Session("e", policy)
    main = await ask(session, "q")
    side = await ask(session, "name this", model=SIDE_MODEL, system="You give titles.")
    more = await ask(session, "q", {"role": "assistant", "content": "main"}, "next")
    rows = session.tree.sequences()
    assert session.counters.side_calls == 1
    assert sorted(n for row in rows for n in row.nodes) == sorted([main.index, more.index] + [side.index] * trained)


async def test_equal_requests_at_the_same_time_share_one_sample() -> None:
    engine = SlowEngine()
    session = Session("e", char_policy(engine))
    first, second = (asyncio.create_task(ask(session, "q")) for _ in range(2))
    await asyncio.sleep(0)
    engine.go.set()
    assert await first is await second and engine.begun == 1
    assert await ask(session, "q", retry=True) is await first and engine.begun == 1


async def test_a_generation_is_aborted_when_the_last_client_leaves() -> None:
    engine = SlowEngine()
    session = Session("e", char_policy(engine))
    first, second = (asyncio.create_task(ask(session, "q")) for _ in range(2))
    await settle()
    first.cancel()
    await settle()
    assert (engine.begun, engine.cancelled, session.counters.aborted) == (1, 0, 0)
    second.cancel()
    await settle()
    assert (engine.begun, engine.cancelled, session.counters.aborted) == (1, 1, 1)
    engine.go.set()
    assert (await ask(session, "q", retry=True)).ids == [ord("x"), END]  # a retry is sampled anew
    assert engine.begun == 2 and len(session.tree.sequences()) == 1


async def test_closing_a_session_aborts_its_generations() -> None:
    engine = SlowEngine()
    session = Session("e", char_policy(engine))
    waiting = asyncio.create_task(ask(session, "q"))
    await settle()
    session.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert engine.cancelled == 1


async def test_a_session_holds_only_so_many_tokens() -> None:
    session = Session("e", replace(char_policy(QueueEngine("a", "b")), max_session_tokens=60))
    await ask(session, "x")
    with pytest.raises(RequestError) as raised:
        await ask(session, "y" * 60)
    assert raised.value.status == 413


async def test_a_prompt_that_was_counted_is_not_encoded_again() -> None:
    renderer = CharRenderer()
    session = Session("e", char_policy(QueueEngine("a"), renderer))
    counted = session.count(decode_request(body("question")))
    encoded = renderer.encoded
    node = await ask(session, "question")
    assert renderer.encoded == encoded and node.parent.length == counted


async def test_a_reply_keeps_its_own_tokens_also_in_a_prompt_that_was_counted_before_it() -> None:
    session = Session("e", char_policy(QueueEngine("((hm))one", "two")))
    talk = ("A summary.", {"role": "assistant", "content": "one"}, "go on")
    session.count(decode_request(body(*talk)))
    first = await ask(session, "q")
    after = await ask(session, *talk)
    assert first.text + "<e>" in CharTokenizer().decode(after.parent.path_ids())


async def test_a_reply_in_a_new_place_keeps_its_own_tokens() -> None:
    """Claude Code's compaction: another first message, then the last replies, rewritten a little."""
    session = Session("e", char_policy(QueueEngine("((hm))one", f" so {CALL}", "three")))
    first = await ask(session, "q")
    second = await ask(session, "q", {"role": "assistant", "content": "one"}, "go on")
    (call,) = second.reply.tool_ids
    use = {"type": "tool_use", "id": call, "name": "Edit", "input": {"replace_all": False, "file_path": "a"}}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call, "content": "ok"}]}
    kept = [{"role": "assistant", "content": "one"}, "go on", {"role": "assistant", "content": [use]}, result]
    after = await ask(session, "A summary.", *kept)
    prompt = CharTokenizer().decode(after.parent.path_ids())
    assert first.text + "<e>" in prompt and second.text + "<e>" in prompt and "replace_all" not in prompt
    assert [sum(row.mask) for row in session.tree.sequences()] == [len(first.ids) + len(second.ids), len(after.ids)]


class SeedEngine:
    """Replies with the seed of the call."""

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Completion:
        said = [ord(letter) for letter in f"{CALL} {sampling.get('seed')}"]
        return Completion([*said, END], [0.0] * (len(said) + 1))


async def test_a_calls_seed_does_not_depend_on_other_calls() -> None:
    async def replies(seed: int, *questions: str) -> dict[str, tuple[str, frozenset[str]]]:
        session = Session("e", replace(char_policy(SeedEngine()), sampling={"seed": seed}))
        nodes = {question: await ask(session, question) for question in questions}
        return {question: (node.reply.text, node.reply.tool_ids) for question, node in nodes.items()}

    first, swapped, other = await replies(7, "a", "b"), await replies(7, "b", "a"), await replies(8, "a", "b")
    assert {question: text for question, (text, _) in first.items()} == {q: t for q, (t, _) in swapped.items()}
    assert await replies(7, "a", "b") == first  # with the ids of tool calls, which some templates write
    assert len({text for text, _ in [*first.values(), *other.values()]}) == 4


async def test_without_a_seed_none_is_made_up() -> None:
    session = Session("e", char_policy(SeedEngine()))
    assert "None" in (await ask(session, "q")).reply.text


async def test_seeds_differ_by_episode_prompt_and_number_of_replies() -> None:
    ids = list(range(40))
    seeds = {call_seed(seed, prompt, before) for seed in (1, 2) for prompt in (ids, ids[1:]) for before in (0, 1)}
    assert len(seeds) == 8 and all(0 <= seed < 2**63 for seed in seeds)


class RoutingEngine(QueueEngine):
    """Records routing as vLLM does, of the tokens of prompt and reply that it is asked for; it is the token itself."""

    def __init__(self, *replies: str) -> None:
        super().__init__(*replies)
        self.sent = 0

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Completion:
        done = await super().generate(request_id, prompt_ids, sampling)
        # vLLM's own parameters, so that a name that it does not know is an error here.
        start = SamplingParams(**sampling).routed_experts_prompt_start
        assert start < len(prompt_ids)  # as vLLM asserts
        tokens = np.array([*prompt_ids, *done.ids][start:-1], dtype=np.int32)
        self.sent += len(tokens)
        return replace(done, experts=np.broadcast_to(tokens[:, None, None], (len(tokens), 2, 3)))


async def test_a_row_has_the_routing_of_all_its_tokens_except_the_last() -> None:
    engine = RoutingEngine("one", "two STOP and on", "other", "more")
    session = Session("e", char_policy(engine))
    said = {"role": "assistant", "content": "one"}
    await ask(session, "q")
    await ask(session, "q", said, "next", stop_sequences=["STOP"])
    await ask(session, "q", said, "another branch")
    await ask(session, "q", said, "next", {"role": "assistant", "content": "two"}, "last")
    rows = session.tree.sequences()
    assert len(rows) == 2
    for row in rows:
        routing = np.concatenate(row.experts)
        assert routing.shape == (len(row.prompt_ids + row.response_ids) - 1, 2, 3)
        assert routing[:, 1, 2].tolist() == (row.prompt_ids + row.response_ids)[:-1]
    # The routing of a token is sent and kept once, however often it was part of a prompt.
    kept = sum(len(node.experts) for node in session.tree.nodes if node.experts is not None)
    beyond = len(" and on") + 1  # what the engine sampled after the stop sequence, with the end token
    assert engine.sent - beyond == kept < session.tree.tokens and all(
        n.experts is None or n.experts.base is None for n in session.tree.nodes
    )


async def test_turns_are_the_main_threads_delivered_replies() -> None:
    session = Session("e", char_policy(QueueEngine("title", "one", "sub-agent's", "two", "lost")))
    await ask(session, "title?", model=SIDE_MODEL, system="Write titles.")
    assert session.turns() == 0
    first = await ask(session, "fix it", system="You are an agent.")
    await ask(session, "look for it", system="You are a sub-agent.")
    history = ["fix it", {"role": "assistant", "content": list(first.reply.blocks)}, "go on"]
    second = await ask(session, *history, system="You are an agent.")
    assert session.turns() == 2
    history += [{"role": "assistant", "content": list(second.reply.blocks)}, "and now"]
    lost = await ask(session, *history, system="You are an agent.")
    lost.delivered = False
    assert session.turns() == 2


async def test_forwarded_calls_are_counted_without_a_tree() -> None:
    session = Session("e", char_policy(QueueEngine()))
    session.counters.calls, session.counters.side_calls, session.counters.retries = 7, 2, 1
    assert session.turns() == 4


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(node: Node) -> dict[str, str]:
    return {"role": "assistant", "content": node.reply.text if node.reply else ""}


async def test_replies_that_the_agent_did_not_ask_for_are_not_trained() -> None:
    """The agent's first two calls, a sub-agent's, a summary, what comes after it; beside them, calls of a command."""
    session = Session("e", char_policy(QueueEngine(*"abcdefgh")))
    first = await ask(session, user("fix it"))
    foreign = [await ask(session, user(f"post {n}")) for n in range(2)]
    foreign.append(await ask(session, user("post 0"), said(foreign[0]), user("go on")))
    sub = await ask(session, user("look"), system="You are a sub-agent.")
    second = await ask(session, user("fix it"), said(first), user("result"))
    summary = await ask(session, user("fix it"), said(first), user("result"), said(second), user("sum up"))
    after = await ask(session, user("this is what was"))
    for node in session.tree.nodes:
        node.delivered = node.sampled
    session.disown({node.reply.id for node in (second, sub, after) if node.reply})
    assert session.counters.foreign_calls == 3 and not any(node.trained for node in foreign)
    assert [node.index for node in (first, second, summary)] in [[*row.nodes] for row in session.tree.sequences()]
    assert sorted(n for row in session.tree.sequences() for n in row.nodes) == sorted(
        node.index for node in (first, sub, second, summary, after)
    )


async def test_spoiled_reports_take_nothing_of_the_first_conversation_out_of_training() -> None:
    """Otherwise a command that writes junk between the agent's events would undo a reward of 0."""
    session = Session("e", char_policy(QueueEngine(*"abc")))
    first = await ask(session, user("fix it"))
    second = await ask(session, user("fix it"), said(first), user("result"))
    post = await ask(session, user("post"))
    for node in (first, second, post):
        node.delivered = True
    session.disown(())
    assert [[*row.nodes] for row in session.tree.sequences()] == [[first.index, second.index]]
    assert session.counters.foreign_calls == 1


async def test_side_calls_are_trained_if_they_are_reported() -> None:
    session = Session("e", char_policy(QueueEngine(*"abc")))
    first = await ask(session, user("fix it"))
    reported, other = [await ask(session, user(f"a title {n}"), model=SIDE_MODEL) for n in range(2)]
    for node in (first, reported, other):
        node.delivered = True
    session.disown({reported.reply.id} if reported.reply else set())
    assert (reported.trained, other.trained, session.counters.foreign_calls) == (True, False, 0)
