"""Fields of rows as other projects publish them: read them, and refuse rows whose fields cannot be used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from rewards.patch import PatchError
from rl.data.patches import FileChange, changes

Row = Mapping[str, Any]

_LARGE = 1e15


class Why(StrEnum):
    """Each member is a reason why a row is refused. docs/data.md explains them."""

    NO_ID = "no_instance_id"
    NO_STATEMENT = "no_problem_statement"
    NO_GOLD_PATCH = "no_gold_patch"
    NO_FAILING_TEST = "no_failing_test"  # without one, doing nothing may resolve the task
    NO_IMAGE = "no_image"
    NO_RECIPE = "no_recipe"  # nothing says how its tests are run
    NO_PARSER = "no_log_parser"
    BAD_TESTS = "bad_test_lists"
    BAD_PATCH = "bad_patch"
    UNSUPPORTED = "unsupported"
    INVALID = "invalid_row"
    TWICE = "instance_id_twice"


class RowError(Exception):
    """A row cannot be converted. `detail` is one line, and may be empty."""

    def __init__(self, why: Why, detail: str = "") -> None:
        super().__init__(f"{why}: {detail}" if detail else why)
        self.why = why
        self.detail = detail


def text(row: Row, name: str, why: Why) -> str:
    """Return a text field. Raises RowError, with the reason `why`, if it is missing, blank or not a text."""
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        raise RowError(why, f"{name} is {'empty' if isinstance(value, str) or value is None else type(value).__name__}")
    return value


def structure(value: Any, why: Why, name: str) -> Row:
    """Return a nested structure, which some copies of a set store as JSON text. Raises RowError, with the reason `why`,
    if `value` is neither; `name` is its name in the message."""
    value = _decoded(value, why, name)
    if not isinstance(value, dict):
        raise RowError(why, f"{name} is {'empty' if value is None else type(value).__name__}")
    return value


def test_names(row: Row, name: str) -> list[str]:
    """Return a list of test names, which a row stores as a list or as its JSON text; null is an empty list.

    Raises RowError for anything else, and if the list of failing tests is empty.
    """
    value = _decoded(row.get(name), Why.BAD_TESTS, name)
    if value is None:
        value = []
    if not isinstance(value, list) or not all(isinstance(test, str) for test in value):
        raise RowError(Why.BAD_TESTS, f"{name} is not a list of test names")
    if name == "FAIL_TO_PASS" and not value:
        raise RowError(Why.NO_FAILING_TEST, "FAIL_TO_PASS is empty")
    return value


def commands(value: Any) -> list[str]:
    """Return shell commands that a row stores as one text or as a list of texts; none for anything else."""
    lines = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    return [line for line in lines if isinstance(line, str) and line.strip()]


def label(value: Any) -> str | None:
    """Return a short text or number as text, None for anything else: no row is refused for what is only shown."""
    if isinstance(value, str):
        return value.strip() or None
    number = isinstance(value, int | float) and abs(value) < _LARGE  # which NaN is not
    return str(value) if number else None


def patched_files(row: Row, name: str, missing: Why) -> list[FileChange]:
    """Return the files that the patch in a field changes. Raises RowError: the reason is `missing` for an empty field
    and BAD_PATCH for a patch that cannot be read."""
    try:
        return changes(text(row, name, missing))
    except PatchError as error:
        raise RowError(Why.BAD_PATCH, f"{name}: {error}") from error


def common_fields(row: Row) -> dict[str, Any]:
    """Return the fields that all sets in SWE-bench's format have under the same names. Raises RowError."""
    instance_id = text(row, "instance_id", Why.NO_ID)
    patched_files(row, "patch", Why.NO_GOLD_PATCH)
    return {
        "instance_id": instance_id,
        "repo": text(row, "repo", Why.INVALID),
        "version": label(row.get("version")) or "",
        "base_commit": text(row, "base_commit", Why.INVALID),
        "problem_statement": text(row, "problem_statement", Why.NO_STATEMENT),
        "FAIL_TO_PASS": test_names(row, "FAIL_TO_PASS"),
        "PASS_TO_PASS": test_names(row, "PASS_TO_PASS"),
        "patch": row["patch"] if row["patch"].endswith("\n") else row["patch"] + "\n",
    }


def _decoded(value: Any, why: Why, name: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RowError(why, f"{name} is not JSON: {error}") from error
