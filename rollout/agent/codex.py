"""OpenAI's Codex as an agent, headless (``codex exec --json``), as of version 0.171. It speaks the Responses API.

Its events do not say which reply a call is in, so it reports no replies.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from rollout import POLICY_MODEL
from rollout.agent.events import read
from rollout.agent.forward import BASE_URL
from rollout.agent.headless import Event, Headless, assistant, at, call, ended, results, text
from rollout.agent.programs import MACHINE, Program
from rollout.sandbox import ExecResult

_TARGET = {"x64": "x86_64-unknown-linux-musl", "arm64": "aarch64-unknown-linux-musl"}.get(MACHINE, "none")


@dataclass(frozen=True, kw_only=True)
class Codex(Headless):
    """This agent is Codex, with the settings of configs/agent/codex.yaml."""

    PROGRAM: ClassVar[Program | None] = Program(
        "codex",
        "0.171.0",
        npm=(f"@openai/codex@0.171.0-linux-{MACHINE}",),
        main=(f"node_modules/@openai/codex/vendor/{_TARGET}/bin/codex",),
    )

    def command(self, home: str) -> list[str]:
        """Return its command line; the prompt is read from standard input."""
        settings: dict[str, Any] = {
            "model": POLICY_MODEL,
            "model_provider": "policy",
            "model_providers.policy.name": "policy",
            "model_providers.policy.base_url": f"{BASE_URL}/v1",
            "model_providers.policy.wire_api": "responses",
            "model_providers.policy.env_key": "POLICY_KEY",
            "model_context_window": self.max_context,
            "analytics.enabled": False,
            "feedback.enabled": False,
            "check_for_update_on_startup": False,
            "web_search": "disabled",
            "history.persistence": "none",
            "project_doc_max_bytes": 0,  # no AGENTS.md of the work tree
            # Its commands do not get the session's secret.
            "shell_environment_policy.exclude": ["POLICY_KEY"],
        }
        argv = [*self.started(), "exec", "--json", "--skip-git-repo-check", "--ephemeral"]
        argv.append("--dangerously-bypass-approvals-and-sandbox")  # it is in a box
        for key, value in settings.items():
            # JSON is TOML here; the forwarder's mark has to stay as it is.
            argv += ["-c", f"{key}={json.dumps(value) if not isinstance(value, str) else f'{chr(34)}{value}{chr(34)}'}"]
        return [*argv, "-"]

    def told(self, secret: str, base_url: str) -> dict[str, str]:
        """Return the secret; the command line says everything else."""
        return {"POLICY_KEY": secret}

    def events(self, done: ExecResult) -> Iterator[Event]:
        """Yield what it says, runs and changes."""
        last = ""
        for event in read(done.stdout):
            kind, item = event.get("type"), event.get("item")
            if kind == "item.completed":
                yield from _item(item)
                if at(item, "type") == "agent_message":
                    last = text(at(item, "text"))["text"]
            elif kind == "turn.completed":
                yield ended(last)
            elif kind == "turn.failed":
                yield ended(at(event, "error", "message"), failed=True)


def _item(item: Any) -> Iterator[Event]:
    kind, name = at(item, "type"), at(item, "id")
    if kind == "agent_message":
        yield assistant([text(at(item, "text"))])
    elif kind == "command_execution":
        yield assistant([call(name, kind, {"command": at(item, "command")})])
        yield results((name, at(item, "aggregated_output"), at(item, "exit_code") != 0))
    elif kind in ("file_change", "mcp_tool_call", "collab_tool_call", "web_search", "todo_list"):
        told = {key: value for key, value in item.items() if key not in ("id", "type")}
        yield assistant([call(name, kind, told)])
