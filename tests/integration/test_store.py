"""Episodes in agentlightning's store: the real `agl store`, read back through its own client and adapters."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from omegaconf import OmegaConf

from rl.quickstart.tasks import make_tasks
from rl.run.programs import free_port
from rl.run.store import storing
from rl.store import __main__ as command
from rl.store.local import Local, send_all
from rl.store.sending import send
from rl.store.server import Server
from rl.store.stores import StoreError
from rollout.proxy.server import ProxyServer
from rollout.records import Reader
from tests.integration.claude_kit import scripted
from tests.integration.programs_kit import AGENT, ROOT, gold, start
from tests.kit import char_policy
from tests.store_kit import Agl, Told, told, without_conversation, write

pytestmark = [pytest.mark.xdist_group("store"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agl]:
    with Agl(tmp_path_factory.mktemp("store")) as made:
        made.wait()
        yield made


@pytest.fixture
def store(server: Agl) -> str:
    return server.url


@pytest.fixture(scope="module")
def episodes() -> list[Told]:
    return asyncio.run(told(200, "whole"))


def run_command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    what = [sys.executable, "-m", "rl.store", *map(str, arguments)]
    return subprocess.run(what, cwd=ROOT, capture_output=True, text=True, timeout=600)


def client(url: str) -> Any:
    from agentlightning.store.client_server import LightningStoreClient

    return LightningStoreClient(url)


def flat(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(block["text"] for block in content)


async def compare(store: Any, run: str, expected: list[Told]) -> None:
    """Compare what a LightningStore has of a run with what client and engine know of its episodes, one by one."""
    from agentlightning.adapter.triplet import LlmProxyTraceToTriplet, TracerTraceToTriplet

    found = {
        rollout.metadata["episode"]: rollout
        for rollout in await store.query_rollouts()
        if rollout.metadata["run"].endswith(run)
    }
    assert len(found) == len({one.record.task for one in expected})
    attempts = {
        name: [attempt for attempt in await store.query_attempts(rollout.rollout_id)] for name, rollout in found.items()
    }
    assert sum(map(len, attempts.values())) == len(expected)
    for one in expected:
        record = one.record
        name = record.episode.removesuffix(".1") if record.attempt else record.episode
        rollout, attempt = found[name], attempts[name][record.attempt]
        lost = record.verdict["outcome"] == "infra_failure"
        assert (rollout.status, attempt.status) == ("succeeded", "failed" if lost else "succeeded")
        assert rollout.mode == {"train": "train", "val": "val", "eval": "test"}.get(record.split)
        assert rollout.input["instance_id"] == rollout.metadata["task"] == record.task
        assert attempt.metadata["episode"] == record.episode and attempt.metadata["flags"] == record.verdict["flags"]
        assert attempt.metadata["reward"] == record.verdict["reward"] and attempt.sequence_id == record.attempt + 1
        spans = list(await store.query_spans(rollout.rollout_id, attempt.attempt_id))
        assert [span.sequence_id for span in spans] == list(range(1, 2 * len(one.calls) + 2))
        assert {span.status.status_code for span in spans[:-1]} <= {"OK"}
        assert spans[-1].status.status_code == ("ERROR" if lost else "OK")
        tracer, proxy = TracerTraceToTriplet().adapt(spans), LlmProxyTraceToTriplet().adapt(spans)
        assert len(tracer) == len(proxy) == len(one.calls)
        for by_tracer, by_proxy, (reply, said) in zip(tracer, proxy, one.calls.items(), strict=True):
            assert by_tracer.metadata["response_id"] == by_proxy.metadata["response_id"] == reply
            assert by_tracer.prompt["token_ids"] == by_proxy.prompt["token_ids"] == said.prompt_ids
            assert by_tracer.response["token_ids"] == by_proxy.response["token_ids"] == said.ids
            assert [entry["logprob"] for entry in by_tracer.response["logprobs"]] == said.logprobs
            conversation = [{"role": "system", "content": said.system}, *said.messages]
            assert by_tracer.prompt["raw_content"] == [
                {"role": message["role"], "content": flat(message["content"])} for message in conversation
            ]
            (completion,) = by_tracer.response["raw_content"]
            assert (completion["role"], completion["content"]) == ("assistant", said.reply)
        rewards = [None] * (len(one.calls) - 1) + [record.verdict["reward"]]
        assert [triplet.reward for triplet in tracer] == [triplet.reward for triplet in proxy] == rewards
        sides = [span.attributes["claude_code_rl.side_call"] for span in spans[:-1:2]]
        assert sides == [said.side for said in one.calls.values()]
        heads = list(dict.fromkeys(said.system for said in one.calls.values()))
        threads = [span.attributes["claude_code_rl.thread"] for span in spans[:-1:2]]
        assert threads == [heads.index(said.system) for said in one.calls.values()]


async def test_two_hundred_episodes_come_back_from_the_store(store: str, episodes: list[Told], tmp_path: Path) -> None:
    run = write([one.record for one in episodes[:150]], tmp_path / "runs" / "whole")
    assert len(episodes) == 220
    first = await asyncio.to_thread(run_command, run, "--url", store)
    assert first.returncode == 0 and "150 attempts sent" in first.stdout, first
    write([one.record for one in episodes[150:]], run, "2")
    second = await asyncio.to_thread(run_command, run, "--url", store)
    assert second.returncode == 0 and "70 attempts sent" in second.stdout and "150 were there" in second.stdout
    third = await asyncio.to_thread(run_command, run, "--url", store)
    assert "] 0 attempts sent" in third.stdout and "220 were there" in third.stdout and not third.stderr
    there = client(store)
    await compare(there, "runs/whole", episodes)
    await there.close()


async def test_a_store_in_this_process_gets_the_same(episodes: list[Told], tmp_path: Path) -> None:
    from agentlightning.store.memory import InMemoryLightningStore

    run, memory = write([one.record for one in episodes[:22]], tmp_path / "runs" / "local"), InMemoryLightningStore()
    assert (await send_all([run], Local(memory))).sent == 22
    assert (await send_all([run], Local(memory))).there == 22
    await compare(memory, "runs/local", episodes[:22])


async def test_hostile_text_arrives(store: str, episodes: list[Told]) -> None:
    """NUL and ten megabytes arrive as they are, lone surrogates as question marks; none of it stops an episode."""
    record = episodes[0].record
    long = "\0x" * (5 << 20)
    parts = [msgspec.json.encode({"role": "user", "content": long}), b"null", b"[]"]
    calls = [msgspec.structs.replace(record.calls[0], messages=[0], system=1, tools=2)]
    nodes = [*record.nodes]
    said = "a\ud800b"
    nodes[calls[0].node] = msgspec.structs.replace(nodes[calls[0].node], blocks=[{"type": "text", "text": said}])
    verdict = {**record.verdict, "detail": said, "flags": [said]}
    hostile = msgspec.structs.replace(
        record, episode="train-1-hostile", task=said, parts=parts, calls=calls, nodes=nodes, verdict=verdict
    )
    server, known = Server(store, 60), {}
    assert await send(hostile, "runs/hostile", server, known)
    assert not await send(hostile, "runs/hostile", server, await server.known())
    await server.close()
    there = client(store)
    raw, plain, end = await there.query_spans(known["train-1-hostile"].rollout)
    await there.close()
    assert plain.attributes["gen_ai.prompt.0.content"] == long
    assert repr(long) in raw.attributes["llm.hosted_vllm.messages"]
    assert plain.attributes["gen_ai.completion.0.content"] == "a?b"
    assert "\\ud800" in raw.attributes["llm.hosted_vllm.choices"]
    assert end.attributes["claude_code_rl.flags"] == ["a?b"]


async def test_a_record_without_a_conversation_has_one_read_back_from_its_tokens(store: str, tmp_path: Path) -> None:
    one = (await told(2, "bare"))[1]
    record = msgspec.structs.replace(without_conversation(one.record), model="/no/such/model")
    for node in record.nodes:
        node.delivered = node.logprobs is not None
    run = write([record], tmp_path / "runs" / "bare")
    assert (await asyncio.to_thread(run_command, run, "--url", store)).returncode == 0
    there = client(store)
    (rollout,) = [found for found in await there.query_rollouts() if found.metadata["run"] == "runs/bare"]
    spans = list(await there.query_spans(rollout.rollout_id))
    await there.close()
    assert {span.attributes["gen_ai.response.id"] for span in spans[:-1]} == one.calls.keys()
    for span in spans[1:-1:2]:
        said = one.calls[span.attributes["gen_ai.response.id"]]
        assert (span.attributes["prompt_token_ids"], span.attributes["response_token_ids"]) == (
            said.prompt_ids,
            said.ids,
        )
        assert span.attributes["gen_ai.completion.0.content"] == said.reply
        assert span.attributes["gen_ai.prompt.0.content"].endswith(" tokens)")


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
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


def attempt(name: str) -> dict[str, Any]:
    return {"rollout_id": name, "attempt_id": "a", "sequence_id": 1, "status": "preparing"}


def empty_store(request: web.Request, body: bytes) -> web.Response:
    if request.path.endswith("/search"):
        return web.json_response({"items": []})
    return web.json_response({"attempt": attempt("r")})


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


@pytest.mark.parametrize("kind", ["dead", "hangs", "fails"])
async def test_a_run_does_not_wait_for_its_store(kind: str, episodes: list[Told], tmp_path: Path) -> None:
    """What was not sent is said in the end, in one line with the command that sends it."""
    lines: list[str] = []

    def played(url: str) -> None:
        with storing(tmp_path / "run", OmegaConf.create({"url": url, "timeout_s": 1}), lines.append):
            write([one.record for one in episodes[:3]], tmp_path / "run")

    (tmp_path / "run").mkdir()
    if kind == "dead":
        await asyncio.to_thread(played, "http://127.0.0.1:9")
    else:
        async with failing(hangs if kind == "hangs" else fails) as url:
            await asyncio.to_thread(played, url)
    (line,) = lines
    assert line.startswith("store: ") and "-m rl.store" in line and len(line.splitlines()) == 1
    assert len(list(Reader(tmp_path / "run"))) == 3


# --- live, with the real Claude Code


@pytest.mark.claude
async def test_episodes_arrive_while_they_are_played(store: str, tmp_path: Path) -> None:
    make_tasks(tmp_path / "tasks", seed=7, n_train=2, n_heldout=1)
    tasks, out = tmp_path / "tasks" / "train.parquet", tmp_path / "runs" / "live"
    api = ProxyServer()
    await api.start()
    session = await api.open_session("gold", char_policy(scripted(gold)))
    what = ["endpoint=http://127.0.0.1:%d" % api.port, "protocol=messages", "model=opus-5", "key_env=KEY"]  # noqa: UP031
    what += [f"tasks={tasks}", f"out={out}", *AGENT]
    process = start(*what, f"store.url={store}", KEY=session.secret)
    text, _ = await asyncio.to_thread(process.communicate)
    assert process.returncode == 0 and "store:" not in text, text
    assert (out / "store.log").read_text().endswith("2 attempts sent\n")
    there = client(store)
    found = [one for one in await there.query_rollouts() if one.metadata["run"] == "runs/live"]
    assert {(one.status, one.mode) for one in found} == {("succeeded", "test")} and len(found) == 2
    for rollout in found:
        *spans, end = await there.query_spans(rollout.rollout_id)
        assert len(spans) == 6 and end.attributes["agentlightning.reward.0.value"] == 1.0
        last = spans[-1].attributes
        assert last["gen_ai.completion.0.content"] == "Done." and '"Edit"' in last["gen_ai.prompt.4.content"]
    await there.close()
    # The same command goes on without a store, and with another one: neither decides how an episode ends.
    process = start(*what, "store.url=http://127.0.0.1:9", KEY=session.secret)
    text, _ = await asyncio.to_thread(process.communicate)
    assert process.returncode == 0 and "0 episodes to play, 2 are there" in text, text
    await api.stop()


# --- the dashboard

_BROWSERS = ("chromium", "chromium-headless-shell", "google-chrome")


@pytest.mark.long
async def test_the_dashboard_shows_episodes_and_spans(store: str, tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
        pytest.skip("there is no Chromium; Debian's package is chromium-headless-shell")
    run = write([one.record for one in await told(5, "shown")], tmp_path / "runs" / "shown")
    assert (await asyncio.to_thread(run_command, run, "--url", store)).returncode == 0
    there = client(store)
    found = [one for one in await there.query_rollouts() if one.metadata["run"] == "runs/shown"]
    await there.close()
    page = await asyncio.to_thread(seen, browser, f"{store}/rollouts", tmp_path)
    assert all(rollout.rollout_id in page and rollout.metadata["task"] in page for rollout in found)
    rollout = found[0]
    page = await asyncio.to_thread(seen, browser, f"{store}/traces?rolloutId={rollout.rollout_id}", tmp_path)
    assert "openai.chat.completion" in page and "agentlightning.annotation" in page


def seen(browser: str, url: str, home: Path) -> str:
    """Return a page as it is after its scripts have run."""
    what = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom", url]
    done = subprocess.run(what, env={"HOME": str(home)}, capture_output=True, text=True, timeout=300)
    return done.stdout


# --- killed; this ends the store that the others share


@pytest.mark.last
async def test_a_store_that_was_killed_and_is_empty_gets_everything_again(server: Agl, tmp_path: Path) -> None:
    episodes = await told(60, "killed")
    run = write([one.record for one in episodes[:44]], tmp_path / "runs" / "killed")
    what = [sys.executable, "-m", "rl.store", str(run), "--url", server.url, "--follow"]
    followed = tmp_path / "follow.log"
    with open(followed, "ab") as out:
        follower = subprocess.Popen(what, cwd=ROOT, stdout=out, stderr=out)
    there = client(server.url)

    async def until(count: int) -> None:
        while sum(one.metadata["run"] == "runs/killed" for one in await there.query_rollouts()) < count:
            await asyncio.sleep(0.1)

    try:
        await until(20)  # of 40
        server.kill()
        write([one.record for one in episodes[44:]], run, "2")
        while b"does not answer" not in followed.read_bytes():
            await asyncio.sleep(0.1)
        server.start()
        await asyncio.to_thread(server.wait)
        await until(60)
        follower.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(follower.wait) == 0, followed.read_text()
        await compare(there, "runs/killed", episodes)
    finally:
        follower.kill()
        follower.wait()
        await there.close()
