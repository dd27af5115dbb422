"""The session tree holds every token of an episode exactly once, and derives the training sequences from them.

Context nodes and sampled nodes alternate on every path. A *context* node holds what the policy reads up to and
including the generation prompt, encoded once, when it arrived. A *sampled* node holds one reply, as it was sampled. So
a path from a root to a context node is exactly a prompt that the engine has seen. A new request extends the deepest.

The tree is plain data, without I/O, clock or randomness. Invariants 1 and 2 (docs/architecture.md) are kept here:
nothing that was sampled is ever encoded again, and ``sequences()`` puts every sampled token that was delivered, and
is to be trained, into exactly one sequence, with mask 1.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rollout.proxy.garbage import untracked
from rollout.proxy.messages import Conversation, Identity, Span, Spans, text_key
from rollout.proxy.partings import cuts, partings, pieces_of
from rollout.proxy.replies import Reply
from rollout.proxy.texts import squeezed


class SamplingTerms(NamedTuple):
    """SamplingTerms are what a request asks for besides its conversation; only requests that agree in it share a reply.

    ``side``: on the agent's slot for a small model. ``max_tokens`` and ``stop``: as they apply to the reply.
    ``tools``: whether it may call tools. ``role``: ``rollout.proxy.roles``.
    """

    side: bool
    max_tokens: int
    stop: tuple[str, ...]
    tools: bool
    role: str = ""


@dataclass(eq=False)
class Node:
    """A Node is a piece of an episode, either context or one sampled reply.

    ``ids``: the token ids that it adds to its parent's path. ``key``, of a context node: the head's key and the keys of
    its spans; ``exact``: all that the policy reads of the last span; ``says``: its messages, as JSON, and ``head``:
    system prompt and tools of a root (``records.NodeRecord``). The other fields belong to sampled nodes. ``asked``:
    what the request for the reply asked for. ``logprobs``: the engine's own, one per id; ``logprobs_of``: see
    ``engine.Completion``. ``text``: the ids decoded. ``reply``: what the client was sent. ``sent``: whether all of it
    was sent; ``pending``: on how many connections it may still be read; ``delivered``: whether a client is proven to
    have it. ``versions``: the version of the weights that sampled each id, empty if unknown. ``trained``: False for a
    reply that is not to be trained on (a side call that is only served); it is context for what comes after it.
    ``experts``: the engine's routing (``engine.Completion``) of those tokens of the path that no earlier call on the
    path had. ``seal``: see ``engine.Seals``. ``started`` (Unix time) and ``seconds``: of its generation.
    """

    index: int
    parent: Node | None
    ids: list[int]
    length: int  # tokens from the root up to and including this node
    key: tuple[bytes, ...] = ()
    exact: bytes = b""
    says: bytes = b""
    head: bytes = b""
    asked: SamplingTerms | None = None
    logprobs: list[float] | None = None
    reply: Reply | None = None
    text: str = ""
    sent: bool = False
    pending: int = 0
    delivered: bool = False
    ended: bool = True  # the reply closed its turn itself: its last id is an end token
    versions: tuple[int, ...] = ()
    trained: bool = True
    tools_allowed: bool = True  # False: the client forbade or did not offer tools, so no calls were looked for
    experts: Any = None
    seal: bytes = b""
    started: float = 0.0
    seconds: float = 0.0
    logprobs_of: str = ""

    @property
    def sampled(self) -> bool:
        """Tell whether this is a sampled node."""
        return self.logprobs is not None

    @property
    def side(self) -> bool:
        """Tell whether this is the reply to a side call."""
        return self.asked is not None and self.asked.side

    def path(self) -> list[Node]:
        """Return the nodes from the root to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def path_ids(self) -> list[int]:
        """Return the token ids from the root up to and including this node."""
        ids: list[int] = []
        for node in self.path():
            ids += node.ids  # twenty times as fast as a comprehension, and a context has many ids
        return ids


@dataclass(frozen=True)
class TrainingSequence:
    """A TrainingSequence is one training row.

    ``mask`` and ``logprobs`` have the length of ``response_ids``; where the mask is 0, the logprob is 0.0. ``nodes``:
    the indices of the sampled nodes that this row trains on. ``versions``: the lowest and the highest version of the
    weights that sampled them, (0, 0) if unknown. ``experts``: the engine's routing of all tokens except the last, as
    arrays to be concatenated along the first axis; empty unless it was recorded.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    mask: list[int]
    logprobs: list[float]
    nodes: tuple[int, ...]
    versions: tuple[int, int]
    experts: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Match:
    """A Match is the place where a request joins the tree.

    ``base``: the deepest sampled node that the request extends, None if it needs a new root. ``rest``: the spans after
    ``base``; there is at least one, and the last one is context. ``context``: the context node that already holds
    exactly those spans, None if there is none.
    """

    base: Node | None
    context: Node | None
    rest: tuple[Span, ...]


@dataclass
class Prompt:
    """A Prompt is where a request joins the tree, with the ``ids`` of what is new in it, None before it is encoded."""

    talk: Conversation
    match: Match
    ids: list[int] | None = None
    says: bytes = b""

    @property
    def key(self) -> tuple[Any, ...]:
        """Return what the ids depend on."""
        base, rest = self.match.base, self.match.rest
        return (base and base.index, self.talk.head.key, *(span.exact for span in rest))

    @property
    def length(self) -> int:
        """Return the number of tokens of the prompt."""
        node = self.match.context or self.match.base
        return (node.length if node else 0) + len(self.ids or ())


@dataclass(frozen=True, eq=False)
class _Way:
    """A _Way is a known beginning of a conversation: its first ``size`` spans lead to ``reply`` and to no other reply.

    Most requests continue a known way, so a call costs what it adds, not the length of its conversation. When any place
    in the tree gets a second choice, all ways are forgotten and found anew.
    """

    head: bytes
    identities: list[Identity]
    size: int
    reply: Node


# How many a session keeps: those of the agent, and of sub-agents.
_WAYS = 4


class Tree:
    """A Tree holds all calls of one episode."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.roots: list[Node] = []
        self.tokens = 0  # the number of tokens in all nodes
        self._named: dict[str, Node] = {}  # id of a reply or of a call in it -> sampled node
        self._said: dict[bytes, list[Node]] = {}  # key of a text -> replies without calls
        self._ways: list[_Way] = []
        self._children: dict[int, list[Node]] = {}  # not in the nodes, which would form cycles and not be freed at once

    def children(self, node: Node | None) -> Sequence[Node]:
        """Return the nodes that come right after a node; None: the roots."""
        return self.roots if node is None else self._children.get(node.index, ())

    def match(self, head: bytes, spans: Spans) -> Match:
        """Find the deepest place that a request extends, and mark the replies that it repeats as delivered."""
        ways = self._ways  # gets replaced when there is a second choice, perhaps by another thread
        known = way = self._way(head, spans)
        base, passed = (way.reply, way.size) if way else (None, 0)
        rest, at, plain = spans[passed:], 0, True  # spans before `at` are covered by `base`
        while True:
            context, reply, more = self._next(base, head, rest, at)
            if context is None and (parts := self._parted(base, head, rest[at])):
                rest[at : at + 1] = parts
                plain = False
            elif context is None or reply is None:
                break
            else:
                reply.delivered = True
                base, at = reply, at + len(context.key)  # the first part of a key is the head, see add_context
                rest[at:at] = more
                plain = plain and not more and self._alone(context)
                way = _Way(head, spans.identities, passed + at, reply) if plain else way
        if way is not None and way is not known:
            ways[:] = [*[one for one in ways if one is not known][1 - _WAYS :], way]
        return Match(base, context, tuple(rest[at:]))

    def _way(self, head: bytes, spans: Spans) -> _Way | None:
        """Return the longest known way of a conversation that goes on after it."""
        fitting = [
            way
            for way in self._ways
            if way.head == head and way.size < len(spans) and spans.identities[: way.size] == way.identities[: way.size]
        ]
        return max(fitting, key=lambda way: way.size, default=None)

    def _alone(self, context: Node) -> bool:
        """Tell whether no other context in the same place begins like this one, and this one has exactly one reply."""
        beside = (node.key[:2] == context.key[:2] for node in self.children(context.parent))
        return len(self.children(context)) == 1 and sum(beside) == 1

    def add_context(self, base: Node | None, head: bytes, rest: Sequence[Span], ids: list[int]) -> Node:
        """Append the context ``rest`` of a match, encoded as ``ids``, after ``base``; return the new node."""
        node = self._add(base, ids)
        node.key = (head, *(span.key for span in rest))
        node.exact = rest[-1].exact
        if any(other.key[:2] == node.key[:2] for other in self.children(base) if other is not node):
            self._ways = []
        return node

    def add_sampled(
        self,
        context: Node,
        ids: list[int],
        logprobs: list[float],
        reply: Reply,
        *,
        versions: tuple[int, ...] = (),
        experts: Any = None,
        **fields: Any,
    ) -> Node:
        """Append a sampled reply after ``context``; return the new node, which is not ``delivered`` yet.

        ``experts`` is the engine's routing from token ``routed(context)`` on, as in a Completion. ``fields``: others of
        the node. Raises ValueError if there are more or fewer logprobs or versions than ids, or too few tokens with
        their routing.
        """
        if len(ids) != len(logprobs):
            raise ValueError(f"engine returned {len(ids)} tokens but {len(logprobs)} logprobs")
        if versions and len(ids) != len(versions):
            raise ValueError(f"engine returned {len(ids)} tokens but {len(versions)} weight versions")
        if experts is not None:
            tokens = context.length + len(ids) - 1 - routed(context)
            if len(experts) < tokens:
                raise ValueError(f"engine returned the routing of {len(experts)} tokens instead of {tokens}")
            experts = experts[:tokens].copy()  # a view would keep what the engine sent, perhaps in shared memory
        if self.children(context):
            self._ways = []
        fields |= {"logprobs": untracked(logprobs), "reply": reply, "versions": versions, "experts": experts}
        node = self._add(context, ids, **fields)
        self._named |= dict.fromkeys((reply.id, *reply.tool_ids), node)
        if not reply.tool_ids:
            self._said.setdefault(reply.said, []).append(node)
        return node

    def _add(self, parent: Node | None, ids: list[int], **fields: Any) -> Node:
        node = Node(len(self.nodes), parent, untracked(ids), (parent.length if parent else 0) + len(ids), **fields)
        self.nodes.append(node)
        self.tokens += len(ids)
        (self._children.setdefault(parent.index, []) if parent else self.roots).append(node)
        return node

    def _next(
        self, base: Node | None, head: bytes, spans: Sequence[Span], at: int
    ) -> tuple[Node | None, Node | None, list[Span]]:
        """Return the child context of ``base`` that covers the most of ``spans[at:]``, its reply that comes next in
        them, and what the span of that reply has beside it.

        The reply is None if the context ends where the spans do; both are None if there is no such context.
        """
        start = (head, spans[at].key)
        found = [
            node
            for node in self.children(base)
            if node.key[:2] == start and (len(node.key) == 2 or node.key[1:] == _keys(spans, at, len(node.key) - 1))
        ]
        if len(found) > 1:  # the same but for what clients are known to rewrite, or one goes on where another one ends
            found.sort(key=lambda node: (-len(node.key), node.exact != spans[at + len(node.key) - 2].exact))
        for node in found:
            end = at + len(node.key) - 1
            if end < len(spans):
                reply, more = self._echoed(node, spans[end])
                if reply is not None:
                    return node, reply, more
            elif node.exact == spans[-1].exact:  # nobody has rewritten what is new
                return node, None, []
        return None, None, []

    def _echoed(self, context: Node, span: Span) -> tuple[Node | None, list[Span]]:
        """Return the sampled child that an assistant span repeats, and what else the span has after it."""
        if (reply := self._echo(self.children(context), span)) is not None:
            return reply, []
        if self._beside(span):
            for first, more in cuts(span):
                if (reply := self._echo(self.children(context), first)) is not None:
                    return reply, [more]
        return None, []

    def _echo(self, replies: Sequence[Node], span: Span) -> Node | None:
        """Return the one of ``replies`` that a span repeats, by our ids or else by its text."""
        for node in replies:  # most spans come back as they were sent
            if node.reply and span.tool_ids and span.tool_ids == node.reply.tool_ids and span.said == node.reply.said:
                return node
        if (named := self._by_id(span)) is not None or any(name in self._named for name in span.signatures):
            return named if named in replies else None
        alike = [node for node in replies if not span.tool_ids and _says(node, span.key)]
        if len(alike) > 1:
            text, thought = span.text.strip(), bool(span.signatures)
            alike.sort(key=lambda node: (_text(node).strip() != text, _thinks(node) != thought, not node.delivered))
        return alike[0] if alike else None

    def _by_id(self, span: Span) -> Node | None:
        """Return the reply that an assistant span names by our ids, if the span says nothing else."""
        for name in (*span.tool_ids, *span.signatures):
            node = self._named.get(name)
            if node is None or node.reply is None or not span.tool_ids <= node.reply.tool_ids:
                continue
            if not span.tool_ids and _says(node, span.key):
                return node
            # Beside calls, text may be left out, but not added.
            left_out = span.said in (node.reply.said, _SILENT) or squeezed(span.text) in squeezed(node.reply.text)
            if span.tool_ids and left_out:
                return node
        return None

    def _beside(self, span: Span) -> bool:
        """Tell whether an assistant span may have something beside a reply of ours."""
        return any(name in self._named for name in (*span.tool_ids, *span.signatures)) or len(span.messages()) > 1

    def recall(self, span: Span, before: Span) -> list[tuple[Span, Node | None]]:
        """Return the parts of an assistant span in a new place, each with the reply that it repeats, and mark these
        replies as delivered.

        ``before``: the span before it. Of replies with the same text, the one that followed the same span is taken, or
        else the latest that may have reached the client.
        """

        def find(part: Span) -> Node | None:
            if (node := self._by_id(part)) is not None:
                return node
            sent = [] if part.tool_ids else [n for n in self._said.get(part.key, ()) if n.delivered or n.sent]
            same = [node for node in sent if node.parent is not None and node.parent.key[-1] == before.key]
            return self._echo(same, part) or (self._echo(sent[::-1], part) if part is span else None)

        node = find(span)
        parts = (
            [(span, node)] if node is not None or not self._beside(span) else pieces_of(span, find) or [(span, node)]
        )
        for _, node in parts:
            if node is not None:
                node.delivered = True
        return parts

    def _parted(self, base: Node | None, head: bytes, span: Span) -> tuple[Span, Span, Span] | None:
        """Undo what Claude Code does to a reply without visible content, if it was done to ``span``.

        Claude Code drops such a reply and puts what comes next (a reminder to say something, a new prompt) into the
        message before it. Returns that message as it was, the reply, and what was put in; None if nothing was.
        """
        answered = {
            node.key[1]
            for node in self.children(base)
            if node.key[0] == head
            and len(node.key) == 2
            and any((c.delivered or c.pending) and _says(c, _SILENT) for c in self.children(node))
        }
        if answered:
            for stays, taken in partings(span):
                if stays.key in answered:
                    return stays, Span.of([], assistant=True), taken
        return None

    def sequences(self) -> list[TrainingSequence]:
        """Return the training rows, one per branch that ends in a delivered reply, in the order of those replies.

        A reply that several branches share is trained on in the first of them only. The prompt of a row is what comes
        before the first reply that the row trains on.
        """
        live = {node.index for node in self.nodes if node.sampled and node.delivered and node.trained}
        inner = {node.index for index in live for node in self.nodes[index].path()[:-1]}
        trained: set[int] = set()
        rows = []
        for leaf in sorted(live - inner):
            path = self.nodes[leaf].path()
            fresh = {node.index for node in path if node.index in live} - trained
            trained |= fresh
            rows.append(_row(path, fresh))
        return rows

    def unreported(self, reported: Collection[str], first: bool = True) -> list[Node]:
        """Return the delivered replies that are not the agent's own, judged by the ids of those that it reports.

        A conversation is the agent's if it is the ``first`` one, when nothing but the agent runs yet, or if the agent
        reports a reply in it. In such a conversation, the agent's own replies are the reported ones, those on the
        longest path, and all before them. A reply without calls is the agent's own, too, if it follows one of these or
        if its prompt begins like one of these conversations: it is the summary that Claude Code asks for when the
        context is full, and does not report (a second summary's prompt extends no other). So a command that tampers
        with the reports takes hardly anything out of training.
        """
        delivered = [(node.path()[0].index, node) for node in self.nodes if node.sampled and node.delivered]
        named = [(root, node) for root, node in delivered if node.reply is not None and node.reply.id in reported]
        own = {root for root, _ in named} | {root.index for root in self.roots[:first]}
        longest: dict[int, Node] = {}
        for root, node in delivered:
            if root in own and (root not in longest or node.length > longest[root].length):
                longest[root] = node
        ends = [*longest.values(), *(node for _, node in named)]
        known = {before.index for node in ends for before in node.path()}
        starts = {root.key[:2] for root in self.roots if root.index in own}

        def sums_up(node: Node) -> bool:
            if node.parent is None or node.reply is None or node.reply.tool_ids:
                return False
            last = node.parent.parent
            return node.parent.key[:2] in starts if last is None else last.index in known

        return [node for _, node in delivered if node.index not in known and not sums_up(node)]

    def replies(self, head: bytes | None, sent: bool = False) -> int:
        """Return the number of delivered (or of all ``sent``) replies in conversations with this head."""
        sampled = (node for node in self.nodes if node.sampled and (node.delivered or (sent and node.sent)))
        return sum(node.parent is not None and node.parent.key[0] == head for node in sampled)

    def sampled_tokens(self) -> int:
        """Return the number of tokens in sampled nodes, delivered or not."""
        return sum(len(node.ids) for node in self.nodes if node.sampled)


def routed(context: Node) -> int:
    """Return how many tokens at the beginning of a context's path had their routing recorded with earlier replies.

    The routing of the previous reply's last token was not known then: the engine had not read that token.
    """
    return context.parent.length - 1 if context.parent else 0


_SILENT = text_key("")


def _keys(spans: Sequence[Span], at: int, count: int) -> tuple[bytes, ...]:
    return tuple(span.key for span in spans[at : at + count])


def _says(sampled: Node, key: bytes) -> bool:
    """Tell whether a reply has no calls and its text has this key."""
    return sampled.reply is not None and not sampled.reply.tool_ids and sampled.reply.said == key


def _text(sampled: Node) -> str:
    return sampled.reply.text if sampled.reply else ""


def _thinks(sampled: Node) -> bool:
    return sampled.reply is not None and any(block["type"] == "thinking" for block in sampled.reply.blocks)


def _row(path: list[Node], fresh: set[int]) -> TrainingSequence:
    first = next(i for i, node in enumerate(path) if node.index in fresh)
    prompt = [token for node in path[:first] for token in node.ids]
    response: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    for node in path[first:]:
        train = node.index in fresh
        response += node.ids
        mask += [int(train)] * len(node.ids)
        logprobs += node.logprobs if train and node.logprobs is not None else [0.0] * len(node.ids)
    trained = [node for node in path if node.index in fresh]
    known = [version for node in trained for version in node.versions] or [0]
    nodes = tuple(node.index for node in trained)
    experts = tuple(node.experts for node in path if node.experts is not None)
    return TrainingSequence(prompt, response, mask, logprobs, nodes, (min(known), max(known)), experts)
