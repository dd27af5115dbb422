"""The session tree: every token of an episode exactly once, and the training sequences that follow from it.

Nodes alternate. A *context* node holds what the policy reads (encoded once, when it arrived) up to and including
the generation prompt; a *sampled* node holds one reply, as sampled. An edge means "comes after", so a path from a
root is exactly a prompt that the engine has seen, and a new request extends the deepest path that it matches.

Plain data and pure functions: no I/O, no clock, no randomness. Invariants (architecture.md, 1 and 2) are held here:
nothing that was sampled is ever encoded again, and ``sequences()`` puts every delivered sampled token into exactly
one sequence with mask 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.proxy.messages import Span, partings, text_key
from rollout.proxy.replies import Reply


@dataclass(eq=False)
class Node:
    """One piece of an episode.

    ``ids``: token ids, a delta to the parent's path. A sampled node also has ``logprobs`` (one per id, the
    engine's own), the ``reply`` that the client was sent, and ``delivered``: the client got all of it.
    ``versions``: the weight version of each id, empty if unknown. ``trained``: False for a reply that the trainer
    must not see (a side call that is only served); it is context to whatever comes after it. ``experts``: the engine's
    routing (`engine.Completion`) of the tokens that no earlier call on this path had.
    """

    index: int
    parent: Node | None
    ids: list[int]
    length: int  # tokens from the root up to and including this node
    key: tuple[bytes, ...] = ()
    logprobs: list[float] | None = None
    reply: Reply | None = None
    text: str = ""
    delivered: bool = False
    ended: bool = True  # the reply closed its turn itself (sampled an end token)
    versions: tuple[int, ...] = ()
    trained: bool = True
    tools_allowed: bool = True  # False: the client had forbidden calls, so none were looked for
    experts: Any = None
    children: list[Node] = field(default_factory=list)

    @property
    def sampled(self) -> bool:
        return self.logprobs is not None

    def path(self) -> list[Node]:
        """The nodes from the root to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def path_ids(self) -> list[int]:
        ids: list[int] = []
        for node in self.path():
            ids += node.ids  # twenty times a comprehension's speed, and a context has many
        return ids


@dataclass(frozen=True)
class TrainingSequence:
    """One training row. ``mask`` and ``logprobs`` have the length of ``response_ids``; where the mask is 0 the
    logprob is 0.0. ``nodes`` are the indices of the sampled nodes that this row trains; ``versions``: the lowest and
    the highest weight version that sampled them, (0, 0) if unknown. ``experts``: the engine's routing of all tokens but
    the last, as arrays to be put one behind the other; empty unless it was recorded."""

    prompt_ids: list[int]
    response_ids: list[int]
    mask: list[int]
    logprobs: list[float]
    nodes: tuple[int, ...]
    versions: tuple[int, int]
    experts: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Match:
    """Where a request joins the tree. ``base``: the deepest sampled node it extends (None: a new root);
    ``context``: the context node that already holds exactly the rest, if there is one;
    ``rest``: the spans after ``base``, never empty, the last one is context."""

    base: Node | None
    context: Node | None
    rest: tuple[Span, ...]


class Tree:
    """All calls of one episode."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.roots: list[Node] = []
        self.tokens = 0  # of all nodes together

    def match(self, head: bytes, spans: Sequence[Span]) -> Match:
        """Find the deepest place that the request extends. An echoed reply proves that it was delivered."""
        spans = list(spans)
        base: Node | None = None
        start, at = 0, 0  # spans before `start` are covered by `base`
        while True:
            context = self._context(base, head, spans, at)
            if context is None and (parts := self._parted(base, head, spans[at])):
                spans[at : at + 1] = parts
                continue
            if context is None:
                return Match(base, None, tuple(spans[start:]))
            at += len(context.key) - 1  # the first part of a key is the head, see add_context
            if at == len(spans):
                return Match(base, context, tuple(spans[start:]))
            reply = _echoed(context, spans[at])
            if reply is None:
                return Match(base, None, tuple(spans[start:]))
            reply.delivered = True
            base, at = reply, at + 1
            start = at

    def add_context(self, base: Node | None, head: bytes, rest: Sequence[Span], ids: list[int]) -> Node:
        """Append encoded context (``rest`` of a match) after ``base``."""
        node = self._add(base, ids)
        node.key = (head, *(span.key for span in rest))
        return node

    def add_sampled(
        self,
        context: Node,
        ids: list[int],
        logprobs: list[float],
        reply: Reply,
        *,
        text: str,
        ended: bool,
        versions: tuple[int, ...] = (),
        trained: bool = True,
        tools_allowed: bool = True,
        experts: Any = None,
    ) -> Node:
        """Append a sampled reply after ``context``; it counts once ``delivered`` is set."""
        if len(ids) != len(logprobs):
            raise ValueError(f"engine returned {len(ids)} tokens but {len(logprobs)} logprobs")
        if versions and len(ids) != len(versions):
            raise ValueError(f"engine returned {len(ids)} tokens but {len(versions)} weight versions")
        node = self._add(context, ids)
        node.logprobs, node.reply, node.text, node.ended, node.versions = logprobs, reply, text, ended, versions
        node.trained, node.tools_allowed = trained, tools_allowed
        if experts is not None:
            # The last token of the reply before was sampled and not yet read. A copy, or the whole array would stay.
            known = context.parent.length - 1 if context.parent else 0
            node.experts = experts[known : node.length - 1].copy()
        return node

    def _add(self, parent: Node | None, ids: list[int]) -> Node:
        node = Node(len(self.nodes), parent, ids, (parent.length if parent else 0) + len(ids))
        self.nodes.append(node)
        self.tokens += len(ids)
        (parent.children if parent else self.roots).append(node)
        return node

    def _context(self, base: Node | None, head: bytes, spans: Sequence[Span], at: int) -> Node | None:
        """The child context of ``base`` that covers most of ``spans[at:]``."""
        best: Node | None = None
        for node in base.children if base else self.roots:
            if node.key[0] != head or (best and len(node.key) <= len(best.key)):
                continue
            if len(node.key) - 1 <= len(spans) - at and all(
                key == spans[at + i].key for i, key in enumerate(node.key[1:])
            ):
                best = node
        return best

    def _parted(self, base: Node | None, head: bytes, span: Span) -> tuple[Span, Span, Span] | None:
        """A reply that shows nothing is dropped by Claude Code, and what comes next (a nudge, a new prompt) is put
        into the message before it. Returns that message as it was, the reply, and what was put in."""
        silent = text_key("")
        answered = {
            node.key[1]
            for node in (base.children if base else self.roots)
            if node.key[0] == head
            and len(node.key) == 2
            and any(c.delivered and _says(c, silent) for c in node.children)
        }
        if answered:
            for stays, taken in partings(span):
                if stays.key in answered:
                    return stays, Span.of([], assistant=True), taken
        return None

    def sequences(self) -> list[TrainingSequence]:
        """The training rows: one per branch that ends in a delivered reply, in the order of those replies.

        A reply that several branches share is trained in the first of them only. What comes before the first
        trained reply of a row is its prompt.
        """
        live = {node.index for node in self.nodes if node.sampled and node.delivered and node.trained}
        inner: set[int] = set()
        for index in live:
            for node in self.nodes[index].path()[:-1]:
                inner.add(node.index)
        trained: set[int] = set()
        rows = []
        for leaf in sorted(live - inner):
            path = self.nodes[leaf].path()
            fresh = {node.index for node in path if node.index in live} - trained
            trained |= fresh
            rows.append(_row(path, fresh))
        return rows

    def sampled_tokens(self) -> int:
        return sum(len(node.ids) for node in self.nodes if node.sampled)

    def encoded_tokens(self) -> int:
        return sum(len(node.ids) for node in self.nodes if not node.sampled)


def _echoed(context: Node, span: Span) -> Node | None:
    """The sampled child that an assistant span is an echo of: by our tool_use ids, else by its text."""
    for child in sorted(context.children, key=lambda child: not child.delivered):
        if child.reply is None:
            continue
        if child.reply.tool_ids & span.tool_ids or (not span.tool_ids and _says(child, span.key)):
            return child
    return None


def _says(sampled: Node, key: bytes) -> bool:
    """Whether a reply without calls is the text with this key."""
    return sampled.reply is not None and not sampled.reply.tool_ids and text_key(sampled.reply.text) == key


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
