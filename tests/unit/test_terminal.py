"""This module tests runs in the terminal: what lists show, the way down to a token, and text that is meant to do
harm.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pty
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from rl.terminal import lines
from rl.terminal.__main__ import main
from rollout.records import Record, RecordWriter, record_at
from tests.audit_kit import played, sampled
from tests.kit import CharTokenizer

ROOT = Path(__file__).parents[2]
HARM = "\x1b]0;owned\x07 [bold]x[/bold] \u202egnp.exe \x9b31m \r over"


def decode(ids: list[int]) -> str:
    return CharTokenizer().decode(ids)


@pytest.fixture
async def run(tmp_path: Path) -> Path:
    """Two tasks: one with a resolved episode and one that failed its tests, one with an episode that means harm."""
    record = await played()
    writer = RecordWriter(tmp_path / "episodes", "one", synced=False)
    for name, task, resolved in (("a", "first", True), ("b", "first", False), ("c", "second", False)):
        one = copy.deepcopy(record)
        one.episode, one.task, one.model = f"episode-{name}", f"task-{task}", "/nonexistent"
        outcome: dict[str, Any] = {"outcome": "resolved", "reason": None, "reward": 1.0}
        if not resolved:
            outcome = {"outcome": "unresolved", "reason": "tests_failed", "reward": 0.0}
        one.verdict = {**one.verdict, **outcome, "flags": []}
        one.agent["turns"] = 10 * (1 + "abc".index(name))
        if name == "c":
            sampled(one, 0).text = HARM
            one.verdict["flags"] = [HARM]
            one.patch = HARM.encode() + b"\xff"
        writer.append(one)
    writer.close()
    return tmp_path


def last(run: Path) -> Record:
    *_, entry = lines.entries(run, [])
    return record_at(entry.path, entry.offset)


@given(st.text(st.characters()), st.integers(2, 30))
def test_all_that_is_shown_is_visible_and_fits(text: str, width: int) -> None:
    for line in lines.folded(text, width):
        assert line.isprintable() and cell_len(line) <= width
    if text.isprintable():
        assert "".join(lines.folded(text, width)) == text


def test_a_long_text_is_cut_and_counted() -> None:
    *some, end = lines.folded("x" * (lines.LONGEST + 7), 100)
    assert len("".join(some)) == lines.LONGEST and end == "[7 more characters]"


@pytest.mark.parametrize(
    ("words", "fits"),
    [
        ("", True),
        ("alpha beta", True),
        ("ALPHA gamma", False),
        ("turns>20", True),
        ("turns>=21 turns<=21 turns=21", True),
        ("turns<21", False),
        ("split=train", True),
        ("split=val", False),
        ("split>1", False),
        ("reward=0", False),  # it has none
        ("nothing=1", False),  # no figure, and not in the text
        ("a=b", True),
    ],
)
def test_words_and_figures_filter(words: str, fits: bool) -> None:
    row = lines.Row(("Alpha", "beta a=b"), {"turns": 21, "split": "train", "reward": None})
    assert row.fits(words.split()) is fits


async def test_lists_say_what_was_recorded(run: Path) -> None:
    damage: list[str] = []
    found = list(lines.entries(run, damage))
    first, second = lines.tasks(found)
    assert first.cells[:3] == ("task-first", "1", "2") and first.cells[-1] == "tests_failed 1" and not damage
    assert first.about == "task-first"
    assert [row.cells[8] for row in lines.episodes(found)] == ["episode-a", "episode-b", "episode-c"]
    assert [row.fits(["verdict=tests_failed", "turns>10"]) for row in lines.episodes(found)] == [False, True, True]
    assert second.figures["turns"] == 30


async def test_a_torn_tail_and_a_broken_record_are_told(run: Path) -> None:
    path = run / "episodes" / "one.cep"
    *_, entry = lines.entries(run, [])
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    damage: list[str] = []
    assert len(list(lines.entries(run, damage))) == 2 and "incomplete" in damage[0]
    broken = bytearray(whole)
    broken[entry.offset + 40] ^= 1
    path.write_bytes(broken)
    damage = []
    assert len(list(lines.entries(run, damage))) == 2 and "checksum" in damage[0]


async def test_an_episode_is_read_as_the_policy_had_it(run: Path) -> None:
    record = last(run)
    rows = lines.conversation(record, decode, 80)
    assert all(cell_len(row.cells[0]) <= 80 for row in rows), "no row is wider than the terminal"
    about = {row.about for row in rows if row.about is not None}
    assert about == set(range(len(record.nodes)))
    text = "\n".join(row.cells[0] for row in rows)
    assert "user: hi" in text and "not delivered" in text and "side call" in text and "\\x1b]0;owned" in text
    trained = {number for row in record.rows for number in row.nodes}
    assert {row.about for row in rows if row.style == "green"} == trained
    without = "".join(row.cells[0] for row in lines.conversation(record, None, 80))
    assert "user: hi" not in without and "events of the agent" in without and "msg_" in without


async def test_tokens_have_what_the_trainer_got(run: Path) -> None:
    record = last(run)
    node = next(node for node in record.nodes if node.logprobs is not None)
    rows = lines.tokens(node, decode)
    assert len(rows) == node.length and rows[0].figures["logprob"] == -0.25
    assert {row.figures["version"] for row in rows} == {4, 5} and lines.versions(node) == "versions 4 to 5"


@pytest.fixture
def screens(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from rl.terminal import screens

    screens._tokenizer.cache_clear()
    monkeypatch.setattr(screens, "tokenizer_of", lambda model: CharTokenizer())
    yield screens
    screens._tokenizer.cache_clear()


def cells(app: Any) -> list[str]:
    """The texts of the table in front."""
    from textual.widgets import DataTable

    table = app.screen.query_one(DataTable)
    return [" ".join(cell.plain for cell in table.get_row_at(at)) for at in range(table.row_count)]


async def test_from_runs_to_a_token(run: Path, screens: Any) -> None:
    from textual.widgets import DataTable

    app = screens.Browser([run, run / "episodes"])
    async with app.run_test(size=(100, 30)) as pilot:

        async def press(*keys: str) -> list[str]:
            await pilot.press(*keys)
            await pilot.pause()
            return cells(app)

        await app.workers.wait_for_complete()
        await pilot.pause()
        assert [line.split()[-3:] for line in cells(app)][:2] == [["2", "6", "2"], ["2", "3", "1"]]
        assert len(await press("down", "enter")) == 2
        assert len(await press("slash", *"second", "enter")) == 1
        assert len(await press("slash", *["backspace"] * 6, "enter")) == 2, "no words: all rows"
        assert [line.split()[8] for line in await press("enter")] == ["episode-a", "episode-b"]
        assert len(await press("slash", *"turns", "greater_than_sign", *"10", "enter")) == 1
        shown = await press("enter")
        assert any("tokens sampled" in line for line in shown) and all(line.isprintable() for line in shown)
        await press("end")
        assert app.screen.query_one(screens.Table).cursor_row == len(shown) - 1
        await press("slash", *"sampled", "enter")
        assert "sampled" in shown[app.screen.query_one(DataTable).cursor_row]
        tokens = await press("enter")
        assert tokens[0].split()[0] == "0"
        await press("l")
        row = app.screen.rows[app.screen.query_one(DataTable).cursor_row]
        assert row.figures["logprob"] == min(one.figures["logprob"] for one in app.screen.rows)
        await press("escape", "escape")
        assert len(cells(app)) == 1, "the filter has stayed"


async def test_an_empty_run_says_so(tmp_path: Path, screens: Any) -> None:
    app = screens.Browser([tmp_path])
    async with app.run_test(size=(200, 10)) as pilot:
        await app.workers.wait_for_complete()
        await pilot.pause()
        assert "nothing is recorded here yet" in str(app.screen.query_one("#heading").renderable)


async def test_what_a_run_writes_meanwhile_is_read_again(run: Path, screens: Any) -> None:
    app = screens.Browser([run])
    async with app.run_test(size=(100, 30)) as pilot:
        await app.workers.wait_for_complete()
        await pilot.press("enter")
        await pilot.pause()
        assert len(cells(app)) == 2
        more = last(run)
        more.episode, more.task = "episode-d", "task-first"
        writer = RecordWriter(run / "episodes", "two", synced=False)
        writer.append(more)
        writer.close()
        await pilot.press("down", "r")
        await app.workers.wait_for_complete()
        await pilot.pause()
        assert len(cells(app)) == 3 and app.screen.query_one(screens.Table).cursor_row == 1


async def test_hostile_text_is_text(run: Path, screens: Any) -> None:
    app = screens.Browser([run])
    async with app.run_test(size=(60, 20)) as pilot:
        await app.workers.wait_for_complete()
        await pilot.pause()
        for keys in (["down", "enter"], ["enter"]):
            await pilot.press(*keys)
            await pilot.pause()
            assert all(line.isprintable() for line in cells(app))
            assert "[bold]x[/bold]" in "".join(cells(app)) and "\\u202egnp.exe" in "".join(cells(app))


async def test_no_escape_code_of_an_episode_reaches_the_terminal(run: Path) -> None:
    """A real pseudo-terminal: the title of the window is not set by an episode."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 160))
    environment = {"PATH": os.environ["PATH"], "HOME": str(run), "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "rl.terminal", str(run)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    written = b""

    def until(sign: bytes) -> None:
        nonlocal written
        start = len(written)
        while sign not in written[start:]:
            written += os.read(ours, 65536)

    try:
        until(b"task-second")
        os.write(ours, b"\x1b[B\r")
        until(b"episode-c")
        os.write(ours, b"\r")
        until(b"tokens sampled")
        os.write(ours, b"q")
        with contextlib.suppress(OSError):  # Linux's end of a terminal whose other side is closed
            while data := os.read(ours, 65536):
                written += data
        assert process.wait() == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert rb"\x1b]0;owned" in written
    assert b"\x1b]0;owned" not in written and b"\x07 [bold]" not in written and "\u202e".encode() not in written


@pytest.mark.parametrize(("place", "cause"), [("nowhere", "no such run"), ("", "no terminal")])
def test_what_cannot_be_shown_is_one_line(
    place: str, cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / place)]) == 2
    said = capsys.readouterr()
    assert cause in said.err and said.err.count("\n") == 1 and not said.out
