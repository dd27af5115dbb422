"""The kind of box of another package that docs/sandboxes.md shows, as the page has it."""

from __future__ import annotations

import re
import runpy
import shlex
import textwrap
from pathlib import Path

import pytest

from rewards.task import Task
from rl.checks.episodes import check_boxes
from rl.checks.keys import check_keys
from rl.config.compose import ConfigError, compose
from rl.episodes.boxes import kind_of
from rl.episodes.setup import agent_from
from rollout.episode import Setup, run_episode
from rollout.proxy.server import ProxyServer
from tests.integration.claude_kit import call, check_record, in_turn, scripted
from tests.kit import char_policy
from tests.packages_kit import install

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "sandboxes.md"


@pytest.fixture
def polite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package of the page, its files written and installed."""
    section = PAGE.read_text().partition("## A kind of box of your own\n")[2].partition("\n## ")[0]
    files = re.findall(r"^`(polite/[\w./]+)`, [^\n]*:\n\n((?:    [^\n]*\n|\n)+?)(?=\n?`|    \.venv)", section, re.M)
    assert len(files) == 4
    for name, text in files:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    install(tmp_path / "polite", tmp_path / "installed", monkeypatch)
    return tmp_path / "polite"


def test_the_pages_own_test_passes(polite: Path, tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    (test,) = [it for name, it in runpy.run_path(str(polite / "test_polite.py")).items() if name.startswith("test_")]
    test(tmp_path / "tasks")


def test_what_is_wrong_is_told_before_a_run(polite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose(["sandbox=polite", "sandbox.niceness=5"])
    check_keys(config)
    check_boxes(config)
    config.sandbox.niceness = 0
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        check_boxes(config)
    assert caught.value.lines == ("sandbox.niceness is 0; it must be a number above 0",)
    config.sandbox.niceness = 1
    with pytest.raises(ConfigError, match=r"^sandbox=polite: there is no program nice; install coreutils$"):
        check_boxes(config)


async def test_an_episode_is_played_and_its_patch_graded(
    polite: Path, task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an agent that another package brings, too."""
    assert task.patch is not None
    install(ROOT / "examples" / "own_agent", tmp_path / "agent", monkeypatch)
    config = compose(["agent=shell", "sandbox=polite"], "evaluate")
    agent = agent_from(config, max_tokens=5000, max_context=50_000)
    script = in_turn(call("Bash", command=f"printf %s {shlex.quote(task.patch)} | git apply; nice"), "Done.")
    proxy = ProxyServer()
    await proxy.start()
    try:
        setup = Setup(char_policy(scripted(script)), proxy, kind_of(config.sandbox).boot(agent), agent)
        episode = await run_episode(setup, task, "e")
    finally:
        await proxy.stop()
    assert episode.verdict.reason is None and episode.patch.startswith(b"diff --git"), episode.verdict
    check_record(episode, tmp_path)
