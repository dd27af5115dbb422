"""All figures of an attempt, computed from its record, each under the one name that it has everywhere.

A run's ``episode_metrics/*.jsonl``, a player's ``journal.jsonl``, samples, choices and views are made of them, and the
audit computes them once more.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from rewards.verdict import HOW_GRADED, Outcome
from rollout.agent.events import output_tokens, usage
from rollout.records import Record

Line = dict[str, Any]

_SAMPLE = re.compile(r"[a-z]+-(\d+)-")


def line(record: Record) -> Line:
    """Return the figures of an attempt, each under the one name that it has in metrics, samples and evaluations."""
    verdict, counters, seconds = record.verdict, record.counters, record.timing
    calls = int(counters.get("calls", 0))
    return {
        "episode": record.episode,
        "task": record.task,
        "repo": record.repo,
        "difficulty": record.difficulty,  # in the words of the task's set; None if that has none
        "split": record.split,  # train, val, warm or eval
        "step": record.step,  # trainer step (weights) that the episode belongs to
        "resolved": verdict["outcome"] == Outcome.RESOLVED,
        "infra": verdict["outcome"] == Outcome.INFRA_FAILURE,
        "reason": verdict["reason"],  # None exactly if resolved
        "reward": verdict["reward"],  # None for an infrastructure failure
        "dropped": len(verdict.get("dropped", ())),  # paths of the patch that were not graded
        "flags": verdict.get("flags", []),  # those of the verdict
        "rows": len(record.rows),  # training sequences
        **_tokens(record),
        "turns": record.agent.get("turns", 0),  # calls of the main thread that the agent acted on
        "calls": calls,  # requests of all threads, retries included
        "malformed_calls": int(counters.get("malformed_calls", 0)),  # tool calls that were not whole and became text
        "no_call": not _calls(record),  # no reply had a tool call that could be read
        "cut_replies": int(counters.get("cut_replies", 0)),  # replies that ended at max_tokens
        "refused_calls": int(counters.get("refused_calls", 0)),  # beyond proxy.max_calls
        "foreign_calls": int(counters.get("foreign_calls", 0)),  # replies that the agent did not ask for itself
        "unread_replies": int(counters.get("unread_replies", 0)),  # sent, but not proven to have been read
        "overlong": record.overlong,  # a limit ended it: turns, time, context or the tokens of a reply
        "cache_queries": int(counters.get("cache_queries", 0)),  # prompt tokens, where the engine counts cached ones
        "cache_hits": int(counters.get("cache_hits", 0)),  # those of them that were cached
        "wall_s": seconds.get("total", 0.0),  # from boot to verdict
        "boot_s": seconds.get("boot", 0.0),
        "agent_s": seconds.get("agent", 0.0),
        "grade_s": seconds.get("grade", 0.0),
        # Mean per call of the proxy's own time, without the engine's; None without a call.
        "proxy_overhead_ms": 1e3 * counters["overhead_s"] / calls if calls else None,
        "record": record.seal.hex(),  # empty before version 5
        **({"roles": _roles(record)} if record.roles is not None else {}),
        # The agent's name in the config; older records lack it.
        **({"agent_kind": record.agent["kind"]} if "kind" in record.agent else {}),
        # session: a key in TransferQueue; engine: the replica that answered, None without a call; own: rl.metrics.own
        **record.trainer,
    }


def suspicious(figures: Line) -> list[str]:
    """Return those of an attempt's flags that say something of its patch, not of how its task is graded."""
    return [flag for flag in figures["flags"] if flag not in HOW_GRADED]


def _roles(record: Record) -> dict[str, dict[str, float]]:
    """Return sums by role: calls that were answered, turns (those whose replies the agent has read), tokens of the
    replies (of another endpoint, as it counts them), rows and, if a function has given the rows rewards, these."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(("calls", "turns", "tokens", "rows"), 0))

    def add(role: str, **counts: float) -> None:
        found[role] |= {name: found[role].get(name, 0) + count for name, count in counts.items()}

    for node in (node for node in record.nodes if node.logprobs is not None):
        add(node.role, calls=1, turns=int(node.delivered), tokens=node.length)
    for call in record.calls:
        add(call.role, calls=1, turns=1, tokens=output_tokens(call.reply))
    for number, row in enumerate(record.rows):
        add(record.nodes[row.nodes[0]].role, rows=1, **({"credit": record.credit[number]} if record.credit else {}))
    return {**found}


def _calls(record: Record) -> bool:
    """Tell whether the policy called a tool. The tree lacks replies of a model behind another endpoint, but an agent
    goes on only after a call."""
    if not record.nodes:
        return record.agent.get("turns", 0) > 1
    return any(block["type"] == "tool_use" for node in record.nodes for block in node.blocks)


def _tokens(record: Record) -> dict[str, int]:
    """Return the token counts of an attempt.

    ``tokens_sampled``: by the engine; ``tokens_context``: read by the policy, each once; ``tokens_trained``: with mask
    1; ``tokens_in``: of all prompts, each counted whole. A model behind another endpoint leaves no tree: of its tokens
    only the first and the last count are known, which Claude Code adds up itself.
    """
    prefixes: list[int] = []  # tokens up to and including each node
    sampled = context = prompts = 0
    for node in record.nodes:
        before = prefixes[node.parent] if node.parent >= 0 else 0
        prefixes.append(before + node.length)
        if node.logprobs is None:
            context += node.length
        else:
            sampled, prompts = sampled + node.length, prompts + before
    for event in () if record.nodes else record.events:
        read, written = usage(event)
        prompts, sampled = prompts + read, sampled + written
    trained = sum(record.nodes[number].length for row in record.rows for number in row.nodes)
    return {"tokens_sampled": sampled, "tokens_context": context, "tokens_trained": trained, "tokens_in": prompts}


def journal_line(record: Record) -> Line:
    """Return what a player's journal keeps of an attempt: its figures and what only evaluations ask for. A patch that
    is not UTF-8 has replacement characters; the record has its bytes."""
    found = _SAMPLE.match(record.episode)
    return line(record) | {
        "sample": int(found[1]) if found else 0,
        "attempt": record.attempt,
        "started": record.started,
        "detail": record.verdict["detail"],
        "agent": record.agent.get("status"),
        "patch": record.patch.decode("utf-8", "replace"),
        "missing": record.missing,  # of what a collection keeps
    }
