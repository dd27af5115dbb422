"""Panels, dashboard and report show documented metrics, without a network."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from rl import dashboard
from rl import report as report_command
from rl.metrics import episodes as metrics
from rl.metrics import report
from rl.metrics.panels import SECTIONS, Panel, pattern
from tests.metric_docs import best, documented
from tests.unit.metrics.test_metrics import STEP

NAMES = [row.name for row in documented()]
PANELS = [panel for panels in SECTIONS.values() for panel in panels]


def test_the_document_explains_each_metric_once() -> None:
    assert len(NAMES) == len(set(NAMES)) > 100
    assert all(len(row) == 5 for row in documented())
    silent = [row.name for row in documented() if not row.meaning and row.unit != "seconds"]
    assert silent == []


def test_panels_name_documented_metrics_only() -> None:
    for panel in PANELS:
        for metric in panel.metrics:
            assert metric in NAMES or best(metric.replace("<", "").replace(">", ""), NAMES), (panel.title, metric)


def test_a_panel_finds_its_curves() -> None:
    panel = Panel("", "", {"a/b": "both", "val/repo/<r>/x": "{}", "c/<x>": "{}"})
    names = ["val/repo/acme/calc/x", "a/b", "a/bc", "c/d", "xc/d"]
    assert panel.curves(names) == {"a/b": "both", "val/repo/acme/calc/x": "acme/calc", "c/d": "d"}


def strings(node: Any) -> list[str]:
    """Return all texts in a JSON value."""
    if isinstance(node, dict):
        return [text for value in node.values() for text in strings(value)]
    if isinstance(node, list):
        return [text for value in node for text in strings(value)]
    return [node] if isinstance(node, str) else []


@pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")  # of wandb_workspaces itself
def test_the_workspace_shows_all_panels_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert dashboard.main(["team/coding-rl", "--dry-run"]) == 0
    made = json.loads(capsys.readouterr().out)
    sections = made["section"]["panelBankConfig"]["sections"]
    assert [section["name"] for section in sections[:-1]] == list(SECTIONS)
    shown = [panel["config"] for section in sections[:-1] for panel in section["panels"]]
    assert [config["chartTitle"] for config in shown] == [panel.title for panel in PANELS]
    for config, panel in zip(shown, PANELS, strict=True):
        if "metricRegex" in config:
            for metric in panel.metrics:
                assert re.fullmatch(config["metricRegex"], re.sub(r"<[^>]+>", "some/thing", metric))
            assert not re.fullmatch(config["metricRegex"], "actor/lr")
        else:
            assert config["metrics"] == list(panel.metrics)
    (samples,) = sections[-1]["panels"]
    assert dashboard.SAMPLES in strings(samples)


def test_a_target_names_entity_and_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_ENTITY", raising=False)
    (tmp_path / "config.yaml").write_text("trainer: {project_name: mine}\n")
    assert dashboard.place(str(tmp_path)) == ("", "mine")
    assert dashboard.place("team/mine") == ("team", "mine")
    assert dashboard.place("mine") == ("", "mine")
    monkeypatch.setenv("WANDB_ENTITY", "team")
    assert dashboard.place("mine") == dashboard.place(str(tmp_path)) == ("team", "mine")


@pytest.mark.parametrize("target", ["a/b/c", "team/", "EMPTY"])
def test_a_wrong_target_is_one_line_of_error(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dashboard.main([target.replace("EMPTY", str(tmp_path))]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_missing_key_is_one_line_of_error(tmp_path: Path) -> None:
    """This runs in a process of its own, because wandb caches what it found out about a key."""
    nobody = {"PATH": "/usr/bin", "HOME": str(tmp_path), "WANDB_BASE_URL": "http://127.0.0.1:9"}
    command = [sys.executable, "-m", "rl.dashboard", "mine"]
    told = subprocess.run(command, env=nobody, cwd=Path(__file__).parents[3], capture_output=True, text=True)
    assert told.returncode == 1 and "Traceback" not in told.stderr
    assert "dashboard: wandb: No API key" in told.stderr


def run_directory(parent: Path, name: str, steps: int) -> Path:
    directory = parent / "quickstart" / name
    directory.mkdir(parents=True)
    metrics.append_step(directory, 0, 0.0, {"val/resolve_rate": 0.25})
    values = {key: value for key, value in STEP.items() if key not in ("step", "val/resolve_rate")}
    for step in range(1, steps + 1):
        more = {"failure/tests_failed": 3, "val/repo/a/b/resolve_rate": 0.5, "actor/entropy": float("nan")}
        metrics.append_step(directory, step, float(step), values | more)
    sample = {"task": "<t>", "verdict": "resolved", "split": "train", "step": 1, "turns": 2}
    (directory / "samples").mkdir()
    line = json.dumps(sample | {"last messages": "<script>alert(1)</script>", "patch": "+x"})
    (directory / "samples" / "host-1.jsonl").write_text(line + "\n")
    return directory


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.words.append(data.strip())


@pytest.mark.parametrize("count", [1, 2])
def test_a_report_page_needs_no_other_file(count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [run_directory(tmp_path, f"run-{number}", 3 + number) for number in range(count)]
    assert (
        report_command.main([*map(str, runs), "--out", str(tmp_path / "out" / "both")] if count > 1 else [str(runs[0])])
        == 0
    )
    png, html = map(Path, capsys.readouterr().out.split())
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 20_000
    page = Page(html.read_text())
    assert all(link.startswith("data:image/png;base64,") for link in page.links) and len(page.links) == 1
    assert "script" not in page.tags and "<script>alert(1)</script>" in page.words
    assert "held-out resolved, step 0" in page.words and "25.0 %" in page.words
    for run in runs:
        assert any(run.name in word for word in page.words)


def test_the_picture_has_charts_for_metrics_with_numbers_only(tmp_path: Path) -> None:
    one = metrics.read_jsonl(run_directory(tmp_path, "a", 3) / "metrics.jsonl")
    titles = [axes.get_title(loc="left") for axes in report.figure({"a": one}).axes]
    assert "Resolve rate" in titles and "Held-out resolve rate by repository" in titles
    assert "Entropy" not in titles, "all its values are NaN"
    both = report.figure({"a": one, "b": one})
    titles = [axes.get_title(loc="left") for axes in both.axes]
    assert {"Verdicts\na", "Verdicts\nb"} <= set(titles) and titles.count("Resolve rate") == 1
    assert [text.get_text() for text in both.texts][:2] == ["\u25a0 a", "\u25a0 b"]


def test_a_stacked_chart_with_a_single_part_names_it() -> None:
    picture = report.figure({"a": [{"step": 1, "failure/tests_failed": 3.0, "episode/resolved": 0.0}]})
    (legend,) = [axes.get_legend() for axes in picture.axes if axes.get_title(loc="left") == "Verdicts"]
    assert [text.get_text() for text in legend.get_texts()] == ["tests_failed"]


def test_legends_do_not_cover_the_data(tmp_path: Path) -> None:
    one = metrics.read_jsonl(run_directory(tmp_path, "a", 3) / "metrics.jsonl")
    picture = report.figure({"a": one, "b": one})
    picture.draw_without_rendering()
    frames = [axes.get_window_extent() for axes in picture.axes]
    for axes in picture.axes:
        if legend := axes.get_legend():
            box = legend.get_window_extent()
            assert not any(box.overlaps(frame) for frame in frames), axes.get_title(loc="left")


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [run_directory(tmp_path / parent / "x", "run", 3) for parent in "ab"]
    assert report_command.main([*map(str, (*runs, runs[0])), "--out", str(tmp_path / "both")]) == 0
    words = Page(Path(capsys.readouterr().out.split()[1]).read_text()).words
    assert all(any(str(run) in word for word in words) for run in runs)


def test_a_directory_that_is_no_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report_command.main([str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_patterns_match_the_names_that_they_stand_for() -> None:
    assert pattern("failure/<reason>").fullmatch("failure/tests_failed")
    assert not pattern("failure/<reason>").fullmatch("val/failure/tests_failed")
    assert best("val/resolve_rate", NAMES) == "val/resolve_rate"
    assert best("val/turns", NAMES) == "val/<mean>"
    assert best("no/such", NAMES) is None
