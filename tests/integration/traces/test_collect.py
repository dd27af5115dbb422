"""This module tests ``python -m rollout.collect`` with the real Claude Code: a real vLLM server, and stand-ins for the
two hosted back ends that speak their wire formats. Collections are killed with -9 in the middle and continued.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import datasets
import pytest
from aiohttp import web

from rl.quickstart.tasks import make_tasks
from rl.run.scratch import remove_socket_directory
from rl.traces.store.local import LocalStore, send_all
from rollout import audit
from rollout.proxy.calls import reply_in
from rollout.proxy.chat import ChatEndpoint
from rollout.proxy.passthrough import PassThrough
from rollout.proxy.server import ProxyServer
from rollout.records import Record, path_of, unpack_floats, unpack_ids
from rollout.records.reading import Reader
from tests.integration.claude_kit import scripted
from tests.integration.programs_kit import AGENT, ROOT, gold, kill_after, start
from tests.integration.vllm_kit import Running
from tests.kit import CALL, char_policy
from tests.lacks import lacks

pytestmark = pytest.mark.claude
KEY = "sk-ant-a-key-that-nobody-may-see"
COLLECT = "rollout.collect"


@pytest.fixture(scope="module")
def tasks_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tasks")
    make_tasks(out, seed=6, n_train=3, n_heldout=1)
    return out / "train.parquet"


async def collected(*what: str, **env: str) -> tuple[int, str]:
    """Run the command to its end; return its status and what it said."""
    process = start(*what, program=COLLECT, **env)
    text, _ = await asyncio.to_thread(process.communicate)
    return process.returncode, text


def by_episode(out: Path) -> dict[str, Record]:
    return {record.episode: record for record in Reader(out)}


def rows_of(out: Path) -> list[dict[str, Any]]:
    """The rows, as a user of Hugging Face's library reads them."""
    made = datasets.load_dataset("parquet", data_files=f"{out}/dataset/*.parquet", cache_dir=str(out / "hf"))
    return list(made["train"])


def kept(out: Path, task: str, epoch: int = 0) -> dict[str, bytes]:
    place = out / "traces" / task / f"epoch_{epoch}"
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.xdist_group("vllm")
async def test_vllm_gives_exact_ids_and_logprobs(vllm: Running, tasks_file: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    out = tmp_path / "out"
    what = ["vllm", f"endpoint={vllm.url}", "models.high=policy", "models.low=policy", f"data={tasks_file}"]
    what += [f"out={out}", *AGENT, "agent.max_turns=2", "proxy.max_tokens=16", "epochs=2"]
    await asyncio.to_thread(kill_after, "2/6 ", *what, program=COLLECT)
    before = by_episode(out)
    assert 2 <= len(before) < 6
    status, text = await collected(*what)
    assert status == 0 and f"{6 - len(before)} episodes to play, {len(before)} are there" in text, text
    records = by_episode(out)
    assert before.keys() < records.keys() and len(records) == 6
    assert {record.split for record in records.values()} == {"collect"}
    assert [record.missing for record in records.values()] == [[]] * 6, text
    assert audit.main([str(out)]) == 0
    # Each row is a call of the record, with what the engine was asked and what it sampled.
    tokenizer: Any = AutoTokenizer.from_pretrained(vllm.model_dir)
    rows = rows_of(out)
    for row in rows:
        record = records[row["episode"]]
        sampled = [n for n, node in enumerate(record.nodes) if node.logprobs is not None and node.delivered]
        node = record.nodes[sampled[row["turn"]]]
        path = path_of(record.nodes, sampled[row["turn"]])
        before_it = [token for n in path[:-1] for token in unpack_ids(record.nodes[n].ids)]
        assert row["prompt_ids"] == before_it and row["prompt"] == tokenizer.decode(before_it)
        assert row["response_ids"] == row["gold_completion_ids"] == unpack_ids(node.ids)
        assert row["logprobs"] == unpack_floats(node.logprobs or b"") and len(row["logprobs"]) == node.length
        assert (row["instance_id"], row["repo"], row["reward"]) == (record.task, record.repo, 0.0)
        assert [one["role"] for one in row["messages"]][:2] == ["system", "user"]
        assert row["messages"][-1]["role"] == "assistant" and json.loads(row["tools"])[0]["name"] == "Edit"
    assert Counter(row["episode"] for row in rows) == {
        name: sum(node.logprobs is not None and node.delivered for node in record.nodes)
        for name, record in records.items()
    }
    await in_a_store(out, rows)


async def in_a_store(out: Path, rows: list[dict[str, Any]]) -> None:
    """Send a collection to a store of this process; agentlightning reads back each row's ids, logprobs and reward."""
    from agentlightning.adapter.triplet import LlmProxyTraceToTriplet, TracerTraceToTriplet
    from agentlightning.store.memory import InMemoryLightningStore

    memory = InMemoryLightningStore()
    assert (await send_all([out], LocalStore(memory))).sent == len({row["episode"] for row in rows})
    for rollout in await memory.query_rollouts():
        own = sorted(
            (one for one in rows if one["episode"] == rollout.metadata["episode"]), key=lambda one: one["turn"]
        )
        spans = await memory.query_spans(rollout.rollout_id)
        tracer, proxy = TracerTraceToTriplet().adapt(spans), LlmProxyTraceToTriplet().adapt(spans)
        for found in (tracer, proxy):
            assert [one.prompt["token_ids"] for one in found] == [row["prompt_ids"] for row in own] != []
            assert [one.response["token_ids"] for one in found] == [row["response_ids"] for row in own]
            assert [one.reward for one in found] == [None] * (len(own) - 1) + [own[-1]["reward"]]
        logprobs = [[entry["logprob"] for entry in one.response["logprobs"]] for one in tracer]
        assert logprobs == [row["logprobs"] for row in own]


@pytest.mark.timeout(300)
async def test_anthropic_keeps_conversations_and_the_key_to_itself(tasks_file: Path, tmp_path: Path) -> None:
    """A stand-in for the official API, which takes one key only, answers all calls."""
    api = ProxyServer()
    await api.start()
    session = await api.open_session("gold", char_policy(scripted(gold)))
    out, key = tmp_path / "out", {"ANTHROPIC_API_KEY": session.secret}
    what = ["anthropic", f"endpoint=http://127.0.0.1:{api.port}", "models.high=opus-5", "models.low=haiku-5"]
    what += [f"data={tasks_file}", f"out={out}", "epochs=2", "cooldown_s=0.1", *AGENT]
    try:
        await asyncio.to_thread(kill_after, "2/6 ", *what, program=COLLECT, **key)
        status, text = await collected(*what, **key)
        assert status == 0 and "4 episodes to play, 2 are there" in text, text
        records = by_episode(out)
        assert len(records) == 6 and all(record.verdict["outcome"] == "resolved" for record in records.values())
        assert [record.missing for record in records.values()] == [[]] * 6
        rows = rows_of(out)
        assert len(rows) == 6 * 3 and {(row["prompt_ids"], row["reward"]) for row in rows} == {(None, 1.0)}
        for row in rows:
            roles = ["system", "user", *["assistant", "user"] * row["turn"], "assistant"]
            assert [one["role"] for one in row["messages"]] == roles
        task = rows[0]["instance_id"]
        files = kept(out, task, 1)
        assert {"stream.jsonl", "agent.log", "grading.log", "episode.json", "spans.jsonl.gz"} < files.keys()
        (own,) = [data for name, data in files.items() if name.startswith("sessions/") and name.endswith(".jsonl")]
        assert own.count(b'"type":"assistant"') >= 3 and b"+    return " in files["patch.diff"]
        spans = [json.loads(line) for line in gzip.decompress(files["spans.jsonl.gz"]).splitlines()]
        assert Counter(span["name"] for span in spans) == {
            "raw_gen_ai_request": 3, "openai.chat.completion": 3, "agentlightning.annotation": 1,
        }  # fmt: skip
        # The key is in no file, and was in no process of the box.
        secret = session.secret.encode()
        assert not any(secret in file.read_bytes() for file in out.rglob("*") if file.is_file())
        assert not any(secret in gzip.decompress(f.read_bytes()) for f in out.rglob("*.gz"))
        # The key is refused from now on: one line, before anything starts; another back end is another collection.
        await api.close_session(session)
        status, text = await collected(*what, "epochs=3", **key)
        assert status == 2 and "config: endpoint: " in text and "status 410" in text, text
        assert len(text.splitlines()) == 1, text
        status, text = await collected(*what, "models.low=opus-5", "epochs=3", **key)
        assert status == 2, text
    finally:
        await api.stop()


@asynccontextmanager
async def chat_api(script: Any, key: str = KEY) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """A stand-in for an endpoint of chat completions that takes ``key``; yields its URL and what it was asked."""
    heard: list[dict[str, Any]] = []

    async def completions(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {key}":
            return web.json_response({"error": {"message": "Incorrect API key provided"}}, status=401)
        body = await request.json()
        if "max_tokens" in body and key == KEY:  # as OpenAI's newer models answer
            said = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
            return web.json_response({"error": {"message": said}}, status=400)
        heard.append(body)
        text = script(body)
        calls = [
            {"id": f"call_{len(heard)}_{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for n, (name, arguments) in enumerate(CALL.findall(text))
        ]
        message = {"role": "assistant", "content": CALL.sub("", text) or None, "reasoning_content": "so\n\n  so"}
        message |= {"tool_calls": calls} if calls else {}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}
        usage = {"prompt_tokens": 100, "completion_tokens": 10}
        return web.json_response({"id": f"c{len(heard)}", "model": body["model"], "choices": [choice], "usage": usage})

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/chat/completions", completions)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1", heard
    await runner.cleanup()


SAYS = "I look:\n\n    first  this,\n\tthen that.\n"


def solve(body: dict[str, Any]) -> str:
    """Solve the task of a chat completion's request, with words whose white space matters."""
    lines = [f"{m['role']}: {m['content']}" for m in body["messages"]]
    reply = gold("\n".join(lines) + "\nassistant: ")
    return SAYS + reply if CALL.search(reply) else reply


@pytest.mark.timeout(300)
async def test_openai_loses_nothing_in_translation(tasks_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    what = ["openai", "models.high=large", "models.low=small", f"data={tasks_file}", f"out={out}", *AGENT]
    async with chat_api(solve) as (url, heard):
        status, text = await collected(*what, f"endpoint={url}", OPENAI_API_KEY="sk-wrong-key")
        assert status == 2 and "status 401; it does not accept the key in key_env" in text, text
        assert len(text.splitlines()) == 1 and "sk-wrong" not in text and not out.exists()
        await asyncio.to_thread(kill_after, "1/3 ", *what, f"endpoint={url}", program=COLLECT, OPENAI_API_KEY=KEY)
        status, text = await collected(*what, f"endpoint={url}", OPENAI_API_KEY=KEY)
        assert status == 0, text
        records = by_episode(out)
        assert len(records) == 3 and all(record.verdict["outcome"] == "resolved" for record in records.values()), text
        assert [record.missing for record in records.values()] == [[]] * 3
        # What the endpoint said came back to it as it was, to the last blank, by way of Claude Code.
        last = [body for body in heard if len(body["messages"]) == 6]
        assert last and {body["model"] for body in heard} == {"large"}
        for body in last:
            _, _, first, told, second, _ = body["messages"]
            assert first["content"] == SAYS.strip("\n") or first["content"] == SAYS
            assert first["reasoning_content"] == second["reasoning_content"] == "so\n\n  so"
            assert told["role"] == "tool" and told["tool_call_id"] == first["tool_calls"][0]["id"]
            assert json.loads(second["tool_calls"][0]["function"]["arguments"])["old_string"].startswith("return ")
        rows = rows_of(out)
        assert len(rows) == 9
        replies = [json.loads(row["messages"][-1]["content"]) for row in rows if row["turn"] < 2]
        assert all(blocks[0]["thinking"] == "so\n\n  so" and blocks[1]["text"] == SAYS for blocks in replies)
        assert not any(KEY.encode() in file.read_bytes() for file in out.rglob("*") if file.is_file())


@pytest.mark.timeout(300)
async def test_agentlightnings_proxy_loses_what_ours_keeps() -> None:
    """Why there is a translation of our own. When this fails, LLMProxy may have become good enough."""
    asked = {"model": "policy", "max_tokens": 99, "stream": True, "messages": [{"role": "user", "content": "go"}]}

    async def answer(http: aiohttp.ClientSession, url: str, secret: str) -> list[dict[str, Any]]:
        async with http.post(f"{url}/v1/messages", json=asked, headers={"x-api-key": secret}) as reply:
            assert reply.status == 200, await reply.text()
            found = reply_in(await reply.read())
            assert found is not None
            return [{k: v for k, v in block.items() if k in ("type", "text", "thinking")} for block in found["content"]]

    async with chat_api(lambda body: SAYS, key="x") as (url, _), aiohttp.ClientSession() as http:
        ours = PassThrough(ChatEndpoint(url, "large", "x"))
        await ours.start()
        session = await ours.open_session("e", ours.policy)
        said = await answer(http, f"http://127.0.0.1:{ours.port}", session.secret)
        assert said == [{"type": "thinking", "thinking": "so\n\n  so"}, {"type": "text", "text": SAYS}]
        await ours.stop()
        port = url.rpartition(":")[2].partition("/")[0]
        command = [sys.executable, "-m", "tests.llm_proxy", port]
        with subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as theirs:
            try:
                assert theirs.stdout is not None
                lines = iter(theirs.stdout.readline, "")
                words = await asyncio.to_thread(lambda: next(w for w in map(str.split, lines) if w and w[0].isdigit()))
                heard = await answer(http, f"http://127.0.0.1:{words[0]}{words[1]}", "x")
            finally:
                theirs.kill()
        assert "".join(block.get("text", "") for block in heard).split() == SAYS.split()
        assert heard != said and "\n" not in json.dumps(heard)


@pytest.mark.timeout(300)
async def test_an_endpoint_that_dies_costs_the_episodes_under_way(tasks_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    what = ["openai", "models.high=large", "models.low=large", f"data={tasks_file}", f"out={out}", *AGENT, "key_env=K"]
    what += ["epochs=9", "episode.infra_retries=0", "agent.timeout_s=60", "grade=false"]
    env = {"K": KEY, "CLAUDE_CODE_MAX_RETRIES": "0"}
    said: list[str] = []
    async with chat_api(solve) as (url, _):
        process = start(*what, f"endpoint={url}", program=COLLECT, **env)
        assert process.stdout is not None
        while "2/27 " not in "".join(said):
            said.append(await asyncio.to_thread(process.stdout.readline))
            assert said[-1], said
        process.kill()
        await asyncio.to_thread(process.communicate)
    status, text = await collected(*what, f"endpoint={url}", **env)
    assert status == 2 and "does not answer" in text and len(text.splitlines()) == 1, text
    remove_socket_directory(out / "socket_dir")  # of the killed one, as the next start would
    before = len(by_episode(out))
    assert before >= 2
    async with chat_api(solve) as (url_2, _):
        # Another address is another collection; that of a server that came back would not be.
        status, text = await collected(*what, f"endpoint={url_2}", **env)
        assert status == 2 and "belongs to another collection (endpoint is" in text, text
    assert {record.verdict["reason"] for record in by_episode(out).values()} == {"not_graded"}
    assert {row["reward"] for row in rows_of(out)} == {None}


@pytest.mark.timeout(300)
async def test_a_full_disk_ends_it_and_the_same_command_goes_on(tasks_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=120k", "none", str(out)])
    if mounted.returncode:
        lacks("root, who mounts a small disk")
    what = ["openai", "models.high=large", "models.low=large", f"data={tasks_file}", f"out={out}", *AGENT, "epochs=4"]
    try:
        async with chat_api(solve) as (url, _):
            status, text = await collected(*what, f"endpoint={url}", OPENAI_API_KEY=KEY)
            assert status == 1 and "No space left on device" in text.splitlines()[-2], text
            assert text.splitlines()[-1].startswith("continue  "), text
            subprocess.run(["mount", "-o", "remount,size=64m", str(out)], check=True)
            status, text = await collected(*what, f"endpoint={url}", OPENAI_API_KEY=KEY)
            assert status == 0, text
            resolved = [one for one in Reader(out) if one.verdict["outcome"] == "resolved"]
            ended = Counter((one.task, one.episode.split("-")[1]) for one in resolved)
            assert len(ended) == 12 and set(ended.values()) == {1}
            assert len(rows_of(out)) == 12 * 3
    finally:
        subprocess.run(["umount", "-l", str(out)], check=True)
