"""The audit finds every kind of damage to a record that can be found.

``UNDETECTABLE`` is what it cannot find, because whoever does it makes all digests anew; there is no key.
"""

from __future__ import annotations

import copy
import hashlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.quickstart import policy as quickstart_policy
from rollout.audit import audit_claims, audit_heard, audit_text, audit_tokens, audit_turns, closing_of, tokenizer_of
from rollout.proxy.engine import SAMPLED, Completion, Seals
from rollout.proxy.messages import Span
from rollout.proxy.replies import Reply
from rollout.proxy.tree import Node, Tree
from rollout.records import NodeRecord, Record, pack_floats, pack_ids, unpack_ids
from rollout.trace import trace
from tests.audit_kit import change_ids, change_logprob, played, redo, redo_row, sampled, set_ids
from tests.kit import CallReading, CharTokenizer, empty_record

PAIR = 7


class Pairs(CharTokenizer):
    """Has a token for two letters, so that there are two encodings of a text that has them."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False, **options: bool) -> str:
        return super().decode(ids).replace(chr(PAIR), "ll")


def findings(record: Record) -> list[str]:
    said = audit_text(record, Pairs(), CallReading())
    return [*audit_tokens(record), *said, *audit_heard(record), *audit_claims(record)]


async def test_a_sound_record_has_no_findings() -> None:
    record = await played()
    assert [len(row.nodes) for row in record.rows] == [2, 4] and findings(record) == []
    assert {(row.versions) for row in record.rows} == {(4, 5)}


def test_a_turn_that_is_not_closed_is_found(tmp_path: Path) -> None:
    tokenizer = quickstart_policy.make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    closing = closing_of(tmp_path, tokenizer_of(str(tmp_path)))
    assert closing == tokenizer.eos_token_id
    (wrong,) = tokenizer.encode("<|endoftext|>")
    for end, begin, found in (
        ([closing], [1], False), ([], [closing, 1], False), ([], [1, closing], True), ([wrong], [1], True),
    ):  # fmt: skip
        nodes = [NodeRecord(-1, pack_ids([1])), NodeRecord(0, pack_ids([5, *end]), b"", ended=bool(end))]
        record = empty_record(nodes=[*nodes, NodeRecord(1, pack_ids(begin))])
        assert bool([*audit_turns(record, closing)]) == found


def test_what_closes_a_turn_is_read_of_templates_for_training_too(tmp_path: Path) -> None:
    tokenizer = quickstart_policy.make_tokenizer()
    assert closing_of(tmp_path, tokenizer) is None  # there is no template
    template = "{% generation %}{{ messages[1].content }}<|im_end|>{% endgeneration %}{{ strftime_now('%Y') }}"
    (tmp_path / "chat_template.jinja").write_text(template)
    assert closing_of(tmp_path, tokenizer) == tokenizer.eos_token_id
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    with pytest.raises(ValueError, match="the chat template fails"):
        closing_of(tmp_path, tokenizer)


def split_token(record: Record) -> None:
    node = sampled(record, 0)
    node.ids, node.logprobs, node.versions = node.ids[:4] * 1 + node.ids, node.logprobs[:4] + node.logprobs, b""


def drop_reply(record: Record) -> None:
    """The conversation's last reply and its context are gone, everywhere but in the events."""
    at = max(n for row in record.rows for n in row.nodes)
    del record.nodes[at - 1 : at + 1]
    for node in record.nodes:
        node.parent -= 2 * (node.parent >= at - 1)
    for row in record.rows:
        row.nodes = [n for n in row.nodes if n < at - 1]


def undeliver(record: Record, number: int) -> None:
    node = sampled(record, number)
    node.delivered = node.trained = False
    at = record.nodes.index(node)
    for row in record.rows:
        row.nodes = [n for n in row.nodes if n != at]
        redo_row(record, row)


def untrain(record: Record, number: int, side: bool = False) -> None:
    node = sampled(record, number)
    node.trained, node.side = False, side
    at = record.nodes.index(node)
    for row in record.rows:
        row.nodes = [n for n in row.nodes if n != at]
        redo_row(record, row)


def event(record: Record, number: int) -> dict[str, Any]:
    return record.events[number]["message"]


def swap_rows(record: Record) -> None:
    one, two = record.rows
    one.nodes, two.nodes = two.nodes, one.nodes


def other_branch(record: Record) -> None:
    record.rows[1].nodes = sorted([*record.rows[1].nodes, record.rows[0].nodes[0]])
    record.rows[0].nodes = record.rows[0].nodes[1:]


DAMAGES: dict[str, Callable[[Record], Any]] = {
    "a sampled id": lambda r: change_ids(sampled(r, 0), 0, ord("x")),
    "a sampled id and its text": lambda r: (
        change_ids(sampled(r, 0), 0, ord("x")),
        setattr(sampled(r, 0), "text", "xello"),
        setattr(sampled(r, 0), "blocks", [{"type": "text", "text": "xello"}]),
        redo_row(r, r.rows[1]),
    ),
    "other ids of another length": split_token,
    "another encoding of the same text": lambda r: encoded_again(r, digests=False),
    "the end token": lambda r: change_ids(sampled(r, 0), -1, ord("e")),
    "a context id": lambda r: change_ids(r.nodes[0], 0, 1),
    "a context id, in the row too": lambda r: (change_ids(r.nodes[0], 0, 1), redo_row(r, r.rows[1])),
    "a context id of the sub-agent": lambda r: change_ids(r.nodes[4], 2, 1),
    "a context of other length": lambda r: set_ids(r.nodes[0], unpack_ids(r.nodes[0].ids)[1:]),
    "a logprob": lambda r: change_logprob(sampled(r, 0), 0, -9.0),
    "a logprob, in the row too": lambda r: (change_logprob(sampled(r, 0), 0, -9.0), redo_row(r, r.rows[1])),
    "a logprob of a reply that no row has": lambda r: change_logprob(sampled(r, 5), 0, -9.0),
    "a logprob too few": lambda r: setattr(sampled(r, 0), "logprobs", sampled(r, 0).logprobs[:-4]),
    "a positive logprob": lambda r: (change_logprob(sampled(r, 0), 0, 0.5), redo(r)),
    "a logprob that is no number": lambda r: (change_logprob(sampled(r, 0), 0, float("nan")), redo(r)),
    "a logprob without end": lambda r: (change_logprob(sampled(r, 0), 0, float("-inf")), redo(r)),
    "a weight version": lambda r: setattr(sampled(r, 0), "versions", pack_ids([9]) + sampled(r, 0).versions[4:]),
    "no weight versions": lambda r: setattr(sampled(r, 0), "versions", b""),
    "a row's versions": lambda r: setattr(r.rows[0], "versions", (5, 5)),
    "a seal": lambda r: setattr(sampled(r, 0), "seal", bytes(32)),
    "no seal": lambda r: setattr(sampled(r, 0), "seal", b""),
    "another reply's seal": lambda r: setattr(sampled(r, 0), "seal", sampled(r, 1).seal),
    "a reply in another place": lambda r: setattr(sampled(r, 1), "parent", 0),
    "a parent that comes later": lambda r: setattr(r.nodes[1], "parent", 5),
    "a root in the middle": lambda r: setattr(r.nodes[2], "parent", -1),
    "contexts one after the other": lambda r: setattr(r.nodes[4], "parent", 2),
    "trained twice": lambda r: r.rows.append(copy.deepcopy(r.rows[0])),
    "a row is missing": lambda r: r.rows.pop(0),
    "all rows are missing": lambda r: r.rows.clear(),
    "a mask misses a reply": lambda r: setattr(r.rows[1], "nodes", r.rows[1].nodes[1:]),
    "a mask misses a reply, digest redone": lambda r: (
        setattr(r.rows[1], "nodes", r.rows[1].nodes[1:]),
        redo_row(r, r.rows[1]),
    ),
    "a mask on context": lambda r: r.rows[1].nodes.insert(0, 0),
    "a row trains what was lost": lambda r: r.rows[1].nodes.append(len(r.nodes) - 1),
    "a row trains on no node": lambda r: setattr(r.rows[0], "nodes", []),
    "a row of a node that is not there": lambda r: setattr(r.rows[0], "nodes", [99]),
    "rows of two branches": other_branch,
    "rows exchanged": swap_rows,
    "a row's length": lambda r: setattr(r.rows[0], "prompt_tokens", r.rows[0].prompt_tokens + 1),
    "a row's digest": lambda r: setattr(r.rows[0], "digest", "0" * 64),
    "other text was sent": lambda r: sampled(r, 0).blocks[0].update(text="hullo"),
    "another input was sent": lambda r: sampled(r, 1).blocks[0]["input"].update(a="c"),
    "another tool was sent": lambda r: sampled(r, 1).blocks[0].update(name="Write"),
    "thinking was not sent": lambda r: sampled(r, 2).blocks.pop(0),
    "a call was not sent": lambda r: sampled(r, 2).blocks.pop(),
    "a call that nobody sampled": lambda r: sampled(r, 0).blocks.append(
        {"type": "tool_use", "id": "x", "name": "Bash", "input": {}}
    ),
    "other text is kept": lambda r: setattr(sampled(r, 0), "text", "hullo"),
    "a stop sequence": lambda r: setattr(sampled(r, 0), "stop_sequence", "ll"),
    "an end that was none": lambda r: setattr(sampled(r, 0), "ended", False),
    "a reply marked as lost": lambda r: undeliver(r, 0),
    "the last reply marked as lost": lambda r: undeliver(r, 6),
    "a sub-agent's reply marked as lost": lambda r: undeliver(r, 3),
    "a lost reply marked as delivered": lambda r: setattr(sampled(r, 7), "delivered", True),
    "a reply that is not trained on": lambda r: untrain(r, 0),
    "a sub-agent's reply that is not trained on": lambda r: untrain(r, 3),
    "a reply made a side call": lambda r: untrain(r, 0, side=True),
    "a side call made a reply": lambda r: setattr(sampled(r, 5), "side", False),
    "a side call that is trained on": lambda r: setattr(sampled(r, 5), "trained", True),
    "side calls are said to be trained on": lambda r: (setattr(r, "train_side_calls", True), untrain(r, 0, side=True)),
    "a reply is gone": drop_reply,
    "a reply is gone, digests redone": lambda r: (drop_reply(r), redo(r), r.counters.update(malformed_calls=0)),
    "events are gone": lambda r: r.events.clear(),
    "events are gone, and their count": lambda r: (r.events.clear(), r.agent.update(events=0)),
    "an event is gone": lambda r: r.events.pop(1),
    "an event's words": lambda r: event(r, 0)["content"][0].update(text="hullo"),
    "an event's call": lambda r: event(r, 1)["content"][0].update(id="toolu_x"),
    "an event's name": lambda r: event(r, 0).update(id="msg_other"),
    "an event of nobody's": lambda r: (
        r.events.append({"type": "assistant", "message": {"id": "msg_x", "content": "hi"}}),
        r.agent.update(events=len(r.events)),
    ),
    "a failed engine's rows": lambda r: r.verdict.update(outcome="infra_failure"),
    "logprobs of no distribution that there is": lambda r: setattr(sampled(r, 0), "logprobs_of", "x"),
    "logprobs of what was sampled, at temperature 0": lambda r: (
        r.sampling.update(temperature=0),
        setattr(sampled(r, 0), "logprobs_of", SAMPLED),
    ),
    "malformed calls are not counted": lambda r: r.counters.update(malformed_calls=0),
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_the_audit_finds(damage: str) -> None:
    record = await played()
    DAMAGES[damage](record)
    assert findings(record)


def consistent_logprob(record: Record) -> None:
    change_logprob(sampled(record, 0), 0, -9.0)
    redo(record)


def consistent_context(record: Record) -> None:
    change_ids(record.nodes[0], 0, ord("x"))
    redo(record)


def consistent_versions(record: Record) -> None:
    node = sampled(record, 0)
    node.versions = pack_ids([4] * node.length)
    redo(record)


def results_in_events(record: Record) -> None:
    record.events.append({"type": "user", "message": {"content": "other words"}})
    record.agent["events"] += 1


def routing_and_patch(record: Record) -> None:
    record.patch, record.timing, record.sampling = b"other", {"total": 1.0}, {"temperature": 9.0}


def encoded_again(record: Record, digests: bool = True) -> None:
    """The sampled ids are replaced by another encoding of the same text."""
    node = sampled(record, 0)
    ids, at = unpack_ids(node.ids), CharTokenizer().decode(unpack_ids(node.ids)).index("ll")
    set_ids(node, [*ids[:at], PAIR, *ids[at + 2 :]])
    node.logprobs, node.versions = node.logprobs[4:], node.versions[4:]
    if digests:
        redo(record)


UNDETECTABLE = (
    consistent_logprob,
    consistent_context,
    consistent_versions,
    encoded_again,
    results_in_events,
    routing_and_patch,
)


@pytest.mark.parametrize("damage", UNDETECTABLE)
async def test_what_the_audit_cannot_find(damage: Callable[[Record], None]) -> None:
    """docs/records.md lists these; a test that fails here means that it should no longer."""
    record = await played()
    damage(record)
    assert findings(record) == []


# Honest records that differ from the simple case.


async def test_tokens_that_the_infrastructure_failed_are_in_no_row() -> None:
    record = await played()
    record.verdict = {**record.verdict, "outcome": "infra_failure", "reason": "engine_failed", "reward": None}
    record.rows = []
    assert findings(record) == []


async def test_a_sub_agents_reply_may_be_reported_by_its_calls_alone() -> None:
    """Claude Code leaves out words and thinking without --forward-subagent-text."""
    record = await played()
    record.events = [e for e in record.events if "thinking" not in e["message"]["content"][0]]
    record.agent["events"] = len(record.events)
    assert findings(record) == []


async def test_two_equal_sub_agents_share_a_reply_that_is_reported_twice() -> None:
    record = await played()
    twins = [copy.deepcopy(e) for e in record.events if e["parent_tool_use_id"]]
    for twin in twins:
        twin["parent_tool_use_id"] = "toolu_other"
    record.events += twins
    record.agent["events"] = len(record.events)
    assert findings(record) == []


async def test_a_program_cannot_say_that_a_reply_is_a_sub_agents() -> None:
    """The audit finds what it prints into the output, and the reply stays in its conversation."""
    record = await played()
    kinds = [point.kind for point in trace(record).points]
    again = [copy.deepcopy(e) for e in record.events if not e["parent_tool_use_id"]]
    record.events += [one | {"parent_tool_use_id": "toolu_forged"} for one in again]
    record.agent["events"] = len(record.events)
    assert kinds == [point.kind for point in trace(record).points]
    assert all("as its own and as a sub-agent's" in finding for finding in findings(record)) and findings(record)


async def test_a_killed_agent_may_have_reported_a_part_of_its_last_reply() -> None:
    record = await played()
    last = record.events[-1]["message"]["id"]
    sampled(record, 6).blocks.append({"type": "text", "text": "more"})
    assert any(last in finding for finding in audit_heard(record))
    record.agent["status"] = "timeout"
    assert list(audit_heard(record)) == []


async def test_an_agent_that_reports_nothing_is_believed_nothing() -> None:
    record = await played()
    record.agent.update(events=0, reports=False)
    record.events = []
    assert findings(record) == []


async def test_seals_of_versions_3_and_4_have_no_names_in_them() -> None:
    record = await played()
    record.version = 4
    redo(record)
    assert findings(record) == []
    sampled(record, 0).message_id = "msg_other"
    sampled(record, 0).seal = sampled(record, 1).seal
    assert findings(record)


async def test_records_of_version_2_have_no_seals() -> None:
    record = await played()
    record.version, record.train_side_calls, record.agent = 2, True, {"status": "finished", "turns": 4, "detail": ""}
    for node in record.nodes:
        node.seal, node.side, node.begins, node.says = b"", False, b"", b""
    for row in record.rows:
        row.versions = (0, 0)
    del record.counters["unknown_reports"]
    assert findings(record) == []
    change_ids(sampled(record, 0), 0, ord("x"))
    assert findings(record)


async def test_a_relayed_reply_may_have_reached_the_agent() -> None:
    record = await played()
    record.agent = {"status": "finished", "turns": 7, "detail": "", "events": 0}  # an agent that reports nothing
    record.events, record.seal = [], b""
    assert any("7 turns, but at most 6" in finding for finding in findings(record))
    record.agent["relayed"] = True
    assert not any("turns" in finding for finding in findings(record))


def test_no_vllm_is_needed() -> None:
    code = "import sys; from rollout import audit; assert not {'vllm', 'torch'} & set(sys.modules), sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=Path(__file__).parents[3])


def test_a_seal_is_what_the_documents_say() -> None:
    made = Seals().make([1, 2], Completion([3], [-0.5], (7,)), side=True, name="msg_x")
    columns = pack_ids([1, 2]) + pack_ids([3]) + pack_floats([-0.5]) + pack_ids([7])
    counts = b"".join(n.to_bytes(8, "little") for n in (2, 1, 1, 1)) + b"\1msg_x"
    assert made == hashlib.sha256(columns + counts).digest()


ids = st.lists(st.integers(0, 2), max_size=4)


@given(st.lists(st.tuples(st.integers(0, 9), ids, ids, st.sampled_from(["", "late", "failed", "spoilt"])), max_size=12))
def test_a_prompt_is_the_path_of_its_context_whatever_was_asked_before(
    calls: list[tuple[int, list[int], list[int], str]],
) -> None:
    """Prompts that go on from any earlier reply, or from none. Replies may come late, or never, and an engine may spoil
    the list that it was given: nobody else is given it then, nor what an engine has not given back."""
    seals, tree, late = Seals(), Tree(), list[tuple[Node, list[int], Completion]]()
    replies: list[Node | None] = [None]

    def answer(context: Node, prompt: list[int], done: Completion) -> None:
        assert prompt == context.path_ids()
        assert seals.make(prompt, done, side=False, name="") == Seals().make(
            context.path_ids(), done, side=False, name=""
        )
        reply = Reply(f"{len(tree.nodes)}", (), "end_turn", 0, 0)
        replies.append(tree.add_sampled(context, done.ids, done.logprobs, reply, text="", ended=True))

    for place, more, said, how in calls:
        before = replies[place % len(replies)]
        context = tree.add_context(before, b"", [Span((), 0, False)], more)
        prompt, done = seals.prompt(context), Completion(said, [-0.5] * len(said))
        assert prompt == context.path_ids()
        if how == "late":
            late.append((context, prompt, done))
        elif how == "spoilt":
            prompt.append(9)
            given = list(prompt)
            assert seals.make(prompt, done, side=False, name="") == Seals().make(given, done, side=False, name="")
        elif not how:
            answer(context, prompt, done)
            if late and place % 2:
                answer(*late.pop(0))
    for held in late:
        answer(*held)


def test_the_list_of_a_threads_prompt_is_extended_and_not_made_again() -> None:
    seals, tree = Seals(), Tree()
    context = tree.add_context(None, b"", [Span((), 0, False)], [1, 2])
    first = seals.prompt(context)
    seals.make(first, done := Completion([3], [-0.5]), side=False, name="")
    said = tree.add_sampled(context, done.ids, done.logprobs, Reply("a", (), "end_turn", 0, 0), text="", ended=True)
    after = tree.add_context(said, b"", [Span((), 0, False)], [4])
    assert seals.prompt(after) is first and first == [1, 2, 3, 4]
    # An engine has it now, so who asks for the same gets another one.
    assert seals.prompt(after) is not first
