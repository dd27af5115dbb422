"""A real vLLM server (CPU, the quickstart's policy with random weights) behind the HTTP engine."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from rl.quickstart.policy import make_policy
from rl.run.vllm_server import vllm_server
from rollout.proxy.engine import EngineError
from rollout.proxy.vllm_http import VllmHttpEngine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PROMPT = list(range(300, 340))
SAMPLING = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "seed": 7, "ignore_eos": True, "max_tokens": 24}
LONG = {**SAMPLING, "max_tokens": 3500}


@dataclass
class Running:
    process: subprocess.Popen[bytes]
    url: str
    model_dir: Path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    model_dir = tmp_path_factory.mktemp("policy") / "model"
    make_policy(model_dir, seed=1)
    arguments = ["--dtype", "float32", "--max-model-len", "4096", "--max-num-seqs", "4", "--enforce-eager"]
    arguments += ["--logprobs-mode", "processed_logprobs"]
    left = str(tmp_path_factory.mktemp("left"))  # what it leaves behind
    environment = {"TMPDIR": left, "HF_HUB_OFFLINE": "1"}
    log = model_dir.with_name("server.log")
    with vllm_server(str(model_dir), log, *arguments, environment=environment, timeout_s=300) as running:
        yield Running(running.process, running.url, model_dir)


@pytest.fixture
async def engine(server: Running) -> AsyncIterator[VllmHttpEngine]:
    engine = VllmHttpEngine(server.url, "policy")
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


async def test_ids_and_logprobs_are_those_of_a_direct_request(server: Running, engine: VllmHttpEngine) -> None:
    done = await engine.generate("e", PROMPT, SAMPLING)
    assert len(done.ids) == len(done.logprobs) == 24
    body: dict[str, Any] = {"model": "policy", "prompt": PROMPT, "logprobs": 0, "return_token_ids": True, **SAMPLING}
    async with aiohttp.ClientSession() as http, http.post(f"{server.url}/v1/completions", json=body) as response:
        (choice,) = (await response.json())["choices"]
    assert choice["token_ids"] == done.ids
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(done.logprobs, abs=1e-4)


async def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(
    server: Running, engine: VllmHttpEngine
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    done = await engine.generate("e", PROMPT, SAMPLING)
    model = AutoModelForCausalLM.from_pretrained(server.model_dir, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + done.ids])).logits[0, len(PROMPT) - 1 : -1]
    of_sampled = torch.log_softmax(logits / SAMPLING["temperature"], -1)[range(len(done.ids)), done.ids]
    assert done.logprobs == pytest.approx(of_sampled.tolist(), abs=1e-3)


async def test_a_stop_sequence_ends_the_reply(server: Running, engine: VllmHttpEngine) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(server.model_dir)
    whole = await engine.generate("e", PROMPT, SAMPLING)
    stop = tokenizer.decode(whole.ids[9:11], skip_special_tokens=False)
    cut = await engine.generate("e", PROMPT, {**SAMPLING, "stop": [stop]})
    assert cut.ids == whole.ids[: len(cut.ids)] and len(cut.ids) < len(whole.ids)
    assert stop in tokenizer.decode(cut.ids, skip_special_tokens=False)


async def test_refusals_are_engine_errors(server: Running, engine: VllmHttpEngine) -> None:
    with pytest.raises(EngineError, match="status 400"):
        await engine.generate("e", PROMPT * 200, SAMPLING)
    other = VllmHttpEngine(server.url, "no-such-model")
    with pytest.raises(EngineError, match=r"status 404: .*no-such-model"):
        await other.generate("e", PROMPT, SAMPLING)
    await other.close()


async def test_cancelling_aborts_the_request_on_the_server(server: Running, engine: VllmHttpEngine) -> None:
    async with aiohttp.ClientSession() as http, asyncio.timeout(120):
        asking, before = await under_way(http, server, engine)
        while not asking.cancel():  # a busy machine may look too late
            asking, before = await under_way(http, server, engine)
        with pytest.raises(asyncio.CancelledError):
            await asking
        while (await metrics(http, server.url))[0]:
            await asyncio.sleep(0.1)
        assert (await metrics(http, server.url))[1] - before < LONG["max_tokens"]


async def under_way(
    http: aiohttp.ClientSession, server: Running, engine: VllmHttpEngine
) -> tuple[asyncio.Task[Any], float]:
    """A long request that the server has or has ended, and how many tokens it had generated before."""
    _, before = await metrics(http, server.url)
    asking = asyncio.create_task(engine.generate("e", PROMPT, LONG))
    while not asking.done() and (await metrics(http, server.url))[0] == 0:
        await asyncio.sleep(0.02)
    return asking, before


async def test_a_server_that_dies_is_an_engine_error(server: Running, engine: VllmHttpEngine) -> None:
    """The last test here: it ends the server."""
    asking = asyncio.create_task(engine.generate("e", PROMPT, LONG))
    await asyncio.sleep(1)
    assert not asking.done()
    held = shared_memory(server.process.pid)
    assert held
    os.killpg(server.process.pid, signal.SIGKILL)
    with pytest.raises(EngineError):
        await asking
    # Refused, or reset where the kernel accepted it before the last process with the listening socket was gone.
    with pytest.raises(EngineError, match=r"Client(Connector|OS)Error"):
        await engine.generate("e", PROMPT, SAMPLING)
    for path in held:  # nobody was left to remove it
        path.unlink(missing_ok=True)


def shared_memory(pid: int) -> set[Path]:
    """Files that a server and its engine have in /dev/shm."""
    main = psutil.Process(pid)
    return {
        Path(found.path)
        for process in (main, *main.children(recursive=True))
        for found in process.memory_maps()
        if found.path.startswith("/dev/shm/")
    }
