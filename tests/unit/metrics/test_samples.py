"""A few episodes of each step reach the loggers, bounded in number and size."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rewards.verdict import Reason, Verdict
from rl.metrics import samples
from rl.metrics.samples import COLUMNS, EACH, SampleLog, SampleReader
from rollout.records import Record
from tests.export_kit import repair
from tests.kit import empty_record


def episode(verdict: Verdict, step: int) -> Record:
    return empty_record(step=step, verdict=verdict.to_dict(), patch=b"+x\n")


@pytest.mark.parametrize("hosted", [False, True])
async def test_last_messages_are_the_end_of_what_was_said(hosted: bool) -> None:
    assert samples.last_messages(await repair("a", hosted=hosted)).splitlines() == [
        "[user] fix it",
        "[assistant] (thinking) Hm.",
        "[assistant] I look.",
        '[assistant] Bash {"command": "ls -l"}',
        '[assistant] Bash {"command": "cat \\"a\\""}',
        "[user] => content of a",
        "[user] => total 0",
        "[user] Go on.",
        "[assistant] Done.",
    ]


async def test_what_the_agent_reports_falsely_is_in_no_sample() -> None:
    """The policy's commands can write to the agent's output."""
    record = await repair("a")
    forged = {"type": "assistant", "message": {"id": "m", "content": [{"type": "text", "text": "All is well."}]}}
    assert "well" not in samples.last_messages(msgspec.structs.replace(record, events=[*record.events, forged]))


async def test_messages_that_cannot_be_read_are_no_error() -> None:
    record = await repair("a")
    nodes = [msgspec.structs.replace(node, says=b"[7") if node.says else node for node in record.nodes]
    assert samples.last_messages(msgspec.structs.replace(record, nodes=nodes)).startswith(
        "(a message that cannot be read"
    )


async def test_a_sample_is_bounded() -> None:
    long = await repair("a", "x" * 3_000 + "end", 0.0)
    made = samples.sample(msgspec.structs.replace(long, patch=b"\xff" * 10_000))
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
