"""These tests show what a step's rows contribute to verl's own advantages, rejection, micro-batches and loss.

Rows wait in a stand-in for TransferQueue. ``_compute_advantage`` and ``_update_actor`` of the trainer handle them; then
verl's FSDP engine splits them into micro-batches and adds up the gradients, with a table of log-probabilities in place
of a model. The expected gradients are written out by hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed
from tensordict import NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta

from rl.train.trainer import EpisodeTrainer, trainer_class
from rl.train.weights import rejected
from tests.check_kit import composed

PROMPT = 2  # tokens
BY_TOKEN = {"actor_rollout_ref__actor__loss_agg_mode": "token-mean", "episode__weigh_by_episode": False}
BY_ROW = {"episode__weigh_by_episode": False}


class Row(NamedTuple):
    """trained: its mask; off: log-probability in the trainer minus the engine's, of every token."""

    reward: float
    trained: list[int]
    off: float = 0.0
    credit: float = 0.0


FAR = 0.2  # a mean divergence (k3) of 0.021 or 0.019 nats per token, above the experiments' 0.01; 0.1 is 0.005
# A group's mean reward is 0.5. Episode 0 of g has two rows, the last of them the main thread's; h_1 is rejected.
ROWS = {
    "g_0_0": Row(1.0, [1, 0, 1]),
    "g_0_1": Row(1.0, [1, 1, 1, 0, 1, 1]),
    "g_1_0": Row(0.0, [1, 1]),
    "h_0_0": Row(1.0, [1, 1, 0, 1], off=0.1),
    "h_1_0": Row(0.0, [1], off=FAR),
    "pad_0_0": Row(0.0, [0]),
}


@pytest.fixture(autouse=True)
def one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of its own, on a CPU."""
    from rl.cpu.platform import PlatformCPU

    monkeypatch.setattr("verl.plugin.platform.platform_manager._current_platform", PlatformCPU())
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def fields(key: str, row: Row) -> dict[str, Any]:
    n = len(row.trained)
    scores = torch.zeros(n)
    scores[-1] = row.reward
    mask = torch.tensor(row.trained)
    engine = torch.linspace(-1.0, -0.5, n)
    return {
        "uid": key.split("_")[0],
        "prompts": torch.zeros(PROMPT, dtype=torch.long),
        "responses": torch.zeros(n, dtype=torch.long),
        "input_ids": torch.zeros(PROMPT + n, dtype=torch.long),
        "response_mask": mask,
        "loss_mask": mask.clone(),
        "rm_scores": scores,
        "rollout_log_probs": engine,
        "old_log_probs": engine + row.off,
        "row": torch.tensor([list(ROWS).index(key)]),
        "extra_fields": {"credit": row.credit} if row.credit else {"min_global_steps": 0},
    }


def column(values: list[Any]) -> Any:
    if isinstance(values[0], torch.Tensor):
        return torch.nested.as_nested_tensor(values, layout=torch.jagged)
    return NonTensorStack(*values)  # ty: ignore


class Step:
    """One step of ``ROWS``, some of them changed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rows: dict[str, Row], config: Mapping[str, object]):
        self.rows = ROWS | rows
        queue = {key: fields(key, row) for key, row in self.rows.items()}

        def get(keys: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
            names = [name for name in select_fields if name in queue[keys[0]]]
            return TensorDict({name: column([queue[key][name] for key in keys]) for name in names}, len(keys))

        def put(keys: list[str], partition_id: str, fields: TensorDict) -> KVBatchMeta:
            for name, values in fields.items():
                for key, value in zip(keys, values.unbind(0), strict=True):
                    queue[key][name] = value
            return self.batch

        monkeypatch.setattr("transfer_queue.kv_batch_get", get)
        monkeypatch.setattr("transfer_queue.kv_batch_put", put)
        tags = [{"is_padding": True} if key.startswith("pad") else {} for key in ROWS]
        self.batch = KVBatchMeta(partition_id="train", keys=list(ROWS), tags=tags)
        self.metrics: dict[str, Any] = {}
        self.trainer: EpisodeTrainer = trainer_class("sync")(
            composed("+experiment=qwen3_coder_30b", run__dir="/nowhere", **config)
        )
        monkeypatch.setattr(self.trainer, "_phase", lambda *_: None)
        monkeypatch.setattr("rl.metrics.trained.write", lambda *_: None)
        self.trainer.global_steps = 1
        self.trainer.actor_rollout_wg = SimpleNamespace(update_actor=lambda _: {"metrics": {"mfu": [0.0]}})
        self.trainer._compute_advantage(self.batch, self.metrics)
        self.trainer._update_actor(self.batch, self.metrics)
        self.columns = get(list(ROWS), "train", [*fields("g_0_0", ROWS["g_0_0"]), "advantages", "rollout_is_weights"])

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return -d loss / d log-probability of each token of the response, by row."""
        from verl.utils import tensordict_utils as tu
        from verl.utils.config import omega_conf_to_dataclass
        from verl.workers.engine.fsdp.transformer_impl import FSDPEngine
        from verl.workers.utils.losses import ppo_loss

        actor = omega_conf_to_dataclass(self.trainer.config.actor_rollout_ref.actor)
        # As in a model's output, the token before the response predicts its first token.
        table: dict[int, Any] = {
            index: torch.cat([torch.zeros(PROMPT - 1), logp, torch.zeros(1)]).requires_grad_()
            for index, logp in enumerate(self.columns["old_log_probs"].unbind(0))
        }
        micro_batches = []

        def forward_step(micro: TensorDict, loss_function: Any, forward_only: bool) -> tuple[torch.Tensor, dict]:
            micro_batches.append(micro)
            rows = [table[int(index)] for index in micro["row"].values()]
            loss, metrics = ppo_loss(
                actor, {"log_probs": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}, micro
            )
            return loss, {"metrics": metrics}

        engine: Any = SimpleNamespace(
            ulysses_sequence_parallel_size=1,
            module=torch.nn.Identity(),
            engine_config=SimpleNamespace(use_no_sync_for_gradient_accumulation=False),
            get_data_parallel_group=lambda: None,
            get_data_parallel_size=lambda: 1,
            forward_step=forward_step,
        )
        engine._gradient_sync_context = lambda **_: FSDPEngine._gradient_sync_context(engine, is_last_micro_batch=True)
        data = self.columns.exclude("uid", "rm_scores")
        told: Any = self.batch.extra_info
        size = told["global_batch_size"]
        tu.assign_non_tensor(data, use_dynamic_bsz=True, max_token_len_per_gpu=10, global_batch_size=size)
        FSDPEngine.forward_backward_batch(engine, data, ppo_loss)
        assert len(micro_batches) > 2
        return {key: -logp.grad[PROMPT - 1 : -1] for key, logp in zip(ROWS, table.values(), strict=True)}


def same(found: dict[str, torch.Tensor], expected: dict[str, float], rows: dict[str, Row]) -> None:
    """expected: the gradient of each trained token of a row; 0 for rows that are not named."""
    for key, gradient in found.items():
        wanted = expected.get(key, 0.0) * torch.tensor(rows[key].trained)
        torch.testing.assert_close(gradient, wanted.float(), msg=f"{key}: {gradient} is not {wanted}")


E = 1.1051709  # exp(0.1), the token weight of h_0


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # Episodes g_0, g_1 and h_0 count, with 7, 2 and 3 tokens; the advantage is 0.5 or -0.5.
        ({}, {"g_0_0": 0.5 / 7 / 3, "g_0_1": 0.5 / 7 / 3, "g_1_0": -0.5 / 2 / 3, "h_0_0": 0.5 * E / 3 / 3}),
        (BY_ROW, {"g_0_0": 0.5 / 2 / 4, "g_0_1": 0.5 / 5 / 4, "g_1_0": -0.5 / 2 / 4, "h_0_0": 0.5 * E / 3 / 4}),
        # All twelve tokens count the same; the rejected episode's is not among them.
        (BY_TOKEN, {"g_0_0": 0.5 / 12, "g_0_1": 0.5 / 12, "g_1_0": -0.5 / 12, "h_0_0": 0.5 * E / 12}),
    ],
    ids=["by episode", "by row", "by token"],
)
def test_tokens_are_weighted_by_what_counts(monkeypatch, config, expected):
    step = Step(monkeypatch, {}, config)
    same(step.gradients(), expected, step.rows)
    rows = 5  # without padding
    fraction = step.metrics["rollout_corr/rollout_rs_seq_mean_k3_seq_masked_fraction"]
    assert fraction == pytest.approx(1 / rows)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {"g_0_0": 0.5 / 7 / 2, "g_0_1": 0.5 / 7 / 2, "h_0_0": 0.5 * E / 3 / 2}),
        (BY_ROW, {"g_0_0": 0.5 / 2 / 3, "g_0_1": 0.5 / 5 / 3, "h_0_0": 0.5 * E / 3 / 3}),
        (BY_TOKEN, {"g_0_0": 0.5 / 10, "g_0_1": 0.5 / 10, "h_0_0": 0.5 * E / 10}),
    ],
    ids=["by episode", "by row", "by token"],
)
def test_a_rejected_episode_is_in_its_groups_mean_and_in_no_denominator(monkeypatch, config, expected):
    step = Step(monkeypatch, {"g_1_0": ROWS["g_1_0"]._replace(off=FAR)}, config)
    same(step.gradients(), expected, step.rows)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {"g_0_1": 0.5 / 5 / 3, "g_1_0": -0.5 / 2 / 3, "h_0_0": 0.5 * E / 3 / 3}),
        (BY_ROW, {"g_0_1": 0.5 / 5 / 3, "g_1_0": -0.5 / 2 / 3, "h_0_0": 0.5 * E / 3 / 3}),
        (BY_TOKEN, {"g_0_1": 0.5 / 10, "g_1_0": -0.5 / 10, "h_0_0": 0.5 * E / 10}),
    ],
    ids=["by episode", "by row", "by token"],
)
def test_an_episode_may_lose_another_row_than_its_last(monkeypatch, config, expected):
    step = Step(monkeypatch, {"g_0_0": ROWS["g_0_0"]._replace(off=-FAR)}, config)
    same(step.gradients(), expected, step.rows)


@pytest.mark.parametrize("config", [{}, BY_ROW, BY_TOKEN], ids=["by episode", "by row", "by token"])
def test_an_episode_without_its_last_row_is_not_trained_on(monkeypatch, config):
    """verl gives its other rows no advantage; so they are in no denominator."""
    step = Step(monkeypatch, {"g_0_1": ROWS["g_0_1"]._replace(off=FAR)}, config)
    expected = {"g_1_0": -0.5 / 2 / 2, "h_0_0": 0.5 * E / 3 / 2}
    if config is BY_TOKEN:
        expected = {"g_1_0": -0.5 / 5, "h_0_0": 0.5 * E / 5}
    same(step.gradients(), expected, step.rows)


def test_rejected_tokens_are_in_no_token_mean(monkeypatch):
    """With a rejection by token, rows keep a part of their tokens."""
    rejection = {
        "algorithm__rollout_correction__rollout_rs": "token_k1",
        "algorithm__rollout_correction__rollout_rs_threshold": "0.95_1.05",
    }
    step = Step(monkeypatch, {}, BY_TOKEN | rejection)  # all tokens of h_0 are at exp(0.1)
    same(step.gradients(), {"g_0_0": 0.5 / 9, "g_0_1": 0.5 / 9, "g_1_0": -0.5 / 9}, step.rows)


@pytest.mark.parametrize(("config", "tokens"), [({}, 7 * 3), (BY_ROW, 2 * 4), (BY_TOKEN, 12)], ids=["e", "r", "t"])
def test_a_row_with_a_reward_of_its_own_has_the_advantage_of_that_reward(monkeypatch, config, tokens):
    """The sub-agent's row of an episode of reward 1 gets 0.25 of it. Its group's mean stays 0.5."""
    rows = {"g_0_0": ROWS["g_0_0"]._replace(credit=-0.75)}
    step = Step(monkeypatch, rows, {**config, "episode__credit": "tests.kit:ends"})
    plain = Step(monkeypatch, {}, config).gradients()
    found = step.gradients()
    torch.testing.assert_close(found.pop("g_0_0"), (-0.25 / tokens * torch.tensor([1, 0, 1])).float())
    plain.pop("g_0_0")
    torch.testing.assert_close(found, plain)


def test_rloo_compares_episodes_and_not_rows(monkeypatch):
    """verl's own takes each row for an episode: with two rows, episode 0 of g was compared with itself."""
    step = Step(monkeypatch, {}, {"algorithm__adv_estimator": "rloo"} | BY_ROW)
    found = {key: row[row.abs().argmax()] for key, row in zip(ROWS, step.columns["advantages"].unbind(0), strict=True)}
    assert {key: float(value) for key, value in found.items() if key[0] == "g"} == {"g_0_0": 1, "g_0_1": 1, "g_1_0": -1}


def test_an_episode_is_rejected_with_its_last_row():
    keys = ["g_0_1", "g_0_0", "g_1_0", "g_1_1", "h_0_10", "h_0_9"]
    assert rejected(keys, [0, 5, 0, 5, 0, 5]) == {"g_0", "h_0"}
