"""One episode, from sandbox boot to verdict. ``run_episode`` is the whole of it, on one screen.

An episode ends in one of two ways (invariant 3): with a verdict the policy is responsible for, or as an
infrastructure failure, which is never a reward. The table is in docs/failures.md.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rewards.grade import grade
from rewards.task import Task
from rewards.verdict import Verdict
from rollout.agent.claude_code import AgentConfig, AgentRun, run_agent
from rollout.proxy.server import ProxyServer
from rollout.proxy.session import Policy, Session
from rollout.proxy.tree import TrainingSequence
from rollout.sandbox import PatchTooLarge, Sandbox, SandboxError

log = logging.getLogger(__name__)

# boot(task, socket_dir): a fresh box with the task's work tree; socket_dir is visible in it under the same path.
Boot = Callable[[Task, Path | None], Awaitable[Sandbox]]


@dataclass(frozen=True)
class Setup:
    """What all episodes of a process share."""

    policy: Policy
    proxy: ProxyServer
    boot: Boot
    agent: AgentConfig
    prompt: str = "{problem_statement}"
    grade_timeout_s: float = 60.0
    infra_retries: int = 1


@dataclass
class Episode:
    """What is left of one attempt. ``session`` holds every token; ``rows`` are the training sequences, empty
    when the infrastructure failed. ``timing``: seconds by phase (boot, agent, diff, grade, total)."""

    id: str
    task: Task
    attempt: int
    started: float
    verdict: Verdict
    session: Session | None = None
    agent: AgentRun | None = None
    patch: bytes = b""
    rows: Sequence[TrainingSequence] = ()
    timing: dict[str, float] = field(default_factory=dict)


async def run_episode(setup: Setup, task: Task, episode_id: str, attempt: int = 0) -> Episode:
    """Play ``task`` once. Never raises for what an episode can run into; cancellation cleans up and passes on."""
    episode = Episode(episode_id, task, attempt, time.time(), Verdict.infra("not_started"))
    watch = _Watch(episode.timing)
    home = Path(tempfile.mkdtemp(prefix="cc-"))  # holds the session's socket; short, for sun_path's 108 bytes
    try:
        with watch("total"):
            with watch("boot"):
                box = await setup.boot(task, home)
            try:
                episode.session = session = await setup.proxy.open_session(episode_id, setup.policy, home / "s")
                try:
                    with watch("agent"):
                        prompt = setup.prompt.format(problem_statement=task.problem_statement)
                        episode.agent = await run_agent(
                            box, setup.agent, prompt, session.secret, socket=home / "s", base_url=None
                        )
                finally:
                    await setup.proxy.close_session(session)
                with watch("diff"):
                    episode.patch = await box.diff()
            finally:
                await box.close()
            with watch("grade"):
                episode.verdict = infra_failure(episode.agent, session) or await grade(
                    task, episode.patch, lambda: setup.boot(task, None), timeout_s=setup.grade_timeout_s
                )
        if not episode.verdict.is_infra:
            episode.rows = session.tree.sequences()
    except PatchTooLarge as error:
        episode.verdict = Verdict.unresolved("patch_too_large", str(error))
        episode.rows = session.tree.sequences()
    except SandboxError as error:
        log.warning("episode %s: %s", episode_id, error)
        episode.verdict = Verdict.infra(error.cause, str(error))
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return episode


async def play(setup: Setup, task: Task, episode_id: str, keep: Callable[[Episode], None]) -> Episode:
    """run_episode, again after an infrastructure failure. ``keep`` sees every attempt, also the failed ones."""
    for attempt in range(setup.infra_retries + 1):
        episode = await run_episode(setup, task, episode_id if not attempt else f"{episode_id}.{attempt}", attempt)
        keep(episode)
        if not episode.verdict.is_infra:
            break
        await asyncio.sleep(0.2 * 2**attempt)
    return episode


def infra_failure(run: AgentRun, session: Session) -> Verdict | None:
    """The verdict of a run that says nothing about the policy: the agent could not start, or the engine failed
    it. Everything else the policy did itself (no patch, out of turns or time, context full) and is graded."""
    if run.status == "crashed" and not session.counters.calls:
        return Verdict.infra("agent_crashed", run.detail)
    if run.status != "finished" and session.counters.engine_errors:
        return Verdict.infra("engine_failed", f"{session.counters.engine_errors} calls failed; {run.detail}")
    return None


class _Watch:
    """Adds the wall time of a ``with`` block to ``timing``, also when the block fails."""

    def __init__(self, timing: dict[str, float]) -> None:
        self.timing = timing

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.timing[phase] = time.perf_counter() - began
