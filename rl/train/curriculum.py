"""The curriculum: training tasks scheduled by their measured resolve rates (``curriculum`` in the config).

A task that the policy always or never resolves teaches nothing. With ``curriculum.by_rate`` tasks of a middling rate
are drawn more often than others, and solved ones are left out for some steps. Rates begin with those in the task file
(``rl.data.probe``) and go on with the run's own episodes.

There is no random generator: a task's turn comes from a hash of the seed, its name and how often it was drawn. What
decides a draw is in the checkpoint of the data loader (turns) and in the run's log of episodes (rates), so a resumed
run draws what an unbroken one would have.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl.metrics.episodes import EpisodeReader, Line

if TYPE_CHECKING:
    from transfer_queue import KVBatchMeta
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer
else:
    PPOTrainer = object  # the real base depends on the mode


@dataclass(frozen=True)
class Rule:
    """A rule says which tasks are drawn how often; ``curriculum`` in configs/train.yaml explains its fields."""

    prefer: tuple[float, float]
    other: float
    solved: float
    window: int
    readmit_after: int


@dataclass
class _Task:
    """A _Task is what is known of a task. groups: (episodes, resolved), newest last. judged: the newest one's step."""

    turn: float
    groups: deque[tuple[int, int]]
    drawn: int = 0
    judged: int = 0

    @property
    def episodes(self) -> int:
        return sum(count for count, _ in self.groups)

    @property
    def rate(self) -> float | None:
        return sum(resolved for _, resolved in self.groups) / self.episodes if self.groups else None


class Curriculum:
    """A curriculum is an endless iterator of tasks, by their numbers: the sampler of a data loader.

    Turns are those of stride scheduling: the task with the earliest turn is drawn, and its next turn is later by about
    one over its weight. No task is drawn twice in a step, as long as there are others.
    """

    def __init__(self, rates: Mapping[str, tuple[int, int]], rule: Rule, seed: int) -> None:
        """rates: (episodes, resolved) of each task, (0, 0) where nothing was measured; in the order of the data."""
        self.rule, self.seed, self.step = rule, seed, 1
        self._now = 0.0  # the turn that was taken last
        self._names = list(rates)
        self._tasks: dict[str, _Task] = {}
        for name, measured in rates.items():
            task = self._tasks[name] = _Task(0.0, deque([measured] if measured[0] else []))
            task.turn = self._chance(name, task) / 2 / self._weight(task)  # at equal weights: before any second turn
        self._taken: set[str] = set()  # in this step

    def begin(self, step: int) -> None:
        """Begin a step. Solved tasks whose time is over come back."""
        self.step = step
        self._taken.clear()

    def learn(self, lines: Iterable[Line]) -> None:
        """Take in episodes (``rollout.figures.line``) of steps that are over."""
        counts: dict[tuple[int, str], list[int]] = {}
        for one in lines:
            if not one["infra"] and one["task"] in self._tasks:
                count = counts.setdefault((one["step"], one["task"]), [0, 0])
                count[0] += 1
                count[1] += one["resolved"]
        for (step, name), (episodes, resolved) in sorted(counts.items()):
            task = self._tasks[name]
            task.groups.append((episodes, resolved))
            task.judged = step
            while task.episodes - task.groups[0][0] >= self.rule.window:
                task.groups.popleft()

    def __iter__(self) -> Curriculum:
        return self

    def __len__(self) -> int:
        return len(self._names)

    def __next__(self) -> int:
        # If all others were drawn in this step, a solved task is better than drawing one of them twice.
        fresh = [name for name in self._names if name not in self._taken]
        names = [name for name in fresh if not self._out(self._tasks[name])] or fresh or self._names
        turns = {name: max(self._tasks[name].turn, self._now) for name in names}  # missed turns are not made up for
        name = min(names, key=lambda one: (turns[one], self._chance(one, self._tasks[one]), one))
        task = self._tasks[name]
        self._now = turns[name]
        task.drawn += 1
        task.turn = self._now + (0.5 + self._chance(name, task)) / self._weight(task)
        self._taken.add(name)
        return self._names.index(name)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint has to hold beside the run's log of episodes."""
        return {"now": self._now, "turns": {name: (task.turn, task.drawn) for name, task in self._tasks.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a ``state_dict``. Tasks that it does not name begin as in a new run."""
        self._now = state["now"]
        for name, (turn, drawn) in state["turns"].items():
            if name in self._tasks:
                self._tasks[name].turn, self._tasks[name].drawn = turn, drawn

    def metrics(self) -> dict[str, float]:
        """Return figures of all tasks; docs/metrics.md explains them."""
        tasks = list(self._tasks.values())
        rates = [task.rate for task in tasks if task.rate is not None]
        counts = Counter(solved=0, preferred=0, unmeasured=len(tasks) - len(rates))
        counts.update("solved" for task in tasks if self._out(task))
        counts.update("preferred" for rate in rates if self._prefers(rate))
        found: dict[str, float] = {f"curriculum/{name}": count for name, count in counts.items()}
        return found | ({"curriculum/rate": sum(rates) / len(rates)} if rates else {})

    def _prefers(self, rate: float) -> bool:
        return self.rule.prefer[0] <= rate <= self.rule.prefer[1]

    def _weight(self, task: _Task) -> float:
        """Return how often a task is drawn, relative to one of middling rate. A task without a rate counts as one."""
        return 1.0 if task.rate is None or self._prefers(task.rate) else self.rule.other

    def _out(self, task: _Task) -> bool:
        """Tell whether a task is solved, and not to be tried again yet."""
        solved = task.rate is not None and task.rate >= self.rule.solved and task.episodes >= self.rule.window
        return solved and self.step <= task.judged + self.rule.readmit_after

    def _chance(self, name: str, task: _Task) -> float:
        digest = hashlib.sha256(f"{self.seed}:{name}:{task.drawn}".encode()).digest()
        return int.from_bytes(digest[:6]) / 2**48


class CurriculumTrainer(PPOTrainer):
    """This mix-in goes before a ``PPOTrainer`` subclass: a ``Curriculum`` draws its training tasks."""

    curriculum: Curriculum | None = None

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        chosen = self.config.curriculum
        if not chosen.by_rate:
            return
        from torchdata.stateful_dataloader import StatefulDataLoader

        low, high = chosen.prefer
        rule = Rule((low, high), chosen.other, chosen.solved, chosen.window, chosen.readmit_after)
        dataset: Any = self.train_dataset
        sampler: Any = Curriculum(dataset.rates, rule, self.config.data.seed)
        loader: Any = self.train_dataloader
        self.curriculum = sampler
        self.lines = EpisodeReader(Path(self.config.run.dir), after=0)
        self.later: list[Line] = []
        self.train_dataloader = StatefulDataLoader(
            dataset,
            batch_size=loader.batch_size,
            sampler=sampler,
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            drop_last=True,
        )

    def on_step_begin(self) -> None:
        """Take in the episodes of the steps before."""
        super().on_step_begin()
        if self.curriculum is not None:
            lines = self.later + self.lines.take("train")
            self.lines.take("val")  # else they are kept until the end
            # The step that begins may have left episodes when it was interrupted: they belong to its own groups.
            self.later = [one for one in lines if one["step"] >= self.global_steps]
            self.curriculum.learn(one for one in lines if one["step"] < self.global_steps)
            self.curriculum.begin(self.global_steps)

    def _compute_metrics(self, batch: KVBatchMeta, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        super()._compute_metrics(batch, metrics, *args, **kwargs)
        if self.curriculum is not None:
            metrics.update(self.curriculum.metrics())
