"""Measure what a turn costs in each API that the proxy speaks, beside Messages in the same run, without HTTP.

    python scripts/bench_fronts.py --model DIR

The model, tokenizer, renderer, parser and the shape of conversations are those of bench_proxy.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from typing import Any

from bench_proxy import _policy, show
from proxy_load import Talk

from rollout.proxy.front import front_of
from rollout.proxy.garbage import collect_rarely, keep_imports

PATHS = {
    "messages": "/v1/messages",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "gemini": "/v1beta/models/policy:streamGenerateContent",
}
_TURNS, _TIMES, _RESULT_CHARS = 60, 8, 300


def _items(api: str, message: dict[str, Any]) -> dict[str, Any]:
    """Return the one item of a conversation that a message is in an API."""
    user, texts = message["role"] == "user", [b["text"] for b in message["content"] if b["type"] == "text"]
    role = {"role": "model" if api == "gemini" and not user else message["role"]}
    if texts:
        parts = [{"text": text} if api == "gemini" else {"type": "text", "text": text} for text in texts]
        return role | {"parts" if api == "gemini" else "content": parts}
    (block,) = message["content"]
    if block["type"] == "tool_use":
        call, said = {"name": block["name"], "arguments": json.dumps(block["input"])}, block["id"]
        if api == "chat":
            return role | {"content": None, "tool_calls": [{"id": said, "type": "function", "function": call}]}
        if api == "responses":
            return {"type": "function_call", "call_id": said, **call}
        return role | {"parts": [{"functionCall": {"id": said, "name": block["name"], "args": block["input"]}}]}
    said, out = block["tool_use_id"], block["content"]
    if api == "chat":
        return {"role": "tool", "tool_call_id": said, "content": out}
    if api == "responses":
        return {"type": "function_call_output", "call_id": said, "output": out}
    return role | {"parts": [{"functionResponse": {"id": said, "name": "Tool1", "response": {"output": out}}}]}


def _head(api: str, head: dict[str, Any]) -> dict[str, Any]:
    """Return all of a request but the conversation."""
    system, tools = head["system"][0]["text"], [{**tool, "parameters": tool["input_schema"]} for tool in head["tools"]]
    tools = [{name: tool[name] for name in ("name", "description", "parameters")} for tool in tools]
    common = {"model": "policy", "stream": True}
    if api == "chat":
        return common | {"tools": [{"type": "function", "function": tool} for tool in tools]}
    if api == "responses":
        return common | {"instructions": system, "tools": [{"type": "function"} | tool for tool in tools]}
    return {"systemInstruction": {"parts": [{"text": system}]}, "tools": [{"functionDeclarations": tools}]}


class _Body:
    """The bodies of one conversation in an API, each of whose items is encoded once."""

    def __init__(self, api: str, talk: Talk) -> None:
        self.api, self.talk, self.items = api, talk, list[bytes]()
        head = json.loads(talk.body())
        field = {"responses": "input", "gemini": "contents"}.get(api, "messages")
        self.head = json.dumps(_head(api, head)).encode()[:-1] + b',"%b":[' % field.encode()
        if api == "chat":
            self.items.append(json.dumps({"role": "system", "content": head["system"][0]["text"]}).encode())
        self.seen = 0

    def made(self) -> bytes:
        if self.api == "messages":
            return self.talk.body()
        for raw in self.talk.messages[self.seen :]:
            self.items.append(json.dumps(_items(self.api, json.loads(raw))).encode())
        self.seen = len(self.talk.messages)
        return self.head + b",".join(self.items) + b"]}"


async def episode(policy: Any, api: str, name: str) -> list[float]:
    """Play an episode; return the processor time of each turn in seconds."""
    from rollout.proxy.front.base import Translated
    from rollout.proxy.session import Session

    session, talk, known, took = Session(name, policy), Talk(1, _RESULT_CHARS), Translated(), list[float]()
    front, body = front_of(PATHS[api]), _Body(api, talk)
    for _ in range(_TURNS):
        sent = body.made()
        began = time.thread_time()
        asked = front.read(sent, PATHS[api])
        front.new_bytes(asked, known, session.tree)
        call = session.prepare(front.wire(asked, known, session.tree), retry=False)
        node = await call.reply()
        answer = front.answer(asked, call.message_id, call.context.length)
        out = answer.begin() + answer.rest(node.reply)
        took.append(time.thread_time() - began)
        assert out
        node.delivered = True
        talk.heard(json.dumps([block["id"] for block in node.reply.blocks]).encode())
    assert len(session.tree.roots) == 1 and len(session.tree.sequences()) == 1
    return took


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", required=True)
    policy = _policy(options.parse_args().model)
    keep_imports()  # as StandAlone.load does
    collect_rarely()
    took: dict[str, list[list[float]]] = {api: [] for api in PATHS}
    for number in range(_TIMES):  # in turns, so that what else runs on the machine disturbs all alike
        for api in PATHS:
            took[api].append(asyncio.run(episode(policy, api, f"{api}{number}")))
    # The best of several times for each turn: whatever else runs on the machine can only make a time worse.
    best = {api: [min(times) for times in zip(*runs, strict=True)][30:] for api, runs in took.items()}
    first = statistics.median(best["messages"])
    for api, times in best.items():
        show(f"{api}: processor time of a turn, of turns 31 to 60", 1e6 * statistics.median(times), "us")
        share = statistics.median(times) / first
        show("  beside Messages", share, "x", "<= 1.3", share <= 1.3)


if __name__ == "__main__":
    main()
