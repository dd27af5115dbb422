"""The directory of an export: rows are written into its files, and it appears whole or not at all."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections import Counter
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any, BinaryIO

from rollout import files

ABOUT = "export.json"
_BATCH = 200  # rows of a parquet file in memory


class ExportError(ValueError):
    """An export is impossible. The message is one line."""


class Sink:
    """A sink takes what an export writes. ``directory``: where it is made; ``rows``: how many each file has got;
    ``known``: what an export that is appended to has exported before."""

    def __init__(self, directory: Path, known: Iterable[str] = ()) -> None:
        self.directory, self.known = directory, frozenset(known)
        self.rows: Counter[str] = Counter()
        self._open: dict[str, BinaryIO] = {}
        self._tables: dict[str, _Table] = {}

    def row(self, name: str, row: dict[str, Any]) -> None:
        """Append a row to a file of JSON lines."""
        if name not in self._open:
            self._open[name] = open(self.directory / name, "ab")  # noqa: SIM115  closed by close
        self._open[name].write(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        self.rows[name] += 1

    def table_row(self, name: str, row: dict[str, Any]) -> None:
        """Append a row to a parquet file. Its values are texts, and lists of objects, whose keys may differ.

        In a file without their type, Hugging Face's library gives every object the keys of all, with None.
        """
        if name not in self._tables:
            self._tables[name] = _Table(self.directory / name, row)
        self._tables[name].add(row)
        self.rows[name] += 1

    def text(self, name: str, text: str) -> None:
        """Write a file."""
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, text, synced=True)

    def close(self) -> None:
        """Close all files; they are on the disk when this returns."""
        for name, file in (*self._open.items(), *self._tables.items()):
            file.close()
            files.sync(self.directory / name)


class _Table:
    """A table is a parquet file that names types for Hugging Face's library, and goes on with an old file."""

    def __init__(self, path: Path, row: dict[str, Any]) -> None:
        import datasets
        import pyarrow.parquet

        kinds = {list: datasets.List(datasets.Json()), str: datasets.Value("string")}
        self._features = datasets.Features({name: kinds[type(value)] for name, value in row.items()})
        self._waiting: list[dict[str, Any]] = []
        if not path.exists():
            self._writer = pyarrow.parquet.ParquetWriter(path, self._features.arrow_schema)
            return
        old = path.rename(path.with_suffix(".old"))
        with pyarrow.parquet.ParquetFile(old) as file:
            self._writer = pyarrow.parquet.ParquetWriter(path, file.schema_arrow)
            for batch in file.iter_batches(batch_size=_BATCH):
                self._writer.write_batch(batch)
        old.unlink()

    def add(self, row: dict[str, Any]) -> None:
        self._waiting.append(row)
        if len(self._waiting) == _BATCH:
            self._flush()

    def _flush(self) -> None:
        import datasets

        table = datasets.Dataset.from_list(self._waiting, features=self._features).data.table
        self._writer.write_table(table.cast(self._writer.schema))
        self._waiting = []

    def close(self) -> None:
        if self._waiting:
            self._flush()
        self._writer.close()


@contextlib.contextmanager
def sink(out: Path, kind: str, mode: str) -> Generator[Sink]:
    """Yield a sink for an export of ``kind`` to ``out``. ``mode``: new, overwrite or append.

    Raises ExportError if ``out`` is there and may not be touched, or is an export of another kind.
    """
    before: dict[str, Any] = {}
    if out.exists():
        if mode == "new":
            raise ExportError(f"--out {out} is there already; add --overwrite or --append, or name another one")
        try:
            before = json.loads((out / ABOUT).read_text())
            same = before["format"] == kind
        except (OSError, ValueError, KeyError, TypeError):
            raise ExportError(f"--out {out} is no export, so it stays; move it away, or name another one") from None
        if mode == "append" and not same:
            raise ExportError(f"--out {out} is an export to {before['format']}; {kind} cannot be appended to it")
    with files.making(out, overwrite=mode != "new") as new:
        if mode == "append" and before:
            shutil.copytree(out, new, dirs_exist_ok=True, symlinks=True)
        made = Sink(new, before.get("exported", ()) if mode == "append" else ())
        try:
            yield made
        finally:
            made.close()
