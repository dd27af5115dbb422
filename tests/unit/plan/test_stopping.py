"""rl.plan says how long a run may take to end when its job is warned, and a grace that cannot hold is refused."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from rl.checks.model import check_plan
from rl.config.compose import ConfigError
from rl.plan import plan
from rl.plan.doubt import doubts
from rl.plan.stopping import grace
from rl.plan.tables import show
from tests.unit.plan.test_plan import DOC, GPU_EXPERIMENTS, config


def test_the_plan_prints_the_grace_and_the_warning_that_fit() -> None:
    made = config()
    console = Console(record=True, file=io.StringIO())
    show(plan(made), made, console)
    text = console.export_text()
    assert "172 s for the rest of a step and 366 s for its checkpoint of 341 GiB" in text
    assert "In the bad case, too: run.grace_s=1200 sbatch --signal=B:USR1@1500" in text
    assert "run.grace_s is 1800, for --signal=B:USR1@2100" in text


def test_a_grace_that_cannot_hold_is_a_config_error_with_its_numbers() -> None:
    found = plan(config("qwen3_coder_30b", "run.grace_s=500"))
    assert found.problems == (
        "run.grace_s=500 is too short: after a warning the rest of a step takes 172 s and its checkpoint 366 s (341 "
        "GiB at plan.save_gbs=1); set run.grace_s=1200 and sbatch --signal=B:USR1@1500, which fit the bad case, too",
    )
    with pytest.raises(ConfigError, match=r"run\.grace_s=500 is too short"):
        check_plan(config("qwen3_coder_30b", "run.grace_s=500"))
    assert plan(config("qwen3_coder_30b", "run.grace_s=500", "plan.save_gbs=2")).problems == ()


@pytest.mark.parametrize("experiment", GPU_EXPERIMENTS)
def test_shipped_experiments_can_end_in_time(experiment: str) -> None:
    """The figures are those of the table in docs/planning.md."""
    made = config(experiment)
    planned = plan(made)
    found = planned.stopping
    fits = grace(found, planned.pace, doubts(made, planned.shape, planned.layout))
    assert made.run.grace_s >= fits > found.needed_s
    assert made.run.save_minutes == 60
    figures = [found.rest, found.save, fits, made.run.grace_s, found.warning_s(made.run.grace_s)]
    (row,) = re.findall(rf"^\| `{experiment}` \| (?:step|rest) \| (.+) \|$", DOC, re.MULTILINE)
    assert [int(cell) for cell in row.split(" | ")] == [round(figure) for figure in figures]


def test_modes_that_cannot_leave_a_rollout_need_time_for_a_step_or_a_validation() -> None:
    made = plan(config("qwen3_coder_30b_async"))
    assert made.stopping.rest == pytest.approx(made.pace.step_s - made.pace.seconds["validation"])
    longer = plan(config("qwen3_coder_30b_async", "plan.val_tasks=1000"))
    assert longer.stopping.rest == longer.pace.validation_s > longer.pace.step_s - longer.pace.seconds["validation"]
