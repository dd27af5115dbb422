"""One episode, from sandbox boot to verdict. ``run_episode`` is the whole of it, on one screen.

An episode ends in one of two ways (invariant 3): with a verdict the policy is responsible for, or as an
infrastructure failure, which is never a reward. The table is in docs/failures.md.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rewards.grade import grade
from rewards.rules import Rules
from rewards.shape import Effort, Shape
from rewards.task import Task, TaskError
from rewards.verdict import Reason, Verdict
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
    rules: Rules = field(default_factory=Rules)
    shape: Shape | None = None  # None: the reward is 1 if resolved, else 0
    infra_retries: int = 1
    # Where sockets are made: a short path (sun_path has 108 bytes) that goes with the run. None: the system's.
    scratch: Path | None = None


@dataclass
class Episode:
    """What is left of one attempt. ``session`` holds every token; ``rows`` are the training sequences, empty
    when the infrastructure failed. ``timing``: seconds by phase (boot, agent, diff, grade, total)."""

    id: str
    task: Task
    attempt: int
    started: float
    verdict: Verdict
    session: Session | None
    agent: AgentRun | None
    patch: bytes
    rows: Sequence[TrainingSequence]
    timing: dict[str, float]

    @property
    def overlong(self) -> bool:
        """A limit ended the agent's work: out of turns, of time, of context, or of tokens for one reply."""
        if self.agent is None or self.session is None:
            return False
        counters = self.session.counters
        out_of_tokens = self.agent.status == "error" and bool(counters.context_full or counters.cut_replies)
        return self.agent.status in ("max_turns", "timeout") or out_of_tokens


async def run_episode(setup: Setup, task: Task, episode_id: str, attempt: int = 0) -> Episode:
    """Play ``task`` once. Never raises for what an episode can run into; cancellation cleans up and passes on."""
    began = time.time()
    watch = _Watch()
    session, run, patch, rows, fresh, home = None, None, b"", [], None, None
    try:
        home = Path(tempfile.mkdtemp(prefix="cc-", dir=setup.scratch))  # holds the session's socket
        with watch("total"):
            with watch("boot"):
                box = await setup.boot(task, home)
            fresh = _Ahead(setup.boot(task, None))  # the grading box, while the agent works
            try:
                session = await setup.proxy.open_session(episode_id, setup.policy, home / "s")
                with watch("agent"):
                    prompt = setup.prompt.format(problem_statement=task.problem_statement)
                    run = await run_agent(box, setup.agent, prompt, session.secret, socket=home / "s")
                verdict = infra_failure(run, session)
                if verdict is None:
                    with watch("diff"):
                        patch = await box.diff()
                        if not patch:  # nothing was changed, or nothing could be
                            await fresh.check()
            finally:
                if session is not None:
                    await setup.proxy.close_session(session)
                await box.close()
            if verdict is None:
                with watch("grade"):
                    verdict = await grade(task, patch, fresh.take, timeout_s=setup.grade_timeout_s, rules=setup.rules)
    except PatchTooLarge as error:
        verdict = Verdict(Reason.PATCH_TOO_LARGE, str(error))
    except SandboxError as error:
        log.warning("episode %s: %s", episode_id, error)
        verdict = Verdict.infra(error.cause, str(error))
    except TaskError as error:
        verdict = Verdict(Reason.TASK_INVALID, str(error))
    except OSError as error:  # no directory or no socket for the session
        log.warning("episode %s: %s", episode_id, error)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        verdict = Verdict(Reason.NO_SPACE if full else Reason.PROXY_FAILED, str(error))
    finally:
        if fresh is not None:
            await fresh.close()
        if home is not None:
            shutil.rmtree(home, ignore_errors=True)
    if setup.shape is not None:
        tokens = session.tree.sampled_tokens() if session else 0
        effort = Effort(run.turns if run else 0, tokens)
        verdict = await asyncio.to_thread(setup.shape, verdict, task, effort)  # may be anybody's function
    if session is not None and not verdict.is_infra:
        rows = session.tree.sequences()
    return Episode(episode_id, task, attempt, began, verdict, session, run, patch, rows, watch.seconds)


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
    """The verdict of a run that says nothing about the policy: the agent could not start, or the engine or the proxy
    failed it. Everything else the policy did itself (no patch, out of turns or time, context full) and is graded."""
    if run.status != "finished" and session.closed:  # not by us, yet
        return Verdict(Reason.PROXY_FAILED, f"the proxy closed the session while the agent worked; {run.detail}")
    if run.status == "crashed" and not session.counters.calls:
        return Verdict(Reason.AGENT_CRASHED, run.detail)
    if run.status != "finished" and session.counters.engine_errors:
        return Verdict(Reason.ENGINE_FAILED, f"{session.counters.engine_errors} calls failed; {run.detail}")
    return None


class _Ahead:
    """A box that boots while something else is done. ``close`` ends one that nobody took."""

    def __init__(self, boot: Awaitable[Sandbox]) -> None:
        self._booting = asyncio.ensure_future(boot)
        self._taken = False

    async def take(self) -> Sandbox:
        box = await asyncio.shield(self._booting)  # whoever is cancelled here leaves it to `close`
        self._taken = True
        return box

    async def check(self) -> None:
        """Raises SandboxError if a box can not be booted or written to now: the disk of the machine may be full."""
        box = await asyncio.shield(self._booting)
        await box.put(f"{box.tmpdir}/space", bytes(1 << 16))

    async def close(self) -> None:
        if self._taken:
            return
        self._booting.cancel()  # a boot that is cancelled cleans up after itself
        await asyncio.wait([self._booting])
        if not self._booting.cancelled() and self._booting.exception() is None:
            await self._booting.result().close()


class _Watch:
    """Wall time of ``with`` blocks in ``seconds``, also of those that fail."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Generator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = time.perf_counter() - began
