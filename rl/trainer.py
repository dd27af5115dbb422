"""verl's V1 trainer with our episodes: a mix-in for any of its modes, and the function that runs it.

The mix-in

- folds the episodes' own records (``rl.metrics``) into each step's metrics and appends metrics.jsonl;
- makes the number of optimizer updates per step what the config says (``train_batch_size /
  ppo_mini_batch_size``) however many rows the episodes gave. verl splits into mini-batches of a fixed
  number of rows, so 33 rows would be two updates where 32 are one;
- weighs rows so that each episode counts once in the loss (``episode.weigh_by_episode``).
"""

import math
import time
from pathlib import Path

import torch
from omegaconf import DictConfig

from rl import metrics as run_metrics


def row_weights(sessions: list[str], row_tokens: list[int]) -> list[float]:
    """Weights by which row means add up to token means of episodes.

    Args:
        sessions: episode key of each row.
        row_tokens: sampled tokens of each row; 0 for padding.

    Returns:
        Per row: its share of its episode's sampled tokens. The weights of an episode sum to 1.
    """
    totals: dict[str, int] = {}
    for session, tokens in zip(sessions, row_tokens, strict=True):
        totals[session] = totals.get(session, 0) + tokens
    return [t / totals[s] if t else 0.0 for s, t in zip(sessions, row_tokens, strict=True)]


def _session(key: str) -> str:
    return key.rpartition("_")[0]  # rows are keyed {uid}_{session}_{index}


def trainer_class(mode: str) -> type:
    """verl's trainer of that mode (``trainer.v1.trainer_mode``) with the mix-in of this module."""
    from verl.trainer.ppo.v1 import get_trainer_cls

    base = get_trainer_cls(mode)
    return type(f"Episodes{base.__name__}", (_Episodes, base), {})


class _Episodes:
    """Mix-in before a ``PPOTrainer`` subclass; see the module's docstring."""

    def __init__(self, config: DictConfig):
        super().__init__(config=config)
        self.run_dir = Path(config.run.dir)
        self.episodes = run_metrics.EpisodeReader(self.run_dir)
        self.training = False
        self.updates = config.data.train_batch_size // config.actor_rollout_ref.actor.ppo_mini_batch_size

    def on_train_begin(self):
        self.training = True
        super().on_train_begin()

    def _validate(self) -> dict[str, float]:
        values = super()._validate()
        values.update(run_metrics.fold(self.episodes.take("val"), "val"))
        if not self.training:  # before the first step; later ones are part of their step's record
            run_metrics.append_step(self.run_dir, self.global_steps, time.time(), values)
        return values

    def _compute_metrics(self, batch, metrics, timing_raw, global_steps, epoch):
        super()._compute_metrics(batch, metrics, timing_raw, global_steps=global_steps, epoch=epoch)
        metrics.update(run_metrics.fold(self.episodes.take("train"), "episode"))
        run_metrics.append_step(self.run_dir, global_steps, time.time(), metrics)

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        if self.use_critic:
            return super()._get_required_batch_multiple(dp_size)
        return math.lcm(dp_size, dp_size * self.updates)

    def _compute_advantage(self, batch, metrics: dict):
        import transfer_queue as tq
        from tensordict import TensorDict

        batch = super()._compute_advantage(batch, metrics)
        sessions = [_session(key) for key in batch.keys]
        real = [not tag.get("is_padding", False) for tag in batch.tags]
        several_rows = len(set(s for s, r in zip(sessions, real, strict=True) if r)) < sum(real)
        if not (self.config.episode.weigh_by_episode and several_rows):
            return batch
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["advantages", "response_mask"]
        )
        weights = row_weights(sessions, [int(mask.sum()) for mask in data["response_mask"].unbind()])
        # The clipped loss is linear in a positive factor on the advantage, so scaling the advantage
        # scales the row's share of the loss.
        scaled = [row * w for row, w in zip(data["advantages"].unbind(), weights, strict=True)]
        fields = TensorDict(
            {"advantages": torch.nested.as_nested_tensor(scaled, layout=torch.jagged)}, batch_size=len(batch)
        )
        return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)

    def _update_actor(self, batch, metrics: dict):
        from verl.trainer.distillation import is_distillation_enabled
        from verl.utils.metric import reduce_metrics
        from verl.utils.py_functional import rename_dict

        if self.use_critic or is_distillation_enabled(self.config.get("distillation")):
            return super()._update_actor(batch, metrics)  # verl's fixed number of rows per update
        actor = self.config.actor_rollout_ref.actor
        rows = zip(batch.keys, batch.tags, strict=True)
        real = {_session(key) for key, tag in rows if not tag.get("is_padding")}
        by_episode = self.config.episode.weigh_by_episode
        batch.extra_info.update(
            {
                "calculate_entropy": actor.calculate_entropy or actor.entropy_coeff != 0.0,
                "distillation_use_topk": False,
                "distillation_only": False,
                # What sums of row losses are divided by.
                "global_batch_size": (len(real) if by_episode else len(batch)) / self.updates,
                "mini_batch_size": len(batch) // self.updates,
                "epochs": actor.ppo_epochs,
                "seed": actor.data_loader_seed,
                "dataloader_kwargs": {"shuffle": actor.shuffle},
                "temperature": self.config.actor_rollout_ref.rollout.temperature,
            }
        )
        output = rename_dict(self.actor_rollout_wg.update_actor(batch)["metrics"], "actor/")
        output["perf/mfu/actor"] = output.pop("actor/mfu")
        metrics.update(reduce_metrics(output))
        return batch


def run_trainer(config: DictConfig) -> None:
    """Train from start to end, in this process; Ray must be up. The body of verl's ``TaskRunnerV1.run``.

    In the driver's process and not in an actor of its own, as verl does it: one start of Python and one
    import of verl less, about 20 s of one core.
    """
    import transfer_queue as tq
    from verl.trainer.ppo.v1 import AgentLoopManagerTQ
    from verl.utils.import_utils import load_class_from_fqn
    from verl.utils.logging_utils import configure_verl_logging

    configure_verl_logging()
    tq.init(config.transfer_queue)
    trainer, succeeded = None, False
    try:
        trainer = trainer_class(config.trainer.v1.trainer_mode)(config=config)
        trainer.init()
        manager = config.actor_rollout_ref.rollout.agent.get("agent_loop_manager_class")
        manager_cls = load_class_from_fqn(manager, "AgentLoopManager") if manager else AgentLoopManagerTQ
        agent_loops = manager_cls.create(
            config=config,
            llm_client=trainer.get_llm_client(),
            teacher_client=trainer.get_teacher_client(),
            reward_loop_worker_handles=trainer.get_reward_handles(),
        )
        trainer.fit(agent_loops)
        succeeded = True
    finally:
        if tracking := getattr(trainer, "logger", None):
            tracking.finish(exit_code=0 if succeeded else 1)
        tq.close()
