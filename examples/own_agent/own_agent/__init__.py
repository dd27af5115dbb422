"""An agent of a package of its own: how it is started in a box, and how its result is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout import POLICY_MODEL
from rollout.agent import AgentRun, Status
from rollout.sandbox import ExecResult

LOOP = Path(__file__).with_name("loop.py")


@dataclass(frozen=True)
class ShellAgent:
    """This agent is loop.py, which is run by the Python of the box. See rollout.agent.Agent for what each member is."""

    max_turns: int
    timeout_s: float
    max_tokens: int
    programs: tuple[Path, ...] = (LOOP,)
    leaves: tuple[str, ...] = ()
    covers: Mapping[Path, str] = field(default_factory=dict)

    @classmethod
    def of(cls, *, max_context: int, **settings: Any) -> ShellAgent:
        """Make the agent from its config file's values and what every agent is told of the policy."""
        return cls(**settings)

    def argv(self, home: str) -> list[str]:
        return ["python3", str(LOOP)]

    def stdin(self, prompt: str) -> bytes:
        return prompt.encode()

    def environment(self, secret: str, *, socket: Path | None = None, base_url: str = "") -> dict[str, str]:
        told = {"MODEL": POLICY_MODEL, "MAX_TOKENS": str(self.max_tokens), "MAX_TURNS": str(self.max_turns)}
        return told | {"PROXY_SECRET": secret, "PROXY_SOCKET": str(socket)}

    def files(self) -> Mapping[str, bytes]:
        return {}

    def result(self, done: ExecResult, turns: int) -> AgentRun:
        """Read the last line that was printed. A command of the policy's may have printed it: anything may be there."""
        if done.timed_out:
            return AgentRun(Status.TIMEOUT, turns, "", [])
        try:
            said = json.loads(done.stdout.splitlines()[-1])
            return AgentRun(Status(said["status"]), turns, str(said["detail"])[:1000], [])
        except (IndexError, KeyError, TypeError, ValueError, RecursionError):
            return AgentRun(Status.CRASHED, turns, done.stderr.decode(errors="replace")[-1000:], [])
