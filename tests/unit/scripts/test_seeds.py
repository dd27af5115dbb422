"""The studies of scripts/seeds.py: their commands exist, and their tables and figures come from finished runs."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from rl.config.compose import compose
from rl.sft.__main__ import spelled_out

ROOT = Path(__file__).parents[3]
STEP = {
    "timing_s/step": 20.0,
    "training/rollout_actor_probs_pearson_corr": 0.9999,
    "episode/rows": 1.0,
    "proxy/overhead_ms": 3.26,
    "infra/failures": 0.0,
    "group/all_equal": 0.25,
    "actor/distillation/abs_loss": 0.166,
}


@pytest.fixture
def seeds(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, whose runs are all audited well."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    script = importlib.import_module("seeds")
    monkeypatch.setattr(script, "audited", lambda run: "ok")
    return script


def finish(run: Path, began: float = 1000.0) -> None:
    """Make a run of two steps or three rounds that has taken 12.9 minutes."""
    run.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"started": began}))
    lines = [{"step": 0, "time": 0.0, "val/resolve_rate": 0.25, "val/count": 64.0}]
    lines += [{"step": n, "time": 1300.0 + n, "episode/resolve_rate": n / 4, **STEP} for n in (1, 2)]
    lines[-1] |= {"val/resolve_rate": 0.9375, "val/count": 64.0}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "config.yaml").touch()
    os.utime(run / "config.yaml", (began, began + 210))
    for number in range(4):
        if "sft" not in run.parent.name:
            break
        rate = {"value": number / 4, "low": 0.0, "high": 1.0}
        report = {"evaluation": {"pass_at_1": rate, "episodes": 64}, "sft": {"rows": 15 + number}}
        report["collection"] = {"resolved": number, "episodes": 128}
        (run / f"iteration_{number}").mkdir()
        (run / f"iteration_{number}" / "report.json").write_text(json.dumps(report))
    (run / "done").touch()
    os.utime(run / "done", (began, began + 774))


def evaluate(run: Path, agents: list[str]) -> None:
    """Make a run's evaluations in other agents."""
    for agent in agents:
        (run / "across" / agent).mkdir(parents=True)
        rate = {"value": 0.75, "low": 0.5, "high": 1.0}
        (run / "across" / agent / "results.json").write_text(json.dumps({"pass_at_1": rate, "episodes": 32}))


@pytest.mark.parametrize(
    ("study", "row"),
    [
        ("quickstart", "| 1 | 0.25 (0.16 to 0.37) | 0.94 (0.85 to 0.98) | 71 (+210 preparing) | 20 (20) | 0.9999 "
         "| 1.00 to 1.00 | 3.3 | 0 |"),
        ("sft", "| 1 | 0.00 (0.00 to 1.00) | 0.25 (0.00 to 1.00) | 0.50 (0.00 to 1.00) | 0.75 (0.00 to 1.00) "
         "| 1/128, 2/128, 3/128 | 16, 17, 18 |"),
        ("curriculum", "| 1 | rate | 2 | 0.25 0.94 | 0.594 | 0.25 |"),
        ("distill", "| 1 | 0.25 (0.16 to 0.37) | 0.94 (0.85 to 0.98) | 0.98 (63 of 64) | 0.25 0.50 | 0.166 to 0.166 |"),
        ("across", "| 1 | codex | 0.25 (0.16 to 0.37) | 0.94 (0.85 to 0.98) | 71 (+210 preparing) | 20 (20) | 0.9999 "
         f"| 1.00 to 1.00 | 3.3 | 0 {'| 0.75 (0.50 to 1.00) ' * 7}|"),
    ],
)  # fmt: skip
def test_finished_runs_become_table_and_figure(
    study: str, row: str, seeds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    for seed in (1, 2):
        for arm in seeds.STUDIES[study].arms:
            run = out / f"seed-{seed}" / arm / "2026-11-24_09-00-00"
            finish(run)
            evaluate(run, seeds.EVERY)
    (out / "teacher").mkdir()
    (out / "teacher" / "results.json").write_text('{"pass_at_1": {"value": 0.984}, "resolved": 63, "episodes": 64}')
    monkeypatch.setattr(
        seeds, "prepare", lambda config, screen: {"actor_rollout_ref.model.path": str(out / "warm" / "m")}
    )
    monkeypatch.setattr(seeds, "python", lambda *command: None)
    finish(out / "quickstart-sft" / "2026-11-24_09-00-00")
    assert seeds.main([study, "--seeds", "1", "2", "--out", str(out)]) == 0
    lines = (tmp_path / "out.md").read_text().splitlines()
    assert f"{row} 12.9 | ok |" in lines and len(lines) == 2 + 2 * len(seeds.STUDIES[study].arms) + 2
    assert len({line.count("|") for line in lines[:-2]}) == 1
    assert (tmp_path / "out.png").stat().st_size > 10_000


@pytest.mark.parametrize("study", ["quickstart", "sft", "curriculum", "distill", "across"])
def test_what_is_not_finished_is_run_by_a_command_that_exists(
    study: str, seeds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {"actor_rollout_ref.model.path": str(tmp_path / "warm" / "model"), "data.train_files": "x.parquet"}
    asked: list[tuple[str, ...]] = []

    def python(*command: str) -> None:
        asked.append(command)
        if command[0] in ("rl.train", "rl.sft"):
            name = compose([*spelled_out(command[1:])] if command[0] == "rl.sft" else [*command[1:]]).trainer
            (root,) = [key.partition("=")[2] for key in command if key.startswith("run.root=")]
            sft = "-sft" * (command[0] == "rl.sft")
            run = Path(root) / f"{name.experiment_name.removesuffix('-sft')}{sft}" / "2026-11-24_09-00-00"
            finish(run)
            evaluate(run, seeds.EVERY)
        elif "agent=codex" in command:
            compose(command[1:], "evaluate")

    monkeypatch.setattr(seeds, "prepare", lambda config, screen: made)
    monkeypatch.setattr(seeds, "python", python)
    (tmp_path / "out" / "teacher").mkdir(parents=True)
    (tmp_path / "out" / "teacher" / "results.json").write_text(
        '{"pass_at_1": {"value": 1}, "resolved": 1, "episodes": 1}'
    )
    command = [study, "--seeds", "7", "--out", str(tmp_path / "out"), "trainer.save_freq=3"]
    seeds.main(command)
    runs = [command for command in asked if "seed=7" in command]
    assert len(runs) == len(seeds.STUDIES[study].arms) and all(run[-1] == "trainer.save_freq=3" for run in runs)
    asked.clear()
    seeds.main(command)
    assert not [command for command in asked if command[0] in ("rl.train", "rl.sft")], "a finished run is run again"
