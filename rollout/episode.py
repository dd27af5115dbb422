"""Play one episode, from booting the sandbox to the verdict: ``run_episode``, on one screen.

An episode ends in one of two ways (invariant 3): with a verdict on the policy's work, or with an infrastructure
failure, which is never a reward. docs/failures.md lists both.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rewards import graders
from rewards.credit import Credit, CreditRow, divided
from rewards.grade import changes, grade, step_by_step
from rewards.rules import Rules
from rewards.shape import Effort, Shape
from rewards.task import Task, TaskError
from rewards.verdict import Reason, Verdict
from rollout.agent import Agent, AgentRun, Status, joined, run_agent
from rollout.agent.events import blocks, commands
from rollout.agent.mix import Mix
from rollout.proxy.server import ProxyServer
from rollout.proxy.session import Policy, Session
from rollout.proxy.tree import TrainingSequence
from rollout.sandbox import Sandbox, SandboxError

log = logging.getLogger(__name__)

# boot(task, socket_dir) returns a fresh box with the task's work tree. Given a socket_dir, the box is for the agent: it
# shows that directory and the agent's binary under their own paths. Without one it is for grading.
Boot = Callable[[Task, Path | None], Awaitable[Sandbox]]


@dataclass(frozen=True)
class Setup:
    """A set-up is what all episodes of a process share. ``name``: the agent's, in records. ``mix``: of several agents,
    each in ``agents`` with the function that boots its boxes; None: ``agent`` plays all episodes."""

    policy: Policy
    proxy: ProxyServer
    boot: Boot
    agent: Agent
    grade_timeout_s: float = 60.0
    rules: Rules = field(default_factory=Rules)
    second_opinion: bool = False
    shape: Shape | None = None  # None: the reward is 1 if resolved, else 0
    credit: Credit | None = None  # None: all rows have the episode's reward
    infra_retries: int = 1
    keeps: bool = False  # True: keep the agent's raw output and its own files in ``AgentRun.kept``
    grades: bool = True  # False: the verdict is that nothing was graded
    # Directory for the sessions' sockets: a short path (sun_path has 108 bytes) that is removed with the run. None: the
    # system's temporary directory.
    scratch: Path | None = None
    name: str = ""
    mix: Mix | None = None
    agents: Mapping[str, tuple[Agent, Boot]] = field(default_factory=dict)

    def of(self, task: Task, step: int = 0) -> Setup:
        """Return the set-up with the agent that plays ``task`` in ``step``."""
        if self.mix is None:
            return self
        name = self.mix.draw(task.instance_id, step, task.agent)
        agent, boot = self.agents[name]
        return replace(self, name=name, agent=agent, boot=boot, mix=None)


@dataclass
class Episode:
    """An episode is what one attempt on a task left behind. ``session`` holds every token; ``rows`` are the training
    sequences, empty after an infrastructure failure. ``timing``: seconds by phase (boot, agent, diff, grade, total).
    ``credit``: the reward of each row, empty if all have the episode's. ``played_by``: the agent's name."""

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
    credit: Sequence[float] = ()
    played_by: str = ""

    @property
    def overlong(self) -> bool:
        """Tell whether a limit ended the agent's work: turns, time, context, or the tokens of one reply."""
        if self.agent is None or self.session is None:
            return False
        counters = self.session.counters
        out_of_tokens = self.agent.status is Status.ERROR and bool(counters.context_full or counters.cut_replies)
        return self.agent.status in (Status.MAX_TURNS, Status.TIMEOUT) or out_of_tokens


async def run_episode(setup: Setup, task: Task, episode_id: str, attempt: int = 0) -> Episode:
    """Play ``task`` once. No failure of an episode is raised: each is a verdict. A cancellation cleans up first.

    ``episode_id``: names the session and the record; ``attempt``: counts from 0.
    """
    began = time.time()
    watch = _Stopwatch()
    box, session, run, patch, rows, grading, home = None, None, None, b"", [], None, None
    try:
        shares = graders.named(task.grader).shares(task)  # the tests run in the agent's own box
        fresh = functools.partial(setup.boot, task, None)
        home = Path(tempfile.mkdtemp(prefix="cc-", dir=setup.scratch))  # holds the session's socket
        with watch("total"):
            with watch("boot"):
                box = await setup.boot(task, home)
            if setup.grades and not shares:
                grading = _Booting(fresh)  # while the agent works
            session = await setup.proxy.open_session(episode_id, setup.policy, home / "s", box.relays)
            act = functools.partial(_act, setup, box, session, home / "s")

            async def played(step: Task, last: bool) -> Verdict:
                nonlocal run, patch
                try:
                    with watch("agent"):
                        run = await act(step.problem_statement, run)
                    if lost := infra_failure(run, session):
                        return lost
                    with watch("diff"):
                        patch = await changes(box, shares)
                        if not patch and grading:  # the agent changed nothing, or the disk is full and it could not
                            await grading.check()
                finally:
                    if last:
                        await setup.proxy.close_session(session)
                        if not shares:
                            await box.close()
                if not setup.grades:
                    return Verdict(Reason.NOT_GRADED)
                boot, own = grading.take if grading else fresh, box if shares else None
                how: dict[str, Any] = {"timeout_s": setup.grade_timeout_s, "second_opinion": setup.second_opinion}
                with watch("grade"):
                    return await grade(step, patch, boot, own, rules=setup.rules, **how)

            verdict = await step_by_step(task, played)
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
        if session is not None:
            await setup.proxy.close_session(session)
        if grading is not None:
            await grading.close()
        if box is not None:
            await box.close()
        if home is not None:
            shutil.rmtree(home, ignore_errors=True)
    if session is not None and run is not None and run.replies is not None:
        session.disown(run.replies)
    verdict = _flagged(verdict, setup.rules, session, run)
    if setup.shape is not None:
        tokens = session.tree.sampled_tokens() if session else 0
        effort = Effort(run.turns if run else 0, tokens, patch)
        verdict = await asyncio.to_thread(setup.shape, verdict, task, effort)  # may be anybody's function
    credit: Sequence[float] = ()
    if session is not None and not verdict.is_infra:
        rows = session.tree.sequences()
    if setup.credit is not None and session is not None and verdict.reward is not None:
        try:
            told = [_credit_row(session, row) for row in rows]
            credit = await asyncio.to_thread(divided, setup.credit, told, verdict.reward)
        except Exception as error:  # the function is the user's code; the policy is not to blame for its errors
            failed = f"episode.credit: {type(error).__name__}: {error}"
            rows, verdict = [], replace(verdict, reason=Reason.REWARD_FAILED, detail=failed)
    seconds, name = watch.seconds, setup.name
    return Episode(episode_id, task, attempt, began, verdict, session, run, patch, rows, seconds, credit, name)


def _credit_row(session: Session, row: TrainingSequence) -> CreditRow:
    nodes = [session.tree.nodes[index] for index in row.nodes]
    role = nodes[0].asked.role if nodes[0].asked else ""
    return CreditRow(role, [node.reply.blocks for node in nodes if node.reply], sum(row.mask))


async def play(setup: Setup, task: Task, episode_id: str, keep: Callable[[Episode], Awaitable[None] | None]) -> Episode:
    """Run an episode, again after an infrastructure failure (``infra_retries`` times at most); return the last attempt.

    ``keep`` is called with every attempt, and awaited if it is asynchronous.
    """
    setup = setup.of(task)
    for attempt in range(setup.infra_retries + 1):
        episode = await run_episode(setup, task, episode_id if not attempt else f"{episode_id}.{attempt}", attempt)
        if (keeping := keep(episode)) is not None:
            await keeping
        if not episode.verdict.is_infra:
            break
        await asyncio.sleep(0.2 * 2**attempt)
    return episode


async def _act(
    setup: Setup, box: Sandbox, session: Session, socket: Path, prompt: str, before: AgentRun | None
) -> AgentRun:
    """Let the agent act on a prompt, and return its run, with those before; limits are for one step."""
    begun = session.turns() if before else 0

    def turns() -> int:
        return session.turns() - begun

    again = before is not None
    run = await run_agent(box, setup.agent, prompt, session.secret, socket, turns, setup.keeps, again)
    return joined(before, run) if before else run


def infra_failure(run: AgentRun, session: Session) -> Verdict | None:
    """Return the verdict on a run that an infrastructure failure ended: the agent could not start, or the engine, the
    proxy or the endpoint of a role failed. Return None for all other runs, which are graded: an empty patch, a full
    context, and running out of turns, calls or time are the policy's doing."""
    if session.roles is not None and session.roles.failing:  # an agent works on without its sub-agent
        return Verdict(Reason.ENGINE_FAILED, next(iter(session.roles.failing.values())))
    if run.status is Status.FINISHED or session.counters.refused_calls:
        return None
    if session.closed:  # and not by us: we have not closed it yet
        return Verdict(Reason.PROXY_FAILED, f"the proxy closed the session while the agent worked; {run.detail}")
    if run.status is Status.CRASHED and not session.counters.calls:
        return Verdict(Reason.AGENT_CRASHED, run.detail)
    if session.counters.engine_errors:
        return Verdict(Reason.ENGINE_FAILED, f"{session.counters.engine_errors} calls failed; {run.detail}")
    return None


def _flagged(verdict: Verdict, rules: Rules, session: Session | None, run: AgentRun | None) -> Verdict:
    """Return the verdict with the flags of what the agent did besides its patch."""
    verdict = rules.flagged(verdict, _commands(session, run))
    if session is not None and session.counters.foreign_calls:
        return replace(verdict, flags=(*verdict.flags, "foreign_calls"))
    return verdict


def _commands(session: Session | None, run: AgentRun | None) -> Iterator[str]:
    """Yield what the agent ran and read: by the proxy's account, or by its own where the proxy only forwarded calls."""
    nodes = session.tree.nodes if session else []
    for node in nodes:
        yield from commands(node.reply.blocks if node.reply else ())
    for event in run.events if run and not nodes else ():
        yield from commands(blocks(event, "assistant"))


class _Booting:
    """This boots a box while something else is done. ``close`` ends one that nobody took."""

    def __init__(self, boot: Callable[[], Awaitable[Sandbox]]) -> None:
        self._boot = boot
        self._booting = asyncio.ensure_future(boot())
        self._taken = False

    async def take(self) -> Sandbox:
        """Return the box; each further call boots a new one."""
        if self._taken:
            return await self._boot()
        box = await asyncio.shield(self._booting)  # a caller that is cancelled here leaves the box to `close`
        self._taken = True
        return box

    async def check(self) -> None:
        """Raise SandboxError if the box cannot be booted or written to: the machine's disk may be full."""
        if self._taken:  # for an earlier step
            self._booting, self._taken = asyncio.ensure_future(self._boot()), False
        box = await asyncio.shield(self._booting)
        await box.put(f"{box.tmpdir}/space", bytes(1 << 16))

    async def close(self) -> None:
        if self._taken:
            return
        self._booting.cancel()  # a cancelled boot cleans up after itself
        await asyncio.wait([self._booting])
        if not self._booting.cancelled() and self._booting.exception() is None:
            await self._booting.result().close()


class _Stopwatch:
    """A stopwatch keeps the wall time of ``with`` blocks in ``seconds``, also of those that raise."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Generator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - began
