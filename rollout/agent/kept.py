"""Keep what an agent's process leaves behind: its output, and its own files.

All of it is hostile input: the policy's commands can write to the output and change the files. Files are read by a
program in the box; its output is capped, and no path that it names may lead out of the directory they are put in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from rollout.sandbox import ExecResult, Sandbox

_FILE_CAP = 32 << 20  # bytes of one file, and of all of them
_CAP = 128 << 20
_FILES = 1000
_NAME = 300  # bytes of a path, and of a part of it
_PART = 255
_TIMEOUT_S = 60.0
# Each regular file that is not too large: its name and its size, each before a NUL, then its bytes. Links are left out.
_SCRIPT = """
cap=$1; shift; cd "$HOME" || exit
for name; do find "$name" -type f -size "-${cap}c" 2>/dev/null; done | LC_ALL=C sort | while IFS= read -r name; do
    size=$(wc -c <"$name") && printf '%s\\0%s\\0' "$name" "$((size))" && head -c "$size" "$name"
done
"""


@dataclass(frozen=True)
class AgentOutput:
    """This is what a process left: its output, its own files by their paths relative to HOME, what is missing, and the
    ``places`` that were searched for files."""

    stdout: bytes
    stderr: bytes
    files: Mapping[str, bytes] = field(default_factory=dict)
    problems: Sequence[str] = ()
    places: Sequence[str] = ()


async def keep(box: Sandbox, done: ExecResult, places: Sequence[str]) -> AgentOutput:
    """Return what a process that has ended left in ``box``. places: files and folders in HOME. Raises SandboxError."""
    problems = ["the middle of the agent's output, which is too long"] if done.truncated else []
    files: dict[str, bytes] = {}
    if places:
        argv = ["sh", "-c", _SCRIPT, "sh", str(_FILE_CAP), *places]
        read = await box.exec(argv, env={}, timeout_s=_TIMEOUT_S, output_cap=_CAP)
        files, whole = unpack(read.stdout)
        if read.timed_out or read.truncated or not whole:
            problems.append("some of the agent's own files, which are too large or were tampered with")
    return AgentOutput(done.stdout, done.stderr, files, problems, places)


def unpack(data: bytes) -> tuple[dict[str, bytes], bool]:
    """Return the files in the output of the script, and whether none is missing. Raises nothing, whatever it holds."""
    files: dict[str, bytes] = {}
    at = 0
    while at < len(data):
        end = data.find(b"\0", at, at + 4 * _NAME)
        middle = data.find(b"\0", end + 1, end + 20) if end >= 0 else -1
        if middle < 0 or len(files) >= _FILES:
            return files, False
        name, digits = data[at:end].decode("utf-8", "replace"), data[end + 1 : middle]
        at = middle + 1 + int(digits) if digits.isdigit() else len(data) + 1
        path = PurePosixPath(name)
        longest = max((len(part.encode()) for part in path.parts), default=_PART + 1)  # "." has none
        known = at <= len(data) and not path.is_absolute() and ".." not in path.parts and name.isprintable()
        if not known or longest > _PART or len(name.encode()) > _NAME:
            return files, False
        files[str(path)] = data[middle + 1 : at]
    return files, True
