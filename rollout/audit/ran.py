"""Tool input: tell whether what an agent ran is what was sampled.

Claude Code puts the input of its own tools into the form in which they take it, and reports that form. A hook can
change it once more (``updatedInput``), which only the events of hooks tell (``--include-hook-events``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

_ACTS = ("Bash", "Edit", "NotebookEdit", "Write")  # to whose input no text is added
_RENAMED = {"old_str": "old_string", "new_str": "new_string"}
# What Claude Code reads for what a model may write, in texts to replace.
_SPELT = {"<fnr>": "<function_results>", "< META_START >": "<META_START>", "< META_END >": "<META_END>"}
_SPELT |= {"< EOT >": "<EOT>", "< META >": "<META>", "< SOS >": "<SOS>"}
_SPELT |= {"\n\nH:": "\n\nHuman:", "\n\nA:": "\n\nAssistant:"}
_SPELT |= {f"<{mark}{short}>": f"<{mark}{name}>" for mark in ("", "/") for short, name in
           (("n", "name"), ("o", "output"), ("e", "error"), ("s", "system"), ("r", "result"))}  # fmt: skip
_THERE = re.compile(r"cd [^\s\"'`$;&|<>*?(){}\[\]!#]+ && ")


def same_input(tool: str, sampled: Any, ran: Any) -> bool:
    """Tell whether an input that ran is the one that was sampled, but for what Claude Code is known to change.

    It adds what is left out (to what acts on files, no texts), reads numbers, truth values and lists that are written
    as texts, takes white space from the ends of lines, and takes ``cd DIRECTORY &&`` from the beginning of a command.
    """
    if not isinstance(sampled, Mapping) or not isinstance(ran, Mapping):
        return sampled == ran
    asked = {_RENAMED.get(key, key): value for key, value in sampled.items() if value is not None}
    added = [value for key, value in ran.items() if key not in asked]
    if tool in _ACTS and any(isinstance(value, str) and value for value in added):
        return False
    return all(key in ran and _same(key, value, ran[key]) for key, value in asked.items())


def _same(key: str, sampled: Any, ran: Any) -> bool:
    if sampled == ran:
        return True
    if isinstance(sampled, str) and isinstance(ran, str):
        if key == "command" and (there := _THERE.match(sampled)) and _plain(sampled[there.end() :]) == _plain(ran):
            return True
        return _plain(sampled) == _plain(ran)
    if isinstance(sampled, str):
        text = sampled.strip()
        try:
            return [sampled] == ran or json.loads(text if text[:1] in ("[", "{") else text.lower()) == ran
        except (ValueError, RecursionError):
            return False
    if isinstance(sampled, list) and isinstance(ran, list) and len(sampled) == len(ran):
        return all(_same("", *pair) for pair in zip(sampled, ran, strict=True))
    return isinstance(sampled, dict) and same_input("", sampled, ran)


def _plain(text: str) -> str:
    text = re.sub(r"\\u([0-9a-fA-F]{4})", lambda found: chr(int(found[1], 16)), text).replace("\\\\;", "\\;")
    for short, name in _SPELT.items():
        text = text.replace(short, name)
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip()


def changed_input(event: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Return the name of a tool and the input that a hook has given it in place of its own; None for other events."""
    kind = event.get("type"), event.get("subtype"), event.get("hook_event")
    if kind != ("system", "hook_response", "PreToolUse") or event.get("exit_code") == 2:  # with which it refuses
        return None
    try:
        told = msgspec.json.decode(str(event.get("output") or event.get("stdout")))["hookSpecificOutput"]
        ran, name, decision = told["updatedInput"], told.get("hookEventName"), told.get("permissionDecision")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    # Without a person, who asks is denied.
    if not isinstance(ran, dict) or name != "PreToolUse" or decision in ("deny", "ask"):
        return None
    return str(event.get("hook_name")).partition(":")[2], ran
