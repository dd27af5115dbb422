"""This module makes of a record what a person reads: turns with their texts, calls, results and sub-agents. It is pure.

A turn is one reply. Replies come from the session tree, or, of a hosted model, from what went over the wire or the
agent's own events. Results of calls are what the agent reports of its tools.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import msgspec

from rewards.verdict import Outcome
from rollout.agent.events import blocks, message_id
from rollout.audit import audit_heard, audit_tokens
from rollout.reading import FormatReading
from rollout.records import NodeRecord, Record, unpack_floats, unpack_ids

_NODE = re.compile(r"^node (\d+): ")
_COMPACTED = "(The agent compacted the conversation here.)"


@dataclass
class Result:
    """A result is what a tool answered, as the agent reports it. ``failed``: the tool says that it failed."""

    text: str
    failed: bool = False


@dataclass
class Part:
    """A part is one content block of a reply: ``kind`` text, thinking or call.

    ``name``, ``id`` and ``arguments`` are a call's; ``inner`` are the turns of the sub-agent that it started.
    """

    kind: str
    text: str = ""
    name: str = ""
    id: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    result: Result | None = None
    inner: list[Turn] = field(default_factory=list)

    @property
    def written(self) -> str:
        """Return what it says: of a call its name and arguments."""
        return f"{self.name} {json.dumps(self.arguments, ensure_ascii=False)}" if self.kind == "call" else self.text


@dataclass
class Turn:
    """A turn is one sampled reply, and what came before it.

    ``number`` counts from 1 in the order of time; ``node``: of the tree, -1 without one; ``kind``: main, agent (a
    sub-agent's, started by the call ``caller``) or side. ``after``: the turn that it goes on from, 0 if it begins a
    conversation; ``notice``: what is unusual about that. ``context``: the nodes that were read in addition;
    ``asked``: messages, (role, text), where these were kept; ``told``: texts that the agent put before it.
    ``sampled``: the text of all tokens; ``differs``: how what the agent received differs from that. ``rows``: the
    training rows that it is in; ``untrained``: why it is in none. ``mean``, ``least``: log-probabilities.
    """

    number: int
    node: int
    name: str
    parts: list[Part]
    kind: str = "main"
    caller: str = ""
    after: int = 0
    notice: str = ""
    context: list[int] = field(default_factory=list)
    context_tokens: int = 0
    asked: list[tuple[str, str]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    sampled: str = ""
    differs: list[str] = field(default_factory=list)
    stop: str = ""
    tokens: int = 0
    sent: int = 1
    versions: tuple[int, int] | None = None
    mean: float | None = None
    least: float | None = None
    rows: list[int] = field(default_factory=list)
    untrained: str = ""
    findings: list[str] = field(default_factory=list)


@dataclass
class Reading:
    """A reading is an episode as a person reads it.

    ``turns`` are all, in the order of time; ``main`` those that are not shown inside of others. ``findings``: of the
    audit, without the check of texts; ``ending``: what the agent said of its own end.
    """

    record: Record
    turns: list[Turn]
    main: list[Turn]
    findings: list[str]
    ending: str = ""

    def texts(self) -> Iterator[tuple[Turn, str, int, str]]:
        """Iterate over (turn, what, number of the part, text) of all that is said and answered."""
        for turn in self.turns:
            for number, part in enumerate(turn.parts):
                yield turn, part.kind, number, part.written
                if part.result:
                    yield turn, "result", number, part.result.text
            for number, text in enumerate(turn.told):
                yield turn, "told", number, text
            for number, (_, text) in enumerate(turn.asked):
                yield turn, "asked", number, text
            if turn.differs:
                yield turn, "sampled", 0, turn.sampled


def read(record: Record, mask_overlong: bool = False) -> Reading:
    """Return what a person reads of an episode. mask_overlong: the run leaves out episodes that a limit ended."""
    turns = _of_tree(record) if record.nodes else _of_calls(record) if record.calls else _of_events(record)
    findings = [*audit_tokens(record), *audit_heard(record)]
    by_node = {turn.node: turn for turn in turns if turn.node >= 0}
    for finding in findings:
        match = _NODE.match(finding)
        if match and (turn := by_node.get(int(match[1]))):
            turn.findings.append(finding.removeprefix(match[0]))
    for number, row in enumerate(record.rows):
        for node in row.nodes:
            if node in by_node:
                by_node[node].rows.append(number)
    for turn in turns:
        turn.untrained = "" if turn.rows else _why(record, turn)
        if turn.rows and mask_overlong and record.overlong:
            turn.untrained = "a limit ended the episode, and this run leaves such ones out (episode.mask_overlong)"
    _answer(record, turns)
    return Reading(record, turns, _nested(turns), findings, _ending(record))


def composed(record: Record) -> Iterator[str]:
    """Iterate over the texts of an episode that this module composes, and that its record does not have as they are."""
    said = (node.blocks for node in record.nodes)
    if not record.nodes and record.calls:
        said = (_blocks(call.reply.get("content")) for call in record.calls)
    elif not record.nodes:
        said = (blocks(event, "assistant") for event in record.events)
    yield from (_part(block).written for one in said for block in one)
    for place in {place for call in record.calls for place in call.messages}:
        yield _plain(msgspec.json.decode(record.parts[place]).get("content"))
    for event in record.events:
        yield from (_told(one.get("content")) for one in blocks(event, "user") if one.get("type") == "tool_result")
        if event.get("subtype") == "compact_boundary":
            yield _COMPACTED
    yield _ending(record)


# --- turns


def _of_tree(record: Record) -> list[Turn]:
    nodes, turns, by_node = record.nodes, list[Turn](), dict[int, Turn]()
    callers = {message_id(e): str(e.get("parent_tool_use_id") or "") for e in record.events if blocks(e, "assistant")}
    reads = _reader(record)
    kept = {call.node: call for call in record.calls}
    sent = Counter(call.node for call in record.calls)
    for place, node in enumerate(nodes):
        if node.logprobs is None:
            continue
        turn = Turn(len(turns) + 1, place, node.message_id, list(map(_part, node.blocks)), sampled=node.text)
        at = node.parent
        while 0 <= at < place and nodes[at].logprobs is None:
            turn.context.insert(0, at)
            turn.context_tokens += nodes[at].length
            at = nodes[at].parent if nodes[at].parent < at else -1
        turn.after = by_node[at].number if at in by_node else 0
        turn.kind = "side" if node.side else "agent" if callers.get(node.message_id) else "main"
        turn.caller = callers.get(node.message_id, "")
        turn.stop, turn.tokens, turn.sent = node.stop_reason, node.length, max(1, sent[place])
        values = unpack_floats(node.logprobs)
        turn.mean, turn.least = (fmean(values), min(values)) if values else (None, None)
        turn.versions = _versions(node)
        turn.differs = list(_differences(node, reads))
        if place in kept:
            turn.asked = _asked(record, kept[place].messages, by_node.get(at), kept)
        turns.append(turn)
        by_node[place] = turn
    _sort_out(nodes, turns, by_node, callers)
    return turns


def _sort_out(nodes: list[NodeRecord], turns: list[Turn], by_node: dict[int, Turn], callers: dict[str, str]) -> None:
    """Assign replies that the agent does not report to the conversations that they are in; note where these branch."""
    roots: dict[int, int] = {}
    for place, node in enumerate(nodes):
        roots[place] = roots.get(node.parent, place) if node.parent >= 0 else place
    known: dict[int, Turn] = {}
    for turn in turns:
        if turn.name in callers:
            known.setdefault(roots[turn.node], turn)
    last: Turn | None = None
    for turn in turns:
        before = turns[turn.after - 1] if turn.after else known.get(roots[turn.node])
        if turn.name not in callers and turn.kind != "side" and before:
            turn.kind, turn.caller = before.kind, before.caller
        if turn.kind == "main":
            if last and not turn.after:
                turn.notice = "The conversation begins anew here, as after a compaction: what came before is not read."
            elif last and turn.after != last.number:
                turn.notice = f"This is a branch: it goes on from turn {turn.after}, and knows nothing that came later."
            last = turn


def _asked(record: Record, messages: list[int], before: Turn | None, kept: dict[int, Any]) -> list[tuple[str, str]]:
    """Return the messages of a request that the one before it in the conversation did not have, without results."""
    old = set(kept[before.node].messages) if before and before.node in kept else set()
    out = []
    for place in messages:
        if place in old:
            continue
        message = msgspec.json.decode(record.parts[place])
        if message.get("role") != "assistant" and (text := _plain(message.get("content"))):
            out.append((str(message.get("role")), text))
    return out


def _of_calls(record: Record) -> list[Turn]:
    callers = {message_id(e): str(e.get("parent_tool_use_id") or "") for e in record.events if blocks(e, "assistant")}
    turns: list[Turn] = []
    old: set[int] = set()
    for call in sorted(record.calls, key=lambda one: one.started):
        said = _blocks(call.reply.get("content"))
        name = str(call.reply.get("id"))
        turn = Turn(len(turns) + 1, -1, name, list(map(_part, said)), stop=str(call.reply.get("stop_reason")))
        turn.kind = "side" if call.side else "agent" if callers.get(name) else "main"
        turn.caller = callers.get(name, "")
        for place in call.messages:
            if place not in old:
                message = msgspec.json.decode(record.parts[place])
                if message.get("role") != "assistant" and (text := _plain(message.get("content"))):
                    turn.asked.append((str(message.get("role")), text))
        old.update(call.messages)
        turns.append(turn)
    return turns


def _of_events(record: Record) -> list[Turn]:
    """Return the turns of the agent's events: a reply is several events, one per block, all with the message's id."""
    turns: dict[str, Turn] = {}
    for event in record.events:
        if said := blocks(event, "assistant"):
            name = message_id(event) or f"event {len(turns)}"
            turn = turns.setdefault(name, Turn(len(turns) + 1, -1, name, []))
            turn.caller = str(event.get("parent_tool_use_id") or "")
            turn.kind = "agent" if turn.caller else "main"
            turn.parts += map(_part, said)
    return list(turns.values())


def _blocks(content: Any) -> list[dict[str, Any]]:
    return [one for one in content if isinstance(one, dict)] if isinstance(content, list) else []


def _part(block: dict[str, Any]) -> Part:
    match block.get("type"):
        case "text":
            return Part("text", str(block.get("text", "")))
        case "thinking":
            return Part("thinking", str(block.get("thinking", "")))
        case "tool_use":
            given = block.get("input")
            arguments = given if isinstance(given, dict) else {"input": given}
            return Part("call", "", str(block.get("name")), str(block.get("id")), arguments)
        case _:
            return Part("text", json.dumps(block, ensure_ascii=False, default=repr))


def _plain(content: Any) -> str:
    """Return the texts of a message, without results of calls."""
    if isinstance(content, str):
        return content
    parts = _blocks(content)
    texts = [str(one["text"]) if "text" in one else f"({one.get('type')})" for one in parts]
    return "\n\n".join(text for text, one in zip(texts, parts, strict=True) if one.get("type") != "tool_result")


# --- what is said about them


def _reader(record: Record) -> FormatReading | None:
    try:
        return FormatReading(record.parser, record.version < 3)
    except ValueError:
        return None


def _differences(node: NodeRecord, reads: FormatReading | None) -> Iterator[str]:
    sent = [{key: value for key, value in block.items() if key != "id"} for block in node.blocks]
    try:
        malformed = reads is not None and reads.malformed(node.text, sent, node.tools_allowed)
    except (KeyError, TypeError):
        malformed = False
    if malformed:
        yield "It begins a call that is not well-formed: the agent received it as text, and no tool ran."
    if node.stop_sequence is not None:
        yield f"The agent's own stop sequence {node.stop_sequence!r} cut it: what follows was dropped."
    if not node.ended:
        yield "It was cut at the limit of tokens, or by a stop sequence: the policy did not end its turn."


def _why(record: Record, turn: Turn) -> str:
    """Return why a reply is in no training row."""
    if turn.node < 0:
        return "a hosted model's reply has no tokens to train on"
    node = record.nodes[turn.node]
    if record.verdict.get("outcome") == Outcome.INFRA_FAILURE:
        return "the infrastructure failed, so the episode is not trained on"
    if not node.delivered:
        return "nothing proves that the agent has read it (never delivered)"
    if node.side and not record.train_side_calls:
        return "it answers a side call, and this run only serves these (proxy.side_calls)"
    if not node.trained:
        return "the agent does not report it: another program in the box asked for it"
    return "no row has it: the audit says more"


def _versions(node: NodeRecord) -> tuple[int, int] | None:
    values = unpack_ids(node.versions) if isinstance(node.versions, bytes) else node.versions
    return (min(values), max(values)) if values else None


def _answer(record: Record, turns: list[Turn]) -> None:
    """Give calls their results, and turns what the agent put before them, as its events tell."""
    calls = {part.id: part for turn in turns for part in turn.parts if part.kind == "call"}
    by_name = {turn.name: turn for turn in turns}
    waiting: list[str] = []
    for event in record.events:
        if blocks(event, "assistant"):
            if waiting and (turn := by_name.get(message_id(event))):
                turn.told, waiting = waiting, []
        elif event.get("subtype") == "compact_boundary":
            waiting.append(_COMPACTED)
        for block in blocks(event, "user"):
            if block.get("type") == "tool_result":
                if part := calls.get(str(block.get("tool_use_id"))):
                    part.result = Result(_told(block.get("content")), block.get("is_error") is True)
            elif isinstance(block.get("text"), str) and not event.get("parent_tool_use_id"):
                waiting.append(block["text"])


def _told(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    return "\n".join(
        str(one["text"]) if isinstance(one, dict) and "text" in one else json.dumps(_short(one), ensure_ascii=False)
        for one in parts
    )


def _short(value: Any) -> Any:
    """Return a value without the data of images."""
    source = value.get("source") if isinstance(value, dict) else None
    return {**value, "source": "..."} if isinstance(source, dict) else value


def _nested(turns: list[Turn]) -> list[Turn]:
    """Put the turns of sub-agents into the calls that started them; return the others."""
    inner: dict[str, list[Turn]] = defaultdict(list)
    calls = {part.id: (turn, part) for turn in turns for part in turn.parts if part.kind == "call"}
    for turn in turns:
        if turn.caller in calls and calls[turn.caller][0].number < turn.number:
            inner[turn.caller].append(turn)
    for name, found in inner.items():
        calls[name][1].inner = found
    return [turn for turn in turns if not any(turn is one for one in inner.get(turn.caller, ()))]


def _ending(record: Record) -> str:
    for event in reversed(record.events):
        if event.get("type") == "result":
            said = event.get("result")
            return f"{event.get('subtype', '')}: {said}" if isinstance(said, str) else str(event.get("subtype", ""))
    return str(record.agent.get("detail", ""))
