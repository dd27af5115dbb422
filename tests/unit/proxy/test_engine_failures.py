"""An engine's failure is told to clients in the proxy's own words, and to retry only if that may help."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from rollout.proxy.engine import Completion, EngineError
from rollout.proxy.server import ProxyServer
from tests.kit import HELLO, QueueEngine, char_policy

LONG = 60  # seconds to wait for what takes milliseconds on an idle machine
ADDRESS = "http://10.1.2.3:8000/inference/v1/generate"


class Failing:
    """Fails when ``go`` is set."""

    def __init__(self, status: int | None) -> None:
        self.status, self.go = status, asyncio.Event()

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Completion:
        await self.go.wait()
        raise EngineError(f"{ADDRESS}: not so", self.status)


@pytest.mark.parametrize("engine_status", [400, 401, 403, 404, 422, 408, 429, 500, None])
async def test_a_client_is_told_to_retry_what_may_succeed_and_never_an_address(
    proxy: ProxyServer, engine_status: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Failing(engine_status)
    session = await proxy.open_session("e", char_policy(engine))
    permanent = engine_status in (400, 401, 403, 404, 422)
    kind = "invalid_request_error" if permanent else "overloaded_error"
    async with aiohttp.ClientSession(headers={"x-api-key": session.secret}) as http:
        url = f"http://127.0.0.1:{proxy.port}/v1/messages"
        async with http.post(url, json={**HELLO, "stream": True}) as begun:  # after a ping there is no status
            engine.go.set()
            told = (await begun.read()).decode()
        assert kind in told.split("event: ")[-1] and "10.1.2.3" not in told
        for stream in (False, True):
            async with http.post(url, json={**HELLO, "stream": stream}) as failed:
                told = await failed.text()
            assert (failed.status, "Retry-After" in failed.headers) == ((400, False) if permanent else (529, True))
            assert kind in told and "10.1.2.3" not in told
    assert ADDRESS in caplog.text and session.counters.engine_errors == 3


async def test_a_body_whose_transfer_is_compressed_is_refused(proxy: ProxyServer) -> None:
    session = await proxy.open_session("e", char_policy(QueueEngine("hello")))
    for coding, status in ((b"gzip, chunked", b"415"), (b"GZIP,chunked", b"415"), (b"Chunked", b"411")):
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nAuthorization: bEARER %b\r\n" % session.secret.encode())
        body = json.dumps(HELLO).encode()
        writer.write(b"Transfer-Encoding: %b\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (coding, len(body), body))
        assert (await asyncio.wait_for(reader.readline(), LONG))[9:12] == status, coding
        writer.close()
