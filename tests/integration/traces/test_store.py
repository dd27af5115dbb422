"""This module tests episodes in a LightningStore of this process, read back through agentlightning's adapters, and
stores that fail.

tests/integration/traces/test_store_server.py has its real server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web
from omegaconf import OmegaConf

from rewards.task import Task
from rl import store as command
from rl.run import store
from rl.run.programs import free_port
from rl.run.store import storing
from rl.traces.store.local import LocalStore, send_all
from rl.traces.store.stores import StoreError
from rollout.records.reading import Reader
from tests.integration.store_scenes import told_by_claude_code
from tests.store_kit import Told, compare, run_command, told, write


@pytest.fixture(scope="module")
def episodes() -> list[Told]:
    return asyncio.run(told(200, "whole"))


@pytest.mark.claude
@pytest.mark.timeout(900)
async def test_two_hundred_episodes_come_back_from_a_store_in_this_process(
    episodes: list[Told], task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among them are episodes of the real Claude Code with tool calls, whose ids, names and arguments are compared."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else its import asks the network three times
    from agentlightning.store.memory import InMemoryLightningStore

    whole = [*episodes, *await told_by_claude_code(task, 10, "real")]
    run, memory = write([one.record for one in whole], tmp_path / "runs" / "local"), InMemoryLightningStore()
    assert len(whole) == 230
    assert (await send_all([run], LocalStore(memory))).sent == 230
    assert (await send_all([run], LocalStore(memory))).there == 230
    await compare(memory, "runs/local", whole)


# --- stores that fail


@asynccontextmanager
async def failing(answer: Callable[[web.Request, bytes], Any]) -> AsyncIterator[str]:
    """A server that knows no rollouts, and answers all else by ``answer``."""

    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        made = answer(request, body)
        return await made if asyncio.iscoroutine(made) else made

    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


def attempt(name: str, number: int) -> dict[str, Any]:
    return {"rollout_id": name, "attempt_id": "a", "sequence_id": number, "status": "preparing"}


def empty_store(request: web.Request, body: bytes) -> web.Response:
    """Takes everything, and lists nothing; a rollout that is asked for by its id is there."""
    if request.path.endswith("/search"):
        return web.json_response({"items": [{}] if b"rollout_id_in" in body else []})
    number = 2 if request.path.endswith("/attempts") else 1
    return web.json_response({"attempt": attempt("r", number)})


async def hangs(request: web.Request, body: bytes) -> web.Response:
    await asyncio.Event().wait()
    raise AssertionError


def fails(request: web.Request, body: bytes) -> web.Response:
    return empty_store(request, body) if "search" in request.path else web.Response(status=500, text="out of\nmemory")


async def test_errors_are_one_line(episodes: list[Told], tmp_path: Path) -> None:
    run = write([one.record for one in episodes[:5]], tmp_path / "run")
    for wrong, said in (
        ([run, "--url", "http://127.0.0.1:9"], "store: http://127.0.0.1:9 does not answer"),
        ([run, "--url", "localhost:4747"], "store: --url localhost:4747: it must be a URL"),
        ([tmp_path / "none", "--url", "http://127.0.0.1:9"], f"store: {tmp_path}/none: no such run directory"),
    ):
        done = await asyncio.to_thread(run_command, *wrong)
        assert done.returncode == 2 and done.stderr.startswith(said) and done.stderr.count("\n") == 1, done
    async with failing(lambda *_: web.Response(text="<html>")) as url:
        done = await asyncio.to_thread(run_command, run, "--url", url)
        assert done.returncode == 2 and "is no LightningStore" in done.stderr and done.stderr.count("\n") == 1
    async with failing(hangs) as url:
        done = await asyncio.to_thread(run_command, run, "--url", url, "--timeout", "0.5")
        assert (done.returncode, done.stderr) == (2, f"store: {url} has not answered in time\n")


async def test_a_store_that_fails_in_the_middle(
    episodes: list[Told], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "_TRIES_S", (0.0, 0.0))
    run = write([one.record for one in episodes[:8]], tmp_path / "run")
    async with failing(fails) as url:
        assert await asyncio.to_thread(command.main, [str(run), "--url", url]) == 1
        err = capfd.readouterr().err
        assert err == f"stopped: {url}/v1/agl/rollouts answers 500: out of memory; 0 attempts were sent\n"

    refused = episodes[2].record.task

    def picky(request: web.Request, body: bytes) -> web.Response:
        return fails(request, body) if f'"{refused}"'.encode() in body else empty_store(request, body)

    async with failing(picky) as url:  # it does not take one episode: the others are sent
        assert await asyncio.to_thread(command.main, [str(run), "--url", url]) == 1
        out, err = capfd.readouterr()
        assert (
            "7 attempts sent" in out
            and err.startswith(f"store: {episodes[2].record.episode}: ")
            and err.count("\n") == 1
        )
        with command.alone([run], url)[0], pytest.raises(StoreError, match="another process is sending"):
            command.alone([run], url)


@pytest.mark.parametrize("kind", ["dead", "hangs", "fails", "stopped"])
async def test_a_run_does_not_wait_for_its_store(
    kind: str, episodes: list[Told], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run says in the end what was not sent, in one line with the command that sends it."""
    lines: list[str] = []

    def played(url: str) -> None:
        with storing(tmp_path / "run", OmegaConf.create({"url": url, "timeout_s": 1}), lines.append):
            write([one.record for one in episodes[:3]], tmp_path / "run")
            if kind == "stopped":  # the program that sends
                while not (found := [one for one in psutil.Process().children() if "rl.store" in one.cmdline()]):
                    time.sleep(0.01)  # it is being started
                found[0].suspend()
                monkeypatch.setattr(store, "_END_S", 0.5)

    (tmp_path / "run").mkdir()
    if kind in ("dead", "stopped"):
        await asyncio.to_thread(played, "http://127.0.0.1:9")
    else:
        async with failing(hangs if kind == "hangs" else fails) as url:
            await asyncio.to_thread(played, url)
    (line,) = lines
    assert line.startswith("store: ") and "-m rl.store" in line and len(line.splitlines()) == 1
    assert len(list(Reader(tmp_path / "run"))) == 3
