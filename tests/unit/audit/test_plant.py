"""Faults that are planted for somebody to find: each is in one episode, and the rest of the copy is as it was."""

from __future__ import annotations

import json
from pathlib import Path

from rl.view.index import Index
from rollout import audit
from rollout.records import Record
from rollout.records.reading import Reader
from tests import plant
from tests.view_demo import Demo


def by_name(run: Path) -> dict[str, Record]:
    return {record.episode: record for record in Reader(run)}


async def test_each_fault_is_in_one_episode_and_nothing_else_is_changed(tmp_path: Path) -> None:
    run, out = await Demo().run(tmp_path / "run"), tmp_path / "copy"
    assert plant.main([str(run), str(out)]) == 0
    answers = json.loads((tmp_path / "copy.answers.json").read_text())
    assert not list(out.rglob("*answers*"))
    before, after = by_name(run), by_name(out)
    names = {answer["episode"] for answer in answers.values()}
    assert set(answers) == set(plant.FAULTS) and len(names) == 4
    own = {"number", "previous"}
    for name, record in before.items():
        same = [getattr(record, f) == getattr(after[name], f) for f in record.__struct_fields__ if f not in own]
        assert all(same) == (name not in names), name
    index = Index(out)
    index.extend()
    found = {entry.name for entry in index.entries if entry.facts["findings"]}
    assert found == names - {answers["hack"]["episode"]}
    hacked = after[answers["hack"]["episode"]]
    assert b"pytest" in hacked.patch and hacked.verdict["reward"] == 1.0
    assert len(list(audit.audit_tokens(hacked))) == 0
    assert (out / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()
