"""This module has a tokenizer, a chat format and a parser that people can read, for tests of the proxy without a model.

A token is a character, so that a wrong token is visible in the text; <e> ends a turn. Replies call tools as
``[[name {json}]]`` and think, before anything else, as ``((thought))``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import psutil

from rollout.proxy.engine import Completion
from rollout.proxy.messages import Block
from rollout.proxy.parsers import ParsedReply, VllmReplyParser
from rollout.proxy.session import Policy
from rollout.proxy.texts import here
from rollout.records import Record

END = 0x110000  # the first number that is not a character
HELLO = {"model": "m", "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]}
CALL = re.compile(r"\[\[(\w+) (\{.*?\})\]\]", re.DOTALL)

THOUGHT = re.compile(r"\(\((.*?)\)\)", re.DOTALL)


class CharTokenizer:
    eos_token_id = END
    added_tokens_decoder: ClassVar[dict[int, Any]] = {}
    all_special_tokens = ("<e>",)

    def convert_tokens_to_ids(self, token: str) -> int:
        return END if token == "<e>" else ord(token)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [END if part == "<e>" else ord(c) for part in re.split("(<e>)", text) for c in _units(part)]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False, **options: bool) -> str:
        return "".join("<e>" if i == END else chr(i) for i in ids)


def _units(part: str) -> Sequence[str]:
    return ["<e>"] if part == "<e>" else part


class CharRenderer:
    """Writes messages as lines of text. ``encoded`` is the number of tokens that it has made so far."""

    def __init__(self, tokenizer: CharTokenizer | None = None) -> None:
        self.encoded = 0
        self._tokenizer = tokenizer or CharTokenizer()

    def start(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
        head = "".join(f"(tool {t['function']['name']})" for t in tools)
        return self._ids(head + self._text(messages))

    def extend(self, tail: Sequence[int], ended: bool, messages: list[dict[str, Any]]) -> list[int]:
        return self._ids(("" if ended else "<e>") + "\n" + self._text(messages))

    def _ids(self, text: str) -> list[int]:
        if (room := here()) is not None:
            room.take_text(text, self._tokenizer.encode)
        ids = self._tokenizer.encode(text)
        self.encoded += len(ids)
        return ids

    def _text(self, messages: list[dict[str, Any]]) -> str:
        lines = [f"{m['role']}: {m['content']}{m.get('tool_calls') or ''}<e>\n" for m in messages]
        return "".join(lines) + "assistant: "


def make_parser(spec: str, tokenizer: Any) -> VllmReplyParser:
    """The parser whose ``spec`` this is."""
    tool, _, reasoning = spec.partition("+")
    return VllmReplyParser(tool, reasoning or None, tokenizer)


class CallParser:
    spec = "kit"

    def parse(self, text: str, tools: Sequence[dict[str, Any]]) -> ParsedReply:
        thought = THOUGHT.match(text)
        if thought:
            rest = self.parse(text[thought.end() :], tools)
            blocks = [block for block in rest.blocks if block.get("text") != ""]
            return ParsedReply([{"type": "thinking", "thinking": thought[1]}, *blocks], rest.malformed)
        calls = [{"type": "tool_use", "name": n, "input": json.loads(a)} for n, a in CALL.findall(text)]
        said = CALL.sub("", text).strip() if calls else text
        blocks = [{"type": "text", "text": said}, *calls] if said or not calls else calls
        return ParsedReply(blocks, not calls and "[[" in text)


class CallReading:
    """The kit's format, read with its own parser."""

    def agrees(self, text: str, sent: Sequence[Block], calls: bool) -> bool:
        return CallParser().parse(text, []).blocks == list(sent)

    def malformed(self, text: str, sent: Sequence[Block], calls: bool) -> bool:
        return CallParser().parse(text, []).malformed


class QueueEngine:
    """Says what is in ``replies``, in order. Every token that it ever samples has a different logprob."""

    def __init__(self, *replies: str) -> None:
        self.replies = list(replies)
        self.prompts: list[list[int]] = []
        self.drawn = 0
        self.hangs = False  # True: every call waits until it is cancelled

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Completion:
        if self.hangs:
            await asyncio.Event().wait()
        self.prompts.append(list(prompt_ids))
        ids = [*CharTokenizer().encode(self.replies.pop(0)), END][: sampling["max_tokens"]]
        logprobs = [-(self.drawn + i + 1) / 4 for i in range(len(ids))]  # exact in float32
        self.drawn += len(ids)
        return Completion(ids, logprobs)


def char_policy(engine: Any, renderer: Any = None, max_tokens: int = 10_000, max_context: int = 10**7) -> Policy:
    return Policy(
        engine=engine,
        renderer=renderer or CharRenderer(),
        parser=CallParser(),
        tokenizer=CharTokenizer(),
        end_ids=frozenset({END}),
        max_tokens=max_tokens,
        max_context=max_context,
    )


def saved_again(tokenizer: Any, directory: Path) -> Any:
    """Return a tokenizer as converted ones are: it names only eos and pad, and eos is not what ends a turn."""
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(directory)
    file = directory / "tokenizer_config.json"
    told = json.loads(file.read_text()) | {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    file.write_text(json.dumps({name: value for name, value in told.items() if "special_tokens" not in name}))
    return AutoTokenizer.from_pretrained(directory)


def empty_record(**changes: Any) -> Record:
    """The record of an unresolved episode in which nothing happened, with ``changes``."""
    fields: dict[str, Any] = {
        "version": 2, "episode": "e", "task": "t", "split": "train", "step": 1, "attempt": 0, "started": 0.0,
        "model": "m", "parser": "kit", "sampling": {}, "nodes": [], "rows": [],
        "verdict": {"outcome": "unresolved", "reason": "tests_failed", "reward": 0.0, "detail": "", "flags": []},
        "agent": {}, "patch": b"", "timing": {}, "counters": {},
    }  # fmt: skip
    return Record(**fields | changes)


def ends(pid: int, seconds: float = 60.0, reaped: bool = False) -> bool:
    """Tell whether a process of anybody's ends in time. One that nobody has waited for has ended, too: who adopts the
    children of a dead process need not. ``reaped``: somebody has to."""
    end = time.monotonic() + seconds
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE or reaped:
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
    return True


def full_at(size: int, command: Sequence[str]) -> list[str]:
    """Return a command that does what ``command`` does, but no file can grow beyond ``size`` bytes, as on a full disk.

    It writes no bytecode: Python does not look at how much of it was written (as of 3.11), and half of a module's would
    stay for all later programs.
    """
    code = (
        "import os, resource, sys\n"
        "os.environ['PYTHONDONTWRITEBYTECODE'] = '1'\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)\n"
        "os.execv(sys.argv[2], sys.argv[2:])"
    )
    return [sys.executable, "-c", code, str(size), *command]
