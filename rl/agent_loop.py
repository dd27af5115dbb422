"""Where verl meets the episodes: a row of a batch in, training sequences out.

verl makes one ``ClaudeCodeAgentLoop`` per episode inside its AgentLoopWorker actors. What the episodes of a worker
share (proxy, parser, record file, task files) lives in one ``Worker`` per process.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import functools
import gc
import hashlib
import os
import time
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
from omegaconf import DictConfig
from verl.experimental.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from rewards.grade import warm_up
from rewards.task import load_tasks
from rewards.verdict import Outcome
from rl.metrics.episodes import EpisodeLog
from rl.metrics.samples import SampleLog
from rl.run.programs import last_lines
from rl.setup import make_setup
from rollout.episode import Episode, Setup, play
from rollout.proxy.engine import Completion, EngineError
from rollout.proxy.server import ProxyServer
from rollout.proxy.session import Counters
from rollout.records import RecordWriter, record_of


class VerlEngine:
    """verl's LLM client as an engine: token ids in, token ids and logprobs out, sticky by episode.

    *Logprobs* are of the distribution that was sampled from: verl starts vLLM with
    ``logprobs_mode=processed_logprobs``.

    *Weight versions* are the trainer's global step at which the server was when an attempt ended. They are exact per
    token: verl ends every attempt before it loads new weights. The async trainer's client then goes on with the next
    attempt from the tokens it has; here that is one slow reply. A reply that was ended and is not gone on with (the
    sync client's, which no update should meet) is an EngineError: the agent asks again, which is slow too.

    *Cancelling* ends the attempt on the server: the Ray task is cancelled, and vLLM frees its place. verl's own
    ``abort_request`` cannot be used: it wants an id that the client makes for itself, and looks for it among vLLM's
    internal ones, where vLLM since 0.12 does not keep it.
    """

    def __init__(self, client: LLMServerClient) -> None:
        self.client = _watched(client)

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Completion:
        attempts: list[_Attempt] = []
        _attempts.set(attempts)
        try:
            out = await self.client.generate(request_id=request_id, prompt_ids=prompt_ids, sampling_params=sampling)
        except asyncio.CancelledError:
            for attempt in attempts:
                if attempt.out is None:
                    ray.cancel(attempt.ref)
            raise
        except Exception as error:  # Ray and the server raise many kinds; all of them mean: no reply
            # A remote error's text is a whole traceback, whose last line says what it was.
            raise EngineError(f"{type(error).__name__}: {last_lines(str(error))}") from error
        if out.stop_reason in ("aborted", "abort"):
            raise EngineError(f"the server ended the reply after {len(out.token_ids)} tokens")
        if out.log_probs is None or len(out.log_probs) != len(out.token_ids):
            raise EngineError(f"reply of {len(out.token_ids)} tokens without their logprobs ({out.stop_reason})")
        # Of the first attempt: a later one finds what the one before it had computed.
        first = next((attempt.out for attempt in attempts if attempt.out is not None), out)
        cached = first.extra_fields.get("num_cached_tokens")
        logprobs = [float(p) for p in out.log_probs]
        return Completion(list(out.token_ids), logprobs, _versions(attempts), cached, out.routed_experts)


@dataclass
class _Attempt:
    """One generation on a server: the Ray task and, when it is done, its output."""

    ref: ray.ObjectRef
    out: TokenOutput | None = None


# Of the call that this task is making.
_attempts: contextvars.ContextVar[list[_Attempt]] = contextvars.ContextVar("_attempts")


class _WatchedServer:
    """A server's handle, as far as verl's client uses it, that keeps the attempts of a call."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.generate = self  # the client calls server.generate.remote(...)

    async def remote(self, **arguments: Any) -> TokenOutput:
        attempt = _Attempt(self.handle.generate.remote(**arguments))
        _attempts.get().append(attempt)
        attempt.out = await attempt.ref
        return attempt.out


def _watched(client: LLMServerClient) -> LLMServerClient:
    """The same client with watched servers. Where it picks a server is the one place that all of verl's clients share
    and where servers can be seen; what a client returns tells neither the attempts nor how to end them."""
    watched = copy.copy(client)

    async def acquire(request_id: str, **extra: Any) -> tuple[str, Any]:
        server_id, handle = await type(client)._acquire_server(watched, request_id, **extra)
        return server_id, _WatchedServer(handle)

    watched._acquire_server = acquire
    return watched


def _versions(attempts: list[_Attempt]) -> tuple[int, ...]:
    """One weight version per token; none if any attempt does not tell."""
    versions: list[int] = []
    for attempt in attempts:
        if attempt.out is None or not attempt.out.token_ids:
            continue
        step = attempt.out.extra_fields.get("global_steps")
        if step is None:
            return ()
        versions += [step] * len(attempt.out.token_ids)
    return tuple(versions)


class Worker:
    """What the episodes of one process share. Made once, with the first episode."""

    def __init__(self, config: DictConfig, tokenizer: Any, model_type: str, engine: VerlEngine) -> None:
        self.config = config
        self.proxy = ProxyServer()
        self.setup = make_setup(config, tokenizer, model_type, engine, self.proxy)
        run_dir = Path(config.run.dir)
        self.records = RecordWriter(run_dir / "episodes", f"{time.time_ns()}-{os.getpid()}")
        self.log = EpisodeLog(run_dir)
        self.samples = SampleLog(run_dir)
        self.slots = asyncio.Semaphore(config.sandbox.concurrency)
        self.tasks = functools.cache(lambda file: {task.instance_id: task for task in load_tasks(file)})

    async def start(self) -> None:
        # What was imported stays as long as the process; a collection that walks it stops all episodes for 0.4 s.
        gc.collect()
        gc.freeze()
        # Beside the first episodes, not before them; the reference keeps the task alive.
        self.warming = asyncio.create_task(asyncio.to_thread(warm_up))
        await self.proxy.start()

    def sampling(self, parameters: dict[str, Any]) -> Setup:
        """The set-up of an episode that samples with the trainer's ``parameters``."""
        return replace(self.setup, policy=replace(self.setup.policy, sampling=parameters))

    def keep(self, episode: Episode, split: str, step: int) -> None:
        """Put an attempt on record and into the metrics of its step."""
        model = self.config.cluster.staged_from or self.config.actor_rollout_ref.model.path
        self.records.append(record_of(episode, split, step, model, self.setup.policy.parser.spec))
        self.log.append(metrics_line(episode, split, step))
        self.samples.offer(episode, split, step)


_worker: Worker | None = None
_starting = asyncio.Lock()


class ClaudeCodeAgentLoop(AgentLoopBase):
    """One episode. Registered as ``claude_code`` in configs/agent_loops.yaml."""

    def __init__(self, *args: Any, hf_model_type: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, hf_model_type=hf_model_type, **kwargs)
        self.model_type = hf_model_type or ""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[AgentLoopOutput]:
        """The training rows of one episode, the main thread's last; none if the infrastructure failed for good."""
        worker = await self._worker()
        task = worker.tasks(row["task_file"])[row["task"]]
        split, step = row["split"], int(row["global_steps"])
        # A validation at step k and a resumed run play tasks again: the id has to tell them apart.
        name = f"{split}-{step}-{task.instance_id}-{row['session_id']}-{uuid.uuid4().hex[:8]}"
        if self.config.actor_rollout_ref.rollout.full_determinism:
            place = (split, step, task.instance_id, row["session_id"])
            sampling_params = {**sampling_params, "seed": episode_seed(self.config.seed, *place)}
        async with worker.slots:
            setup = worker.sampling(sampling_params)
            episode = await play(setup, task, name, lambda attempt: worker.keep(attempt, split, step))
        return outputs(episode)

    async def _worker(self) -> Worker:
        global _worker
        async with _starting:
            if _worker is None:
                made = Worker(self.config, self.tokenizer, self.model_type, VerlEngine(self.server_manager))
                await made.start()
                _worker = made
        return _worker


def episode_seed(run_seed: int, split: str, step: int, task: str, session: int) -> int:
    """The seed of an episode: of its place in the run, so that a resumed run samples what an unbroken one does. The
    same when it is tried again after an infrastructure failure."""
    place = repr((run_seed, split, step, task, session)).encode()
    return int.from_bytes(hashlib.blake2b(place, digest_size=8).digest(), "little") >> 1


def outputs(episode: Episode) -> list[AgentLoopOutput]:
    """verl's form of an episode's rows. All rows of an episode carry its reward; verl reads the last one's."""
    if episode.verdict.is_infra:
        return []
    seconds = episode.timing
    metrics = AgentLoopMetrics(
        generate_sequences=seconds.get("agent", 0.0), compute_score=seconds.get("grade", 0.0), num_preempted=-1
    )
    return [
        AgentLoopOutput(
            prompt_ids=row.prompt_ids,
            response_ids=row.response_ids,
            response_mask=row.mask,
            response_logprobs=row.logprobs,
            reward_score=episode.verdict.reward,
            num_turns=episode.agent.turns if episode.agent else 0,
            metrics=metrics,
            # Of all tokens but the last, whose routing nobody needs; verl fills it up.
            routed_experts=np.concatenate(row.experts) if row.experts else None,
            extra_fields={
                "min_global_steps": row.versions[0],
                "max_global_steps": row.versions[1],
                "overlong": episode.overlong,
                "reward_extra_info": {"resolved": float(episode.verdict.outcome is Outcome.RESOLVED)},
            },
        )
        for row in episode.rows
    ]


def metrics_line(episode: Episode, split: str, step: int) -> dict[str, Any]:
    """One attempt as rl.metrics.episodes wants it (EPISODE_KEYS there)."""
    verdict, session, seconds = episode.verdict, episode.session, episode.timing
    counters = session.counters if session else Counters()
    return {
        "step": step,
        "split": split,
        "episode": episode.id,
        "task": episode.task.instance_id,
        "repo": episode.task.repo,
        "difficulty": episode.task.difficulty,
        "reward": verdict.reward,
        "resolved": verdict.outcome == "resolved",
        "infra": verdict.is_infra,
        "failure": verdict.reason,
        "dropped": len(verdict.dropped),
        "flags": list(verdict.flags),
        "rows": len(episode.rows),
        "tokens_sampled": session.tree.sampled_tokens() if session else 0,
        "tokens_context": session.tree.encoded_tokens() if session else 0,
        "tokens_trained": sum(sum(row.mask) for row in episode.rows),
        "calls": counters.calls,
        "malformed_calls": counters.malformed_calls,
        "cut_replies": counters.cut_replies,
        "cache_queries": counters.cache_queries,
        "cache_hits": counters.cache_hits,
        "turns": episode.agent.turns if episode.agent else 0,
        "wall_s": seconds.get("total", 0.0),
        "boot_s": seconds.get("boot", 0.0),
        "agent_s": seconds.get("agent", 0.0),
        "grade_s": seconds.get("grade", 0.0),
        "proxy_overhead_ms": session.overhead_ms if session else None,
    }
