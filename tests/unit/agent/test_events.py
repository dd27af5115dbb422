"""Event streams of agents are hostile input: whatever is in them, a record is written, read, shown and audited."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.metrics.samples import sample
from rl.view.terminal import episode
from rl.view.turns import read as reading
from rollout.agent.claude_code import ClaudeCode
from rollout.agent.events import blocks, commands, read
from rollout.audit import audit_heard
from rollout.figures import line
from rollout.records import Record, RecordWriter
from rollout.records.reading import Reader
from rollout.sandbox import ExecResult
from tests.audit_kit import played
from tests.kit import empty_record

AGENT = ClaudeCode(binary=Path("/bin/claude"), max_turns=3, timeout_s=9, max_tokens=64)
NESTED = 200_000
LINES = [
    b'{"type":"result"}',
    b"[" * NESTED,
    b'{"type":"user","message":{"content":' + b"[" * NESTED + b"]" * NESTED + b"}}",
    b'{"type":"assistant","message":{"content":' + b"[" * 300 + b"]" * 300 + b"}}",
    b'{"type":"assistant","message":{"content":[{"type":"text"}]}}',
    b'{"type":"assistant","message":{"id":["x"],"content":[{"type":"tool_use"},{"type":"thinking"},3,null]}}',
    b'{"type":"user","message":"hi"}',
    b'{"type":"user","message":{"content":[{"type":"tool_result","tool_use_id":{}}]}}',
    b'{"type":"result","num_turns":1180591620717411303424,"modelUsage":{"x":{"inputTokens":"9"},"y":[]}}',
    b'{"type":"result","result":"\\ud800","total_cost_usd":NaN}',
    b'{"type":["result"]}',
    b"\xff\xfe{}",
]

words = st.sampled_from(
    ["type", "message", "content", "id", "text", "tool_use", "tool_result", "tool_use_id", "name", "input", "thinking",
     "assistant", "user", "result", "modelUsage", "inputTokens", "outputTokens", "subtype", "error_max_turns"]
)  # fmt: skip
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | words | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=5),
    max_leaves=12,
)
events = st.fixed_dictionaries(
    {"type": words}, optional={"message": st.dictionaries(words, values), "modelUsage": values}
)


def survives(record: Record, output: bytes, directory: Path) -> None:
    run = AGENT.result(ExecResult(0, output, b"", timed_out=False, truncated=False, wall_s=1.0), turns=2)
    record.events, record.agent = run.events, {"status": run.status.value, "turns": run.turns, "detail": run.detail}
    writer = RecordWriter(directory, str(len(list(directory.iterdir()))))
    writer.append(record)
    writer.close()
    (again,) = Reader(writer.path)
    json.dumps([line(again), sample(again)])
    list(audit_heard(again))
    assert all(isinstance(text, str) for event in again.events for text in commands(blocks(event, "assistant")))
    "\n".join(episode(reading(again)))
    assert run.turns == 2


@pytest.mark.parametrize("hostile", LINES, ids=range(len(LINES)))
async def test_lines_that_a_policy_can_write(hostile: bytes, tmp_path: Path) -> None:
    said = b'{"type":"assistant","message":{"id":"m","content":"said"}}'
    for record in (await played(), empty_record()):
        survives(record, b"\n".join([said, hostile, said]), tmp_path)
        assert [blocks(record.events[at], "assistant")[0]["text"] for at in (0, -1)] == ["said", "said"]


@settings(deadline=None)
@given(st.lists(events | values, max_size=4))
def test_any_json(tmp_path_factory: pytest.TempPathFactory, stream: list[Any]) -> None:
    output = b"\n".join(msgspec.json.encode(event) for event in stream if not _huge(event))
    survives(empty_record(), output, tmp_path_factory.mktemp("records"))


def _huge(event: Any) -> bool:
    """Tell whether the encoder of this test cannot write the event; LINES has one with such an integer."""
    try:
        msgspec.json.encode(event)
    except (OverflowError, msgspec.EncodeError):
        return True
    return False


def test_a_stream_of_nothing_takes_no_memory() -> None:
    """64 MiB of empty objects would be gigabytes."""
    assert len(read(b"{}\n" * 3_000_000)) == 1 << 19  # a line and a value each
    assert read(b'{"a":[' + b"{}," * 3_000_000 + b"{}]}") == []


def test_only_lines_and_values_are_counted_and_what_is_no_object_is_not_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Texts have commas and brackets, too. 64 MiB of line ends would take minutes if each were decoded."""
    monkeypatch.setattr("rollout.agent.events._PARTS", 40)
    said = {"type": "user", "text": 'a, b, "c", [{' * 40}
    end = {"type": "result", "n": [1, 2]}
    assert read(b"\n".join(json.dumps(one).encode() for one in (said, *[said] * 10, end))) == [*[said] * 11, end]
    tried: list[bytes] = []
    decode = msgspec.json.decode
    monkeypatch.setattr("rollout.agent.events.msgspec.json.decode", lambda line: tried.append(line) or decode(line))
    assert read(b'x\n\n[1]\n"{"\n {}\n' + b"\n" * 50 + b"{}") == [{}] and tried == [b" {}\n"]


def test_what_calls_run_and_read_but_not_what_they_write() -> None:
    asked = [
        {"command": "ls", "description": "x"},
        {"file_path": "/a", "content": "x"},
        {"pattern": "p", "path": 3},
        None,
    ]
    found = [{"type": "tool_use", "input": one} for one in asked]
    assert [*commands([*found, {"type": "text", "input": {"command": "x"}}])] == ["ls", "/a", "p"]
