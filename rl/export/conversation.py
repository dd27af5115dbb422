"""This module makes conversations, which are chat messages in OpenAI's form, from an episode's record.

A conversation is one training row: a chain of calls in which each prompt extends the one before it, so the main thread,
each sub-agent, and what follows a compaction are conversations of their own. Its replies are those that were sampled,
with thinking and calls, not what the agent sent back of them. Its context is what the policy read: in a collection, the
messages that went over the wire; in all other records, token ids that are read back (``rl.export.unrender``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rl.collect.dataset import calls_of, reply_of
from rl.export.unrender import Unreadable, Unrenderer
from rollout import SIDE_MODEL
from rollout.agent.events import blocks, message_id
from rollout.proxy.calls import CallRecord
from rollout.proxy.messages import ChatMessage, RequestError, Span, WireMessage, WireRequest
from rollout.proxy.replies import Reply
from rollout.proxy.session import Policy, Session
from rollout.records import Record, path_of, unpack_ids

_TAIL = 8  # ids before a context that its encoding may depend on


@dataclass(frozen=True)
class Said:
    """A Said tells where a reply of a conversation comes from. ``name``: the message's id; ``node``: its node in
    the record's tree, -1 for a hosted model's; ``call``: the record of its call in a collection; ``fresh``: no
    earlier conversation has the reply."""

    name: str
    node: int
    call: CallRecord | None
    fresh: bool


@dataclass
class Conversation:
    """A conversation has messages in chat form: role, content (a text), and for the assistant reasoning_content and
    tool_calls, whose arguments are objects.

    ``replies``: by place in ``messages``, those that the policy sampled; other assistant messages are the agent's own.
    ``kind``: main, agent (a sub-agent's) or side; ``caller``: the id of the call that started the sub-agent.
    """

    record: Record
    messages: list[ChatMessage]
    tools: list[dict[str, Any]]
    replies: dict[int, Said]
    kind: str = "main"
    caller: str = ""

    @property
    def resolved(self) -> bool:
        """Tell whether the episode resolved its task."""
        return self.record.verdict["outcome"] == "resolved"


@dataclass
class _Talk:
    """A talk is an episode's tree with messages: what each context says, and which replies are in which row."""

    parents: list[int] = field(default_factory=list)
    context: dict[int, list[ChatMessage | int]] = field(default_factory=dict)  # a number is a reply in a new place
    tools: dict[int, list[dict[str, Any]]] = field(default_factory=dict)  # by the number of a root
    replies: dict[int, tuple[str, list[dict[str, Any]], int, CallRecord | None]] = field(default_factory=dict)
    rows: list[list[int]] = field(default_factory=list)


def conversations(record: Record, unrenderer: Callable[[str], Unrenderer]) -> list[Conversation]:
    """Return the conversations of an episode, in the order in which they ended.

    unrenderer: returns what reads the contexts of a policy, by the record's ``model``; it is not called for a
    collection. Raises Unreadable.
    """
    if record.calls:
        talk = _heard(record)
    elif record.nodes:
        talk = _decoded(record, unrenderer(record.model))
    else:
        raise Unreadable("it has neither tokens nor messages: a hosted model must be collected (rollout.collect)")
    parents = {name: parent for name, parent in _reported(record)}
    return [_conversation(record, talk, row, parents) for row in talk.rows]


def _conversation(record: Record, talk: _Talk, row: list[int], parents: Mapping[str, str]) -> Conversation:
    path = [max(row)]
    while talk.parents[path[-1]] >= 0:
        path.append(talk.parents[path[-1]])
    path.reverse()
    messages: list[ChatMessage] = []
    replies: dict[int, Said] = {}
    names: dict[str, str] = {}  # by the id of a call, the tool that it is for
    for place in path:
        for part in talk.context.get(place, [place]):
            if isinstance(part, int):
                name, said, node, call = talk.replies[part]
                replies[len(messages)] = Said(name, node, call, place in row)
                messages += chat_of(said)
                names |= {one["id"]: one["function"]["name"] for one in messages[-1].get("tool_calls", ())}
            else:
                called = names.get(part.get("tool_call_id", ""))
                messages.append({**part, "name": called} if called else part)
    made = Conversation(record, messages, talk.tools[path[0]], replies)
    calls = [said.call for said in replies.values() if said.fresh and said.call]
    nodes = [record.nodes[said.node] for said in replies.values() if said.fresh and said.node >= 0]
    made.caller = next((parents[s.name] for s in replies.values() if parents.get(s.name)), "")
    made.kind = "agent" if made.caller else "side" if any(one.side for one in [*calls, *nodes]) else "main"
    return made


def chat_of(said: list[dict[str, Any]]) -> list[ChatMessage]:
    """Return the content blocks of a reply as a chat message: thinking and text joined, then the calls."""
    return Span.of([WireMessage("assistant", said)], assistant=True).chat


def _reported(record: Record) -> Iterator[tuple[str, str]]:
    """Yield (message id, id of the call that started the sub-agent or "") of what the agent reports."""
    for event in record.events:
        if blocks(event, "assistant"):
            yield message_id(event), str(event.get("parent_tool_use_id") or "")


# --- from messages that went over the wire ------------------------------------------------------------


class _Pieces:
    """This renderer keeps messages, and gives their numbers for token ids. Replies have numbers below 0."""

    def __init__(self) -> None:
        self.kept: list[list[ChatMessage]] = []
        self.tools: dict[int, list[dict[str, Any]]] = {}

    def start(self, messages: list[ChatMessage], tools: list[dict[str, Any]]) -> list[int]:
        self.tools[len(self.kept)] = tools
        return self.extend((), True, messages)

    def extend(self, tail: Sequence[int], ended: bool, messages: list[ChatMessage]) -> list[int]:
        self.kept.append(messages)
        return [len(self.kept) - 1]


def _heard(record: Record) -> _Talk:
    """Match the calls of a collection with each other as the proxy does, by giving them to a session again."""
    pieces, talk = _Pieces(), _Talk()
    nothing: Any = None  # nothing has to sample or parse: all replies are there
    many = 1 << 60
    session = Session("export", Policy(nothing, pieces, nothing, nothing, frozenset(), many, many))
    for call in calls_of(record):
        request = WireRequest(
            [msgspec.Raw(record.parts[place]) for place in call.messages],
            model=SIDE_MODEL if call.side else "",
            system=msgspec.Raw(record.parts[call.system]),
            tools=msgspec.Raw(record.parts[call.tools]),
        )
        name, said, stopped = reply_of(record, call)
        try:
            context = session.prepare(request, retry=False).context
        except RequestError as error:
            raise Unreadable(f"a request of it cannot be read: {error}") from error
        reply = Reply(name, tuple(said), stopped, 0, 0)
        node = session.tree.add_sampled(context, [-1 - len(talk.replies)], [0.0], reply, text=reply.text, ended=True)
        place = record.nodes[call.node] if call.node >= 0 else None
        node.sent = node.delivered = place is None or place.delivered
        node.trained = place is None or place.trained
        talk.replies[node.index] = name, said, call.node, call
    if record.agent.get("reports") and not record.nodes:
        session.disown({name for name, _ in _reported(record)})
        for place, (*_, call) in talk.replies.items():  # Claude Code reports no side calls
            session.tree.nodes[place].trained |= call is not None and call.side
    numbers = list(talk.replies)
    for node in session.tree.nodes:
        talk.parents.append(node.parent.index if node.parent else -1)
        if node.index not in talk.replies:
            parts = [[numbers[-1 - n]] if n < 0 else pieces.kept[n] for n in node.ids]
            talk.context[node.index] = [part for group in parts for part in group]
            if node.parent is None:
                talk.tools[node.index] = pieces.tools[node.ids[0]]
    talk.rows = [list(row.nodes) for row in session.tree.sequences()]
    return talk


# --- from tokens -------------------------------------------------------------------------------------


def _decoded(record: Record, unrenderer: Unrenderer) -> _Talk:
    talk = _Talk([node.parent for node in record.nodes], rows=[row.nodes for row in record.rows])
    results = _results(record)
    wanted = {place for row in talk.rows for place in path_of(record.nodes, max(row))}
    for place, node in enumerate(record.nodes):
        if node.logprobs is not None:
            talk.replies[place] = node.message_id, node.blocks, place, None
        elif place in wanted:
            reader = _Context(record, unrenderer, results)
            talk.context[place] = reader.read(unpack_ids(node.ids), node.parent, place)
            if node.parent < 0:
                talk.tools[place] = reader.tools
    return talk


class _Context:
    """This reads one context: messages, and replies in a new place (Claude Code keeps the last when it compacts)."""

    def __init__(self, record: Record, unrenderer: Unrenderer, results: Mapping[str, str]) -> None:
        self._record, self._unrenderer, self._results = record, unrenderer, results
        self.tools: list[dict[str, Any]] = []

    def read(self, ids: list[int], base: int, place: int) -> list[ChatMessage | int]:
        """Return what ``ids`` say after the reply ``base``. ``place``: of the context; only replies before it are
        looked for in it. Raises Unreadable."""
        try:
            return list(self._piece(ids, base))
        except Unreadable:
            for reply in reversed(range(place)):  # of those that say the same, the latest
                node = self._record.nodes[reply]
                said = unpack_ids(node.ids) if node.logprobs is not None else []
                for at in _places(ids, said):
                    try:
                        first = self._piece(ids[:at], base)
                        return [*first, reply, *self.read(ids[at + len(said) :], reply, place)]
                    except Unreadable:
                        continue
            return list(self._piece(ids, base, told=True))

    def _piece(self, ids: list[int], base: int, told: bool = False) -> list[ChatMessage]:
        if base < 0:
            messages, self.tools = self._unrenderer.start(ids, self._record.tools, told)
            return messages
        node = self._record.nodes[base]
        calls = [call for message in chat_of(node.blocks) for call in message.get("tool_calls", ())]
        messages = self._unrenderer.extend(unpack_ids(node.ids)[-_TAIL:], node.ended, ids, calls, told)
        return _assigned(messages, calls, self._results)


def _places(ids: list[int], part: list[int]) -> Iterator[int]:
    """Yield where ``part`` is in ``ids``, not at the end."""
    for at in range(1, len(ids) - len(part)) if part else ():
        if ids[at] == part[0] and ids[at : at + len(part)] == part:
            yield at


def _results(record: Record) -> dict[str, str]:
    """Return the texts of tool results that the agent reports, by the ids of the calls."""
    found = {}
    for event in record.events:
        for block in blocks(event, "user"):
            if block.get("type") == "tool_result":
                content = block.get("content")
                parts = content if isinstance(content, list) else [{"text": content}]
                texts = [part.get("text") for part in parts if isinstance(part, dict)]
                found[str(block.get("tool_use_id"))] = "\n".join(text for text in texts if isinstance(text, str))
    return found


def _assigned(
    messages: list[ChatMessage], calls: Sequence[ChatMessage], results: Mapping[str, str]
) -> list[ChatMessage]:
    """Give each tool result the call that it answers: templates write no ids, and parallel calls may be answered in
    another order. A result belongs to the call whose reported text it begins with, else to the next call."""
    tools = [message for message in messages if message["role"] == "tool"]
    left = list(calls)
    answers: dict[int, Any] = {}
    for sure in (True, False):
        for number, message in enumerate(tools):
            fits = [
                one for one in left if not sure or ((t := results.get(one["id"])) and message["content"].startswith(t))
            ]
            if number not in answers and fits:
                answers[number] = fits[0]
                left.remove(fits[0])
    for number, message in enumerate(tools):
        message["tool_call_id"] = answers[number]["id"]
    return messages
