"""Google's Gemini CLI as an agent, headless, as of version 0.61. It speaks Gemini's streamGenerateContent."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rollout import POLICY_MODEL
from rollout.agent.events import read
from rollout.agent.headless import Event, Headless, assistant, at, call, ended, results, text
from rollout.agent.programs import NODE, NODE_PROGRAM, Program
from rollout.sandbox import ExecResult

# At its end it drops what a pipe has not taken of its output yet: the end of a long result, and all events after it.
_TURNED = 53  # its status if it had as many turns as it may
_WHOLE = '"$@" >"$HOME/.output"; status=$?; cat "$HOME/.output"; exit $status'


@dataclass(frozen=True, kw_only=True)
class GeminiCli(Headless):
    """This agent is Gemini CLI, with the settings of configs/agent/gemini_cli.yaml."""

    PROGRAM: ClassVar[Program | None] = Program(
        "gemini_cli",
        "0.61.0",
        npm=("@google/gemini-cli@0.61.0", NODE),
        main=(NODE_PROGRAM, "node_modules/@google/gemini-cli/bundle/gemini.js"),
    )
    UNREPORTED: ClassVar[tuple[str, ...]] = ("invoke_agent",)

    def command(self, home: str) -> list[str]:
        """Return its command line; the prompt is read from standard input."""
        options = ["--output-format", "stream-json", "--yolo", "--skip-trust", "--model", POLICY_MODEL]
        return ["sh", "-c", _WHOLE, "sh", *self.started(), *options]

    def told(self, secret: str, base_url: str) -> dict[str, str]:
        """Return where the session is."""
        return {"GEMINI_API_KEY": secret, "GOOGLE_GEMINI_BASE_URL": base_url, "GEMINI_CLI_NO_RELAUNCH": "true"}

    def files(self) -> Mapping[str, bytes]:
        """Return its settings."""
        settings: dict[str, Any] = {
            "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "model": {"maxSessionTurns": self.max_turns or -1, "skipNextSpeakerCheck": True},
            "tools": {"exclude": ["google_web_search", "web_fetch"]},  # they call other models of Google's
            "security": {"auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": False}},
        }
        return {".gemini/settings.json": json.dumps(settings).encode()}

    def events(self, done: ExecResult) -> Iterator[Event]:
        """Yield its replies and the results of their calls."""
        said: list[Event] = []
        words = last = ""
        for event in read(done.stdout):
            kind = event.get("type")
            if kind == "message" and event.get("role") == "assistant":
                words += text(event.get("content"))["text"]
                continue
            if words and kind in ("tool_use", "result"):
                said.append(text(words))
                last, words = words, ""
            if kind == "tool_use":
                said.append(call(_id(event), event.get("tool_name"), event.get("parameters")))
            elif said:
                yield assistant(said)
                said = []
            if kind == "tool_result":
                failed = event.get("status") != "success"
                output = at(event, "error", "message") if failed else event.get("output")
                yield results((_id(event), output, failed))
            elif kind == "result":
                failed = event.get("status") != "success"
                words = at(event, "error", "message") if failed else last
                yield ended(words, failed=failed, turned=done.returncode == _TURNED)


def _id(event: Event) -> str:
    """Return a call's own id, before which the program writes the tool's name."""
    return str(event.get("tool_id")).rpartition("__")[2]
