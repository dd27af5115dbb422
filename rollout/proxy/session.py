"""One episode's side of the proxy: a request becomes tokens, tokens become a reply, the tree keeps both.

No HTTP in here: ``server.py`` reads and writes, a test can call ``Session.answer`` directly.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import hashlib
import secrets
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout import SIDE_MODEL
from rollout.proxy.engine import Completion, Engine, TextCodec
from rollout.proxy.forward import SideEndpoint
from rollout.proxy.messages import Conversation, Reply, RequestError, Seen, WireRequest, conversation, text_key
from rollout.proxy.parsers import ReplyParser
from rollout.proxy.render import Renderer, RenderError
from rollout.proxy.secret import issue
from rollout.proxy.tree import Match, Node, Tree

# A renderer looks at no more than a few of the last ids (an end-of-turn token and its newline).
_TAIL = 8


@dataclass(frozen=True)
class Policy:
    """What a session needs to speak for a policy. ``sampling``: the trainer's parameters (temperature, top_p,
    ...); a ``seed`` among them is the episode's, and each call gets one of its own from it (``call_seed``).
    ``max_tokens`` per reply and ``max_context`` (prompt and reply together) are upper bounds that the
    agent's own max_tokens can only tighten. ``train_side_calls``: False serves calls on the small model's slot
    without training on them; with ``side_endpoint`` they do not come to the policy at all.
    ``max_session_tokens``: the most that one session may hold, all branches together."""

    engine: Engine
    renderer: Renderer
    parser: ReplyParser
    tokenizer: TextCodec
    end_ids: frozenset[int]
    max_tokens: int
    max_context: int
    train_side_calls: bool = True
    side_endpoint: SideEndpoint | None = None
    max_session_tokens: int = 1 << 25
    sampling: dict[str, Any] = field(default_factory=dict)


@dataclass
class Counters:
    """Totals of one session; times in seconds. ``overhead_s`` is the proxy's own work, the engine left out.
    ``aborted``: generations that nobody waited for any more. ``cache_queries``: prompt tokens of the calls whose engine
    told how many of them were in its prefix cache, ``cache_hits``: those."""

    calls: int = 0
    retries: int = 0
    side_calls: int = 0
    aborted: int = 0
    overhead_s: float = 0.0
    engine_s: float = 0.0
    malformed_calls: int = 0
    cut_replies: int = 0
    context_full: int = 0
    engine_errors: int = 0
    cache_queries: int = 0
    cache_hits: int = 0


def call_seed(seed: int, prompt_ids: Sequence[int], before: int) -> int:
    """The seed of one call of an episode: of the episode's ``seed``, the prompt and the number of replies that this
    very prompt had before. So what is sampled does not depend on what other calls are under way."""
    said = b"".join(number.to_bytes(8, "little") for number in (seed, before, *prompt_ids))
    return int.from_bytes(hashlib.blake2b(said, digest_size=8).digest(), "little") >> 1  # as many bits as engines take


def closed_error() -> RequestError:
    return RequestError("this session is closed", 410, "not_found_error")


class Session:
    """The calls of one episode. ``secret`` is what its agent authenticates with."""

    def __init__(self, episode_id: str, policy: Policy) -> None:
        self.episode_id = episode_id
        self.policy = policy
        self.secret = issue()
        seed = policy.sampling.get("seed")
        # Some chat templates write the ids of tool calls: where samples are to repeat, so must the ids.
        self._id = secrets.token_hex(8) if seed is None else f"{seed:016x}"
        self.tree = Tree()
        self.counters = Counters()
        self.closed = False
        self.tools: dict[str, dict[str, Any]] = {}  # every tool the agent offered, by name
        self._names: dict[Any, str] = {}  # of the tools that were called, by tool_use id
        self._said: dict[frozenset[str] | bytes, Node] = {}  # replies, by what their echo is known by
        self._seen = Seen()
        self._jobs: dict[int, _Job] = {}  # generations under way, by context node
        self._counted: tuple[Any, list[int]] | None = None  # what count() encoded last, and for which place

    @property
    def overhead_ms(self) -> float | None:
        """Mean milliseconds per call that the proxy itself took; None before the first call."""
        return 1e3 * self.counters.overhead_s / self.counters.calls if self.counters.calls else None

    def prepare(self, request: WireRequest, retry: bool) -> Turn:
        """Match and encode a request; no waiting. Raises RequestError."""
        if self.closed:
            raise closed_error()
        began = time.perf_counter()
        talk = conversation(request, self._seen)
        match = self.tree.match(talk.head.key, talk.spans)
        context = match.context
        if context is None:
            ids = self._encode(talk, match)
            if self.tree.tokens + len(ids) > self.policy.max_session_tokens:
                limit = self.policy.max_session_tokens
                raise RequestError(f"this session holds all the {limit} tokens it may", 413, "request_too_large")
            context = self.tree.add_context(match.base, talk.head.key, match.rest, ids)
        limit = min(self.policy.max_tokens, self.policy.max_context - context.length)
        if request.max_tokens > 0:
            limit = min(limit, request.max_tokens)
        if limit < 1:
            self.counters.context_full += 1
            # Claude Code knows this wording and compacts instead of giving up.
            raise RequestError(f"prompt is too long: {context.length} tokens > {self.policy.max_context} maximum")
        side = request.model == SIDE_MODEL
        self.counters.calls += 1
        self.counters.retries += retry
        self.counters.side_calls += side
        self.tools.update((tool["function"]["name"], tool) for tool in talk.head.tools)
        before = next((child for child in context.children if retry or not child.delivered), None)
        turn = Turn(
            session=self,
            context=context,
            # A client that forbids tools for this reply gets what looks like a call as text.
            tools=() if request.tool_choice and request.tool_choice.type == "none" else talk.head.tools,
            max_tokens=limit,
            stop=tuple(stop for stop in request.stop_sequences if stop),
            trained=self.policy.train_side_calls or not side,
            before=before,
            # The same for everyone who waits for this sample.
            message_id=before.reply.id
            if before and before.reply
            else f"msg_{self._id}{context.index:04x}{len(context.children):02x}",
        )
        self.counters.overhead_s += time.perf_counter() - began
        return turn

    def count(self, request: WireRequest) -> int:
        """Prompt tokens that this request would have; nothing is added to the tree. Raises RequestError."""
        talk = conversation(request, self._seen)
        match = self.tree.match(talk.head.key, talk.spans)
        if match.context is not None:
            return match.context.length
        ids = self._encode(talk, match)
        self._counted = _place(talk, match), ids
        return (match.base.length if match.base else 0) + len(ids)

    def close(self) -> None:
        """No further request is answered; generations under way are aborted."""
        self.closed = True
        for job in self._jobs.values():
            job.task.cancel()

    def _encode(self, talk: Conversation, match: Match) -> list[int]:
        if self._counted is not None and self._counted[0] == _place(talk, match):
            return self._counted[1]
        base, ids, messages = match.base, [], []
        for span in match.rest:
            said = self._said.get(span.tool_ids or span.key) if span.assistant and messages else None
            if said is None:
                messages += span.chat
                continue
            # A reply of ours in a new place (Claude Code keeps the last ones over a compaction): its own tokens.
            ids += [*self._render(talk, base, messages), *said.ids]
            base, messages = said, []
        return [*ids, *self._render(talk, base, messages)]

    def _render(self, talk: Conversation, base: Node | None, messages: list[dict[str, Any]]) -> list[int]:
        """Ids of ``messages`` behind the reply ``base``, or of a first prompt. Raises RequestError."""
        for message in messages:
            if name := self._names.get(message.get("tool_call_id")):
                message["name"] = name  # some templates write it, and a tool result has the call's id only
        try:
            if base is None:
                system = [{"role": "system", "content": talk.head.system}] if talk.head.system else []
                return self.policy.renderer.start(system + messages, list(talk.head.tools))
            return self.policy.renderer.extend(base.ids[-_TAIL:], base.ended, messages)
        except RenderError as error:
            raise RequestError(f"messages: {error}") from error

    @contextlib.contextmanager
    def sampling(self, turn: Turn) -> Generator[asyncio.Future[Node]]:
        """Ask the engine; who asks for the same again joins the generation under way. When the last one leaves before
        it is done, it is aborted: what nobody receives is not worth sampling. The future, which is not to be
        cancelled, ends with the node, an EngineError, or cancelled when the session is closed."""
        for child in turn.context.children:
            if child.reply is not None and child.reply.id == turn.message_id:
                known = asyncio.get_running_loop().create_future()
                known.set_result(child)
                yield known
                return
        job = self._jobs.get(turn.context.index)
        if job is None:
            job = self._jobs[turn.context.index] = _Job(asyncio.create_task(self._generate(turn)))
            job.task.add_done_callback(lambda _: self._forget(turn.context.index, job))
        job.waiting += 1
        try:
            yield job.task
        finally:
            job.waiting -= 1
            if not job.waiting and not job.task.done():
                self._forget(turn.context.index, job)
                self.counters.aborted += 1
                job.task.cancel()

    def _forget(self, index: int, job: _Job) -> None:
        if self._jobs.get(index) is job:
            del self._jobs[index]
        if job.task.done() and not job.task.cancelled():
            job.task.exception()  # seen: a failure that nobody waited for is not worth a warning at exit

    async def _generate(self, turn: Turn) -> Node:
        policy = self.policy
        sampling: dict[str, Any] = {**policy.sampling, "max_tokens": turn.max_tokens}
        if turn.stop:
            sampling["stop"] = list(turn.stop)
        prompt_ids = turn.context.path_ids()
        if "seed" in sampling:
            sampling["seed"] = call_seed(sampling["seed"], prompt_ids, len(turn.context.children))
        began = time.perf_counter()
        try:
            done = await policy.engine.generate(self.episode_id, prompt_ids, sampling)
        except Exception:
            self.counters.engine_errors += 1
            raise
        sampled = time.perf_counter()
        self.counters.engine_s += sampled - began
        if done.cached is not None:
            self.counters.cache_queries += turn.context.length
            self.counters.cache_hits += done.cached
        node = self._keep(turn, done)
        self.counters.overhead_s += time.perf_counter() - sampled
        return node

    def _keep(self, turn: Turn, done: Completion) -> Node:
        """Put a completion into the tree, with the reply that is read out of it."""
        policy = self.policy
        ids, ended = done.ids, bool(done.ids) and done.ids[-1] in policy.end_ids
        text = self._decode(ids[:-1] if ended else ids)
        at, stop = min(((text.find(stop), stop) for stop in turn.stop if stop in text), default=(-1, None))
        if stop is not None:
            # An engine may go on a little after a stop sequence; what the client never sees was never said.
            keep = bisect.bisect_left(range(len(ids)), True, key=lambda n: stop in self._decode(ids[: n + 1])) + 1
            ids, ended = ids[:keep], False
            text = self._decode(ids)
        parsed = policy.parser.parse(text if stop is None else text[:at], turn.tools)
        number = turn.message_id.removeprefix("msg_")
        blocks = [
            b | {"id": f"toolu_{number}{i:02x}"} if b["type"] == "tool_use" else b for i, b in enumerate(parsed.blocks)
        ]
        self._names.update((block["id"], block["name"]) for block in blocks if block["type"] == "tool_use")
        self.counters.malformed_calls += parsed.malformed
        cut = not ended and stop is None and len(ids) >= turn.max_tokens
        self.counters.cut_replies += cut
        calls = any(block["type"] == "tool_use" for block in blocks)
        reply = Reply(
            id=turn.message_id,
            blocks=tuple(blocks),
            stop_reason="stop_sequence" if stop else "max_tokens" if cut else "tool_use" if calls else "end_turn",
            input_tokens=turn.context.length,
            output_tokens=len(ids),
            stop_sequence=stop,
        )
        node = self.tree.add_sampled(
            turn.context,
            ids,
            done.logprobs[: len(ids)],
            reply,
            text=text,
            ended=ended,
            versions=done.versions[: len(ids)],
            experts=done.experts,
            trained=turn.trained,
            tools_allowed=bool(turn.tools),
        )
        self._said[reply.tool_ids or text_key(reply.text)] = node
        return node

    def _decode(self, ids: Sequence[int]) -> str:
        return self.policy.tokenizer.decode(ids, skip_special_tokens=False)


@dataclass(eq=False)
class _Job:
    """A generation under way and how many wait for it."""

    task: asyncio.Task[Node]
    waiting: int = 0


def _place(talk: Conversation, match: Match) -> tuple[Any, ...]:
    return (match.base and match.base.index, talk.head.key, *(span.key for span in match.rest))


@dataclass(frozen=True)
class Turn:
    """A request that was matched and encoded and now waits for its reply. ``before``: the reply that it is given
    again, because this is a retry or the first try never reached the client."""

    session: Session
    context: Node
    tools: tuple[dict[str, Any], ...]
    max_tokens: int
    stop: tuple[str, ...]
    trained: bool
    before: Node | None
    message_id: str

    async def reply(self) -> Node:
        """Raises EngineError, and CancelledError when the session is closed."""
        with self.session.sampling(self) as sampled:
            return await asyncio.shield(sampled)
