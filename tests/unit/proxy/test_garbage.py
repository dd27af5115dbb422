"""This module tests that sessions give the garbage collector little to visit and nothing to collect."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import Iterator

import pytest

from rollout.proxy.garbage import untracked
from rollout.proxy.session import Session
from rollout.proxy.wire import decode_request
from tests.kit import QueueEngine, char_policy


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Nothing is collected, so what is freed is freed because nobody refers to it."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    yield
    if enabled:
        gc.enable()


async def played(turns: int) -> tuple[Session, list[list[int]]]:
    """Play a conversation with a branch after each turn; return the session, and the prompts as the engine got them."""
    engine = QueueEngine()
    session = Session("e", char_policy(engine))
    messages: list[dict[str, str]] = []
    for turn in range(turns):
        for said in (f"other {turn}", f"go on {turn}"):
            engine.replies.append(f"reply to {said}")
            asked = {"model": "policy", "messages": [*messages, {"role": "user", "content": said}]}
            node = await session.prepare(decode_request(json.dumps(asked).encode()), retry=False).reply()
            node.delivered = True
        assert node.reply is not None
        messages = [*asked["messages"], {"role": "assistant", "content": node.reply.text}]
    return session, [begun.ids for begun in session._seals._begun]


async def test_the_collector_visits_no_numbers_of_a_session() -> None:
    session, prompts = await played(3)
    assert len(session.tree.nodes) == 12 and prompts
    for node in session.tree.nodes:
        assert not gc.is_tracked(node.ids) and not (node.logprobs and gc.is_tracked(node.logprobs))
    assert not any(map(gc.is_tracked, prompts))


async def test_a_session_is_freed_without_the_collector(no_collections: None) -> None:
    session, _ = await played(3)
    session.close()
    await asyncio.sleep(0)
    gone = [weakref.ref(one) for one in (session, session.tree, *session.tree.nodes)]
    del session
    await asyncio.sleep(0)
    assert len(gone) == 14 and not any(one() for one in gone)


def test_an_untracked_list_grows_and_is_a_list_as_others() -> None:
    numbers = untracked([*range(1000, 2000)])
    numbers += range(10**6)
    assert numbers == [*range(1000, 2000), *range(10**6)] and not gc.is_tracked(numbers)
    copy = numbers[:]
    untracked(untracked(numbers))
    gc.collect()
    assert copy == numbers
