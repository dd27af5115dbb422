"""An agent is a program that works on a task inside a sandbox and reaches its model through a proxy session.

``Agent`` is all that an episode needs to know of one. ``rollout.agent.claude_code`` is the first; ``headless`` is what
the others have in common (docs/agents.md). examples/own_agent is one in a package of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from rollout.agent.kept import AgentOutput, keep
from rollout.sandbox import ExecResult, Sandbox, SandboxError

_OUTPUT_CAP = 64 << 20  # bytes: an agent's event stream repeats every tool result


class Status(StrEnum):
    """A status says how an agent's run ended. Records hold these values."""

    FINISHED = "finished"
    MAX_TURNS = "max_turns"
    ERROR = "error"  # the agent reports an error; ``AgentRun.detail`` has its words
    TIMEOUT = "timeout"
    CRASHED = "crashed"  # the output holds no result


@dataclass(frozen=True)
class AgentRun:
    """An agent run is how an agent's process ended.

    ``turns``: calls of the main thread that the agent acted on, as the proxy counts them; ``detail``: the last answer,
    or what went wrong; ``events``: the agent's event stream, one dict per line (``rollout.agent.events``); ``replies``:
    the ids of the replies that the agent says it got, None if it does not say. ``detail``, ``events`` and ``replies``
    come from output that the policy's commands can write to. So they are shown to people, and decide only which replies
    are not trained on, and which replies that were sent count as delivered. ``kept``: the raw output and the agent's
    own files, if they were to be kept.
    """

    status: Status
    turns: int
    detail: str
    events: list[dict[str, Any]]
    replies: frozenset[str] | None = None
    kept: AgentOutput | None = None


class Agent(Protocol):
    """An agent is a program with its settings. Implementations are frozen dataclasses."""

    @property
    def programs(self) -> Sequence[Path]:
        """Return the files and directories of this machine that a run needs; boxes show them, read-only, under the same
        paths."""

    @property
    def timeout_s(self) -> float:
        """Return the wall seconds after which a run is ended."""

    @property
    def leaves(self) -> Sequence[str]:
        """Return the files and folders in HOME in which a run leaves its own account of itself."""

    @property
    def covers(self) -> Mapping[Path, str]:
        """Return directories of this machine by the places inside at which boxes made from images show them, read-only,
        in place of what the image has there."""

    def argv(self, home: str) -> list[str]:
        """Return the command line of a run in a box with this HOME."""

    def stdin(self, prompt: str) -> bytes:
        """Return the standard input of a run on ``prompt``. A command line would not take every text."""

    def environment(self, secret: str, *, socket: Path | None = None, base_url: str = "") -> dict[str, str]:
        """Return the agent's environment. ``secret`` opens the proxy session, which is reached at the unix socket
        ``socket`` or at ``base_url``."""

    def files(self) -> Mapping[str, bytes]:
        """Return the files that a run needs in its box, by their paths relative to HOME."""

    def result(self, done: ExecResult, turns: int) -> AgentRun:
        """Return the outcome of a process that has ended. ``turns``: see ``AgentRun``. Raises nothing, whatever the
        output is: the policy's commands can write to it."""


def outcome(
    done: ExecResult,
    turns: int,
    events: list[dict[str, Any]],
    replies: frozenset[str] | None,
    max_turns: int,
    timeout_s: float,
) -> AgentRun:
    """Return how a process ended: what its last event says, where that agrees with what the proxy saw."""
    last = next((event for event in reversed(events) if event.get("type") == "result"), None)
    if done.timed_out:
        return AgentRun(Status.TIMEOUT, turns, f"stopped after {timeout_s:g} s", events, replies)
    if last is None:
        tail = done.stderr[-2000:].decode("utf-8", "replace").strip()
        return AgentRun(Status.CRASHED, turns, f"exit status {done.returncode}: {tail}", events, replies)
    # An episode that a limit ended may be left out of training, so a line of output alone must not say so.
    if last.get("subtype") == "error_max_turns" and 0 < max_turns <= turns:
        return AgentRun(Status.MAX_TURNS, turns, "", events, replies)
    status = Status.ERROR if last.get("is_error") else Status.FINISHED
    return AgentRun(status, turns, str(last.get("result", "")), events, replies)


STEP = "step"
"""The type of the event between the events of two steps, whose ``ended`` is the first one's status."""


def joined(first: AgentRun, then: AgentRun) -> AgentRun:
    """Return the runs of two steps, which followed each other in one box, as one run, which ended as the second did."""
    replies = None if first.replies is None or then.replies is None else first.replies | then.replies
    between = {"type": STEP, "ended": first.status.value}
    kept = then.kept
    if first.kept and kept:
        problems = [*first.kept.problems, *kept.problems]
        out, err = first.kept.stdout + kept.stdout, first.kept.stderr + kept.stderr
        kept = replace(kept, stdout=out, stderr=err, problems=problems)
    events = [*first.events, between, *then.events]
    return replace(then, turns=first.turns + then.turns, events=events, replies=replies, kept=kept)


async def run_agent(
    box: Sandbox,
    agent: Agent,
    prompt: str,
    secret: str,
    socket: Path,
    turns: Callable[[], int],
    keeps: bool = False,
    again: bool = False,
) -> AgentRun:
    """Run ``agent`` on ``prompt`` in ``box`` until it ends or its time is up. Raises SandboxError.

    ``secret`` and ``socket``: the proxy session's; ``turns``: tells how many turns the session has seen; ``keeps``:
    whether to keep the raw output and the agent's own files; ``again``: it has run in this box before. An agent with a
    method ``continued``, which returns a command line like ``argv``, goes on with its conversation; others begin one.
    """
    argv = getattr(agent, "continued", agent.argv) if again else agent.argv
    try:
        for path, content in agent.files().items():
            await box.put(f"{box.home}/{path}", content)
    except SandboxError as error:
        if not again or error.cause not in ("put_failed", "no_space"):
            raise
        # Its commands have put something in the place, or filled the box. If the machine's disk is full, grading fails.
        return AgentRun(Status.CRASHED, turns(), str(error), [])
    done = await box.exec(
        argv(box.home),
        env=agent.environment(secret, socket=socket),
        timeout_s=agent.timeout_s,
        stdin=agent.stdin(prompt),
        output_cap=_OUTPUT_CAP,
    )
    run = await asyncio.to_thread(agent.result, done, turns())  # an output of any kind takes seconds to read
    run = replace(run, events=[event for event in run.events if event.get("type") != STEP])
    return replace(run, kept=await keep(box, done, agent.leaves)) if keeps else run
