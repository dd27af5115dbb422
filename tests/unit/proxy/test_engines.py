"""This module tests engines without a model: the HTTP engine's errors, and the replay of a recorded episode."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from rollout.proxy.engine import AT_1, SAMPLED, Engine, EngineError
from rollout.proxy.session import Session
from rollout.proxy.tree import Tree
from rollout.proxy.vllm_http import VllmHttpEngine
from rollout.proxy.wire import decode_request
from rollout.records import Record, node_records
from rollout.replay import ReplayDifferenceError, ReplayEngine
from tests.kit import CharTokenizer, QueueEngine, char_policy, empty_record

SAMPLING = {"max_tokens": 9, "temperature": 0.5, "stop": ["x"]}
Answer = Callable[[web.Request], Awaitable[web.Response]]


class Server:
    """Plays vLLM's endpoint; ``answer`` may be an error."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.connections: set[Any] = set()
        self.answer: Answer | None = None
        self.cancelled = asyncio.Event()

    async def handle(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        self.connections.add(request.transport)
        assert self.answer is not None
        try:
            return await self.answer(request)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, VllmHttpEngine]]:
    server = Server()
    app = web.Application()
    app.router.add_post("/inference/v1/generate", server.handle)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    engine = VllmHttpEngine(f"http://127.0.0.1:{port}/", "policy")
    yield server, engine
    await engine.close()
    await runner.cleanup()


def reply(ids: list[int] | None, logprobs: list[float] | None, finish: str = "stop") -> dict[str, Any]:
    content = logprobs and [{"token": "t", "logprob": p, "bytes": None, "top_logprobs": []} for p in logprobs]
    return {
        "request_id": "r",
        "choices": [{"index": 0, "token_ids": ids, "logprobs": {"content": content}, "finish_reason": finish}],
    }


def says(body: Any, status: int = 200) -> Answer:
    async def answer(request: web.Request) -> web.Response:
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(status=status, text=text, content_type="application/json")

    return answer


async def test_ids_go_in_and_ids_and_logprobs_come_out(server: tuple[Server, VllmHttpEngine]) -> None:
    vllm, engine = server
    vllm.answer = says(reply([5, 6], [-0.25, -1.5], "length"))
    done = await engine.generate("e", [1, 2, 3], SAMPLING)
    assert (done.ids, done.logprobs, done.versions) == ([5, 6], [-0.25, -1.5], ())
    (asked,) = vllm.requests
    assert (asked["token_ids"], asked["model"]) == ([1, 2, 3], "policy")
    assert asked["sampling_params"].items() >= {**SAMPLING, "logprobs": 0}.items()
    await engine.generate("e", [1, 2, 3], SAMPLING)
    assert len(vllm.connections) == 1  # the connection is reused
    assert vllm.requests[0]["request_id"] != vllm.requests[1]["request_id"]


@pytest.mark.parametrize(
    ("usage", "cached"),
    [({"prompt_tokens_details": {"cached_tokens": 2}}, 2), ({"prompt_tokens_details": None}, None), (None, None)],
)
async def test_hits_of_the_servers_cache_are_told(
    server: tuple[Server, VllmHttpEngine], usage: Any, cached: int | None
) -> None:
    vllm, engine = server
    vllm.answer = says({**reply([5], [-0.25]), "usage": usage})
    assert (await engine.generate("e", [1, 2, 3], SAMPLING)).cached == cached


@pytest.mark.parametrize(("logprobs", "processed"), [([0.0, -0.0], True), ([0.0, -0.5], False)])
async def test_the_only_choice_has_the_logprob_0_if_it_is_that_of_what_was_sampled_from(
    server: tuple[Server, VllmHttpEngine], logprobs: list[float], processed: bool
) -> None:
    vllm, engine = server
    vllm.answer = says(reply([5, 6], logprobs, "length"))
    assert (await engine.generate("e", [1], {"max_tokens": 2})).logprobs_of == ""  # it was not asked yet
    assert await engine.processed([1, 2]) is processed
    for temperature, of in ((0.7, SAMPLED if processed else AT_1), (0, AT_1), (None, SAMPLED if processed else AT_1)):
        done = await engine.generate("e", [1], {"max_tokens": 2, "temperature": temperature})
        assert done.logprobs_of == of
    assert vllm.requests[1]["sampling_params"].items() >= {"top_k": 1, "temperature": 1.0}.items()


@pytest.mark.parametrize(
    "body, status, words",
    [
        ({"error": {"message": "engine\nis dead"}}, 500, r"status 500: .*engine"),
        ({"error": {"message": "too long"}}, 400, r"status 400: .*too long"),
        ("<html>", 200, "not one of this endpoint"),
        ({"choices": []}, 200, "not one of this endpoint"),
        (reply([5, 6], None), 200, "2 tokens but 0 logprobs"),
        (reply([5], [-0.5], "abort"), 200, r"ended the reply after 1 tokens \(abort\)"),
    ],
)
async def test_anything_but_a_reply_is_an_engine_error_of_one_line(
    server: tuple[Server, VllmHttpEngine], body: Any, status: int, words: str
) -> None:
    vllm, engine = server
    vllm.answer = says(body, status)
    with pytest.raises(EngineError, match=words) as caught:
        await engine.generate("e", [1], SAMPLING)
    assert "\n" not in str(caught.value)
    assert caught.value.permanent is (status == 400)


async def test_a_server_that_is_down_or_goes_away_is_an_engine_error(server: tuple[Server, VllmHttpEngine]) -> None:
    vllm, engine = server

    async def hang_up(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    vllm.answer = hang_up
    with pytest.raises(EngineError, match="/inference/v1/generate: ServerDisconnectedError"):
        await engine.generate("e", [1], SAMPLING)
    nobody = VllmHttpEngine("http://127.0.0.1:9", "policy")
    with pytest.raises(EngineError, match=r"^http://127\.0\.0\.1:9/inference/v1/generate: ClientConnectorError"):
        await nobody.generate("e", [1], SAMPLING)
    await nobody.close()


async def test_cancelling_closes_the_connection(server: tuple[Server, VllmHttpEngine]) -> None:
    vllm, engine = server
    started = asyncio.Event()

    async def never(request: web.Request) -> web.Response:
        started.set()
        await asyncio.sleep(60)
        return web.Response()

    vllm.answer = never
    asking = asyncio.create_task(engine.generate("e", [1], SAMPLING))
    await started.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await asyncio.wait_for(vllm.cancelled.wait(), 60)


REPLIES = ("hello", "one more", "side")
HISTORIES: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "and?"},
    ],
    [{"role": "user", "content": "title?"}],
]


async def play(engine: Engine, histories: list[list[dict[str, Any]]]) -> Tree:
    session = Session("e", char_policy(engine))
    for messages in histories:
        body = json.dumps({"model": "m", "max_tokens": 100, "messages": messages}).encode()
        node = await session.prepare(decode_request(body), retry=False).reply()
        node.delivered = True
    return session.tree


async def recorded() -> tuple[Tree, Record]:
    tree = await play(QueueEngine(*REPLIES), HISTORIES)
    return tree, empty_record(nodes=node_records(tree))


async def test_an_episode_replays_token_by_token() -> None:
    tree, then = await recorded()
    then.nodes[1].logprobs_of = AT_1
    engine = ReplayEngine(then, CharTokenizer())
    again = await play(engine, HISTORIES)
    assert engine.left == 0 and engine.difference is None
    assert [(n.ids, n.logprobs, n.text) for n in again.nodes] == [(n.ids, n.logprobs, n.text) for n in tree.nodes]
    assert [node.logprobs_of for node in node_records(again)] == [node.logprobs_of for node in then.nodes]


async def test_calls_may_come_in_another_order() -> None:
    _, then = await recorded()
    engine = ReplayEngine(then, CharTokenizer())
    again = await play(engine, [HISTORIES[2], HISTORIES[0], HISTORIES[1]])
    assert [n.text for n in again.nodes if n.sampled] == ["side", "hello", "one more"] and engine.left == 0


async def test_the_first_difference_is_named() -> None:
    _, then = await recorded()
    engine = ReplayEngine(then, CharTokenizer())
    changed = [HISTORIES[0], [*HISTORIES[1][:2], {"role": "user", "content": "and what?"}]]
    with pytest.raises(ReplayDifferenceError) as caught:
        await play(engine, changed)
    at = "user: hi<e>\nassistant: hello<e>\nuser: and?".replace("<e>", "E").index("?")
    said = str(caught.value)
    assert said.startswith(f"call 2: its prompt differs from the recorded one at token {at}: ")
    assert "user: and?<e>" in said.split(", now ")[0] and "user: and what?<e>" in said.split(", now ")[1]
    assert engine.difference is caught.value
    with pytest.raises(ReplayDifferenceError, match="call 2"):  # what comes after it means nothing
        await play(engine, HISTORIES[2:])


async def test_more_calls_and_less_room_than_recorded_are_differences() -> None:
    _, then = await recorded()
    with pytest.raises(ReplayDifferenceError, match="call 4: the record has no more replies"):
        await play(ReplayEngine(then, CharTokenizer()), [*HISTORIES, HISTORIES[2]])
    tree = await play(QueueEngine("hello"), HISTORIES[:1])
    prompt = tree.nodes[0].ids
    engine = ReplayEngine(empty_record(nodes=node_records(tree)), CharTokenizer())
    with pytest.raises(ReplayDifferenceError, match="call 1: the recorded reply has 6 tokens, but max_tokens is now 5"):
        await engine.generate("e", prompt, {"max_tokens": 5})
