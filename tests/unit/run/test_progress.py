"""The screen shows what the run directory holds."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from rl.metrics import episodes as metrics
from rl.run import phases
from rl.run.progress import RunProgress
from tests.unit.metrics.test_metrics import STEP, episode

VALUES = {key: value for key, value in STEP.items() if key != "step"}


class Heard:
    """A screen that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.now: tuple[Any, ...] = ()

    def say(self, text: str) -> None:
        self.lines.append(text)

    def show(self, what: str, done: int | None = None, total: int | None = None, note: str = "") -> None:
        self.now = (what, done, total, note)


@pytest.fixture
def watch(tmp_path: Path) -> RunProgress:
    """The progress of a run that is resumed after step 1, with the files that its earlier process left."""
    metrics.append_step(tmp_path, 1, 0.0, VALUES)
    metrics.EpisodeLog(tmp_path).append(episode())
    phases.note(tmp_path, 1, "update")
    watch = RunProgress(tmp_path, 24, Heard())
    watch.begin()
    return watch


def test_the_screen_follows_the_run(watch: RunProgress, tmp_path: Path) -> None:
    heard, log = watch.screen, metrics.EpisodeLog(tmp_path)
    watch.look()
    assert (heard.lines, heard.now) == ([], ("starting trainer and engine", None, None, ""))
    phases.note(tmp_path, 2, "rollout", 8)
    for changes in ({"resolved": True}, {}, {"infra": True}, {"split": "val"}):
        log.append(episode(**changes))
    watch.look()
    assert heard.now == ("step 2/24  rollout", 2, 8, "1 resolved, 1 unresolved, 1 infra")
    phases.note(tmp_path, 2, "update")
    watch.look()
    assert heard.now == ("step 2/24  update", None, None, "")
    metrics.append_step(tmp_path, 2, 100.0, VALUES)
    metrics.append_step(tmp_path, 3, 160.0, VALUES)
    phases.note(tmp_path, 4, "rollout", 8)
    watch.look()
    assert [line.split("  ")[0] for line in heard.lines] == ["step 2/24", "step 3/24"]
    assert heard.now == ("step 4/24  rollout", 0, 8, "about 21 min to go")
    phases.note(tmp_path, 24, "held-out", 8)
    metrics.append_step(tmp_path, 24, 1420.0, VALUES)  # the step's line is there, its phase not yet gone
    watch.look()
    assert heard.now == ("step 24/24  held-out", None, None, "")


def test_a_run_of_epochs_has_no_last_step(watch: RunProgress, tmp_path: Path) -> None:
    watch.total_steps = None
    for step in (2, 3):
        metrics.append_step(tmp_path, step, 100.0 * step, VALUES)
    phases.note(tmp_path, 4, "rollout", 8)
    watch.look()
    assert [line.split("  ")[0] for line in watch.screen.lines] == ["step 2", "step 3"]
    assert watch.screen.now == ("step 4  rollout", 0, 8, "")


def test_a_policy_that_calls_no_tool_is_noticed_once(watch: RunProgress, tmp_path: Path) -> None:
    """Qwen2.5-Coder writes its calls as ```json blocks: 130 of 130 episodes, and with filtering no step ever ends."""
    log = metrics.EpisodeLog(tmp_path)
    for _ in range(40):
        log.append(episode(no_call=True))
        log.append(episode(infra=True, no_call=True))
        watch.look()
    (line,) = watch.screen.lines
    assert "none of the first 16 episodes called a tool" in line and "proxy.tool_parser" in line


def test_a_policy_that_calls_a_tool_now_and_then_is_not(watch: RunProgress, tmp_path: Path) -> None:
    log = metrics.EpisodeLog(tmp_path)
    for number in range(40):
        log.append(episode(no_call=number != 15))
    watch.look()
    assert watch.screen.lines == []


def test_the_thread_shows_the_last_record(watch: RunProgress, tmp_path: Path) -> None:
    watch.start()
    metrics.append_step(tmp_path, 24, time.time(), VALUES)
    watch.finish()
    assert [line.split("  ")[0] for line in watch.screen.lines] == ["step 24/24"]


def test_finish_without_start(tmp_path: Path) -> None:
    RunProgress(tmp_path, 24, Heard()).finish()
