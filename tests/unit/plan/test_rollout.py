"""This module tests rl.plan's time of a step: the simulated rollout, groups that are replaced, validation."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from rl.config.compose import ConfigError
from rl.plan import host, plan
from rl.plan.__main__ import main
from rl.plan.layout import layout_of
from rl.plan.memory import GIB
from rl.plan.rollout import Boxes, flowing, whole
from rl.plan.throughput import rollouts, validation
from tests.check_kit import composed

DOC = (Path(__file__).parents[3] / "docs/planning.md").read_text()
ONE_NODE = re.findall(r"^\| `(\+experiment=[^`]+)`.* \| ([\d.]+) \| (\d+) \| (\d+) \|$", DOC, re.MULTILINE)
NODE = Boxes(workers=8, each=32, spread=0.35, longest=math.inf)
EVEN = Boxes(workers=2, each=4, spread=0.0, longest=math.inf)  # every episode takes 1


@pytest.mark.parametrize("row", ONE_NODE, ids=[row[0].split()[0] for row in ONE_NODE])
def test_the_table_of_one_node(row: tuple[str, ...]) -> None:
    overrides, *figures = row
    made = plan(composed(*overrides.split()))
    sizes = {ledger.name: ledger.total / GIB for ledger in made.node}
    room = min((phase.limit - phase.total) / GIB for phase in made.gpu)
    found = [f"{room:.1f}", f"{max(sizes[host.START], sizes[host.STEP]):.0f}", f"{made.pace.step_s / 60:.0f}"]
    assert found == figures and not made.problems


def test_the_table_of_one_node_is_found() -> None:
    assert len(ONE_NODE) == 5


@pytest.mark.parametrize(("groups", "size", "time"), [(2, 4, 1), (1, 8, 2), (3, 4, 2), (8, 8, 8)])
def test_episodes_wait_for_a_box_of_their_worker(groups: int, size: int, time: int) -> None:
    assert whole(EVEN, groups, size) == (time, groups)


def test_a_step_waits_for_its_longest_episode() -> None:
    assert 2.4 < whole(NODE, 32, 8).time < 2.7
    assert whole(NODE._replace(longest=1.5), 32, 8).time == pytest.approx(1.5)


def test_steps_that_do_not_wait_take_the_groups_that_have_ended() -> None:
    assert flowing(EVEN, 2, 4, 0) == (1, 2)
    assert flowing(NODE, 32, 8, 1).time < 0.5 * whole(NODE, 32, 8).time
    # verl replaces one by one: as many are played as it takes.
    assert flowing(NODE, 32, 8, 1, 0.5).played == pytest.approx(64, rel=0.05)


@pytest.mark.parametrize("experiment", ["qwen3_coder_30b", "qwen3_coder_30b_async", "qwen3_4b"])
def test_the_more_groups_are_replaced_the_longer_a_step_takes(experiment: str) -> None:
    config, before = composed(f"+experiment={experiment}"), 0.0
    for share in (0.0, 0.2, 0.5, 0.7):
        config.plan.all_equal_groups = share
        made, plain = rollouts(config, NODE)
        assert made.time > before and made.played >= config.data.train_batch_size / (1 - share) * 0.9
        assert share or made == plain
        before = made.time
    config.algorithm.filter_groups.enable = False
    made, plain = rollouts(config, NODE)
    assert made == plain and made.played == config.data.train_batch_size


@pytest.mark.parametrize("share", [-0.1, 0.96, 1.0])
def test_an_impossible_share_is_one_line(share: float) -> None:
    config = composed("+experiment=qwen3_4b", f"plan.all_equal_groups={share}")
    with pytest.raises(ConfigError, match=r"^plan\.all_equal_groups=.* from 0 to 0\.95$"):
        rollouts(config, NODE)


def test_replacements_take_boxes() -> None:
    """A step of 64 episodes has 256 boxes here: what is started ahead runs in them."""
    overrides = ["+experiment=qwen3_coder_30b_lora", "sandbox.concurrency=32"]
    assert layout_of(composed(*overrides)).concurrent == 192  # three batches
    assert layout_of(composed(*overrides, "algorithm.filter_groups.enable=false")).concurrent == 64
    assert layout_of(composed("+experiment=qwen3_coder_30b_lora")).concurrent == 72


@pytest.mark.parametrize(
    ("every", "before", "steps", "times"),
    [(10, True, 200, 21), (10, False, 200, 20), (10, False, 195, 20), (-1, True, 200, 1), (-1, False, 200, 0)],
)
def test_validations_of_a_run_are_spread_over_its_steps(every: int, before: bool, steps: int, times: int) -> None:
    config = composed("+experiment=qwen3_4b", f"trainer.test_freq={every}", f"trainer.total_training_steps={steps}")
    config.trainer.val_before_train = before
    assert validation(config, EVEN) == (math.ceil(100 / 8), pytest.approx(times / steps))  # 100 episodes in 8 boxes
    config.actor_rollout_ref.rollout.val_kwargs.n = 4
    assert validation(config, EVEN) == (50, pytest.approx(times / steps))


def test_validation_counts_the_tasks_that_are_here(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"x": range(24)}), tmp_path / "val.parquet")
    config = composed("+experiment=qwen3_4b", trainer__test_freq=1, trainer__val_before_train=False)
    config.data.val_files = str(tmp_path / "val.parquet")
    assert validation(config, EVEN) == (3, 1)
    config.data.val_batch_size = 4  # one batch after another
    assert validation(config, EVEN) == (6, 1)
    config.data.val_max_samples = 8
    assert validation(config, EVEN) == (2, 1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["+experiment=quickstart"], "makes this experiment's model when it runs; give a directory or name"),
        (["+experiment=qwen3_4b", "scale=gpu"], "makes this experiment's model when it runs; give a directory or name"),
        (["+experiment=qwen3_4b", "policy=/nowhere"], "policy: no directory /nowhere"),
    ],
)
def test_the_command_says_what_it_cannot_plan(
    given: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["rl.plan", *given])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize("limit", [{}, {"max_turns": 0}])
def test_an_agent_without_a_limit_of_turns(limit: dict[str, int]) -> None:
    made = composed("+experiment=qwen3_8b", agent__max_turns=10**6)
    wanted = plan(made).pace
    made.agent = {"kind": "codex", "timeout_s": made.agent.timeout_s, **limit}
    assert plan(made).pace == wanted


def test_an_episode_that_hangs_holds_a_step_up_until_its_deadline() -> None:
    """With one in two hundred, a rollout that would take more than an hour takes hardly longer than without any."""
    seconds = {
        told: plan(composed("+experiment=qwen3_coder_30b", *told.split())).pace.seconds["rollout"]
        for told in ("plan.timeouts=0", "plan.timeouts=0.005", "plan.timeouts=0.005 episode.deadline=null")
    }
    for told in seconds.values():
        assert f"{round(told, -1):,.0f} s" in DOC
    calm, ended, waiting = seconds.values()
    assert calm < ended < 2200 and ended < 1.2 * calm and waiting > 3600
