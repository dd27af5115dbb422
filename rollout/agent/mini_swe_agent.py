"""mini-swe-agent as an agent, as of version 2.4: its default agent with its own prompts, one tool (bash), and its model
that speaks chat completions without LiteLLM. ``mini_swe_agent_run.py`` starts it in the box and prints its messages.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import msgspec

from rollout import POLICY_MODEL
from rollout.agent.events import read
from rollout.agent.headless import Event, Headless, assistant, at, call, ended, listed, results, text
from rollout.agent.programs import Program
from rollout.sandbox import ExecResult

_RUN = Path(__file__).with_name("mini_swe_agent_run.py")


@dataclass(frozen=True, kw_only=True)
class MiniSweAgent(Headless):
    """This agent is mini-swe-agent, with the settings of configs/agent/mini_swe_agent.yaml."""

    PROGRAM: ClassVar[Program | None] = Program("mini_swe_agent", "2.4.6", pip=("mini-swe-agent", "mcp"))

    @property
    def programs(self) -> Sequence[Path]:
        """Return what starts it, too."""
        return (*super().programs, _RUN)

    @property
    def covers(self) -> Mapping[Path, str]:
        """Return the Python that it was installed with, if that is in a directory of its own: images lack it."""
        base = Path(sys.base_prefix)
        return {} if base in (Path("/usr"), Path("/usr/local")) else {base: str(base)}

    def command(self, home: str) -> list[str]:
        """Return its command line; the prompt is read from standard input. Python takes nothing from the work tree."""
        return [*self.started(), "-I", str(_RUN)]

    def told(self, secret: str, base_url: str) -> dict[str, str]:
        """Return where the session is, and the limits."""
        return {
            "OPENAI_API_KEY": secret,
            "OPENAI_API_BASE": f"{base_url}/v1",
            "MODEL": POLICY_MODEL,
            "MAX_TOKENS": str(self.max_tokens),
            "MAX_TURNS": str(self.max_turns),
            "MSWEA_SILENT_STARTUP": "1",
        }

    def events(self, done: ExecResult) -> Iterator[Event]:
        """Yield its messages."""
        for event in read(done.stdout):
            message = event.get("mini")
            kind, content = at(message, "role"), at(message, "content")
            if kind == "assistant":
                said = [text(content)] if content else []
                for one in listed(at(message, "tool_calls")):
                    asked = at(one, "function", "arguments")
                    with contextlib.suppress(ValueError, RecursionError):
                        asked = msgspec.json.decode(asked if isinstance(asked, str) else "null")
                    said.append(call(at(one, "id"), at(one, "function", "name"), asked))
                yield assistant(said, at(message, "id"))
            elif kind == "tool":
                yield results((at(message, "tool_call_id"), content, at(message, "returncode") != 0))
            elif kind == "exit":
                status = at(message, "exit_status")
                yield ended(content, failed=status != "Submitted", turned=status == "LimitsExceeded")
