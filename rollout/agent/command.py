"""Any program as an agent: a command line and an environment, of which some words are replaced.

It may speak any API of the proxy (docs/apis.md). Its output is kept as text: it reports no replies.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from rollout import POLICY_MODEL, SIDE_MODEL
from rollout.agent.forward import BASE_URL
from rollout.agent.headless import Event, Headless, ended
from rollout.sandbox import ExecResult

_PROMPT = ".prompt"


@dataclass(frozen=True, kw_only=True)
class CommandAgent(Headless):
    """This agent is a program, with the settings of configs/agent/command.yaml.

    ``words`` and ``variables``: its command line and environment, in which the names in braces are replaced that the
    config file lists. ``shown``: files and directories of this machine that boxes show.
    """

    words: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    shown: tuple[Path, ...] = ()

    @classmethod
    def of(
        cls,
        *,
        extra_args: Sequence[str] = (),
        command: Sequence[str] | None = None,
        env: Mapping[str, Any] | None = None,
        shows: Sequence[str] = (),
        **settings: Any,
    ) -> Self:
        """Make the agent from a config's plain values. Raises FileNotFoundError, ValueError."""
        if not command:
            raise ValueError("agent.command: give the program and its arguments, such as [python3, /my/agent.py]")
        paths = [Path(os.path.abspath(os.path.expanduser(path))) for path in shows]
        if lost := [path for path in paths if not path.exists()]:
            raise FileNotFoundError(f"agent.shows: {lost[0]} does not exist")
        told = {name: str(value) for name, value in (env or {}).items()}
        words = tuple(map(str, command))
        return super().of(extra_args=extra_args, words=words, variables=told, shown=tuple(paths), **settings)

    @property
    def programs(self) -> Sequence[Path]:
        """Return the forwarder and what is to be shown."""
        return (*super().programs, *self.shown)

    def command(self, home: str) -> list[str]:
        """Return the command line. The shell puts the prompt into a file for programs that do not read their input."""
        keep = f'cat >"$HOME/{_PROMPT}" && exec "$@" <"$HOME/{_PROMPT}"'
        return ["sh", "-c", keep, "sh", *(self._filled(word, home, "", BASE_URL) for word in self.words)]

    def told(self, secret: str, base_url: str) -> dict[str, str]:
        """Return the environment."""
        return {name: self._filled(value, "", secret, base_url) for name, value in self.variables.items()}

    def events(self, done: ExecResult) -> Iterator[Event]:
        """Yield the last event: what it printed."""
        failed = done.returncode != 0
        yield ended((done.stderr if failed else done.stdout)[-10_000:].decode(errors="replace").strip(), failed=failed)

    def _filled(self, text: str, home: str, secret: str, base_url: str) -> str:
        known = {"base_url": base_url, "secret": secret, "model": POLICY_MODEL, "side_model": SIDE_MODEL}
        known |= {name: str(getattr(self, name)) for name in ("max_tokens", "max_context", "max_turns")}
        known |= {"home": home, "prompt_file": f"{home}/{_PROMPT}"}
        for name, value in known.items():
            text = text.replace(f"{{{name}}}", value)
        return text
