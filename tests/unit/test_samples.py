"""A few episodes of each step reach the loggers, bounded in number and size."""

from __future__ import annotations

from pathlib import Path

from rewards.verdict import Reason, Verdict
from rl.metrics import samples
from rl.metrics.samples import COLUMNS, EACH, SampleLog, SampleReader
from rollout.records import Record
from tests.kit import empty_record

EVENTS = [
    {"type": "system", "subtype": "init"},
    {
        "type": "assistant",
        "message": {
            "content": [
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "1", "name": "Read", "input": {"file_path": "a.py"}},
            ]
        },
    },
    {"type": "user", "message": {"content": [{"type": "tool_result", "tool_use_id": "1", "content": "x = 1"}]}},
    {"type": "assistant", "message": {"content": [{"type": "thinking", "thinking": "hm"}]}},
    {"type": "user", "message": {"content": "go on"}},
    {"type": "result"},
]


def episode(verdict: Verdict, step: int, patch: bytes = b"+x\n", events: list | None = None) -> Record:
    return empty_record(step=step, verdict=verdict.to_dict(), patch=patch, events=EVENTS if events is None else events)


def test_last_messages_are_the_end_of_the_conversation() -> None:
    assert samples.last_messages(EVENTS).splitlines() == [
        "[assistant] I look.",
        '[assistant] Read {"file_path": "a.py"}',
        "[user] => x = 1",
        "[assistant] (thinking) hm",
        "[user] go on",
    ]


def test_a_sample_is_bounded() -> None:
    long = [{"type": "assistant", "message": {"content": [{"type": "text", "text": "x" * 10_000 + "end"}]}}]
    made = samples.sample(episode(Verdict(Reason.TESTS_FAILED), 3, b"\xff" * 10_000, long))
    assert tuple(made) == COLUMNS
    assert len(made["patch"]) < 2100 and len(made["last messages"]) < 2100
    assert made["last messages"].endswith("end") and made["verdict"] == "tests_failed"


def test_a_few_of_each_kind_are_kept_and_no_infrastructure_failures(tmp_path: Path) -> None:
    log, reader = SampleLog(tmp_path), SampleReader(tmp_path)
    for step in (1, 2):
        for _ in range(5):
            log.offer(episode(Verdict(None), step))
            log.offer(episode(Verdict(Reason.TESTS_FAILED), step))
            log.offer(episode(Verdict(Reason.NO_SPACE), step))
        taken = reader.take()
        assert [one["verdict"] for one in taken] == ["resolved"] * EACH + ["tests_failed"] * EACH
        assert {one["step"] for one in taken} == {step}
    assert reader.take() == []


def test_the_reader_of_a_resumed_run_skips_old_samples(tmp_path: Path) -> None:
    SampleLog(tmp_path).offer(episode(Verdict(None), 1))
    assert SampleReader(tmp_path).take() == []
