"""Split a git patch into the files that it changes.

Files are told apart as `git apply` does it: a hunk is read by the line counts in its header, so no line of a file can
pass for a header. When the kept files are applied (`rewards.grade`), it is checked that git finds the same files in
them. If this module and git ever read a patch differently, the patch is refused, and nothing gets past the rules.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from rollout.sandbox import LEFT_OUT

_HUNK = re.compile(rb"@@ -\d+(?:,(\d{1,9}))? \+\d+(?:,(\d{1,9}))? @@")
_MOVED = re.compile(rb"(?:rename|copy) (?:from|to|old|new) (.*)")
_QUOTED_TWICE = re.compile(rb'("(?:[^"\\]|\\.)*") ("(?:[^"\\]|\\.)*")')
_ESCAPE = re.compile(rb'\\([abtnvfr"\\]|[0-3][0-7]{2})')
_PLAIN = dict(zip(b'abtnvfr"\\', b'\a\b\t\n\v\f\r"\\', strict=True))
_NOWHERE = b"/dev/null"
# Finds the paths in a patch that `split` cannot read to its end.
_NAMED = re.compile(r"^--- (?:a/.*|/dev/null)\n\+\+\+ b/([^\t\n]+)", re.MULTILINE)
_MADE = re.compile(rb"^(?:new file mode |--- /dev/null)", re.MULTILINE)

APPLY = ("--whitespace=nowarn", "--numstat", "-z", "--apply")
"""Options of `git apply`: no fuzz, and print which files were changed, for `read_the_same`."""


class PatchError(ValueError):
    """A text is not a patch that can be used, or its files cannot be told apart. The message is one line."""


@dataclass(frozen=True)
class FileDiff:
    """A FileDiff is the part of a patch that changes one file.

    paths: every path that it names, old and new, without a/ and b/; bytes that are not UTF-8 are written as `\\xNN`.
    data: its lines, unchanged. added: the lines that it adds, without the plus; empty for a binary file.
    """

    paths: tuple[str, ...]
    data: bytes
    added: bytes

    @property
    def created(self) -> bool:
        """Tell whether there is no file of this name before the patch: it is new, renamed or copied."""
        header = self.data.partition(b"\n@@ ")[0]
        return bool(_MADE.search(header)) or len(set(self.paths)) > 1

    @property
    def path(self) -> str:
        """Return the file's path after the patch, or before it if the file is deleted."""
        return self.paths[-1]


@dataclass
class _Part:
    """A part is a FileDiff that is being read. begin: the index of its first line."""

    begin: int
    paths: list[str] = field(default_factory=list)
    added: list[bytes] = field(default_factory=list)


def split(patch: bytes) -> list[FileDiff]:
    """Split a patch into its files, in order; text before the first one is left out.

    The data of all files joined is the patch again. Raises PatchError, also if a path is absolute, leaves the work
    tree or lies in a .git directory.
    """
    parts: list[_Part] = []
    lines = re.findall(rb"[^\n]*\n|[^\n]+", patch)
    at = 0
    header = False  # in the lines between `diff --git` and the first hunk
    while at < len(lines):
        line = lines[at].rstrip(b"\n")
        following = lines[at + 1] if at + 1 < len(lines) else b""
        if line.startswith(b"diff --git "):
            parts.append(_Part(at, _both(line[11:])))
            header = True
        elif line.startswith(b"--- ") and following.startswith(b"+++ "):
            if not header:  # a plain diff, which git reads too
                parts.append(_Part(at))
            parts[-1].paths += [*_one(line[4:]), *_one(following[4:].rstrip(b"\n"))]
            header, at = False, at + 1
        elif line.startswith(b"@@ -") and parts:
            header, at = False, _hunk(lines, at, parts[-1].added)
        elif header and (moved := _MOVED.match(line)):
            parts[-1].paths.append(_text(_name(moved[1])))
        at += 1
    if not parts:
        raise PatchError("the patch changes no file")
    for part in parts:
        _check(part.paths)
    ends = [*(part.begin for part in parts[1:]), len(lines)]
    return [
        FileDiff(tuple(part.paths), b"".join(lines[part.begin : end]), b"".join(part.added))
        for part, end in zip(parts, ends, strict=True)
    ]


def patched_by(script: str) -> set[str]:
    """Return the paths in an eval script's own patches, which SWE-bench's scripts have as here-documents."""
    try:
        return {path for file in split(script.encode()) for path in file.paths}
    except PatchError:  # there is none, or none that can be read to its end
        return set(_NAMED.findall(script))


def left_out(patch: bytes) -> list[str]:
    """Return the paths that a box's diff names as changed, but left out (see `rollout.sandbox.Sandbox.diff`).

    Raises PatchError.
    """
    lines = takewhile(lambda line: line.startswith(LEFT_OUT), patch.split(b"\n"))
    try:
        return [str(json.loads(line.removeprefix(LEFT_OUT))) for line in lines]
    except ValueError as error:
        raise PatchError(f"a path that was left out cannot be read: {error}") from error


def read_the_same(files: Sequence[FileDiff], numstat: bytes) -> bool:
    """Tell whether git, which printed `numstat`, found the same files in a patch as `split`."""
    theirs = {row.split(b"\t", 2)[-1] for row in numstat.split(b"\0")[:-1]}
    return {_text(path) for path in theirs} == {file.path for file in files}


def _hunk(lines: list[bytes], at: int, added: list[bytes]) -> int:
    """Read the hunk at line `at`, put the lines that it adds into `added`, and return its last line's index."""
    found = _HUNK.match(lines[at])
    if found is None:
        raise PatchError(f"line {at + 1} is not a hunk's header")
    old, new = (1 if count is None else int(count) for count in found.groups())
    while old > 0 or new > 0:
        at += 1
        kind = lines[at][:1] if at < len(lines) else b""
        if kind not in (b" ", b"\n", b"-", b"+", b"\\"):
            raise PatchError(f"line {at + 1}: the hunk ends before its header says so")
        old -= kind in b" \n-"
        new -= kind in b" \n+"
        if kind == b"+":
            added.append(lines[at][1:])
    return at


def _both(names: bytes) -> list[str]:
    """Return the path of a `diff --git` line, which has it twice; [] if the two differ: other lines name them."""
    quoted = _QUOTED_TWICE.fullmatch(names)
    if quoted:
        left, right = map(_name, quoted.groups())
    else:  # the names may have spaces, but they are equally long
        middle = len(names) // 2
        left, between, right = names[:middle], names[middle : middle + 1], names[middle + 1 :]
        if between != b" " or b'"' in (left[:1], right[:1]):
            return []
    return [_text(_strip(left))] if _strip(left) == _strip(right) != b"" else []


def _one(name: bytes) -> Iterator[str]:
    """Yield the path of a `---` or `+++` line, or nothing for /dev/null."""
    if not name.startswith(b'"'):
        name = name.partition(b"\t")[0]  # a date may follow, or nothing (git marks names with spaces this way)
    name = _name(name)
    if name != _NOWHERE:
        yield _text(_strip(name))


def _name(name: bytes) -> bytes:
    """Remove git's quotes."""
    if not name.startswith(b'"'):
        return name
    end = re.match(rb'"((?:[^"\\]|\\.)*)"', name)
    if end is None:
        raise PatchError("a quoted path has no closing quote")
    return _ESCAPE.sub(lambda m: bytes([_PLAIN[m[1][0]] if len(m[1]) == 1 else int(m[1], 8)]), end[1])


def _strip(name: bytes) -> bytes:
    """Remove the first directory, as `git apply -p1` does."""
    return name.partition(b"/")[2]


def _text(path: bytes) -> str:
    return path.decode("utf-8", "backslashreplace")


def _check(paths: list[str]) -> None:
    if not paths:
        raise PatchError("a file is changed without being named")
    for path in paths:
        if any(part in ("", ".", "..") or part.lower() == ".git" for part in path.split("/")):
            raise PatchError(f"{path!r} is not a path in the work tree")
