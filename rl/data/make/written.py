"""Bugs written by another model: it is asked for a function with a mistake in it, and its reply is checked.

`rl.teachers.bugs` asks; `rl.data.make --bugs` tries the edits as all others.
"""

from __future__ import annotations

import ast
import io
import json
import random
import re
import textwrap
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rl.data.make import edits
from rl.data.make.candidates import FEW, WRITTEN, Candidate, parsed
from rl.data.make.edits import Edit
from rl.data.make.prepare import PreparedPackage
from rl.data.make.sites import MAKERS
from rl.data.make.sources import MakeError

SYSTEM = (
    "You plant bugs in Python code, so that others can learn to find them. You get one function and reply with the "
    "same function with one mistake in it that an experienced programmer could make and a reviewer could overlook: a "
    "case that is forgotten, a wrong order, state that is not reset, a misunderstood argument. It still has to be "
    "imported, and most of what it does has to work. Keep its name, arguments, decorators, docstring and comments; add "
    "no comment and no word about the mistake. Reply with the whole function in one code block."
)
_FENCED = re.compile(r"^```[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_SHORTEST, _LONGEST = 3, 80  # lines of a function


@dataclass(frozen=True)
class Question:
    """A question is a function in which a bug is asked for: lines start to end (from 1) of a file."""

    path: str
    start: int
    end: int
    text: str

    @property
    def id(self) -> str:
        """Return the question's name in its package."""
        return f"{self.path}:{self.start}"


def questions(prepared: PreparedPackage, sources: Mapping[str, str], seed: str, most: int) -> list[Question]:
    """Return functions that tests run, those that few tests run first. sources: files that may be changed."""
    found = []
    for path, file in parsed(sources, prepared.lines).items():
        for site in file.sites(MAKERS["drop_function"]):
            if _SHORTEST <= site.end - site.start + 1 <= _LONGEST:
                text = "".join(edits.lines_of(sources[path])[site.start - 1 : site.end])
                found.append((site.tests.bit_count() > FEW, Question(path, site.start, site.end, text)))
    random.Random(seed).shuffle(found)
    return [one for _, one in sorted(found, key=lambda pair: pair[0])][:most]


def edit_of(question: Question, source: str, reply: str) -> Edit | str:
    """Return the edit that a reply makes of a file, or why it is none, in a word or two."""
    blocks = _FENCED.findall(reply)
    if len(blocks) != 1:
        return "not one code block"
    indent = re.match(r"\s*", question.text)
    code = textwrap.indent(textwrap.dedent(blocks[0]).strip("\n") + "\n", indent[0] if indent else "")
    lines = edits.lines_of(source)
    text = "".join([*lines[: question.start - 1], code, *lines[question.end :]])
    try:
        compile(text, "written", "exec", dont_inherit=True)
        old, new = (_parts(part) for part in (question.text, code))
    except (SyntaxError, ValueError, RecursionError, tokenize.TokenError):
        return "not Python"
    if new.head != old.head:
        return "another head"
    if new.docstring != old.docstring:
        return "another docstring"
    if new.comments - old.comments:
        return "new comments"
    return edits.between(question.path, source, text) if new.body != old.body else "no change"


@dataclass(frozen=True)
class _Parts:
    head: str
    docstring: str | None
    body: str
    comments: Counter[str]


def _parts(text: str) -> _Parts:
    """Return what is compared of one function. Raises SyntaxError, ValueError, tokenize.TokenError."""
    text = textwrap.dedent(text)
    module = ast.parse(text)
    function = module.body[0] if len(module.body) == 1 else None
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        raise ValueError("not one function")
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = Counter(token.string for token in tokens if token.type == tokenize.COMMENT)
    docstring = ast.get_docstring(function)
    body, function.body = ast.dump(ast.Module(function.body, [])), []
    return _Parts(ast.dump(function), docstring, body, comments)


def to_line(prepared: PreparedPackage, edit: Edit, model: str) -> str:
    """Return a bug as a line of a file that `bugs` reads."""
    about = {"package": prepared.package.label, "sha256": prepared.package.sha256, "model": model}
    return json.dumps({**about, "edit": edits.to_json(edit)}) + "\n"


def bugs(path: Path, prepared: PreparedPackage, sources: Mapping[str, str]) -> Iterator[Candidate]:
    """Yield the bugs that a file has for a package. Raises MakeError if it is not a file of `rl.teachers.bugs`."""
    try:
        for line in path.read_text().splitlines():
            one = json.loads(line)
            if one["sha256"] == prepared.package.sha256:
                edit = edits.from_json(one["edit"])
                if {change.path for change in edit} <= sources.keys() and (tests := prepared.running(edit)):
                    yield Candidate(WRITTEN, edit, tests)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MakeError(f"{path}: no file of rl.teachers.bugs: {type(error).__name__}: {error}") from error
