"""Read the rows of a public set as they were published, from files on this machine or from the hub.

A file is .parquet, .jsonl or .json (a list of rows, or rows by instance id). A directory is laid out as a copy of a hub
repository: data files that are named after their split, at the top or in data/.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

_SUFFIXES = (".parquet", ".jsonl", ".json")
_BATCH = 256  # rows of a parquet file that are in memory at once; some sets have rows of 100 KB


class SourceError(ValueError):
    """Rows cannot be read. The message is one line that says where, and what to do."""


def read_rows(source: str, split: str | None, default_split: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file, a directory or a hub dataset ("owner/name").

    split: selects files of a directory, a split of a hub dataset, or rows of a file by their column `split`. None
    takes everything in a file or directory, and `default_split` of a hub dataset. Raises SourceError, also while the
    rows are iterated over.
    """
    path = Path(source)
    if path.is_dir():
        for file in _files(path, split):
            yield from _read(file)
    elif path.exists():
        yield from _of_split(path, split)
    elif path.suffix in _SUFFIXES or not re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        raise SourceError(f"{source}: no such file or directory, and not the name of a hub dataset (owner/name)")
    else:
        yield from _hub(source, split or default_split)


def _files(directory: Path, split: str | None) -> list[Path]:
    found = sorted(
        file
        for place in (directory, directory / "data")
        if place.is_dir()
        for file in place.iterdir()
        # test.parquet, test-00000-of-00001.parquet
        if file.suffix in _SUFFIXES and (split is None or file.name.split(".")[0].split("-")[0] == split)
    )
    if not found:
        which = f"of the split {split!r} " if split else ""
        raise SourceError(f"{directory}: no data file {which}({', '.join(_SUFFIXES)}) in it or in its data/")
    return found


def _of_split(path: Path, split: str | None) -> Iterator[dict[str, Any]]:
    for row in _read(path):
        if split is not None and "split" not in row:
            raise SourceError(f"{path}: the rows have no column split; omit --split")
        if split is None or row["split"] == split:
            yield row


def _read(path: Path) -> Iterator[dict[str, Any]]:
    try:
        if path.suffix == ".parquet":
            with pyarrow.parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=_BATCH):
                    yield from batch.to_pylist()
        elif path.suffix == ".jsonl":
            with path.open() as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield _row(json.loads(line), f"{path}: line {number}")
        elif path.suffix == ".json":
            content = json.loads(path.read_text())
            rows = content.values() if isinstance(content, dict) else content
            if not isinstance(content, dict | list):
                raise SourceError(f"{path}: neither a list of rows nor rows by instance id")
            for number, row in enumerate(rows):
                yield _row(row, f"{path}: row {number}")
        else:
            raise SourceError(f"{path}: the name must end in one of {', '.join(_SUFFIXES)}")
    except SourceError:
        raise
    except (OSError, pyarrow.ArrowException, ValueError, OverflowError, RecursionError) as error:
        # ValueError: not JSON, not UTF-8, a number of thousands of digits, a time that Python cannot represent.
        raise SourceError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error


def _row(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SourceError(f"{where}: {type(value).__name__}, not a row")
    return value


def _hub(name: str, split: str) -> Iterator[dict[str, Any]]:
    import datasets  # imported here because it takes seconds and only the hub needs it

    try:
        rows = datasets.load_dataset(name, split=split)
    except Exception as error:  # errors of network, names, splits and formats have no common class
        message = " ".join(str(error).split())
        raise SourceError(f"hub dataset {name}, split {split}: {type(error).__name__}: {message}") from error
    yield from rows
