"""An endpoint that fails is counted as failed, whenever that is, so that its failure is not taken for the policy's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import aiohttp
import pytest
from aiohttp import web

from rollout.proxy import connections
from rollout.proxy.chat import ChatEndpoint
from rollout.proxy.forward import SideEndpoint
from rollout.proxy.passthrough import PassThrough
from rollout.proxy.session import Session


@dataclass
class Ends:
    """A proxy and the endpoint behind it, which gives ``answer`` when ``go`` is set."""

    proxy: PassThrough
    session: Session
    runner: web.AppRunner
    answer: tuple[int, str] = (503, "down")
    go: asyncio.Event = field(default_factory=asyncio.Event)

    async def post(self, stream: bool, read: Callable[[aiohttp.ClientResponse], Awaitable[str]]) -> tuple[int, str]:
        body = {"model": "m", "max_tokens": 9, "stream": stream, "messages": [{"role": "user", "content": "x"}]}
        return await self.send(json.dumps(body).encode(), read)

    async def send(
        self, body: bytes, read: Callable[[aiohttp.ClientResponse], Awaitable[str]], path: str = ""
    ) -> tuple[int, str]:
        url, key = f"http://127.0.0.1:{self.proxy.port}/v1/messages{path}", {"x-api-key": self.session.secret}
        async with aiohttp.ClientSession() as http, http.post(url, data=body, headers=key) as response:
            return response.status, await read(response)


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    async def answer(request: web.Request) -> web.Response:
        await found.go.wait()
        status, text = found.answer
        return web.Response(status=status, text=text)

    app = web.Application()
    for path in ("/chat/completions", "/v1/messages", "/v1/messages/count_tokens"):
        app.router.add_post(path, answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    proxy = PassThrough(ChatEndpoint(f"http://127.0.0.1:{runner.addresses[0][1]}", "large"))
    proxy.ping_s = 0.02
    await proxy.start()
    found = Ends(proxy, await proxy.open_session("e", proxy.policy), runner)
    yield found
    await proxy.stop()
    await runner.cleanup()


async def _late(ends: Ends) -> tuple[int, str]:
    """Let the endpoint answer only after the agent has had a ping."""

    async def read(response: aiohttp.ClientResponse) -> str:
        assert b"ping" in await response.content.readline()
        ends.go.set()
        return (await response.content.read()).decode()

    return await ends.post(True, read)


async def test_a_failure_after_a_ping_is_the_endpoints(ends: Ends) -> None:
    """It had been counted as a success, because the response had begun with 200, and was the policy's failure then."""
    status, told = await _late(ends)
    assert status == 200 and "api_error" in told and "down" in told
    assert (ends.session.counters.engine_errors, ends.session.talk.lost, ends.session.talk.calls) == (1, 0, [])


@pytest.mark.parametrize("late", [True, False])
async def test_a_prompt_that_is_too_long_is_no_failure_of_the_endpoint(ends: Ends, late: bool) -> None:
    ends.answer = 400, "this model's maximum context length is 9 tokens"
    if late:
        _, told = await _late(ends)
    else:
        ends.go.set()
        status, told = await ends.post(False, lambda response: response.text())
        assert status == 400
    assert "prompt is too long: " in told
    assert (ends.session.counters.engine_errors, ends.session.counters.context_full) == (0, 1)


async def test_an_endpoint_that_is_away_is_told_without_its_address(
    ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    await ends.runner.cleanup()
    status, told = await ends.post(False, lambda response: response.text())
    assert status == 529 and "127.0.0.1" not in told and "127.0.0.1" in caplog.text
    assert ends.session.counters.engine_errors == 1


@pytest.mark.parametrize("status", [201, 204, 299, 301, 304, 600, 999])
async def test_a_status_that_is_neither_an_error_nor_a_reply_is_a_failure_to_retry(ends: Ends, status: int) -> None:
    """A client took 201 for a reply, and cannot even read 999."""
    ends.go.set()
    ends.answer = status, "odd"
    assert (await ends.post(False, lambda response: response.text()))[0] == 529
    assert ends.session.counters.engine_errors == 1


MESSAGE = b'{"messages": [{"role": "user", "content": "x"}]'
BODIES = {
    "no JSON": (b"{", 400),
    "no object": (b"[]", 400),
    "no UTF-8": (MESSAGE + b', "a": "\xff"}', 400),
    "no name": (MESSAGE + b', "\xff": 1}', 400),
    "no number": (MESSAGE + b', "a": 1e999}', 400),
    "no message": (b'{"messages": [5]}', 400),
    "half": (MESSAGE.replace(b"x", b"x\\ud800") + b"}", 200),
}


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("name", BODIES)
async def test_what_a_client_sends_is_no_failure_of_the_endpoint_and_no_bug(
    ends: Ends, name: str, plain: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Half of a surrogate pair, which an agent leaves where it cuts a text in two, was a 500; what is no request was
    counted as a failure of the endpoint, which makes the episode of an agent that ends then nobody's."""
    if plain:
        ends.proxy.endpoint = SideEndpoint(ends.proxy.endpoint.url, "large")
    ends.go.set()
    ends.answer = 200, json.dumps({"id": "m", "content": [], "choices": [{"message": {"content": "ok"}}]})
    body, wanted = BODIES[name]
    counted, _ = await ends.send(body, lambda response: response.text(), "/count_tokens")
    status, told = await ends.send(body, lambda response: response.text())
    passes = plain and name in ("no UTF-8", "no number", "no message")  # for the endpoint to say
    assert status == (200 if passes else wanted) and counted in (200, 400, 404), told
    assert ends.session.counters.engine_errors == 0 and not caplog.records


async def test_a_client_that_does_not_read_is_no_failure_of_the_endpoint(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "TAKE_S", 0.2)
    ends.proxy.endpoint = SideEndpoint(ends.proxy.endpoint.url, "large")
    ends.go.set()
    ends.answer = 200, "data: " + "x" * (16 << 20)

    async def late(response: aiohttp.ClientResponse) -> str:
        async with asyncio.timeout(60):
            while ends.proxy._busy:
                await asyncio.sleep(0.02)
        return ""

    assert (await ends.post(True, late))[0] == 200
    assert ends.session.counters.engine_errors == 0


@pytest.mark.parametrize(
    ("said", "counted"), [("Overloaded", (1, 0)), ("prompt is too long: 9 tokens", (0, 1))], ids=["down", "full"]
)
async def test_an_error_in_the_middle_of_a_forwarded_reply_is_the_endpoints(
    said: str, counted: tuple[int, int]
) -> None:
    start = b'event: message_start\ndata: {"type": "message_start", "message": {"id": "msg_1", "content": []}}\n\n'
    error = b'event: error\ndata: {"type": "error", "error": {"message": "%b"}}\n\n' % said.encode()

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=start + error, content_type="text/event-stream")

    app = web.Application()
    app.router.add_post("/v1/messages", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    proxy = PassThrough(SideEndpoint(f"http://127.0.0.1:{runner.addresses[0][1]}", "large"))
    await proxy.start()
    try:
        ends = Ends(proxy, await proxy.open_session("e", proxy.policy), runner)
        status, told = await ends.post(True, lambda response: response.text())
        assert status == 200 and said in told  # the agent is told, byte for byte
        assert (ends.session.counters.engine_errors, ends.session.counters.context_full) == counted
        assert ends.session.talk.calls == [] and ends.session.talk.lost == 0
    finally:
        await proxy.stop()
        await runner.cleanup()
