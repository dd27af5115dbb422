"""Make 100,000 calls to proxies on several event loops, and check every token by other means than the proxy's.

    python -m tests.stress_proxy --model DIR [--calls 100000] [--loops 4]

``python -m rl.quickstart.policy --out DIR`` makes a ``DIR``. Each event loop has a thread, every other one is uvloop's,
and all share tokenizer, renderer and parser. Agents go on, go back, hang up, ask again, ask twice at once, start
sub-agents, count tokens, send what is large or too large, and rewrite what they send again. The engine notes what it
was given and returns replies with a number of their own. When an episode has ended, its rows must have every token of
the replies that its agent has read to their end, once, with the engine's log-probabilities, each after the very prompt
that the engine was given, and nothing else to be trained on; and prompts must be what the chat template makes of the
whole conversation, as the agent has it (of one in ``--sample``: this takes longer than the rest).
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import logging
import random
import re
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop

from rollout import program
from rollout.proxy.engine import Completion
from rollout.proxy.server import ProxyServer
from rollout.proxy.session import Policy, Session

CONTEXT, EPISODE, BESIDE = 40_000, 50, 6  # tokens of a context; steps of an episode; episodes at a time on a loop
TOOLS = [{"name": "Do", "description": "Does it.", "input_schema": {"type": "object", "required": ["path"]}}]
KINDS = {"go on": 50, "ask again": 8, "twice at once": 6, "hang up": 10, "go back": 6, "count": 6, "sub-agent": 6}
KINDS |= {"large": 5, "too large": 3}
WORDS = ["return", "configure", "inspect", "provide", "self.x =", "if", "(a, b)", "0", "def", "x\n"]


class NumberedEngine:
    """This engine replies with a number, as text or as a call; it keeps what it was given and returned, by number."""

    def __init__(self, tokenizer: Any, numbers: Any, draw: random.Random) -> None:
        self.tokenizer, self.numbers, self.draw = tokenizer, numbers, draw
        self.calls: dict[int, tuple[list[int], list[int], list[float]]] = {}

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Completion:
        await asyncio.sleep(self.draw.uniform(0, 0.004))
        number = next(self.numbers)
        said = f"reply {number}"
        if self.draw.random() < 0.5:
            said = f"<tool_call>\n<function=Do>\n<parameter=path>\n/n/{number}\n</parameter>\n</function>\n</tool_call>"
        ids = [*self.tokenizer.encode(said, add_special_tokens=False), self.tokenizer.eos_token_id]
        logprobs = [-(number + i / 1024) for i in range(len(ids))]
        self.calls[number] = list(prompt_ids), ids, logprobs
        return Completion(list(ids), list(logprobs))


class Agent:
    """An agent plays one episode. ``read``: the numbers of the replies that it has read to their end."""

    def __init__(self, path: Path, session: Session, draw: random.Random, told: Counter[str]) -> None:
        self.path, self.session, self.draw, self.told = path, session, draw, told
        self.read: dict[int, list[dict[str, Any]]] = {}  # number of a reply -> the conversation that it answers
        self.system = "You fix bugs. " * 20
        self.fresh = itertools.count()

    def body(self, talk: list[dict[str, Any]], system: str, stream: bool) -> bytes:
        """Return a request, with all but its last message rewritten in one of the ways that are known of clients."""
        sent = copy.deepcopy([message["wire"] for message in talk])
        for message in sent[:-1]:
            way = self.draw.randrange(8)
            if way == 0:
                message["content"][-1]["cache_control"] = {"type": "ephemeral"}
            elif way == 1 and message["role"] == "user":
                message["content"].append({"type": "text", "text": "<system-reminder>now</system-reminder>"})
            elif way == 2 and [block["type"] for block in message["content"]] == ["text"]:
                message["content"] = message["content"][0]["text"]
        request = {"model": "m", "max_tokens": 100, "system": system, "tools": TOOLS, "stream": stream}
        return json.dumps(request | {"messages": sent}).encode()

    def request(self, body: bytes, count: bool = False, again: bool = False) -> bytes:
        """Return a body with its HTTP head."""
        path = "/v1/messages" + "/count_tokens" * count
        extra = "x-stainless-retry-count: 1\r\n" if again else ""
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nx-api-key: {self.session.secret}\r\nConnection: close\r\n{extra}"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def answer(self, request: bytes) -> tuple[int, bytes]:
        """Send a request and read the response to its end."""
        self.told["calls"] += 1
        reader, writer = await asyncio.open_unix_connection(str(self.path))
        writer.write(request)
        said = await reader.read()
        writer.close()
        return int(said[9:12]), said.partition(b"\r\n\r\n")[2]

    async def ask(self, talk: list[dict[str, Any]], system: str, again: bool = False) -> dict[str, Any]:
        """Return the assistant message that answers a conversation, in both forms."""
        request = self.request(self.body(talk, system, stream := self.draw.random() < 0.5), again=again)
        status, said = await self.answer(request)
        expect(status == 200, f"status {status}: {said[:300]!r}")
        number = int(re.findall(rb"(?:reply |/n/)(\d+)", said)[0])
        expect(self.read.setdefault(number, talk) == talk, f"reply {number} answers two conversations")
        found = re.search(rb'"(toolu_[^"]+)"', said)
        expect(stream == (b"message_stop" in said), "another form than was asked for")
        if found is None:
            block: dict[str, Any] = {"type": "text", "text": f"reply {number}"}
            return {"wire": {"role": "assistant", "content": [block]}, "chat": chat("assistant", block["text"])}
        block = {"type": "tool_use", "id": found[1].decode(), "name": "Do", "input": {"path": f"/n/{number}"}}
        called = {"type": "function", "function": {"name": "Do", "arguments": block["input"]}}
        made = chat("assistant", "") | {"tool_calls": [called]}
        return {"wire": {"role": "assistant", "content": [block]}, "chat": made}

    def text(self, chars: int) -> str:
        """Return words and code of so many characters."""
        return " ".join(self.draw.choices(WORDS, k=chars // 2 + 1))[:chars]

    def next(self, talk: list[dict[str, Any]], chars: int = 60) -> list[dict[str, Any]]:
        """Return a conversation with the message that comes next: a call's result, or the user's."""
        said = f"{next(self.fresh)} {self.text(self.draw.randrange(1, chars))}."
        last = talk[-1]["wire"]["content"][-1] if talk else {}
        block: dict[str, Any] = {"type": "text", "text": said}
        if last.get("type") == "tool_use":
            block = {"type": "tool_result", "tool_use_id": last["id"], "content": said}
        role = "tool" if block["type"] == "tool_result" else "user"
        return [*talk, {"wire": {"role": "user", "content": [block]}, "chat": chat(role, said)}]

    async def play(self) -> None:
        """Play the episode."""
        talk = self.next([])
        talk = [*talk, await self.ask(talk, self.system)]
        for _ in range(EPISODE - 1):
            await self.step(kind := self.draw.choices([*KINDS], [*KINDS.values()])[0], talk)
            self.told[kind] += 1
        self.told["go on"] += 1

    async def step(self, kind: str, talk: list[dict[str, Any]]) -> None:
        """Make a call of a kind, most of which extend ``talk`` by a message and a reply."""
        if kind == "too large":
            body = self.body([*talk, {"wire": {"role": "user", "content": "x y" * 150_000}}], self.system, False)
            status, said = await self.answer(self.request(body))
            expect(status == 400 and b"prompt is too long" in said, f"{status}: {said[:300]!r}")
            return
        if kind == "go back" and len(talk) > 4:
            del talk[2 * self.draw.randrange(1, len(talk) // 2) :]
        new = self.next(talk, 30_000 if kind == "large" else 60)
        if sum(len(message["chat"]["content"]) for message in new) > 1.5 * CONTEXT:
            del talk[2:]
            new = self.next(talk)
        if kind == "sub-agent":
            sub = self.next([])
            other = f"{self.system} You help. {next(self.fresh) % 3}"
            _, reply = await asyncio.gather(self.ask(sub, other), self.ask(new, self.system))
        elif kind == "twice at once":
            # They get two replies if the first one is answered before the second one is there.
            reply, _ = await asyncio.gather(self.ask(new, self.system), self.ask(new, self.system))
        elif kind == "ask again":
            reply = await self.ask(new, self.system)
            expect(reply == await self.ask(new, self.system, again=True), "a retry got another reply")
        else:
            if kind == "hang up":
                await self.hang_up(self.request(self.body(new, self.system, self.draw.random() < 0.5)))
                new = self.draw.choice([new, self.next(talk)])  # it may be that nobody comes for the reply
            reply = await self.ask(new, self.system)
        if kind == "count":
            _, said = await self.answer(self.request(self.body(new, self.system, False), count=True))
            prompt = self.session.policy.engine.calls[max(self.read)][0]  # ty: ignore[unresolved-attribute]
            expect(json.loads(said) == {"input_tokens": len(prompt)}, f"counted {said!r}, sent {len(prompt)}")
        talk[:] = [*new, reply]

    async def hang_up(self, request: bytes) -> None:
        """Send a request, read nothing and go."""
        self.told["calls"] += 1
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX) as end:
            end.setblocking(False)
            await loop.sock_connect(end, str(self.path))
            await loop.sock_sendall(end, request)
            await asyncio.sleep(self.draw.uniform(0, 0.08))


def chat(role: str, content: str) -> dict[str, Any]:
    """Return a message as a chat template reads it."""
    return {"role": role, "content": content}


def expect(holds: bool, otherwise: str) -> None:
    """Raise RuntimeError unless something holds."""
    if not holds:
        raise RuntimeError(otherwise)


def check(agent: Agent, engine: NumberedEngine, whole: Any) -> int:
    """Check an episode that has ended; return the number of prompts that were encoded as a whole.

    ``whole`` returns the ids of a conversation, or None if this one is not in the sample.
    """
    wanted, places, sampled = list[float](), dict[float, tuple[int, int]](), 0
    sequences = agent.session.tree.sequences()
    rows = [sequence.prompt_ids + sequence.response_ids for sequence in sequences]
    for number, sequence in enumerate(sequences):
        start = len(sequence.prompt_ids)
        for at, (mask, logprob) in enumerate(zip(sequence.mask, sequence.logprobs, strict=True), start):
            if mask:
                expect(logprob not in places, f"a token of reply {-logprob:.0f} is trained twice")
                places[logprob] = number, at
    for number, talk in agent.read.items():
        prompt, ids, logprobs = engine.calls[number]
        wanted += logprobs
        at = len(prompt)
        row = places.get(logprobs[0], (0, 0))[0]
        right = [places.get(logprob) for logprob in logprobs] == [(row, at + i) for i in range(len(ids))]
        expect(right and rows[row][: at + len(ids)] == prompt + ids, f"reply {number} is not trained after its prompt")
        if (encoded := whole([message["chat"] for message in talk])) is not None:
            # Sub-agents have other system prompts, which are not kept: their conversations have one message.
            sampled += len(talk) > 1
            expect(len(talk) == 1 or encoded == prompt, f"the prompt of reply {number} is not that of the whole text")
    expect(places.keys() == {*wanted}, f"{len(places)} tokens are trained, {len(wanted)} were read")
    return sampled


async def play(number: int, calls: int, policy: Policy, sample: int, told: Counter[str]) -> None:
    """Play episodes on this event loop until so many calls were made."""
    draw = random.Random(number)
    numbers = itertools.count(1)
    server = ProxyServer(ping_s=0.002)
    await server.start()
    tools = [{"type": "function", "function": {"name": t["name"], "parameters": t["input_schema"]}} for t in TOOLS]

    async def episode(name: str, directory: str) -> None:
        engine = NumberedEngine(policy.tokenizer, numbers, draw)
        path = Path(directory) / name
        session = await server.open_session(name, replace(policy, engine=engine), path)
        agent = Agent(path, session, draw, told)
        await agent.play()
        for _ in range(1000):  # until the calls that were hung up on have ended
            if not server._busy:
                break
            await asyncio.sleep(0.01)
        await server.close_session(session)
        system = chat("system", agent.system)

        def whole(talk: list[dict[str, Any]]) -> list[int] | None:
            options = {"add_generation_prompt": True, "return_dict": False, "tools": tools}
            return None if draw.randrange(sample) else policy.tokenizer.apply_chat_template([system, *talk], **options)

        told["prompts encoded as a whole"] += check(agent, engine, whole)
        told["replies read"] += len(agent.read)
        told["generations"] += len(engine.calls)

    with tempfile.TemporaryDirectory() as directory:
        names = map(str, itertools.count())
        while told["calls"] < calls:
            await asyncio.gather(*(episode(next(names), directory) for _ in range(BESIDE)))
    await server.stop()


def stress(model: str, calls: int, loops: int, sample: int) -> tuple[Counter[str], list[BaseException]]:
    """Make so many calls on so many event loops; return how often what was done, and how loops have failed."""
    from rollout.proxy.standalone import ProxyOptions, load_policy

    policy = load_policy(ProxyOptions("", model, "qwen3_coder", any_family=True))(None, CONTEXT)  # ty: ignore
    told, failed = [Counter[str]() for _ in range(loops)], list[BaseException]()

    def run(number: int) -> None:
        kind = uvloop if number % 2 else asyncio
        try:
            kind.run(play(number, -(-calls // loops), policy, sample, told[number]))
        except BaseException as error:
            failed.append(error)
            traceback.print_exception(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(loops)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(told, Counter[str]()), failed


def main() -> None:
    """Run it; the exit status is 1 if anything is wrong."""
    parser = program.parser("python -m tests.stress_proxy", __doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--loops", type=int, default=4)
    parser.add_argument("--sample", type=int, default=10)
    args = parser.parse_args()
    logging.getLogger("aiohttp.server").disabled = True  # it has a stack trace for each client that hangs up
    began = time.perf_counter()
    total, failed = stress(args.model, args.calls, args.loops, args.sample)
    print("| what | how often |\n| --- | --- |")
    for what in ["calls", *KINDS, "generations", "replies read", "prompts encoded as a whole"]:
        print(f"| {what} | {total[what]:,} |")
    print(f"| event loops | {args.loops} |\n| seconds | {time.perf_counter() - began:.0f} |")
    print(f"| wrong | {f'{len(failed)} event loops' if failed else 'nothing'} |")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
