"""This module runs Claude Code as an agent, headless. It is written against version 2.1.

The environment is built from nothing and points at the episode's proxy session only; no variable of the trainer's
process reaches the agent.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout import POLICY_MODEL, SIDE_MODEL
from rollout.agent import AgentRun, Status
from rollout.agent.events import message_id, read
from rollout.sandbox import ExecResult

# Claude Code compacts when the conversation exceeds its window less the longest reply less 13,000 tokens. A window that
# leaves next to nothing after that would make it compact all the time; without being told it runs into the proxy's
# "prompt is too long" and compacts then.
_LEAST_WINDOW = 45_000


@dataclass(frozen=True)
class ClaudeCode:
    """This agent is Claude Code, with the settings of configs/agent/claude_code.yaml.

    ``bare`` asks for the small prompt (no CLAUDE.md, hooks, reminders); ``system_prompt`` replaces its own; ``tools``
    restricts the built-in tools (None: all). ``timeout_s``: wall time of a whole run. ``max_tokens``: of one reply.
    ``max_context``: the policy's context length in tokens, so that Claude Code compacts in time.
    """

    binary: Path
    max_turns: int
    timeout_s: float
    max_tokens: int
    system_prompt: str | None = None
    tools: tuple[str, ...] | None = None
    bare: bool = False
    max_context: int = 0
    extra_args: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, *, binary: str | None, tools: Sequence[str] | None, extra_args: Sequence[str], **settings: Any
    ) -> ClaudeCode:
        """Return the agent of a config's plain values. Raises FileNotFoundError when there is no Claude Code binary."""
        tools = None if tools is None else tuple(tools)
        return cls(binary=find_binary(binary), tools=tools, extra_args=tuple(extra_args), **settings)

    def argv(self) -> list[str]:
        """Return the command line of a run."""
        # Without the last option the replies of sub-agents are not all in the events.
        argv = [str(self.binary), "-p", "--output-format", "stream-json", "--verbose", "--forward-subagent-text"]
        argv += ["--max-turns", str(self.max_turns), "--dangerously-skip-permissions"]
        if self.bare:
            argv.append("--bare")
        if self.system_prompt is not None:
            argv += ["--system-prompt", self.system_prompt]
        if self.tools is not None:
            argv += ["--tools", ",".join(self.tools)]
        return argv + list(self.extra_args)

    def stdin(self, prompt: str) -> bytes:
        """Return ``prompt``, after a line break if it begins with a slash and would be taken for a command."""
        return f"\n{prompt}".encode() if prompt.startswith("/") else prompt.encode()

    def environment(self, secret: str, *, socket: Path | None = None, base_url: str = "") -> dict[str, str]:
        """Return the agent's variables. With ``socket`` no TCP is used; else the session is at ``base_url``."""
        env = {
            "ANTHROPIC_AUTH_TOKEN": secret,
            "ANTHROPIC_BASE_URL": base_url or "http://proxy.invalid",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(self.max_tokens),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            # A billing line in the system prompt, different in every call, would break every prefix.
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_ERROR_REPORTING": "1",
            "IS_SANDBOX": "1",  # as root, Claude Code skips permissions only when it is told that it is sandboxed
            "PYTHONDONTWRITEBYTECODE": "1",
            "CLAUDE_CODE_SUBAGENT_MODEL": POLICY_MODEL,
        }
        if self.max_context >= _LEAST_WINDOW:
            env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(self.max_context)
        for slot in ("", "_DEFAULT_OPUS", "_DEFAULT_SONNET"):
            env[f"ANTHROPIC{slot}_MODEL"] = POLICY_MODEL
        for slot in ("_SMALL_FAST", "_DEFAULT_HAIKU"):
            env[f"ANTHROPIC{slot}_MODEL"] = SIDE_MODEL
        if socket is not None:
            env["ANTHROPIC_UNIX_SOCKET"] = str(socket)
        return env

    def files(self) -> Mapping[str, bytes]:
        """Return no files: the command line and the environment say everything."""
        return {}

    def result(self, done: ExecResult, turns: int) -> AgentRun:
        """Return how the run ended: what the stream-json output says, where it agrees with what the proxy saw."""
        events = read(done.stdout)
        last = next((event for event in reversed(events) if event.get("type") == "result"), None)
        replies = frozenset(message_id(event) for event in events if event.get("type") == "assistant")
        if done.timed_out:
            return AgentRun(Status.TIMEOUT, turns, f"stopped after {self.timeout_s:g} s", events, replies)
        if last is None:
            tail = done.stderr[-2000:].decode("utf-8", "replace").strip()
            return AgentRun(Status.CRASHED, turns, f"exit status {done.returncode}: {tail}", events, replies)
        # An episode that a limit ended may be left out of training, so a line alone must not say so.
        if last.get("subtype") == "error_max_turns" and turns >= self.max_turns:
            return AgentRun(Status.MAX_TURNS, turns, "", events, replies)
        status = Status.ERROR if last.get("is_error") else Status.FINISHED
        return AgentRun(status, turns, str(last.get("result", "")), events, replies)


def find_binary(path: str | None) -> Path:
    """Return the Claude Code binary: ``path``, else the one in the claude-agent-sdk wheel, else ``claude`` on PATH.

    Raises FileNotFoundError with a line that says what to do.
    """
    if path:
        binary = Path(path).expanduser()
        if not binary.is_file() or not os.access(binary, os.X_OK):
            raise FileNotFoundError(f"agent.binary: {binary} is not an executable file; give the path of `claude`")
        return binary.resolve()
    spec = importlib.util.find_spec("claude_agent_sdk")
    for root in (spec.submodule_search_locations or []) if spec else []:
        bundled = Path(root) / "_bundled" / "claude"
        if os.access(bundled, os.X_OK):
            return bundled.resolve()
    on_path = shutil.which("claude")
    if on_path:
        return Path(on_path).resolve()
    raise FileNotFoundError(
        "no Claude Code binary: install the claude-agent-sdk wheel (it carries one) or set agent.binary=/path/to/claude"
    )
