"""Figures and exports of one's own, as docs/extending.md has them."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from rl.checks.episodes import check_episodes
from rl.config.compose import ConfigError, compose
from rl.metrics import own
from rl.metrics.episodes import fold
from rollout.figures import line
from rollout.records import Record
from tests.export_kit import Play, calls_of, write

PAGE = (Path(__file__).parents[3] / "docs" / "extending.md").read_text()


def code(section: str) -> str:
    """The first indented block of a section of the page."""
    text = "\n" + PAGE.partition(f"## {section}\n")[2]
    return textwrap.dedent(re.search(r"\n\n((?:    [^\n]*\n|\n)+)", text)[1])  # ty: ignore


async def worked(command: str, reward: float = 1.0) -> Record:
    """An episode with one call of Bash."""
    play = Play(f'[[Bash {{"command": "{command}"}}]]', "Done.")
    main: list[Any] = [{"role": "user", "content": "fix it"}]
    (call,) = calls_of(await play.ask(main))
    play.answer(main, (call, "ok"))
    await play.ask(main)
    return play.record(command, reward)


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = "def nothing(record): return None\ndef wrong(record): return 1 / 0\nnumber = 1\n"
    (tmp_path / "mine_of_the_page.py").write_text(code("A figure") + more)
    monkeypatch.syspath_prepend(tmp_path)


async def test_a_figure_of_the_page_is_logged(mine: None, caplog: pytest.LogCaptureFixture) -> None:
    named = {name: f"mine_of_the_page:{name}" for name in ("looked", "nothing", "wrong")}
    functions = own.load(named)
    records = [await worked(command) for command in ("git diff", "ls", "cat a")]
    lines = [line(record) | {"own": own.figures(functions, record)} for record in records]
    assert fold(lines, "episode")["own/looked"] == pytest.approx(1 / 3)
    assert fold(lines, "val")["val/own/looked"] == pytest.approx(1 / 3)
    assert not {"own/nothing", "own/wrong"} & fold(lines, "episode").keys()
    assert caplog.text.count("ZeroDivisionError") == 3


def test_what_cannot_be_imported_is_told_before_a_run(mine: None) -> None:
    page = {"a": "mine_of_the_page:nobody", "b": "nowhere", "c": "mine_of_the_page:number"}
    named = [f"+episode.figures.{name}={place}" for name, place in {**page, "d": "mine_of_the_page:looked"}.items()]
    with pytest.raises(ConfigError) as caught:
        check_episodes(compose(["+experiment=quickstart", *named]))
    assert [one.partition("=")[0] for one in caught.value.lines] == [f"episode.figures.{name}" for name in "abc"]


async def test_the_export_of_the_page_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, await worked("ls"), await worked("cat a", reward=0.0))
    exec(code("An export").replace('"RUN"', repr(str(tmp_path))), {})
    said = capsys.readouterr().out
    assert "'command': 'ls'" in said and "cat a" not in said


async def test_the_choice_in_python_of_the_page_runs(tmp_path: Path) -> None:
    """docs/traces.md, In Python."""
    write(tmp_path, await worked("ls"), await worked("cat a", reward=0.0))
    text = (Path(__file__).parents[3] / "docs" / "traces.md").read_text().partition("\nIn Python:\n")[2]
    names = {"run": str(tmp_path)}
    exec(textwrap.dedent(re.search(r"\n((?:    [^\n]*\n)+)", text)[1]), names)  # ty: ignore
    assert [record.episode for record in names["chosen"].records()] == ["ls"]  # ty: ignore
