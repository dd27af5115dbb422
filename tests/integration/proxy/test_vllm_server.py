"""This module tests a real vLLM server (CPU, the quickstart's policy with random weights) behind the HTTP engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from transformers import AutoTokenizer

from rewards.task import Task
from rl.run.watch import dead_engine
from rollout.proxy.engine import AT_1, EngineError
from rollout.proxy.messages import conversation
from rollout.proxy.parsers import VllmReplyParser
from rollout.proxy.render import ChatTemplateRenderer, end_ids
from rollout.proxy.replies import reply_json
from rollout.proxy.session import Policy, Session
from rollout.proxy.standalone import ProxyOptions, StandAlone
from rollout.proxy.vllm_http import VllmHttpEngine
from rollout.proxy.wire import decode_request
from tests.integration.claude_kit import call, in_turn, scripted, stage
from tests.integration.vllm_kit import Running
from tests.sandboxes import REPOSITORY
from tests.unit.traces.test_ingest_uses import EDIT, TALK, state, write_states

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.xdist_group("vllm")]

PROMPT = list(range(300, 340))
SAMPLING = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "seed": 7, "ignore_eos": True, "max_tokens": 24}
LONG = {**SAMPLING, "max_tokens": 16_000}


@pytest.fixture
async def engine(vllm: Running) -> AsyncIterator[VllmHttpEngine]:
    engine = VllmHttpEngine(vllm.url, "policy")
    yield engine
    await engine.close()


async def metrics(http: aiohttp.ClientSession, url: str) -> tuple[float, float]:
    """Requests that run or wait, and tokens that were generated so far."""
    async with http.get(f"{url}/metrics") as response:
        text = await response.text()

    def total(pattern: str) -> float:
        return sum(float(value) for value in re.findall(rf"^{pattern} (\S+)$", text, re.MULTILINE))

    under_way = total(r"vllm:num_requests_(?:running|waiting)\{[^}]*\}")
    return under_way, total(r"vllm:generation_tokens_total\{[^}]*\}")


async def test_ids_and_logprobs_are_those_of_a_direct_request(vllm: Running, engine: VllmHttpEngine) -> None:
    done = await engine.generate("e", PROMPT, SAMPLING)
    assert len(done.ids) == len(done.logprobs) == 24
    body: dict[str, Any] = {"model": "policy", "prompt": PROMPT, "logprobs": 0, "return_token_ids": True, **SAMPLING}
    async with aiohttp.ClientSession() as http, http.post(f"{vllm.url}/v1/completions", json=body) as response:
        (choice,) = (await response.json())["choices"]
    assert choice["token_ids"] == done.ids
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(done.logprobs, abs=1e-4)


async def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(
    vllm: Running, engine: VllmHttpEngine
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    done = await engine.generate("e", PROMPT, SAMPLING)
    model = AutoModelForCausalLM.from_pretrained(vllm.model_dir, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + done.ids])).logits[0, len(PROMPT) - 1 : -1]
    of_sampled = torch.log_softmax(logits / SAMPLING["temperature"], -1)[range(len(done.ids)), done.ids]
    assert done.logprobs == pytest.approx(of_sampled.tolist(), abs=1e-3)
    # A greedy reply has those of temperature 1, and says so.
    done = await engine.generate("e", PROMPT, {**SAMPLING, "temperature": 0})
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + done.ids])).logits[0, len(PROMPT) - 1 : -1]
    at_1 = torch.log_softmax(logits, -1)[range(len(done.ids)), done.ids]
    assert done.logprobs == pytest.approx(at_1.tolist(), abs=1e-3) and done.logprobs_of == AT_1 and min(at_1) < -1e-2


async def test_a_stop_sequence_ends_the_reply(vllm: Running, engine: VllmHttpEngine) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(vllm.model_dir)
    whole = await engine.generate("e", PROMPT, SAMPLING)
    stop = tokenizer.decode(whole.ids[9:11], skip_special_tokens=False)
    cut = await engine.generate("e", PROMPT, {**SAMPLING, "stop": [stop]})
    assert cut.ids == whole.ids[: len(cut.ids)] and len(cut.ids) < len(whole.ids)
    assert stop in tokenizer.decode(cut.ids, skip_special_tokens=False)


async def test_an_end_that_the_engine_is_told_ends_the_reply(engine: VllmHttpEngine) -> None:
    whole = await engine.generate("e", PROMPT, SAMPLING)
    cut = await engine.generate("e", PROMPT, {**SAMPLING, "stop_token_ids": [whole.ids[9]]})
    assert cut.ids == whole.ids[: whole.ids.index(whole.ids[9]) + 1]


async def test_refusals_are_engine_errors(vllm: Running, engine: VllmHttpEngine) -> None:
    with pytest.raises(EngineError, match="status 400"):
        await engine.generate("e", PROMPT * 500, SAMPLING)
    other = VllmHttpEngine(vllm.url, "no-such-model")
    with pytest.raises(EngineError, match=r"status 404: .*no-such-model"):
        await other.generate("e", PROMPT, SAMPLING)
    await other.close()


async def test_cancelling_aborts_the_request_on_the_server(vllm: Running, engine: VllmHttpEngine) -> None:
    async with aiohttp.ClientSession() as http, asyncio.timeout(120):
        asking, before = await under_way(http, vllm, engine)
        while not asking.cancel():  # a busy machine may look too late
            asking, before = await under_way(http, vllm, engine)
        with pytest.raises(asyncio.CancelledError):
            await asking
        while (await metrics(http, vllm.url))[0]:
            await asyncio.sleep(0.1)
        assert (await metrics(http, vllm.url))[1] - before < LONG["max_tokens"]


async def under_way(
    http: aiohttp.ClientSession, vllm: Running, engine: VllmHttpEngine
) -> tuple[asyncio.Task[Any], float]:
    """A long request that the server has or has ended, and how many tokens it had generated before."""
    _, before = await metrics(http, vllm.url)
    asking = asyncio.create_task(engine.generate("e", PROMPT, LONG))
    while not asking.done() and (await metrics(http, vllm.url))[0] == 0:
        await asyncio.sleep(0.02)
    return asking, before


@pytest.mark.claude
async def test_a_real_prompt_is_that_of_the_chat_endpoint_and_of_the_template(vllm: Running, task: Task) -> None:
    """Claude Code's full prompt with its tools and reminders, and the same with calls and results after it."""
    script = in_turn(
        "I look. " + call("Bash", command="echo '<b>hi</b>'; ls"), call("Read", file_path="no.py"), "Done."
    )
    async with stage(scripted(script), task) as played:
        await played.play("Look around.")
    tokenizer: Any = AutoTokenizer.from_pretrained(vllm.model_dir)
    renderer = ChatTemplateRenderer(tokenizer, "qwen3")
    lengths = []
    for sent in (played.calls[0], played.calls[-1]):
        talk = conversation(decode_request(json.dumps(sent.body).encode()))
        messages = [{"role": "system", "content": talk.head.system}, *(m for span in talk.spans for m in span.chat)]
        tools = list(talk.head.tools)
        assert renderer.marks.hide([messages, tools]) == [messages, tools]  # they spell no control token
        ids = renderer.start(messages, tools)
        lengths.append(len(ids))
        options = {"add_generation_prompt": True, "return_dict": False}
        assert ids == tokenizer.apply_chat_template(messages, tools=tools, **options)
        wire = json.loads(json.dumps(messages))
        for message in wire:
            for made in message.get("tool_calls", ()):
                made["function"]["arguments"] = json.dumps(made["function"]["arguments"])
        body = {"model": "policy", "messages": wire, "tools": tools, "add_generation_prompt": True}
        async with aiohttp.ClientSession() as http, http.post(f"{vllm.url}/tokenize", json=body) as response:
            assert response.status == 200, await response.text()
            assert (await response.json())["tokens"] == ids
        body = {"model": "policy", "messages": wire, "tools": tools, "max_tokens": 1, "return_token_ids": True}
        async with aiohttp.ClientSession() as http, http.post(f"{vllm.url}/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            assert (await response.json())["prompt_token_ids"] == ids
    assert 10_000 < lengths[0] < lengths[1]


async def test_from_the_second_turn_on_the_prefix_is_in_the_servers_cache(
    vllm: Running, engine: VllmHttpEngine
) -> None:
    """The blocks of vLLM's cache have 128 tokens on a CPU; all that are full are found again."""
    tokenizer: Any = AutoTokenizer.from_pretrained(vllm.model_dir)
    policy = Policy(
        engine=engine,
        renderer=ChatTemplateRenderer(tokenizer, "qwen3"),
        parser=VllmReplyParser("qwen3_coder", None, tokenizer),
        tokenizer=tokenizer,
        end_ids=end_ids(tokenizer, {}),
        max_tokens=40,
        max_context=16384,
        sampling={"seed": secrets.randbits(40)},
    )
    session = Session("e", policy)
    talk: list[dict[str, Any]] = []
    before = hits = 0
    for turn in range(4):
        talk.append({"role": "user", "content": f"{secrets.token_hex(300)} {turn}"})
        body = {"model": "policy", "messages": talk, "max_tokens": 40}
        node = await session.prepare(decode_request(json.dumps(body).encode()), False).reply()
        found, hits = session.counters.cache_hits - hits, session.counters.cache_hits
        assert before - 128 <= found <= node.parent.length and found % 128 == 0 and bool(found) == bool(turn)
        before = node.parent.length
        talk.append({"role": "assistant", "content": reply_json(node.reply, "policy")["content"]})
    assert len(session.tree.roots) == 1 and session.counters.cache_queries > 0


async def test_a_server_tells_what_its_logprobs_are(
    vllm: Running, engine: VllmHttpEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """The stand-alone proxy does not warn of this one; of one in vLLM's default mode: test_sft_other.py."""
    assert await engine.processed(PROMPT)
    proxy = StandAlone(ProxyOptions(vllm.url, str(vllm.model_dir), "qwen3_coder"))
    await proxy.start()
    await proxy.load()
    await proxy.stop()
    assert "logprobs" not in caplog.text


@pytest.mark.parametrize("protocol", ["chat", "messages"])
def test_recorded_states_are_answered(vllm: Running, tmp_path: Path, protocol: str) -> None:
    """The evaluation on states and the teachers understand what a real server answers, in both of its formats."""
    recorded = [
        state(TALK, [EDIT] if n % 2 else [{"type": "text", "text": "Done."}], f"s{n}", f"number {n};") for n in range(4)
    ]
    write_states(tmp_path / "s.jsonl", recorded)

    def command(module: str, *what: str) -> None:
        arguments = [sys.executable, "-m", module, *what]
        done = subprocess.run(arguments, cwd=REPOSITORY, env={"HOME": str(tmp_path)}, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    address = f"{vllm.url}/v1" if protocol == "chat" else vllm.url
    states, out, teachers = str(tmp_path / "s.jsonl"), tmp_path / "out", tmp_path / "teachers"
    options = ["--model", "policy", "--protocol", protocol, "--max-tokens", "16"]
    command("rl.ingest", "evaluate", states, "--url", address, "--out", str(out), *options)
    results = json.loads((out / "results.json").read_text())
    # Random weights do not spell the recorded edit, but they may spell a call: what became of a state is not fixed.
    assert (results["answered"], results["same_call"]["share"]) == (4, 0.0)
    assert results["input_tokens"] > 200
    teacher = f"name=one,url={address},model=policy,protocol={protocol},max_tokens=16"
    command("rl.teachers", states, "--out", str(teachers), "--teacher", teacher)
    report = json.loads((teachers / "report.json").read_text())
    assert sum(report["states"].values()) == 4 and "no teacher answered" not in report["states"]


@pytest.mark.last
async def test_a_server_whose_engine_dies_is_found_dead_and_an_engine_error(
    vllm: Running, engine: VllmHttpEngine
) -> None:
    """It ends the server: first the engine's process, which a run's watch learns from the server, then all of it."""
    asking = asyncio.create_task(engine.generate("e", PROMPT, LONG))
    await asyncio.sleep(1)
    assert not asking.done()
    main = psutil.Process(vllm.process.pid)
    held = shared_memory(main)
    assert held
    address = vllm.url.removeprefix("http://")
    assert dead_engine([address]) == ""
    (core,) = [child for child in main.children(recursive=True) if "EngineCore" in " ".join(child.cmdline())]
    core.kill()
    with pytest.raises(EngineError):
        await asking
    async with asyncio.timeout(120):
        while not (found := await asyncio.to_thread(dead_engine, [address])):
            await asyncio.sleep(0.2)
    assert found.startswith(f"the inference server at {address} died")
    with contextlib.suppress(ProcessLookupError):
        os.killpg(vllm.process.pid, signal.SIGKILL)
    vllm.process.wait()
    # Refused, reset or closed without an answer, by how far the last process with the listening socket has gone.
    with pytest.raises(EngineError, match=r"Client(Connector|OS)Error|ServerDisconnectedError"):
        await engine.generate("e", PROMPT, SAMPLING)
    for path in held:  # nobody was left to remove it
        path.unlink(missing_ok=True)


def shared_memory(main: psutil.Process) -> set[Path]:
    """Return the files that a server and its engine have in /dev/shm."""
    return {
        Path(found.path)
        for process in (main, *main.children(recursive=True))
        for found in process.memory_maps()
        if found.path.startswith("/dev/shm/")
    }
