"""This module has session files of Claude Code that are made here, without the notes of requests that newer versions
write.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def session(turns: int, text: str = "a result", name: str = "s", first: int = 0) -> list[dict[str, Any]]:
    """The lines of a session: a prompt, and per turn a reply with a call and its result."""
    lines: list[dict[str, Any]] = []

    def add(kind: str, message: dict[str, Any]) -> None:
        parent = lines[-1]["uuid"] if lines else None
        uuid = f"{name}-{first}-{len(lines)}"
        about = {"isSidechain": False, "sessionId": name, "version": "2.1.0", "toolUseResult": {"big": "unread"}}
        lines.append({"type": kind, "uuid": uuid, "parentUuid": parent, "message": message, **about})

    for turn in range(turns):
        called = f"toolu_{name}_{first + turn - 1}"
        heard = [{"type": "tool_result", "tool_use_id": called, "content": text}] if turn else "Fix it."
        add("user", {"role": "user", "content": heard})
        call = {
            "type": "tool_use",
            "id": f"toolu_{name}_{first + turn}",
            "name": "Bash",
            "input": {"command": f"ls {turn}"},
        }
        said = {"id": f"msg_{name}_{first + turn}", "role": "assistant", "model": "m", "content": [call]}
        add("assistant", said)
    return lines


def write_session(file: Path, turns: int, text: str, size: int = 0, compact_every: int = 0, name: str = "s") -> int:
    """Write a session with ``turns``, or of ``size`` bytes with a compaction after each ``compact_every`` turns.

    Returns the number of turns.
    """
    made = 0
    with open(file, "w") as out:
        if not size:
            out.writelines(json.dumps(line) + "\n" for line in session(turns, text, name))
            return turns
        while out.tell() < size:
            lines = session(compact_every, text, name, first=made)
            boundary = {"type": "system", "subtype": "compact_boundary", "uuid": f"b-{made}", "parentUuid": None}
            out.write(json.dumps(boundary) + "\n")
            lines[0]["parentUuid"] = f"b-{made}"
            out.writelines(json.dumps(line) + "\n" for line in lines)
            made += compact_every
    return made
