"""Make states of our own runs: the records of training, evaluations, collections and rounds, each episode once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl.data.choice import ChoiceRules, choose
from rl.traces.ingest.lines import Findings
from rl.traces.ingest.states import StateWriter
from rollout.trace import TraceError, trace

FORMAT = "run"


def ingest(path: Path, writer: StateWriter, findings: Findings, subagents: bool) -> None:
    """Write the states of the episodes of a run, or of one record file: of replies that the agent has read.

    Episodes that the infrastructure failed, or in which the audit finds something, are left out. Raises OSError.
    """
    chosen = choose([path], ChoiceRules(), lambda done, total: None)
    for said in chosen.damage:
        findings.problem(str(path), said)
    for rule, count in chosen.taken:
        findings.counts[f"episodes left out: {rule}"] += count
    for entry in chosen.entries:
        findings.counts["episodes"] += 1
        try:
            found = trace(entry.record())
        except TraceError as error:
            findings.problem(f"{entry.path}, offset {entry.offset}", error)
            continue
        if found.silent:
            findings.counts["episodes whose messages were not kept, left out"] += 1
            continue
        episode, facts = entry.facts["episode"], entry.facts
        outcome = {"instance_id": entry.task, "resolved": facts["resolved"], "reward": facts["reward"]}
        writer.begin(episode, FORMAT, outcome)
        for point in found.delivered:
            if point.kind == "side" or (point.kind == "agent" and not subagents):
                findings.counts[f"replies left out: of a {'side call' if point.side else 'sub-agent'}"] += 1
                continue
            tip = writer.tip([message for message, _ in found.context(point)])
            action = {"role": "assistant", "content": point.blocks}
            where = f"{entry.path}, offset {entry.offset}: reply {point.number}"
            about: dict[str, Any] = {"where": where, "exact": True}
            about |= {"agent": [point.caller], "spawned_by": point.caller} if point.caller else {}
            head = writer.head(point.system, point.tools)
            writer.state(f"{episode}/{point.number}", head, tip, action, point.model, **about)
