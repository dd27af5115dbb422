"""Encode texts exactly as a Hugging Face tokenizer does, in less time.

A tokenizer cuts a text at its control tokens first, and encodes what stands between two of them by itself. So the ids
of a prompt's head, which has the system prompt and the tools, do not depend on what comes after it, and are computed
once for all sessions.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections import OrderedDict
from typing import Any

from rollout.proxy.garbage import untracked
from rollout.proxy.marks import any_of
from rollout.proxy.texts import here

log = logging.getLogger(__name__)

# How many prompts' heads are kept, and the most characters of one. A head shorter than ``_SHORT`` takes less than half
# a millisecond to encode. An agent and its sub-agents have a few heads.
_KEPT, _LONG, _SHORT = 32, 1 << 18, 1 << 12
_PROBE = "  One line,\n\nthen def f(x):\n\treturn 'é 漢字 🙂' # 1234567 "


class Encoder:
    """An Encoder returns the ids that ``tokenizer(text, add_special_tokens=False)`` returns. Threads may share it.

    A tokenizer that is not from the ``tokenizers`` library, or that adds steps of its own, is called directly.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = _backend(tokenizer)
        last = max(self._backend.get_vocab().values(), default=-1) if self._backend is not None else -1
        self._shared = untracked([*range(last + 1)])
        self._cut = _cut(self._backend)
        self._heads: OrderedDict[str, list[int]] = OrderedDict()
        self._lock = threading.Lock()

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text. Raises NoRoom (``texts.Room``)."""
        if (room := here()) is not None:
            room.take_text(text, self._ids)
        return self._ids(text)

    def _ids(self, text: str) -> list[int]:
        if self._backend is None:
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        # The same integers for all sessions: a list then takes 8 bytes for each, and not 40.
        ids = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return [self._shared[number] for number in ids]

    def can_cut(self, text: str, before: str) -> bool:
        """Tell whether the ids of a text are those of its beginning ``before``, and then those of the rest."""
        at = len(before)
        if self._cut is None or not text.startswith(before):
            return False
        for found in self._cut.finditer(text):
            if found.start() >= at:
                return found.start() == at
        return False

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a first prompt, whose head may be known from another one. Raises NoRoom."""
        end = self._head(text)
        if not end:
            return self.encode(text)
        head = text[:end]
        with self._lock:
            known = self._heads.get(head)
            if known is not None:
                self._heads.move_to_end(head)
        if known is not None:
            return known + self.encode(text[end:])
        ids, rest = self.encode(text), self.encode(text[end:])
        if ids[len(ids) - len(rest) :] == rest:
            with self._lock:
                self._heads[head] = untracked(ids[: len(ids) - len(rest)])
                if len(self._heads) > _KEPT:
                    self._heads.popitem(last=False)
        else:
            log.warning("this tokenizer does not split at its control tokens; every prompt is encoded as a whole")
            self._cut = None
        return ids

    def _head(self, text: str) -> int:
        """Return where the head ends, at the first control token after a long text; 0 if it is not worth keeping."""
        before = 0
        for found in self._cut.finditer(text, 0, _LONG) if self._cut is not None else ():
            if found.start() - before > _SHORT:
                return found.start()
            before = found.start()
        return 0


def _backend(tokenizer: Any) -> Any:
    """Return a copy of a tokenizer's backend, whose options nobody else sets; None if it cannot be used alone."""
    # For one text at a time the library's threads are of no use, and those that wait take time.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    same = all(
        getattr(type(tokenizer), name, None) is getattr(PreTrainedTokenizerFast, name)
        for name in ("__call__", "encode", "_encode_plus")
    )
    if not same or tokenizer.split_special_tokens:
        return None
    try:
        backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    except Exception:  # parts of it are written in Python
        return None
    backend.no_truncation()
    backend.no_padding()
    probe = _PROBE.join(["", *tokenizer.all_special_tokens[:4], ""])
    encoded = backend.encode_batch_fast([probe], add_special_tokens=False)[0].ids
    return backend if encoded == tokenizer.encode(probe, add_special_tokens=False) else None


def _cut(backend: Any) -> re.Pattern[str] | None:
    """Return a pattern of the control tokens before which a text can be cut; None if there are none."""
    added = backend.get_added_tokens_decoder().values() if backend is not None else ()
    first = [token for token in added if not token.normalized]  # the others are looked for later
    if not first or any(token.single_word or token.lstrip or token.rstrip for token in first):
        return None
    return any_of(token.content for token in first)
