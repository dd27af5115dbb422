"""This module helps tests that run the real Claude Code: a stage to play on, an engine that can wait and
fail, and checks.

A stage is one sandbox and one proxy session. Claude Code can be started on it any number of times (a resumed
conversation is two processes in one session). Everything that it sends is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aiohttp import web

from rewards.task import Task
from rewards.verdict import Reason, Verdict
from rl.sft.episodes import rows_of
from rl.traces.export.conversation import conversations
from rollout.agent import AgentRun, run_agent
from rollout.agent.claude_code import ClaudeCode, find_binary
from rollout.audit import audit_claims, audit_heard, audit_text, audit_tokens
from rollout.episode import Episode
from rollout.proxy.blocks import flat
from rollout.proxy.engine import Completion, EngineError, ScriptedEngine
from rollout.proxy.render import Renderer
from rollout.proxy.server import ProxyServer
from rollout.proxy.session import Policy, Session
from rollout.proxy.tree import TrainingSequence
from rollout.records import NodeRecord, Record, RecordWriter, record_of, unpack_ids
from rollout.records.reading import Reader
from rollout.sandbox import Sandbox
from rollout.sandbox.local.box import boot_local
from rollout.trace import chat_of
from tests.kit import END, CallReading, CharRenderer, CharTokenizer, char_policy

Script = Callable[[str], str]


def scripted(script: Script) -> ScriptedEngine:
    return ScriptedEngine(CharTokenizer(), END, script)


class Moody:
    """An engine that first calls ``mood(number of the call, prompt)``, which may wait or raise, and then its script.

    ``aborted``: the number of calls that were cancelled during their mood.
    """

    def __init__(self, script: Script, mood: Callable[[int, str], Awaitable[None]]) -> None:
        self.inner, self.mood = scripted(script), mood
        self.calls = self.aborted = 0

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Completion:
        self.calls += 1
        try:
            await self.mood(self.calls, CharTokenizer().decode(prompt_ids))
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        return await self.inner.generate(request_id, prompt_ids, sampling)


def failing(*numbers: int) -> Callable[[int, str], Awaitable[None]]:
    """Return a mood that fails the calls with these numbers."""

    async def mood(number: int, prompt: str) -> None:
        if number in numbers:
            raise EngineError("not now")

    return mood


def slow(seconds: float) -> Callable[[int, str], Awaitable[None]]:
    async def mood(number: int, prompt: str) -> None:
        await asyncio.sleep(seconds)

    return mood


def call(tool: str, **arguments: Any) -> str:
    return f"[[{tool} {json.dumps(arguments)}]]"


def answers(prompt: str) -> int:
    """Return the number of replies that a prompt's conversation has."""
    return prompt.count("assistant: ") - 1


def in_turn(*replies: str) -> Script:
    """Return a script of these replies, one after the other; the last one is repeated for ever."""
    return lambda prompt: replies[min(answers(prompt), len(replies) - 1)]


@dataclass
class Sent:
    """A request as it was received."""

    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]

    @property
    def retry(self) -> int:
        return int(self.headers.get("x-stainless-retry-count", "0"))

    def text(self) -> str:
        return json.dumps(self.body, ensure_ascii=False)


class Verbatim(ClaudeCode):
    """Claude Code, for which a prompt that begins with a slash is a command."""

    def stdin(self, prompt: str) -> bytes:
        return prompt.encode()


@dataclass
class Stage:
    """A stage is where Claude Code plays. ``requests``: what it has sent so far; ``runs``: how its processes ended."""

    task: Task
    box: Sandbox
    session: Session
    agent: ClaudeCode
    socket: Path
    requests: list[Sent] = field(default_factory=list)
    runs: list[AgentRun] = field(default_factory=list)

    async def play(self, prompt: str, *extra: str, **settings: Any) -> AgentRun:
        """Start Claude Code on ``prompt`` and wait for its end; ``settings`` change its ClaudeCode."""
        agent = replace(self.agent, extra_args=extra, **settings)
        self.runs.append(await run_agent(self.box, agent, prompt, self.session.secret, self.socket, self.session.turns))
        return self.runs[-1]

    @property
    def calls(self) -> list[Sent]:
        return [sent for sent in self.requests if sent.path == "/v1/messages"]

    def check(self, directory: Path, *, rows: int | None, unreported: Sequence[str] = ()) -> list[TrainingSequence]:
        """Check invariants 1 and 2 with a record and the audit, and the number of rows; return the rows.

        ``rows``: None for any number. ``unreported``: the replies that are not trained on, because Claude Code does not
        report them.
        """
        tree = self.session.tree
        reported = frozenset[str]().union(*(run.replies or () for run in self.runs))
        if any(run.replies is not None for run in self.runs):
            self.session.disown(reported)
        # An honest client loses nothing: what it was sent, it is proven to have read.
        assert all(node.delivered for node in tree.nodes if node.sent) and not self.session.counters.unread_replies
        foreign = [node.text for node in tree.nodes if node.delivered and not node.trained]
        assert foreign == [*unreported], foreign
        found = tree.sequences()
        run = replace(self.runs[-1], events=[event for run in self.runs for event in run.events])
        flags = ("foreign_calls",) if self.session.counters.foreign_calls else ()
        verdict = Verdict(Reason.EMPTY_PATCH, flags=flags)
        episode = Episode("stage", self.task, 0, time.time(), verdict, self.session, run, b"", found, {})
        record = check_record(episode, directory)
        for number, node in enumerate(record.nodes):  # what is kept of the messages is what the policy has read
            if node.logprobs is None:
                assert encoded(record.nodes, number, CharRenderer()) == unpack_ids(node.ids), number
        assert [len(talk.fresh) for talk in conversations(record)] == [len(row.nodes) for row in found]
        assert rows in (None, len(found)), [(len(row.prompt_ids), len(row.response_ids), row.nodes) for row in found]
        # Every other delivered reply is trained on in exactly one row.
        trained = [n for row in found for n in row.nodes]
        assert sorted(trained) == [n.index for n in tree.nodes if n.sampled and n.delivered and n.trained]
        return found


def encoded(nodes: Sequence[NodeRecord], number: int, renderer: Renderer) -> list[int]:
    """Encode what a context says once more."""
    base, ids = nodes[number].parent, list[int]()
    system, tools = json.loads(nodes[number].head or b'["",[]]')
    chat = [{"role": "system", "content": flat(system)}] if system else []
    offered = [{"type": "function", "function": {"name": one["name"]}} for one in tools or ()]
    for part in [*json.loads(nodes[number].says), number]:
        if not isinstance(part, int):
            chat += chat_of([part])
            continue
        tail = unpack_ids(nodes[base].ids)[-8:] if base >= 0 else []
        ids += renderer.start(chat, offered) if base < 0 else renderer.extend(tail, nodes[base].ended, chat)
        ids += unpack_ids(nodes[part].ids) if part != number else []
        base, chat = part, []
    return ids


@contextlib.asynccontextmanager
async def stage(
    engine: Any,
    task: Task,
    *,
    max_context: int = 10**7,
    max_tokens: int = 10_000,
    policy: Policy | None = None,
    boot: Callable[..., Awaitable[Sandbox]] = boot_local,
    **agent: Any,
) -> AsyncIterator[Stage]:
    """Make a proxy, a session and a box with the work tree of ``task``; all are closed at the end.

    ``policy``: in place of one of characters for ``engine``. ``boot``: another kind's. ``agent``:
    ClaudeCode's fields; by default, Claude Code runs with its full prompt and all its tools.
    """
    binary = find_binary(None)
    settings = {"binary": binary, "max_turns": 12, "timeout_s": 60.0, "max_tokens": 2000, **agent}
    listener = Listener()
    server = ProxyServer(ping_s=0.3)
    server._runner.app.middlewares.append(listener.hear)
    await server.start()
    with tempfile.TemporaryDirectory(prefix="cc-") as home:
        socket = Path(home, "s")
        box = await boot(task.snapshot, binds={binary: str(binary)}, socket_dir=Path(home))
        try:
            policy = policy or char_policy(engine, max_tokens=max_tokens, max_context=max_context)
            session = await server.open_session("stage", policy, socket)
            yield Stage(task, box, session, Verbatim(**settings), socket, listener.requests)
        finally:
            await box.close()
            await server.stop()


class Listener:
    """Keeps the requests that a server receives."""

    def __init__(self) -> None:
        self.requests: list[Sent] = []

    @property
    def hear(self) -> Any:
        @web.middleware
        async def hear(request: web.Request, handler: Any) -> web.StreamResponse:
            body = json.loads(await request.read() or b"null")
            self.requests.append(Sent(request.path, dict(request.headers), body))
            return await handler(request)

        return hear


def check_record(episode: Episode, directory: Path) -> Record:
    """Write and read a record as a run does, and audit it."""
    writer = RecordWriter(directory, "w")
    writer.append(record_of(episode, "train", 1, "chars", "calls"))
    writer.close()
    record = next(iter(Reader(directory)))
    problems = [*audit_tokens(record), *audit_text(record, CharTokenizer(), CallReading())]
    problems += [*audit_heard(record), *audit_claims(record)]
    assert problems == [], problems
    # What rl.sft trains on are the tokens and masks that the trainer of GRPO would get.
    rows = [(row.prompt_ids + row.response_ids, [0] * len(row.prompt_ids) + row.mask) for row in episode.rows]
    assert list(rows_of(record)) == rows
    return record
