"""Records of tasks with steps: what an agent says of a step is held against what happened in that step."""

from __future__ import annotations

from typing import Any

from rollout.agent import STEP
from rollout.audit import audit_claims, audit_heard
from rollout.records import NodeRecord
from tests.kit import empty_record

LATE = {"type": "result", "subtype": "error_max_turns", "is_error": True, "result": ""}
DONE = {"type": "result", "subtype": "success", "is_error": False, "result": "Done."}


def next_after(status: str) -> dict[str, Any]:
    return {"type": STEP, "ended": status}


def test_the_last_event_is_one_of_the_last_step() -> None:
    def found(status: str, *events: dict[str, Any]) -> list[str]:
        record = empty_record(version=5, agent={"status": status, "detail": "Done.", "turns": 0}, events=[*events])
        return [line for line in audit_claims(record) if "last event" in line]

    assert found("finished", LATE, next_after("max_turns"), DONE) == []
    assert found("crashed", DONE, next_after("finished")) == []
    assert found("crashed", DONE) == ["the agent's status is crashed, but its last event says something else"]
    assert len(found("finished", next_after("finished"), LATE)) == 1


def test_a_reply_may_be_cut_in_any_step_that_was_ended() -> None:
    said = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]
    reply = NodeRecord(0, b"", b"", message_id="m", blocks=said, delivered=True)

    def found(status: str) -> list[str]:
        heard = {"type": "assistant", "message": {"id": "m", "content": said[:1]}}
        nodes, events = [NodeRecord(-1, b""), reply], [heard, next_after(status), DONE]
        record = empty_record(agent={"status": "finished"}, events=events, nodes=nodes)
        return [line for line in audit_heard(record) if "another reply" in line]

    assert found("timeout") == found("crashed") == []
    assert len(found("finished")) == 1
