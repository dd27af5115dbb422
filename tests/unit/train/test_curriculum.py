"""Tasks are drawn by their rates: middling ones often, solved ones not for a while, the same ones after a resume."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torchdata.stateful_dataloader import StatefulDataLoader

from rewards.task import load_tasks
from rl.checks.numbers import check_curriculum
from rl.config.compose import ConfigError
from rl.data.rates import ResolveRate, write_rated
from rl.metrics.episodes import EpisodeLog
from rl.train.curriculum import Curriculum, CurriculumTrainer, Rule
from rl.train.dataset import TaskDataset
from tests.unit.rewards.test_task import row, write

RULE = Rule(prefer=(0.2, 0.8), other=0.25, solved=1.0, window=8, readmit_after=5)
NAMES = [f"t{number}" for number in range(8)]
UNKNOWN = dict.fromkeys(NAMES, (0, 0))


def lines(step: int, task: str, resolved: int, of: int = 8, **changes: Any) -> list[dict[str, Any]]:
    one = {"task": task, "step": step, "infra": False, "split": "train"}
    return [one | {"resolved": number < resolved} | changes for number in range(of)]


def draw(some: Curriculum, count: int) -> list[str]:
    return [NAMES[next(some)] for _ in range(count)]


def play(some: Curriculum, steps: range, resolved: dict[str, int], batch: int = 4) -> list[list[str]]:
    """Draw for steps and take in what is played; ``resolved``: of 8 episodes of a task."""
    drawn = []
    for step in steps:
        some.begin(step)
        drawn.append(draw(some, batch))
        for task in drawn[-1]:
            some.learn(lines(step, task, resolved.get(task, 0)))
    return drawn


def test_unmeasured_tasks_are_all_drawn_before_any_comes_again() -> None:
    first, second = (play(Curriculum(UNKNOWN, RULE, seed), range(1, 3), {}) for seed in (1, 2))
    assert sorted(first[0] + first[1]) == sorted(second[0] + second[1]) == NAMES
    assert first != second


def test_tasks_of_middling_rates_are_drawn_more_often() -> None:
    rates = {name: (8, 4) if name in ("t0", "t1") else (8, 0) for name in NAMES}
    played = play(Curriculum(rates, RULE, 0), range(1, 401), {"t0": 4, "t1": 3}, 1)
    drawn = Counter(name for names in played for name in names)
    often = [drawn.pop("t0"), drawn.pop("t1")]
    assert min(often) > 3 * max(drawn.values())
    assert len(drawn) == 6  # what was never resolved is tried, too


def test_a_solved_task_is_left_out_and_comes_back() -> None:
    some = Curriculum(UNKNOWN, RULE, 0)
    solved = {"t0": 8}
    when = [step for step, names in enumerate(play(some, range(1, 60), solved), 1) if "t0" in names]
    assert len(when) > 3
    assert all(later - before > RULE.readmit_after for before, later in itertools.pairwise(when))
    assert some.metrics()["curriculum/unmeasured"] == 0
    back = play(some, range(60, 90), {"t0": 4})  # it was forgotten
    assert sum("t0" in names for names in back) > 15


def test_a_probe_counts_from_the_start() -> None:
    some = Curriculum(UNKNOWN | {"t0": (8, 8), "t1": (4, 4), "t2": (16, 8)}, RULE, 0)
    assert some.metrics() == {
        "curriculum/solved": 1,  # four episodes are too few to call t1 solved
        "curriculum/preferred": 1,
        "curriculum/unmeasured": 5,
        "curriculum/rate": pytest.approx(2.5 / 3),
    }
    assert not any("t0" in names for names in play(some, range(1, 6), {"t1": 2}))


def test_where_all_are_solved_the_run_goes_on_without_playing_one_twice() -> None:
    some = Curriculum(dict.fromkeys(NAMES, (8, 8)), RULE, 0)
    for names in play(some, range(1, 20), dict.fromkeys(NAMES, 8), batch=8):
        assert sorted(names) == NAMES
    some.begin(20)
    assert set(draw(some, 12)) == set(NAMES)


def test_rates_are_those_of_the_newest_episodes_and_lost_ones_do_not_count() -> None:
    some = Curriculum({"t0": (100, 100)}, RULE, 0)
    some.learn(lines(1, "t0", 0, of=4) + lines(1, "t0", 0, infra=True) + lines(1, "unknown", 8))
    assert some.metrics()["curriculum/rate"] == pytest.approx(100 / 104)
    some.learn(lines(2, "t0", 1, of=4))
    assert some.metrics()["curriculum/rate"] == pytest.approx(1 / 8)


@given(
    saved=st.integers(1, 12),
    seed=st.integers(0, 99),
    batch=st.integers(1, 8),
    resolved=st.dictionaries(st.sampled_from(NAMES), st.integers(0, 8)),
)
def test_a_resumed_run_draws_what_an_unbroken_one_draws(
    saved: int, seed: int, batch: int, resolved: dict[str, int]
) -> None:
    unbroken, killed, resumed = (Curriculum(UNKNOWN, RULE, seed) for _ in range(3))
    expected = play(unbroken, range(1, 15), resolved, batch)
    before = play(killed, range(1, saved + 1), resolved, batch)
    assert before == expected[:saved]
    assert all(len(set(names)) == batch for names in expected)
    resumed.load_state_dict(killed.state_dict())
    for step, names in enumerate(before, 1):
        resumed.learn(one for task in names for one in lines(step, task, resolved.get(task, 0)))
    assert play(resumed, range(saved + 1, 15), resolved, batch) == expected[saved:]


class Base:
    """What of verl's trainer the mix-in meets."""

    def __init__(self, run_dir: Path, dataset: Any) -> None:
        self.config = OmegaConf.create(
            {"run": {"dir": str(run_dir)}, "data": {"seed": 1}, "curriculum": {"by_rate": True, **vars(RULE)}}
        )
        self.train_dataset, self.global_steps = dataset, 1
        self._init_dataloader()
        self.batches = iter(self.train_dataloader)

    def _init_dataloader(self) -> None:
        self.train_dataloader = StatefulDataLoader(self.train_dataset, batch_size=2, collate_fn=list, drop_last=True)

    def on_step_begin(self) -> None: ...

    def _compute_metrics(self, batch: Any, metrics: dict[str, Any]) -> None:
        metrics["verl"] = 1


class Trainer(CurriculumTrainer, Base): ...  # type: ignore[misc]


def test_the_loader_of_a_trainer_draws_by_the_episodes_of_its_run(tmp_path: Path) -> None:
    names = NAMES[:4]
    source, rated = tmp_path / "a.parquet", tmp_path / "rated.parquet"
    write(source, [row(instance_id=name) for name in names])
    write_rated(source, rated, load_tasks(source), {name: ResolveRate(8, 8 if name == "t0" else 4) for name in names})
    assert pyarrow.parquet.read_table(rated).num_rows == 4
    dataset = TaskDataset(str(rated), None, OmegaConf.create({"val_files": []}))
    assert dataset.rates == {name: (8, 8 if name == "t0" else 4) for name in names}

    def steps(made: Any, some: range) -> list[list[str]]:
        drawn = []
        for made.global_steps in some:
            made.on_step_begin()
            drawn.append([item["task"] for item in next(made.batches)])
            log = EpisodeLog(tmp_path)
            for task in drawn[-1]:
                for one in lines(made.global_steps, task, 8 if task == "t1" else 4):
                    log.append(one)
        return drawn

    unbroken = Trainer(tmp_path, dataset)
    before = steps(unbroken, range(1, 5))
    assert not any("t0" in names for names in before) and sum("t1" in names for names in before) == 1
    position = unbroken.train_dataloader.state_dict()
    resumed = Trainer(tmp_path, dataset)
    resumed.train_dataloader.load_state_dict(position)
    resumed.batches = iter(resumed.train_dataloader)
    resumed.global_steps = 5
    resumed.on_step_begin()
    again = [item["task"] for item in next(resumed.batches)]
    assert again == steps(unbroken, range(5, 6))[0]
    metrics: dict[str, Any] = {}
    unbroken._compute_metrics(None, metrics)
    assert metrics["verl"] == 1 and metrics["curriculum/solved"] == 2


def test_impossible_rules_are_refused() -> None:
    def check(prefer: list[float], path: str = "pkg://rl.train.dataset") -> None:
        values = {"curriculum": {"prefer": prefer, "by_rate": True}, "data": {"custom_cls": {"path": path}}}
        check_curriculum(OmegaConf.create(values))

    check([0, 1])
    for wrong in ([0.2], [0.8, 0.2], [-1, 1], ["a", "b"], [0, 1, 1]):
        with pytest.raises(ConfigError, match="two resolve rates"):
            check(wrong)
    with pytest.raises(ConfigError, match="needs task files"):
        check([0, 1], "other")
