"""This module is verl's V1 trainer with our episodes: a mix-in for each of its modes, and the function that runs it.

The mix-in

- folds the episodes' own records (``rl.metrics.episodes``) into each step's metrics, appends metrics.jsonl, puts a few
  episodes into the loggers (``rl.metrics.samples``) and notes what it is doing (``rl.run.phases``);
- makes the number of optimizer updates per step what the config says (``train_batch_size / ppo_mini_batch_size``),
  however many rows the episodes gave. verl splits into mini-batches of a fixed number of rows, so 33 rows would make
  two updates where 32 make one;
- sorts the rows, so that a step is the same however its episodes were scheduled;
- weighs rows so that each episode counts once in the loss (``episode.weigh_by_episode``), and leaves out episodes that
  teach nothing: those that a limit ended (``episode.mask_overlong``) and those that have no other to be compared with;
- lets a group whose episodes were all lost to the infrastructure be replaced like a failed one;
- saves a checkpoint and ends between two steps when a signal asked for it (``rl.run.stop``).

A row's key in TransferQueue is ``{group}_{session}_{row}``: the group is a prompt, a session is one of its episodes.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig

from rl.metrics import episodes as run_metrics
from rl.metrics.gpus import Gpus
from rl.metrics.samples import SampleReader, log_samples
from rl.run import checkpoints, phases, stop
from rl.run.watch import Watchdog

if TYPE_CHECKING:
    from tensordict import TensorDict
    from transfer_queue import KVBatchMeta
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer
else:
    ReplayBuffer = PPOTrainer = object  # the real bases depend on the mode: see trainer_class


def row_weights(sessions: list[str], row_tokens: list[int]) -> list[float]:
    """Return the weights with which token means of rows add up to token means of episodes.

    Args:
        sessions: episode key of each row.
        row_tokens: number of sampled tokens of each row; 0 for padding.

    Returns:
        Per row, its share of the sampled tokens of its episode. The weights of an episode sum to 1.
    """
    totals: dict[str, int] = {}
    for session, tokens in zip(sessions, row_tokens, strict=True):
        totals[session] = totals.get(session, 0) + tokens
    return [t / totals[s] if t else 0.0 for s, t in zip(sessions, row_tokens, strict=True)]


def left_out(sessions: Iterable[str], overlong: Set[str]) -> set[str]:
    """Return the episodes that are not trained on.

    Args:
        sessions: episode keys, ``{group}_{session}``, in any order and number.
        overlong: those of them that a limit ended; empty if these are trained on, too.

    Returns:
        The overlong episodes, and those that are alone in their group because its other episodes were lost: verl takes
        the reward itself for the advantage of such an episode.
    """
    kept = set(sessions)
    size = Counter(_group(session) for session in kept)
    return {session for session in kept if session in overlong or size[_group(session)] < 2}


def _group(session: str) -> str:
    return session.rpartition("_")[0]


def _session(key: str) -> str:
    return key.rpartition("_")[0]


def _place(key: str) -> tuple[int, int]:
    """Return (session, row) of a row's key."""
    session, row = key.split("_")[-2:]
    return int(session), int(row)


def _columns(batch: "KVBatchMeta", *names: str, keys: list[str] | None = None) -> "TensorDict":
    """Fetch columns of the rows of a batch, or of the rows ``keys``, from TransferQueue."""
    import transfer_queue as tq

    assert batch.partition_id is not None
    return tq.kv_batch_get(keys=keys or batch.keys, partition_id=batch.partition_id, select_fields=list(names))


def _groups(batch: "KVBatchMeta") -> dict[str, list[tuple[float, bool]]]:
    """Return (reward, resolved) of the episodes of a step's batch, by group."""
    # verl reads an episode's reward from its last row; all rows carry the same.
    last = {_session(key): key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding")}
    data = _columns(batch, "rm_scores", "extra_fields", keys=list(last.values()))
    groups: dict[str, list[tuple[float, bool]]] = {}
    extras = data.pop("extra_fields").tolist()
    for session, scores, extra in zip(last, data["rm_scores"].unbind(0), extras, strict=True):
        reward = float(scores.sum())
        resolved = extra.get("reward_extra_info", {}).get("resolved", reward > 0)
        groups.setdefault(_group(session), []).append((reward, bool(resolved)))
    return groups


def trainer_class(mode: str) -> "type[EpisodeTrainer]":
    """Return verl's trainer of a mode (``trainer.v1.trainer_mode``) with the mix-in of this module."""
    from verl.trainer.ppo.v1 import get_trainer_cls

    base = get_trainer_cls(mode)
    return type(f"Episodes{base.__name__}", (EpisodeTrainer, base), {})


class EpisodeTrainer(PPOTrainer):
    """A mix-in that goes before a ``PPOTrainer`` subclass; the module's docstring says what it changes."""

    def __init__(self, config: DictConfig):
        super().__init__(config=config)
        self.run_dir = Path(config.run.dir)
        self.episodes = run_metrics.EpisodeReader(self.run_dir)
        self.samples = SampleReader(self.run_dir)
        self.gpus: Gpus | None = None
        self.training = False
        self.saved_step = 0
        self.trained: set[str] = set()  # episodes of this batch that count in the loss
        # We remove old checkpoints ourselves, when the next one is complete (rl.run.checkpoints).
        self.keep = config.trainer.max_actor_ckpt_to_keep
        config.trainer.max_actor_ckpt_to_keep = config.trainer.max_critic_ckpt_to_keep = None
        # Per batch that is sampled: a step of the separate mode samples several, each of one mini-batch.
        self.updates = config.data.train_batch_size // config.actor_rollout_ref.actor.ppo_mini_batch_size
        self.updates //= self.parameter_sync_step

    def _phase(self, name: str, episodes: int = 0) -> None:
        phases.note(self.run_dir, self.global_steps, name, episodes)

    # --- start

    def _build_replay_buffer(self) -> ReplayBuffer:
        buffer = super()._build_replay_buffer()
        buffer.__class__ = type(f"Groups{type(buffer).__name__}", (GroupBuffer, type(buffer)), {})
        if self.trainer_mode != "separate_async":  # there it is also how long a step has to wait to count as starved
            buffer.poll_interval = 0.25  # seconds between looks for finished groups; verl's 2.0 is a second per step
        return buffer

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        if self.trainer_mode == "separate_async" and self.config.trainer.device == "cpu":
            import ray
            from verl.trainer.ppo.utils import Role

            from rl.cpu.actor import CPUDetachActorWorker

            self.role_worker_mapping[Role.Actor] = ray.remote(CPUDetachActorWorker)

    def _setup(self) -> None:
        # verl ends the set-up of separate-async without hybrid replicas with logger.info(..., flush=True), which
        # logging refuses with a TypeError. Above this level the line is not made.
        logging.getLogger("verl.trainer.ppo.v1.trainer_separate_async").setLevel(logging.WARNING)
        super()._setup()

    def on_init_end(self) -> None:
        """Begin to sample the GPUs."""
        super().on_init_end()
        if self.config.trainer.device != "cpu":
            self.gpus = Gpus()

    def engine_addresses(self) -> list[str]:
        """Return host:port of all inference servers, those of separate-async's own engines included."""
        return [address for manager in self._rollout_server_managers() for address in manager.get_addresses()]

    # --- steps

    def on_train_begin(self) -> None:
        """Let a signal wait for the end of the step from now on."""
        self.training = True
        self.saved_step = self.global_steps - 1  # the step that was resumed from; 0 if the run is new
        super().on_train_begin()
        stop.enter_steps()

    def on_step_begin(self) -> None:
        """End the run if a signal asked for it, with the step before this one saved. Raises rl.run.stop.Stopped."""
        super().on_step_begin()
        if name := stop.asked():
            if self.saved_step < self.global_steps - 1:
                # verl saves after sampling: the engine is paused then, and its memory is the trainer's.
                self.on_sample_begin()
                self.on_sample_end()
                self.global_steps -= 1
                self._save_checkpoint()
            stop.end(stop.Stopped(name))

    def on_sample_begin(self) -> None:
        """Note that episodes are being played."""
        groups = self.config.data.train_batch_size // self.parameter_sync_step
        self._phase("rollout", groups * self.config.actor_rollout_ref.rollout.n)
        super().on_sample_begin()

    def on_sample_end(self) -> None:
        """Note that log-probabilities are being computed."""
        self._phase("log-probs")
        super().on_sample_end()

    def on_step_end(self) -> None:
        """Note that the weights are being synced."""
        self._phase("sync")
        super().on_step_end()

    def _save_checkpoint(self) -> None:
        """Save and seal a checkpoint, then remove old ones. Raises rl.run.checkpoints.NotSaved."""
        self._phase("checkpoint")
        directory, step = Path(self.config.trainer.default_local_dir).resolve(), self.global_steps
        try:
            super()._save_checkpoint()
            if not self.config.actor_rollout_ref.actor.checkpoint.get("async_save", False):
                checkpoints.seal(directory, step)
        except Exception as error:
            raise checkpoints.NotSaved(directory, step, error) from error
        checkpoints.drop_old(directory, self.keep)
        self.saved_step = step

    # --- held-out episodes and metrics

    def on_validate_begin(self) -> None:
        """Note that held-out episodes are being played."""
        self._phase("held-out", len(self.val_dataset) * self.config.actor_rollout_ref.rollout.val_kwargs.n)
        super().on_validate_begin()

    def _validate(self) -> dict[str, float]:
        if self.training and stop.asked() and self.global_steps < self.total_training_steps:
            return {}  # the time until the kill is for the checkpoint; the resumed run validates (rl.train.complete)
        values = super()._validate()
        values.update(run_metrics.fold(self.episodes.take("val"), "val", getattr(self.val_dataset, "labels", ())))
        if not self.training:  # before the first step; later ones are part of their step's record
            log_samples(self.samples.take(), self.logger.logger, self.global_steps)
            run_metrics.append_step(self.run_dir, self.global_steps, time.time(), values)
        return values

    def _compute_metrics(
        self, batch: "KVBatchMeta", metrics: dict[str, Any], timing_raw: dict[str, float], global_steps: int, epoch: int
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps=global_steps, epoch=epoch)
        labels = getattr(self.train_dataset, "labels", ())
        metrics.update(run_metrics.fold(self.episodes.take("train"), "episode", labels))
        metrics.update(run_metrics.group_metrics(_groups(batch)))
        if self.gpus is not None:
            metrics.update(self.gpus.take())
        log_samples(self.samples.take(), self.logger.logger, global_steps)
        run_metrics.append_step(self.run_dir, global_steps, time.time(), metrics)

    # --- rows of a batch

    def _balance_batch(self, batch: "KVBatchMeta", metrics: dict[str, Any], *args: Any, **kwargs: Any) -> "KVBatchMeta":
        """Sort the rows by task in the file and episode, not by when episodes ended, before verl distributes them.

        The order decides which rows share an update, and in which order their gradients are added.
        """
        if not batch.keys:
            lost = run_metrics.fold(self.episodes.take("train"), "episode")
            causes = ", ".join(f"{key} {value:.0f}" for key, value in lost.items() if key.startswith("infra/"))
            raise RuntimeError(f"no episode of step {self.global_steps} came through: {causes or 'none was recorded'}")
        tasks = _columns(batch, "index")["index"]
        ranks = [(int(task), *_place(key)) for task, key in zip(tasks, batch.keys, strict=True)]
        batch.reorder(sorted(range(len(ranks)), key=ranks.__getitem__))
        return super()._balance_batch(batch, metrics, *args, **kwargs)

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        if self.use_critic:
            return super()._get_required_batch_multiple(dp_size)
        return math.lcm(dp_size, dp_size * self.updates)

    def _compute_advantage(self, batch: "KVBatchMeta", metrics: dict[str, Any]) -> "KVBatchMeta":
        import transfer_queue as tq
        from tensordict import TensorDict

        batch = super()._compute_advantage(batch, metrics)
        data = _columns(batch, "advantages", "response_mask", "extra_fields")
        sessions = [_session(key) for key in batch.keys]
        real = {s for s, tag in zip(sessions, batch.tags, strict=True) if not tag.get("is_padding")}
        # Popped before tolist(): an indexed column is a list that has none.
        extra = zip(sessions, data.pop("extra_fields").tolist(), strict=True)
        overlong = {s for s, fields in extra if s in real and fields["overlong"]}
        masked = left_out(real, overlong if self.config.episode.mask_overlong else set())
        metrics["episode/overlong"] = len(overlong) / len(real)
        metrics["episode/masked"] = len(masked) / len(real)
        self.trained = real - masked

        if self.config.episode.weigh_by_episode:
            weights = row_weights(sessions, [int(mask.sum()) for mask in data["response_mask"].unbind(0)])
        else:
            weights = [1.0] * len(sessions)
        weights = [0.0 if s in masked else w for s, w in zip(sessions, weights, strict=True)]
        if all(w == 1.0 for s, w in zip(sessions, weights, strict=True) if s in real):
            return batch
        # The clipped loss is linear in a positive factor on the advantage: scaling the advantage scales the row's
        # share.
        scaled = [row * w for row, w in zip(data["advantages"].unbind(0), weights, strict=True)]
        nested = torch.nested.as_nested_tensor(scaled, layout=torch.jagged)
        columns = TensorDict({"advantages": nested}, batch_size=len(batch))
        assert batch.partition_id is not None
        return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=columns)

    def _update_actor(self, batch: "KVBatchMeta", metrics: dict[str, Any]) -> "KVBatchMeta":
        """Update the policy as verl does, with ``self.updates`` mini-batches and losses divided by what counts."""
        from verl.trainer.distillation import is_distillation_enabled
        from verl.utils.metric import reduce_metrics
        from verl.utils.py_functional import rename_dict

        self._phase("update")
        if self.use_critic or is_distillation_enabled(self.config.get("distillation")):
            return super()._update_actor(batch, metrics)  # with verl's fixed number of rows per update
        actor = self.config.actor_rollout_ref.actor
        if self.config.episode.weigh_by_episode:
            counted = len(self.trained)
        else:
            counted = sum(_session(key) in self.trained for key in batch.keys)
        batch.extra_info = (batch.extra_info or {}) | {
            "calculate_entropy": actor.calculate_entropy or actor.entropy_coeff != 0.0,
            "distillation_use_topk": False,
            "distillation_only": False,
            "global_batch_size": max(counted, 1) / self.updates,  # sums of row losses are divided by it
            "mini_batch_size": len(batch) // self.updates,
            "epochs": actor.ppo_epochs,
            "seed": actor.data_loader_seed,
            "dataloader_kwargs": {"shuffle": actor.shuffle},
            "temperature": self.config.actor_rollout_ref.rollout.temperature,
        }
        output = rename_dict(self.actor_rollout_wg.update_actor(batch)["metrics"], "actor/")
        output["perf/mfu/actor"] = output.pop("actor/mfu")
        metrics.update(reduce_metrics(output))
        return batch


class GroupBuffer(ReplayBuffer):
    """A mix-in that goes before a replay buffer of verl: a group without any row counts as a failed one.

    verl takes it for a finished one; its dynamic filtering then misses the rewards and ends the run.
    """

    def _sync_metadata_from_transfer_queue(self) -> None:
        super()._sync_metadata_from_transfer_queue()
        for partition, finished in self.finished_keys.items():
            empty = finished - {key.split("_")[0] for key in self.partitions[partition]}
            self.failure_keys[partition] |= empty
            finished -= empty


def run_trainer(config: DictConfig, last_words: Callable[[str], None]) -> None:
    """Train from start to end in this process, with Ray up. ``last_words``: see ``rl.run.watch.Watchdog``.

    This is the body of verl's ``TaskRunnerV1.run``, in the driver's process and not in a Ray actor of its own: that
    saves a start of Python and an import of verl.

    Raises:
        rl.run.watch.Died: an actor or an engine of the run has died.
    """
    import transfer_queue as tq
    from verl.trainer.ppo.v1 import AgentLoopManagerTQ
    from verl.utils.import_utils import load_class_from_fqn
    from verl.utils.logging_utils import configure_verl_logging

    configure_verl_logging()
    tq.init(config.transfer_queue)
    trainer, succeeded = None, False
    try:
        with Watchdog(last_words) as watchdog:
            trainer = trainer_class(config.trainer.v1.trainer_mode)(config=config)
            trainer.init()
            name = config.actor_rollout_ref.rollout.agent.get("agent_loop_manager_class")
            manager: Any = load_class_from_fqn(name, "AgentLoopManager") if name else AgentLoopManagerTQ
            agent_loops = manager.create(
                config=config,
                llm_client=trainer.get_llm_client(),
                teacher_client=trainer.get_teacher_client(),
                reward_loop_worker_handles=trainer.get_reward_handles(),
            )
            watchdog.engines = trainer.engine_addresses()
            trainer.fit(agent_loops)
        succeeded = True
    finally:
        if tracking := getattr(trainer, "logger", None):
            tracking.finish(exit_code=0 if succeeded else 1)
        tq.close()
