"""These tests show which groups a step plays: verl's own replay buffer and agent loop manager, in rl.plan's time."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transfer_queue
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
from verl.trainer.ppo.v1.replay_buffer import DAPO_FILTERED_REWARD_COUNTS_KEY, ReplayBuffer, ReplayBufferAsync
from verl.utils import tensordict_utils

from rl.plan.rollout import Boxes, Simulation, flowing, play, whole
from rl.run import errors
from rl.train.groups import GroupBuffer, in_flight, manager_class

DOC = (Path(__file__).parents[3] / "docs/planning.md").read_text()
BATCH, EPISODES, NODE = 32, 8, Boxes(workers=8, each=32, spread=0.35, longest=math.inf)  # as in qwen3_coder_30b


@pytest.mark.parametrize(
    ("missing", "lost", "most", "expected"), [(32, 0.0, 96, 32), (32, 0.5, 96, 64), (32, 0.7, 96, 96), (1, 0.5, 96, 2)]
)
def test_groups_in_flight(missing: int, lost: float, most: int, expected: int) -> None:
    assert in_flight(missing, lost, most) == expected


class World:
    """TransferQueue, trainer and agent loops of one step: groups end as the simulation says."""

    def __init__(
        self, simulation: Simulation, batch: int, ours: bool, most: int = 10, cls: type = ReplayBuffer
    ) -> None:
        self.simulation, self.batch, self.items = simulation, batch, dict[str, dict[str, Any]]()
        self.differ: dict[str, bool] = {}
        settings = {"train_batch_size": batch, "gen_batch_size": 1, "max_inflight_gen_batches": most if ours else 1}
        buffer: Any = cls(
            trainer_mode="sync" if cls is ReplayBuffer else "colocate_async",
            trainer_config={},
            max_off_policy_threshold=None,
            max_off_policy_strategy="drop",
            sampler_kwargs={},
            refill_fn=self.start,
            filter_groups_metric="reward",
            **(settings if cls is ReplayBuffer else {}),
        )
        if ours:
            buffer.__class__ = type("Groups", (GroupBuffer, cls), {})
            buffer.take_over()
        buffer._wait_for_next_poll = self.wait
        self.buffer = buffer

    def start(self, count: int) -> None:
        """Start groups, as verl's trainer does."""
        for number in range(self.simulation.played, self.simulation.played + count):
            self.items[f"g{number}"] = {"is_prompt": True, "status": "running", "global_steps": 1}
        self.simulation.start(count)

    def wait(self, *_: Any) -> float:
        """Let the next group end, in place of a poll's sleep. Two rows stand for its episodes."""
        number, differ = self.simulation.finish()
        group = f"g{number}"
        self.items[group]["status"], self.differ[group] = "finished", differ
        self.items |= {f"{group}_{session}_0": {"session": session} for session in (0, 1)}
        return 0.0

    def step(self, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], dict[str, Any]]:
        """Return the groups that verl's buffer selects for a step, in the order of their start, and its metrics."""

        def get(keys: list[str], partition_id: str, select_fields: list[str]) -> dict[str, list[torch.Tensor]]:
            places = [key.split("_") for key in keys]
            return {"rm_scores": [torch.tensor([float(self.differ[uid] and row == "1")]) for uid, row, _ in places]}

        def clear(partition_id: str, keys: list[str]) -> None:
            for key in keys:
                self.items.pop(key, None)

        with monkeypatch.context() as patch:
            patch.setattr(transfer_queue, "kv_list", lambda *_: {"train": {k: dict(v) for k, v in self.items.items()}})
            patch.setattr(transfer_queue, "kv_batch_get", get)
            patch.setattr(transfer_queue, "kv_clear", clear)
            self.start(self.batch)  # PPOTrainer.prepare_step
            batch, metrics = self.buffer.sample(global_steps=1, partition_id="train", batch_size=self.batch)
        return in_order({key.split("_")[0] for key in batch.keys}), metrics


def in_order(groups: Iterable[str]) -> list[str]:
    """Sort groups by when they were started."""
    return sorted(groups, key=lambda group: int(group[1:]))


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.7])
def test_a_step_plays_what_the_plan_calculates(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = Simulation(NODE, EPISODES, share, random.Random(7))
    play(planned, BATCH, 10 * BATCH)
    world = World(Simulation(NODE, EPISODES, share, random.Random(7)), BATCH, ours=True)
    world.buffer.lost, world.buffer.ended = share, 1.0  # as learned in earlier steps
    world.step(monkeypatch)
    assert (world.simulation.now, world.simulation.played) == (planned.now, planned.played)


class FirstWorkers(Simulation):
    """A simulation in which verl's manager gives groups to workers."""

    def place(self, count: int) -> list[int]:
        each = math.ceil(count / self.boxes.workers)
        return [number // each for number in range(count)]


def test_the_table_of_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its columns for verl come from verl's own buffer. `pytest -s` prints all of it."""
    plain, steps, rows = whole(NODE, BATCH, EPISODES).time, 20, []
    for share in (0.2, 0.5, 0.7):
        cells = [f"{share}"]
        for kind in (FirstWorkers, Simulation):
            rng, time, played = random.Random(1), 0.0, 0
            for _ in range(steps):
                world = World(kind(NODE, EPISODES, share, rng), BATCH, ours=False)
                world.step(monkeypatch)
                time, played = time + world.simulation.now, played + world.simulation.played
            cells.append(f"{played / steps:.0f}, x {time / steps / plain:.1f}")
        ours = whole(NODE, BATCH, EPISODES, share, 3 * BATCH)
        rows.append(f"| {' | '.join(cells)} | {ours.played:.0f}, x {ours.time / plain:.1f} |")
    print("\n".join(["", *rows]))
    assert re.findall(r"^\| 0\.\d(?: \| \d+, x [\d.]+){3} \|$", DOC, re.MULTILINE) == rows


def test_the_table_of_steps_that_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, rows = flowing(NODE, BATCH, EPISODES, 1).time, []
    for share in (0.2, 0.5, 0.7):
        ours = flowing(NODE, BATCH, EPISODES, 1, share)
        with monkeypatch.context() as patch:
            patch.setattr("rl.plan.rollout.Simulation", FirstWorkers)
            verl = flowing.__wrapped__(NODE, BATCH, EPISODES, 1, share)
        cells = [f"{made.played:.0f}, x {made.time / plain:.1f}" for made in (verl, ours)]
        rows.append(f"| {share} | {' | '.join(cells)} |")
    print("\n".join(["", *rows]))
    assert re.findall(r"^\| 0\.\d(?: \| \d+, x [\d.]+){2} \|$", DOC, re.MULTILINE) == rows


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.floats(0, 0.8), st.floats(0, 0.9), st.integers(1, 3), st.integers(0, 999))
def test_all_groups_are_used_replaced_or_counted_as_surplus(
    batch: int, share: float, believed: float, most: int, seed: int
) -> None:
    """Whatever share is believed, no step waits for ever, and the groups used are the first usable ones in order."""
    simulation = Simulation(Boxes(2, 3, 0.5, math.inf), 2, share, random.Random(seed))
    world = World(simulation, batch, ours=True, most=most)
    world.buffer.lost, world.buffer.ended = believed, 1.0
    with pytest.MonkeyPatch.context() as monkeypatch:
        used, metrics = world.step(monkeypatch)
    usable = in_order(group for group, differ in world.differ.items() if differ)
    assert used == usable[:batch] and len(used) == batch
    replaced = sum(metrics.get(DAPO_FILTERED_REWARD_COUNTS_KEY, {}).values())
    surplus = metrics.get("training/filter_groups/discarded_surplus_samples", 0)
    assert simulation.played == batch + replaced + surplus
    assert not simulation.running
    assert world.buffer.lost_share == pytest.approx((believed / 2 + replaced) / (0.5 + simulation.played))


def test_no_more_groups_than_the_config_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(Simulation(NODE, EPISODES, 0.5, random.Random(1)), BATCH, ours=True, most=2)
    world.buffer.lost, world.buffer.ended, seen = 0.9, 1.0, []
    wait = world.buffer._wait_for_next_poll
    world.buffer._wait_for_next_poll = lambda *some: (seen.append(world.simulation.running), wait(*some))[1]
    world.step(monkeypatch)
    assert max(seen) == 2 * BATCH


def raising(world: World, ends: Iterable[str]) -> None:
    """Let groups end in this order, for ever: "raised" and "lost" without rows, "one" with one episode's, "good"."""
    order = itertools.cycle(ends)

    def wait(*_: Any) -> float:
        group = next(name for name, tag in world.items.items() if tag.get("status") == "running")
        how = next(order)
        world.items[group]["status"] = "finished" if how in ("good", "lost") else "failure"
        if how not in ("raised", "lost"):
            world.differ[group] = True
            world.items |= {f"{group}_{session}_0": {} for session in ((0, 1) if how == "good" else (1,))}
        return 0.0

    world.buffer._wait_for_next_poll = wait


@pytest.mark.parametrize("cls", [ReplayBuffer, ReplayBufferAsync])
def test_a_loop_that_raises_in_every_group_ends_the_run(cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was replaced for ever. The error is the agent loop's own."""
    world = World(Simulation(NODE, EPISODES, 0.0, random.Random(1)), 4, ours=True, cls=cls)
    world.buffer.sync_refill_failed_groups = True
    world.buffer.most_raised, world.buffer.last_error = 8, lambda: "KeyError: 'image'"
    raising(world, ["raised"])
    with pytest.raises(RuntimeError, match=r"^the agent loop raised in each of the last 8 groups: KeyError: 'image'$"):
        world.step(monkeypatch)


@pytest.mark.parametrize("cls", [ReplayBuffer, ReplayBufferAsync])
def test_groups_that_are_all_lost_end_the_run_too(cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead engine for containers had them replaced for ever, where failed groups are replaced."""
    world = World(Simulation(NODE, EPISODES, 0.0, random.Random(1)), 4, ours=True, cls=cls)
    world.buffer.sync_refill_failed_groups = True
    world.buffer.most_raised, world.buffer.most_barren, world.buffer.causes = 8, 32, lambda: "infra/no_engine 256"
    raising(world, ["lost"])
    with pytest.raises(
        RuntimeError, match=r"^no episode of the last 32 groups can be trained on: infra/no_engine 256$"
    ):
        world.step(monkeypatch)


@pytest.mark.parametrize("ends", [["raised"] * 7 + ["good"], ["raised"] * 7 + ["one", "raised", "good"]])
def test_groups_with_rows_in_between_let_it_go_on(ends: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(Simulation(NODE, EPISODES, 0.0, random.Random(1)), 4, ours=True, cls=ReplayBufferAsync)
    world.buffer.most_raised = 8
    raising(world, ends)
    used, _ = world.step(monkeypatch)
    assert len(used) == 4


def test_the_last_error_is_named(tmp_path: Path) -> None:
    assert errors.last(tmp_path) == "see run.log"
    for text in ("first", "second\n  line"):
        errors.note(tmp_path, ValueError(text))
    assert errors.last(tmp_path) == "ValueError: second line"


def test_modes_that_do_not_wait_keep_verls_refill_and_take_groups_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(Simulation(NODE, EPISODES, 0.0, random.Random(1)), 4, ours=True, cls=ReplayBufferAsync)
    assert world.buffer.submit is None and world.buffer.refill_fn == world.start
    world.start(20)
    for _ in range(10):
        world.wait()
    ended = list(world.differ)
    assert ended[:4] != in_order(ended)[:4]
    assert world.step(monkeypatch)[0] == in_order(ended)[:4]


# ------------------------------------------------------------------ who plays them


def batch_of(count: int, again: bool) -> TensorDict:
    """Prompts as verl's trainer submits them; when a run resumes, they come back with jagged columns."""
    jagged = torch.nested.as_nested_tensor([torch.zeros(1)] * count, layout=torch.jagged)
    rows = {"uid": [f"g{i}" for i in range(count)], "dummy_tensor": jagged if again else torch.zeros(count, 1)}
    batch = tensordict_utils.get_tensordict(rows)
    tensordict_utils.assign_non_tensor_data(batch, "global_steps", 3)
    return batch


@pytest.fixture
def dispatch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[str]]]:
    """Gives batches of these sizes to a manager with four workers; returns the groups that each worker gets."""

    def given(cls: type, sizes: list[int], again: bool = False) -> list[list[str]]:
        monkeypatch.setattr("ray.get", lambda refs: refs)
        got: list[list[str]] = [[] for _ in range(4)]

        def worker(mine: list[str]) -> SimpleNamespace:
            def remote(chunk: TensorDict) -> None:
                assert chunk["global_steps"] == 3 and chunk["dummy_tensor"].shape[0] == len(chunk)
                mine.extend(chunk["uid"])

            return SimpleNamespace(generate_sequences=SimpleNamespace(remote=remote))

        manager: Any = object.__new__(cls)
        manager.agent_loop_workers = [worker(mine) for mine in got]
        for size in sizes:
            manager.generate_sequences(batch_of(size, again))
        return got

    return given


@pytest.mark.parametrize("again", [False, True])
def test_replacements_go_to_all_workers(dispatch: Callable[..., list[list[str]]], again: bool) -> None:
    assert [len(mine) for mine in dispatch(manager_class(), [8, 1, 2, 1], again)] == [3, 3, 3, 3]
    assert dispatch(manager_class(), [6, 2], again)[1:3] == [["g1", "g5"], ["g2", "g0"]]


def test_verls_manager_still_gives_replacements_to_the_first_workers(
    dispatch: Callable[..., list[list[str]]],
) -> None:
    assert [len(mine) for mine in dispatch(AgentLoopManagerTQ, [8, 1, 2, 1])] == [5, 3, 2, 2]
