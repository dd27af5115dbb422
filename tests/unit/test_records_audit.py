"""Records survive crashes and report damage; the audit finds every kind of wrong row."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rl.metrics.episodes import line
from rollout import audit
from rollout.audit import audit_heard, audit_text, audit_tokens
from rollout.proxy.messages import decode_request
from rollout.proxy.session import Session
from rollout.records import (
    CorruptRecordError,
    NodeRecord,
    Reader,
    Record,
    RecordWriter,
    node_records,
    pack_floats,
    pack_ids,
    row_records,
)
from tests.kit import CallParser, CharTokenizer, QueueEngine, char_policy, empty_record

TOOLS: list[dict[str, Any]] = []


async def played() -> Record:
    """Two calls of one thread, a side call, and a reply that was never delivered."""
    engine = QueueEngine("hello", '[[Edit {"a": "b"}]]', "title", "lost")
    session = Session("e", char_policy(engine))
    history: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    events = []
    for said, delivered in (("more", True), ("unused", True)):
        node = await ask(session, history, delivered)
        events.append({"type": "assistant", "message": {"id": node.reply.id, "content": list(node.reply.blocks)}})
        history += [{"role": "assistant", "content": list(node.reply.blocks)}, {"role": "user", "content": said}]
    await ask(session, [{"role": "user", "content": "make a title"}], True)
    await ask(session, [{"role": "user", "content": "nobody hears"}], False)
    rows = session.tree.sequences()
    return empty_record(version=1, nodes=node_records(session.tree), rows=row_records(rows), events=events)


async def ask(session: Session, messages: list[dict[str, Any]], delivered: bool) -> Any:
    turn = session.prepare(decode_request(json.dumps({"messages": messages}).encode()), retry=False)
    node = await turn.reply()
    node.delivered = delivered
    return node


def findings(record: Record) -> list[str]:
    text = audit_text(record, CharTokenizer(), CallParser(), TOOLS)
    return [*audit_tokens(record), *text, *audit_heard(record)]


async def test_a_sound_record_has_no_findings() -> None:
    record = await played()
    assert len(record.rows) == 2 and findings(record) == []


async def test_what_the_agent_does_not_report_must_not_be_trained_on() -> None:
    """The side call of the record: events do not name it, and it is another conversation than the first."""
    record = await played()
    record.counters = {"foreign_calls": 0}
    (finding,) = findings(record)
    assert finding.endswith("it is trained on, but the agent does not report it")
    record.events = [event for event in record.events if not event["message"]["content"][0].get("text")]
    assert len(findings(record)) == 1  # the first conversation is the agent's, named or not
    del record.counters["foreign_calls"]  # as in older records
    assert findings(record) == []


async def test_tokens_that_the_infrastructure_failed_are_in_no_row() -> None:
    record = await played()
    record.verdict = {**record.verdict, "outcome": "infra_failure"}
    assert any("must be 0 (delivered: True, the infrastructure failed)" in finding for finding in findings(record))
    record.rows = []
    assert findings(record) == []


def reply_of(record: Record, number: int) -> Any:
    return [node for node in record.nodes if node.logprobs is not None][number]


def other_id(record: Record) -> None:
    reply_of(record, 0).ids = pack_ids([ord("x"), *CharTokenizer().encode("ello<e>")])


def context_id(record: Record) -> None:
    record.nodes[0].ids = pack_ids([1]) + record.nodes[0].ids[4:]


def other_logprob(record: Record) -> None:
    node = reply_of(record, 0)
    node.logprobs = pack_floats([-9.0]) + node.logprobs[4:]


def short_logprobs(record: Record) -> None:
    reply_of(record, 0).logprobs = reply_of(record, 0).logprobs[:-4]


def positive_logprob(record: Record) -> None:
    node = reply_of(record, 0)
    node.logprobs = pack_floats([0.5]) + node.logprobs[4:]


def trained_twice(record: Record) -> None:
    record.rows.append(copy.deepcopy(record.rows[0]))


def never_trained(record: Record) -> None:
    del record.rows[0]


def mask_misses_a_reply(record: Record) -> None:
    record.rows[0].nodes = record.rows[0].nodes[1:]


def trains_the_undelivered(record: Record) -> None:
    record.rows[1].nodes.append(len(record.nodes) - 1)


def no_path(record: Record) -> None:
    record.rows[0].nodes, record.rows[1].nodes = record.rows[0].nodes + record.rows[1].nodes, []


def other_text_sent(record: Record) -> None:
    reply_of(record, 0).blocks[0]["text"] = "hullo"


def other_input_sent(record: Record) -> None:
    reply_of(record, 1).blocks[0]["input"] = {"a": "c"}


def other_text_kept(record: Record) -> None:
    reply_of(record, 0).text = "hullo"


def heard_otherwise(record: Record) -> None:
    record.events[0]["message"]["content"] = [{"type": "text", "text": "hullo"}]


def orphan(record: Record) -> None:
    record.nodes[1].parent = 5


@pytest.mark.parametrize(
    "damage",
    [
        other_id, context_id, other_logprob, short_logprobs, positive_logprob, trained_twice, never_trained,
        mask_misses_a_reply, trains_the_undelivered, no_path, other_text_sent, other_input_sent, other_text_kept,
        heard_otherwise, orphan,
    ],
)  # fmt: skip
async def test_the_audit_finds(damage: Callable[[Record], None]) -> None:
    record = await played()
    damage(record)
    assert findings(record)


async def written(tmp_path: Path, count: int = 3) -> tuple[Path, Record]:
    record = await played()
    writer = RecordWriter(tmp_path, "w")
    for _ in range(count):
        writer.append(record)
    writer.close()
    return writer.path, record


async def test_records_come_back_as_written(tmp_path: Path) -> None:
    _, record = await written(tmp_path)
    assert list(Reader(tmp_path)) == [record] * 3


async def test_records_of_earlier_versions_are_read(tmp_path: Path) -> None:
    """Version 1 had a pair of weight versions per reply; neither version had what is optional now."""
    one = msgspec.msgpack.decode(msgspec.msgpack.encode(empty_record(version=1, nodes=[NodeRecord(-1, pack_ids([1]))])))
    two = {**one, "version": 2, "verdict": {"outcome": "resolved", "reason": None, "reward": 1.0, "detail": ""}}
    one["nodes"] = [one["nodes"][0], {"parent": 0, "ids": pack_ids([2, 3]), "logprobs": b"", "versions": [4, 5]}]
    writer = RecordWriter(tmp_path, "old")
    for old in (one, two):
        assert not {"repo", "difficulty", "events"} & set(old)
        writer.append(old)
    writer.close()
    first, second = Reader(tmp_path)
    assert first.nodes[1].versions == (4, 5) and (first.repo, first.difficulty) == ("", None)
    assert line(first)["tokens_sampled"] == 2
    assert line(second)["resolved"] and (line(second)["dropped"], line(second)["flags"]) == (0, [])


async def test_every_torn_tail_is_dropped_and_reported(tmp_path: Path) -> None:
    path, record = await written(tmp_path, 2)
    data = path.read_bytes()
    frame = len(data) // 2
    for cut in range(1, frame):
        path.write_bytes(data[:-cut])
        reader = Reader(path)
        assert list(reader) == [record]
        assert [(t.offset, t.lost) for t in reader.torn] == [(frame, frame - cut)]


async def test_a_flipped_byte_is_an_error_that_names_the_place(tmp_path: Path) -> None:
    path, _ = await written(tmp_path, 2)
    data = path.read_bytes()
    for at in (0, 9, 20, len(data) // 2 + 1, len(data) - 1):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(CorruptRecordError, match=rf"{path.name}, offset \d+"):
            list(Reader(path))


@pytest.fixture
def readable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "_load", lambda model, parser: (CharTokenizer(), CallParser()))


@pytest.mark.usefixtures("readable")
async def test_the_command_says_ok_or_fails_loudly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, record = await written(tmp_path)
    assert audit.main([str(tmp_path)]) == 0
    assert "ok: 3 episodes" in capsys.readouterr().out
    data = path.read_bytes()
    path.write_bytes(data[:-5])
    assert audit.main([str(tmp_path)]) == 0
    assert "incomplete" in capsys.readouterr().out
    path.write_bytes(data[:50] + b"\0" + data[51:])
    assert audit.main([str(tmp_path)]) == 1
    assert "checksum" in capsys.readouterr().err
    path.unlink()
    assert audit.main([str(tmp_path)]) == 1
    other_logprob(record)
    writer = RecordWriter(tmp_path, "x")
    writer.append(record)
    writer.close()
    assert audit.main([str(tmp_path)]) == 1
    assert "other ids, masks or logprobs" in capsys.readouterr().err
    assert audit.main([str(tmp_path / "nowhere")]) == 1
