"""These checks compare what a record says in several places: verdict, agent, counters (check 6 of ``rollout.audit``).

Records of other programs' conversations name the program (``agent["name"]``); they have what that program told.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from rewards.graders import SWE_BENCH
from rewards.verdict import Outcome, Reason
from rollout.agent import STEP
from rollout.audit.tokens import SEALS
from rollout.proxy.engine import AT_1, SAMPLED
from rollout.proxy.roles import MAIN
from rollout.records import SEALED, Record


def audit_claims(record: Record) -> Iterator[str]:
    """Yield what cannot be true of a record as a whole."""
    if record.version < SEALS and any(node.seal or node.begins or node.says for node in record.nodes):
        yield f"it says that its version is {record.version}, but has seals"
    if record.version < SEALED and (record.seal or record.trainer or any(node.logprobs_of for node in record.nodes)):
        yield f"it says that its version is {record.version}, but has what came with {SEALED}"
    if record.version < SEALED or "name" in record.agent:
        return
    names = Counter(node.message_id for node in record.nodes if node.logprobs is not None)
    yield from (f"{count} replies have the id {name}" for name, count in names.items() if count > 1)
    if record.attempt < 0 or (record.attempt and not record.episode.endswith(f".{record.attempt}")):
        yield f"it is attempt {record.attempt}, which its name does not say"
    yield from _verdict(record)
    yield from _agent(record)
    yield from _replies(record)
    yield from _counters(record)


def _verdict(record: Record) -> Iterator[str]:
    said = record.verdict
    outcome, reason, reward = said.get("outcome"), said.get("reason"), said.get("reward")
    try:
        infra = reason is not None and Reason(reason).is_infra
    except ValueError:
        yield f"no verdict has the reason {reason!r}"
        return
    wanted = Outcome.RESOLVED if reason is None else Outcome.INFRA_FAILURE if infra else Outcome.UNRESOLVED
    if outcome != wanted:
        yield f"the outcome is {outcome}, but the reason {reason} makes it {wanted.value}"
    failed = [name for kind in (said.get("tests") or {}).values() for name in kind.get("failure", ())]
    if reason is None and failed:
        yield f"it is resolved, but {len(failed)} tests failed"
    named = "tests" in said and said.get("grader", SWE_BENCH) == SWE_BENCH  # other graders need not name tests
    if reason is None and named and not any(said["tests"].values()):
        yield "it is resolved, but no tests have passed"
    if reason == Reason.TESTS_FAILED and named and not failed:
        yield "it is not resolved because tests failed, but none did"
    if infra or reason == Reason.NOT_GRADED:
        if reward is not None:
            yield f"it has the reward {reward}, but was not graded"
    elif isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        yield f"its reward is {reward}"
    elif not said.get("shaped") and reward != float(reason is None):
        yield f"its reward is {reward}, but the outcome is {outcome}"
    foreign, flagged = bool(record.counters.get("foreign_calls")), "foreign_calls" in said.get("flags", ())
    if foreign != flagged and (flagged or reason != Reason.NOT_GRADED):
        yield "flags and counters do not agree on whether the agent made all calls itself"


def _agent(record: Record) -> Iterator[str]:
    status, counters = record.agent.get("status"), record.counters
    full = bool(counters.get("context_full") or counters.get("cut_replies"))
    if record.overlong != (bool(counters) and (status in ("max_turns", "timeout") or (status == "error" and full))):
        yield f"overlong is {record.overlong}, but the agent's status is {status}"
    last = None  # of the last step
    for event in record.events:
        last = None if event.get("type") == STEP else event if event.get("type") == "result" else last
    if last is not None:
        failed, turned = bool(last.get("is_error")), last.get("subtype") == "error_max_turns"
        ends = {"finished": not failed, "error": failed, "max_turns": turned, "timeout": True}
        if not ends.get(str(status), False):
            yield f"the agent's status is {status}, but its last event says something else"
        elif status in ("finished", "error") and record.agent.get("detail") != str(last.get("result", "")):
            yield "the agent's last answer is not that of its last event"
    told, turns = record.agent.get("events"), record.agent.get("turns", 0)
    if told is not None and told != len(record.events):
        return  # check 5 says it
    # A relayed reply may have reached the agent.
    may = bool(record.agent.get("relayed"))
    most = sum((node.delivered or (may and node.logprobs is not None)) and not node.side for node in record.nodes)
    if record.roles is not None:
        most += sum(call.role == MAIN for call in record.calls)
    elif not record.nodes:
        most = max(0, int(counters.get("calls", 0) - counters.get("side_calls", 0) - counters.get("retries", 0)))
    if not isinstance(turns, int) or not 0 <= turns <= most:
        yield f"the agent had {turns} turns, but at most {most} replies"


def _replies(record: Record) -> Iterator[str]:
    for i, node in enumerate(record.nodes):
        if node.logprobs is None:
            continue
        calls = any(block.get("type") == "tool_use" for block in node.blocks)
        ends = {"tool_use" if calls else "end_turn"}
        if node.stop_sequence is not None:
            ends = {"stop_sequence"}
        elif not node.ended:
            ends.add("max_tokens")
        if node.stop_reason not in ends:
            yield f"node {i}: its reply ended by {node.stop_reason!r}, but its tokens say {' or '.join(sorted(ends))}"
        # A greedy choice is made of no distribution, so that engines give those of temperature 1.
        if node.logprobs_of not in ("", AT_1, *([] if record.sampling.get("temperature") == 0 else [SAMPLED])):
            yield f"node {i}: its logprobs cannot be those of {node.logprobs_of!r} (sampling: {record.sampling})"


def _counters(record: Record) -> Iterator[str]:
    counters = record.counters
    if wrong := [name for name, value in (counters | record.timing).items() if not 0 <= value < math.inf]:
        yield f"{', '.join(wrong)} cannot be"
    if sum(value for name, value in record.timing.items() if name != "total") > record.timing.get("total", 0) + 0.01:
        yield "its phases took longer than the whole"
    if not counters or not record.nodes:
        return
    replies = [node for node in record.nodes if node.logprobs is not None]
    cut = sum(node.stop_reason == "max_tokens" for node in replies)
    foreign = sum(node.delivered and not node.trained and not node.side for node in replies)
    if record.roles is not None:
        foreign = sum(node.foreign for node in replies)
    lost = sum(not node.delivered for node in replies)
    calls = counters.get("calls", 0)
    for name, least, most in (
        ("cut_replies", cut, cut),
        ("foreign_calls", foreign, foreign),
        ("unread_replies", 0, lost),
        ("calls", len(replies), math.inf),
        ("side_calls", sum(node.side for node in replies), calls),
        ("retries", 0, calls),
        ("cache_hits", 0, counters.get("cache_queries", 0)),
    ):
        if not least <= counters.get(name, 0) <= most:
            told = f"{least}" if least == most else f"from {least} to {most:g}"
            yield f"{name} is {counters.get(name, 0):g}; the replies say {told}"
