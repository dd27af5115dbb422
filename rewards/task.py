"""Tasks: rows of the SWE-bench v5 schema, checked once at load.

A parquet file of tasks has the columns of `COLUMNS`, may have those of `OPTIONAL`, and others, which are
ignored. The lists are lists of strings or JSON texts of such.
For local sandboxes `image` is `dir:PATH`, a directory with a git repository, relative to the file.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

_TEXT = ("instance_id", "image", "repo", "version", "log_parser", "eval_type", "eval_script")
_TESTS = ("FAIL_TO_PASS", "PASS_TO_PASS")
COLUMNS = (*_TEXT, "problem_statement", "base_commit", *_TESTS)
OPTIONAL = ("patch", "setup_patch", "hidden_paths", "difficulty")
EVAL_TYPES = ("pass_and_fail", "fail_only")
_LOCAL = "dir:"


class TaskError(ValueError):
    """A task that cannot be used; the message is one line with file, row and field."""


@dataclass(frozen=True)
class Task:
    """One row. `base_dir` is what a `dir:` image is relative to, normally the parquet file's directory.

    What an agent may see is `problem_statement` and the snapshot; everything else stays outside its box.
    patch: the gold patch. setup_patch: what makes the image's work tree the task's (SWE-smith's bug); every box has
    it applied before its tree is sealed. hidden_paths: files and directories of the image, relative to the work tree
    or absolute, that an agent's box must not have and a grading box must (tests that the image brings). difficulty: in
    the words of the set that it is from; metrics are split by it.
    """

    instance_id: str
    image: str
    repo: str
    version: str
    FAIL_TO_PASS: tuple[str, ...] = field(repr=False)
    PASS_TO_PASS: tuple[str, ...] = field(repr=False)
    log_parser: str
    eval_type: str
    eval_script: str = field(repr=False)
    problem_statement: str = field(repr=False)
    base_commit: str
    patch: str | None = field(repr=False)
    base_dir: Path
    setup_patch: str | None = field(repr=False, default=None)
    hidden_paths: tuple[str, ...] = field(repr=False, default=())
    difficulty: str | None = field(repr=False, default=None)

    @property
    def snapshot(self) -> Path:
        """The absolute path of a `dir:` image (which need not exist). TaskError for other images, and for a task whose
        tree must be prepared: a local snapshot is used as it is."""
        if not self.image.startswith(_LOCAL):
            raise TaskError(f"{self.instance_id}: image {self.image!r} is no local snapshot (dir:PATH)")
        if self.setup_patch or self.hidden_paths:
            raise TaskError(f"{self.instance_id}: setup_patch and hidden_paths need a container image")
        return (self.base_dir / self.image.removeprefix(_LOCAL)).resolve()

    @classmethod
    def from_row(cls, row: Mapping[str, Any], base_dir: Path) -> Task:
        """Check one row and make a task of it. TaskError names the instance and the field."""
        values = {name: _text(row, name) for name in (*_TEXT, "problem_statement", "base_commit")}
        tests = {name: _strings(row, name) for name in _TESTS}
        if not tests["FAIL_TO_PASS"] and not tests["PASS_TO_PASS"]:
            raise _wrong(row, "FAIL_TO_PASS", "empty, and PASS_TO_PASS too: any patch would be resolved")
        if values["eval_type"] not in EVAL_TYPES:
            raise _wrong(row, "eval_type", f"{values['eval_type']!r} is none of {', '.join(EVAL_TYPES)}")
        if values["log_parser"] not in log_parsers():
            raise _wrong(row, "log_parser", f"swebench has no parser {values['log_parser']!r}")
        patches = {name: row.get(name) for name in ("patch", "setup_patch")}
        for name, patch in patches.items():
            if patch is not None and not isinstance(patch, str):
                raise _wrong(row, name, f"is {type(patch).__name__}, not text")
        difficulty = row.get("difficulty")
        hidden = _strings(row, "hidden_paths") if row.get("hidden_paths") is not None else ()
        if strange := [path for path in hidden if not path.strip("/") or ".." in path.split("/")]:
            raise _wrong(row, "hidden_paths", f"{strange[0]!r} is no path below the work tree or the root")
        return cls(
            **values,
            FAIL_TO_PASS=tests["FAIL_TO_PASS"],
            PASS_TO_PASS=tests["PASS_TO_PASS"],
            **patches,
            difficulty=None if difficulty is None else str(difficulty),
            hidden_paths=hidden,
            base_dir=base_dir.absolute(),
        )

    def to_row(self) -> dict[str, Any]:
        """The row that `from_row` reads back, the lists as JSON texts (as the published sets have)."""
        row: dict[str, Any] = {name: getattr(self, name) for name in (*COLUMNS, *OPTIONAL)}
        for name in (*_TESTS, "hidden_paths"):
            row[name] = json.dumps(row[name])
        return row


def load_tasks(path: Path | str) -> list[Task]:
    """All tasks of a parquet file, in its order. TaskError on the first thing that is wrong with it."""
    path = Path(path)
    try:
        table = pyarrow.parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise TaskError(f"{path}: cannot be read as parquet: {' '.join(str(error).split())}") from error
    missing = [name for name in COLUMNS if name not in table.column_names]
    if missing:
        raise TaskError(f"{path}: no column {', '.join(missing)}")
    if table.num_rows == 0:
        raise TaskError(f"{path}: no rows")
    rows = table.select([*COLUMNS, *(name for name in OPTIONAL if name in table.column_names)]).to_pylist()
    tasks: list[Task] = []
    first: dict[str, int] = {}
    for number, row in enumerate(rows):
        try:
            task = Task.from_row(row, path.parent)
        except TaskError as error:
            raise TaskError(f"{path}: row {number}: {error}") from error
        if task.instance_id in first:
            raise TaskError(
                f"{path}: row {number}: {task.instance_id}: instance_id: also in row {first[task.instance_id]}"
            )
        first[task.instance_id] = number
        tasks.append(task)
    return tasks


def log_parsers() -> frozenset[str]:
    """The names in swebench's parser registry. Its import takes seconds, so unless somebody has
    imported it already (and may have registered parsers) they are read from its source."""
    loaded = sys.modules.get("swebench.harness.log_parsers")
    return frozenset(getattr(loaded, "PARSER_REGISTRY", ())) or _parsers_in_source()


@functools.cache
def _parsers_in_source() -> frozenset[str]:
    found = importlib.util.find_spec("swebench")
    if found is None or not found.submodule_search_locations:
        raise TaskError("swebench is not installed: no task can be graded")
    source = Path(found.submodule_search_locations[0], "harness", "log_parsers", "__init__.py").read_text()
    return frozenset(re.findall(r'^    "(\w+)": ', source, re.MULTILINE))


def _wrong(row: Mapping[str, Any], name: str, what: str) -> TaskError:
    return TaskError(f"{row.get('instance_id') or 'no instance_id'}: {name}: {what}")


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise _wrong(row, name, "missing" if value is None else f"is {type(value).__name__}, not text")
    # Nothing is graded or shown by these being empty, except for these two.
    if not value.strip() and name not in ("version", "base_commit"):
        raise _wrong(row, name, "empty")
    return value


def _strings(row: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = row.get(name)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise _wrong(row, name, f"is neither a list nor the JSON text of one ({error})") from error
    elif hasattr(value, "tolist"):  # a numpy array, as pandas hands lists over
        value = value.tolist()
    if not isinstance(value, list | tuple) or not all(isinstance(test, str) for test in value):
        raise _wrong(row, name, "is not a list of strings")
    return tuple(value)
