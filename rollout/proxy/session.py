"""A session is one episode's side of the proxy: requests become tokens, tokens become replies, the tree keeps both.

There is no HTTP here: ``server.py`` receives requests and sends replies, and a test can call ``Session.prepare``.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from rollout import SIDE_MODEL
from rollout.proxy.calls import CallLog
from rollout.proxy.counters import Counters
from rollout.proxy.engine import Completion, Engine, EngineError, Seals, TextCodec, call_seed
from rollout.proxy.front.base import Front, Translated
from rollout.proxy.messages import Conversation, MessageMemory, RequestError, WireRequest, conversation
from rollout.proxy.replies import Reply
from rollout.proxy.roles import MAIN, Asked, Roles, Rule, rule_of, turns
from rollout.proxy.secret import issue
from rollout.proxy.texts import NoRoom, Room, in_thread, within
from rollout.proxy.tree import Match, Node, Prompt, SamplingTerms, Tree, routed
from rollout.proxy.wire import closed_error

if TYPE_CHECKING:  # the core runs without HTTP, vLLM and verl, which these modules import
    from rollout.proxy.forward import SideEndpoint
    from rollout.proxy.parsers import ReplyParser
    from rollout.proxy.render import Renderer

# A renderer reads only a few of the last ids of a path: an end-of-turn token and its newline.
_TAIL = 8
# A request with more new bytes than this is encoded in a thread. Less is a few milliseconds.
_AT_ONCE = 1 << 14
# A head that took less CPU time than this to encode, in seconds, is encoded at once from then on.
_QUICK_S = 0.015


@dataclass(frozen=True)
class Policy:
    """A Policy is what a session needs to answer with a model.

    ``end_ids``: the ids that end a reply. ``max_tokens`` per reply and ``max_context`` (prompt and reply together):
    limits that the agent's own max_tokens can only lower. ``train_side_calls``: whether side calls are trained on; if
    ``side_endpoint`` is set, it answers them and the policy never sees them. ``max_session_tokens``: the most tokens
    that one session may hold, over all branches of its tree. ``max_calls``: the most calls that a session may make,
    side calls, retries, broken requests and counts of tokens included; None: any number. ``max_body``: the largest
    request of a session in bytes; None: the server's. ``sampling``: the trainer's parameters (temperature, top_p, ...);
    a ``seed`` among them is the episode's, from which each call gets its own (``call_seed``). ``vocabulary``: the
    number of the model's ids, the first of which is 0. ``roles``: rules by role; None: roles are not told apart.
    """

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
    max_calls: int | None = None
    max_body: int | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    vocabulary: int = 1 << 31  # a seal has no room for larger ids
    roles: Mapping[str, Rule] | None = None


class Session:
    """A Session answers the calls of one episode. Its agent authenticates with ``secret``."""

    def __init__(self, episode_id: str, policy: Policy) -> None:
        self.episode_id, self.policy = episode_id, policy
        self.secret = issue()
        seed = policy.sampling.get("seed")
        # Some chat templates write the ids of tool calls into the prompt, so with a seed the ids must repeat, too.
        self._id = secrets.token_hex(8) if seed is None else f"{seed:016x}"
        self.tree = Tree()
        self.counters = Counters()
        self.closed = self.relayed = False
        self.talk = CallLog()
        self.roles = None if policy.roles is None else Roles(policy.roles)
        self.foreign: set[int] = set()  # nodes of replies that the agent did not ask for itself
        self._main: bytes | None = None  # key of the main thread's head: the agent's first call opens it
        self._names: dict[Any, str] = {}  # tool_use id -> name of the tool that was called
        self._seen, self._seals = MessageMemory(), Seals()
        self._known: dict[str, Translated] = {}  # by the API of what was translated
        self._asks: dict[SamplingTerms, SamplingTerms] = {}  # one object for all calls that ask for the same
        self._asked: dict[int, list[SamplingTerms]] = {}  # index of a context node -> all that was asked for there
        self._failed: set[str] = set()  # message ids of generations that left no reply
        self._generations: dict[str, _Generation] = {}  # those in progress, by message id
        self._counted: tuple[Any, list[int], bytes] | None = None  # what count() encoded last: key, ids, says
        self.entrance = asyncio.Lock()  # held while a request is encoded and enters the tree
        self._admitted = 0
        self.held = 0  # bytes of the bodies of requests in progress
        # A server sets this to a function that marks the replies that clients have read by now as delivered.
        self.settle: Callable[[], None] = lambda: None

    def admit(self) -> None:
        """Let one more call or count of tokens in. Raises RequestError if the session has made all that it may."""
        most = self.policy.max_calls
        if most is not None and self._admitted >= most:
            self.counters.refused_calls += 1
            # Claude Code does not try again after this status, and ends.
            raise RequestError(f"this session may make at most {most} calls", 403, "permission_error")
        self._admitted += 1

    def disown(self, reported: Collection[str]) -> None:
        """Mark a sent reply as delivered if the agent reports it, and leave the replies that are not the agent's own
        (``Tree.unreported``) out of training.

        Any program in the agent's box can make calls, because the session's secret is in its environment. Side calls
        that are left out are not counted as foreign, because Claude Code reports only those of sub-agents.
        """
        self.settle()
        for node in self.tree.nodes:
            if node.sent and node.reply is not None and node.reply.id in reported:
                node.delivered = True
        self._count_unread()
        for node in (others := self.tree.unreported(reported, self.roles is None or self.roles.sampled(MAIN))):
            node.trained = False
        self.foreign = {node.index for node in others if not node.side}
        self.counters.foreign_calls = len(self.foreign)
        known = {node.reply.id for node in self.tree.nodes if node.reply is not None}
        known |= {str(call.reply.get("id")) for call in self.talk.calls}
        self.counters.unknown_reports = sum(name.startswith("msg_") and name not in known for name in reported)

    async def translated(self, front: Front[Any], asked: Any) -> WireRequest:
        """Return a request of any API in the form of Messages. Large work is done in a thread. Raises RequestError."""
        known = self._known.setdefault(front.name, Translated())
        return await self._done(front.new_bytes(asked, known, self.tree), front.wire, asked, known, self.tree)

    async def _done(self, new_bytes: int, work: Callable[..., Any], *args: Any) -> Any:
        if new_bytes <= _AT_ONCE:
            return work(*args)
        async with self.entrance:
            return await in_thread(threading.Event(), work, *args)

    async def whose(self, request: WireRequest, agent: str) -> Asked:
        """Return whose a call is. ``agent``: the id of the sub-agent that the client names. Raises RequestError."""
        side = self.policy.side_endpoint if request.model == SIDE_MODEL else None
        if self.roles is None:
            return Asked("", None, side)
        talk = await self._done(self._seen.new_bytes(request), conversation, request, self._seen)
        return await self.roles.whose(talk, agent, request.model == SIDE_MODEL, side)

    async def ahead(self, request: WireRequest) -> Prompt:
        """Find a request's place and, if the request adds much, encode that. Large work is done in a thread, so that
        other sessions are answered meanwhile.

        Pass the result to ``prepare`` or ``count``, and hold ``entrance`` from before this call until after that one,
        so that the tree gets no other context in between. If the caller is cancelled or the session is closed, the work
        ends with its next piece, and only then does this return. Raises RequestError.
        """
        began, place, left = time.perf_counter(), None, threading.Event()
        try:
            if self._seen.new_bytes(request) <= _AT_ONCE:
                place = self._place(request)
                known = place.match.base is not None or place.talk.head.encoded
                adds = sum(span.size for span in place.match.rest) + (0 if known else request.head_size)
                if place.match.context is not None or adds <= _AT_ONCE:
                    return place
            return await in_thread(left, self._find, request, place, left)
        finally:
            self.counters.overhead_s += time.perf_counter() - began

    def prepare(self, request: WireRequest, retry: bool, place: Prompt | None = None, role: str = "") -> Call:
        """Match a request with the tree and encode what is new in it, as far as ``ahead`` has not done so (``place``).

        ``retry``: whether the client marks the request as a retry. ``role``: see ``whose``. Raises RequestError.
        """
        if self.closed:
            raise closed_error()
        began = time.perf_counter()
        place = self._find(request, place)
        talk, match, ids = place.talk, place.match, place.ids or []
        length = place.length
        limit = min(self.policy.max_tokens, self.policy.max_context - length)
        if request.max_tokens and request.max_tokens > 0:
            limit = min(limit, int(request.max_tokens))
        if limit < 1:
            raise self._too_long(str(length))
        context = match.context
        if context is None:
            if self.tree.tokens + len(ids) > self.policy.max_session_tokens:
                raise self._full()
            context = self.tree.add_context(match.base, talk.head.key, match.rest, ids)
            if match.base is None:
                context.head = self.talk.keep(b"[%b,%b]" % (bytes(request.system), bytes(request.tools)))
            context.says = self.talk.keep(place.says)
        self._seen.entered(request)
        side = request.model == SIDE_MODEL
        if not side and self._main is None:
            self._main = talk.head.key
        self.counters.calls += 1
        self.counters.retries += retry
        self.counters.side_calls += side
        stop = tuple(stop for stop in request.stop_sequences or () if stop)
        # If the client forbids tools for this reply, what looks like a call stays text.
        tools = () if request.tool_choice and request.tool_choice.type == "none" else talk.head.tools
        asked = self._asks.setdefault(asked := SamplingTerms(side, limit, stop, bool(tools), role), asked)
        call = Call(self, context, tools, asked, self._message_id(context, asked, retry))
        self.counters.overhead_s += time.perf_counter() - began
        return call

    def _message_id(self, context: Node, asked: SamplingTerms, retry: bool) -> str:
        """Return the id of the reply that a request gets: one that was or is being sampled for it, or else a new one.

        A reply that never reached its client is sent again. Besides, a retry gets the reply to a request like it if
        there is exactly one such reply. It gets a new one if there are several, or if its own generation failed: the
        others are, or may be, other clients' replies.
        """
        variants = self._asked.setdefault(context.index, [])
        if asked not in variants:
            variants.append(asked)
        variant = variants.index(asked)
        alike = [(one, one.reply.id) for one in self.tree.children(context) if one.asked == asked and one.reply]
        new = f"msg_{self._id}{context.index:04x}_{len(alike):02x}" + (f"_{variant:x}" if variant else "")
        if not all(child.delivered for child, _ in alike):
            self.settle()
        if lost := [name for child, name in alike if not child.delivered and not child.pending]:
            return lost[0]
        # All clients that wait for the same generation are sent the same id.
        fresh = not retry or len(alike) != 1 or new in self._generations or new in self._failed
        return new if fresh else alike[0][1]

    def turns(self) -> int:
        """Return the number of calls of the main thread whose replies reached the agent (or may have: a relayed one).

        A session whose calls are forwarded has no tree; all calls but retries and side calls count then.
        """
        self.settle()
        if self.roles is not None:
            return turns(self.tree.nodes, self.talk.calls, self.relayed)
        if not self.tree.nodes:
            return max(0, self.counters.calls - self.counters.side_calls - self.counters.retries)
        return self.tree.replies(self._main, self.relayed)

    def count(self, request: WireRequest, place: Prompt | None = None) -> int:
        """Return the number of prompt tokens of a request without adding it to the tree.

        ``place``: what ``ahead`` has found. Raises RequestError.
        """
        place = self._find(request, place)
        # What a reply in a new place is encoded as depends on what has been sampled until then.
        if place.ids is not None and not any(span.assistant for span in place.match.rest):
            self._counted = place.key, place.ids, place.says
        return place.length

    def close(self) -> None:
        """Refuse further requests and abort the generations in progress."""
        self.closed = True
        self.settle()
        self._count_unread()
        for generation in self._generations.values():
            generation.task.cancel()

    def _count_unread(self) -> None:
        self.counters.unread_replies = sum(node.sent and not node.delivered for node in self.tree.nodes)

    def _place(self, request: WireRequest) -> Prompt:
        talk = conversation(request, self._seen)
        return Prompt(talk, self.tree.match(talk.head.key, talk.spans))

    def _find(self, request: WireRequest, place: Prompt | None, left: threading.Event | None = None) -> Prompt:
        """Find a request's place in the tree and encode what is new in it. ``left``: set when nobody wants it any more.

        This may run in a thread: all that it does to the tree is to mark replies as delivered. Raises RequestError.
        """
        place = place or self._place(request)
        if place.match.context is None and place.ids is None:
            counted = self._counted
            known = counted is not None and counted[0] == place.key
            place.ids, place.says = counted[1:] if counted and known else self._encode(place.talk, place.match, left)
            _ = place.match.rest[-1].exact  # computed here, in the thread
        return place

    def _encode(self, talk: Conversation, match: Match, left: threading.Event | None) -> tuple[list[int], bytes]:
        def wanted() -> bool:
            return not (self.closed or (left is not None and left.is_set()))

        # The new messages, cut where one of our replies stands in a new place, with that reply before them.
        parts: list[tuple[Node | None, list[dict[str, Any]]]] = [(match.base, [])]
        says: list[bytes | msgspec.Raw] = []
        before = None
        for span in match.rest:
            here = span.assistant and before is not None
            for part, reply in self.tree.recall(span, before) if here else [(span, None)]:
                base, messages = parts[-1]
                # No prompt can end between two messages of the assistant, except at the first prompt's end.
                if reply is None or not messages or (base and messages[-1]["role"] == "assistant"):
                    messages += part.chat
                    says += part.wire()
                else:
                    parts.append((reply, []))
                    says.append(b"%d" % reply.index)
            before = span
        before, ids, began = match.base.length if match.base else 0, list[int](), time.thread_time()
        limit = min(self.policy.max_context - before, self.policy.max_session_tokens - self.tree.tokens)
        try:
            for number, (base, messages) in enumerate(parts):
                # A reply in a new place (Claude Code keeps the last ones when it compacts) keeps its own tokens.
                ids += base.ids if number and base else ()
                with within(Room(max(0, limit - len(ids)), wanted)):
                    ids += self._render(talk, base, messages)
                if base is None:
                    talk.head.encoded = time.thread_time() - began < _QUICK_S
        except NoRoom as error:
            if not wanted():
                raise closed_error() from None
            tokens = before + len(ids) + error.tokens
            fits = tokens <= self.policy.max_context
            raise self._full() if fits else self._too_long(f"at least {tokens}") from None
        return ids, b"[%b]" % b",".join(map(bytes, says))

    def _too_long(self, length: str) -> RequestError:
        self.counters.context_full += 1
        # Claude Code recognises this wording and compacts the conversation instead of giving up.
        return RequestError(f"prompt is too long: {length} tokens > {self.policy.max_context} maximum")

    def _full(self) -> RequestError:
        limit = self.policy.max_session_tokens
        return RequestError(f"this session may hold at most {limit} tokens", 413, "request_too_large")

    def _render(self, talk: Conversation, base: Node | None, messages: list[dict[str, Any]]) -> list[int]:
        """Encode ``messages`` after the reply ``base``, or as a first prompt if that is None.

        Raises RequestError and NoRoom.
        """
        for message in messages:
            if name := self._names.get(message.get("tool_call_id")):
                message["name"] = name  # some templates write it, and a tool result has only the call's id
        if base is None:
            system = [{"role": "system", "content": talk.head.system}] if talk.head.system else []
            return self.policy.renderer.start(system + messages, list(talk.head.tools))
        return self.policy.renderer.extend(base.ids[-_TAIL:], base.ended, messages)

    @contextlib.contextmanager
    def sampling(self, call: Call) -> Generator[asyncio.Future[Node]]:
        """Start sampling a call's reply, or join the generation of its message id that is already in progress.

        Yields a future of the sampled node, which the caller must not cancel. It ends with an EngineError if the
        engine fails, and is cancelled when the session is closed. When the last caller leaves the block before the
        generation is done, it is aborted, because nobody would receive the reply.
        """
        for child in self.tree.children(call.context):
            if child.reply is not None and child.reply.id == call.message_id:
                known = asyncio.get_running_loop().create_future()
                known.set_result(child)
                yield known
                return
        name = call.message_id
        generation = self._generations.get(name)
        if generation is None:
            generation = self._generations[name] = _Generation(asyncio.create_task(self._generate(call)))
            generation.task.add_done_callback(lambda _: self._forget(name, generation))
        generation.waiting += 1
        try:
            yield generation.task
        finally:
            generation.waiting -= 1
            if not generation.waiting and not generation.task.done():
                self._forget(name, generation)
                self.counters.aborted += 1
                generation.task.cancel()

    def _forget(self, name: str, generation: _Generation) -> None:
        if self._generations.get(name) is generation:
            del self._generations[name]
            task = generation.task
            if not task.done() or task.cancelled() or task.exception():
                self._failed.add(name)
        if generation.task.done() and not generation.task.cancelled():
            generation.task.exception()  # retrieved, so that asyncio does not warn of a failure that nobody awaited

    async def _generate(self, call: Call) -> Node:
        policy = self.policy
        sampling: dict[str, Any] = {**policy.sampling, "max_tokens": call.asked.max_tokens}
        sampling["routed_experts_prompt_start"] = routed(call.context)  # earlier replies brought what is before it
        if call.asked.stop:
            sampling["stop"] = list(call.asked.stop)
        # An engine stops by itself at the tokenizer's end of sequence, and at no other end that it is not told.
        if stops := policy.end_ids - {getattr(policy.tokenizer, "eos_token_id", None)}:
            sampling["stop_token_ids"] = sorted(stops)
        prompt_ids = self._seals.prompt(call.context)
        if "seed" in sampling:
            variant = self._asked[call.context.index].index(call.asked)
            before = sum(child.asked == call.asked for child in self.tree.children(call.context))
            sampling["seed"] = call_seed(sampling["seed"], prompt_ids, before + (variant << 32))
        started, began = time.time(), time.perf_counter()
        try:
            done = await policy.engine.generate(self.episode_id, prompt_ids, sampling)
            if not done.ids:
                raise EngineError("the engine returned a reply of zero tokens, without even one that ends it")
            if wrong := [token for token in done.ids if not 0 <= token < policy.vocabulary]:
                raise EngineError(f"the engine returned {wrong[0]}, which is no id of the model")
        except Exception:
            self.counters.engine_errors += 1
            raise
        sampled = time.perf_counter()
        self.counters.engine_s += sampled - began
        if done.cached is not None:
            self.counters.cache_queries += call.context.length
            self.counters.cache_hits += done.cached
        node = self._keep(call, prompt_ids, done)
        node.started, node.seconds = started, sampled - began
        self.counters.overhead_s += time.perf_counter() - sampled
        return node

    def _keep(self, call: Call, prompt_ids: list[int], done: Completion) -> Node:
        """Add a completion to the tree, with the reply that it is parsed into."""
        policy = self.policy
        ids, ended = done.ids, bool(done.ids) and done.ids[-1] in policy.end_ids
        text = self._decode(ids[:-1] if ended else ids)
        at, stop = min(((text.find(stop), stop) for stop in call.asked.stop if stop in text), default=(-1, None))
        if stop is not None:
            # An engine may go on a little after a stop sequence. The client is not sent that, so it is not kept.
            said = text[: at + len(stop)]
            last = bisect.bisect_left(range(len(ids)), True, key=lambda n: self._decode(ids[: n + 1]).startswith(said))
            ids, ended = ids[: last + 1], False
            text = self._decode(ids)
        kept = Completion(ids, done.logprobs[: len(ids)], done.versions[: len(ids)])
        sealed = self._seals.make(prompt_ids, kept, call.asked.side, call.message_id)
        parsed = policy.parser.parse(text if stop is None else text[:at], call.tools)
        number = call.message_id.removeprefix("msg_")
        blocks = [
            b | {"id": f"toolu_{number}{i:02x}"} if b["type"] == "tool_use" else b for i, b in enumerate(parsed.blocks)
        ]
        if self.roles is not None:
            self.roles.heard(blocks)
        self._names.update((block["id"], block["name"]) for block in blocks if block["type"] == "tool_use")
        self.counters.malformed_calls += parsed.malformed
        cut = not ended and stop is None and len(ids) >= call.asked.max_tokens
        self.counters.cut_replies += cut
        uses = any(block["type"] == "tool_use" for block in blocks)
        reply = Reply(
            id=call.message_id,
            blocks=tuple(blocks),
            stop_reason="stop_sequence" if stop else "max_tokens" if cut else "tool_use" if uses else "end_turn",
            input_tokens=call.context.length,
            output_tokens=len(ids),
            stop_sequence=stop,
        )
        rule = rule_of(policy.roles, call.asked.role)
        return self.tree.add_sampled(
            call.context,
            ids,
            kept.logprobs,
            reply,
            text=text,
            ended=ended,
            versions=kept.versions,
            experts=done.experts,
            trained=rule.train if rule else policy.train_side_calls or not call.asked.side,
            tools_allowed=call.asked.tools,
            seal=sealed,
            asked=call.asked,
            logprobs_of=done.logprobs_of,
        )

    def _decode(self, ids: Sequence[int]) -> str:
        return self.policy.tokenizer.decode(ids, skip_special_tokens=False)


@dataclass(eq=False)
class _Generation:
    """This is a generation in progress, with the number of callers that wait for it."""

    task: asyncio.Task[Node]
    waiting: int = 0


@dataclass(frozen=True)
class Call:
    """A Call is a request that was matched and encoded and now needs a reply.

    ``tools`` (in chat form) are those that the reply may call. ``message_id`` is the reply's id, which is that of an
    earlier reply to ``context`` if that one is to be sent again.
    """

    session: Session
    context: Node
    tools: tuple[dict[str, Any], ...]
    asked: SamplingTerms
    message_id: str

    async def reply(self) -> Node:
        """Return the sampled reply. Raises EngineError, and CancelledError when the session is closed."""
        with self.session.sampling(self) as sampled:
            return await asyncio.shield(sampled)
