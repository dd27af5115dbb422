"""verl's V1 trainer with our episodes: a mix-in for any of its modes, and the function that runs it.

The mix-in

- folds the episodes' own records (``rl.metrics.episodes``) into each step's metrics, appends metrics.jsonl, and puts a
  few episodes into the loggers (``rl.metrics.samples``);
- makes the number of optimizer updates per step what the config says (``train_batch_size /
  ppo_mini_batch_size``) however many rows the episodes gave. verl splits into mini-batches of a fixed
  number of rows, so 33 rows would be two updates where 32 are one;
- puts rows into one order, so that a step is the same however its episodes were scheduled;
- weighs rows so that each episode counts once in the loss (``episode.weigh_by_episode``), and leaves out episodes
  that say nothing: those that a limit ended (``episode.mask_overlong``) and those that have nobody to be compared with;
- lets a group whose episodes were all lost to the infrastructure be replaced like one that failed;
- saves a checkpoint and ends between two steps when a signal asked for it (``rl.run.stop``).
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Set
from pathlib import Path

import torch
from omegaconf import DictConfig

from rl.metrics import episodes as run_metrics
from rl.metrics.gpus import Gpus
from rl.metrics.samples import SampleReader, log_samples
from rl.run import checkpoints, stop
from rl.run.phases import Phases
from rl.run.watch import Watch


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


def left_out(sessions: Iterable[str], overlong: Set[str]) -> set[str]:
    """Episodes that are not trained on.

    Args:
        sessions: episode keys, ``{group}_{number}``, in any order and number.
        overlong: those of them that a limit ended; empty where these are trained on, too.

    Returns:
        The overlong ones, and those that are alone in their group since its other episodes were lost: verl takes
        such a one's reward itself for its advantage.
    """
    kept = set(sessions)
    size = Counter(_group(session) for session in kept)
    return {session for session in kept if session in overlong or size[_group(session)] < 2}


def _group(session: str) -> str:
    return session.rpartition("_")[0]


def _session(key: str) -> str:
    return key.rpartition("_")[0]  # rows are keyed {uid}_{session}_{index}


def _groups(batch) -> dict[str, list[tuple[float, bool]]]:
    """(reward, resolved) of the episodes of each group of a step's batch, by prompt."""
    import transfer_queue as tq

    # verl reads an episode's reward from its last row; all rows carry the same.
    last = {_session(key): key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding")}
    data = tq.kv_batch_get(
        keys=list(last.values()), partition_id=batch.partition_id, select_fields=["rm_scores", "extra_fields"]
    )
    groups: dict[str, list[tuple[float, bool]]] = {}
    extras = data.pop("extra_fields").tolist()
    for session, scores, extra in zip(last, data["rm_scores"].unbind(), extras, strict=True):
        reward = float(scores.sum())
        resolved = extra.get("reward_extra_info", {}).get("resolved", reward > 0)
        groups.setdefault(_group(session), []).append((reward, bool(resolved)))
    return groups


def _place(key: str) -> tuple[int, int]:
    """(session, row) of a row's key."""
    return tuple(int(number) for number in key.split("_")[-2:])


def trainer_class(mode: str) -> type:
    """verl's trainer of that mode (``trainer.v1.trainer_mode``) with the mix-in of this module."""
    from verl.trainer.ppo.v1 import get_trainer_cls

    base = get_trainer_cls(mode)
    # Phases first: what the others do in place of verl is noted, too.
    return type(f"Episodes{base.__name__}", (Phases, _Episodes, base), {})


class _Episodes:
    """Mix-in before a ``PPOTrainer`` subclass; see the module's docstring."""

    def __init__(self, config: DictConfig):
        super().__init__(config=config)
        self.run_dir = Path(config.run.dir)
        self.episodes = run_metrics.EpisodeReader(self.run_dir)
        self.samples = SampleReader(self.run_dir)
        self.gpus: Gpus | None = None
        self.training = False
        # Ours to remove, when the next one is complete (rl.run.checkpoints).
        self.keep = config.trainer.max_actor_ckpt_to_keep
        config.trainer.max_actor_ckpt_to_keep = config.trainer.max_critic_ckpt_to_keep = None
        # Of one batch that was sampled: a step of the separate mode samples several, each of one mini-batch.
        self.updates = config.data.train_batch_size // config.actor_rollout_ref.actor.ppo_mini_batch_size
        self.updates //= self.parameter_sync_step

    def _build_replay_buffer(self):
        """verl's, in which a group without any row is a failed one. verl takes it for a finished one, whose rewards its
        dynamic filtering then misses and ends the run."""
        buffer = super()._build_replay_buffer()
        buffer.__class__ = type(f"Groups{type(buffer).__name__}", (_Groups, type(buffer)), {})
        return buffer

    def _init_resource_pool_mgr(self):
        super()._init_resource_pool_mgr()
        if self.trainer_mode == "separate_async" and self.config.trainer.device == "cpu":
            import ray
            from verl.trainer.ppo.utils import Role

            from rl.cpu.actor import CPUDetachActorWorker

            self.role_worker_mapping[Role.Actor] = ray.remote(CPUDetachActorWorker)

    def _setup(self):
        # verl 0.9.1 ends the set-up of separate-async without hybrid replicas with a log line that logging refuses
        # (logger.info(..., flush=True)), a TypeError. It is not made above this level.
        logging.getLogger("verl.trainer.ppo.v1.trainer_separate_async").setLevel(logging.WARNING)
        super()._setup()

    def on_init_end(self):
        super().on_init_end()
        if self.config.trainer.device != "cpu":
            self.gpus = Gpus()

    def engine_addresses(self) -> list[str]:
        """host:port of all inference servers, of separate-async's own ones too."""
        return [address for manager in self._rollout_server_managers() for address in manager.get_addresses()]

    def on_train_begin(self):
        self.training = True
        self.saved_step = self.global_steps - 1  # what was resumed from, or nothing at step 0
        super().on_train_begin()
        stop.enter_steps()

    def on_step_begin(self):
        """Raises rl.run.stop.Stopped when a signal asked for the end, with the step before this one saved."""
        super().on_step_begin()
        if name := stop.asked():
            if self.saved_step < self.global_steps - 1:
                # verl saves when sampling is over: the engine is paused then, and its memory is the trainer's.
                self.on_sample_begin()
                self.on_sample_end()
                self.global_steps -= 1
                self._save_checkpoint()
            stop.end(stop.Stopped(name))

    def _save_checkpoint(self):
        """Raises rl.run.checkpoints.NotSaved."""
        directory, step = Path(self.config.trainer.default_local_dir).resolve(), self.global_steps
        try:
            super()._save_checkpoint()
            if not self.config.actor_rollout_ref.actor.checkpoint.get("async_save", False):
                checkpoints.seal(directory, step)
        except Exception as error:
            raise checkpoints.NotSaved(directory, step, error) from error
        checkpoints.drop_old(directory, self.keep)
        self.saved_step = step

    def _validate(self) -> dict[str, float]:
        if self.training and stop.asked() and self.global_steps < self.total_training_steps:
            return {}  # when the run goes on (rl.train.complete): the time until it is killed is for the checkpoint
        values = super()._validate()
        values.update(run_metrics.fold(self.episodes.take("val"), "val", getattr(self.val_dataset, "labels", ())))
        if not self.training:  # before the first step; later ones are part of their step's record
            log_samples(self.samples.take(), self.logger.logger, self.global_steps)
            run_metrics.append_step(self.run_dir, self.global_steps, time.time(), values)
        return values

    def _compute_metrics(self, batch, metrics, timing_raw, global_steps, epoch):
        super()._compute_metrics(batch, metrics, timing_raw, global_steps=global_steps, epoch=epoch)
        labels = getattr(self.train_dataset, "labels", ())
        metrics.update(run_metrics.fold(self.episodes.take("train"), "episode", labels))
        metrics.update(run_metrics.group_metrics(_groups(batch)))
        if self.gpus is not None:
            metrics.update(self.gpus.take())
        log_samples(self.samples.take(), self.logger.logger, global_steps)
        run_metrics.append_step(self.run_dir, global_steps, time.time(), metrics)

    def _balance_batch(self, batch, metrics, *args, **kwargs):
        """verl's, on rows in the order of their tasks in the file and not in that in which episodes happened to end:
        it decides which rows share an update, and in which order their gradients are added."""
        import transfer_queue as tq

        if not batch.keys:
            lost = run_metrics.fold(self.episodes.take("train"), "episode")
            causes = ", ".join(f"{key} {value:.0f}" for key, value in lost.items() if key.startswith("infra/"))
            raise RuntimeError(f"no episode of step {self.global_steps} came through: {causes or 'none was recorded'}")
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["index"])
        ranks = [(int(task), *_place(key)) for task, key in zip(data["index"], batch.keys, strict=True)]
        batch.reorder(sorted(range(len(ranks)), key=ranks.__getitem__))
        return super()._balance_batch(batch, metrics, *args, **kwargs)

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        if self.use_critic:
            return super()._get_required_batch_multiple(dp_size)
        return math.lcm(dp_size, dp_size * self.updates)

    def _compute_advantage(self, batch, metrics: dict):
        import transfer_queue as tq
        from tensordict import TensorDict

        batch = super()._compute_advantage(batch, metrics)
        fields = ["advantages", "response_mask", "extra_fields"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        sessions = [_session(key) for key in batch.keys]
        real = {s for s, tag in zip(sessions, batch.tags, strict=True) if not tag.get("is_padding")}
        extra = zip(sessions, data.pop("extra_fields").tolist(), strict=True)  # a list without tolist if indexed
        overlong = {s for s, fields in extra if s in real and fields["overlong"]}
        masked = left_out(real, overlong if self.config.episode.mask_overlong else set())
        metrics["episode/overlong"] = len(overlong) / len(real)
        metrics["episode/masked"] = len(masked) / len(real)
        self.trained = real - masked

        if self.config.episode.weigh_by_episode:
            weights = row_weights(sessions, [int(mask.sum()) for mask in data["response_mask"].unbind()])
        else:
            weights = [1.0] * len(sessions)
        weights = [0.0 if s in masked else w for s, w in zip(sessions, weights, strict=True)]
        if all(w == 1.0 for s, w in zip(sessions, weights, strict=True) if s in real):
            return batch
        # The clipped loss is linear in a positive factor on the advantage, so scaling the advantage
        # scales the row's share of the loss.
        scaled = [row * w for row, w in zip(data["advantages"].unbind(), weights, strict=True)]
        scaled = TensorDict(
            {"advantages": torch.nested.as_nested_tensor(scaled, layout=torch.jagged)}, batch_size=len(batch)
        )
        return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=scaled)

    def _update_actor(self, batch, metrics: dict):
        from verl.trainer.distillation import is_distillation_enabled
        from verl.utils.metric import reduce_metrics
        from verl.utils.py_functional import rename_dict

        if self.use_critic or is_distillation_enabled(self.config.get("distillation")):
            return super()._update_actor(batch, metrics)  # verl's fixed number of rows per update
        actor = self.config.actor_rollout_ref.actor
        if self.config.episode.weigh_by_episode:
            counted = len(self.trained)
        else:
            counted = sum(_session(key) in self.trained for key in batch.keys)
        batch.extra_info.update(
            {
                "calculate_entropy": actor.calculate_entropy or actor.entropy_coeff != 0.0,
                "distillation_use_topk": False,
                "distillation_only": False,
                # What sums of row losses are divided by.
                "global_batch_size": max(counted, 1) / self.updates,
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


class _Groups:
    """Mix-in before a replay buffer of verl; see ``_Episodes._build_replay_buffer``."""

    def _sync_metadata_from_transfer_queue(self):
        super()._sync_metadata_from_transfer_queue()
        for partition, finished in self.finished_keys.items():
            empty = finished - {key.split("_")[0] for key in self.partitions[partition]}
            self.failure_keys[partition] |= empty
            finished -= empty


def run_trainer(config: DictConfig, last_words: Callable[[str], None]) -> None:
    """Train from start to end, in this process; Ray must be up. The body of verl's ``TaskRunnerV1.run``.
    ``last_words``: see ``rl.run.watch.Watch``, which raises Died here.

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
        with Watch(last_words) as watch:
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
            watch.engines = trainer.engine_addresses()
            trainer.fit(agent_loops)
        succeeded = True
    finally:
        if tracking := getattr(trainer, "logger", None):
            tracking.finish(exit_code=0 if succeeded else 1)
        tq.close()
