"""Qwen Code as an agent, headless, as of version 0.24. It speaks chat completions, streamed, and reports events in the
form of Claude Code's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rollout import POLICY_MODEL
from rollout.agent.events import blocks, read
from rollout.agent.headless import Event, Headless, assistant, at, ended, summed_up
from rollout.agent.programs import NODE, NODE_PROGRAM, Program
from rollout.sandbox import ExecResult


@dataclass(frozen=True, kw_only=True)
class QwenCode(Headless):
    """This agent is Qwen Code, with the settings of configs/agent/qwen_code.yaml."""

    PROGRAM: ClassVar[Program | None] = Program(
        "qwen_code",
        "0.24.4",
        npm=("@qwen-code/qwen-code@0.24.4", NODE),
        main=(NODE_PROGRAM, "node_modules/@qwen-code/qwen-code/cli.js"),
    )
    UNREPORTED: ClassVar[tuple[str, ...]] = ("agent",)

    def command(self, home: str) -> list[str]:
        """Return its command line; the prompt is read from standard input."""
        argv = [*self.started(), "--output-format", "stream-json", "--approval-mode", "yolo", "--auth-type", "openai"]
        return [*argv, "--model", POLICY_MODEL]

    def told(self, secret: str, base_url: str) -> dict[str, str]:
        """Return where the session is."""
        return {"OPENAI_API_KEY": secret, "OPENAI_BASE_URL": f"{base_url}/v1", "OPENAI_MODEL": POLICY_MODEL}

    def files(self) -> Mapping[str, bytes]:
        """Return its settings."""
        window = {"contextWindowSize": self.max_context} if self.max_context else {}
        settings: dict[str, Any] = {
            "general": {"enableAutoUpdate": False},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False},
            "model": {
                "maxSessionTurns": self.max_turns or -1,
                "skipNextSpeakerCheck": True,
                "generationConfig": {"samplingParams": {"max_tokens": self.max_tokens}, **window},
            },
            "context": {"fileName": "none"},  # no QWEN.md or AGENTS.md of the work tree
            "security": {"auth": {"selectedType": "openai"}, "folderTrust": {"enabled": False}},
        }
        return {".qwen/settings.json": json.dumps(settings).encode()}

    def events(self, done: ExecResult) -> Iterator[Event]:
        """Yield its own events; each reply is known by its calls. After a summary, of which it does not tell, a prompt
        is shorter than the one before.
        """
        read_before = 0
        for event in read(done.stdout):
            kind = event.get("type")
            if kind == "assistant" and (said := blocks(event, "assistant")):
                tokens = at(event, "message", "usage", "input_tokens")
                if isinstance(tokens, int) and tokens and not event.get("parent_tool_use_id"):
                    if tokens < read_before:
                        yield summed_up()
                    read_before = tokens
                told = assistant([one for one in said if one.get("type") in ("text", "tool_use")])
                told["parent_tool_use_id"] = event.get("parent_tool_use_id")
                yield told
            elif kind == "result":
                turned = event.get("subtype") == "error_max_turns" or done.returncode == 53
                words = event.get("result") or event.get("error") or ""
                yield event | ended(words, failed=bool(event.get("is_error")), turned=turned)
            elif kind in ("user", "system"):
                yield event
