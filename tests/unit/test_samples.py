"""A few episodes of each step reach the loggers, bounded in number and size."""

from __future__ import annotations

from pathlib import Path

from rewards.task import Task
from rewards.verdict import Reason, Verdict
from rl.metrics import samples
from rl.metrics.samples import COLUMNS, EACH, SampleLog, SampleReader
from rollout.agent import AgentRun, Status
from rollout.episode import Episode
from tests.unit.test_task import row

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


def episode(verdict: Verdict, patch: bytes = b"+x\n", events: list | None = None) -> Episode:
    run = AgentRun(Status.FINISHED, 3, "", EVENTS if events is None else events)
    task = Task.from_row(row(), Path())
    return Episode("train-1-a-0-0000", task, 0, 0.0, verdict, None, run, patch, [], {})


def test_last_messages_are_the_end_of_what_was_said() -> None:
    assert samples.last_messages(EVENTS).splitlines() == [
        "[assistant] I look.",
        '[assistant] Read {"file_path": "a.py"}',
        "[user] => x = 1",
        "[assistant] (thinking) hm",
        "[user] go on",
    ]


def test_a_sample_is_bounded() -> None:
    long = [{"type": "assistant", "message": {"content": [{"type": "text", "text": "x" * 10_000 + "end"}]}}]
    made = samples.sample(episode(Verdict(Reason.TESTS_FAILED), b"\xff" * 10_000, long), "train", 3)
    assert tuple(made) == COLUMNS
    assert len(made["patch"]) < 2100 and len(made["last messages"]) < 2100
    assert made["last messages"].endswith("end") and made["verdict"] == "tests_failed"


def test_some_of_each_kind_and_no_infrastructure_failures(tmp_path: Path) -> None:
    log, reader = SampleLog(tmp_path), SampleReader(tmp_path)
    for step in (1, 2):
        for _ in range(5):
            log.offer(episode(Verdict(None)), "train", step)
            log.offer(episode(Verdict(Reason.TESTS_FAILED)), "train", step)
            log.offer(episode(Verdict(Reason.NO_SPACE)), "train", step)
        taken = reader.take()
        assert [one["verdict"] for one in taken] == ["resolved"] * EACH + ["tests_failed"] * EACH
        assert {one["step"] for one in taken} == {step}
    assert reader.take() == []


def test_a_reader_of_a_continued_run_begins_with_what_is_new(tmp_path: Path) -> None:
    SampleLog(tmp_path).offer(episode(Verdict(None)), "train", 1)
    assert SampleReader(tmp_path).take() == []
