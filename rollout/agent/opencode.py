"""OpenCode as an agent, headless (``opencode run --format json``), as of version 1.18. It speaks chat completions,
streamed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from rollout import POLICY_MODEL, SIDE_MODEL
from rollout.agent.events import read
from rollout.agent.headless import Event, Headless, assistant, at, call, ended, results, summed_up, text
from rollout.agent.programs import MACHINE, Program
from rollout.sandbox import ExecResult

# What it does beside its work (looking for updates, models and plugins), or takes from the work tree and from the
# settings of other agents.
_OFF = (
    "AUTOUPDATE", "MODELS_FETCH", "PROJECT_CONFIG", "DEFAULT_PLUGINS", "CLAUDE_CODE", "EXTERNAL_SKILLS", "LSP_DOWNLOAD",
    "SHARE",
)  # fmt: skip

# What it calls a tool that is not there, or whose input is wrong.
_INVALID = "invalid"


@dataclass(frozen=True, kw_only=True)
class OpenCode(Headless):
    """This agent is OpenCode, with the settings of configs/agent/opencode.yaml."""

    PROGRAM: ClassVar[Program | None] = Program(
        "opencode",
        "1.18.33",
        npm=(f"opencode-linux-{MACHINE}@1.18.33",),
        main=(f"node_modules/opencode-linux-{MACHINE}/bin/opencode",),
    )
    UNREPORTED: ClassVar[tuple[str, ...]] = ("task",)

    def command(self, home: str) -> list[str]:
        """Return its command line; the prompt is read from standard input. A title that is given is not asked for."""
        return [*self.started(), "run", "--format", "json", "--title", "task"]

    def told(self, secret: str, base_url: str) -> dict[str, str]:
        """Return its settings, which are one variable."""
        model = {"tool_call": True, "limit": {"context": self.max_context, "output": self.max_tokens}}
        settings: dict[str, Any] = {
            "model": f"policy/{POLICY_MODEL}",
            "small_model": f"policy/{SIDE_MODEL}",
            "enabled_providers": ["policy"],
            "provider": {
                "policy": {
                    "npm": "@ai-sdk/openai-compatible",
                    "name": "policy",
                    "options": {"baseURL": f"{base_url}/v1", "apiKey": secret},
                    "models": {name: {"name": name, **model} for name in (POLICY_MODEL, SIDE_MODEL)},
                }
            },
            "permission": {"*": "allow", "webfetch": "deny", "websearch": "deny", "question": "deny"},
            "agent": {"build": {"steps": self.max_turns}} if self.max_turns else {},
            "autoupdate": False,
            "share": "disabled",
        }
        # The forwarder's mark has to stay as it is.
        told = json.dumps(settings, ensure_ascii=False).replace("\\u001f", "\x1f")
        return {"OPENCODE_CONFIG_CONTENT": told, **{f"OPENCODE_DISABLE_{name}": "1" for name in _OFF}}

    def events(self, done: ExecResult) -> Iterator[Event]:
        """Yield its replies, each with the results of its calls. A reply without calls is its last, or a summary."""
        said: list[Event] = []
        found: list[tuple[object, object, bool]] = []
        last, failure, alone, overcome = "", None, False, False
        for event in read(done.stdout):
            kind, part = event.get("type"), event.get("part")
            if kind == "text" and not at(part, "synthetic"):  # else it is the order to go on after a summary
                said.append(text(at(part, "text")))
                last = said[-1]["text"]
            elif kind == "tool_use":
                state = at(part, "state")
                said.append(call(at(part, "callID"), at(part, "tool"), at(state, "input")))
                failed = at(state, "status") != "completed"
                found.append((at(part, "callID"), at(state, "error" if failed else "output"), failed))
            elif kind == "error":
                failure = at(event, "error", "data", "message") or at(event, "error", "name")
            if kind == "step_finish":
                if alone and said:
                    yield summed_up()
                yield from _reply(said, found)
                said, found, alone = [], [], bool(said) and not found
                overcome, failure = overcome or failure is not None, None  # such as a context that was full
        yield from _reply(said, found)
        if failure is not None or overcome or done.returncode == 0:  # its status is 1 after any error
            yield ended(last if failure is None else failure, failed=failure is not None)


def _reply(said: list[Event], found: list[tuple[object, object, bool]]) -> Iterator[Event]:
    """Yield a reply and its results. It does not tell what an invalid call was: then none of them is known."""
    if any(one.get("name") == _INVALID for one in said):
        said = [one for one in said if one["type"] == "text"]
    if said:
        yield assistant(said)
    if found:
        yield results(*found)
