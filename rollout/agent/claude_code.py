"""Claude Code as an agent, headless: its command line, environment, files and result, as of version 2.1.

The environment is built from nothing and points at the episode's proxy session only; no variable of the trainer's
process reaches the agent.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from rollout import POLICY_MODEL, SIDE_MODEL
from rollout.agent import AgentRun, outcome
from rollout.agent.events import message_id, read
from rollout.sandbox import ExecResult

# Claude Code compacts when the conversation exceeds its window minus the longest reply minus 13,000 tokens. If that is
# next to nothing, it would compact all the time. So Claude Code is not told of a window smaller than this; it compacts
# when the proxy answers "prompt is too long".
_LEAST_WINDOW = 45_000
# The longest JSON text on the command line; Linux takes no argument of more than 128 KiB.
_ARGUMENT = 100_000
SUBAGENTS = ("claude", "Explore", "fork", "general-purpose", "Plan", "statusline-setup")
"""The types of sub-agents that Claude Code (2.1.329) has by itself."""
COVERS = {Path(__file__).with_name("managed"): "/etc/claude-code"}
"""What stands in place of an image's settings for all users, above which no option stands."""

# The plugin, a directory of HOME, in which our own skills and styles are. Those of the user are loaded only with the
# user's settings, which the policy can write, too; a plugin that is named on the command line is read once.
_PLUGIN = "own"


@dataclass(frozen=True)
class ClaudeCode:
    """This agent is Claude Code, with the settings of configs/agent/claude_code.yaml.

    ``bare`` asks for the small prompt (no CLAUDE.md, hooks, reminders); ``system_prompt`` replaces its own; ``tools``
    restricts the built-in tools (None: all). ``timeout_s``: wall time of a whole run. ``max_tokens``: of one reply.
    ``max_context``: the policy's context length in tokens, so that Claude Code compacts in time. ``settings`` and
    ``mcp``: JSON texts for --settings and --mcp-config, empty for none. ``brought``: files by their paths in HOME.
    ``project_settings``: load whatever the work tree configures Claude Code with. ``claude_md``: load its CLAUDE.md.
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
    append_system_prompt: str | None = None
    settings: str = ""
    mcp: str = ""
    brought: Mapping[str, bytes] = field(default_factory=dict)
    project_settings: bool = False
    claude_md: bool = False

    # Where Claude Code writes its sessions (sub-agents', too), and where the shipped hooks write events.
    leaves: ClassVar[Sequence[str]] = (".claude/projects", ".claude/hooks.jsonl")
    covers: ClassVar[Mapping[Path, str]] = COVERS

    @classmethod
    def of(
        cls,
        *,
        binary: str | None,
        tools: Sequence[str] | None,
        extra_args: Sequence[str],
        settings: Any = None,
        hooks: Any = None,
        mcp_servers: Any = None,
        skills: Sequence[str] | None = None,
        output_style: str | None = None,
        **more: Any,
    ) -> ClaudeCode:
        """Make the agent from a config's plain values.

        Raises FileNotFoundError if there is no Claude Code binary, ValueError if another file or a value is wrong.
        """
        if more.get("bare") and (hooks or skills or output_style or more.get("claude_md")):
            names = "agent.hooks, agent.skills, agent.output_style and agent.claude_md"
            raise ValueError(f"agent.bare=true runs without {names}")
        brought = {name: data for path in skills or () for name, data in _skill(path).items()}
        told = _json("agent.settings", settings)
        if hooks:
            named = _json("agent.hooks", hooks)
            told["hooks"] = {**told.get("hooks", {}), **named.get("hooks", named)}
        if output_style and output_style.endswith(".md"):
            text, name = _read("agent.output_style", output_style), Path(output_style).stem
            brought[f".{_PLUGIN}/output-styles/{name}.md"] = text
            front = re.match(rb"---\n.*?^name: *(.+?) *$.*?^---$", text, re.DOTALL | re.MULTILINE)
            output_style = f"{_PLUGIN}:{front[1].decode() if front else name}"
        if output_style:
            told["outputStyle"] = output_style
        if brought:
            brought[f".{_PLUGIN}/.claude-plugin/plugin.json"] = json.dumps({"name": _PLUGIN}).encode()
        servers = _json("agent.mcp_servers", mcp_servers)
        return cls(
            binary=find_binary(binary),
            tools=None if tools is None else tuple(tools),
            extra_args=tuple(extra_args),
            settings=json.dumps(told) if told else "",
            mcp=json.dumps({"mcpServers": servers.get("mcpServers", servers)}) if servers else "",
            brought=brought,
            **more,
        )

    @property
    def programs(self) -> Sequence[Path]:
        """Return the binary."""
        return (self.binary,)

    def argv(self, home: str) -> list[str]:
        """Return the command line of a run."""
        # Without the last option the replies of sub-agents are not all in the events.
        argv = [str(self.binary), "-p", "--output-format", "stream-json", "--verbose", "--forward-subagent-text"]
        argv.append("--include-hook-events")  # they tell which input a hook has changed
        argv += ["--max-turns", str(self.max_turns), "--dangerously-skip-permissions"]
        # Without sources, a policy that writes such files while it runs changes nothing either.
        argv.append(f"--setting-sources={'project,local' if self.project_settings else ''}")
        if self.claude_md and not self.project_settings:
            argv += ["--add-dir", "."]
        if self.brought:
            argv += ["--plugin-dir", f"{home}/.{_PLUGIN}"]
        if self.bare:
            argv.append("--bare")
        if self.system_prompt is not None:
            argv += ["--system-prompt", self.system_prompt]
        if self.tools is not None:
            argv += ["--tools", ",".join(self.tools)]
        if self.append_system_prompt is not None:
            argv += ["--append-system-prompt", self.append_system_prompt]
        if self.settings:
            argv += ["--settings", self.settings]
        if self.mcp or not self.project_settings:
            argv.append("--strict-mcp-config")
        if self.mcp:
            argv += ["--mcp-config", self.mcp]
        return argv + list(self.extra_args)

    def continued(self, home: str) -> list[str]:
        """Return the command line of a run that goes on with the conversation of the last one in the box."""
        return [*self.argv(home), "--continue"]

    def stdin(self, prompt: str) -> bytes:
        """Return ``prompt``, after a line break if it begins with a slash and would be taken for a command."""
        return f"\n{prompt}".encode() if prompt.startswith("/") else prompt.encode()

    def environment(self, secret: str, *, socket: Path | None = None, base_url: str = "") -> dict[str, str]:
        """Return the agent's environment. With ``socket`` no TCP is used; else the session is at ``base_url``."""
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
            f"CLAUDE_CODE_{'ADDITIONAL_DIRECTORIES_CLAUDE_MD' if self.claude_md else 'DISABLE_CLAUDE_MDS'}": "1",
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
        """Return skills and an output style; the command line and the environment say everything else."""
        return self.brought

    def result(self, done: ExecResult, turns: int) -> AgentRun:
        """Return how the run ended: what the stream-json output says, where it agrees with what the proxy saw."""
        events = read(done.stdout)
        replies = frozenset(message_id(event) for event in events if event.get("type") == "assistant")
        return outcome(done, turns, events, replies, self.max_turns, self.timeout_s)


def _read(key: str, path: str) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ValueError(f"{key}: {path} cannot be read: {error.strerror}") from error


def _json(key: str, given: Any) -> dict[str, Any]:
    """Return a mapping, given as such or by the path of its JSON file. It becomes one command-line argument."""
    try:
        value = json.loads(_read(key, given)) if isinstance(given, str) else given or {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{key}: {given} is no JSON: {error}" if key not in str(error) else str(error)) from error
    if not isinstance(value, dict):
        raise ValueError(f"{key} must be keys with values, or a JSON file of an object")
    if len(json.dumps(value)) > _ARGUMENT:
        raise ValueError(f"{key} is larger than {_ARGUMENT} bytes")
    return value


def _skill(directory: str) -> dict[str, bytes]:
    """Return the files of a skill's directory by their paths in HOME."""
    place = Path(directory).expanduser().absolute()
    if not (place / "SKILL.md").is_file():
        raise ValueError(f"agent.skills: {place} has no SKILL.md")
    inside = [path for path in sorted(place.rglob("*")) if path.is_file()]
    return {f".{_PLUGIN}/skills/{path.relative_to(place.parent)}": _read("agent.skills", str(path)) for path in inside}


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
