"""This module tests calls that are forwarded to another endpoint, which a second proxy plays, so that both ends are
real.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from rollout import SIDE_MODEL
from rollout.proxy.calls import CallLog, reply_in
from rollout.proxy.forward import SideEndpoint
from rollout.proxy.passthrough import PassThrough
from rollout.proxy.replies import Reply, reply_events, reply_json, sse
from rollout.proxy.server import ProxyServer
from rollout.proxy.session import Session
from rollout.proxy.wire import decode_request
from rollout.records import RecordWriter
from rollout.records.reading import Reader
from tests.kit import QueueEngine, char_policy, empty_record

HELLO: dict[str, Any] = {"model": "policy", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}


class Ends:
    """The agent's proxy (``front``), and the one that plays the endpoints "large" and "small" (``back``).

    The front has a policy of its own and forwards side calls, or is a PassThrough if the model is ``hosted``.
    """

    async def open(self, hosted: bool) -> None:
        self.back = ProxyServer()
        await self.back.start()
        self.large, large = await self._endpoint("large")
        self.small, self.side = await self._endpoint("small")
        self.front: Any = PassThrough(large, self.side) if hosted else ProxyServer()
        await self.front.start()
        own = replace(char_policy(QueueEngine("own", "own")), side_endpoint=self.side)
        self.session: Session = await self.front.open_session("e", self.front.policy if hosted else own)

    async def _endpoint(self, model: str) -> tuple[Session, SideEndpoint]:
        policy = char_policy(QueueEngine(*[f"said by {model}"] * 9), max_context=300)
        session = await self.back.open_session(model, policy)
        return session, SideEndpoint(f"http://127.0.0.1:{self.back.port}", model, session.secret)

    async def close(self) -> None:
        await self.front.stop()
        await self.side.close()
        await self.back.stop()

    async def post(self, path: str = "/v1/messages", **more: Any) -> tuple[int, str, str]:
        """Send a request of the agent; return status, content type and body."""
        url, headers = f"http://127.0.0.1:{self.front.port}{path}", {"x-api-key": self.session.secret}
        async with (
            aiohttp.ClientSession() as http,
            http.post(url, json={**HELLO, **more}, headers=headers) as reply,
        ):
            return reply.status, reply.content_type, await reply.text()


@pytest.fixture
async def ends(request: pytest.FixtureRequest) -> AsyncIterator[Ends]:
    ends = Ends()
    await ends.open(hosted=request.param == "hosted")
    yield ends
    await ends.close()


side_calls = pytest.mark.parametrize("ends", ["side calls"], indirect=True)
hosted = pytest.mark.parametrize("ends", ["hosted"], indirect=True)
streamed = pytest.mark.parametrize("stream", [False, True])


@side_calls
@streamed
async def test_only_side_calls_are_forwarded_and_they_leave_no_trace_in_the_tree(ends: Ends, stream: bool) -> None:
    status, kind, text = await ends.post(model=SIDE_MODEL, stream=stream)
    assert status == 200 and "said by small" in text and '"model":"small"' in text
    assert kind == ("text/event-stream" if stream else "application/json")
    assert not ends.session.tree.nodes and ends.session.counters.side_calls == 1
    status, _, text = await ends.post(stream=stream)
    assert status == 200 and "own" in text
    assert len(ends.session.tree.sequences()) == 1 and ends.small.counters.calls == 1


@hosted
async def test_the_replies_of_a_hosted_model_were_sent_by_somebody(ends: Ends) -> None:
    ids = [json.loads((await ends.post())[2])["id"] for _ in range(2)]
    ends.session.disown(frozenset([*ids, "msg_forged"]))
    assert ends.session.counters.unknown_reports == 1


@pytest.mark.parametrize("ends", ["side calls", "hosted"], indirect=True)
async def test_calls_that_are_forwarded_are_limited_too(ends: Ends) -> None:
    ends.session.policy = replace(ends.session.policy, max_calls=2)
    statuses = [(await ends.post(model=SIDE_MODEL))[0] for _ in range(4)]
    assert statuses == [200, 200, 403, 403]
    assert (await ends.post("/v1/messages/count_tokens"))[0] == 403
    assert (ends.small.counters.calls, ends.session.counters.refused_calls) == (2, 3)


@side_calls
async def test_the_endpoints_own_errors_come_through_and_its_absence_is_a_529(ends: Ends) -> None:
    status, _, text = await ends.post(model=SIDE_MODEL, max_tokens="many")
    assert status == 400 and "max_tokens" in text
    await ends.back.stop()
    status, _, text = await ends.post(model=SIDE_MODEL)
    assert status == 529 and "overloaded_error" in text
    assert ends.session.secret not in text and ends.small.secret not in text and "127.0.0.1" not in text


@hosted
@streamed
async def test_all_calls_go_to_their_endpoint_with_its_key_and_leave_only_counts(ends: Ends, stream: bool) -> None:
    status, _, text = await ends.post(stream=stream)
    assert status == 200 and "said by large" in text and '"model":"large"' in text
    status, _, text = await ends.post(model=SIDE_MODEL, stream=stream)
    assert status == 200 and "said by small" in text and '"model":"small"' in text
    status, _, text = await ends.post("/v1/messages/count_tokens")
    assert status == 200 and "input_tokens" in text
    assert (ends.session.counters.calls, ends.session.counters.side_calls) == (2, 1)
    assert not ends.session.tree.nodes and not ends.session.counters.engine_errors
    for session in (ends.large, ends.small):
        assert session.counters.calls == 1 and session.secret not in text


@hosted
async def test_the_endpoints_refusals_are_counted_until_it_answers_again(ends: Ends) -> None:
    ends.front.endpoint.key = "wrong"
    status, _, text = await ends.post()
    assert status == 401 and "authentication_error" in text and ends.session.counters.engine_errors == 1
    await ends.post()
    assert ends.session.counters.engine_errors == 2
    ends.front.endpoint.key = ends.large.secret
    assert (await ends.post())[0] == 200
    assert ends.session.counters.engine_errors == 0


@hosted
async def test_a_full_context_is_no_failure_of_the_endpoint(ends: Ends) -> None:
    status, _, text = await ends.post(messages=[{"role": "user", "content": "long " * 100}])
    assert status == 400 and "prompt is too long" in text
    assert (ends.session.counters.context_full, ends.session.counters.engine_errors) == (1, 0)


@hosted
async def test_if_the_endpoint_breaks_off_so_does_the_reply_and_its_absence_is_a_529(ends: Ends) -> None:
    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 1000\r\n\r\nevent: ")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(half, "127.0.0.1", 0)
    ends.front.endpoint.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    with pytest.raises(aiohttp.ClientError):
        await ends.post(stream=True)
    assert ends.session.counters.engine_errors == 1
    server.close()
    await server.wait_closed()
    status, _, text = await ends.post(stream=True)
    assert status == 529 and "overloaded_error" in text and ends.session.counters.engine_errors == 2


@pytest.mark.parametrize("kind", ["one for all", "other", "none", "a number"])
@pytest.mark.parametrize("form", ["json", "events", "events after a ping, CRLF"])
async def test_replies_have_ids_of_their_own(kind: str, form: str) -> None:
    """Claude Code takes replies with one id for one reply, which has all their calls from then on."""
    count = 0

    async def messages(request: web.Request) -> web.StreamResponse:
        nonlocal count
        count += 1
        name = {"one for all": {"id": "x"}, "other": {"id": f"{count}"}, "none": {}, "a number": {"id": 7}}[kind]
        reply = Reply("", ({"type": "text", "text": 'id "message_start"\n\nid'},), "end_turn", 1, 1)
        whole = reply_json(reply, "m")
        del whole["id"]
        whole |= name
        if form == "json":
            out = json.dumps(whole).encode()
        else:
            out = sse("message_start", {"message": whole | {"content": []}}) + reply_events(reply)
            out = (sse("ping", {}) + out).replace(b"\n", b"\r\n") if "ping" in form else out
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        for at in range(0, len(out), 7):  # wherever the network cuts it
            await response.write(out[at : at + 7])
        return response

    app = web.Application()
    app.router.add_post("/v1/messages", messages)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    front = PassThrough(SideEndpoint(f"http://127.0.0.1:{runner.addresses[0][1]}", "m"))
    await front.start()
    session = await front.open_session("e", front.policy)
    heard = []
    async with aiohttp.ClientSession(headers={"x-api-key": session.secret}) as http:
        for _ in range(3):
            async with http.post(f"http://127.0.0.1:{front.port}/v1/messages", json=HELLO) as reply:
                heard.append(reply_in(await reply.read()))
    await front.stop()
    await runner.cleanup()
    assert [one and one["content"][0]["text"] for one in heard] == ['id "message_start"\n\nid'] * 3
    names = [one["id"] for one in heard if one]
    assert len(set(names)) == 3 and [call.reply["id"] for call in session.talk.calls] == names
    assert {"one for all": names[0] == "x", "other": names == ["1", "2", "3"]}.get(kind, True)
    assert all(isinstance(name, str) for name in names)


@asynccontextmanager
async def speaking(answer: Any) -> AsyncIterator[tuple[PassThrough, Session, str]]:
    """A front before an endpoint that ``answer`` plays, a session of it, and its address."""
    app = web.Application()
    app.router.add_post("/v1/messages", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    front = PassThrough(SideEndpoint(f"http://127.0.0.1:{runner.addresses[0][1]}", "m", "key"))
    await front.start()
    yield front, await front.open_session("e", front.policy), f"http://127.0.0.1:{front.port}/v1/messages"
    await front.stop()
    await runner.cleanup()


async def test_what_comes_before_a_reply_is_sent_on_at_once() -> None:
    """Comments and pings keep a connection open while an endpoint reads a long prompt."""
    heard = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": wait\n\n" + sse("ping", {}))
        await asyncio.wait_for(heard.wait(), 20)
        reply = Reply("x", ({"type": "text", "text": "said"},), "end_turn", 1, 1)
        await response.write(sse("message_start", {"message": reply_json(reply, "m")}) + reply_events(reply))
        return response

    async with (
        speaking(answer) as (_, session, url),
        aiohttp.ClientSession(headers={"x-api-key": session.secret}) as http,
        http.post(url, json=HELLO) as reply,
    ):
        got = await reply.content.readuntil(b"ping\n")
        heard.set()
        assert got.startswith(b": wait") and b"said" in await reply.read()
    assert session.talk.calls[0].reply["content"] == [{"type": "text", "text": "said"}]


async def test_an_endpoint_leads_nobody_elsewhere_and_its_replies_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.proxy.forward._LARGEST", 1 << 16)
    asked: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(request.path_qs)
        if len(asked) == 1:
            raise web.HTTPTemporaryRedirect("/v1/messages?elsewhere")
        response = web.StreamResponse(status=200 if len(asked) < 4 else 500)
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while len(asked) < 5:
                await response.write([b"", b"", b" {", b"data: {}\n", b"x"][len(asked)] * 4096)
        return response

    async with speaking(answer) as (_, session, url), aiohttp.ClientSession() as http:
        headers = {"x-api-key": session.secret}
        async with http.post(url, json=HELLO, headers=headers, allow_redirects=False) as reply:
            assert reply.status == 307 and asked == ["/v1/messages"] and session.counters.engine_errors == 1
        for _ in range(2):
            with pytest.raises(aiohttp.ClientError):
                async with http.post(url, json=HELLO, headers=headers) as reply:
                    await reply.read()
        async with http.post(url, json=HELLO, headers=headers) as reply:
            assert reply.status == 529
    assert not session.talk.calls and session.counters.engine_errors == 4


@pytest.mark.parametrize("form", ["json", "events"])
def test_what_a_model_says_can_be_kept_or_is_counted(form: str, tmp_path: Path) -> None:
    """One call with a number of 40 digits would be the end of a collection, and one that is nested of its episode."""
    talk, asked = CallLog(), decode_request(json.dumps(HELLO).encode())
    values = ["9" * 40, "[" * 90 + "]" * 90, "[" * 2000 + "]" * 2000, '"\\ud800"', "1"]
    for value in values:
        given = f'{{"n": {value}}}'
        call = {"type": "tool_use", "id": "a", "name": "Bash", "input": {}}
        if form == "json":
            heard = json.dumps({"content": [call]}).replace("{}", given)
        else:
            told: list[dict[str, Any]] = [{"type": "message_start", "message": {}}]
            told.append({"type": "content_block_start", "index": 0, "content_block": call})
            told.append({"type": "content_block_delta", "index": 0, "delta": {"partial_json": given}})
            heard = "\n".join(f"data: {json.dumps(one)}\n" for one in [*told, {"type": "message_stop"}])
        talk.forwarded(asked, heard.encode(), 0.0, 0.0)
    assert [call.reply["content"][0]["input"] for call in talk.calls] == [{"n": 1e40}, {"n": 1}] and talk.lost == 3
    writer = RecordWriter(tmp_path, "a", synced=False)
    writer.append(empty_record(parts=talk.parts, calls=talk.calls))
    writer.close()
    (read,) = Reader(tmp_path)
    assert read.calls == talk.calls
    talk.forwarded(asked, b"{" + b" " * (256 << 20), 0.0, 0.0)
    talk.forwarded(asked, b'{"content": []}' + b" " * (256 << 20), 0.0, 0.0)  # what is kept has a limit, replies too
    assert len(talk.calls) == 2 and talk.lost == 5
