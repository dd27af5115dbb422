"""Read Claude Code's session files, as version 2.1 writes them.

A reply is several lines, one per content block, with one ``message.id``. Where the file notes the request that a reply
answers, the state has that request's messages, proven by its digest. Otherwise they are put together from the
transcript: the lines that a reply follows by ``parentUuid``, with all results of parallel calls (each follows the line
of its own call), and after a compaction its summary and the messages that it has preserved.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rl.traces.ingest import lines
from rl.traces.ingest.lines import Findings, repaired
from rl.traces.ingest.requests import Recent, RequestFacts, Requests, Sent, Shape, Shelf
from rl.traces.ingest.states import Message, StateWriter

FORMAT = "claude-code"
_SESSION = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_KNOWN = ("1.", "2.")  # versions of Claude Code


class Line(RequestFacts, kw_only=True):
    """A Line is a line of a session file, with what is read of it."""

    type: str
    uuid: str | None = None
    parentUuid: str | None = None
    isSidechain: bool = False
    agentId: str | None = None
    sessionId: str | None = None
    version: str | None = None
    message: dict[str, Any] | None = None
    requestRef: str | None = None
    isApiErrorMessage: bool = False
    subtype: str | None = None
    compactMetadata: dict[str, Any] | None = None
    toolUseResult: Any = None
    attachment: dict[str, Any] | None = None
    shape: dict[str, Any] = msgspec.field(default_factory=dict)

    @property
    def speaker(self) -> str | None:
        """The sub-agent that a line is of, None for the session's own lines."""
        return self.agentId if self.isSidechain else None


_DECODER = msgspec.json.Decoder(Line)


class _Meta(msgspec.Struct):
    """This is what the file beside a sub-agent's session file says of the sub-agent."""

    toolUseId: str | None = None
    spawnDepth: int = 1


@dataclass(slots=True, eq=False)
class _TranscriptMessage:
    """A group is one message of the transcript, out of one or several lines. When closed, it is on the shelf."""

    role: str
    before: _TranscriptMessage | None
    blocks: list[Any] = field(default_factory=list)
    calls: tuple[str, ...] = ()
    results: _TranscriptMessage | None = None
    digest: str | None = None
    written: tuple[int, int] | None = None
    known: set[str] = field(default_factory=set)

    def has(self, block: Any) -> bool:
        """Tell whether a block is among those that this was asked of before."""
        text = json.dumps(block, sort_keys=True)
        if text in self.known:
            return True
        self.known.add(text)
        return False

    def message(self) -> Message:
        alone = len(self.blocks) == 1 and isinstance(self.blocks[0], str)
        texts = [{"type": "text", "text": one} if isinstance(one, str) else one for one in self.blocks]
        return {"role": self.role, "content": self.blocks[0] if alone else texts}


@dataclass(slots=True, eq=False)
class _TranscriptReply(_TranscriptMessage):
    """This is a model's reply. ``number``: of its first line; ``name``: that line's uuid; ``inside``: its sub-agent."""

    number: int = 0
    name: str | None = None
    model: str = ""
    request: str | None = None
    inside: list[str] = field(default_factory=list)


# The message that a line follows if its parent is not in the file, or could not be read.
_GONE = _TranscriptMessage("gone", None, digest="")


class Thread:
    """A thread reads one file and writes its states.

    ``agent``: of a sub-agent's file, the ids of the sub-agents that it is inside of; ``spawned_by``: see State.
    ``spawns``: call ids that began a sub-agent; those of them that the thread finds in its file are in ``owners``.
    ``began``: by sub-agent, the call that began it, where a result tells.
    """

    def __init__(self, path: Path, writer: StateWriter, findings: Findings, subagents: bool) -> None:
        self._path, self._writer, self._findings, self._subagents = path, writer, findings, subagents
        self.agent: list[str] = []
        self.spawned_by: str | None = None
        self._shelf = Shelf()
        self._requests = Requests(self._shelf)
        self._at = Recent(50_000)  # the group that a line is in, by its uuid; None: it follows nothing
        self._replies, self._calls = Recent(10_000), Recent(10_000)
        self._pending: dict[str | None, _TranscriptReply] = {}
        self._head: Shape = "", []
        self._anchor: dict[str, Any] | None = None  # what a compaction has preserved
        self._version = ""
        self._last: dict[str | None, _TranscriptMessage] = {}  # by agent, the message that a line was last added to
        self._problems = findings.problems  # with another one, a line could not be read, so a parent may be missing
        self.spawns: frozenset[str] = frozenset()
        self.owners: set[str] = set()
        self.began: dict[str, str] = {}

    def read(self) -> None:
        """Read the file to its end. Raises OSError."""
        self._begin()
        for number, text in lines.lines(self._path, self._findings):
            with self._findings.watching(f"{self._path}: line {number}"):
                self._line(number, lines.decode(text, _DECODER))
        self._finish_all()

    def _begin(self) -> None:
        inside = self.agent and self._path.parent.name == "subagents"
        self._writer.begin(self._path.parents[1].name if inside else self._path.stem, FORMAT)

    def _line(self, number: int, line: Line) -> None:
        if line.version and line.version != self._version:
            self._version = line.version
            if not line.version.startswith(_KNOWN):
                said = f"Claude Code {line.version}: written for {'x, '.join(_KNOWN)}x; states may lack parts"
                self._findings.problem(f"{self._path}: line {number}", said)
        if line.isSidechain and not self.agent and not self._subagents:
            self._findings.counts["lines of sub-agents left out"] += 1
            return
        if line.uuid is not None and line.uuid in self._at and line.type in ("user", "assistant"):
            self._findings.counts["lines that are written twice, left out"] += 1
            return
        match line.type:
            case "assistant":
                self._said(number, line)
            case "user":
                self._heard(line)
            case "attachment":
                self._attached(line)
            case "system" if line.subtype == "compact_boundary":
                self._compacted(line)
            case "api-request-blob":
                self._shelf.put(line.message or {})
            case "api-request-shape":
                self._head = self._requests.shape(line.shape, line.shapeHash)
            case "api-request":
                self._requests.add(line)
            case _:
                self._follow(line, f"records of type {line.type[:40]} passed over")

    def _parent(self, line: Line) -> _TranscriptMessage | None:
        """Return the message that a line follows, None if it is the first.

        Claude Code gives no uuid to what was typed meanwhile, and some versions do not write all lines that others
        follow. Then the file's order counts.
        """
        last = self._last.get(line.speaker)
        if line.parentUuid is None:
            return last if line.uuid is None else None
        if line.parentUuid not in self._at and last is not None and self._findings.problems == self._problems:
            self._findings.counts["lines whose parent was never written, in the file's order"] += 1
            return last
        return self._at.get(line.parentUuid, _GONE)

    def _put(self, line: Line, group: _TranscriptMessage) -> None:
        """Note which message a line is in."""
        self._last[line.speaker] = group
        if line.uuid is not None:
            self._at[line.uuid] = group

    def _follow(self, line: Line, what: str) -> None:
        """Count a line that is no message, and let its successors follow the message that it follows itself."""
        self._findings.counts[what] += 1
        if line.uuid is not None:
            self._at[line.uuid] = self._parent(line)

    def _heard(self, line: Line) -> None:
        content = _content(line)
        calls = [block.get("tool_use_id") for block in content if isinstance(block, dict)]
        about = line.toolUseResult if isinstance(line.toolUseResult, dict) else {}
        if calls and about.get("agentId"):
            self.began[str(about["agentId"])] = str(calls[-1])
        asked = next((self._calls[call] for call in calls if call in self._calls), None)
        if asked is not None:
            group = asked.results
            if group is None:
                group = asked.results = _TranscriptMessage("user", asked)
            elif group.digest is not None:
                self._findings.counts["results that came after the next reply, left out"] += 1
                self._put(line, group)
                return
        else:
            group = self._parent(line)
            if group is None or group.role != "user" or group.digest is not None:
                group = _TranscriptMessage("user", group)
        if all([group.has(block) for block in content]):
            self._findings.counts["messages that are repeated, left out"] += bool(content)
        else:
            group.blocks += content
        self._put(line, group)
        if self._anchor is not None and line.uuid == self._anchor["anchorUuid"]:
            self._at[line.uuid] = self._preserved(group, self._anchor)
            self._anchor = None

    def _attached(self, line: Line) -> None:
        about = line.attachment or {}
        if about.get("type") == "prompt_snapshot" and isinstance(about.get("systemPrompt"), list):
            system = [{"type": "text", "text": str(text)} for text in about["systemPrompt"]]
            tools = about.get("tools")
            named = isinstance(tools, list) and all(isinstance(one, dict) and "name" in one for one in tools)
            self._head = repaired(system), repaired(tools) if named else self._head[1]
        elif about.get("type") == "queued_command" and isinstance(about.get("prompt"), str | list):  # typed meanwhile
            self._heard(msgspec.structs.replace(line, message={"role": "user", "content": about["prompt"]}))
            return
        self._follow(line, "attachments left out of transcripts")

    def _said(self, number: int, line: Line) -> None:
        message = line.message or {}
        model = str(message.get("model") or "")
        if model == "<synthetic>" or line.isApiErrorMessage:
            self._shelf.put({"role": "assistant", "content": _content(line)})  # the next request may have it
            return self._follow(line, "messages of Claude Code in a model's place, left out")
        content = _content(line)
        name = str(message.get("id") or line.uuid)
        reply = self._replies.get(name)
        if reply is None:
            self._finish(line.speaker)
            before = self._parent(line)
            self._close(before)
            reply = _TranscriptReply(
                "assistant", before, number=number, name=line.uuid, model=model, request=line.requestRef
            )
            reply.inside = [line.agentId or "sidechain"] if line.isSidechain else []
            self._replies[name] = reply
            self._pending[line.speaker] = reply
        self._put(line, reply)
        if reply.digest is not None:
            self._findings.counts["lines of a reply after the next reply, left out"] += 1
            return
        for block in content:
            if reply.has(block):
                self._findings.counts["messages that are repeated, left out"] += 1
                continue
            reply.blocks.append(block)
            if isinstance(block, dict) and block.get("type") == "tool_use":
                called = str(block.get("id"))
                reply.calls += (called,)
                self._calls[called] = reply
                if called in self.spawns:
                    self.owners.add(called)

    def _compacted(self, line: Line) -> None:
        self._finish_all()
        self._findings.counts["compactions"] += 1
        self._begin()  # whoever reads the states need not remember what was before
        self._last.clear()
        self._at[line.uuid] = None
        about = line.compactMetadata or {}
        for name in ("preservedMessages", "preservedSegment"):
            kept = about.get(name)
            if isinstance(kept, dict) and isinstance(kept.get("anchorUuid"), str):
                self._anchor = kept
                return

    def _preserved(self, summary: _TranscriptMessage, kept: dict[str, Any]) -> _TranscriptMessage:
        """Put copies of the preserved messages after a compaction's summary, and return the last one, which the next
        message follows."""
        if isinstance(kept.get("uuids"), list):
            named = kept["uuids"]
        else:  # only the two ends are named
            known = list(self._at)
            named = known[known.index(kept["headUuid"]) : known.index(kept["tailUuid"]) + 1]
        groups = dict.fromkeys(group for group in map(self._at.get, named) if group is not None)
        self._close(summary)
        last = summary
        for group in groups:
            self._close(group)
            again = _TranscriptMessage(group.role, last, digest=group.digest, calls=group.calls)
            for called in group.calls:
                self._calls[called] = again
            last.results = again if again.role == "user" and last.role == "assistant" else None
            last = again
        return last

    def _close(self, group: _TranscriptMessage | None) -> None:
        """Keep a message and those before it, to which nothing can be added any more."""
        while group is not None and group.digest is None:
            group.digest = self._shelf.put(group.message())
            group.blocks, group.known = [], set()
            group = group.before

    def _finish_all(self) -> None:
        for agent in list(self._pending):
            self._finish(agent)

    def _finish(self, agent: str | None) -> None:
        """Write the state of the reply that an agent has given last; it is whole now."""
        reply = self._pending.pop(agent, None)
        if reply is None:
            return
        action = repaired(reply.message())
        self._close(reply)
        found = self._requests.proven(reply.request)
        exact = not isinstance(found, str)
        last, shape = (reply.before, self._head) if isinstance(found, str) else found
        head, tip = self._writer.head(*shape), self._place(last)
        # No model replies to nothing: this is another program's file, or the end of one.
        if tip is None or (tip < 0 and not exact):
            self._writer.left["its history has a gap"] += 1
            return
        where, inside = f"{self._path}: line {reply.number}", self.agent or reply.inside
        more = {"where": where, "agent": inside, "spawned_by": self.spawned_by}
        name = reply.name or f"{self._path.stem}/{reply.number}"
        written = self._writer.state(name, head, tip, action, reply.model, exact=exact, **more)
        self._findings.counts[f"states from the transcript ({found})"] += written and not exact

    def _place(self, last: _TranscriptMessage | Sent | None) -> int | None:
        """Return the number of a message in the states file; it and those before it are written if they are new. None
        if one of them is not kept any more."""
        missing: list[_TranscriptMessage | Sent] = []
        at = last
        while at is not None and (at.written is None or at.written[0] != self._writer.block):
            missing.append(at)
            at = at.before
        tip = -1 if at is None or at.written is None else at.written[1]
        for one in reversed(missing):
            kept = self._shelf.get(one.digest or "")
            if kept is None:
                return None
            tip = self._writer.message(tip, msgspec.json.decode(kept.json))
            one.written = self._writer.block, tip
            if isinstance(one, _TranscriptMessage):
                one.before = _GONE  # frees a long conversation; nobody asks again for what was before
        return tip


def _content(line: Line) -> list[Any]:
    """Return a message's content as a list of texts and blocks. Raises ValueError."""
    content = (line.message or {}).get("content")
    if isinstance(content, str):
        return [content]
    if isinstance(content, list) and all(isinstance(one, dict) and isinstance(one.get("type"), str) for one in content):
        return content
    raise ValueError(f"a message of type {line.type} without text or content blocks")


def _session_of(file: Path) -> str | None:
    """Return the session that a sub-agent's file belongs to, as the first line that can be read tells."""
    first = next(lines.values(file, Line, Findings(lambda said: None)), None)
    return first[1].sessionId if first else None


def sessions(path: Path) -> Iterator[Path]:
    """Yield the session files of a path: itself, or all in the folder, which are named by the session's id."""
    if path.is_dir():
        yield from (one for one in sorted(path.rglob("*.jsonl")) if _SESSION.fullmatch(one.stem))
    else:
        yield path


def ingest(path: Path, writer: StateWriter, findings: Findings, subagents: bool) -> None:
    """Write the states of a session file, or of all session files in a folder. Raises OSError."""
    files = [*sessions(path)]
    if not files:
        findings.problem(str(path), "no session file in it, whose name is a session's id and .jsonl; name other files")
    for file in files:
        findings.counts["session files"] += 1
        main = Thread(file, writer, findings, subagents)
        agents = _agents(file, findings)
        if not subagents:
            findings.counts["sub-agents' files left out"] += len(agents)
            agents = []
        main.spawns = spawns = frozenset(meta.toolUseId for _, meta in agents if meta.toolUseId)
        main.read()
        inside: dict[str | None, list[str]] = {call: [] for call in main.owners}
        for agent, meta in agents:
            name = agent.stem.removeprefix("agent-")
            call = meta.toolUseId or main.began.get(name)
            thread = Thread(agent, writer, findings, True)
            thread.agent, thread.spawned_by, thread.spawns = [*inside.get(call, []), name], call, spawns
            thread.read()
            inside |= {call: thread.agent for call in thread.owners}


def _agents(session: Path, findings: Findings) -> list[tuple[Path, _Meta]]:
    """Return the files of a session's sub-agents, the outer ones first."""
    found = []
    beside = [one for one in sorted(session.parent.glob("agent-*.jsonl")) if _session_of(one) == session.stem]  # 2.0
    for file in [*sorted((session.parent / session.stem / "subagents").rglob("agent-*.jsonl")), *beside]:
        meta = file.with_suffix(".meta.json")
        about = lines.whole(meta, _Meta, findings) if meta.exists() else None
        found.append((file, about or _Meta()))
    return sorted(found, key=lambda one: one[1].spawnDepth)
