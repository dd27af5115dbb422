"""What turns prompt ids into sampled ids. verl's client is behind the same protocol in ``rl/agent_loop.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Completion:
    """``ids``: sampled tokens, the end-of-turn token included when it was sampled. ``logprobs``: one per id,
    natural log, of the distribution that was sampled from. ``versions``: the weight version that sampled each id,
    or empty where the engine does not know it. ``cached``: how many of the prompt's tokens the engine found in its
    prefix cache, None where it does not tell. ``experts``: which experts the engine sent each token of prompt and
    reply to, the last one left out, as an array (tokens, layers, experts per token); None unless that is recorded."""

    ids: list[int]
    logprobs: list[float]
    versions: tuple[int, ...] = ()
    cached: int | None = None
    experts: Any = None


class EngineError(Exception):
    """The engine could not answer. An infrastructure failure: the client is told to retry (529)."""


class Engine(Protocol):
    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Completion:
        """Sample one reply. ``request_id`` is the same for all calls of an episode (prefix-cache affinity).

        ``sampling`` always has ``max_tokens``, and ``stop`` (strings) when the agent has stop sequences; the rest is
        the trainer's. What follows a stop sequence may be returned too. Cancelling the call ends the generation and
        frees its place in the engine. Raises EngineError.
        """
        ...


class TextCodec(Protocol):
    """The two methods of a Hugging Face tokenizer that are needed here."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...


class ScriptedEngine:
    """Plays a script: ``script(prompt text) -> reply text``, both with special tokens spelled out.

    Serves warm starts and tests; its logprobs are 0.0 because a script is certain of what it says.
    """

    def __init__(self, tokenizer: TextCodec, end_id: int, script: Callable[[str], str]) -> None:
        self.tokenizer = tokenizer
        self.end_id = end_id
        self.script = script

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Completion:
        text = self.script(self.tokenizer.decode(prompt_ids, skip_special_tokens=False))
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.end_id]
        ids = ids[: sampling["max_tokens"]]
        return Completion(ids, [0.0] * len(ids))
