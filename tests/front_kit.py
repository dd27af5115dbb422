"""Agents of each API's own SDK, which play the same conversation through a proxy."""

from __future__ import annotations

import asyncio
import importlib
import json
from typing import Any

import aiohttp
import anthropic
import openai

from rollout.proxy.engine import Completion
from rollout.proxy.server import ProxyServer
from rollout.proxy.session import Session
from tests.kit import QueueEngine, char_policy
from tests.lacks import lacks

SYSTEM, TASK = "You fix bugs.", "Fix the bug."
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
# What the policy says in five turns: calls with and without text and thinking, two at once, and a last text.
SAID = (
    'I look.\n[[run {"command": "ls"}]]',
    '((Two at once.))[[run {"command": "cat a"}]][[run {"command": "cat b"}]]',
    '[[run {"command": "é \\"quoted\\""}]]',
    '((Now edit.))Done soon. [[run {"command": "sed"}]]',
    "All is done.",
)


def result(command: str) -> str:
    return f"out of {command}\n  two lines"


class Gate(QueueEngine):
    """Answers when ``open`` is set, or raises ``error`` then if there is one."""

    def __init__(self, *replies: str, error: Exception | None = None, open: bool = False) -> None:
        super().__init__(*replies)
        self.open, self.error = asyncio.Event(), error
        if open:
            self.open.set()

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Completion:
        await self.open.wait()
        if self.error:
            raise self.error
        return await super().generate(request_id, prompt_ids, sampling)


async def opened(proxy: ProxyServer, *said: str, **policy: Any) -> Session:
    """A session whose policy says these things."""
    return await proxy.open_session("e", char_policy(QueueEngine(*said), **policy))


def rows(session: Session) -> list[tuple[list[int], list[int], list[int], list[float]]]:
    """The training rows, which are the same for the same conversation."""
    session.settle()
    return [(row.prompt_ids, row.response_ids, row.mask, row.logprobs) for row in session.tree.sequences()]


class AnthropicAgent:
    """An agent of Anthropic's Messages."""

    def __init__(self, proxy: ProxyServer, session: Session, stream: bool = False, rewrites: bool = False) -> None:
        self.client = anthropic.AsyncAnthropic(
            base_url=f"http://127.0.0.1:{proxy.port}", auth_token=session.secret, max_retries=0
        )
        self.stream = stream
        self.messages: list[Any] = [{"role": "user", "content": TASK}]

    async def play(self) -> str:
        """Call until there is a reply without calls; return its text."""
        async with self.client:
            while True:
                said = await self.turn()
                self.messages.append({"role": "assistant", "content": said})
                calls = [block for block in said if block["type"] == "tool_use"]
                if not calls:
                    return said[-1]["text"]
                results = [
                    {"type": "tool_result", "tool_use_id": call["id"], "content": result(call["input"]["command"])}
                    for call in calls
                ]
                self.messages.append({"role": "user", "content": results})

    async def turn(self, **more: Any) -> list[dict[str, Any]]:
        tools = [{"name": "run", "description": "Run.", "input_schema": SCHEMA}]
        asked: dict[str, Any] = {
            "model": "policy", "max_tokens": 1000, "system": SYSTEM, "messages": self.messages, "tools": tools, **more
        }  # fmt: skip
        if not self.stream:
            return (await self.client.messages.create(**asked)).model_dump(exclude_none=True)["content"]
        async with self.client.messages.stream(**asked) as stream:
            return (await stream.get_final_message()).model_dump(exclude_none=True)["content"]


class ChatAgent:
    """An agent of OpenAI's chat completions. ``rewrites``: it changes its history as agents do."""

    tools = ({"type": "function", "function": {"name": "run", "description": "Run.", "parameters": SCHEMA}},)

    def __init__(self, proxy: ProxyServer, session: Session, stream: bool = False, rewrites: bool = False) -> None:
        self.client = openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{proxy.port}/v1", api_key=session.secret, max_retries=0
        )
        self.stream, self.rewrites = stream, rewrites
        self.messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK}]

    async def play(self) -> str:
        """Call until there is a reply without calls; return its text."""
        async with self.client:
            while True:
                said = await self.turn()
                self.messages.append(self.echo(said))
                if not said.get("tool_calls"):
                    return said["content"]
                for call in said["tool_calls"]:
                    command = json.loads(call["function"]["arguments"])["command"]
                    self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result(command)})

    def echo(self, said: dict[str, Any]) -> dict[str, Any]:
        if not self.rewrites:
            return said
        calls = [
            {**call, "function": {**call["function"], "arguments": call["function"]["arguments"].replace(": ", ":")}}
            for call in said.get("tool_calls") or []
        ]
        text = [{"type": "text", "text": said["content"].strip()}] if said.get("content") else None
        return {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})

    async def turn(self, **more: Any) -> dict[str, Any]:
        asked: dict[str, Any] = {"model": "policy", "messages": self.messages, "tools": [*self.tools], **more}
        if not self.stream:
            reply = await self.client.chat.completions.create(**asked)
            return reply.choices[0].message.model_dump(exclude_none=True)
        stream = await self.client.chat.completions.create(**asked, stream=True)
        return chat_message([chunk.choices[0].delta.model_dump(exclude_none=True) async for chunk in stream])


def chat_message(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """Put the pieces of a streamed chat completion together, as clients do."""
    said: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        for name in ("role", "content", "reasoning_content"):
            if name in delta:
                said[name] = said.get(name, "") + delta[name]
        for part in delta.get("tool_calls") or ():
            calls[part.pop("index")] = part
    return said | ({"tool_calls": [calls[at] for at in sorted(calls)]} if calls else {})


class ResponsesAgent:
    """An agent of OpenAI's Responses. ``rewrites``: it sends what Codex does, which keeps nothing on the server;
    otherwise it names the response before (``continues``), or sends all that it has got.
    """

    tools = ({"type": "function", "name": "run", "description": "Run.", "parameters": SCHEMA, "strict": True},)
    continues = False

    def __init__(self, proxy: ProxyServer, session: Session, stream: bool = False, rewrites: bool = False) -> None:
        self.client = openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{proxy.port}/v1", api_key=session.secret, max_retries=0
        )
        self.stream, self.rewrites = stream, rewrites
        task = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": TASK}]}
        self.input: list[Any] = [task] if rewrites else [{"role": "user", "content": TASK}]
        self.before: str | None = None

    async def play(self) -> str:
        """Call until there is a reply without calls; return its text."""
        async with self.client:
            while True:
                said = await self.turn()
                calls = [item for item in said.output if item.type == "function_call"]
                if not calls:
                    return said.output_text
                results = [
                    {
                        "type": "function_call_output",
                        "call_id": call.call_id,
                        "output": result(json.loads(call.arguments)["command"]),
                    }
                    for call in calls
                ]
                self.before = said.id
                self.input = results if self.continues else [*self.input, *map(self.echo, said.output), *results]

    def echo(self, item: Any) -> dict[str, Any]:
        told = item.model_dump(exclude_none=True)
        if self.rewrites:  # as Codex
            told = {name: value for name, value in told.items() if name not in ("id", "status")}
            if item.type == "reasoning":
                told = {name: value for name, value in told.items() if name != "content"}
        return told

    async def turn(self, **more: Any) -> Any:
        asked: dict[str, Any] = {"model": "policy", "instructions": SYSTEM, "input": self.input, "tools": [*self.tools]}
        if self.rewrites:
            asked |= {"store": False, "include": ["reasoning.encrypted_content"]}
        if self.continues and self.before:
            asked |= {"previous_response_id": self.before}
        asked |= more
        if not self.stream:
            return await self.client.responses.create(**asked)
        async with self.client.responses.stream(**asked) as stream:
            return await stream.get_final_response()


class ContinuingAgent(ResponsesAgent):
    """One that sends only what is new, and names the response before it."""

    continues = True


def genai() -> Any:
    """Google's SDK."""
    try:
        return importlib.import_module("google.genai")
    except ImportError:
        lacks("google-genai (PyPI)")


class GeminiAgent:
    """An agent of Gemini without any SDK. ``rewrites``: it does what Gemini CLI does: leaves thoughts out, and puts
    names before ids.
    """

    forgets: tuple[str, ...] = ()  # fields of parts and calls that it does not send back

    def __init__(self, proxy: ProxyServer, session: Session, stream: bool = False, rewrites: bool = False) -> None:
        self.url, self.key = f"http://127.0.0.1:{proxy.port}", session.secret
        self.stream, self.rewrites = stream, rewrites
        self.contents: list[Any] = [{"role": "user", "parts": [{"text": TASK}]}]

    async def play(self) -> str:
        """Call until there is a reply without calls; return its text."""
        while True:
            said = (await self.turn())["candidates"][0]["content"]
            self.contents.append(self.echo(said))
            calls = [part["functionCall"] for part in said["parts"] if "functionCall" in part]
            if not calls:
                return "".join(part["text"] for part in said["parts"] if not part.get("thought"))
            parts = [
                {
                    "functionResponse": self.kept(call, "args")
                    | {"response": {"output": result(call["args"]["command"])}}
                }
                for call in calls
            ]
            self.contents.append({"role": "user", "parts": parts})

    def kept(self, told: dict[str, Any], *without: str) -> dict[str, Any]:
        return {name: value for name, value in told.items() if name not in (*self.forgets, *without)}

    def echo(self, said: dict[str, Any]) -> dict[str, Any]:
        parts = [part for part in said["parts"] if not (self.rewrites and part.get("thought"))]
        parts = [self.kept(part) for part in parts]
        for part in parts:
            if "functionCall" in part:
                part["functionCall"] = self.kept(part["functionCall"])
        return {"role": "model", "parts": parts}

    async def turn(self) -> dict[str, Any]:
        function = {"name": "run", "description": "Run.", "parameters": capitals(SCHEMA)}
        body = {
            "contents": self.contents,
            "systemInstruction": {"parts": [{"text": SYSTEM}]},
            "tools": [{"functionDeclarations": [function]}],
        }
        verb = "streamGenerateContent?alt=sse" if self.stream else "generateContent"
        url = f"{self.url}/v1beta/models/policy:{verb}"
        headers = {"x-goog-api-key": self.key}
        async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=headers) as response:
            raw = await response.text()
            assert response.status == 200, raw
        return json.loads(raw.strip().removeprefix("data: "))


class ForgettingAgent(GeminiAgent):
    """One that knows no ids of calls and no signatures, as the API was at first."""

    forgets = ("id", "thoughtSignature")


class SigningAgent(GeminiAgent):
    """One that knows no ids of calls, but sends signatures back."""

    forgets = ("id",)


class GenaiAgent(GeminiAgent):
    """Google's own SDK."""

    async def turn(self) -> dict[str, Any]:
        function = {"name": "run", "description": "Run.", "parameters": SCHEMA}
        asked: dict[str, Any] = {
            "model": "policy",
            "contents": self.contents,
            "config": {"system_instruction": SYSTEM, "tools": [{"function_declarations": [function]}]},
        }
        async with genai().Client(api_key=self.key, http_options={"base_url": self.url}).aio as client:
            if not self.stream:
                return as_json(await client.models.generate_content(**asked))
            (chunk,) = [as_json(chunk) async for chunk in await client.models.generate_content_stream(**asked)]
            return chunk


def as_json(model: Any) -> dict[str, Any]:
    """Return what came, as the SDK read it."""
    return model.model_dump(mode="json", by_alias=True, exclude_none=True)


def capitals(schema: Any) -> Any:
    """A schema as Google writes them."""
    if not isinstance(schema, dict):
        return schema
    changed = {name: capitals(value) for name, value in schema.items()}
    return changed | ({"type": schema["type"].upper()} if isinstance(schema.get("type"), str) else {})
