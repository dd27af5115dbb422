"""Read sampled text a second time, for the audit: does it say what the agent was sent?

This shares the definitions of well-formed calls with the proxy (``rollout.proxy.parsers.FORMATS``) but not vLLM's
parsers, with which the proxy reads names, arguments and types. It needs no tokenizer and no tool definitions.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

from rollout.proxy.messages import Block
from rollout.proxy.parsers import FORMATS

# What vLLM's reasoning parsers for the families of docs/models.md look for.
_OPENED = ("<think>", "<seed:think>", "◁think▷")
_CLOSED = ("</think>", "</seed:think>", "◁/think▷")
_SILENT = re.compile(rf"\s*(?:{'|'.join(_OPENED)})?\s*(?:{'|'.join(_CLOSED)})")


class FormatReading:
    """A FormatReading compares texts of one format with content blocks. ``spec``: as in ``ReplyParser``; ``trimmed``:
    strings may have lost the white space at their ends, as in records before version 3. Raises ValueError if the format
    is not known."""

    def __init__(self, spec: str, trimmed: bool = False) -> None:
        tool, _, reasoning = spec.partition("+")
        if tool not in FORMATS:
            raise ValueError(f"no format is named {tool!r}")
        self._format, self._thinks, self._trimmed = FORMATS[tool](), bool(reasoning), trimmed

    def agrees(self, text: str, sent: Sequence[Block], calls: bool) -> bool:
        """Tell whether ``text`` says exactly the blocks ``sent``, without ids. ``calls``: whether it may have calls."""
        rests = [text]
        if self._thinks and sent and sent[0]["type"] == "thinking":
            rests, sent = self._after_thinking(text, sent[0]["thinking"]), sent[1:]
            if not sent:
                return any(not rest.strip() for rest in rests)
        elif self._thinks and (silent := _SILENT.match(text)):
            rests.append(text[silent.end() :])
        if any(block["type"] == "tool_use" for block in sent):
            return calls and any(self._tiles(rest, sent) for rest in rests)
        return any(list(sent) == [{"type": "text", "text": rest}] for rest in rests)

    def malformed(self, text: str, sent: Sequence[Block], calls: bool) -> bool:
        """Tell whether ``text``, sent as ``sent``, has parts of a call that were not read as one."""
        if not calls or any(block["type"] == "tool_use" for block in sent):
            return False
        if said := "".join(block["text"] for block in sent if block["type"] == "text"):
            return self._format.wants_call(said)
        # Only thinking was sent: it has no end, and a call may have begun in it.
        return not text.rstrip().endswith(_CLOSED) and any(start in text for start in self._format.starts)

    def _after_thinking(self, text: str, thinking: str) -> list[str]:
        """Return what may come after the thinking; nothing if the text does not begin with it."""
        body = text.lstrip()
        bodies = [text, *(body[len(mark) :] for mark in _OPENED if body.startswith(mark))]
        rests = []
        for rest in (body[len(thinking) :] for body in bodies if body.startswith(thinking)):
            rests += [rest[len(mark) :] for mark in _CLOSED if rest.startswith(mark)]
            if not rest or rest.lstrip().startswith(self._format.starts):  # cut, or ended by a call
                rests.append(rest)
        return rests

    def _tiles(self, text: str, sent: Sequence[Block]) -> bool:
        """Tell whether the blocks cover the text from beginning to end: each piece between calls, and each call."""
        waiting, at = list(sent), 0

        def said(piece: str) -> bool:
            return not piece.strip() or (bool(waiting) and waiting.pop(0) == {"type": "text", "text": piece})

        for section in self._format.section.finditer(text):
            if not said(text[at : section.start()]):
                return False
            for call in self._format.call.finditer(text, section.start(), section.end()):
                if not waiting or not self._called(call, waiting.pop(0)):
                    return False
            at = section.end()
        return said(text[at:]) and not waiting

    def _called(self, call: re.Match[str], block: Block) -> bool:
        """Tell whether a written call is that of a tool_use block."""
        if block["type"] != "tool_use":
            return False
        parts, text = call.groupdict(), call.group()
        name, arguments = parts.get("name"), block["input"]
        if self._format.key:
            written = self._format.values(text)
            keys = [key for key, _ in written]
            same = sorted(keys) == sorted(arguments)
            return name == block["name"] and same and all(self._means(arguments[key], value) for key, value in written)
        try:
            read = json.loads(parts.get("json") or text[text.index("{") : text.rindex("}") + 1])
        except ValueError:
            return False
        if name is None and isinstance(read, dict):
            name, read = read.get("name"), read.get("arguments", read.get("parameters"))
        return name == block["name"] and read == arguments

    def _means(self, value: Any, written: str) -> bool:
        """Tell whether an argument that is written without JSON's quotes has this value."""
        if isinstance(value, str):
            return value == written or (self._trimmed and value.strip() == written.strip())
        plain = written.strip()
        if isinstance(value, bool):  # vLLM reads as false what is neither true nor false
            return value is (plain.lower() == "true")
        if value is None:
            return plain.lower() in ("null", "none")
        for read in (json.loads, ast.literal_eval, float):
            try:
                if read(plain) == value:
                    return True
            except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
                continue
        return False
