"""Each API's own SDK plays the same conversation against a real server, and leaves the same training row."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from rollout import SIDE_MODEL
from rollout.audit import audit_text, audit_tokens
from rollout.proxy.chat import ChatEndpoint
from rollout.proxy.forward import SideEndpoint
from rollout.proxy.front import front_of
from rollout.proxy.passthrough import PassThrough
from rollout.proxy.server import ProxyServer
from rollout.proxy.session import Session
from rollout.proxy.standalone import ProxyOptions, StandAlone
from rollout.records import VERSION, node_records, row_records
from tests.front_kit import (
    SAID,
    AnthropicAgent,
    ChatAgent,
    ContinuingAgent,
    ForgettingAgent,
    Gate,
    GeminiAgent,
    GenaiAgent,
    ResponsesAgent,
    SigningAgent,
    opened,
    rows,
)
from tests.kit import CallReading, CharTokenizer, QueueEngine, char_policy, empty_record

AGENTS: dict[str, Any] = {
    "messages": AnthropicAgent,
    "chat": ChatAgent,
    "responses": ResponsesAgent,
    "continued": ContinuingAgent,
    "gemini": GenaiAgent,
    "gemini-http": GeminiAgent,
    "gemini-signed": SigningAgent,
    "gemini-without-ids": ForgettingAgent,
}


@pytest.fixture
async def wanted(proxy: ProxyServer) -> list[Any]:
    """The row of the conversation in the Messages API, whose exactness other tests prove."""
    session = await opened(proxy, *SAID)
    assert await AnthropicAgent(proxy, session).play() == "All is done."
    return rows(session)


@pytest.mark.parametrize("rewrites", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", AGENTS)
async def test_five_turns_with_tools_are_one_row_and_the_same_in_each_api(
    proxy: ProxyServer, wanted: list[Any], api: str, stream: bool, rewrites: bool
) -> None:
    session = await opened(proxy, *SAID)
    assert await AGENTS[api](proxy, session, stream, rewrites).play() == "All is done."
    assert len(wanted) == 1 and sum(wanted[0][2]) == session.tree.sampled_tokens()
    assert rows(session) == wanted
    record = empty_record(
        version=VERSION, nodes=node_records(session.tree), rows=row_records(session.tree.sequences()), events=[]
    )
    assert [*audit_tokens(record), *audit_text(record, CharTokenizer(), CallReading())] == []
    assert [len(node.says) > 2 for node in record.nodes] == [node.logprobs is None for node in record.nodes]


ENDPOINTS = {
    "messages": lambda port, key: SideEndpoint(f"http://127.0.0.1:{port}", "policy", key),
    "chat": lambda port, key: ChatEndpoint(f"http://127.0.0.1:{port}/v1", "policy", key),
}
FORWARDED = [(api, endpoint) for api in ("chat", "responses", "gemini-http") for endpoint in ENDPOINTS]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api, endpoint", FORWARDED)
async def test_an_agent_of_each_api_plays_with_another_endpoint(
    proxy: ProxyServer, wanted: list[Any], api: str, endpoint: str, stream: bool
) -> None:
    """This is how hosted models are evaluated. The endpoint is a session of ours, whose row shows what it was sent."""
    back = await opened(proxy, *SAID)
    front = PassThrough(ENDPOINTS[endpoint](proxy.port, back.secret))
    await front.start()
    session = await front.open_session("e", front.policy)
    assert await AGENTS[api](front, session, stream).play() == "All is done."
    assert len(session.talk.calls) == session.counters.calls == 5 and session.counters.engine_errors == 0
    assert [call.reply["content"][-1].get("text") for call in session.talk.calls][-1] == "All is done."
    await front.stop()
    if endpoint == "messages":  # the other one gives calls ids of its own
        (row,) = rows(back)
        assert (row[0], row[2]) == (wanted[0][0], wanted[0][2])


@pytest.mark.parametrize("api", ["chat", "responses", "gemini"])
async def test_what_a_request_leaves_open_is_sent_on_as_the_config_has_it(proxy: ProxyServer, api: str) -> None:
    """Anthropic's API takes no choice of tools without tools, and a tool needs a schema."""
    heard: list[dict[str, Any]] = []
    path, body = PATHS[api]
    front = PassThrough(ENDPOINTS["messages"](proxy.port, (await opened(proxy, *["hello"] * 2)).secret), max_tokens=321)
    await front.start()
    session = await front.open_session("e", front.policy)
    ask = front.endpoint.ask
    front.endpoint.ask = lambda sent: heard.append(json.loads(sent)) or ask(sent)  # type: ignore[method-assign]
    tool = {"name": "f"}
    tools = {"chat": {"type": "function", "function": tool}, "responses": {"type": "function", **tool}}
    offered = {"tools": [tools.get(api, {"functionDeclarations": [tool]})]}
    async with aiohttp.ClientSession() as http:
        for more in ({}, offered):
            assert (await post(http, front, session, path, body("hi") | more))[0] == 200
    await front.stop()
    assert [one["max_tokens"] for one in heard] == [321, 321]
    assert not {"tools", "tool_choice"} & heard[0].keys()
    assert heard[1]["tools"] == [{"name": "f", "input_schema": {"type": "object", "properties": {}}}]


# --- each API as bytes: what its clients hang up on, and what hostile ones send

PATHS: dict[str, tuple[str, Callable[[str], dict[str, Any]]]] = {
    "chat": ("/v1/chat/completions", lambda text: {"model": "policy", "messages": [{"role": "user", "content": text}]}),
    "responses": (
        "/v1/responses",
        lambda text: {"model": "policy", "input": [{"type": "message", "role": "user", "content": text}]},
    ),
    "gemini": (
        "/v1beta/models/policy:generateContent",
        lambda text: {"contents": [{"role": "user", "parts": [{"text": text}]}]},
    ),
}


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def post(
    http: aiohttp.ClientSession, proxy: ProxyServer, session: Session, path: str, body: Any
) -> tuple[int, bytes]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    url, headers = f"http://127.0.0.1:{proxy.port}{path}", {"Authorization": f"Bearer {session.secret}"}
    async with http.post(url, data=data, headers=headers) as response:
        return response.status, await response.read()


@pytest.mark.parametrize("api", PATHS)
async def test_a_reply_that_was_lost_is_not_trained_and_is_sent_again(
    proxy: ProxyServer, http: aiohttp.ClientSession, api: str
) -> None:
    path, body = PATHS[api]
    engine = Gate("lost", "kept")
    session = await proxy.open_session("e", char_policy(engine))
    asking = asyncio.create_task(post(http, proxy, session, path, body("hi")))
    async with asyncio.timeout(60):
        while not session._generations:
            await asyncio.sleep(0.01)
        asking.cancel()
        while session._generations:
            await asyncio.sleep(0.01)
    assert session.counters.aborted == 1 and session.tree.sampled_tokens() == 0
    engine.open.set()
    front = front_of(path)
    wire = await session.translated(front, front.read(json.dumps(body("hi")).encode(), path))
    lost = await session.prepare(wire, retry=False).reply()  # sampled, and never sent
    assert session.tree.sequences() == []
    status, said = await post(http, proxy, session, path, body("hi"))
    assert status == 200 and b"lost" in said and engine.replies == ["kept"]
    await http.close()
    session.settle()
    assert lost.delivered and len(session.tree.sequences()) == 1


@pytest.mark.parametrize("api", PATHS)
async def test_side_calls_are_forwarded_by_their_models_name(
    proxy: ProxyServer, http: aiohttp.ClientSession, api: str
) -> None:
    back = await opened(proxy, "a title")
    endpoint = SideEndpoint(f"http://127.0.0.1:{proxy.port}", "small", back.secret)
    session = await proxy.open_session("e", replace(char_policy(Gate()), side_endpoint=endpoint))
    path, body = PATHS[api]
    path, asked = path.replace("policy", SIDE_MODEL), json.dumps(body("hi")).replace("policy", SIDE_MODEL)
    status, said = await post(http, proxy, session, path, asked.encode())
    assert status == 200 and b"a title" in said and session.tree.nodes == []
    assert [call.side for call in session.talk.calls] == [True]
    await endpoint.close()


@pytest.mark.parametrize("api", PATHS)
async def test_hostile_bodies_are_refused(proxy: ProxyServer, http: aiohttp.ClientSession, api: str) -> None:
    path, body = PATHS[api]
    session = await opened(proxy, "hello")
    whole = json.dumps(body("MARK")).encode()
    deep, wide = b"[" * 100_000 + b"]" * 100_000, b"[" + b"[]," * 60_000 + b"[]]"
    place = whole.index(b"[") + 1
    more = whole[:place] + b"{}," * 10_000 + whole[place:]
    for sent in (
        whole.replace(b'"MARK"', deep),
        whole.replace(b'"MARK"', wide),
        more,
        whole[:-1],
        b"[]",
        b"\xff",
        deep,
    ):
        status, said = await post(http, proxy, session, path, sent)
        assert status == 400 and json.loads(said)["error"], sent[:50]
    assert session.tree.nodes == []
    # Half of a surrogate pair is no character, and the rest of the text stays what it is.
    assert (await post(http, proxy, session, path, whole.replace(b"MARK", b"a\\ud800b")))[0] == 200
    assert "a\ufffdb" in CharTokenizer().decode(session.tree.nodes[0].ids)


@pytest.mark.parametrize("api", PATHS)
async def test_what_takes_long_to_translate_is_not_translated_on_the_event_loop(
    proxy: ProxyServer, http: aiohttp.ClientSession, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, body = PATHS[api]
    front, here, threads = front_of(path), threading.get_ident(), list[bool]()
    translate = front.wire
    monkeypatch.setattr(front, "wire", lambda *args: threads.append(threading.get_ident() != here) or translate(*args))
    session = await opened(proxy, *["hello"] * 5)
    tool = {"name": "f", "description": "x" * 20_000}
    tools = {"chat": {"function": tool}, "responses": {"type": "function", **tool}}
    offered = {"tools": [tools.get(api, {"functionDeclarations": [tool]})]}
    long = body("x" * 20_000)
    for asked in (body("short"), long, long, body("other") | offered, body("another") | offered):
        assert (await post(http, proxy, session, path, asked))[0] == 200
    assert threads == [False, True, False, True, False]


async def test_the_stand_alone_proxy_serves_all_on_one_port_and_knows_whose_calls_are_whose(
    http: aiohttp.ClientSession,
) -> None:
    proxy = StandAlone(ProxyOptions("http://127.0.0.1:9", "model", "calls", token="right"))
    proxy.policy = char_policy(QueueEngine(*["hello"] * 20))
    await proxy.start()
    named: list[tuple[dict[str, str], dict[str, Any]]] = [
        ({"session-id": "a"}, {}), ({}, {"prompt_cache_key": "b"}), ({}, {"user": "c"}), ({}, {}),
    ]  # fmt: skip
    for path, body in PATHS.values():
        for headers, fields in named:
            asked = http.post(
                f"http://127.0.0.1:{proxy.port}{path}",
                json=body("hi") | fields,
                headers={"Authorization": "Bearer right", **headers},
            )
            async with asked as response:
                assert response.status == 200 and "hello" in await response.text()
    assert len(proxy.sessions) == len(named)
    assert all(session.counters.calls == len(PATHS) for session in proxy.sessions.values())
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{proxy.port}/v1", api_key="right") as client:
        assert [model.id async for model in client.models.list()] == ["model"]
        assert (await client.models.retrieve("model")).owned_by == "vllm"
    async with anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{proxy.port}", auth_token="right") as client:
        assert [model.id async for model in client.models.list()] == ["model"]
    async with http.get(f"http://127.0.0.1:{proxy.port}/v1beta/models?key=right") as response:
        assert (await response.json())["models"][0]["name"] == "models/model"
    await proxy.stop()
