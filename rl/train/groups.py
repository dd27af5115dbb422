"""Choose which groups a step plays, and who plays them: mix-ins for verl's replay buffer and its agent loop manager.

Dynamic filtering (``algorithm.filter_groups``) replaces groups whose rewards are all equal. verl plays a batch, starts
two groups for each one that it replaces, and gives small batches to the first workers. ``GroupBuffer`` keeps as many
groups in flight as the step will probably need, from its start on; ``SpreadManager`` gives groups to workers in turn.
``rl.plan`` calculates a step's time with the same rule (``rl.run.pacing``).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

from rl.run.nodes import places
from rl.run.pacing import in_flight
from rl.train.distillation import worker_class

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from tensordict import TensorDict
    from transfer_queue import KVBatchMeta
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
else:
    AgentLoopManagerTQ = ReplayBuffer = object  # the real base of the buffer depends on the mode


def group_of(session: str) -> str:
    """Return the group of an episode; ``session`` is the episode's key, ``{group}_{session}``."""
    return session.rpartition("_")[0]


def session_of(key: str) -> str:
    """Return the key of the episode that a row belongs to; ``key`` is the row's, ``{group}_{session}_{row}``."""
    return key.rpartition("_")[0]


def alone(sessions: Iterable[str]) -> set[str]:
    """Return the episodes that are the only ones of their group in ``sessions``.

    verl uses the reward itself as the advantage of such an episode.
    """
    episodes = set(sessions)
    size = Counter(map(group_of, episodes))
    return {session for session in episodes if size[group_of(session)] < 2}


class RolloutInterrupted(Exception):
    """A rollout was left before all of its episodes had ended."""


class NothingPlayed(Exception):
    """The infrastructure has lost all held-out episodes."""


class GroupBuffer(ReplayBuffer):
    """This mix-in goes before a replay buffer of verl.

    - A group with fewer than two episodes counts as a failed one: the infrastructure lost the others, or a limit ended
      them (``episode.mask_overlong``). verl counts it as finished. Its dynamic filtering then ends the run over the
      missing rewards of a group without rows, and keeps a group with a single episode, which teaches nothing.
    - A synchronous step with dynamic filtering starts as many groups as it will probably need: those that are missing,
      divided by the share that could be used in the steps before (``in_flight``).
    - Of the groups that can be used, those are taken that were started first, not those that ended first. A synchronous
      step waits for all groups that it has started; so it uses the first groups, in the order of tasks, whose rewards
      differ, however long their episodes took.
    - After ``most_raised`` groups in a row that have no row because the agent loop raised, the run ends: those that
      would replace them raise as well. The asynchronous modes would go on for ever. So it does after ``most_barren``
      groups in a row of which no episode has a row for whatever cause, such as an engine for containers that is dead.
    - While it waits for episodes, ``interrupts`` can end the wait. It gets the partition, train or val.
    """

    interrupts: Callable[[str], bool] | None = None
    replaced: dict[str, tuple[list[str], float]] | None = None  # episodes and reward of this rollout's replaced groups
    submit: Callable[[int], Any] | None = None  # verl's refill_fn, where this class decides how many groups it starts
    most_raised = math.inf
    last_error: Callable[[], str] = str  # tells why the agent loop raised
    most_barren = math.inf
    causes: Callable[[], str] = str  # tells why episodes were lost
    raised = barren = 0  # groups in a row
    rowful: frozenset[str] = frozenset()  # groups that had ended with rows at the last look
    lost = ended = 0.0  # unusable groups and all groups of the steps so far; each step halves the older counts

    def take_over(self) -> None:
        """Decide from now on how many groups are started, if the mode waits for them and filters."""
        if self.trainer_mode == "sync" and self.filter_groups_metric is not None:
            self.submit, self.refill_fn = self.refill_fn, self.refill

    @property
    def most(self) -> int:
        """Return how many groups may be in flight (``algorithm.filter_groups.max_inflight_gen_batches``)."""
        assert self.train_batch_size is not None
        return self.max_inflight_gen_batches * self.train_batch_size

    @property
    def lost_share(self) -> float:
        """Return the share of groups that could not be used in the steps so far; 0 before the first."""
        return self.lost / self.ended if self.ended else 0.0

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        """Return a batch and metrics as verl does, after starting ahead the groups that will replace others."""
        mine = self.submit is not None and partition_id == "train"
        self.replaced = {}
        if mine and (more := in_flight(batch_size, self.lost_share, self.most) - batch_size) > 0:
            self.submit(more)  # the trainer has started batch_size of them
        batch, metrics = super().sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
        if partition_id == "val" and not batch.keys:
            raise NothingPlayed
        if mine:
            reasons = ("filter_groups", "rollout_failure")
            lost = sum(metrics.get(f"training/{reason}/evicted_samples", 0) for reason in reasons)
            surplus = metrics.get("training/filter_groups/discarded_surplus_samples", 0)
            self.lost, self.ended = self.lost / 2 + lost, self.ended / 2 + lost + batch_size + surplus
        return batch, metrics

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        if self.interrupts is not None and self.interrupts(partition_id):
            raise RolloutInterrupted
        return super()._wait_for_next_poll(partition_id, last_debug_time)

    def _evict_terminal_groups(
        self, global_steps: int, partition_id: str, eviction_reasons: tuple[set[str], set[str], set[str], Counter]
    ) -> tuple[set[str], int, int, dict[str, Any]]:
        _, filtered, failed, _ = eviction_reasons
        if partition_id == "train":
            self._count_barren(failed)
        rewards = self._dapo_classification_cache[partition_id]
        if self.replaced is not None and (gone := filtered | failed):
            sessions = {uid: list[str]() for uid in gone}
            for session in dict.fromkeys(session_of(key) for key in self.partitions[partition_id]):
                if (uid := group_of(session)) in gone:
                    sessions[uid].append(session)
            self.replaced |= {uid: (kept, rewards.get(uid) or 0.0) for uid, kept in sessions.items()}
        return super()._evict_terminal_groups(global_steps, partition_id, eviction_reasons)

    def _count_barren(self, failed: set[str]) -> None:
        """Count the groups without rows, and those in which the agent loop raised. Raises RuntimeError if there are too
        many in a row."""
        rows = {group_of(session_of(key)) for key in self.partitions["train"]}
        rowful = frozenset(rows & (self.finished_keys["train"] | self.failure_keys["train"]))
        if rowful - self.rowful:
            self.raised = self.barren = 0
        self.rowful = rowful
        self.raised += len(failed - rows - self.few)
        self.barren += len(failed - rows)
        if self.raised >= self.most_raised:
            raise RuntimeError(f"the agent loop raised in each of the last {self.raised} groups: {self.last_error()}")
        if self.barren >= self.most_barren:
            raise RuntimeError(f"no episode of the last {self.barren} groups can be trained on: {self.causes()}")

    def refill(self, _: int) -> None:
        """Start the groups that are missing, whatever number verl asks for. It asks whenever one has been replaced."""
        assert self.submit is not None and self.train_batch_size is not None
        running = len(self.pending_keys["train"]) + len(self.running_keys["train"])
        usable = len(self.finished_keys["train"]) + len(self.failure_keys["train"])  # replaced groups are gone by now
        if (more := in_flight(self.train_batch_size - usable, self.lost_share, self.most) - running) > 0:
            self.submit(more)

    def _select_prompt_uids(
        self, partition_id: str, sampleable_keys: Collection[str], batch_size: int
    ) -> tuple[list[str], dict[str, dict[str, Any]], dict[str, int]]:
        # TransferQueue lists groups as they were started. verl sorts by step and keeps the order that it is given.
        ordered: Any = [uid for uid in self.prompt_global_steps[partition_id] if uid in sampleable_keys]
        return super()._select_prompt_uids(partition_id, ordered, batch_size)

    def _sync_metadata_from_transfer_queue(self) -> None:
        super()._sync_metadata_from_transfer_queue()
        self.few: set[str] = set()
        for partition, finished in self.finished_keys.items():
            episodes = Counter(map(group_of, {session_of(key) for key in self.partitions[partition]}))
            few = {group for group in finished if episodes[group] < (1 if partition == "val" else 2)}
            self.failure_keys[partition] |= few
            finished -= few
            self.few |= few

    def _terminal_eviction_reasons(
        self, global_steps: int, partition_id: str
    ) -> tuple[set[str], set[str], set[str], Counter[float]]:
        stale, filtered, failed, counts = super()._terminal_eviction_reasons(global_steps, partition_id)
        if self.sync_refill_failed_groups and partition_id != "val":
            failed = failed | (self.few & self.failure_keys[partition_id])  # verl keeps those that have a row
        return stale, filtered, failed, counts


class SpreadManager(AgentLoopManagerTQ):
    """This mix-in goes before verl's agent loop manager: workers get groups in turn.

    verl cuts every batch of prompts into one piece per worker and begins with the first worker. Replacements come by
    ones and twos; without this, all of them would wait for boxes of the first workers while the others have free ones.
    """

    def __init__(self, config: DictConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.agent_loop_workers_class: Any = worker_class(config) or self.agent_loop_workers_class
        if resource := config.cluster.episode_resource:
            self.agent_loop_workers_class = _NodeActors(self.agent_loop_workers_class, resource)

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Give the groups to the workers, one each, and begin with the worker after the last one that got one."""
        # In each round a worker gets one group. Prompts that a resumed run plays again have jagged columns, which
        # chunk() can take apart and split() cannot.
        rounds: Any = prompts.chunk(math.ceil(len(prompts) / len(self.agent_loop_workers)))
        for piece in rounds:
            super().generate_sequences(piece)
            self.agent_loop_workers = self.agent_loop_workers[len(piece) :] + self.agent_loop_workers[: len(piece)]


class _NodeActors:
    """This class starts Ray actors in turn on the nodes that have a resource, and ignores where their creator wants
    them."""

    def __init__(self, actors: Any, resource: str) -> None:
        self._actors, self._places = actors, itertools.cycle(places(resource))

    def options(self, name: str, **_: Any) -> Any:
        """Return the actor class with options that place it on the next node."""
        return self._actors.options(name=name, **next(self._places))


def manager_class() -> type[AgentLoopManagerTQ]:
    """Return verl's agent loop manager with ``SpreadManager``."""
    from verl.trainer.ppo.v1 import AgentLoopManagerTQ as Base

    return type("SpreadAgentLoopManager", (SpreadManager, Base), {})
