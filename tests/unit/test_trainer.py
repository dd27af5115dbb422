"""The trainer's mix-in: each episode counts once, some are left out, lost groups are replaced, tasks keep order."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torchdata.stateful_dataloader import StatefulDataLoader
from transfer_queue import KVBatchMeta

from rl.run import phases
from rl.trainer import EpisodeTrainer, left_out, row_weights, trainer_class
from tests.check_kit import composed


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


def test_overlong_episodes_and_single_ones_of_a_group_are_left_out():
    sessions = ["g_0", "g_1", "g_2", "h_0", "i_0", "i_1"]
    assert left_out(sessions, set()) == {"h_0"}
    assert left_out(sessions, {"g_1", "i_0", "i_1"}) == {"g_1", "h_0", "i_0", "i_1"}


@given(st.sets(st.tuples(st.sampled_from("ghi"), st.integers(0, 7))), st.data())
def test_every_kept_episode_has_another_to_be_compared_with(members, data):
    sessions = [f"{group}_{number}" for group, number in sorted(members)]
    overlong = data.draw(st.sets(st.sampled_from(sessions))) if sessions else set()
    kept = set(sessions) - left_out(sessions, overlong)
    assert not kept & overlong
    for session in kept:  # a group's mean is over overlong episodes, too
        assert sum(other.startswith(session[0]) for other in sessions) > 1


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
def test_groups_without_signal_or_without_rows_are_replaced(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(mode)
    left = queue(monkeypatch, {"good": [1.0, 0.0], "equal": [1.0, 1.0], "lost": []})
    asked: list[int] = []

    def refill(count: int) -> None:
        asked.append(count)
        raise StopIteration  # in place of waiting for the new groups

    made.replay_buffer.refill_fn = refill
    with pytest.raises(StopIteration):
        made.replay_buffer.sample(global_steps=1, partition_id="train", batch_size=2)
    assert left() == {"good"}
    # verl asks for two groups in place of each equal one where it does not prefetch.
    assert asked == [3 if mode == "sync" else 2]


def test_verls_own_buffer_ends_the_run_when_a_group_has_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer("sync")
    made.replay_buffer.__class__ = type(made.replay_buffer).__mro__[2]
    queue(monkeypatch, {"good": [1.0, 0.0], "lost": []})
    with pytest.raises(RuntimeError, match="missing DAPO metric"):
        made.replay_buffer.sample(global_steps=1, partition_id="train", batch_size=2)
