"""mini-swe-agent as an agent, as of version 2.4: its default agent with its own prompts, one tool (bash), and its model
that speaks chat completions without LiteLLM. ``mini_swe_agent_run.py`` starts it in the box and prints its messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rollout.agent.headless import Scripted
from rollout.agent.programs import Program


@dataclass(frozen=True, kw_only=True)
class MiniSweAgent(Scripted):
    """This agent is mini-swe-agent, with the settings of configs/agent/mini_swe_agent.yaml."""

    PROGRAM: ClassVar[Program | None] = Program("mini_swe_agent", "2.4.6", pip=("mini-swe-agent", "mcp"))
    SCRIPT: ClassVar[Path] = Path(__file__).with_name("mini_swe_agent_run.py")

    def told(self, secret: str, base_url: str) -> dict[str, str]:
        """Return that it is to say nothing else, too."""
        return {**super().told(secret, base_url), "MSWEA_SILENT_STARTUP": "1"}
