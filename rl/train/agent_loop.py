"""The agent loop, where verl meets the episodes: a row of a batch comes in, training sequences go out.

verl makes one ``ClaudeCodeAgentLoop`` per episode inside its AgentLoopWorker actors. What the episodes of a worker
share (proxy, parser, record file, task files) lives in one ``Worker`` per process.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig
from verl.experimental.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics

from rewards.swebench import warm_up
from rewards.task import Task, load_tasks
from rewards.verdict import Outcome
from rl.episodes.remote_boxes import far_boots
from rl.episodes.setup import load_policy, make_setup, training_settings
from rl.metrics import own
from rl.metrics.episodes import EpisodeLog
from rl.metrics.samples import SampleLog
from rl.run import errors
from rl.run.pacing import Deadline
from rl.train.engine import VerlEngine
from rollout.episode import Episode, Setup, play
from rollout.figures import line
from rollout.proxy.garbage import keep_imports
from rollout.proxy.server import ProxyServer
from rollout.records import RecordWriter, record_of
from rollout.sandbox.docker.warm import told


class Worker:
    """A worker is what the episodes of one process share. It is made with the first episode."""

    def __init__(self, config: DictConfig, tokenizer: Any, model_type: str, engine: VerlEngine) -> None:
        self.config, self.engine = config, engine
        self.proxy = ProxyServer()
        settings = training_settings(config)
        if config.cluster.grading_resource:
            boots = far_boots({name: boot for name, (_, boot) in settings.agents.items()}, config)
            agents = {name: (agent, boots[name]) for name, (agent, _) in settings.agents.items()}
            settings = replace(settings, agents=agents)
        policy = load_policy(settings, config.actor_rollout_ref.model.path, tokenizer, model_type, engine)
        self.setup = make_setup(settings, policy, self.proxy)
        run_dir = Path(config.run.dir)
        self.records = RecordWriter(run_dir / "episodes", f"{time.time_ns()}-{os.getpid()}")
        self.log = EpisodeLog(run_dir)
        self.own = own.load(config.episode.figures)
        self.samples = SampleLog(run_dir)
        times = config.episode.deadline
        self.deadlines = {name: Deadline(times, agent.timeout_s) for name, (agent, _) in settings.agents.items()}
        self.slots = asyncio.Semaphore(config.sandbox.concurrency)
        self.tasks = functools.cache(lambda file: {task.instance_id: task for task in load_tasks(file)})

    async def start(self) -> None:
        """Start the proxy, and begin to load what grading needs while the first episodes run."""
        # Imported modules stay for good; a garbage collection that walked them would stop all episodes for 0.4 s.
        keep_imports()
        self.warming = asyncio.create_task(asyncio.to_thread(warm_up))  # the reference keeps the task alive
        await self.proxy.start()

    def setting(self, parameters: dict[str, Any], split: str, task: Task, step: int) -> Setup:
        """Return the set-up of an episode that samples with the trainer's ``parameters``. The results of held-out ones
        are compared: they have no deadline, no rows that need rewards, and of a mix the same agent in each step."""
        setup = self.setup.of(task, step if split == "train" else 0)
        setup = replace(setup, policy=replace(setup.policy, sampling=parameters))
        agent: Any = setup.agent  # a frozen dataclass, as all agents are
        if split == "train":
            return replace(setup, agent=replace(agent, timeout_s=self.deadlines[setup.name].seconds))
        return replace(setup, credit=None)

    def keep(self, episode: Episode, split: str, step: int, session: str) -> None:
        """Write the record of an attempt, and from it the line for its step's metrics and perhaps a sample.

        ``session``: the key of the episode in TransferQueue, by which a resumed run finds the lines of episodes that it
        does not play again.
        """
        model = self.config.cluster.staged_from or self.config.actor_rollout_ref.model.path
        record = record_of(episode, split, step, model, self.setup.policy.parser.spec)
        record.trainer = {"session": session, "engine": self.engine.servers.pop(episode.id, None), **told()}
        if self.own:
            record.trainer["own"] = own.figures(self.own, record)
        if split == "train" and "agent" in episode.timing and not episode.verdict.is_infra:
            self.deadlines[episode.played_by].note(episode.timing["agent"])
        self.records.append(record)
        self.log.append(line(record))
        self.samples.offer(record)


_worker: Worker | None = None
_starting = asyncio.Lock()


class ClaudeCodeAgentLoop(AgentLoopBase):
    """An agent loop plays one episode. configs/agent_loops.yaml registers it as ``claude_code``."""

    def __init__(self, *args: Any, hf_model_type: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, hf_model_type=hf_model_type, **kwargs)
        self.model_type = hf_model_type or ""

    # verl annotates one output; its workers take a list of them as well.
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[AgentLoopOutput]:  # ty: ignore
        """Return the episode's training rows, the main thread's last.

        The list is empty if the infrastructure failed for good, or if a limit ended the episode and such episodes are
        not trained on: its group then goes on without it. It is also empty if the episode was played before the run was
        interrupted and its rows are in TransferQueue already (``rl.train.unfinished``).
        """
        if str(row["session_id"]) in row.get("kept", "").split():
            return []
        try:
            return await self._rows(sampling_params, row)
        except Exception as error:  # an episode that fails raises nothing: its failure is a verdict
            errors.note(Path(self.config.run.dir), error)
            raise

    async def _rows(self, sampling_params: dict[str, Any], row: dict[str, Any]) -> list[AgentLoopOutput]:
        worker = await self._worker()
        task = worker.tasks(row["task_file"])[row["task"]]
        split, step = row["split"], int(row["global_steps"])
        # A validation at step k and a resumed run play tasks again: the id has to tell these episodes apart.
        name = f"{split}-{step}-{task.instance_id}-{row['session_id']}-{uuid.uuid4().hex[:8]}"
        if self.config.actor_rollout_ref.rollout.full_determinism:
            place = (split, step, task.instance_id, row["session_id"])
            sampling_params = {**sampling_params, "seed": episode_seed(self.config.seed, *place)}
        async with worker.slots:
            setup = worker.setting(sampling_params, split, task, step)
            session = f"{row['uid']}_{row['session_id']}"
            episode = await play(setup, task, name, lambda attempt: worker.keep(attempt, split, step, session))
        return outputs(episode, split == "train" and self.config.episode.mask_overlong)  # all held-out episodes count

    async def _worker(self) -> Worker:
        global _worker
        async with _starting:
            if _worker is None:
                made = Worker(self.config, self.tokenizer, self.model_type, VerlEngine(self.server_manager))
                await made.start()
                _worker = made
        return _worker


def episode_seed(run_seed: int, split: str, step: int, task: str, session: int) -> int:
    """Return the seed of an episode, made from its place in the run.

    So a resumed run samples what an unbroken one does. A retry after an infrastructure failure has the same seed.
    """
    place = repr((run_seed, split, step, task, session)).encode()
    return int.from_bytes(hashlib.blake2b(place, digest_size=8).digest(), "little") >> 1


def outputs(episode: Episode, mask_overlong: bool = False) -> list[AgentLoopOutput]:
    """Return an episode's rows in verl's form. All of them carry the episode's reward; verl reads the last one's. What
    a row's own reward has more than that is its ``credit``, which ``rl.train.trainer`` adds to its advantage."""
    if episode.verdict.is_infra or (mask_overlong and episode.overlong):
        return []
    played, graded = (episode.timing.get(phase, 0.0) for phase in ("agent", "grade"))
    metrics = AgentLoopMetrics(generate_sequences=played, compute_score=graded, num_preempted=-1)
    return [
        AgentLoopOutput(
            prompt_ids=row.prompt_ids,
            response_ids=row.response_ids,
            response_mask=row.mask,
            response_logprobs=row.logprobs,
            reward_score=episode.verdict.reward,
            num_turns=episode.agent.turns if episode.agent else 0,
            metrics=metrics,
            # One entry per token except the last, whose routing nobody needs; verl pads the array.
            routed_experts=np.concatenate(row.experts) if row.experts else None,
            extra_fields={
                "min_global_steps": row.versions[0],
                "max_global_steps": row.versions[1],
                "reward_extra_info": {"resolved": float(episode.verdict.outcome is Outcome.RESOLVED)},
                **({"credit": episode.credit[number] - (episode.verdict.reward or 0.0)} if episode.credit else {}),
            },
        )
        for number, row in enumerate(episode.rows)
    ]
