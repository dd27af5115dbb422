"""This module tests the stand-alone proxy: its sessions, and the program between the real Claude Code and a real vLLM
server.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil
import pytest
from aiohttp import test_utils, web

from rl.quickstart.policy import make_tokenizer
from rollout import audit
from rollout.agent.claude_code import ClaudeCode, find_binary
from rollout.proxy import standalone
from rollout.proxy.__main__ import main
from rollout.proxy.standalone import EngineRefused, ProxyOptions, StandAlone
from rollout.records.reading import Reader
from tests.integration.claude_kit import Moody, call, in_turn, scripted
from tests.integration.vllm_kit import Running
from tests.kit import QueueEngine, char_policy

NOWHERE = "http://127.0.0.1:9"
HELLO = {"model": "m", "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]}


async def ask(proxy: StandAlone, body: Any = HELLO, path: str = "/v1/messages", **headers: str) -> tuple[int, Any, Any]:
    method = "GET" if body is None else "POST"
    url = f"http://127.0.0.1:{proxy.port}{path}"
    async with aiohttp.ClientSession() as http, http.request(method, url, json=body, headers=headers) as response:
        raw = await response.read()
        return response.status, json.loads(raw) if response.content_type == "application/json" else raw, response


async def start(replies: list[str], **options: Any) -> StandAlone:
    proxy = StandAlone(ProxyOptions(NOWHERE, "model", "calls", **options))
    await proxy.start()
    proxy.policy = char_policy(QueueEngine(*replies))
    return proxy


@pytest.fixture
async def proxy() -> AsyncIterator[StandAlone]:
    proxy = await start(["reply"] * 20, max_sessions=3)
    yield proxy
    await proxy.stop()


def of(session: str, token: str = "t") -> dict[str, str]:
    return {"Authorization": f"Bearer {token}", "X-Claude-Code-Session-Id": session}


async def test_one_session_per_token_and_claude_code_session(proxy: StandAlone) -> None:
    for headers in (of("1"), of("1"), of("2"), of("1", token="u")):
        assert (await ask(proxy, **headers))[0] == 200
    assert [session.counters.calls for session in proxy.sessions.values()] == [2, 1, 1]
    await ask(proxy, **of("1"))
    # Without the header, the user id in the body counts.
    await ask(proxy, {**HELLO, "metadata": {"user_id": "someone"}}, Authorization="Bearer t")
    # Three sessions are kept; the least recently used, 2, was closed.
    assert [session.counters.calls for session in proxy.sessions.values()] == [3, 1, 1]
    await ask(proxy, **of("2"))
    assert [session.counters.calls for session in proxy.sessions.values()] == [3, 1, 1]


async def test_a_session_in_use_is_not_closed_for_another(proxy: StandAlone) -> None:
    class Slow(QueueEngine):
        async def generate(self, *args: Any) -> Any:
            await asyncio.sleep(0.3)
            return await super().generate(*args)

    proxy.policy = char_policy(Slow(*["late"] * 5))
    answers = await asyncio.gather(*(ask(proxy, **of(str(i))) for i in range(5)))
    assert [status for status, *_ in answers] == [200] * 5
    proxy.policy = char_policy(QueueEngine("x"))
    await ask(proxy, **of("last"))
    assert len(proxy.sessions) == 3


async def test_a_full_session_starts_anew(proxy: StandAlone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standalone, "_SESSION_TOKENS", 20)
    await ask(proxy)
    (first,) = proxy.sessions.values()
    await ask(proxy)
    (second,) = proxy.sessions.values()
    assert first.tree.tokens > 20 and first.closed and second is not first


async def test_idle_sessions_are_closed() -> None:
    proxy = await start(["reply"], idle_s=0.1)
    await ask(proxy)
    async with asyncio.timeout(60):
        while proxy.sessions:
            await asyncio.sleep(0.05)
    assert not proxy._keys and not proxy._used and not proxy._in_use
    await proxy.stop()


async def test_the_token_is_asked_for() -> None:
    proxy = await start(["reply"], token="right")
    for headers in ({}, of("1", token="wrong"), {"x-api-key": "ü"}):
        status, error, _ = await ask(proxy, **headers)
        assert (status, error["error"]["type"]) == (401, "authentication_error")
        assert (await ask(proxy, None, "/v1/models", **headers))[0] == 401
    assert proxy.sessions == {}
    assert (await ask(proxy, **of("1", token="right")))[0] == 200
    await proxy.stop()


async def test_models_health_and_metrics(proxy: StandAlone) -> None:
    _, models, _ = await ask(proxy, None, "/v1/models")
    assert [model["id"] for model in models["data"]] == ["model"]
    await ask(proxy, **of("1"))
    await ask(proxy, {}, **of("1"))
    status, health, _ = await ask(proxy, None, "/health")
    assert status == 503 and health["proxy"] == "ok" and health["engine"].startswith("unreachable")
    _, text, response = await ask(proxy, None, "/metrics")
    assert response.content_type == "text/plain"
    values = dict(line.rsplit(" ", 1) for line in text.decode().splitlines() if not line.startswith("#"))
    assert values['rollout_proxy_requests_total{path="/v1/messages",status="200"}'] == "1.0"
    assert values['rollout_proxy_requests_total{path="/v1/messages",status="400"}'] == "1.0"
    assert values['rollout_proxy_tokens_total{kind="sampled"}'] == "6.0"
    assert values["rollout_proxy_overhead_seconds_count"] == "1.0"
    assert values["rollout_proxy_open_sessions"] == "1.0"
    # The counters of a closed session are still part of the sums.
    await proxy.close_session(next(iter(proxy.sessions.values())))
    text = (await ask(proxy, None, "/metrics"))[1].decode()
    assert "rollout_proxy_session_calls_total 1.0" in text and "rollout_proxy_open_sessions 0.0" in text


async def test_end_ids_and_sampling_come_from_the_model_directory(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    policy = standalone.load_policy(ProxyOptions(NOWHERE, str(tmp_path), "qwen3_coder"))(QueueEngine(), 100)
    assert policy.end_ids == {policy.tokenizer.eos_token_id} and policy.sampling == {}
    said = {"eos_token_id": [policy.tokenizer.eos_token_id, 7], "temperature": 0.7, "top_k": 20, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    policy = standalone.load_policy(ProxyOptions(NOWHERE, str(tmp_path), "qwen3_coder", "qwen3"))(QueueEngine(), 100)
    assert policy.end_ids == {policy.tokenizer.eos_token_id, 7}
    assert policy.sampling == {"temperature": 0.7, "top_k": 20}
    assert policy.parser.spec == "qwen3_coder+qwen3"


async def test_until_it_is_loaded_a_client_is_told_to_retry() -> None:
    proxy = await start([])
    proxy.policy = None
    status, error, response = await ask(proxy)
    assert (status, error["error"]["type"], response.headers["Retry-After"]) == (529, "overloaded_error", "1")
    assert (await ask(proxy, None, "/health"))[1]["proxy"] == "loading"
    await proxy.stop()


@pytest.mark.claude
async def test_claude_code_goes_on_with_a_restarted_proxy(tmp_path: Path) -> None:
    """The new proxy does not know the conversation, in the middle of which the first one stopped."""
    (tmp_path / "code.py").write_text("x = 1\n")
    edit = call("Edit", file_path="code.py", old_string="x = 1", new_string="x = 2")
    script = in_turn(call("Read", file_path="code.py"), edit, "Done.")
    restarted = asyncio.Event()
    first, second = [StandAlone(ProxyOptions(NOWHERE, "model", "calls"), ping_s=0.3) for _ in range(2)]

    async def stop(number: int, prompt: str) -> None:
        if number == 2:
            restarted.set()
            await asyncio.sleep(60)

    await first.start()
    first.policy, second.policy = char_policy(Moody(script, stop)), char_policy(scripted(script))
    agent = await claude(first.port, tmp_path, 1000)
    await restarted.wait()
    await first.stop()
    await second.start(port=first.port)
    try:
        out, err = await asyncio.wait_for(agent.communicate(), 240)
        assert agent.returncode == 0 and (tmp_path / "code.py").read_text() == "x = 2\n", (out.decode()[-2500:], err)
        (session,) = second.sessions.values()
        assert session.counters.calls == 2 and first.sessions == {}
        session.settle()  # over TCP, the ended process has closed its connections in order
        assert [node.delivered for node in session.tree.nodes if node.sampled] == [True, True]
    finally:
        await second.stop()


async def claude(port: int | None, directory: Path, max_tokens: int) -> asyncio.subprocess.Process:
    """Start Claude Code in a directory, with the proxy at a port."""
    agent = ClaudeCode(
        find_binary(None), 4, 60, max_tokens, system_prompt="Repair the code.", tools=("Edit", "Read"), bare=True
    )
    env = agent.environment("token", base_url=f"http://127.0.0.1:{port}")
    started = await asyncio.create_subprocess_exec(
        *agent.argv(""),
        env=env | {"HOME": str(directory), "PATH": "/usr/bin:/bin"},
        cwd=directory,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert started.stdin is not None
    started.stdin.write(agent.stdin("Say something."))
    started.stdin.close()
    return started


class Program:
    """Runs ``python -m rollout.proxy`` on a free port. ``rss``: its resident bytes when the port is open."""

    def __init__(self, engine: str, model: str, *options: str) -> None:
        argv = [sys.executable, "-m", "rollout.proxy", "--engine", engine, "--model", model]
        argv += ["--tool-parser", "qwen3_coder", "--port", "0", "--grace", "60", *options]
        env = {**os.environ, "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.rss = psutil.Process(self.process.pid).memory_info().rss
        self.url = line.split()[-1] if line else ""

    def end(self) -> tuple[int, str]:
        if self.process.poll() is None:
            self.process.terminate()
        err = self.process.communicate(timeout=240)[1]
        return self.process.returncode, err


def test_a_wrong_model_is_one_line_of_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    program = Program(NOWHERE, str(tmp_path))
    program.process.wait(60)
    status, err = program.end()
    assert status == 1 and "Traceback" not in err and str(tmp_path) in err.splitlines()[-1]
    assert f"waiting for the engine: {NOWHERE}/v1/models: unreachable" in err


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--tool-parser", "qwen4"], "--tool-parser qwen4: must be one of .*qwen3_coder"),
        (["--model", "tests"], r"--model tests: no config\.json there"),
        (["--record", "/proc/none"], r"--record /proc/none: No such file or directory"),
    ],
)
def test_a_wrong_option_is_one_line_of_error(wrong: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--engine", NOWHERE, "--model", "m", "--tool-parser", "hermes", *wrong])
    assert ended.value.code == 2 and re.search(words, capsys.readouterr().err.splitlines()[-1])


class Engine:
    """A server that answers /v1/models, and nothing else, as it is told to."""

    def __init__(self) -> None:
        self.answer: tuple[int, bytes] = 503, b""
        self.keys: list[str | None] = []

    async def models(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers.get("Authorization"))
        return web.Response(status=self.answer[0], body=self.answer[1])


@pytest.mark.parametrize(
    ("status", "body", "key", "words"),
    [
        (401, b"", None, "status 401: it wants its --api-key; set ROLLOUT_ENGINE_KEY"),
        (403, b"", "wrong", "status 403: .* the one in ROLLOUT_ENGINE_KEY is wrong"),
        (404, b"", None, "status 404: --engine is the address of a vLLM server, without /v1"),
        (200, b"<html>", None, "not the answer of a vLLM server"),
        (200, b'{"data": [{"id": "gpt"}]}', None, "not the answer of a vLLM server.*max_model_len"),
    ],
)
async def test_an_engine_that_refuses_is_one_line_and_one_that_loads_is_waited_for(
    status: int, body: bytes, key: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standalone, "load_policy", lambda options: pytest.fail("never made"))
    monkeypatch.setattr(standalone, "_RETRY_S", 0.01)
    monkeypatch.setattr(standalone, "_in_daemon", lambda work: asyncio.sleep(60))
    engine = Engine()
    app = web.Application()
    app.router.add_get("/v1/models", engine.models)
    async with test_utils.TestServer(app) as server:
        proxy = StandAlone(ProxyOptions(str(server.make_url("")).rstrip("/"), "model", "hermes", engine_key=key))
        await proxy.start()
        try:
            loading = asyncio.create_task(proxy.load())
            while "status 503" not in proxy.problem:
                await asyncio.sleep(0.01)
            _, health, _ = await ask(proxy, None, "/health")
            assert health["proxy"].startswith("loading; ") and "status 503" in health["proxy"]
            engine.answer = status, body
            with pytest.raises(EngineRefused, match=words):
                await loading
            assert engine.keys[-1] == (f"Bearer {key}" if key else None)
        finally:
            await proxy.stop()


@pytest.fixture
def program(vllm: Running, tmp_path: Path) -> Iterator[Program]:
    program = Program(vllm.url, str(vllm.model_dir), "--record", str(tmp_path / "recorded"))
    yield program
    if program.process.poll() is None:
        program.process.kill()
    program.process.communicate()


@pytest.mark.engine
@pytest.mark.claude
@pytest.mark.xdist_group("vllm")
@pytest.mark.timeout(900)
async def test_claude_code_talks_to_a_vllm_server(
    program: Program, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert program.rss < 200 << 20  # nothing of vLLM or verl is imported yet
    async with aiohttp.ClientSession(program.url) as http:
        async with http.post("/v1/messages", json=HELLO) as response:
            assert (response.status, response.headers["Retry-After"]) == (529, "1")
        end = time.monotonic() + 120
        while True:
            async with http.get("/health") as response:
                health = await response.json()
            if response.status == 200:
                break
            assert health["engine"] == "ok" and time.monotonic() < end, health
            await asyncio.sleep(0.5)
        agent = await claude(urlsplit(program.url).port, tmp_path, 64)
        out, err = await asyncio.wait_for(agent.communicate(), 240)
        replies = [e for e in map(json.loads, out.splitlines()) if e.get("type") == "assistant"]
        assert replies and re.match("msg_[0-9a-f]+_[0-9a-f]{2}$", replies[0]["message"]["id"]), (
            out.decode()[-2500:],
            err,
        )
        async with http.get("/metrics") as response:
            text = await response.text()
        assert re.search(r'requests_total\{path="/v1/messages",status="200"\} [1-9]', text), text
        # The call in progress ends, then the program; nothing new is accepted.
        body = {**HELLO, "max_tokens": 2000, "stream": True}
        async with http.post("/v1/messages", json=body) as response:
            assert response.status == 200 and b"message_start" in await response.content.readline()
            program.process.send_signal(signal.SIGTERM)
            rest = await response.read()
        assert rest.endswith(b'data: {"type":"message_stop"}\n\n')
    status, err = await asyncio.to_thread(program.end)
    assert status == 0, err
    assert await asyncio.to_thread(audit.main, [str(tmp_path / "recorded")]) == 0, capfd.readouterr().err
    sampled = [node for record in Reader(tmp_path / "recorded") for node in record.nodes if node.logprobs is not None]
    assert replies[0]["message"]["id"] in [node.message_id for node in sampled if node.delivered]
