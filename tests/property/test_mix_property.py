"""The agent of a group is a pure function of seed, task and step, drawn by weight."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.task import Task
from rollout.agent.mix import Mix
from rollout.episode import Setup
from tests.datasets import snapshot_row

names = st.text("abc_", min_size=1, max_size=3)
weights = st.dictionaries(names, st.one_of(st.just(0.0), st.floats(0.01, 100)), min_size=1, max_size=6)
some = weights.filter(lambda found: any(found.values()))
places = st.tuples(st.text(max_size=8), st.integers(0, 10**6))


@given(some, st.integers(), places, st.randoms())
def test_the_draw_depends_on_seed_task_and_step_alone(found: dict[str, float], seed: int, at: Any, order: Any) -> None:
    drawn = Mix(found, seed).draw(*at)
    assert found[drawn] > 0
    listed = list(found.items())
    order.shuffle(listed)
    assert Mix(dict(listed), seed).draw(*at) == drawn
    assert Mix({name: 4 * weight for name, weight in listed}, seed).draw(*at) == drawn  # exact in floating point


@given(some, st.integers(), places, names, st.floats(0, 100))
def test_an_agent_that_joins_or_leaves_changes_only_its_own_groups(
    found: dict[str, float], seed: int, at: Any, new: str, weight: float
) -> None:
    rest = {name: value for name, value in found.items() if name != new}
    if any(rest.values()):
        assert Mix(rest | {new: weight}, seed).draw(*at) in (new, Mix(rest, seed).draw(*at))


@given(weights, places)
def test_a_task_may_name_its_agent(found: dict[str, float], at: Any) -> None:
    mix = Mix(found)
    assert {mix.draw(*at, name) for name in found} == set(found)
    with pytest.raises(ValueError, match=r"'other' is not in agent\.mix, which has"):
        mix.draw(*at, "other")
    if not any(found.values()):
        with pytest.raises(ValueError, match=r"the task names no agent, and all weights of agent\.mix are 0"):
            mix.draw(*at)


def test_agents_are_drawn_as_often_as_their_weights_say() -> None:
    mix = Mix({"a": 3, "b": 1, "never": 0})
    drawn = Counter(mix.draw(f"task-{task}", step) for task in range(40) for step in range(100))
    assert set(drawn) == {"a", "b"} and abs(drawn["a"] / 4000 - 0.75) < 0.03  # four standard deviations
    by_task = {task: {mix.draw(f"task-{task}", step) for step in range(100)} for task in range(40)}
    assert all(found == {"a", "b"} for found in by_task.values())
    assert [Mix({"a": 1, "b": 1}).draw("t", step) for step in range(8)] == list("bbabbbaa")


@pytest.mark.parametrize("wrong", [None, {}, ["a"], {"a": -1}, {"a": True}, {"a": "1"}, {"a": float("inf")}])
def test_weights_that_are_none(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"^agent\.mix is .* it must say how often each agent plays, such as"):
        Mix(wrong)


@given(st.text("xy", min_size=1, max_size=4), st.integers(1, 50))
def test_all_episodes_of_a_group_have_its_agent(name: str, step: int) -> None:
    """Each process has its own set-up; held-out tasks keep their agent from step to step."""
    from rl.run.pacing import Deadline
    from rl.train.agent_loop import Worker
    from rollout.agent.claude_code import ClaudeCode
    from tests.kit import QueueEngine, char_policy

    agents: Any = {one: (ClaudeCode(Path("/bin", one), 3, 9.0 * len(one), 64), f"boot {one}") for one in ("a", "bb")}
    any_: Any = None
    mix = Mix({"a": 1, "bb": 1})
    setup = Setup(char_policy(QueueEngine()), any_, any_, any_, mix=mix, agents=agents)
    task = replace(Task.from_row(snapshot_row("t"), Path()), instance_id=name)
    workers: list[Any] = [object.__new__(Worker) for _ in range(2)]
    for one in workers:
        one.setup = setup
        one.deadlines = {key: Deadline(None, agent.timeout_s) for key, (agent, _) in agents.items()}
    for split, at in (("train", step), ("val", 0)):
        for made in (workers[0].setting({}, split, task, step), workers[1].setting({"seed": 5}, split, task, step)):
            assert made.name == mix.draw(name, at) and made.mix is None and made.of(task) == made
            assert (made.agent, made.boot) == agents[made.name]
    named = replace(task, agent="bb")
    assert workers[0].setting({}, "train", named, step).name == setup.of(named).name == "bb"
