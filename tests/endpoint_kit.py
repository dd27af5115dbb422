"""This module has a stand-in for endpoints of chat completions and of the Messages API on loopback, which can be busy,
hang and lie.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

KEY = "sk-a-key-that-nobody-may-see"
# What is replied to the text of the conversation so far: blocks of Anthropic's form.
Script = Callable[[str], list[dict[str, Any]]]
# What is done instead of replying, given the number of the request from 1: a status with headers and a body, or None.
Mood = Callable[[int], tuple[int, dict[str, str], str] | None]


class StandIn:
    """``heard`` and ``headers``: of all requests; ``hangs``: requests of these numbers are never answered."""

    def __init__(self, script: Script, mood: Mood = lambda n: None, hangs: frozenset[int] = frozenset()) -> None:
        self.script, self.mood, self.hangs = script, mood, hangs
        self.heard: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.headers: list[dict[str, str]] = []
        self.under_way = self.most = 0
        self.url = ""
        self.over = asyncio.Event()

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.heard.append(body)
        number = len(self.heard)
        self.keys.add(request.headers.get("Authorization") or request.headers.get("x-api-key"))
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            if number in self.hangs:
                await self.over.wait()
            await asyncio.sleep(0)
            if (instead := self.mood(number)) is not None:
                status, headers, text = instead
                return web.Response(status=status, headers=headers, text=text)
            blocks = self.script(json.dumps([body.get("system"), body["messages"]]))
            if request.path.endswith("/v1/messages"):
                return web.json_response(messages_reply(number, body, blocks))
            return web.json_response(chat_reply(number, body, blocks))
        finally:
            self.under_way -= 1


def messages_reply(number: int, body: dict[str, Any], blocks: list[dict[str, Any]]) -> dict[str, Any]:
    ends = "tool_use" if any(one["type"] == "tool_use" for one in blocks) else "end_turn"
    usage = {"input_tokens": 70, "cache_read_input_tokens": 30, "output_tokens": 10}
    said = {"id": f"msg_{number}", "type": "message", "role": "assistant", "model": body["model"], "content": blocks}
    return said | {"stop_reason": ends, "usage": usage}


def chat_reply(number: int, body: dict[str, Any], blocks: list[dict[str, Any]]) -> dict[str, Any]:
    calls = [
        {"id": one["id"], "type": "function", "function": {"name": one["name"], "arguments": json.dumps(one["input"])}}
        for one in blocks
        if one["type"] == "tool_use"
    ]
    text = "".join(one["text"] for one in blocks if one["type"] == "text")
    message = {"role": "assistant", "content": text or None, **({"tool_calls": calls} if calls else {})}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}
    usage = {"prompt_tokens": 100, "completion_tokens": 10}
    return {"id": f"c{number}", "model": body["model"], "choices": [choice], "usage": usage}


@asynccontextmanager
async def standing_in(stand_in: StandIn) -> AsyncIterator[StandIn]:
    """Serve on loopback until the block is left; ``url`` is then what /chat/completions comes after."""
    app = web.Application(client_max_size=1 << 26)
    for path in ("/chat/completions", "/v1/messages"):
        app.router.add_post(path, stand_in.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    stand_in.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield stand_in
    finally:
        stand_in.over.set()  # a server does not stop while it answers
        await runner.cleanup()
