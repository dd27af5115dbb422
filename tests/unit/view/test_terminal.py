"""This module tests runs in the terminal: a listing, and one episode."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from rl.data.select import main as select
from rl.view.index import Index
from rl.view.terminal import main
from tests.export_kit import crowd, repair, without_words, write


@pytest.fixture
def run(tmp_path: Path) -> Path:
    named = {"train-1-a": repair("train-1-a"), "train-1-b": repair("train-1-b", "Gave up.", 0.0)}
    records = [msgspec.structs.replace(asyncio.run(one), task=name[-1]) for name, one in named.items()]
    return write(tmp_path / "run", *records, asyncio.run(crowd("val-2-c")))


def shown(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> list[str]:
    assert main(arguments) == status
    return capsys.readouterr().out.splitlines()


def test_a_listing_has_a_line_per_episode_and_words_and_figures_filter(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head, *lines = shown(capsys, str(run))
    assert head.split()[:4] == ["episode", "split", "step", "verdict"] and len(lines) == 3
    assert [line.split()[3] for line in lines] == ["resolved", "tests_failed", "resolved"]
    assert len(shown(capsys, str(run), "tests_failed")) == 2
    assert len(shown(capsys, str(run), "reward=1", "turns=2:")) == 3
    assert shown(capsys, str(run), "turns=99:", status=1) == []
    assert shown(capsys, str(run), "turns=x", status=1) == []
    assert shown(capsys, str(run / "none"), status=2) == []


def test_figures_are_filters_by_their_names_too_and_others_are_refused(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for word in ("tokens_sampled=999999:", "wall_s=999999:", "rows=77"):
        shown(capsys, str(run), word, status=1)
    assert main([str(run), "turn=1:"]) == 1
    assert "records: turn=: no filter; there are agent, audit" in capsys.readouterr().err


def test_an_episode_says_what_was_asked_said_and_answered(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "\n".join(shown(capsys, str(run), "train-1-a"))
    for part in ("    user> fix it", "(Hm.)", 'Bash {"command": "ls -l"}', "    => total 0", "--- verdict", "+++ b/x"):
        assert part in text or part == "+++ b/x", part
    assert text.index("I look.") < text.index("total 0") < text.index("Done.")
    inner = shown(capsys, str(run), "val-2")
    assert "        I found it." in inner and any("begins anew" in line for line in inner)


def test_a_copy_counts_once_and_damage_is_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As in rounds of fine-tuning, whose selections are inside of the run."""
    whole = run.parent / "rounds"
    whole.mkdir()
    run = run.rename(whole / "collection")
    assert select([str(run), "--out", str(whole / "data"), "--resolved"]) == 0
    capsys.readouterr()
    index = Index(whole)
    index.extend()
    assert len(index.entries) == 3 and len(shown(capsys, str(whole))) == 4
    (file,) = (run / "episodes").iterdir()
    data = file.read_bytes()
    file.write_bytes(data[:30] + bytes([data[30] ^ 1]) + data[31:-5])
    assert main([str(whole)]) == 1
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 4 and len(err.splitlines()) == 2  # the copies are whole


def test_a_record_without_messages_is_shown_by_the_agents_events(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = write(tmp_path / "run", without_words(asyncio.run(repair("e"))))
    assert any("content of a" in line for line in shown(capsys, str(place), "e"))
