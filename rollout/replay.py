"""Replay a recorded episode, and tell where the replay first differs from the record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from rollout.proxy.engine import Completion, EngineError, TextCodec
from rollout.records import Record, unpack_floats, unpack_ids

# Tokens shown on each side of the first difference.
_SHOWN = 24


class ReplayDifferenceError(EngineError):
    """This run asked for something that the recorded one did not. The message names the call and the first token that
    differs, and shows the text around it in both. A retry does not help."""


class ReplayEngine:
    """This engine answers every prompt as it was answered in ``record``: same ids, logprobs and weight versions.

    Prompts are found by their tokens, so concurrent calls (sub-agents) may come in another order. A prompt that was
    sampled several times gets its replies in the recorded order. After the first difference, which ``difference``
    keeps, every call fails with the same error.

    Episodes whose chat template writes out the ids of tool calls do not replay: a session makes new ids.
    """

    def __init__(self, record: Record, tokenizer: TextCodec) -> None:
        self.tokenizer = tokenizer
        self.difference: ReplayDifferenceError | None = None
        self._calls = 0
        self._replies: list[tuple[list[int], Completion]] = []
        paths: list[list[int]] = []
        for node in record.nodes:
            before = paths[node.parent] if node.parent >= 0 else []
            ids = unpack_ids(node.ids)
            paths.append(before + ids)
            if node.logprobs is not None:
                # Version 1 of the format did not keep the version of each token.
                versions = unpack_ids(node.versions) if isinstance(node.versions, bytes) else ()
                done = Completion(ids, unpack_floats(node.logprobs), tuple(versions), logprobs_of=node.logprobs_of)
                self._replies.append((before, done))

    @property
    def left(self) -> int:
        """Return how many recorded replies have not been asked for yet."""
        return len(self._replies)

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Completion:
        """Return the recorded reply to ``prompt_ids``. Raises ReplayDifferenceError."""
        if self.difference is not None:
            raise self.difference
        self._calls += 1
        for number, (prompt, reply) in enumerate(self._replies):
            if prompt == prompt_ids:
                if len(reply.ids) > sampling["max_tokens"]:
                    limit = sampling["max_tokens"]
                    self._differ(f"the recorded reply has {len(reply.ids)} tokens, but max_tokens is now {limit}")
                del self._replies[number]
                return reply
        if not self._replies:
            self._differ("the record has no more replies")
        nearest = max((prompt for prompt, _ in self._replies), key=lambda prompt: _common(prompt, prompt_ids))
        at = _common(nearest, prompt_ids)
        self._differ(
            f"its prompt differs from the recorded one at token {at}: "
            f"recorded {self._around(nearest, at)}, now {self._around(prompt_ids, at)}"
        )

    def _differ(self, what: str) -> NoReturn:
        self.difference = ReplayDifferenceError(f"call {self._calls}: {what}")
        raise self.difference

    def _around(self, ids: Sequence[int], at: int) -> str:
        part = ids[max(0, at - _SHOWN) : at + _SHOWN]
        text = repr(self.tokenizer.decode(part, skip_special_tokens=False))
        return text if at < len(ids) else f"{text} (ends there, {len(ids)} tokens)"


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two prompts share from the start."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
