"""Tasks: rows of the SWE-bench v5 schema, or of another grader's, which are checked once, when they are loaded.

A parquet file of tasks must have the columns in `COLUMNS` and may have those in `OPTIONAL`; other columns are ignored.
A row whose column `grader` names another grader than SWE-bench's needs those in `ALWAYS` only, and has what its grader
reads in the column `grading`. Lists are lists of strings or their JSON text. For local sandboxes, `image` is
`dir:PATH`: a directory with a git repository, relative to the file.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from rewards import graders
from rewards.patch import PatchError, split

ALWAYS = ("instance_id", "image", "repo", "problem_statement")
_SWE_BENCH = ("log_parser", "eval_type", "eval_script")
_TESTS = ("FAIL_TO_PASS", "PASS_TO_PASS")
COLUMNS = (*ALWAYS, "version", "base_commit", *_SWE_BENCH, *_TESTS)
OPTIONAL = (
    "patch", "setup_patch", "hidden_paths", "difficulty", "not_passing", "grader", "grading", "agent", "workdir",
)  # fmt: skip
_ONE_LINE = (
    "instance_id", "image", "repo", "version", "log_parser", "eval_type", "base_commit", "difficulty", "grader",
    "agent", "workdir",
)  # fmt: skip
EVAL_TYPES = ("pass_and_fail", "fail_only")
_LOCAL = "dir:"
_WORKDIR = re.compile(r"(?!/home$|/(?:home/agent|tmp)(?:/|$))(?:/\w[\w.+-]*)+", re.ASCII)  # boxes bring those
_LARGE = 1e15
# Copied from swebench.harness.constants, which takes seconds to import. Results are read between these two.
MARKERS = (">>>>> Start Test Output", ">>>>> End Test Output")


class TaskError(ValueError):
    """A task cannot be used. The message is one line that names file, row and field."""


@dataclass(frozen=True)
class Task:
    """A Task is one row. An agent may see its `problem_statement` and its snapshot; all else stays out of its box.

    patch: the gold patch. base_dir: the directory to which a `dir:` image is relative, normally the parquet file's.
    setup_patch: a patch that every box applies to the image's work tree before the tree is sealed (SWE-smith's bug).
    hidden_paths: files and directories of the image, relative to the work tree or absolute, that are removed from an
    agent's box but kept in a grading box (tests that come with the image). difficulty: as the task's data set names
    it; metrics are split by it. not_passing: tests that are skipped or fail as expected with the gold patch, None if
    that is not known; admission writes it. grader: the name of what judges its tests (`rewards.graders`); grading: what
    that reads, the JSON text of an object, "" for SWE-bench's, which has its own columns. Another grader may read
    those, too: they may be empty, and it has to check them. solutions: paths that the gold patches of the task's
    repository touch. agent: the name of the agent that plays it in a run with a mix of agents, None for any. workdir:
    where the image has its work tree, an absolute path; None for /testbed, or where the image says that it is.
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
    not_passing: tuple[str, ...] | None = field(repr=False, default=None)
    grader: str = graders.SWE_BENCH
    grading: str = field(repr=False, default="")
    agent: str | None = field(repr=False, default=None)
    workdir: str | None = field(repr=False, default=None)
    solutions: frozenset[str] = field(repr=False, default=frozenset())

    @property
    def asked(self) -> dict[str, Any]:
        """Return `grading`, decoded."""
        return json.loads(self.grading or "{}")

    @property
    def limits(self) -> Mapping[str, float]:
        """Return what a box of the task has at least, of cpus, memory_mb and disk_mb: the key "limits" of `grading`."""
        found = self.asked.get("limits")
        return found if isinstance(found, dict) else {}

    @property
    def directory(self) -> Path | None:
        """Return the absolute path of the directory of files that the row's grader reads, None if it has none.

        The row names it relative to its own file, in the key "directory" of `grading`.
        """
        named = self.asked.get("directory")
        return (self.base_dir / named).resolve() if isinstance(named, str) else None

    @property
    def snapshot(self) -> Path:
        """Return the absolute path of a `dir:` image, which need not exist.

        Raises TaskError for other images, and for a task with a setup_patch, hidden_paths or workdir, because a local
        snapshot is used as it is.
        """
        if not self.image.startswith(_LOCAL):
            raise TaskError(f"{self.instance_id}: image {self.image!r} is not a local snapshot (dir:PATH)")
        if self.setup_patch or self.hidden_paths or self.workdir:
            raise TaskError(f"{self.instance_id}: setup_patch, hidden_paths and workdir need a container image")
        return (self.base_dir / self.image.removeprefix(_LOCAL)).resolve()

    @classmethod
    def from_row(cls, row: Mapping[str, Any], base_dir: Path) -> Task:
        """Make a task of one row after checking it. Raises TaskError, which names the instance and the field."""
        named = row.get("grader") or graders.SWE_BENCH
        swe_bench = _checked(row, "grader", named) == graders.SWE_BENCH
        values: dict[str, Any] = {name: _text(row, name) for name in ALWAYS}
        for name in ("version", "base_commit"):
            values[name] = _text(row, name) if swe_bench or row.get(name) is not None else ""
        if swe_bench:
            values |= _swe_bench_values(row)
        else:
            values |= {name: _checked(row, name, row.get(name) or "") for name in _SWE_BENCH}
        tests = {name: _strings(row, name) if swe_bench or row.get(name) is not None else () for name in _TESTS}
        if swe_bench and not tests["FAIL_TO_PASS"]:
            raise _wrong(row, "FAIL_TO_PASS", "is empty: a patch that changes nothing could resolve the task")
        given = {
            name: _checked(row, name, row[name])
            for name in ("patch", "setup_patch", "agent", "workdir")
            if row.get(name) is not None
        }
        if not _WORKDIR.fullmatch(given.get("workdir", "/testbed")):
            raise _wrong(row, "workdir", f"{given['workdir']!r} is no absolute path of a work tree")
        hidden = _strings(row, "hidden_paths") if row.get("hidden_paths") is not None else ()
        if strange := [path for path in hidden if not path.strip("/") or ".." in path.split("/")]:
            raise _wrong(row, "hidden_paths", f"{strange[0]!r} is not a path below the work tree or the root")
        task = cls(
            **values,
            **tests,
            **{"patch": None, **given},
            grader=named,
            grading="" if swe_bench else _object(row, "grading"),
            difficulty=_difficulty(row),
            hidden_paths=hidden,
            not_passing=_strings(row, "not_passing") if row.get("not_passing") is not None else None,
            solutions=_touched(given.get("patch")),
            base_dir=base_dir.absolute(),
        )
        if not swe_bench:
            try:
                grader = graders.named(named)
            except ValueError as error:
                raise _wrong(row, "grader", str(error)) from error
            try:
                grader.check(task)
                grader.shares(task)
            except Exception as error:  # another package's code
                what = str(error) if isinstance(error, TaskError) else f"{type(error).__name__}: {error}"
                raise _wrong(row, "grading", what) from error
        return task

    def to_row(self) -> dict[str, Any]:
        """Return the row, which `from_row` reads back; its lists are JSON texts, as in the published data sets."""
        row: dict[str, Any] = {name: getattr(self, name) for name in (*COLUMNS, *OPTIONAL)}
        for name in (*_TESTS, "hidden_paths"):
            row[name] = json.dumps(row[name])
        if self.not_passing is not None:
            row["not_passing"] = json.dumps(self.not_passing)
        if self.grader == graders.SWE_BENCH:
            row |= {"grader": None, "grading": None}
        # Rows of before these columns have hashes by which evaluations are told apart.
        return {name: value for name, value in row.items() if name not in ("agent", "workdir") or value is not None}


def load_tasks(path: Path | str) -> list[Task]:
    """Read all tasks of a parquet file, in its order. Raises TaskError at the first thing that is wrong."""
    path = Path(path)
    try:
        table = pyarrow.parquet.read_table(path)
        present = [name for name in (*COLUMNS, *OPTIONAL) if name in table.column_names]
        rows = table.select(present).to_pylist()
    except (OSError, pyarrow.ArrowException, ValueError, OverflowError) as error:
        # The last two: a text that is not UTF-8, a time that Python cannot represent.
        raise TaskError(f"{path}: cannot be read as parquet: {' '.join(str(error).split())}") from error
    needed = ALWAYS if "grader" in present else COLUMNS  # what else a row lacks is said of the row
    missing = [name for name in needed if name not in table.column_names]
    if missing:
        raise TaskError(f"{path}: no column {', '.join(missing)}")
    if table.num_rows == 0:
        raise TaskError(f"{path}: has no rows")
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
    touched: dict[str, set[str]] = {}
    for task in tasks:
        touched.setdefault(task.repo, set()).update(task.solutions)
    return [replace(task, solutions=frozenset(touched[task.repo])) for task in tasks]


def _touched(patch: str | None) -> frozenset[str]:
    """Return the paths of a gold patch."""
    try:
        return frozenset(path for file in split((patch or "").encode()) for path in file.paths)
    except PatchError:  # admission finds that it cannot be applied
        return frozenset()


def log_parsers() -> frozenset[str]:
    """Return the names in swebench's registry of log parsers.

    Importing swebench takes seconds, so the names are read from its source unless it is already imported; in that
    case further parsers may have been registered.
    """
    loaded = sys.modules.get("swebench.harness.log_parsers")
    return frozenset(getattr(loaded, "PARSER_REGISTRY", ())) or _parsers_in_source()


@functools.cache
def _parsers_in_source() -> frozenset[str]:
    source = (_source() / "__init__.py").read_text()
    return frozenset(re.findall(r'^    "(\w+)": ', source, re.MULTILINE))


@functools.cache
def _failures_only() -> frozenset[str]:
    """Return the parsers of swebench that never report a test as passed: their source names no status but FAILED.

    Only with these parsers does a missing result mean that a test passed. Parsers that are aliases of one of them, that
    call one, or that are registered from outside are left out, because what they report is not known.
    """
    found: set[str] = set()
    for path in _source().glob("*.py"):
        for function in re.split(r"^(?=def )", path.read_text(), flags=re.MULTILINE):
            if set(re.findall(r"TestStatus\b(?:\.(\w+))?", function)) == {"FAILED"}:
                found.update(re.findall(r"\Adef (\w+)", function))
    return frozenset(found)


def _source() -> Path:
    found = importlib.util.find_spec("swebench")
    if found is None or not found.submodule_search_locations:
        raise TaskError("swebench is not installed: no task can be graded")
    return Path(found.submodule_search_locations[0], "harness", "log_parsers")


def _swe_bench_values(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts that SWE-bench's grader reads. Raises TaskError."""
    values = {name: _text(row, name) for name in _SWE_BENCH}
    parser, kind = values["log_parser"], values["eval_type"]
    if kind not in EVAL_TYPES:
        raise _wrong(row, "eval_type", f"{kind[:80]!r} is not one of {', '.join(EVAL_TYPES)}")
    if parser not in log_parsers():
        raise _wrong(row, "log_parser", f"swebench has no parser {parser[:80]!r}")
    if kind == "fail_only" and parser not in _failures_only():
        why = f"fail_only counts a test without a result as passed, and {parser} is no parser of failures only"
        raise _wrong(row, "eval_type", why)
    if problem := _unreadable(values["eval_script"]):
        raise _wrong(row, "eval_script", problem)
    return values


def _object(row: Mapping[str, Any], name: str) -> str:
    """Return the JSON text of an object, which a row has as such or as a mapping. Raises TaskError."""
    value = row.get(name)
    if isinstance(value, Mapping):
        value = json.dumps(value)
    text = _checked(row, name, value)
    try:
        if isinstance(json.loads(text), dict):
            return text
    except (ValueError, RecursionError):
        pass
    raise _wrong(row, name, "is no JSON object")


def _unreadable(script: str) -> str:
    """Return why no result of an eval script could ever be read; "" if there is no such reason."""
    if "\r\n" in script:
        return "has CRLF line ends, which bash takes for part of its words"
    missing = [marker for marker in MARKERS if marker not in script]
    return f"does not print {missing[0]!r}, so no result could be read" if missing else ""


def _wrong(row: Mapping[str, Any], name: str, what: str) -> TaskError:
    known = row.get("instance_id")
    printable = isinstance(known, str) and known.isprintable()
    return TaskError(f"{(known[:200] if printable else '') or 'no instance_id'}: {name}: {what}")


def _checked(row: Mapping[str, Any], name: str, value: Any) -> str:
    """Return a value that is text which files and programs accept. Raises TaskError for any other value."""
    if not isinstance(value, str):
        raise _wrong(row, name, "is missing" if value is None else f"is {type(value).__name__}, not text")
    if "\0" in value or value.encode(errors="ignore").decode() != value:
        raise _wrong(row, name, "has a character that no file or program takes (NUL, or half a surrogate pair)")
    if name in _ONE_LINE and not value.isprintable():
        raise _wrong(row, name, f"{value[:80]!r} has characters that cannot be printed")
    return value


def _text(row: Mapping[str, Any], name: str) -> str:
    value = _checked(row, name, row.get(name))
    # Only these two may be empty: nothing is graded by them or shown to the agent.
    if not value.strip() and name not in ("version", "base_commit"):
        raise _wrong(row, name, "is empty")
    return value


def _difficulty(row: Mapping[str, Any]) -> str | None:
    value = row.get("difficulty")
    if isinstance(value, float) and math.isnan(value):  # pandas has it in place of null
        return None
    if isinstance(value, int | float) and abs(value) < _LARGE:
        value = str(value)
    return None if value is None else _checked(row, "difficulty", value)


def _strings(row: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = row.get(name)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise _wrong(row, name, f"is neither a list nor the JSON text of one ({error})") from error
    elif hasattr(value, "tolist"):  # pandas returns lists as numpy arrays
        value = value.tolist()
    if not isinstance(value, list | tuple) or not all(isinstance(test, str) for test in value):
        raise _wrong(row, name, "is not a list of strings")
    return tuple(_checked(row, name, text) for text in value)
