"""This module makes records with everything that an export must keep, and reads what exports say of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from rollout import SIDE_MODEL
from rollout.proxy.replies import reply_json
from rollout.proxy.session import Session
from rollout.proxy.wire import decode_request
from rollout.records import VERSION, Record, RecordWriter, node_records, row_records
from tests.audit_kit import redo
from tests.kit import QueueEngine, char_policy, empty_record

TOOLS = [
    {
        "name": "Bash",
        "description": "Runs a command.",
        "input_schema": {"type": "object", "properties": {"command": {}}},
    },
    {"name": "Agent", "description": "Starts an agent.", "input_schema": {"type": "object", "properties": {"n": {}}}},
]
SYSTEM = "Be good."
CALLS = '((Hm.))I look. [[Bash {"command": "ls -l"}]][[Bash {"command": "cat \\"a\\""}]]'


class Play:
    """A session whose client is scripted: what it asks, and what the agent reports of it.

    ``hosted``: there are no tokens, as from another endpoint, which gives replies the ids that ``named`` returns.
    """

    def __init__(
        self,
        *replies: str,
        hosted: bool = False,
        policy: Any = None,
        named: Callable[[str], str | None] = lambda name: name,
    ) -> None:
        self.session = Session("e", policy or replace(char_policy(QueueEngine(*replies)), train_side_calls=True))
        self.hosted, self.named, self.events = hosted, named, list[dict[str, Any]]()

    async def ask(
        self, messages: list[Any], caller: str | None = None, side: bool = False, tools: Sequence[Any] = TOOLS
    ) -> list[dict[str, Any]]:
        """Ask for a reply, add it to ``messages``, and return its blocks."""
        body = {"model": SIDE_MODEL if side else "m", "system": SYSTEM, "messages": messages, "tools": list(tools)}
        wire = decode_request(json.dumps(body).encode())
        node = await self.session.prepare(wire, retry=False).reply()
        node.sent = node.delivered = True
        node.started = float(node.index)
        reply = reply_json(replace(node.reply, input_tokens=7, output_tokens=3), "policy")
        if self.hosted:
            reply["id"] = self.named(reply["id"])
            for block in (block for block in reply["content"] if block["type"] == "tool_use"):
                block["id"] = self.named(block["id"]) or "call"
            self.session.talk.forwarded(wire, json.dumps(reply).encode(), node.started, 0.0)
        said = reply["content"]
        if not side:
            message = {"id": reply["id"], "content": said}
            self.events.append({"type": "assistant", "message": message, "parent_tool_use_id": caller})
        messages.append({"role": "assistant", "content": said})
        return said

    def answer(self, messages: list[Any], *results: tuple[str, str], text: str = "") -> None:
        """Add the results of calls, (id, text) each, in this order, and a text after them, to ``messages``."""
        told = [{"type": "tool_result", "tool_use_id": name, "content": result} for name, result in results]
        self.events.append({"type": "user", "message": {"role": "user", "content": told}})
        messages.append({"role": "user", "content": told + ([{"type": "text", "text": text}] if text else [])})

    def record(self, name: str, reward: float | None = 1.0, **changes: Any) -> Record:
        tree = self.session.tree
        outcome, reason = ("resolved", None) if reward == 1.0 else ("unresolved", "tests_failed")
        fields: dict[str, Any] = {
            "version": VERSION,
            "episode": name,
            "model": "policy",
            "nodes": [] if self.hosted else node_records(tree),
            "rows": [] if self.hosted else row_records(tree.sequences()),
            "events": self.events,
            "agent": {"status": "finished", "turns": 2, "events": len(self.events), "reports": True},
            "counters": {name: float(count) for name, count in asdict(self.session.counters).items()},
            "verdict": {"outcome": outcome, "reason": reason, "reward": reward, "detail": "", "flags": []},
            "patch": b"diff --git a/a b/a\n",
        }
        fields |= {"parts": self.session.talk.parts, "calls": self.session.talk.calls}
        return empty_record(**fields | changes)


def calls_of(said: list[dict[str, Any]]) -> list[str]:
    return [block["id"] for block in said if block["type"] == "tool_use"]


async def repair(name: str, last: str = "Done.", reward: float = 1.0, prompt: str = "fix it", **how: Any) -> Record:
    """An episode with thinking, parallel calls answered in another order, and a last reply."""
    play = Play(CALLS, last, **how)
    main: list[Any] = [{"role": "user", "content": prompt}]
    one, two = calls_of(await play.ask(main))
    play.answer(main, (two, "content of a"), (one, "total 0"), text="Go on.")
    await play.ask(main)
    return play.record(name, reward)


async def crowd(name: str, **how: Any) -> Record:
    """An episode with a side call, a sub-agent, and a compaction, after which the last exchange is kept."""
    play = Play("A title", '[[Agent {"n": 1}]]', "I found it.", "So far.", "Summary.", "After it.", "The end.", **how)
    await play.ask([{"role": "user", "content": "make a title"}], side=True, tools=[])
    main: list[Any] = [{"role": "user", "content": "fix it"}]
    (call,) = calls_of(await play.ask(main))
    sub: list[Any] = [{"role": "user", "content": "find it"}]
    await play.ask(sub, caller=call, tools=TOOLS[:1])
    play.answer(main, (call, "It is there."))
    await play.ask(main)
    main.append({"role": "user", "content": "sum up"})
    await play.ask(main)
    kept = [{"role": "user", "content": "Summary of before."}, *main[3:4], {"role": "user", "content": "Go on."}]
    await play.ask(kept)
    kept.append({"role": "user", "content": "And?"})
    await play.ask(kept)
    return play.record(name)


async def nested(name: str, reward: float = 1.0, last: str = "Done.") -> Record:
    """An episode with a sub-agent that starts another one, a side call behind them, and nothing that is graded."""
    agent = '[[Agent {"n": 1}]]'
    play = Play(agent, agent, "Inner.", "Outer.", last, "A title", hosted=True)
    main, outer, inner = ([{"role": "user", "content": text}] for text in ("fix it", "look", "look closer"))
    (first,) = calls_of(await play.ask(main))
    (second,) = calls_of(await play.ask(outer, caller=first))
    await play.ask(inner, caller=second)
    play.answer(outer, (second, "Inner."))
    await play.ask(outer, caller=first)
    play.answer(main, (first, "Outer."))
    await play.ask(main)
    await play.ask([{"role": "user", "content": "make a title"}], side=True, tools=[])
    return play.record(name, reward)


def write(run: Path, *records: Record, name: str = "w") -> Path:
    writer = RecordWriter(run / "episodes", name)
    for record in records:
        writer.append(record)
    writer.close()
    return run


def without_words(record: Record) -> Record:
    """The record of a training run before version 4, which kept no messages."""
    bare = [msgspec.structs.replace(node, says=b"", head=b"", started=0.0) for node in record.nodes]
    old = msgspec.structs.replace(record, version=3, nodes=bare, parts=[], calls=[])
    redo(old)
    return old


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
