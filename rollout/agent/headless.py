"""Run an agent other than Claude Code: a program that runs headless, knows only TCP, and prints events.

A module derives a class from ``Headless`` and says how its program is started and told of the session (``command``,
``told``), and what its output means in the form of Claude Code's events (``events``), which records, viewer and audit
read. The helpers below make such events.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self

import msgspec

from rollout import POLICY_MODEL, storable
from rollout.agent import AgentRun, outcome
from rollout.agent.events import blocks, message_id, read, reply_of
from rollout.agent.forward import BASE_URL, SOCKET, program
from rollout.agent.programs import Program
from rollout.sandbox import ExecResult

Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Headless:
    """A Headless is an agent of this kind. PROGRAM: what has to be installed, None for nothing. UNREPORTED: the tools
    that start agents whose replies are not in the output; an episode that uses one reports no replies, nor does one
    whose context was ``summed_up``.

    ``max_turns``: after so many the agent stops by itself; 0 if it has no such limit. ``timeout_s``: wall time of a
    whole run. ``max_tokens``: of one reply. ``max_context``: the policy's context length in tokens. ``extra_args``:
    added to the command line.
    """

    timeout_s: float
    max_tokens: int
    max_context: int
    max_turns: int = 0
    extra_args: tuple[str, ...] = ()

    PROGRAM: ClassVar[Program | None] = None
    UNREPORTED: ClassVar[tuple[str, ...]] = ()
    leaves: ClassVar[Sequence[str]] = ()  # the output is its account

    @classmethod
    def of(cls, *, extra_args: Sequence[str] = (), **settings: Any) -> Self:
        """Make the agent from a config's plain values. Raises FileNotFoundError if its program is not installed, and
        ValueError for keys that it does not have."""
        if unknown := sorted(set(settings) - {field.name for field in fields(cls)}):
            raise ValueError(f"this agent has no {', '.join(f'agent.{name}' for name in unknown)}")
        made = cls(extra_args=tuple(extra_args), **settings)
        _ = made.programs
        return made

    @property
    def programs(self) -> Sequence[Path]:
        """Return the forwarder and the agent's directory. Raises FileNotFoundError without them."""
        return (program(), *([self.PROGRAM.found()] if self.PROGRAM else []))

    @property
    def covers(self) -> Mapping[Path, str]:
        """Return nothing: its settings come from the command line, the environment and its HOME."""
        return {}

    def argv(self, home: str) -> list[str]:
        """Return the command line, which the forwarder runs."""
        return [str(program()), *self.command(home), *self.extra_args]

    def stdin(self, prompt: str) -> bytes:
        """Return the prompt."""
        return prompt.encode()

    def environment(self, secret: str, *, socket: Path | None = None, base_url: str = "") -> dict[str, str]:
        """Return what the forwarder and the agent are told."""
        way = {SOCKET: str(socket)} if socket is not None else {}
        return {"PYTHONDONTWRITEBYTECODE": "1", **way, **self.told(secret, base_url or BASE_URL)}

    def files(self) -> Mapping[str, bytes]:
        """Return the files that a run needs in HOME."""
        return {}

    def result(self, done: ExecResult, turns: int) -> AgentRun:
        """Return how the run ended, by its events."""
        events = [event for event in self.events(done) if storable(event)]
        replies = frozenset(message_id(event) for event in events if event["type"] == "assistant") - {""}
        called = {str(block.get("name")) for event in events for block in blocks(event, "assistant")}
        if called.intersection(self.UNREPORTED) or summed_up() in events:
            replies = None
        return outcome(done, turns, events, replies or None, self.max_turns, self.timeout_s)

    def started(self) -> list[str]:
        """Return the beginning of the program's command line."""
        assert self.PROGRAM is not None
        return self.PROGRAM.argv

    def command(self, home: str) -> list[str]:
        """Return the program's command line."""
        raise NotImplementedError

    def told(self, secret: str, base_url: str) -> dict[str, str]:
        """Return the program's environment. ``base_url``: the root of all APIs, without a path."""
        raise NotImplementedError

    def events(self, done: ExecResult) -> Iterable[Event]:
        """Yield the run's events in the form of Claude Code's. Raises nothing, whatever the output is."""
        raise NotImplementedError


class Scripted(Headless):
    """A Scripted is an agent written in Python, which a program of ours (SCRIPT) starts in the box, by the Python that
    it is installed in. That prints what the agent adds to its messages."""

    SCRIPT: ClassVar[Path]

    @property
    def programs(self) -> Sequence[Path]:
        """Return what starts it, too, and its Python, if that is not the one in use, which boxes have."""
        return (*super().programs, self.SCRIPT, *(base for base in self.covers if base != Path(sys.base_prefix)))

    @property
    def covers(self) -> Mapping[Path, str]:
        """Return the Python that it was installed with, if that is in a directory of its own: images lack it."""
        base = Path(self.started()[0]).resolve().parents[1]
        return {} if base in (Path("/usr"), Path("/usr/local")) else {base: str(base)}

    def command(self, home: str) -> list[str]:
        """Return its command line; the prompt is read from standard input. Python takes nothing from the work tree."""
        return [*self.started(), "-I", str(self.SCRIPT)]

    def told(self, secret: str, base_url: str) -> dict[str, str]:
        """Return where the session is, and the limits."""
        return {
            "OPENAI_API_KEY": secret,
            "OPENAI_API_BASE": f"{base_url}/v1",
            "MODEL": POLICY_MODEL,
            "MAX_TOKENS": str(self.max_tokens),
            "MAX_TURNS": str(self.max_turns),
        }

    def events(self, done: ExecResult) -> Iterator[Event]:
        """Yield its messages."""
        for event in read(done.stdout):
            message = event.get("added")
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


def assistant(said: Sequence[Event], reply: object = None) -> Event:
    """Return the event of a reply, of which these blocks are known. ``reply``: its id, if the agent tells; else its
    calls' ids do. They tell a call's place, too: calls that ran at once may be reported in another order."""
    calls = sorted((one for one in said if one.get("type") == "tool_use"), key=lambda one: str(one.get("id")))
    rest = [one for one in said if one.get("type") != "tool_use"]
    named = str(reply) if reply else reply_of(str(calls[0].get("id"))) if calls else ""
    return {"type": "assistant", "partial": True, "message": {"id": named, "content": [*rest, *calls]}}


def text(words: object) -> Event:
    """Return a block of text."""
    return {"type": "text", "text": words if isinstance(words, str) else ""}


def call(call_id: object, name: object, arguments: object) -> Event:
    """Return the block of a call."""
    return {"type": "tool_use", "id": str(call_id), "name": str(name), "input": arguments}


def results(*found: tuple[object, object, bool]) -> Event:
    """Return the event of the results of calls: the call's id, what came of it, and whether it failed."""
    blocks = [
        {"type": "tool_result", "tool_use_id": str(of), "content": str(what), "is_error": failed}
        for of, what, failed in found
    ]
    return {"type": "user", "message": {"content": blocks}}


def summed_up() -> Event:
    """Return the event of a context that was full: a reply that is not reported sums up all before it."""
    return {"type": "system", "subtype": "compact_boundary"}


def ended(words: object, *, failed: bool = False, turned: bool = False) -> Event:
    """Return a run's last event. ``turned``: the agent stopped because it had made as many turns as it may."""
    kind = "error_max_turns" if turned else "error" if failed else "success"
    return {"type": "result", "subtype": kind, "is_error": failed or turned, "result": str(words)[:100_000]}


def at(value: object, *path: str) -> Any:
    """Return what is at a path of keys in hostile JSON, None if there is nothing."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def listed(value: object) -> Iterator[Event]:
    """Yield the objects in hostile JSON that should be a list of them."""
    yield from (one for one in value if isinstance(one, dict)) if isinstance(value, list) else ()
