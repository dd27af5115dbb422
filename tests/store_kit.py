"""This module starts a real `agl store` on this machine, has records of episodes that were played through the real
proxy by a script, and compares what a store has of episodes with what their client and their engine know of them.

tests/integration/store_scenes.py has episodes of the real Claude Code.
"""

from __future__ import annotations

import ast
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from rl.run.programs import free_port, tied
from rl.run.vllm_server import answers
from rollout import SIDE_MODEL
from rollout.proxy.engine import Completion
from rollout.proxy.server import ProxyServer
from rollout.records import Record, RecordWriter, node_records
from tests.kit import END, CallParser, CharTokenizer, char_policy, empty_record

ROOT = Path(__file__).parents[1]

# What a hostile program may print. Lone surrogates arrive as JSON escapes, which the proxy refuses.
HOSTILE = ("\0", "\u202e\ufffe", "<e>", "'\"\\\n", "__import__('os')", "}{", "nan", "\x1b[2J", "é😀")


class Agl:
    """An `agl store` on a free port of this machine, in memory."""

    def __init__(self, directory: Path) -> None:
        self._port, self._dir = free_port(), directory
        self.url = f"http://127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        program = str(Path(sys.executable).with_name("agl"))
        environment = {"PATH": os.environ["PATH"], "HOME": str(self._dir), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        with open(self._dir / "agl.log", "ab") as out:
            self._process = subprocess.Popen(
                tied(program, "store", "--host", "127.0.0.1", "--port", str(self._port)),
                env=environment,
                stdout=out,
                stderr=out,
            )

    def wait(self) -> None:
        """Block until it answers: its imports take 10 s of CPU time."""
        end = time.monotonic() + 300
        while not answers(f"{self.url}/v1/agl/health"):
            assert self._process.poll() is None and time.monotonic() < end, (self._dir / "agl.log").read_text()
            time.sleep(0.2)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Agl:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


@dataclass
class TracedCall:
    """One call as the client and the engine know it, without the proxy's records. ``reply``: the blocks that the client
    says it got."""

    messages: list[dict[str, Any]]
    system: Any
    side: bool
    reply: list[dict[str, Any]]
    prompt_ids: list[int]
    ids: list[int]
    logprobs: list[float]


@dataclass
class Told:
    """One episode as its player knows it."""

    record: Record
    calls: dict[str, TracedCall] = field(default_factory=dict)  # by the reply's id


class RandomEngine:
    """Says random lines, or what a script says, with random logprobs; keeps what it was asked and what it said."""

    def __init__(self, seed: int, script: Callable[[str], str] | None = None) -> None:
        self.random, self.said = random.Random(seed), list[tuple[list[int], list[int], list[float]]]()
        self._script = script or self._line

    def _line(self, prompt: str) -> str:
        return f"{self.random.random()} {self.random.choice(HOSTILE)}".replace("<e>", "e")

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Completion:
        ids = [*CharTokenizer().encode(self._script(CharTokenizer().decode(prompt_ids))), END]
        logprobs = [-self.random.randrange(1 << 20) / 1024 for _ in ids]  # exact in float32
        self.said.append((list(prompt_ids), ids, logprobs))
        return Completion(ids, logprobs)


async def told(count: int, prefix: str) -> list[Told]:
    """Play episodes: a main thread, in some a sub-agent and a side call; a part is lost and played again."""
    proxy, out = ProxyServer(), list[Told]()
    await proxy.start()
    async with aiohttp.ClientSession() as http:
        for number in range(count):
            name = f"{prefix}-1-task{number}-0-{number:08x}"
            lost = number % 10 == 3
            for attempt in range(1 + lost):
                ends = attempt < lost
                episode = await _episode(proxy, http, number, 1.7e9 + 100 * number + 50 * attempt)
                verdict = {
                    "outcome": "resolved",
                    "reason": None,
                    "reward": number % 7 / 4,
                    "detail": "",
                    "flags": ["x"],
                }
                if ends:
                    verdict |= {"outcome": "infra_failure", "reason": "engine_failed", "reward": None, "detail": "gone"}
                episode.record = msgspec.structs.replace(
                    episode.record,
                    split=("train", "val", "eval", "collect")[number % 4],
                    episode=f"{name}.{attempt}" if attempt else name,
                    attempt=attempt,
                    task=f"task{number}",
                    verdict=verdict,
                )
                out.append(episode)
    await proxy.stop()
    return out


async def _episode(proxy: ProxyServer, http: aiohttp.ClientSession, number: int, started: float) -> Told:
    engine = RandomEngine(number)
    session = await proxy.open_session(f"e{number}", char_policy(engine))
    made = Told(empty_record())

    async def ask(system: str, messages: list[dict[str, Any]], model: str = "policy") -> list[dict[str, Any]]:
        body = {"model": model, "max_tokens": 500, "system": system, "messages": messages, "stream": False}
        url = f"http://127.0.0.1:{proxy.port}/v1/messages"
        async with http.post(url, json=body, headers={"x-api-key": session.secret}) as answer:
            reply = await answer.json()
        assert answer.status == 200, reply
        blocks = reply["content"]
        made.calls[reply["id"]] = TracedCall(list(messages), system, model == SIDE_MODEL, blocks, *engine.said[-1])
        return [*messages, {"role": "assistant", "content": reply["content"]}]

    async def thread(system: str, turns: int) -> None:
        messages: list[dict[str, Any]] = []
        for turn in range(turns):
            text = f"{turn} {engine.random.choice(HOSTILE)}"
            content: Any = text if turn % 2 else [{"type": "text", "text": text}, {"type": "text", "text": "more"}]
            messages = await ask(system, [*messages, {"role": "user", "content": content}])

    await thread("You repair.", 1 + number % 3)
    if number % 4 == 1:
        await thread("You are a sub-agent.", 2)
    if number % 5 == 2:
        await ask("Title?", [{"role": "user", "content": "t"}], SIDE_MODEL)
    nodes = node_records(session.tree)
    for place, node in enumerate(nodes):  # in the episode's own time
        node.started, node.seconds, node.delivered = started + place, 1.0, True
    made.record = empty_record(version=4, nodes=nodes, started=started, timing={"total": 40.0, "agent": 30.0})
    return made


def write(records: list[Record], run: Path, name: str = "1") -> Path:
    """Write records as a run's; return its directory."""
    writer = RecordWriter(run / "episodes", name)
    for record in records:
        writer.append(record)
    writer.close()
    return run


def run_command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `python -m rl.store`."""
    what = [sys.executable, "-m", "rl.store", *map(str, arguments)]
    return subprocess.run(what, cwd=ROOT, capture_output=True, text=True, timeout=600)


def texts(content: Any) -> tuple[str, ...]:
    """Return a content's texts without marks such as those for a cache, which move from call to call."""
    return (content,) if isinstance(content, str) else tuple(block["text"] for block in content if "text" in block)


def calls_in(content: Any) -> list[tuple[str, str, Any]]:
    """Return the tool calls in a message's content: their ids, names and arguments."""
    blocks = [] if isinstance(content, str) else content
    return [(block["id"], block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]


def check_text(text: str, content: Any) -> None:
    """Check that a span's text says what a message has: its texts, or all of its blocks as JSON.

    Marks for a cache move from request to request, and Claude Code adds defaults to the inputs of calls.
    """
    if isinstance(content, str):
        assert text == content
    elif {block["type"] for block in content} <= {"text"}:
        assert text == "\n".join(block["text"] for block in content)
    else:
        kept = ("type", "id", "name", "tool_use_id", "text", "content", "thinking")
        one, other = ([{k: b[k] for k in kept if k in b} for b in blocks] for blocks in (json.loads(text), content))
        assert one == other


def check_call(raw: Any, by_tracer: Any, by_proxy: Any, said: TracedCall) -> None:
    """Compare a call's first span, and the triplets of it, with what was said."""
    assert by_tracer.prompt["token_ids"] == by_proxy.prompt["token_ids"] == said.prompt_ids
    assert by_tracer.response["token_ids"] == by_proxy.response["token_ids"] == said.ids
    assert [entry["logprob"] for entry in by_tracer.response["logprobs"]] == said.logprobs
    conversation = [{"role": "system", "content": said.system}, *said.messages]
    contents = [message["content"] for message in conversation]
    found = by_tracer.prompt["raw_content"]
    assert [message["role"] for message in found] == [message["role"] for message in conversation]
    for message, content in zip(found, contents, strict=True):
        check_text(message["content"], content)
    (completion,) = by_tracer.response["raw_content"]
    assert completion["role"] == "assistant"
    check_text(completion["content"], said.reply)
    # LlmProxyTraceToTriplet returns tokens only. Calls are in them, and by their ids in the span that it reads.
    sampled = CharTokenizer().decode(by_proxy.response["token_ids"][:-1])
    calls = calls_in(said.reply)
    assert [(block["name"], block["input"]) for block in parsed(sampled)] == [one[1:] for one in calls]
    (choice,) = ast.literal_eval(raw.attributes["llm.hosted_vllm.choices"])
    assert choice["message"]["content"] == said.reply and choice["token_ids"] == said.ids
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == said.logprobs
    asked = ast.literal_eval(raw.attributes["llm.hosted_vllm.messages"])
    for message, content in zip(asked, contents, strict=True):
        check_text(message["content"], content)


def parsed(text: str) -> list[dict[str, Any]]:
    """Return the tool calls in a sampled text, which have no ids yet."""
    return [block for block in CallParser().parse(text, []).blocks if block["type"] == "tool_use"]


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
        assert (
            attempt.metadata["episode"] == record.episode
            and attempt.metadata.get("flags", []) == record.verdict["flags"]
        )
        assert attempt.metadata["reward"] == record.verdict["reward"] and attempt.sequence_id == record.attempt + 1
        spans = list(await store.query_spans(rollout.rollout_id, attempt.attempt_id))
        assert [span.sequence_id for span in spans] == list(range(1, 2 * len(one.calls) + 2))
        assert {span.status.status_code for span in spans[:-1]} <= {"OK"}
        assert spans[-1].status.status_code == ("ERROR" if lost else "OK")
        tracer, proxy = TracerTraceToTriplet().adapt(spans), LlmProxyTraceToTriplet().adapt(spans)
        assert len(tracer) == len(proxy) == len(one.calls)
        names = [f"{record.episode}/{number}" for number in range(len(one.calls))]
        assert [triplet.metadata["response_id"] for triplet in proxy] == names
        assert [span.attributes["claude_code_rl.message_id"] for span in spans[:-1:2]] == [*one.calls]
        traced = {triplet.metadata["response_id"]: triplet for triplet in tracer}
        for raw, by_proxy, name, said in zip(spans[:-1:2], proxy, names, one.calls.values(), strict=True):
            check_call(raw, traced[name], by_proxy, said)
        rewards = [None] * (len(one.calls) - 1) + [record.verdict["reward"]]
        assert [triplet.reward for triplet in tracer] == [triplet.reward for triplet in proxy] == rewards
        sides = [span.attributes["claude_code_rl.side_call"] for span in spans[:-1:2]]
        assert sides == [said.side for said in one.calls.values()]
        roots = [(texts(said.system), texts(said.messages[0]["content"])) for said in one.calls.values()]
        threads = [span.attributes["claude_code_rl.thread"] for span in spans[:-1:2]]
        assert threads == [list(dict.fromkeys(roots)).index(root) for root in roots]
