"""This module tests episodes in the real `agl store`: read back through its client and adapters, live, after a kill, in
its dashboard.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rl.quickstart.tasks import make_tasks
from rl.traces.store.sending import send
from rl.traces.store.server import StoreServer
from rollout.proxy.server import ProxyServer
from tests import browser_kit
from tests.integration.claude_kit import scripted
from tests.integration.programs_kit import AGENT, gold, start
from tests.kit import char_policy
from tests.store_kit import ROOT, Agl, Told, compare, run_command, told, write

# Long: the server and the client each import agentlightning.
pytestmark = [pytest.mark.timeout(900)]


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


def client(url: str) -> Any:
    from agentlightning.store.client_server import LightningStoreClient

    return LightningStoreClient(url)


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


async def test_hostile_text_arrives(store: str, episodes: list[Told]) -> None:
    """NUL and ten megabytes arrive as they are, lone surrogates as question marks; none of it stops an episode."""
    record = episodes[0].record
    long = "\0x" * (5 << 20)
    said, (asked, reply, *_) = "a\ud800b", record.nodes
    says = msgspec.json.encode([{"role": "user", "content": long}])
    nodes = [
        msgspec.structs.replace(asked, says=says, head=b"[null,[]]"),
        msgspec.structs.replace(reply, blocks=[{"type": "text", "text": said}]),
    ]
    verdict = {**record.verdict, "detail": said, "flags": [said]}
    hostile = msgspec.structs.replace(record, episode="train-1-hostile", task=said, nodes=nodes, verdict=verdict)
    server, known = StoreServer(store, 60), {}
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


# --- live, with the real Claude Code


@pytest.mark.claude
async def test_episodes_arrive_while_they_are_played(store: str, tmp_path: Path) -> None:
    await asyncio.to_thread(make_tasks, tmp_path / "tasks", seed=7, n_train=2, n_heldout=1)
    tasks, out = tmp_path / "tasks" / "train.parquet", tmp_path / "runs" / "live"
    api = ProxyServer()
    await api.start()
    session = await api.open_session("gold", char_policy(scripted(gold)))
    what = [f"endpoint=http://127.0.0.1:{api.port}", "protocol=messages", "model=opus-5", "key_env=KEY"]
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


async def test_the_dashboard_shows_episodes_and_spans(store: str, tmp_path: Path) -> None:
    browser_kit.needed()
    run = write([one.record for one in await told(5, "shown")], tmp_path / "runs" / "shown")
    assert (await asyncio.to_thread(run_command, run, "--url", store)).returncode == 0
    there = client(store)
    found = [one for one in await there.query_rollouts() if one.metadata["run"] == "runs/shown"]
    await there.close()
    with browser_kit.browser() as browser:
        async with browser_kit.tab(browser) as page:

            async def shows(path: str, *texts: str) -> None:
                await page.goto(f"{store}/{path}")
                await page.until(" && ".join(f"document.body.innerText.includes({json.dumps(one)})" for one in texts))

            await shows("rollouts", *(text for one in found for text in (one.rollout_id, one.metadata["task"])))
            names = ("openai.chat.completion", "agentlightning.annotation")
            await shows(f"traces?rolloutId={found[0].rollout_id}", *names)


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
