"""A trace is an episode as decision points: what a model had read, what it replied, and what became of that.

Whatever shows, exports or learns from the texts of an episode reads them from here, so no two programs can count its
replies differently. A point is known by its number alone: endpoints use the ids of messages and calls again.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rollout.agent.events import blocks, message_id
from rollout.proxy.blocks import Block, ChatMessage, assistant_chat, blocks_of, context_chat, flat
from rollout.proxy.calls import CallRecord
from rollout.proxy.messages import RequestError, Span, WireMessage, WireRequest, check_blocks, conversation
from rollout.records import NodeRecord, Record, path_of, unpack_floats, unpack_ids

Message = dict[str, Any]  # role and content, as they went over the wire


class TraceError(ValueError):
    """The messages of a record are not what a proxy writes. The message is one line."""


@dataclass
class Point:
    """A point is one reply of a model.

    ``number``: its place among the points, in the order in which they began. ``node``: its node in the session tree, -1
    for a forwarded call's. ``name``: the message's id, as the agent was told. ``after``: the number of the reply that
    it goes on from, -1 if it begins a conversation; ``read``: the messages that the model read after that one, in which
    a number stands for another point's reply. ``system`` and ``tools``: as they went over the wire. ``blocks``: the
    reply. ``kind``: main, agent (a sub-agent's, which the call ``caller`` started) or side; ``reported``: whether the
    agent's output names it. ``started``: Unix time; ``seconds``: of its generation. ``rows``: the rows that train it.
    """

    number: int
    node: int
    name: str
    blocks: list[Block]
    stop: str
    model: str
    after: int = -1
    read: list[Message | int] = field(default_factory=list)
    system: str | list[Block] = ""
    tools: list[dict[str, Any]] = field(default_factory=list)
    side: bool = False
    kind: str = "main"
    caller: str = ""
    reported: bool = False
    delivered: bool = True
    started: float = 0.0
    seconds: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)
    rows: list[int] = field(default_factory=list)


@dataclass
class Trace:
    """A trace is all that was said in an episode.

    ``rows``: by training row, the points that it trains; of forwarded calls, those that it would train. ``silent``:
    whether the messages that the policy read were not kept, as before version 4 of the format.
    """

    record: Record
    points: list[Point]
    rows: list[list[int]]
    silent: bool

    @property
    def delivered(self) -> list[Point]:
        """Return the points whose replies the agent has read."""
        return [point for point in self.points if point.delivered]

    def path(self, point: Point) -> list[Point]:
        """Return the points of a conversation up to ``point``."""
        path = [point]
        while path[-1].after >= 0:
            path.append(self.points[path[-1].after])
        return path[::-1]

    def context(self, point: Point) -> Iterator[tuple[Message, Point | None]]:
        """Iterate over the messages that the model had before a reply, each with the point whose reply it is."""
        for one in self.path(point):
            for part in one.read:
                if isinstance(part, int):
                    yield _reply(self.points[part]), self.points[part]
                else:
                    yield part, None
            if one is not point:
                yield _reply(one), one

    def tokens(self, point: Point) -> tuple[list[int], list[int], list[float]] | None:
        """Return the ids of a reply's prompt and of the reply, and its logprobs; None for a forwarded call."""
        if point.node < 0:
            return None
        nodes = self.record.nodes
        before = path_of(nodes, point.node)[:-1]
        prompt = [token for number in before for token in unpack_ids(nodes[number].ids)]
        return prompt, unpack_ids(nodes[point.node].ids), unpack_floats(nodes[point.node].logprobs or b"")

    def results(self) -> dict[tuple[int, int], Block]:
        """Return the tool_result blocks by (point, place of the call in its blocks): what the model read of them next,
        or else what the agent reports."""
        told: dict[str, list[Block]] = defaultdict(list)
        for event in self.record.events:
            for block in _results(blocks(event, "user")):
                told[str(block.get("tool_use_id"))].append(block)
        heard: dict[int, list[Block]] = defaultdict(list)
        for point in self.points:
            if point.after >= 0:
                heard[point.after] += [b for m in point.read if not isinstance(m, int) for b in _results(_blocks(m))]
        found: dict[tuple[int, int], Block] = {}
        for point in self.points:
            for place, block in enumerate(point.blocks):
                if block.get("type") == "tool_use":
                    name = str(block.get("id"))
                    reported = told[name].pop(0) if told[name] else None
                    fits = (one for one in heard[point.number] if str(one.get("tool_use_id")) == name)
                    if (result := next(fits, reported)) is not None:
                        heard[point.number] = [one for one in heard[point.number] if one is not result]
                        found[point.number, place] = result
        return found


def chat_of(messages: Sequence[Message]) -> list[ChatMessage]:
    """Return messages in chat form, as the chat template is given them."""
    made: list[ChatMessage] = []
    for message in messages:
        said = blocks_of(message["content"])
        made += assistant_chat(said) if message["role"] == "assistant" else context_chat(message["role"], said)
    return made


def system_of(point: Point) -> list[ChatMessage]:
    """Return the system prompt in chat form: one message, or none."""
    text = flat(point.system)
    return [{"role": "system", "content": text}] if text else []


def _reply(point: Point) -> Message:
    return {"role": "assistant", "content": point.blocks}


def _blocks(message: Message) -> list[Block]:
    content = message.get("content")
    if isinstance(content, list):
        return [one for one in content if isinstance(one, dict)]
    return [{"type": "text", "text": content}] if isinstance(content, str) else []


def sound(content: Any) -> list[Block]:
    """Return the blocks of a content, none if it is no list. What is none of the Messages API becomes a text: endpoints
    say anything, and take anything from other programs in the box."""
    said = content if isinstance(content, list) else []
    return [one if _checks(one) else {"type": "text", "text": json.dumps(one, ensure_ascii=False)} for one in said]


def _checks(block: Any) -> bool:
    try:
        check_blocks([block], "")
    except (RequestError, AttributeError):
        return False
    return True


def _results(said: Sequence[Block]) -> list[Block]:
    return [block for block in said if block.get("type") == "tool_result"]


def trace(record: Record) -> Trace:
    """Return the trace of an episode. Raises TraceError."""
    nodes, kept = record.nodes, {call.node: call for call in record.calls if call.node >= 0}
    there = {*range(len(record.parts))}
    for call in record.calls:
        if not call.messages or not there.issuperset((*call.messages, call.system, call.tools)):
            raise TraceError("a call whose messages are not there")
    begun: list[tuple[float, int, CallRecord | None]] = [
        (kept[number].started if number in kept else node.started, number, None)
        for number, node in enumerate(nodes)
        if node.logprobs is not None
    ]
    begun += [(call.started, len(nodes) + at, call) for at, call in enumerate(record.calls) if call.node < 0]
    points: list[Point] = []
    places: dict[int, int] = {}
    known = _ForwardedCalls()
    for _, number, call in sorted(begun, key=lambda one: one[:2]):
        if call is None:
            places[number] = len(points)
            points.append(_sampled(record, number, len(points), kept.get(number)))
        else:
            points.append(_forwarded(record, call, len(points), known))
    for point in points:
        if point.node >= 0:
            _goes_on(record, point, places, kept)
    _threads(record, points)
    rows = [[places[node] for node in row.nodes if node in places] for row in record.rows]
    if not nodes:
        rows = _rows(record, points)
    for number, row in enumerate(rows):
        for place in row:
            points[place].rows.append(number)
    silent = any(node.logprobs is None and not node.says for node in nodes) and not kept
    return Trace(record, points, rows, silent)


# --- replies that were sampled


def _sampled(record: Record, number: int, place: int, call: CallRecord | None) -> Point:
    node = record.nodes[number]
    point = Point(place, number, node.message_id, sound(node.blocks), node.stop_reason, record.model)
    point.side, point.delivered = node.side, node.delivered
    point.started, point.seconds = (call.started, call.seconds) if call else (node.started, node.seconds)
    prompt = sum(record.nodes[one].length for one in path_of(record.nodes, number)[:-1])
    point.usage = {"input_tokens": prompt, "output_tokens": node.length}
    return point


def _goes_on(record: Record, point: Point, places: dict[int, int], kept: dict[int, CallRecord]) -> None:
    """Say what a sampled reply goes on from, and what was read after that."""
    nodes, at, contexts = record.nodes, record.nodes[point.node].parent, list[NodeRecord]()
    root = point.node
    while 0 <= at < root:
        root = at
        if at in places:
            break
        contexts.insert(0, nodes[at])
        at = nodes[at].parent
    point.after = places.get(root, -1) if root < point.node else -1
    if call := kept.get(point.node):  # before version 4
        old = len(kept[at].messages) if at in kept else 0  # the same ones, but for marks of what to cache
        added = [_json(record.parts[place]) for place in call.messages[old:]]
        point.read = [one for one in added if one.get("role") != "assistant"]
        point.system, point.tools = _head(record.parts[call.system], record.parts[call.tools])
        return
    for context in contexts:
        for part in _json(context.says, list[Any]) if context.says else ():
            if isinstance(part, int) and not (part in places and part < point.node):
                raise TraceError(f"node {point.node} was asked with a reply {part} that is not there")
            point.read.append(places[part] if isinstance(part, int) else _message(part))
    first = path_of(nodes, point.node)[0]
    if nodes[first].head:
        point.system, point.tools = _head(*_json(nodes[first].head, tuple[msgspec.Raw, msgspec.Raw]))


def _json(text: bytes | msgspec.Raw, kind: Any = Any) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(f"a message that cannot be read: {error}") from error


def _message(part: Any) -> Message:
    if not isinstance(part, dict) or not isinstance(part.get("role"), str):
        raise TraceError("a message without a role")
    content = part.get("content")
    if not isinstance(content, str | list):
        raise TraceError("a message whose content is neither text nor blocks")
    return part if isinstance(content, str) else {**part, "content": sound(content)}


def _head(system: bytes | msgspec.Raw, tools: bytes | msgspec.Raw) -> tuple[Any, list[dict[str, Any]]]:
    prompt, offered = _json(system) or "", _json(tools) or []
    if not isinstance(offered, list) or not all(isinstance(one, dict) for one in offered):
        raise TraceError("tools that are no list")
    if not isinstance(prompt, str | list):
        raise TraceError("a system prompt that is neither text nor blocks")
    return prompt if isinstance(prompt, str) else sound(prompt), offered


# --- replies of another endpoint


class _ForwardedCalls:
    """These are the forwarded calls so far: ``ends`` by the key of a conversation with its reply, ``said`` by that of
    the reply alone."""

    def __init__(self) -> None:
        self.ends: dict[bytes, int] = {}
        self.said: dict[bytes, list[Point]] = defaultdict(list)

    def add(self, key: bytes, point: Point) -> None:
        """Add a point whose context has a key."""
        said = Span.of([WireMessage("assistant", point.blocks)], assistant=True).key
        self.ends[_joined(key, said)] = point.number
        self.said[said].append(point)

    def repeated(self, span: Span) -> int | None:
        """Return the latest point whose reply an assistant's span repeats."""
        sent = [block for message in span.messages() for block in blocks_of(message.content)]
        return next((one.number for one in reversed(self.said.get(span.key, ())) if _repeats(sent, one.blocks)), None)


def _repeats(sent: Sequence[Block], said: Sequence[Block]) -> bool:
    """Tell whether calls are repeated. An endpoint may use ids again; clients add defaults to inputs."""
    mine, theirs = ([b for b in one if b.get("type") == "tool_use"] for one in (said, sent))
    return len(mine) == len(theirs) and all(
        a.get("name") == b.get("name") and dict(a.get("input") or {}).items() <= dict(b.get("input") or {}).items()
        for a, b in zip(mine, theirs, strict=True)
    )


def _forwarded(record: Record, call: CallRecord, number: int, known: _ForwardedCalls) -> Point:
    """Return the point of a forwarded call. It goes on from another if it repeats its messages and its reply, whatever
    clients are known to rewrite (``rollout.proxy.messages.Span``)."""
    reply, model = call.reply, str(call.reply.get("model") or record.model)
    said = sound(reply.get("content"))
    point = Point(number, -1, str(reply.get("id") or ""), said, str(reply.get("stop_reason")), model)
    point.side, point.started, point.seconds = call.side, call.started, call.seconds
    point.usage = used if isinstance(used := reply.get("usage"), dict) else {}
    parts = [msgspec.Raw(record.parts[place]) for place in call.messages]
    head = msgspec.Raw(record.parts[call.system]), msgspec.Raw(record.parts[call.tools])
    point.system, point.tools = _head(*head)
    try:
        talk = conversation(WireRequest(parts, system=head[0], tools=head[1]))
    except RequestError:  # the endpoint has answered what our own proxy would refuse
        point.read = [_message(_json(part)) for part in parts]
        return point
    key, keys = talk.head.key, list[bytes]()
    for span in talk.spans:
        keys.append(key := _joined(key, span.key))
    start = next((n for n in reversed(range(len(keys))) if keys[n] in known.ends), -1)
    point.after = known.ends[keys[start]] if start >= 0 else -1
    for span in talk.spans[start + 1 :]:
        again = known.repeated(span) if span.assistant else None
        point.read += [_message(_json(part)) for part in span.wire()] if again is None else [again]
    known.add(key, point)
    return point


def _joined(key: bytes, more: bytes) -> bytes:
    return hashlib.sha256(key + more).digest()


def _rows(record: Record, points: Sequence[Point]) -> list[list[int]]:
    """Return what forwarded calls would train: a row for each conversation that nobody goes on with.

    As ``Session.disown`` does it: if the agent reports its replies, those that it does not report are not its own,
    unless a reported one goes on from them, or they have no calls and begin as one of the agent's conversations.
    """
    own = set(range(len(points)))
    if record.agent.get("reports"):
        roots = [one.number for one in points]
        for one in points:
            roots[one.number] = roots[one.after] if one.after >= 0 else one.number
        named = [one for one in points if one.reported]
        starts = {_start(points[roots[one.number]]) for one in [*points[:1], *named]}
        own = {one.number for one in points if one.side}
        for one in named:
            at = one.number
            while at >= 0 and at not in own:
                own.add(at)
                at = points[at].after
        own |= {
            one.number
            for one in points
            if _start(points[roots[one.number]]) in starts and not any(b.get("type") == "tool_use" for b in one.blocks)
        }
    return ends(points, own)


def ends(points: Sequence[Point], own: set[int]) -> list[list[int]]:
    """Return, of the points that are the agent's own, the conversations that nobody goes on with: each point in the
    first one that has it."""
    rows, left = list[list[int]](), set(own)
    for number in sorted(own - {points[one].after for one in own}):
        row, at = [], number
        while at >= 0:
            row += [at] if at in left else []
            at = points[at].after
        left.difference_update(row)
        rows.append(row[::-1])
    return rows


def _start(root: Point) -> str:
    return str((root.system, root.tools, root.read[:1]))


# --- threads


def _threads(record: Record, points: list[Point]) -> None:
    """Say which thread each reply is in, as the agent's events tell."""
    named: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        named[point.name].append(point)
    left = {point.number: list(point.blocks) for point in points}
    for event in record.events:
        for block in blocks(event, "assistant"):
            found = named.get(message_id(event), ())
            if len(found) > 1:  # an endpoint that uses its ids again
                found = [one for one in found if any(_same(block, other) for other in left[one.number])]
            if found:
                point = found[0]
                left[point.number] = _without(left[point.number], block)
                if not point.reported:  # a program in the box can repeat a report
                    point.reported, point.caller = True, str(event.get("parent_tool_use_id") or "")
    roots: dict[int, int] = {}
    first: dict[int, Point] = {}
    for point in sorted(points, key=lambda one: one.node if one.node >= 0 else one.number):
        root = roots[point.number] = roots.get(point.after, point.number) if point.after >= 0 else point.number
        before = points[point.after] if point.after >= 0 else None
        if not point.reported and not point.side and (before or first.get(root)):
            point.caller = (before or first[root]).caller
        if point.reported:
            first.setdefault(root, point)
        point.kind = "side" if point.side else "agent" if point.caller else "main"


def _same(one: Block, other: Block) -> bool:
    """Tell whether two blocks are the same; Claude Code adds defaults to the input of calls."""
    names = ("type", "id", "name") if one.get("type") == "tool_use" else ("type", "text", "thinking")
    return all(one.get(name) == other.get(name) for name in names)


def _without(said: list[Block], block: Block) -> list[Block]:
    at = next((place for place, one in enumerate(said) if _same(block, one)), None)
    return said if at is None else said[:at] + said[at + 1 :]
