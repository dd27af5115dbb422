"""Git patches: the files that one changes, its reverse, and patches from R2E-Gym's parsed commits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import unidiff
import unidiff.errors

from rewards.patch import PatchError

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d{1,9}))? \+(\d+)(?:,(\d{1,9}))? @@(.*)", re.DOTALL)
_HEADS = re.compile(r"diff --git a/(\S+) b/(\S+)")
_INDEX = re.compile(r"index (\w+)\.\.(\w+)(.*)", re.DOTALL)
# Header lines whose meaning flips when a patch is reversed; git accepts them in any order.
_OPPOSITE = {
    "new file mode ": "deleted file mode ",
    "deleted file mode ": "new file mode ",
    "old mode ": "new mode ",
    "new mode ": "old mode ",
    "rename from ": "rename to ",
    "rename to ": "rename from ",
}


@dataclass(frozen=True)
class FileChange:
    """A FileChange names a file that a patch changes. `old` is None if the patch creates it, `new` if it deletes it."""

    old: str | None
    new: str | None


def changes(patch: str) -> list[FileChange]:
    """Return the files that a git patch changes. Raises PatchError, also if it lacks the content of binary files."""
    if re.search(r"^Binary files .* differ$", patch, re.MULTILINE):
        raise PatchError("the patch names binary files without their content")
    try:
        files = unidiff.PatchSet(patch)
    except (unidiff.errors.UnidiffParseError, ValueError) as error:  # ValueError: a number of thousands of digits
        raise PatchError(f"the patch cannot be parsed: {' '.join(str(error).split())}") from error
    if not files:
        raise PatchError("the patch changes no file")
    return [FileChange(_path(file.source_file, "a/"), _path(file.target_file, "b/")) for file in files]


def _path(name: str, prefix: str) -> str | None:
    return None if name == "/dev/null" else name.removeprefix(prefix)


def reverse(patch: str) -> str:
    """Return the git patch that undoes `patch`. Raises PatchError for binary content, copies and truncated hunks."""
    lines = patch.removesuffix("\n").split("\n")  # not splitlines: a form feed in a line is part of it
    out: list[str] = []
    at = 0
    while at < len(lines):
        hunk = _HUNK.match(lines[at])
        if hunk:
            old, old_count, new, new_count, section = hunk.groups(default="")
            old_range, new_range = (f"{a},{b}" if b else a for a, b in ((old, old_count), (new, new_count)))
            out.append(f"@@ -{new_range} +{old_range} @@{section}")
            body = _hunk_lines(lines, at + 1, int(old_count or 1), int(new_count or 1))
            out += _reversed_lines(body)
            at += 1 + len(body)
        elif lines[at].startswith("--- ") and at + 1 < len(lines) and lines[at + 1].startswith("+++ "):
            out.append("--- " + _under("a", lines[at + 1][4:]))
            out.append("+++ " + _under("b", lines[at][4:]))
            at += 2
        else:
            out.append(_reversed_header(lines[at]))
            at += 1
    return "\n".join(out) + "\n"


def _hunk_lines(lines: list[str], at: int, old_left: int, new_left: int) -> list[str]:
    """Return the body of the hunk that begins at `at`. The counts tell where it ends: a deleted line can look like a
    header."""
    start = at
    while old_left > 0 or new_left > 0 or (at < len(lines) and lines[at].startswith("\\")):
        if at == len(lines):
            raise PatchError("the patch's last hunk is truncated")
        sign = lines[at][:1] or " "  # an empty line is a context line whose blank was stripped
        if sign not in " +-\\":
            raise PatchError(f"line {at + 1} of the patch belongs to no hunk: {lines[at][:40]!r}")
        old_left -= sign in " -"
        new_left -= sign in " +"
        at += 1
    return lines[start:at]


def _reversed_lines(body: list[str]) -> list[str]:
    """Return the reversed body. In each run of changes deletions come before insertions, as in git's own output."""
    out: list[str] = []
    inserted: list[str] = []  # in the current run, held back until its deletions are out
    last = out
    for line in body:
        if line.startswith("+"):
            last = out
            last.append("-" + line[1:])
        elif line.startswith("-"):
            last = inserted
            last.append("+" + line[1:])
        elif line.startswith("\\"):
            last.append(line)  # "No newline at end of file" refers to the line before it
        else:
            out += [*inserted, line]
            inserted = []
            last = out
    return out + inserted


def _reversed_header(line: str) -> str:
    if line.startswith(("GIT binary patch", "Binary files ", "copy from ")):
        raise PatchError(f"a patch with {line.split(' /')[0][:16]!r} cannot be reversed")
    if heads := _HEADS.fullmatch(line):
        return f"diff --git a/{heads[2]} b/{heads[1]}"
    if index := _INDEX.fullmatch(line):
        return f"index {index[2]}..{index[1]}{index[3]}"
    for name, opposite in _OPPOSITE.items():
        if line.startswith(name):
            return opposite + line.removeprefix(name)
    return line


def _under(prefix: str, name: str) -> str:
    """Return a header's file name, which may be quoted, with `prefix` in the place of a/ or b/."""
    return name if name == "/dev/null" else re.sub(r'^("?)[ab]/', rf"\g<1>{prefix}/", name)


def from_commit(content: Mapping[str, Any]) -> tuple[str, str]:
    """Return the patch of a commit in R2E-Gym's format (decoded `parsed_commit_content`) and the parent commit's id.

    The patch has only Python files that are not tests, as in R2E-Gym's own check of its gold patches; it is empty if
    there are none. Raises PatchError.
    """
    try:
        files = [file for file in content["file_diffs"] if _is_source(file["header"]["file"]["path"])]
        return "".join(line for file in files for line in _file_patch(file)), content["old_commit_hash"]
    except (KeyError, TypeError, AttributeError) as error:
        raise PatchError(f"the commit does not have the expected form: {type(error).__name__}: {error}") from error


def _is_source(path: str) -> bool:
    *directories, name = path.lower().split("/")
    is_test = name.startswith("test_") or name.endswith("_test.py") or {"test", "tests"} & set(directories)
    return name.endswith(".py") and not is_test


_SIGNS = {"context": " ", "added": "+", "deleted": "-", "note": "\\ "}


def _file_patch(file: Mapping[str, Any]) -> Iterator[str]:
    path = file["header"]["file"]["path"]
    if file.get("is_binary_file"):
        raise PatchError(f"{path} is binary")
    yield f"diff --git a/{path} b/{path}\n"
    if file["header"].get("misc_line"):
        yield file["header"]["misc_line"] + "\n"
    if index := file.get("index_line"):
        yield f"index {index['old_commit_hash']}..{index['new_commit_hash']} {index['mode']}".rstrip() + "\n"
    if file.get("minus_file") and file.get("plus_file"):
        yield f"--- {file['minus_file']['path']}\n+++ {file['plus_file']['path']}\n"
    for hunk in file.get("hunks") or []:
        head = hunk["descriptor"]
        ranges = [
            str(range_["start"]) if range_.get("length") is None else f"{range_['start']},{range_['length']}"
            for range_ in (head["old_range"], head["new_range"])
        ]
        yield f"@@ -{ranges[0]} +{ranges[1]} @@ {head.get('section') or ''}".rstrip() + "\n"
        # Stop by the counts: R2E-Gym's parser adds the end of the diff as one more line of context.
        old_left, new_left = (
            1 if (n := head[side].get("length")) is None else n for side in ("old_range", "new_range")
        )
        for line in hunk["line_group"]["all_lines"]:
            if old_left <= 0 and new_left <= 0 and line["type"] != "note":
                break
            old_left -= line["type"] in ("context", "deleted")
            new_left -= line["type"] in ("context", "added")
            yield f"{_SIGNS[line['type']]}{line['content']}\n"
