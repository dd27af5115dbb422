"""This module helps tests that run the real programs of agents other than Claude Code: a stage for one of them.

Tests of a program that is not installed are skipped; ``python -m rl.agents install NAME`` installs it.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rewards.task import Task
from rollout.agent.headless import Headless
from rollout.proxy.server import ProxyServer
from rollout.proxy.session import Policy
from rollout.sandbox import Sandbox
from rollout.sandbox.local.box import boot_local
from tests.integration.claude_kit import Listener, Stage
from tests.kit import char_policy
from tests.lacks import LACKS, lacks


def needs(kind: type[Headless]) -> None:
    """Skip the test if the agent's program is not installed."""
    if kind.PROGRAM and not kind.PROGRAM.directory.is_dir():
        try:
            kind.PROGRAM.python()
        except FileNotFoundError as error:
            pytest.skip(f"{LACKS}{kind.PROGRAM.name}: {error}")  # in continuous integration, too
        lacks(f"{kind.PROGRAM.name} {kind.PROGRAM.version}: python -m rl.agents install {kind.PROGRAM.name}")


@contextlib.asynccontextmanager
async def agent_stage(
    kind: type[Headless],
    engine: Any,
    task: Task,
    *,
    max_context: int = 10**7,
    policy: Policy | None = None,
    boot: Callable[..., Awaitable[Sandbox]] = boot_local,
    **settings: Any,
) -> AsyncIterator[Stage]:
    """Make a proxy, a session and a box with the work tree of ``task``; all are closed at the end.

    ``settings``: the agent's. ``boot``: another kind's.
    """
    needs(kind)
    agent = kind.of(**{"timeout_s": 600.0, "max_tokens": 2000, "max_context": min(max_context, 10**6), **settings})
    listener = Listener()
    server = ProxyServer(ping_s=0.3)
    server._runner.app.middlewares.append(listener.hear)
    await server.start()
    with tempfile.TemporaryDirectory(prefix="cc-") as home:
        shown = {path: str(path) for path in agent.programs} | (dict(agent.covers) if boot is not boot_local else {})
        box = await boot(task.snapshot, binds=shown, socket_dir=Path(home))
        try:
            policy = policy or char_policy(engine, max_context=max_context)
            session = await server.open_session("stage", policy, Path(home, "s"))
            made: Any = agent
            yield Stage(task, box, session, made, Path(home, "s"), listener.requests)
        finally:
            await box.close()
            await server.stop()
