"""OpenHands as an agent, as of version 1.58 of its SDK: its default agent with the tools of its command line (terminal,
file editor, task list, sub-agents), and LiteLLM, which speaks chat completions. ``openhands_run.py`` starts it in the
box and prints its messages. The command line itself (``openhands --headless``) takes twice the CPU time to start, needs
an SDK from before 1.22, and always reads what the work tree says to agents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rollout.agent.headless import Scripted
from rollout.agent.programs import Program


@dataclass(frozen=True, kw_only=True)
class OpenHands(Scripted):
    """This agent is OpenHands, with the settings of configs/agent/openhands.yaml."""

    PROGRAM: ClassVar[Program | None] = Program(
        "openhands", "1.58.2", pip=("openhands-sdk", "openhands-tools"), pythons=("3.12", "3.13")
    )
    SCRIPT: ClassVar[Path] = Path(__file__).with_name("openhands_run.py")

    def files(self) -> Mapping[str, bytes]:
        """Return what keeps its terminal's control sequences out of what commands print."""
        return {".inputrc": b"set enable-bracketed-paste off\n"}

    def told(self, secret: str, base_url: str) -> dict[str, str]:
        """Return that it is to say nothing else, too."""
        return {
            **super().told(secret, base_url),
            "OPENHANDS_SUPPRESS_BANNER": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it is fetched
            "LITELLM_TELEMETRY": "False",
        }
