"""This module tests two rounds with the real Claude Code, vLLM and verl's trainer, killed in the middle; then a step of
GRPO.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl.metrics.episodes import read_jsonl, resolve_rate
from rollout import audit
from tests.integration.programs_kit import kill_after, start

ROUNDS = ["+experiment=quickstart", "rounds=2", "tasks=12", "samples=6", "trainer.logger=[]"]
ROUNDS += ["quickstart.heldout_tasks=16"]


@pytest.mark.long
@pytest.mark.claude
@pytest.mark.engine
@pytest.mark.timeout(3600)
def test_two_rounds_on_resolved_episodes_raise_the_resolve_rate(tmp_path: Path) -> None:
    """It is killed with -9 while it collects, and goes on with the episodes that it lacks."""
    command = [*ROUNDS, f"run.root={tmp_path}"]
    kill_after("30/72 ", *command, program="rl.sft")
    (run,) = (tmp_path / "quickstart-sft").iterdir()
    played = {record.episode for record in audit.Reader(run / "iteration_1" / "collection")}
    assert 30 <= len(played) < 72
    again = start(*command, program="rl.sft")
    text, _ = again.communicate()
    assert again.returncode == 0, text
    assert f"{72 - len(played)} episodes to play, {len(played)} are there" in text
    reports = [json.loads((run / f"iteration_{n}" / "report.json").read_text()) for n in range(3)]
    rates = [report["evaluation"]["pass_at_1"]["value"] for report in reports]
    assert rates[0] < 0.5 and rates[1] > rates[0] and rates[2] > rates[0] + 0.2, rates
    for report in reports[1:]:
        chosen, sft = report["selection"], report["sft"]
        assert chosen["episodes"] == chosen["resolved"] == sft["episodes"] == sft["rows"] > 0
        assert sft["model"] == reports[report["iteration"] - 1]["policy"]
    assert audit.main([str(run / "iteration_2" / "data")]) == 0

    grpo = ["+experiment=quickstart", f"policy={run}", "trainer.total_training_steps=1", "trainer.logger=[]"]
    grpo += ["trainer.val_before_train=false", "trainer.test_freq=-1", f"run.root={tmp_path}"]
    trained = start(*grpo, program="rl.train")
    text, _ = trained.communicate()
    assert trained.returncode == 0 and "warm start" not in text, text
    (directory,) = (tmp_path / "quickstart").iterdir()
    (step,) = read_jsonl(directory / "metrics.jsonl")
    rate = resolve_rate(step, "train")
    assert rate is not None and rate > rates[0]
