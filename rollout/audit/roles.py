"""These checks prove that each call was answered, and trained on, as the config says of its role (check 9 of
``rollout.audit``)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rollout.agent.events import blocks, message_id
from rollout.proxy.roles import MAIN, SIDE, rule_of, started
from rollout.records import NodeRecord, Record


def trains(record: Record, node: NodeRecord) -> bool:
    """Tell whether the policy is to be trained on replies like this one."""
    rule = rule_of(record.roles, node.role)
    return rule["train"] if rule else record.train_side_calls or not node.side


def audit_roles(record: Record) -> Iterator[str]:
    """Yield the findings of check 9. The agent's events tell which call has started the sub-agent of a reply; those of
    other agents than Claude Code (``partial``) need not."""
    sampled = [(i, node) for i, node in enumerate(record.nodes) if node.logprobs is not None]
    replies = [(f"node {i}", node.message_id, node.role) for i, node in sampled]
    calls = [(f"call {i}", str(call.reply.get("id")), call.role) for i, call in enumerate(record.calls)]
    if {bool(role) for _, _, role in (*replies, *calls)} - {record.roles is not None}:
        yield "some of its replies have a role, but not all"
    said = [block for node in record.nodes for block in node.blocks]
    said += [block for call in record.calls for block in call.reply.get("content", ())]
    roles = {block.get("id"): found[0] for block in said if (found := started(block)) is not None}
    told: dict[str, str | None] = {}
    for event in record.events if record.roles is not None else ():
        caller = event.get("parent_tool_use_id")
        if blocks(event, "assistant") and (caller or not event.get("partial")):
            told[message_id(event)] = roles.get(caller) if caller else MAIN
    for place, name, role in (*replies, *calls):
        wanted = told.get(name)
        if wanted and role not in (wanted, SIDE if wanted == MAIN else wanted):
            yield f"{place}: its role is {role}, but the agent reports it as {wanted}"
    for place, _, role in replies:
        if "endpoint" in (rule := rule_of(record.roles, role) or {}):
            yield f"{place}: the policy has replied, but {rule['endpoint']} answers {role}"
    for (place, _, role), call in zip(calls, record.calls, strict=True):
        if role and record.nodes and not call.side and "endpoint" not in (rule_of(record.roles, role) or {}):
            yield f"{place}: another model has replied, but the policy answers {role}"
    for i, node in sampled:
        if node.trained and not trains(record, node):
            yield f"node {i}: it is trained on, but {node.role or 'side'} is not"
    if record.credit and (len(record.credit) != len(record.rows) or not all(map(math.isfinite, record.credit))):
        yield f"its {len(record.rows)} rows have the rewards {record.credit}"
