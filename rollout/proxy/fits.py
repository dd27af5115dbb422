"""This module finds a tool parser that does not fit a model's chat template, before an episode is played."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from rollout.proxy.parsers import FORMATS

_NAME, _ARGUMENTS = "look", {"file": "a.py"}


def check_fits(tool_parser: str, tokenizer: Any, any_family: bool) -> None:
    """Raise ValueError if a parser (a key of ``FORMATS``) cannot read the calls that the chat template writes.

    A template that writes no calls says nothing of them, and with ``any_family`` nothing is checked.
    """
    written = None if any_family or tool_parser not in FORMATS else _written(tokenizer)
    if written is None or _reads(tool_parser, written):
        return
    others = [name for name in FORMATS if _reads(name, written)]
    raise ValueError(
        f"proxy.tool_parser={tool_parser} does not read calls as the model's chat template writes them: {written!r}; "
        f"{'take ' + ' or '.join(others) if others else 'no known parser does'} (docs/models.md)"
    )


def _written(tokenizer: Any) -> str | None:
    """Return what the template writes for a reply that is one call; None if it does not write the call's name."""
    ask = [{"role": "user", "content": "?"}]
    for arguments in (_ARGUMENTS, json.dumps(_ARGUMENTS)):  # some templates want JSON text
        call = {"type": "function", "id": "call_0", "function": {"name": _NAME, "arguments": arguments}}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        with contextlib.suppress(Exception):  # jinja's and the template's own have no common class
            before, whole = (tokenizer.apply_chat_template(talk, tokenize=False) for talk in (ask, [*ask, said]))
            return whole.removeprefix(before) if _NAME in whole else None
    return None


def _reads(tool_parser: str, text: str) -> bool:
    format = FORMATS[tool_parser]()
    found = format.call.search(text)
    if found is None or "name" in format.call.groupindex:
        return found is not None and found["name"] == _NAME
    with contextlib.suppress(ValueError):
        inside = json.loads(found.group().removeprefix(format.starts[0]).removesuffix(format.ends[0]))
        return isinstance(inside, dict) and inside.get("name") == _NAME
    return False
