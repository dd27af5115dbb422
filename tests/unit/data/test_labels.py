"""This module tests labels: several people write, nothing is lost, and selections and exports know them."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rl.data.labels import Label, Labels, of_runs, say
from rl.data.select import main as select
from rl.export import main as export
from rl.view import pages
from rl.view.library import Library
from rl.view.server import application
from rollout import files
from rollout.records.reading import Reader
from tests.export_kit import lines, repair, write
from tests.unit.view.test_pages import text


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write(tmp_path / "run", *(asyncio.run(repair(name)) for name in "abc"))


def test_the_last_word_of_each_person_counts_and_nothing_is_lost(run: Path) -> None:
    for who, episode, label in (("ann", "a", "good"), ("bob", "a", "bad"), ("ann", "a", "great"), ("ann", "b", "x")):
        say(run, Label(episode, label, by=who))
    say(run, Label("a", "odd", "an empty reply", turn=2, by="ann"))
    say(run, Label("b", "", by="ann"))  # taken back
    seen = Labels(run)
    found = {name: [(one.by, one.label, one.turn) for one in said] for name, said in seen.read().items()}
    assert found == {"a": [("bob", "bad", 0), ("ann", "great", 0), ("ann", "odd", 2)]}
    (place,) = (run / "labels").glob("bob.*")
    with open(place, "ab") as file:  # another process, torn and foreign lines
        file.write(b'{"episode": "c", "label": "late", "by": "bob", "at": 9e9}\n[' + b"[" * 9999)
        file.write(b'\n{"episode": "c", "la')
    assert [one.label for one in seen.read()["c"]] == ["late"]
    with open(place, "ab") as file:
        file.write(b'bel": "later", "by": "bob", "at": 1e10}\n')
    assert [one.label for one in seen.read()["c"]] == ["later"] and len(of_runs([run])) == 2


WRONG = ({"by": "../x"}, {"by": ""}, {"label": "x" * 99}, {"comment": "x" * 10_001}, {"turn": -1})


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_said(run: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"a name has|at most"):
        say(run, Label(**{"episode": "a", "label": "x", "by": "ann"} | wrong))
    assert not (run / "labels").exists()


def test_a_full_disk_is_told_and_what_is_said_after_it_is_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:20]))
    with pytest.raises(OSError, match="the disk is full"):
        say(run, Label("a", "good", by="ann"))
    monkeypatch.undo()
    say(run, Label("a", "great", by="ann"))
    assert [one.label for one in Labels(run).read()["a"]] == ["great"]


def test_a_viewers_threads_read_at_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    say(run, Label("a", "good", by="ann"))
    labels, opened, both = Labels(run), files.opened, threading.Barrier(2)

    class Slow(io.BytesIO):
        def read(self, *size: Any) -> bytes:
            data = super().read(*size)
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.3)
            return data

    monkeypatch.setattr(files, "opened", lambda path: Slow(opened(path).read()))
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda _: labels.read(), range(2)))
    say(run, Label("b", "late", by="ann"))
    assert set(labels.read()) == {"a", "b"}


def test_a_humans_verdict_is_data(run: Path, tmp_path: Path) -> None:
    say(run, Label("a", "good", "reads first", by="ann"))
    say(run, Label("b", "bad-luck", by="ann"))
    for options, wanted in ((["--label", "good"], ["a"]), (["--no-label", "bad*"], ["a", "c"])):
        out = tmp_path / options[0].strip("-")
        assert select([str(run), "--out", str(out), *options]) == 0
        assert [record.episode for record in Reader(out)] == wanted
    assert export(["messages", str(run), "--out", str(tmp_path / "out")]) == 0
    rows = lines(tmp_path / "out" / "messages.jsonl")
    said = [[(one["label"], one["comment"], one["by"]) for one in row["labels"]] for row in rows]
    assert said == [[("good", "reads first", "ann")], [("bad-luck", "", "ann")], []]


def test_a_selection_keeps_what_was_said(run: Path, tmp_path: Path) -> None:
    say(run, Label("a", "bad", by="ann"))
    first, second = tmp_path / "first", tmp_path / "second"
    assert select([str(run), "--out", str(first)]) == 0
    assert [one.label for one in Labels(first).read()["a"]] == ["bad"]
    assert select([str(first), "--no-label", "bad*", "--out", str(second)]) == 0
    assert "a" not in {record.episode for record in Reader(second)}


async def test_only_a_view_with_a_name_writes_and_only_for_its_own_pages(run: Path) -> None:
    from aiohttp.test_utils import TestClient, TestServer

    for who, wanted in (("", 405), ("ann", 200)):
        library = Library([run], None, who=who)
        library.refresh()
        async with TestClient(TestServer(application(library))) as client:
            given = {"id": "a", "label": "good", "comment": "<b>so</b>", "turn": "1"}
            answer = await client.post("/label", data=given, headers={"X-View": "1"})
            assert answer.status in (wanted, 404) and (run / "labels").exists() is bool(who)
            if who:
                (said,) = await answer.json()
                assert (said["by"], said["turn"], said["comment"]) == ("ann", 1, "<b>so</b>")
                assert (await client.post("/label", data=given)).status == 403
                assert (await client.post("/label", data=given | {"id": "no"}, headers={"X-View": "1"})).status == 400
                page = text(pages.episode(library, {"id": "a"}))
                assert "&lt;b&gt;so&lt;/b&gt;" in page and "<form data-label" in page
            else:
                assert "<form data-label" not in text(pages.episode(library, {"id": "a"}))
