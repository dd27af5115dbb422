"""Control tokens spelled out in a conversation's texts: keep them from being encoded as control tokens.

A chat template writes control tokens between messages, and a tokenizer finds them in any text. So a file in a
repository that spells them could forge turns of the policy, calls or thinking. ``Marks`` puts placeholders where
messages spell a control token, before the template is applied, and encodes these as the text that they stand for.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rollout.proxy.parsers import FORMATS
from rollout.proxy.texts import PIECE, here

# Control tokens of most families look like this, also those that no chat template writes (<|fim_prefix|>).
_CONTROL = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)


def control_texts(tokenizer: Any) -> list[str]:
    """Return the texts of a tokenizer's control tokens, which it would find in any text before all other tokens.

    They are its special tokens, the added tokens that the chat template or a format of tool calls writes, and those
    that look like control tokens. Families such as Gemma also add tokens of plain text (runs of line breaks, HTML
    tags), which are left out.
    """
    written = str(getattr(tokenizer, "chat_template", None))
    patterns = [make().section.pattern for make in FORMATS.values()]

    def controls(text: str, special: bool) -> bool:
        if special or _CONTROL.fullmatch(text):
            return True
        return bool(text.strip()) and (text in written or any(re.escape(text) in pattern for pattern in patterns))

    added = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
    added |= dict.fromkeys(tokenizer.all_special_tokens, True)
    return [text for text, special in added.items() if text and controls(text, special)]


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds any of the texts, the longest of those that begin together, as tokenizers do."""
    # Grouped by first character: the search for a pattern that begins with a literal is many times as fast.
    firsts: dict[str, list[str]] = {}
    for text in sorted(texts, key=len, reverse=True):  # there may be thousands
        firsts.setdefault(text[0], []).append(text[1:])
    choices = (f"{re.escape(first)}(?:{'|'.join(map(re.escape, rest))})" for first, rest in firsts.items())
    return re.compile("|".join(choices) or r"(?!)")


class Marks:
    """Marks are the control tokens of a tokenizer, by their texts (``control_texts``)."""

    def __init__(self, tokenizer: Any) -> None:
        self._texts: list[str] = control_texts(tokenizer)
        self._longest = max(map(len, self._texts), default=0)
        self._pattern = any_of(self._texts)
        self._open = f"\ue000{secrets.token_hex(8)}:"  # which no text has by chance or can know
        self._placeholder = re.compile(rf"{self._open}(\d+)\ue001")
        self._numbers = {text: number for number, text in enumerate(self._texts)}

    def hide(self, value: Any) -> Any:
        """Return messages or tools (any JSON value) with placeholders; what has no mark is returned as it is."""
        if isinstance(value, str):
            parts: list[str] = []
            at = 0
            room = here()
            for found in self._marks(value):
                parts += value[at : found.start()], f"{self._open}{self._numbers[found[0]]}\ue001"
                at = found.end()
                if room is not None:
                    room.take(len(parts) // 2)  # each mark will be at least one token
            return "".join((*parts, value[at:])) if parts else value
        if isinstance(value, dict):  # its keys are texts, too: names of arguments and of a schema's properties
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        return [self.hide(item) for item in value] if isinstance(value, list) else value

    def _marks(self, text: str) -> Iterator[re.Match[str]]:
        """Yield the marks in a text. It is searched in pieces, between which other threads get their turn."""
        at = 0
        while at < len(text):
            found = self._pattern.search(text, at, at + PIECE + self._longest)
            if found is None or found.start() >= at + PIECE:
                at += PIECE
            else:
                yield found
                at = found.end()

    def encode(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Return the ids of a text that may have placeholders. ``encode``: the tokenizer's own encoding of a text."""
        if self._open not in text:
            return encode(text)
        room, ids = here(), list[int]()

        def add(part: str) -> None:
            ids.extend(encode(part) if part else ())
            if room is not None:
                room.take(len(ids))

        at = 0
        for found in self._placeholder.finditer(text):
            add(text[at : found.start()])
            # A mark is no mark any more if it is encoded in two parts.
            mark = self._texts[int(found[1])]
            add(mark[:1])
            add(mark[1:])
            at = found.end()
        add(text[at:])
        return ids
