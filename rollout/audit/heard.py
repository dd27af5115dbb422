"""These checks compare what the agent reports with what it was sent (check 5 of ``rollout.audit``)."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from rollout.agent import STEP
from rollout.agent.events import blocks, message_id
from rollout.audit.ran import changed_input, same_input
from rollout.audit.roles import trains
from rollout.audit.tokens import SEALS
from rollout.proxy.roles import MAIN, rule_of
from rollout.records import NodeRecord, Record

_WAITING = 100  # calls without a result; what is printed into the output can have any number


def audit_heard(record: Record) -> Iterator[str]:
    """Yield the findings of check 5, which reads the assistant events. All agents' are in the form of Claude Code's."""
    nodes = record.nodes
    counted = record.agent.get("events", len(record.events))
    if counted != len(record.events):
        yield f"the agent had {counted} events, but {len(record.events)} are recorded"
    heard: dict[str, dict[Any, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    ended, cut = ("timeout", "crashed"), set[str]()  # the replies after which an agent was killed
    for event in record.events:
        if event.get("type") == STEP and event.get("ended") in ended:
            cut.add(next(reversed(heard), ""))
        if said := blocks(event, "assistant"):
            heard[message_id(event)][str(event.get("parent_tool_use_id") or event.get("partial") or "")] += said
    sent = {node.message_id: i for i, node in enumerate(nodes) if node.logprobs is not None}
    sampled = {*sent.values()}
    if record.agent.get("status") in ended:
        cut.add(next(reversed(heard), ""))
    for name in (name for name in heard if name in sent):
        node, i = nodes[sent[name]], sent[name]
        if not node.delivered:
            yield f"node {i}: the agent reports this reply ({name}), but it is not marked as delivered"
        calls = {str(block.get("id")): block for block in node.blocks if block.get("type") == "tool_use"}
        if len(heard[name]) > 1 and "" in heard[name]:
            yield f"node {i}: the agent reports this reply ({name}) as its own and as a sub-agent's"
        for partly, said in heard[name].items():
            for block in said:
                call, ran = calls.get(str(block.get("id"))), block.get("input")
                if call and not same_input(str(call.get("name")), call.get("input"), ran):
                    yield f"node {i}: {_ran(call, ran)}"
            if not _same(said, node.blocks, bool(partly), name in cut):
                yield f"node {i}: the agent reports another reply than the one it was sent ({name})"
    for number, call in enumerate(record.calls if record.roles is not None else ()):
        for partly, said in heard.get(name := str(call.reply.get("id")), {}).items():
            if not _same(said, call.reply["content"], bool(partly), name in cut):
                yield f"call {number}: the agent reports another reply than the one it was sent ({name})"
    yield from _hooks(record)
    reports = record.agent.get("reports", "foreign_calls" in record.counters and any(heard))
    if not reports or any(node.parent >= i for i, node in enumerate(nodes)):
        return  # an agent that reports nothing, an older record, or a finding of check 1
    named = {i for name, i in sent.items() if name in heard and nodes[i].delivered}
    known = _known(nodes, named, "endpoint" not in (rule_of(record.roles, MAIN) or {}))
    for number in sorted({n for row in record.rows for n in row.nodes} - known):
        yield f"node {number}: it is trained on, but the agent does not report it"
    if record.version < SEALS:
        return
    unknown = {name for name in heard if name.startswith("msg_") and name not in sent}
    relayed = {str(call.reply.get("id")) for call in record.calls}
    if record.roles is not None:
        others = {i for i in sampled if nodes[i].delivered and not nodes[i].side} - known
        for i in sorted(others ^ {i for i, node in enumerate(nodes) if node.foreign}):
            yield f"node {i}: foreign is {nodes[i].foreign}, which the agent's reports do not say"
    counted = record.counters.get("unknown_reports", 0)
    if counted not in (found := len(unknown - relayed), len(unknown)) and nodes:  # older records count relayed ones
        what = "reply that is" if found == 1 else "replies that are"
        yield f"the agent reports {found} {what} not recorded; {counted:g} were counted"
    for i in sorted(known):
        if not nodes[i].trained and nodes[i].delivered and trains(record, nodes[i]):
            yield f"node {i}: it is not trained on, though it is a reply of the agent's"


def _hooks(record: Record) -> Iterator[str]:
    """Yield the calls that a hook had run with another input than the one that was sampled."""
    sampled = {str(block.get("id")): block for node in record.nodes for block in node.blocks}
    waiting: dict[Any, dict[str, Any]] = {}
    for event in record.events:
        for block in blocks(event, "assistant", "user"):
            if block.get("type") == "tool_use":
                waiting[str(block.get("id"))] = sampled.get(str(block.get("id")), block)
                if len(waiting) > _WAITING:
                    del waiting[next(iter(waiting))]
            elif block.get("type") == "tool_result":
                waiting.pop(str(block.get("tool_use_id")), None)
        if changed := changed_input(event):
            asked = [call for call in waiting.values() if call.get("name") == changed[0]]
            if asked and not any(same_input(changed[0], call.get("input"), changed[1]) for call in asked):
                yield f"by a hook, {_ran(asked[0], changed[1])}"


def _ran(call: Mapping[str, Any], ran: Any) -> str:
    said, done = (json.dumps(one, ensure_ascii=False)[:200] for one in (call.get("input"), ran))
    return f"{call.get('name')} ran {done}, but {said} was sampled ({call.get('id')})"


def _same(said: list[dict[str, Any]], sent: list[dict[str, Any]], partly: bool, cut: bool) -> bool:
    """Tell whether reported blocks are those that were sent.

    ``partly``: only the calls may be reported, as Claude Code does with a sub-agent's reply, and other agents with all.
    ``cut``: the agent was killed and may have reported only the first blocks, or calls, of its last reply.
    """
    left, right = [_essence(block) for block in said], [_essence(block) for block in sent]
    if left == right or (cut and left == right[: len(left)]):
        return True
    calls = [block for block in right if block[0] == "tool_use"]
    rest = iter(right)
    called = [block for block in left if block[0] == "tool_use"]
    return partly and all(block in rest for block in left) and called == (calls[: len(called)] if cut else calls)


def _known(nodes: list[NodeRecord], named: set[int], first: bool) -> set[int]:
    """Return the delivered replies that are the agent's own. ``named``: those that it reports. ``first``: the first
    conversation is its own."""
    roots: list[int] = []
    lengths: list[int] = []
    longest: dict[int, int] = {}
    for i, node in enumerate(nodes):
        parent = node.parent
        roots.append(roots[parent] if parent >= 0 else i)
        lengths.append((lengths[parent] if parent >= 0 else 0) + node.length)
        best = longest.get(roots[i])
        if node.delivered and node.logprobs is not None and (best is None or lengths[i] > lengths[best]):
            longest[roots[i]] = i
    own = {*([0] if first else []), *(roots[i] for i in named)}
    known: set[int] = set()
    for i in (*named, *(end for root, end in longest.items() if root in own)):
        while i >= 0 and i not in known:
            known.add(i)
            i = nodes[i].parent
    sums_up = {
        i
        for i, node in enumerate(nodes)
        if node.logprobs is not None and node.delivered
        if _follows(nodes, nodes[node.parent], known, {nodes[root].begins for root in own})
        if not any(block.get("type") == "tool_use" for block in node.blocks)
    }
    return {i for i in known | sums_up if nodes[i].logprobs is not None and nodes[i].delivered}


def _follows(nodes: list[NodeRecord], context: NodeRecord, known: set[int], starts: set[bytes]) -> bool:
    return context.begins in starts - {b""} if context.parent < 0 else context.parent in known


def _essence(block: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what Claude Code does not change in a block.

    It changes the input of its own tools, which is compared by itself (``same_input``).
    """
    if block.get("type") == "tool_use":
        return ("tool_use", block.get("id"), block.get("name"))
    return (block.get("type"), str(block.get("text", "")).strip())
