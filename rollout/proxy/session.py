"""One episode's side of the proxy: a request becomes tokens, tokens become a reply, the tree keeps both.

No HTTP in here: ``server.py`` reads and writes, a test can call ``Session.answer`` directly.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from rollout.proxy.engine import Engine, TextCodec
from rollout.proxy.messages import Block, Conversation, Reply, RequestError, WireRequest, conversation
from rollout.proxy.parsers import ReplyParser
from rollout.proxy.render import Renderer
from rollout.proxy.tree import Node, Tree

# A renderer looks at no more than a few of the last ids (an end-of-turn token and its newline).
_TAIL = 8


@dataclass(frozen=True)
class Policy:
    """What a session needs to speak for a policy. ``sampling``: the trainer's parameters (temperature, top_p,
    ...); ``max_tokens`` per reply and ``max_context`` (prompt and reply together) are upper bounds that the
    agent's own max_tokens can only tighten."""

    engine: Engine
    renderer: Renderer
    parser: ReplyParser
    tokenizer: TextCodec
    end_ids: frozenset[int]
    max_tokens: int
    max_context: int
    sampling: dict[str, Any] = field(default_factory=dict)


@dataclass
class Counters:
    """Totals of one session; times in seconds. ``overhead_s`` is the proxy's own work, the engine left out."""

    calls: int = 0
    retries: int = 0
    overhead_s: float = 0.0
    engine_s: float = 0.0
    malformed_calls: int = 0
    cut_replies: int = 0
    context_full: int = 0
    engine_errors: int = 0


class Session:
    """The calls of one episode. ``secret`` is what its agent authenticates with."""

    def __init__(self, episode_id: str, policy: Policy) -> None:
        self.episode_id = episode_id
        self.policy = policy
        self.secret = secrets.token_urlsafe(24)
        self._id = secrets.token_hex(8)
        self.tree = Tree()
        self.counters = Counters()
        self.closed = False
        self.tools: dict[str, dict[str, Any]] = {}  # every tool the agent offered, by name
        self._sampling: dict[int, asyncio.Task[Node]] = {}  # by context node

    @property
    def overhead_ms(self) -> float | None:
        """Mean milliseconds per call that the proxy itself took; None before the first call."""
        return 1e3 * self.counters.overhead_s / self.counters.calls if self.counters.calls else None

    def prepare(self, request: WireRequest, retry: bool) -> Turn:
        """Match and encode a request; no waiting. Raises RequestError."""
        began = time.perf_counter()
        talk = conversation(request)
        match = self.tree.match(talk.head, talk.spans)
        context = match.context
        if context is None:
            ids = self._encode(talk, match.base, [m for span in match.rest for m in span.chat])
            context = self.tree.add_context(match.base, talk.head, match.rest, ids)
        limit = min(self.policy.max_tokens, self.policy.max_context - context.length)
        if request.max_tokens > 0:
            limit = min(limit, request.max_tokens)
        if limit < 1:
            self.counters.context_full += 1
            # Claude Code knows this wording and compacts instead of giving up.
            raise RequestError(f"prompt is too long: {context.length} tokens > {self.policy.max_context} maximum")
        self.counters.calls += 1
        self.counters.retries += retry
        self.counters.overhead_s += time.perf_counter() - began
        self.tools.update((tool["function"]["name"], tool) for tool in talk.tools)
        before = self._sampled_before(context, retry)
        if isinstance(before, Node) and before.reply is not None:
            message_id = before.reply.id
        else:  # the same for everyone who waits for this sample
            message_id = f"msg_{self._id}{context.index:04x}{len(context.children):02x}"
        return Turn(self, context, talk, limit, tuple(request.stop_sequences), before, message_id)

    def count(self, request: WireRequest) -> int:
        """Prompt tokens that this request would have; nothing is added to the tree."""
        talk = conversation(request)
        match = self.tree.match(talk.head, talk.spans)
        if match.context is not None:
            return match.context.length
        ids = self._encode(talk, match.base, [m for span in match.rest for m in span.chat])
        return (match.base.length if match.base else 0) + len(ids)

    def close(self) -> None:
        """No further request is answered; generations nobody waits for are ended."""
        self.closed = True
        for task in self._sampling.values():
            task.cancel()

    def _encode(self, talk: Conversation, base: Node | None, messages: list[dict[str, Any]]) -> list[int]:
        if base is None:
            system = [{"role": "system", "content": talk.system}] if talk.system else []
            return self.policy.renderer.start(system + messages, list(talk.tools))
        return self.policy.renderer.extend(base.ids[-_TAIL:], base.ended, messages)

    def _sampled_before(self, context: Node, retry: bool) -> asyncio.Task[Node] | Node | None:
        """The reply to give again: a retry, or one whose first try never reached the client."""
        if context.index in self._sampling:
            return self._sampling[context.index]
        for child in context.children:
            if retry or not child.delivered:
                return child
        return None

    async def sample(self, turn: Turn) -> Node:
        """Ask the engine; a retry joins the generation that is under way. Raises EngineError."""
        if isinstance(turn.before, Node):
            return turn.before
        task = turn.before
        if task is None:
            task = asyncio.create_task(self._generate(turn))
            self._sampling[turn.context.index] = task
            task.add_done_callback(lambda _: self._sampling.pop(turn.context.index, None))
        # Shielded: a client that hangs up and asks again finds the reply, not a second sample.
        return await asyncio.shield(task)

    async def _generate(self, turn: Turn) -> Node:
        policy = self.policy
        sampling = {**policy.sampling, "max_tokens": turn.max_tokens}
        if turn.stop:
            sampling["stop"] = list(turn.stop)
        began = time.perf_counter()
        try:
            done = await policy.engine.generate(self.episode_id, turn.context.path_ids(), sampling)
        except Exception:
            self.counters.engine_errors += 1
            raise
        sampled = time.perf_counter()
        self.counters.engine_s += sampled - began
        ended = bool(done.ids) and done.ids[-1] in policy.end_ids
        text = policy.tokenizer.decode(done.ids[:-1] if ended else done.ids, skip_special_tokens=False)
        blocks = self._blocks(text, turn)
        cut = not ended and len(done.ids) >= turn.max_tokens
        self.counters.cut_replies += cut
        reply = Reply(
            id=turn.message_id,
            blocks=tuple(blocks),
            stop_reason=_stop_reason(blocks, ended, cut),
            input_tokens=turn.context.length,
            output_tokens=len(done.ids),
        )
        node = self.tree.add_sampled(
            turn.context, done.ids, done.logprobs, reply, text=text, ended=ended, versions=done.versions
        )
        self.counters.overhead_s += time.perf_counter() - sampled
        return node

    def _blocks(self, text: str, turn: Turn) -> list[Block]:
        blocks = self.policy.parser.parse(text, turn.talk.tools)
        calls = [block for block in blocks if block["type"] == "tool_use"]
        self.counters.malformed_calls += not calls and "<tool_call>" in text
        for block in calls:
            block["id"] = f"toolu_{secrets.token_hex(12)}"
        return blocks


@dataclass(frozen=True)
class Turn:
    """A request that was matched and encoded and now waits for its reply."""

    session: Session
    context: Node
    talk: Conversation
    max_tokens: int
    stop: tuple[str, ...]
    before: asyncio.Task[Node] | Node | None
    message_id: str

    async def reply(self) -> Node:
        return await self.session.sample(self)


def _stop_reason(blocks: list[Block], ended: bool, cut: bool) -> str:
    if cut:
        return "max_tokens"
    if any(block["type"] == "tool_use" for block in blocks):
        return "tool_use"
    return "end_turn" if ended else "stop_sequence"
