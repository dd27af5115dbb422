"""A real model, Qwen2.5-Coder-0.5B-Instruct, plays in the real Claude Code behind the proxy; nothing of it is made up.

Untrained, it makes no call by itself. Replies that an episode needs are given, with the log-probabilities that the
server has for them; all others are sampled.
"""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from transformers import AutoModelForCausalLM

from rewards.task import Task
from rewards.verdict import Reason, Verdict
from rl.config.compose import cpu_dtype
from rollout.audit import audit_heard, audit_text, audit_tokens, audit_turns, closing_of, tokenizer_of
from rollout.episode import Episode
from rollout.proxy.engine import AT_1, Completion
from rollout.proxy.messages import conversation
from rollout.proxy.standalone import ProxyOptions, load_policy
from rollout.proxy.tree import Node
from rollout.proxy.vllm_http import VllmHttpEngine
from rollout.proxy.wire import decode_request
from rollout.reading import FormatReading
from rollout.records import RecordWriter, record_of
from rollout.records.reading import Reader
from rollout.sandbox.docker.engine import cache_dir
from tests.integration.claude_kit import Stage, stage
from tests.integration.vllm_kit import Running, serving
from tests.lacks import lacks
from tests.sandboxes import REPOSITORY

pytestmark = [pytest.mark.engine, pytest.mark.claude, pytest.mark.timeout(2400), pytest.mark.xdist_group("real")]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    model = cache_dir("models") / "qwen2.5-coder-0.5b-instruct"
    with Path(f"{model}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not model.exists():
            command = [sys.executable, "scripts/gguf_weights.py", "assemble", model]
            done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            if done.returncode:
                lacks(done.stderr[-500:])
    arguments = ["--dtype", DTYPE, "--max-model-len", str(CONTEXT)]
    with serving(model, tmp_path_factory.mktemp("real"), *arguments) as running:
        yield running


class Given(VllmHttpEngine):
    """An engine that says the given replies first, one a call; None is sampled, and so is what comes after them."""

    def __init__(self, url: str, tokenizer: Any, replies: tuple[str | None, ...]) -> None:
        super().__init__(url, "policy")
        self.url, self.tokenizer, self.replies = url, tokenizer, list(replies)

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Completion:
        reply = self.replies.pop(0) if self.replies else None
        if reply is None:
            return await super().generate(request_id, prompt_ids, sampling)
        ids = [*self.tokenizer.encode(reply), self.tokenizer.convert_tokens_to_ids("<|im_end|>")]
        return Completion(ids, (await self.scored(prompt_ids + ids))[len(prompt_ids) :], logprobs_of=AT_1)

    async def scored(self, ids: list[int]) -> list[float]:
        """Return the server's log-probabilities of the tokens of a prompt; that of the first is 0."""
        body = {"model": "policy", "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0}
        async with aiohttp.ClientSession() as http, http.post(f"{self.url}/v1/completions", json=body) as response:
            (choice,) = (await response.json())["choices"]
        found = choice["prompt_logprobs"][1:]
        return [0.0, *(one[str(id)]["logprob"] for id, one in zip(ids[1:], found, strict=True))]


def hermes(*calls: tuple[str, dict[str, Any]]) -> str:
    bodies = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


READ = ("Read", {"file_path": "no.py"})
SUB = {"description": "d", "prompt": "What is in main.py?", "subagent_type": "Explore", "run_in_background": False}
EPISODES: dict[str, tuple[int, tuple[str | None, ...]]] = {
    "it ends by itself": (128, ()),
    "a reply is cut": (24, ()),
    "a call is malformed": (48, ('<tool_call>\n{"name": "Read", "arguments": {"file_path": \n</tool_call>',)),
    "two calls in a reply": (48, (hermes(READ, ("Read", {"file_path": "src"})),)),
    "a sub-agent": (48, (hermes(("Agent", SUB)),)),
}


AGENT: dict[str, Any] = {
    "bare": True,
    "tools": ("Edit", "Read"),
    "system_prompt": "Fix the bug.",
    "max_turns": 2,
    "timeout_s": 1200.0,
}
# A bare agent has no Agent tool.
WITH_SUB_AGENTS: dict[str, Any] = {"bare": False, "tools": ("Agent", "Read")}
CONTEXT = 16384
DTYPE = cpu_dtype()


async def test_episodes_are_exact(real: Running, task: Task, tmp_path: Path) -> None:
    make = load_policy(ProxyOptions(real.url, str(real.model_dir), "hermes"))
    tokenizer: Any = make(None, CONTEXT).tokenizer
    forward = AutoModelForCausalLM.from_pretrained(real.model_dir, dtype=getattr(torch, DTYPE))
    asked = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    differences: list[tuple[float, float]] = []
    for number, (name, (most, replies)) in enumerate(EPISODES.items()):
        engine = Given(real.url, tokenizer, replies)
        policy = replace(make(engine, CONTEXT), max_tokens=most, sampling={**asked, "seed": number})
        agent = {**AGENT, **WITH_SUB_AGENTS} if name == "a sub-agent" else AGENT
        async with stage(None, task, policy=policy, **agent) as played:
            await played.play("main.py has a bug: the sum of a and b is wrong. Find and fix it.")
        tree, counters = played.session.tree, played.session.counters
        nodes = [node for node in tree.nodes if node.sampled]
        print(name, [(node.parent.length, node.text) for node in nodes])
        assert counters.calls == len(nodes) + counters.retries and counters.engine_errors == 0, name
        assert name != "a reply is cut" or counters.cut_replies
        assert name != "a call is malformed" or counters.malformed_calls
        assert name != "two calls in a reply" or [b["type"] for b in nodes[0].reply.blocks] == ["tool_use"] * 2
        assert name != "a sub-agent" or len({lineage(node)[-1] for node in nodes}) > 1
        (tmp_path / name).mkdir()
        audited(played, real.model_dir, tmp_path / name)
        for sent in played.calls:
            check_prompt(sent.body, played, tokenizer)
        for node in nodes:
            if not any(other.parent.parent is node for other in nodes):  # the last one of its path
                path, since = ids_of(node), lineage(node)[-1].parent.length
                with torch.no_grad():
                    logits = forward(torch.tensor([path]), logits_to_keep=len(path) - since + 1).logits[0, :-1].float()
                own = torch.log_softmax(logits, -1).gather(1, torch.tensor(path[since:])[:, None])[:, 0].tolist()
                told = (await engine.scored(path))[since:]
                for one in lineage(node):
                    assert one.logprobs_of == AT_1 or asked["temperature"] == 1.0  # of which the others are
                    span = slice(one.parent.length - since, one.parent.length - since + len(one.ids))
                    both = zip(told[span], own[span], strict=True)
                    differences += [(abs(a - b), abs(a - c)) for a, (b, c) in zip(one.logprobs, both, strict=True)]
        await engine.close()
    means = [sum(one) / len(one) for one in zip(*differences, strict=True)]
    print(len(differences), means)
    assert len(differences) > 100 and max(means) < 0.02


def lineage(node: Node) -> list[Node]:
    """The sampled nodes on the path to a sampled node."""
    found = [node]
    while found[-1].parent.parent is not None:
        found.append(found[-1].parent.parent)
    return found


def ids_of(node: Node | None) -> list[int]:
    return [] if node is None else ids_of(node.parent) + list(node.ids)


def audited(played: Stage, model: Path, directory: Path) -> None:
    """Nothing is found by the audit in a record that was written and read."""
    tree, run = played.session.tree, played.runs[-1]
    played.session.disown(frozenset(run.replies or ()))
    episode = Episode(
        "e", played.task, 0, time.time(), Verdict(Reason.EMPTY_PATCH), played.session, run, b"", tree.sequences(), {}
    )
    writer = RecordWriter(directory, "w")
    writer.append(record_of(episode, "train", 1, str(model), "hermes"))
    writer.close()
    record = next(iter(Reader(directory)))
    tokenizer = tokenizer_of(str(model))
    closing = closing_of(model, tokenizer)
    assert closing is not None
    problems = [*audit_tokens(record), *audit_text(record, tokenizer, FormatReading("hermes"))]
    assert [*problems, *audit_turns(record, closing), *audit_heard(record)] == []


def check_prompt(body: dict[str, Any], played: Stage, tokenizer: Any) -> None:
    """The prompt of a request says what the template says of its messages."""
    talk = conversation(decode_request(json.dumps(body).encode()))
    messages = [{"role": "system", "content": talk.head.system}, *(m for span in talk.spans for m in span.chat)]
    whole = tokenizer.apply_chat_template(
        messages, tools=list(talk.head.tools), add_generation_prompt=True, tokenize=False
    )
    texts = [tokenizer.decode(ids_of(node)) for node in played.session.tree.nodes if not node.sampled]
    assert whole in texts, whole
