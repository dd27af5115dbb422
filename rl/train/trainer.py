"""verl's V1 trainer with our episodes: a mix-in for each of its modes, and the function that runs it.

The mix-in

- folds the episodes' own records (``rl.metrics.episodes``) into each step's metrics, appends metrics.jsonl, puts a few
  episodes into the loggers (``rl.metrics.samples``) and notes what it is doing (``rl.run.phases``);
- makes the number of optimizer updates per step what the config says (``train_batch_size / ppo_mini_batch_size``),
  however many rows the episodes gave. verl splits into mini-batches of a fixed number of rows, so 33 rows would make
  two updates where 32 make one;
- sorts the rows, so that a step is the same however its episodes were scheduled;
- weighs rows so that each episode counts once in the loss (``episode.weigh_by_episode``);
- divides the loss by what is left in it, so that rejection sampling (``rollout_correction.rollout_rs``) does not make
  updates smaller;
- has groups replaced by our rule (``rl.train.groups``); where none are, it leaves out those of one episode;
- leaves out a logger that fails (``rl.metrics.loggers``), and keeps the record of a step whose checkpoint is saved;
- saves a checkpoint when the last one is ``run.save_minutes`` old;
- saves a checkpoint and ends when a signal asked for it (``rl.run.stop``): between two steps or, where a step plays its
  episodes first and then trains on them, while they are played (``rl.train.unfinished`` keeps those that are done).

A row's key in TransferQueue is ``{group}_{session}_{row}``: the group is a prompt, a session is one of its episodes.
"""

import copy
import functools
import gc
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from omegaconf import DictConfig

from rl.metrics import episodes as run_metrics
from rl.metrics import trained
from rl.metrics.gpus import Gpus
from rl.metrics.loggers import Tables, take_over
from rl.metrics.samples import SampleReader, log_samples
from rl.run import checkpoints, errors, phases, stop
from rl.run.watch import Watchdog
from rl.train import unfinished
from rl.train.curriculum import CurriculumTrainer
from rl.train.groups import GroupBuffer, NothingPlayed, RolloutInterrupted, alone, group_of, manager_class, session_of
from rl.train.weights import credited, left_out, place, rejected, row_weights

if TYPE_CHECKING:
    from tensordict import TensorDict
    from transfer_queue import KVBatchMeta
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer
else:
    ReplayBuffer = PPOTrainer = object  # the real bases depend on the mode: see trainer_class


def _columns(batch: "KVBatchMeta", *names: str, keys: list[str] | None = None) -> "TensorDict":
    """Fetch columns of the rows of a batch, or of the rows ``keys``, from TransferQueue."""
    import transfer_queue as tq

    assert batch.partition_id is not None
    return tq.kv_batch_get(keys=keys or batch.keys, partition_id=batch.partition_id, select_fields=list(names))


def _groups(batch: "KVBatchMeta") -> dict[str, list[tuple[float, bool]]]:
    """Return (reward, resolved) of the episodes of a step's batch, by group."""
    # verl reads an episode's reward from its last row; all rows carry the same.
    last = {session_of(key): key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding")}
    data = _columns(batch, "rm_scores", "extra_fields", keys=list(last.values()))
    groups: dict[str, list[tuple[float, bool]]] = {}
    extras = data.pop("extra_fields").tolist()
    for session, scores, extra in zip(last, data["rm_scores"].unbind(0), extras, strict=True):
        reward = float(scores.sum())
        resolved = extra.get("reward_extra_info", {}).get("resolved", reward > 0)
        groups.setdefault(group_of(session), []).append((reward, bool(resolved)))
    return groups


def trainer_class(mode: str) -> "type[EpisodeTrainer]":
    """Return verl's trainer of a mode (``trainer.v1.trainer_mode``) with the mix-in of this module."""
    from verl.trainer.ppo.v1 import get_trainer_cls

    base = get_trainer_cls(mode)
    return type(f"Episodes{base.__name__}", (EpisodeTrainer, CurriculumTrainer, base), {})


class EpisodeTrainer(PPOTrainer):
    """This mix-in goes before a ``PPOTrainer`` subclass; the module's docstring says what it changes."""

    logger: Any  # rl.metrics.loggers.Loggers, which verl makes when training begins

    def __init__(self, config: DictConfig):
        super().__init__(config=config)
        self.run_dir = Path(config.run.dir)
        self.episodes = run_metrics.EpisodeReader(self.run_dir)
        self.samples = SampleReader(self.run_dir)
        self.gpus: Gpus | None = None
        self.training = False
        self.saved_step, self.saved_at = 0, time.monotonic()
        self.kept: unfinished.UnfinishedStep | None = None  # episodes of the first step, from an earlier start
        self.draws: unfinished.Draws | None = None  # prompts of this step, where its rollout can be interrupted
        self.trained: set[str] = set()  # rows of this batch that count in the loss
        self.lone_groups = 0  # groups of this step that had one episode and were not replaced
        # Batch and metrics of a step without a record.
        self.unrecorded: tuple[KVBatchMeta, dict[str, Any]] | None = None
        # verl reduces an episode of several rows to one for GRPO alone; RLOO's advantage is GRPO's, scaled.
        self.leaves_one_out = config.algorithm.adv_estimator == "rloo"
        if self.leaves_one_out:
            config.algorithm.adv_estimator, config.algorithm.norm_adv_by_std_in_grpo = "grpo", False
        # We remove old checkpoints ourselves, when the next one is complete (rl.run.checkpoints).
        self.keep = config.trainer.max_actor_ckpt_to_keep
        config.trainer.max_actor_ckpt_to_keep = config.trainer.max_critic_ckpt_to_keep = None
        # Updates per sampled batch: a step of the separate mode samples several batches, each of one mini-batch.
        self.updates = config.data.train_batch_size // config.actor_rollout_ref.actor.ppo_mini_batch_size
        self.updates //= self.parameter_sync_step

    def _phase(self, name: str, episodes: int = 0) -> None:
        phases.note(self.run_dir, self.global_steps, name, episodes)

    # --- start

    def _build_replay_buffer(self) -> ReplayBuffer:
        buffer: Any = super()._build_replay_buffer()
        buffer.__class__ = type(f"Groups{type(buffer).__name__}", (GroupBuffer, type(buffer)), {})
        buffer.take_over()
        buffer.most_raised = max(8, self.config.data.train_batch_size)
        buffer.last_error = functools.partial(errors.last, Path(self.config.run.dir))
        buffer.most_barren, buffer.causes = 4 * buffer.most_raised, self._causes
        if self.trainer_mode == "sync":  # in the others, rollouts of several steps run at a time, beside updates
            buffer.interrupts = self._interrupts
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
        # logging refuses with a TypeError. With this level the line is not made.
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
        self.saved_at = time.monotonic()
        self.episodes = run_metrics.EpisodeReader(self.run_dir, after=self.saved_step)
        if self.trainer_mode == "sync":
            self.kept = unfinished.load(self.run_dir, after=self.saved_step)
        super().on_train_begin()
        self.dapo_filtered_reward_logger: Any = Tables(self.dapo_filtered_reward_logger, self.logger)
        stop.enter_steps()

    def on_step_begin(self) -> None:
        """End the run if a signal asked for it, with the step before this one saved. Raises rl.run.stop.RunStopped."""
        super().on_step_begin()
        if name := stop.asked():
            if self.saved_step < self.global_steps - 1:
                # verl saves after sampling: the engine is paused then, and its memory is the trainer's.
                self.on_sample_begin()
                self.on_sample_end()
                self.global_steps -= 1
                self._save_checkpoint()
            stop.end(stop.RunStopped(name))
        if self.trainer_mode == "sync":
            # The loader's state is that of its live iterator.
            self.position = copy.deepcopy(self.train_dataloader.state_dict())
            metric = self.replay_buffer.filter_groups_metric or ""
            self.draws = unfinished.Draws(self.run_dir, self.global_steps, self.kept, metric)
            if self.kept is not None:
                buffer = cast(GroupBuffer, self.replay_buffer)
                buffer.lost, buffer.ended = self.kept.lost, self.kept.ended
            self.kept = None  # later steps have other weights

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> "KVBatchMeta":
        """Take a step as verl does. Raises rl.run.stop.RunStopped if a signal asks to end while episodes are played."""
        try:
            batch = super().step(metrics, timing_raw)
        except RolloutInterrupted:
            self._stop_in_rollout()
        self.unrecorded = batch, metrics
        return batch

    def _submit_batch_to_rollout(self, batch: "TensorDict") -> int:
        if self.draws is None:
            return super()._submit_batch_to_rollout(batch)
        played = self.draws.submit(batch)
        if played is not None:
            super()._submit_batch_to_rollout(played)
        return len(batch)

    def _interrupts(self, partition: str) -> bool:
        """Tell whether to leave the rollout now. The last step's held-out episodes end the run anyway."""
        due = partition == "train" or self.global_steps < self.total_training_steps
        return self.training and stop.asked() is not None and due

    def _end_episodes(self) -> None:
        """End the episodes that are running, so that the engine can be put to sleep."""
        import ray

        workers: Any = self.agent_loop_manager.agent_loop_workers
        for worker in workers:
            ray.kill(worker)  # rl.train sweeps up their boxes
        self.checkpoint_manager.abort_replicas()

    def _stop_in_rollout(self) -> NoReturn:
        """Keep what this step has played, with a checkpoint of the step before it, and end the run."""
        assert self.draws is not None
        buffer = cast(GroupBuffer, self.replay_buffer)
        self._end_episodes()
        step = self.global_steps
        if self.saved_step < step - 1:
            self.on_sample_end()
            self.global_steps -= 1
            position = self.position  # from before the prompts of this step were drawn
            self.train_dataloader = cast(Any, SimpleNamespace(state_dict=lambda: position))
            self._save_checkpoint()
        self._phase("checkpoint")
        kept = self.draws.keep(buffer.replaced or {}, buffer.lost, buffer.ended)
        stop.say(f"step {step}: {kept.episodes} episodes are done and kept; the resumed run plays the others")
        name = stop.asked()
        assert name is not None
        stop.end(stop.RunStopped(name))

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
        """Save a checkpoint if the last one is old, and note that the weights are being synced."""
        from verl.utils.debug import marked_timer

        minutes = self.config.run.save_minutes
        if minutes and self.saved_step < self.global_steps and time.monotonic() - self.saved_at >= 60 * minutes:
            with marked_timer("save_checkpoint", self.timing_raw, color="green"):
                self._save_checkpoint()  # here the engine still sleeps: the weights are not synced yet
        self._phase("sync")
        super().on_step_end()

    def _save_checkpoint(self) -> None:
        """Save and seal a checkpoint, then remove old ones. Raises rl.run.checkpoints.NotSaved."""
        self._phase("checkpoint")
        directory, step = Path(self.config.trainer.default_local_dir).resolve(), self.global_steps
        try:
            checkpoints.unseal(directory, step)
            super()._save_checkpoint()
            if self.unrecorded is not None:  # a kill before the end of the step leaves this as its record
                run_metrics.keep_step(self.run_dir, step, time.time(), self._known(*self.unrecorded))
            if not self.config.actor_rollout_ref.actor.checkpoint.get("async_save", False):
                checkpoints.seal(directory, step)
        except Exception as error:
            raise checkpoints.NotSaved(directory, step, error) from error
        checkpoints.drop_old(directory, self.keep)
        self.saved_step, self.saved_at = step, time.monotonic()
        unfinished.drop(self.run_dir)  # it belonged to an older checkpoint

    # --- held-out episodes and metrics

    def on_validate_begin(self) -> None:
        """Note that held-out episodes are being played."""
        self._phase("held-out", len(self.val_dataset) * self.config.actor_rollout_ref.rollout.val_kwargs.n)
        if not isinstance(self.validation_generations_logger, Tables):
            self.validation_generations_logger: Any = Tables(self.validation_generations_logger, self.logger)
        super().on_validate_begin()

    def _validate(self) -> dict[str, float]:
        if self.training and stop.asked() and self.global_steps < self.total_training_steps:
            return {}  # time until the kill is for the checkpoint; the resumed run validates (`complete` of rl.train)
        try:
            values = super()._validate()
        except NothingPlayed:  # the figures say what was lost
            values = {"val/count": 0.0}
        except RolloutInterrupted:
            self._end_episodes()
            return {}
        values.update(run_metrics.fold(self.episodes.take("val"), "val", getattr(self.val_dataset, "labels", ())))
        if not self.training:  # before the first step; later ones are part of their step's record
            run_metrics.append_step(self.run_dir, self.global_steps, time.time(), values)
            log_samples(self.samples.take(), self.logger, self.global_steps)
        return values

    def _compute_metrics(
        self, batch: "KVBatchMeta", metrics: dict[str, Any], timing_raw: dict[str, float], global_steps: int, epoch: int
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps=global_steps, epoch=epoch)
        metrics.update(self._played(batch, metrics, self.episodes.take("train")))
        self.lone_groups, self.unrecorded = 0, None
        if self.gpus is not None:
            metrics.update(self.gpus.take())
        run_metrics.append_step(self.run_dir, global_steps, time.time(), metrics)
        log_samples(self.samples.take(), self.logger, global_steps)

    def _played(self, batch: "KVBatchMeta", metrics: dict[str, Any], lines: list[run_metrics.Line]) -> dict[str, float]:
        """Return the figures of a step's episodes and groups; ``metrics``: verl's own, ``lines``: the episodes'."""
        from verl.trainer.ppo.v1.replay_buffer import DAPO_FILTERED_REWARD_COUNTS_KEY

        filtered = metrics.get(DAPO_FILTERED_REWARD_COUNTS_KEY)
        surplus = metrics.get("training/filter_groups/discarded_surplus_samples", 0)
        lone = self.lone_groups + metrics.get("training/rollout_failure/evicted_samples", 0)
        episodes = run_metrics.fold(lines, "episode", getattr(self.train_dataset, "labels", ()))
        return episodes | run_metrics.group_metrics(_groups(batch), filtered, surplus, lone)

    def _known(self, batch: "KVBatchMeta", metrics: dict[str, Any]) -> dict[str, Any]:
        """Return what is known of a step while its checkpoint is saved; the episodes' lines stay new."""
        times = {f"timing_s/{name}": seconds for name, seconds in self.timing_raw.items()}
        return metrics | times | self._played(batch, metrics, self.episodes.look("train"))

    def _causes(self) -> str:
        """Return why the infrastructure has lost episodes of this step."""
        counts = run_metrics.fold(self.episodes.look("train"), "episode")
        causes = ", ".join(f"{key} {value:.0f}" for key, value in counts.items() if key.startswith("infra/"))
        return causes or "the infrastructure has lost none"

    # --- rows of a batch

    def _balance_batch(self, batch: "KVBatchMeta", metrics: dict[str, Any], *args: Any, **kwargs: Any) -> "KVBatchMeta":
        """Sort the rows by task in the file and episode, not by when episodes ended, before verl distributes them.

        The order decides which rows share an update, and in which order their gradients are added.
        """
        batch = self._compared(batch)
        if not batch.keys:
            raise RuntimeError(f"step {self.global_steps} has no two episodes of a task to compare: {self._causes()}")
        tasks = _columns(batch, "index")["index"]
        ranks = [(int(task), *place(key)) for task, key in zip(tasks, batch.keys, strict=True)]
        batch.reorder(sorted(range(len(ranks)), key=ranks.__getitem__))
        return super()._balance_batch(batch, metrics, *args, **kwargs)

    def _compared(self, batch: "KVBatchMeta") -> "KVBatchMeta":
        """Return the batch without groups that have one episode: nothing is computed from their rows."""
        import transfer_queue as tq

        gone = alone(session_of(key) for key in batch.keys)
        self.lone_groups += len(gone)
        if gone:
            assert batch.partition_id is not None
            tq.kv_clear(keys=[key for key in batch.keys if session_of(key) in gone], partition_id=batch.partition_id)
            batch = batch.select_keys([key for key in batch.keys if session_of(key) not in gone])
        return batch

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        if self.use_critic:
            return super()._get_required_batch_multiple(dp_size)
        return math.lcm(dp_size, dp_size * self.updates)

    def _compute_advantage(self, batch: "KVBatchMeta", metrics: dict[str, Any]) -> "KVBatchMeta":
        import transfer_queue as tq
        from tensordict import TensorDict

        known = _columns(batch, "response_mask", *trained.columns(self.config))  # before rejection changes the mask
        batch = super()._compute_advantage(batch, metrics)
        data = _columns(batch, "advantages", "response_mask")
        sessions = [session_of(key) for key in batch.keys]
        if self.leaves_one_out:
            data["advantages"] = left_out(data["advantages"], sessions)
        if self.config.episode.credit:
            data["advantages"] = credited(data, _columns(batch, "extra_fields").pop("extra_fields").tolist())
        trained.write(self.run_dir, self.global_steps, trained.rows(batch, known, data["advantages"]))
        real = {s for s, tag in zip(sessions, batch.tags, strict=True) if not tag.get("is_padding")}
        tokens = [int(mask.sum()) for mask in data["response_mask"].unbind(0)]  # rejected ones not counted
        kept = real - rejected(batch.keys, tokens)
        self.trained = {key for key, n in zip(batch.keys, tokens, strict=True) if n and session_of(key) in kept}

        weights = row_weights(sessions, tokens) if self.config.episode.weigh_by_episode else [1.0] * len(sessions)
        weights = [w if key in self.trained else 0.0 for key, w in zip(batch.keys, weights, strict=True)]
        columns: dict[str, list[torch.Tensor]] = {}
        other = self.leaves_one_out or self.config.episode.credit
        if other or any(w != 1.0 for s, w in zip(sessions, weights, strict=True) if s in real):
            # The clipped loss is linear in a positive factor on the advantage: scaling the advantage scales the row's
            # share.
            columns["advantages"] = [row * w for row, w in zip(data["advantages"].unbind(0), weights, strict=True)]
        if self.config.actor_rollout_ref.actor.loss_agg_mode == "token-mean":
            # verl divides by the sum of loss_mask, which would otherwise count rejected and left-out tokens.
            rows = zip(batch.keys, data["response_mask"].unbind(0), strict=True)
            columns["loss_mask"] = [mask * (key in self.trained) for key, mask in rows]
        if not columns:
            return batch
        nested = {name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for name, rows in columns.items()}
        assert batch.partition_id is not None
        fields = TensorDict(cast(Any, nested), batch_size=len(batch))
        return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)

    def _update_actor(self, batch: "KVBatchMeta", metrics: dict[str, Any]) -> "KVBatchMeta":
        """Update the policy as verl does, with ``self.updates`` mini-batches and losses divided by what counts."""
        from verl.trainer.distillation import is_distillation_enabled
        from verl.utils.metric import reduce_metrics
        from verl.utils.py_functional import rename_dict

        self._phase("update")
        if self.use_critic or is_distillation_enabled(self.config.get("distillation")):
            return super()._update_actor(batch, metrics)  # with verl's fixed number of rows per update
        actor = self.config.actor_rollout_ref.actor
        counted = {session_of(key) for key in self.trained} if self.config.episode.weigh_by_episode else self.trained
        batch.extra_info = (batch.extra_info or {}) | {
            "calculate_entropy": actor.calculate_entropy or actor.entropy_coeff != 0.0,
            "distillation_use_topk": False,
            "distillation_only": False,
            "global_batch_size": max(len(counted), 1) / self.updates,  # sums of row losses are divided by it
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


def run_trainer(config: DictConfig, last_words: Callable[[str], None]) -> None:
    """Train from start to end in this process, with Ray up. ``last_words``: see ``rl.run.watch.Watchdog``.

    This is the body of verl's ``TaskRunnerV1.run``, in the driver's process and not in a Ray actor of its own: that
    saves a start of Python and an import of verl.

    Raises:
        rl.run.watch.PartDied: an actor or an engine of the run has died.
    """
    import transfer_queue as tq
    from verl.trainer.ppo.v1 import trainer_base
    from verl.utils.import_utils import load_class_from_fqn
    from verl.utils.logging_utils import configure_verl_logging

    configure_verl_logging()
    take_over(trainer_base, stop.say)
    tq.init(config.transfer_queue)
    trainer, succeeded = None, False
    try:
        with Watchdog(last_words) as watchdog:
            trainer = trainer_class(config.trainer.v1.trainer_mode)(config=config)
            trainer.init()
            name = config.actor_rollout_ref.rollout.agent.get("agent_loop_manager_class")
            manager: Any = load_class_from_fqn(name, "AgentLoopManager") if name else manager_class()
            agent_loops = manager.create(
                config=config,
                llm_client=trainer.get_llm_client(),
                teacher_client=trainer.get_teacher_client(),
                reward_loop_worker_handles=trainer.get_reward_handles(),
            )
            watchdog.engines = trainer.engine_addresses()
            gc.enable()  # see `start` of rl.train
            trainer.fit(agent_loops)
        succeeded = True
    finally:
        if tracking := getattr(trainer, "logger", None):
            tracking.finish(exit_code=0 if succeeded else 1)
        tq.close()
