"""Chat messages to token ids, each message once.

The chat template's borders are the model family's business; verl keeps one builder per family
(``verl.utils.tokenizer.continuous_token``), which encodes only what was appended. Imported when a renderer is
made, so that the proxy's core stays free of verl.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from rollout.proxy.messages import ChatMessage


class Renderer(Protocol):
    def start(self, messages: list[ChatMessage], tools: list[dict[str, Any]]) -> list[int]:
        """Ids of a whole first prompt, generation prompt included."""
        ...

    def extend(self, tail: Sequence[int], ended: bool, messages: list[ChatMessage]) -> list[int]:
        """Ids to append to a prompt whose last ids are ``tail``, generation prompt included.

        ``ended`` is False when the reply before was cut and did not close its turn.
        """
        ...


class ChatTemplateRenderer:
    """A Renderer over a Hugging Face tokenizer and verl's builder for ``model_type`` (config.json's)."""

    def __init__(self, tokenizer: Any, model_type: str, template_args: dict[str, Any] | None = None) -> None:
        from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

        self.tokenizer = tokenizer
        self.builder = create_continuous_token_builder(
            tokenizer, hf_model_type=model_type, chat_template_kwargs=template_args or {}
        )

    def start(self, messages: list[ChatMessage], tools: list[dict[str, Any]]) -> list[int]:
        return list(self.builder.build_initial_tokens(messages, tools=tools or None))

    def extend(self, tail: Sequence[int], ended: bool, messages: list[ChatMessage]) -> list[int]:
        closed = list(tail) if ended else [*tail, self.tokenizer.eos_token_id]
        merged = self.builder.merge_context_tokens([], messages, closed)
        if merged.removed_prefix_token_count:
            raise NotImplementedError(
                f"{type(self.builder).__name__} takes back sampled tokens at a turn's end; such a model family "
                "is not supported yet"
            )
        return merged.token_ids[len(tail) :]
