"""Episodes of an interrupted rollout are kept: verl's own fetching, replay buffer and a real TransferQueue.

Agent loops are the one thing that is missing: the tests put rows as verl's worker does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from rl.train import unfinished
from rl.train.groups import GroupBuffer, RolloutInterrupted
from rl.train.unfinished import Draws

BATCH, EPISODES = 4, 3


@pytest.fixture(scope="module")
def queue(tmp_path_factory: pytest.TempPathFactory) -> Generator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=10**8, log_to_driver=False)
    try:
        tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
        yield
        tq.close()
    finally:
        ray.shutdown()


@pytest.fixture(autouse=True)
def empty(queue: None) -> Iterator[None]:
    yield
    for partition, items in tq.kv_list().items():
        if items:
            tq.kv_clear(keys=list(items), partition_id=partition)


class Trainer:
    """verl's data loader and fetching, and its buffer, with what rl.train.trainer does between them."""

    def __init__(self, run_dir: Path, filters: bool, position: dict | None = None) -> None:
        from verl.trainer.ppo.utils import create_rl_sampler
        from verl.utils.dataset.rl_dataset import collate_fn

        data = [
            {"index": i, "raw_prompt": [{"content": str(i)}], "kept": "", "dummy": torch.zeros(1)} for i in range(9)
        ]
        sampler = create_rl_sampler(OmegaConf.create({"shuffle": True, "seed": 3}), data)
        loader = StatefulDataLoader(data, batch_size=1, sampler=sampler, drop_last=True, collate_fn=collate_fn)
        config = OmegaConf.create({"data": {"train_batch_size": BATCH, "gen_batch_size": 1}})
        if position:
            loader.load_state_dict(position)
        self.run_dir, self.played = run_dir, dict[str, Any]()  # what was given to agent loops, by group
        self.verl = SimpleNamespace(
            train_dataloader=loader, train_dataloader_it=None, config=config, global_steps=1, trainer_mode="sync"
        )
        self.verl._fetch_one_gen_batch = lambda: PPOTrainer._fetch_one_gen_batch(self.verl)  # ty: ignore
        self.verl.agent_loop_manager = SimpleNamespace(generate_sequences=self.generate)
        buffer: Any = ReplayBuffer(
            trainer_mode="sync",
            trainer_config=OmegaConf.create({}),
            max_off_policy_threshold=None,
            max_off_policy_strategy="drop",
            sampler_kwargs=OmegaConf.create({}),
            poll_interval=0.0,
            refill_fn=self.add,
            filter_groups_metric="reward" if filters else None,
            sync_refill_failed_groups=filters,
            train_batch_size=BATCH,
            gen_batch_size=1,
            max_inflight_gen_batches=3,
        )
        buffer.__class__ = type("Groups", (GroupBuffer, ReplayBuffer), {})
        buffer.take_over()
        self.buffer = buffer

    def begin(self) -> None:
        self.position = copy.deepcopy(self.verl.train_dataloader.state_dict())
        kept = unfinished.load(self.run_dir, after=0)
        self.draws = Draws(self.run_dir, 1, kept, "reward")
        if kept:
            self.buffer.lost, self.buffer.ended = kept.lost, kept.ended
        self.add(BATCH)

    def add(self, count: int) -> int:
        batch = self.draws.submit(PPOTrainer._next_train_batch(self.verl, count))  # ty: ignore
        if batch is not None:
            PPOTrainer._submit_batch_to_rollout(self.verl, batch)  # ty: ignore
        return count

    def generate(self, batch: Any) -> None:
        for uid, task, kept in zip(batch["uid"], batch["index"], batch["kept"], strict=True):
            self.played[str(uid)] = (int(task), str(kept))

    def tasks(self) -> list[int]:
        return list(self.draws.drawn.values())

    def group(self, task: int) -> str:
        (uid,) = [uid for uid, drawn in self.draws.drawn.items() if drawn == task]
        return uid

    def finish(self, uid: str, rewards: list[float], sessions: tuple[int, ...] = (0, 1, 2), last: bool = True) -> None:
        """Let episodes of a group end, as verl's worker writes them: two rows each, of different lengths."""
        task = self.draws.drawn[uid]
        tq.kv_put(key=uid, partition_id="train", tag={"status": "running"})
        for session in sessions:
            rows = [row(task, session, number, rewards[session]) for number in (0, 1)]
            tq.kv_batch_put(
                keys=[f"{uid}_{session}_{number}" for number in (0, 1)],
                partition_id="train",
                fields=list_of_dict_to_tensordict(rows),
                tags=[{"status": "success", "seq_len": 5 + number} for number in (0, 1)],
            )
        if last:
            tq.kv_put(key=uid, partition_id="train", tag={"status": "finished"})

    def sample(self, interrupted: bool = False) -> tuple[Any, dict[str, Any]]:
        self.buffer.interrupts = lambda partition: interrupted
        return self.buffer.sample(global_steps=1, partition_id="train", batch_size=BATCH)

    def stop(self) -> unfinished.UnfinishedStep:
        with pytest.raises(RolloutInterrupted):
            self.sample(interrupted=True)
        return self.draws.keep(self.buffer.replaced, self.buffer.lost, self.buffer.ended)


def row(task: int, session: int, number: int, reward: float) -> dict[str, Any]:
    length = 3 + number + session
    return {
        "responses": torch.arange(length) + 100 * task,
        "rm_scores": torch.tensor([0.0] * (length - 1) + [reward]),
        "routed_experts": torch.full((length, 2, 1), task, dtype=torch.int16),
        "extra_fields": {"reward_extra_info": {"resolved": reward}, "raw": [task, session]},
        "raw_prompt": [{"content": str(task)}],
        "task": f"repo__{task}",
        "num_turns": session + 1,
        "nothing": None,
        "index": task,
        "multi_modal_inputs": {},
    }


def contents(batch: Any) -> list[tuple]:
    """All that is in the rows of a batch, sorted by task and episode."""
    found = []
    for key, tag in zip(batch.keys, batch.tags, strict=True):
        data = tq.kv_batch_get(keys=[key], partition_id="train")
        tensors = {name: data[name][0].tolist() for name in ("responses", "rm_scores", "routed_experts")}
        others = [list(data[name]) for name in ("extra_fields", "raw_prompt", "task", "num_turns", "nothing")]
        plain = [getattr(value, "data", value) for (value,) in others]
        found.append((int(next(iter(data["index"]))), key.split("_")[1:], tag, tensors, plain))
    return sorted(found, key=lambda one: one[:2])


REWARDS = [1.0, 0.0, 1.0]


def test_a_resumed_step_plays_only_missing_episodes_and_has_the_same_batch(tmp_path: Path) -> None:
    whole = Trainer(tmp_path / "whole", filters=False)
    whole.begin()
    for task in whole.tasks():
        whole.finish(whole.group(task), REWARDS)
    batch, _ = whole.sample()
    expected = contents(batch)
    assert len(expected) == BATCH * EPISODES * 2
    tq.kv_clear(keys=batch.keys, partition_id="train")

    run_dir = tmp_path / "run"
    run_dir.mkdir()
    first = Trainer(run_dir, filters=False)
    first.begin()
    tasks = first.tasks()
    assert tasks == whole.tasks()
    first.finish(first.group(tasks[1]), REWARDS)
    first.finish(first.group(tasks[2]), REWARDS, sessions=(0, 2), last=False)
    kept = first.stop()
    assert kept.episodes == 5 and unfinished.count(run_dir, 0) == 5 and unfinished.count(run_dir, 1) == 0
    tq.kv_clear(keys=list(tq.kv_list("train")["train"]), partition_id="train")  # a new TransferQueue

    second = Trainer(run_dir, filters=False, position=first.position)
    second.begin()
    assert second.tasks() == tasks
    assert sorted(second.played.values()) == sorted([(tasks[0], ""), (tasks[2], "0 2"), (tasks[3], "")])
    # It is stopped again: what came from the first start is kept, too.
    second.finish(second.group(tasks[3]), REWARDS, sessions=(1,), last=False)
    assert second.stop().episodes == 6
    tq.kv_clear(keys=list(tq.kv_list("train")["train"]), partition_id="train")

    third = Trainer(run_dir, filters=False, position=first.position)
    third.begin()
    assert sorted(third.played.values()) == sorted([(tasks[0], ""), (tasks[2], "0 2"), (tasks[3], "1")])
    third.finish(third.group(tasks[0]), REWARDS)
    third.finish(third.group(tasks[2]), REWARDS, sessions=(1,))
    third.finish(third.group(tasks[3]), REWARDS, sessions=(0, 2))
    batch, _ = third.sample()
    assert contents(batch) == expected
    unfinished.drop(run_dir)
    assert unfinished.load(run_dir, 0) is None and not list((run_dir / "unfinished").iterdir())


def test_the_position_from_before_a_step_gives_its_prompts_and_asking_for_it_changes_none() -> None:
    def drawn(trainer: Trainer) -> int:
        return int(PPOTrainer._next_train_batch(trainer.verl, 1)["index"][0])  # ty: ignore

    unasked, asked = Trainer(Path(), filters=False), Trainer(Path(), filters=False)
    expected = [drawn(unasked) for _ in range(24)]  # over two borders of epochs
    for task in expected:
        position = copy.deepcopy(asked.verl.train_dataloader.state_dict())
        assert drawn(asked) == drawn(Trainer(Path(), filters=False, position=position)) == task


def test_replaced_groups_are_not_played_again_and_count_in_the_metrics(tmp_path: Path) -> None:
    def begin(name: str, position: dict | None = None) -> Trainer:
        (tmp_path / name).mkdir(exist_ok=True)
        trainer = Trainer(tmp_path / name, filters=True, position=position)
        trainer.buffer.lost, trainer.buffer.ended = 1.0, 2.0  # of earlier steps: half of the groups
        trainer.begin()
        return trainer

    def play(trainer: Trainer, unless: tuple[int, ...] = ()) -> None:
        """End the groups that run. Those of tasks 0 to 3 have equal rewards, and that of 4 has one episode."""
        items = tq.kv_list("train")["train"]
        for uid, (task, _) in list(trainer.played.items()):
            if items.get(uid, {}).get("status") == "pending" and task not in unless:
                rewards = [float(task < 2)] * 3 if task < 4 else REWARDS
                trainer.finish(uid, rewards, sessions=(0,) if task == 4 else (0, 1, 2))

    def waits(trainer: Trainer, *acts: Callable[[], object]) -> None:
        """Let these happen, one in each of the buffer's waits."""
        left = iter(acts)
        trainer.buffer._wait_for_next_poll = lambda *_: next(left)() or 0.0

    def interrupt() -> None:
        raise RolloutInterrupted

    whole = begin("whole")
    waits(whole, lambda: play(whole, unless=(5, 8)), *[lambda: play(whole)] * 9)
    batch, expected = whole.sample()
    rows = contents(batch)
    tq.kv_clear(keys=batch.keys, partition_id="train")
    assert len(rows) == BATCH * EPISODES * 2 and expected["training/filter_groups/evicted_samples"] >= 3

    first = begin("run")
    waits(first, lambda: play(first, unless=(5, 8)), interrupt)
    with pytest.raises(RolloutInterrupted):
        first.sample()
    kept = first.draws.keep(first.buffer.replaced, first.buffer.lost, first.buffer.ended)
    gone = {group.task: (group.reward, len(group.sessions)) for group in kept.groups if group.status == "replaced"}
    assert len(gone) >= 3 and gone.items() <= {0: (1, 3), 1: (1, 3), 2: (0, 3), 3: (0, 3), 4: (0, 1)}.items()
    tq.kv_clear(keys=list(tq.kv_list("train")["train"]), partition_id="train")

    second = begin("run", first.position)
    waits(second, *[lambda: play(second)] * 9)
    batch, metrics = second.sample()
    assert not set(second.played) & {group.uid for group in kept.groups if group.status != "running"}
    assert contents(batch) == rows and metrics == expected
    assert (second.buffer.lost, second.buffer.ended) == (whole.buffer.lost, whole.buffer.ended)


def test_a_batch_whose_episodes_are_all_kept_is_not_played(tmp_path: Path) -> None:
    first = Trainer(tmp_path, filters=False)
    first.begin()
    for task in first.tasks():
        first.finish(first.group(task), REWARDS)
    first.draws.keep({}, 0, 0)
    tq.kv_clear(keys=list(tq.kv_list("train")["train"]), partition_id="train")
    second = Trainer(tmp_path, filters=False, position=first.position)
    second.begin()
    batch, _ = second.sample()
    assert not second.played and len(batch.keys) == BATCH * EPISODES * 2


def test_data_that_have_changed_are_played_anew(tmp_path: Path) -> None:
    first = Trainer(tmp_path, filters=False)
    first.begin()
    first.finish(first.group(first.tasks()[0]), REWARDS)
    kept = first.stop()
    groups = [unfinished.DrawnGroup(**{**vars(group), "task": 99}) for group in kept.groups]
    unfinished.write(
        tmp_path, unfinished.UnfinishedStep(0, groups), lambda group: unfinished.read_rows(tmp_path, group)
    )
    tq.kv_clear(keys=list(tq.kv_list("train")["train"]), partition_id="train")
    second = Trainer(tmp_path, filters=False, position=first.position)
    second.begin()
    assert len(second.played) == BATCH and not set(second.played) & {group.uid for group in groups}
