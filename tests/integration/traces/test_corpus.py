"""This module reads what others have published (tests/corpus.py): whatever it is, the rules of the gate hold."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from rl.traces.ingest.lines import Findings
from rl.traces.ingest.states import State, read_states, writing
from tests.corpus import SOURCES, Source


@pytest.mark.parametrize("source", SOURCES, ids=[one.repository for one in SOURCES])
def test_replies_of_published_files_are_read_or_counted(source: Source, tmp_path: Path) -> None:
    if not source.place.exists():
        pytest.skip("`python -m tests.corpus` fetches the files, from the network")
    module = importlib.import_module(f"rl.ingest.{source.format.replace('-', '_')}")
    read = 0
    for file in (one for one in sorted(source.place.rglob("*")) if one.is_file()):
        said: list[str] = []
        findings = Findings(said.append, lambda size: None)
        with writing(tmp_path / "s.jsonl") as writer:
            module.ingest(file, writer, findings, True)
        found = list(read_states(tmp_path / "s.jsonl"))
        assert len(found) + sum(writer.left.values()) == source.replies(file), (file, said, writer.left)
        for state in found:
            holds(state)
        read += len(found)
    assert read


def holds(state: State) -> None:
    """Say in other words than the gate what a conversation is."""
    _, *talk = [*state.messages, state.student_action]
    talk = [one for one in talk if one["role"] != "system"]
    assert [one["role"] for one in talk] == ["user", "assistant"] * (len(talk) // 2), state.where
    blocks = [one["content"] if isinstance(one["content"], list) else [] for one in talk]
    calls = [[b["id"] for b in some if b["type"] == "tool_use"] for some in blocks]
    results = [[b["tool_use_id"] for b in some if b["type"] == "tool_result"] for some in blocks]
    every = [name for some in calls for name in some]
    assert len(set(every)) == len(every), state.where
    for asked, told in zip(calls[1:-1:2], results[2::2], strict=True):
        assert sorted(asked) == sorted(told), state.where
