"""The protocol between a session and an inference engine: prompt ids in, sampled ids and logprobs out.

Implementations are ``VllmHttpEngine`` (a vLLM server), ``rollout.replay.ReplayEngine`` (a recorded episode),
``ScriptedEngine`` below, and, in ``rl/``, verl's rollout client.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rollout.proxy.garbage import untracked

if TYPE_CHECKING:
    from rollout.proxy.tree import Node

# What logprobs are of (``Completion.logprobs_of``): the distribution that was sampled from, or that at temperature 1.
SAMPLED, AT_1 = "sampled", "temperature 1"


@dataclass(frozen=True)
class Completion:
    """A Completion is what an engine sampled for one prompt.

    ``ids``: the sampled tokens, with the end-of-turn token if it was sampled. ``logprobs``: the natural logarithm of
    each id's probability, ``logprobs_of``: in which distribution, "" if the engine does not tell. ``versions``: the
    version of the weights that sampled each id, empty if the engine does not know it. ``cached``: the number of prompt
    tokens that were in the engine's prefix cache, None if it does not say. ``experts``: the experts to which the engine
    routed each token of prompt and reply, except the first ``routed_experts_prompt_start`` tokens and the last one, as
    an array of shape (tokens, layers, experts per token), None if not recorded.
    """

    ids: list[int]
    logprobs: list[float]
    versions: tuple[int, ...] = ()
    cached: int | None = None
    experts: Any = None
    logprobs_of: str = ""


def logprobs_of(sampling: dict[str, Any], processed: bool | None) -> str:
    """Return what vLLM's logprobs are of. ``processed``: its ``--logprobs-mode`` is processed_logprobs; None: unknown.

    Logits are divided by a temperature only if that is not 0: a greedy choice is of no distribution.
    """
    if sampling.get("temperature") == 0:
        return AT_1
    return "" if processed is None else SAMPLED if processed else AT_1


# How many conversations a session keeps for its prompts and seals: that of the agent, and those of sub-agents.
_BEGUN = 4


@dataclass(eq=False)
class _PromptState:
    """This is a prompt and, once it is sampled, the reply to it. ``digest``: a hash of the first ``hashed`` ids."""

    ids: list[int]
    context: Node | None = None  # whose path the prompt is
    answered: bool = False
    hashed: int = 0
    digest: Any = field(default_factory=hashlib.sha256)


class Seals:
    """Seals makes the prompts of one session's calls, and their seals.

    A prompt mostly begins with the previous prompt of its thread and the reply to it. So the same list is extended, and
    what was hashed of it is not hashed again: a call costs what it adds, not the length of its conversation.
    """

    def __init__(self) -> None:
        self._begun: list[_PromptState] = []

    def prompt(self, context: Node) -> list[int]:
        """Return the ids of a context's path. Nobody may change them; ``make`` takes the list back."""
        said = context.parent
        for begun in reversed(self._begun):
            # A list is free when its call is answered: until then an engine may read it. The list of a call that
            # failed is given up.
            asked = begun.context if begun.answered else None
            if asked and said and asked is said.parent and begun.ids[asked.length :] == said.ids:
                self._begun.remove(begun)
                begun.ids += context.ids
                break
        else:
            begun = _PromptState(untracked(context.path_ids()))
        begun.context, begun.answered = context, False
        self._begun = [*self._begun[1 - _BEGUN :], begun]
        return begun.ids

    def make(self, prompt_ids: list[int], done: Completion, side: bool, name: str) -> bytes:
        """Return the SHA-256 of a call: what the engine was given, what it returned, whether it is a side call, and the
        reply's id.

        This seal is made where these cross the engine's border, before anything else keeps or moves them;
        docs/records.md defines it, and ``rollout.audit`` makes it again from the record. Routed experts are not in it.
        """
        begun = next((b for b in self._begun if b.ids is prompt_ids and not b.answered), None)
        if begun is None or begun.context is None or len(prompt_ids) != begun.context.length:
            begun = _PromptState(prompt_ids)  # it was not made here, too many are in use, or an engine has added to it
        begun.digest.update(array("i", prompt_ids[begun.hashed :]))
        whole = begun.digest.copy()
        whole.update(returned := array("i", done.ids))
        whole.update(array("f", done.logprobs))
        whole.update(array("i", done.versions))
        sizes = (len(prompt_ids), len(done.ids), len(done.logprobs), len(done.versions))
        whole.update(struct.pack("<QQQQ?", *sizes, side) + name.encode())
        if begun.context is not None:
            begun.digest.update(returned)
            begun.ids += done.ids
            begun.answered, begun.hashed = True, len(begun.ids)
        return whole.digest()


# Those of the statuses 4xx that say nothing about the call: the same may be answered later.
_LATER = (408, 409, 425, 429)


class EngineError(Exception):
    """The engine could not answer. This is an infrastructure failure.

    ``status``: that of the engine's HTTP response, None if there was none. The message is for the log: it may name
    addresses, which are not a client's business.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    @property
    def permanent(self) -> bool:
        """Tell whether the engine will refuse the same call again, so that the client had better not retry."""
        return self.status is not None and 400 <= self.status < 500 and self.status not in _LATER


class Engine(Protocol):
    """An Engine samples replies."""

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Completion:
        """Sample one reply.

        ``prompt_ids`` must not be changed; the list goes on growing after this has returned. ``request_id`` is the same
        for all calls of an episode, so that they reach the replica that has their prefix cached. ``sampling`` always
        has ``max_tokens`` and ``routed_experts_prompt_start`` (see Completion), ``stop`` (a list of strings) if the
        agent has stop sequences, and ``stop_token_ids`` if a reply may end with another id than the tokenizer's end of
        sequence; the other parameters are the trainer's. The result may go on after a stop sequence.
        Cancelling the call aborts the generation in the engine. Raises EngineError.
        """
        ...


class TextCodec(Protocol):
    """A TextCodec has the two methods of a Hugging Face tokenizer that are needed here."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]:
        """Return the token ids of ``text``."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str:
        """Return the text of ``ids``."""
        ...


class ScriptedEngine:
    """A ScriptedEngine replies with ``script(text of the prompt)``; both texts have special tokens spelled out.

    Warm starts and tests use it. Its logprobs are 0.0, because the reply to a prompt is certain.
    """

    def __init__(self, tokenizer: TextCodec, end_id: int, script: Callable[[str], str]) -> None:
        self.tokenizer = tokenizer
        self.end_id = end_id
        self.script = script

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Completion:
        """Return the script's reply and an end token, cut at ``max_tokens``; other parameters are ignored."""
        text = self.script(self.tokenizer.decode(prompt_ids, skip_special_tokens=False))
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.end_id]
        ids = ids[: sampling["max_tokens"]]
        return Completion(ids, [0.0] * len(ids))


def call_seed(seed: int, prompt_ids: Sequence[int], before: int) -> int:
    """Derive the seed of one call from the episode's ``seed``, the prompt, and ``before``. The result has 63 bits.

    ``before`` tells calls with the same prompt apart: the number of earlier replies to such a request and, from bit 32
    on, which of the prompt's requests (``SamplingTerms``) it is. Calls with other prompts do not matter.
    """
    data = array("Q", (seed, before, *prompt_ids)).tobytes()
    # Engines take a signed 64-bit integer.
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1
