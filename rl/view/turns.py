"""An episode as a person reads it, made of its record without I/O: turns with texts, calls, results and sub-agents.

A turn is one reply: a point of the episode's trace, or, where not even messages were kept of a hosted model, what the
agent's own events tell.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import msgspec

from rewards.verdict import Outcome
from rollout.agent.events import blocks, message_id
from rollout.audit import audit_heard, audit_tokens
from rollout.audit.roles import trains
from rollout.reading import FormatReading
from rollout.records import NodeRecord, Record, path_of, unpack_floats, unpack_ids
from rollout.trace import Trace, TraceError, sound, trace

COMPACTED = "(The agent compacted the conversation here.)"


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
    versions: tuple[int, int] | None = None
    mean: float | None = None
    least: float | None = None
    rows: list[int] = field(default_factory=list)
    untrained: str = ""
    findings: list[str] = field(default_factory=list)

    def texts(self) -> Iterator[tuple[str, int, str]]:
        """Iterate over (what, number of the part, text) of all that is said and answered."""
        for number, part in enumerate(self.parts):
            yield part.kind, number, part.written
            if part.result:
                yield "result", number, part.result.text
        yield from (("told", number, text) for number, text in enumerate(self.told))
        yield from (("asked", number, text) for number, (_, text) in enumerate(self.asked))
        if self.differs:
            yield "sampled", 0, self.sampled


@dataclass
class EpisodeReading:
    """An episode reading is an episode as a person reads it.

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
        return ((turn, *one) for turn in self.turns for one in turn.texts())


def read(record: Record, mask_overlong: bool = False) -> EpisodeReading:
    """Return what a person reads of an episode. mask_overlong: the run leaves out episodes that a limit ended."""
    findings = [*audit_tokens(record), *audit_heard(record)]
    try:
        found = trace(record)
    except TraceError as error:
        findings.append(str(error))
        bare = [msgspec.structs.replace(node, says=b"", head=b"") for node in record.nodes]
        found = trace(msgspec.structs.replace(record, nodes=bare, calls=[]))
    turns = _turns(found) if found.points else _of_events(record)
    by_place: dict[str, list[str]] = defaultdict(list)
    for finding in findings:
        place, _, what = finding.partition(": ")
        by_place[place].append(what)
    for turn in turns:
        turn.findings = by_place[f"node {turn.node}"]
        turn.untrained = _why(record, turn, mask_overlong)
    if found.silent or not found.points:
        _answer(record, turns)
    return EpisodeReading(record, turns, _nested(turns), findings, _ending(record))


def composed(record: Record) -> Iterator[str]:
    """Iterate over the texts of an episode that this module composes, and that its record does not have as they are."""
    said = [sound(node.blocks) for node in record.nodes]
    if not record.nodes and record.calls:
        said = [sound(call.reply.get("content")) for call in record.calls]
    elif not record.nodes:
        said = [blocks(event, "assistant") for event in record.events]
    yield from (_part(block).written for one in said for block in one)
    places = {place for call in record.calls for place in call.messages} & {*range(len(record.parts))}
    sent = [record.parts[place] for place in places]
    for text in [*(b"[%b]" % part for part in sent), *(node.says for node in record.nodes if node.says)]:
        for message in msgspec.json.decode(text, type=list[Any]):
            if isinstance(message, dict):
                said = message.get("content")
                yield _plain(said)
                yield from (_told(one.get("content")) for one in sound(said) if one.get("type") == "tool_result")
    for event in record.events:
        yield from (_told(one.get("content")) for one in blocks(event, "user") if one.get("type") == "tool_result")
        if event.get("subtype") == "compact_boundary":
            yield COMPACTED
    yield _ending(record)


# --- turns


def _turns(found: Trace) -> list[Turn]:
    record, turns = found.record, list[Turn]()
    reads, results = _reader(record), found.results()
    for point in found.points:
        turn = Turn(point.number + 1, point.node, point.name, list(map(_part, point.blocks)), point.kind, point.caller)
        turn.after, turn.stop, turn.rows = point.after + 1, point.stop, [] if point.node < 0 else point.rows
        for place, part in enumerate(turn.parts):
            if (result := results.get((point.number, place))) is not None:
                part.result = Result(_told(result.get("content")), result.get("is_error") is True)
        for message in (one for one in point.read if not isinstance(one, int)):
            if text := _plain(message["content"]):
                turn.asked.append((message["role"], text))
        if point.node >= 0:
            _of_node(turn, record, found.points[point.after].node if point.after >= 0 else -1, reads)
        turns.append(turn)
    for last, turn in itertools.pairwise(one for one in turns if one.kind == "main"):
        if not turn.after:
            turn.notice = "The conversation begins anew here, as after a compaction: what came before is not read."
        elif turn.after != last.number:
            turn.notice = f"This is a branch: it goes on from turn {turn.after}, and knows nothing that came later."
    return turns


def _of_node(turn: Turn, record: Record, after: int, reads: FormatReading | None) -> None:
    """Add what the tree has of a reply. ``after``: the node that it goes on from."""
    node = record.nodes[turn.node]
    path = path_of(record.nodes, turn.node)[:-1]
    turn.context = path[path.index(after) + 1 :] if after in path else path
    turn.context_tokens = sum(record.nodes[one].length for one in turn.context)
    turn.sampled, turn.tokens = node.text, node.length
    values = unpack_floats(node.logprobs or b"")
    turn.mean, turn.least = (fmean(values), min(values)) if values else (None, None)
    versions = unpack_ids(node.versions) if isinstance(node.versions, bytes) else node.versions
    turn.versions = (min(versions), max(versions)) if versions else None
    turn.differs = list(_differences(node, reads))


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
    parts = [one for one in sound(content) if one.get("type") != "tool_result"]
    return "\n\n".join(str(one["text"]) if "text" in one else f"({one.get('type')})" for one in parts)


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


def _why(record: Record, turn: Turn, mask_overlong: bool) -> str:
    """Return why a reply is not trained on; "" if it is."""
    if turn.rows and not (mask_overlong and record.overlong):
        return ""
    if turn.rows:
        return "a limit ended the episode, and this run leaves such ones out (episode.mask_overlong)"
    if turn.node < 0:
        return "a hosted model's reply has no tokens to train on"
    node = record.nodes[turn.node]
    if record.verdict.get("outcome") == Outcome.INFRA_FAILURE:
        return "the infrastructure failed, so the episode is not trained on"
    if not node.delivered:
        return "nothing proves that the agent has read it (never delivered)"
    if node.side and not record.train_side_calls:
        return "it answers a side call, and this run only serves these (proxy.side_calls)"
    if not trains(record, node):
        return f"this run only serves {node.role} (proxy.roles)"
    if not node.trained:
        return "the agent does not report it: another program in the box asked for it"
    return "no row has it: the audit says more"


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
            waiting.append(COMPACTED)
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
    calls = {part.id: (turn.number, part.inner) for turn in turns for part in turn.parts if part.kind == "call"}
    others: list[Turn] = []
    for turn in turns:
        number, inner = calls.get(turn.caller, (turn.number, others))
        (inner if number < turn.number else others).append(turn)
    return others


def _ending(record: Record) -> str:
    for event in reversed(record.events):
        if event.get("type") == "result":
            said = event.get("result")
            return f"{event.get('subtype', '')}: {said}" if isinstance(said, str) else str(event.get("subtype", ""))
    return str(record.agent.get("detail", ""))
