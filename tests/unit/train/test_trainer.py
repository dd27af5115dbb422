"""This module tests the trainer's mix-in: each episode counts once, some are left out, lost groups are replaced, tasks
keep order.
"""

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transfer_queue
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torchdata.stateful_dataloader import StatefulDataLoader
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from rl.metrics import episodes as metrics
from rl.run import phases, stop
from rl.train.groups import NothingPlayed, alone
from rl.train.trainer import EpisodeTrainer, trainer_class
from rl.train.weights import row_weights
from rollout.figures import line
from tests.check_kit import composed
from tests.kit import empty_record


def test_rows_share_their_episode_by_tokens():
    weights = row_weights(["a", "a", "b", "pad"], [30, 10, 5, 0])
    assert weights == [0.75, 0.25, 1.0, 0.0]


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 500)), min_size=1))
def test_weights_of_an_episode_sum_to_one(rows):
    sessions, tokens = [list(column) for column in zip(*rows, strict=True)]
    weights = row_weights(sessions, tokens)
    for session in set(sessions):
        total = sum(w for s, w in zip(sessions, weights, strict=True) if s == session)
        sampled = sum(t for s, t in zip(sessions, tokens, strict=True) if s == session)
        assert abs(total - (1.0 if sampled else 0.0)) < 1e-9


@pytest.mark.parametrize("saved_after", [1, 2, 3, 5])
def test_a_resumed_run_gets_the_tasks_that_an_unbroken_one_gets(saved_after):
    """verl's own data loader, sampler and fetching are used, over epochs of two batches."""
    from verl.trainer.ppo.utils import create_rl_sampler
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    from verl.utils.dataset.rl_dataset import collate_fn

    def trainer() -> SimpleNamespace:
        data = [{"index": i, "raw_prompt": "", "dummy_tensor": torch.zeros(1)} for i in range(5)]
        sampler = create_rl_sampler(OmegaConf.create({"shuffle": True, "seed": 3}), data)
        loader = StatefulDataLoader(data, batch_size=2, sampler=sampler, drop_last=True, collate_fn=collate_fn)
        return SimpleNamespace(train_dataloader=loader, train_dataloader_it=None)

    def tasks(some: SimpleNamespace, batches: int) -> list[list[int]]:
        return [list(PPOTrainer._fetch_one_gen_batch(some)["index"]) for _ in range(batches)]

    unbroken, killed, resumed = trainer(), trainer(), trainer()
    expected = tasks(unbroken, 9)
    assert tasks(killed, saved_after) == expected[:saved_after]
    resumed.train_dataloader.load_state_dict(killed.train_dataloader.state_dict())
    assert tasks(resumed, 9 - saved_after) == expected[saved_after:]
    assert expected[0:2] != expected[2:4]  # shuffled anew each epoch


def test_episodes_without_another_of_their_group_are_alone():
    assert alone(["g_0", "g_1", "g_1", "h_0", "h_0", "i_0", "i_1"]) == {"h_0"}


@given(st.lists(st.tuples(st.sampled_from("ghi"), st.integers(0, 7))))
def test_every_kept_episode_has_another_to_be_compared_with(members):
    sessions = [f"{group}_{number}" for group, number in members]
    kept = set(sessions) - alone(sessions)
    for session in kept:
        assert sum(other[0] == session[0] for other in kept) > 1


def trainer(mode: str, run_dir: Path = Path("/nowhere"), **changes: object) -> EpisodeTrainer:
    """Return a trainer for which nothing was started."""
    experiment = {"sync": "", "colocate_async": "_async", "separate_async": "_separate"}[mode]
    return trainer_class(mode)(composed(f"+experiment=qwen3_coder_30b{experiment}", run__dir=str(run_dir), **changes))


def test_updates_per_batch_that_is_sampled():
    assert trainer("sync").updates == 1
    assert trainer("sync", actor_rollout_ref__actor__ppo_mini_batch_size=8).updates == 4
    # Its step samples four batches, each of one mini-batch.
    assert trainer("separate_async").updates == 1


def test_the_update_is_noted_as_a_phase(tmp_path: Path) -> None:
    made = trainer("sync", tmp_path)
    made.global_steps, made.trained, seen = 3, set(), []

    def update(_):
        seen.append(phases.read(tmp_path))
        return {"metrics": {"mfu": [0.0]}}

    made.actor_rollout_wg = SimpleNamespace(update_actor=update)
    made._update_actor(KVBatchMeta(partition_id="train", keys=[], tags=[]), {})
    assert [(phase.step, phase.name) for phase in seen] == [(3, "update")]


def queue(monkeypatch: pytest.MonkeyPatch, rewards: dict[str, list[float]]) -> Callable[[], set[str]]:
    """Fill TransferQueue with finished groups and their rows' rewards; return a function that lists the groups."""
    import torch
    import transfer_queue

    items = {group: {"is_prompt": True, "status": "finished", "global_steps": 1} for group in rewards}
    items |= {f"{group}_{i}_0": {} for group, values in rewards.items() for i in range(len(values))}

    def get(keys: list[str], partition_id: str, select_fields: list[str]) -> dict[str, list[torch.Tensor]]:
        scores = [rewards[key.split("_")[0]][int(key.split("_")[1])] for key in keys]
        return {"rm_scores": [torch.tensor([0.0, score]) for score in scores]}

    monkeypatch.setattr(transfer_queue, "kv_list", lambda *_: {"train": {k: dict(v) for k, v in items.items()}})
    monkeypatch.setattr(transfer_queue, "kv_batch_get", get)
    monkeypatch.setattr(transfer_queue, "kv_clear", lambda partition_id, keys: [items.pop(key, None) for key in keys])
    return lambda: {key for key in items if "_" not in key}


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_groups_without_signal_or_without_two_episodes_are_replaced(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(mode, data__train_batch_size=2)
    left = queue(monkeypatch, {"good": [1.0, 0.0], "equal": [1.0, 1.0], "one": [1.0], "lost": []})
    asked: list[int] = []

    def refill(count: int) -> None:
        asked.append(count)
        raise StopIteration  # in place of waiting for the new groups

    setattr(made.replay_buffer, "submit" if mode == "sync" else "refill_fn", refill)
    with pytest.raises(StopIteration):
        made.replay_buffer.sample(global_steps=1, partition_id="train", batch_size=2)
    assert left() == {"good"}
    # A synchronous step starts what is missing; the other modes replace what they have started.
    assert asked == [1 if mode == "sync" else 3]


def test_a_group_with_one_episode_is_left_out_where_groups_are_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"algorithm__filter_groups__enable": False, "trainer__v1__sampler__sync_refill_failed_groups": False}
    made = trainer("sync", **changes)
    left = queue(monkeypatch, {"good": [1.0, 0.0], "one": [1.0], "lost": []})
    batch, _ = made.replay_buffer.sample(global_steps=1, partition_id="train", batch_size=3)
    assert sorted(batch.keys) == ["good_0_0", "good_1_0", "one_0_0"] and left() == set()
    assert sorted(made._compared(batch).keys) == ["good_0_0", "good_1_0"]
    assert made.lone_groups == 1


def test_verls_own_buffer_ends_the_run_when_a_group_has_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer("sync")
    made.replay_buffer.__class__ = type(made.replay_buffer).__mro__[2]
    queue(monkeypatch, {"good": [1.0, 0.0], "lost": []})
    with pytest.raises(RuntimeError, match="missing DAPO metric"):
        made.replay_buffer.sample(global_steps=1, partition_id="train", batch_size=2)


def test_held_out_episodes_that_are_all_lost_are_figures_and_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer("sync", tmp_path)
    queue(monkeypatch, {"lost": []})
    tag = {"is_prompt": True, "status": "finished", "global_steps": 1}
    monkeypatch.setattr(transfer_queue, "kv_list", lambda *_: {"val": {"lost": dict(tag)}})
    with pytest.raises(NothingPlayed):
        made.replay_buffer.sample(global_steps=1, partition_id="val", batch_size=1)

    def validate(self: Any) -> dict[str, float]:
        raise NothingPlayed

    monkeypatch.setattr(PPOTrainer, "_validate", validate)
    made.training, made.global_steps, made.val_dataset = True, 1, None
    assert made._validate()["val/count"] == 0


class Events(list[str]):
    """What a trainer does that has no engine and no actor, in order."""

    def trainer(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch, saved: int) -> EpisodeTrainer:
        made = trainer("sync", run_dir)
        for name in ("_reason", "_asked"):
            monkeypatch.setattr(stop, name, None)
        manager = {name: self.note(name) for name in ("abort_replicas", "sleep_replicas", "update_weights")}
        made.checkpoint_manager, made.curr_step_profile = SimpleNamespace(**manager), False
        made.agent_loop_manager = SimpleNamespace(agent_loop_workers=[])
        made.train_dataloader = SimpleNamespace(state_dict=lambda: {"drawn": 0})
        made.global_steps, made.saved_step, made.training, made.timing_raw = 5, saved, True, {}
        made.total_training_steps = 9
        setattr(made, "_save_checkpoint", lambda: self.save(made))  # noqa: B010
        made.on_step_begin()
        made.train_dataloader = SimpleNamespace(state_dict=lambda: {"drawn": 8})
        made.draws = SimpleNamespace(keep=lambda *_: self.append("keep") or SimpleNamespace(episodes=7))
        return made

    def note(self, name: str) -> Callable[..., None]:
        return lambda *_: self.append(name)

    def save(self, made: EpisodeTrainer) -> None:
        self.append(f"save {made.global_steps} at {made.train_dataloader.state_dict()['drawn']}")
        made.saved_step = made.global_steps


@pytest.mark.parametrize("saved", [4, 2])
def test_a_warning_in_a_rollout_saves_the_step_before_and_keeps_what_is_done(
    saved: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, said = Events(), list[str]()
    made = events.trainer(tmp_path, monkeypatch, saved)
    monkeypatch.setattr(stop, "_asked", "SIGUSR1")
    monkeypatch.setattr(stop, "_say", said.append)
    monkeypatch.setattr(made.replay_buffer, "_sync_metadata_from_transfer_queue", lambda: None)
    for name in ("few", "replaced"):
        setattr(made.replay_buffer, name, set() if name == "few" else {})
    made.prepare_step = lambda: {}
    with pytest.raises(stop.RunStopped, match="SIGUSR1"):
        made.step({}, {})
    before = ["sleep_replicas", "save 4 at 0"] if saved == 2 else []
    assert events == ["abort_replicas", *before, "keep"]
    assert said == ["step 5: 7 episodes are done and kept; the resumed run plays the others"]


def test_held_out_episodes_are_left_but_for_those_of_the_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Events().trainer(tmp_path, monkeypatch, 4)
    assert not made._interrupts("train")
    monkeypatch.setattr(stop, "_asked", "SIGTERM")
    assert made._interrupts("train") and made._interrupts("val")
    made.global_steps = made.total_training_steps
    assert made._interrupts("train") and not made._interrupts("val")
    made.training = False  # before the first step a signal ends the process at once
    assert not made._interrupts("val")
    assert trainer("colocate_async").replay_buffer.interrupts is None


@pytest.mark.parametrize(
    ("minutes", "age_min", "saved", "expected"),
    [(None, 600, 4, []), (30, 31, 4, ["save 5 at 8"]), (30, 29, 4, []), (30, 31, 5, [])],
)
def test_a_checkpoint_is_saved_when_the_last_one_is_old(
    minutes: int | None,
    age_min: float,
    saved: int,
    expected: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events = Events()
    made = events.trainer(tmp_path, monkeypatch, 4)
    made.config.run.save_minutes, made.saved_step = minutes, saved
    made.saved_at = time.monotonic() - 60 * age_min
    made.on_step_end()
    assert events == [*expected, "update_weights"]  # the engine's memory is still the trainer's
    assert ("save_checkpoint" in made.timing_raw) == bool(expected)


def test_a_checkpoint_keeps_what_is_known_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is killed between a step's checkpoint and its record resumes after it, and the record was missing."""
    from rl.train import trainer as module

    made = trainer("sync", tmp_path)
    base = type(made).__mro__[3]
    monkeypatch.setattr(module, "_groups", lambda batch: {"g": [(1.0, True), (0.0, False)]})
    monkeypatch.setattr(base, "_save_checkpoint", lambda self: None)
    monkeypatch.setattr(base, "_compute_metrics", lambda self, batch, metrics, timing_raw, **_: None)
    monkeypatch.setattr(module.checkpoints, "seal", lambda directory, step: None)
    made.global_steps, made.timing_raw, made.train_dataset = 3, {"gen": 2.5}, []
    made.logger = SimpleNamespace(logger={})
    lines = metrics.EpisodeLog(tmp_path)
    lines.append(line(empty_record(step=3)) | {"reason": None, "resolved": True, "reward": 1.0})
    batch = KVBatchMeta(partition_id="train", keys=[], tags=[])
    seen = {"actor/grad_norm": 0.5}

    made._save_checkpoint()  # of a step before this one: its record is there
    assert not (tmp_path / "saved_step.json").exists()
    made.unrecorded = batch, seen
    made._save_checkpoint()
    metrics.rewind(tmp_path, 3)
    (record,) = metrics.read_jsonl(tmp_path / "metrics.jsonl")
    assert (record["step"], record["actor/grad_norm"], record["timing_s/gen"]) == (3, 0.5, 2.5)
    assert (record["episode/count"], record["group/used"]) == (1, 1)
    made._compute_metrics(batch, seen, {}, global_steps=3, epoch=0)  # the run goes on: nothing was used up
    assert seen["episode/count"] == 1 and made.unrecorded is None
