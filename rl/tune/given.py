"""This module reads rows that were made before: parquet files of ``rl.ingest sft``, with token ids of one tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

# Columns of token ids and masks.
ROWS = ("input_ids", "loss_mask")
PAIRS = ("prompt_ids", "chosen_ids", "rejected_ids")  # TRL's names

TOKENIZER = b"tokenizer"  # the key of ``digest`` in a file's metadata
_AT_ONCE = 64


class RowsError(ValueError):
    """Data cannot be trained on. The message is one line that says which, why, and what to do."""


def digest(tokenizer: Any) -> str:
    """Return a digest of a Hugging Face tokenizer's vocabulary, by which ids are known to be its own."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def check_columns(path: Path, names: Sequence[str]) -> None:
    """Raise RowsError unless ``path`` is a parquet file with these columns."""
    try:
        schema = pyarrow.parquet.read_schema(path)
    except FileNotFoundError as error:
        raise RowsError(f"no file {path.absolute()}") from error
    except (OSError, pyarrow.ArrowException) as error:
        raise RowsError(f"{path}: {error}") from error
    kinds = {field.name: field.type for field in schema}
    for name in names:
        kind = kinds.get(name)
        if kind is None or not (pyarrow.types.is_list(kind) and pyarrow.types.is_integer(kind.value_type)):
            raise RowsError(f"{path} has no column {name} of integers in lists; `python -m rl.ingest sft` writes such")


def read_given(path: Path, names: Sequence[str], tokenizer: Any) -> Iterator[tuple[list[int], ...]]:
    """Yield the rows of a file: its columns ``names``. tokenizer: the one of the policy that will be trained.

    Raises RowsError if they are not there, cannot be read, or were made with another tokenizer.
    """
    check_columns(path, names)
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if (file.schema_arrow.metadata or {}).get(TOKENIZER) != digest(tokenizer).encode():
                raise RowsError(
                    f"{path}: its ids are not of the policy's tokenizer; make it with `python -m rl.ingest sft "
                    "--tokenizer POLICY`"
                )
            for batch in file.iter_batches(_AT_ONCE, columns=list(names)):
                yield from zip(*(batch.column(name).to_pylist() for name in names), strict=True)
    except (OSError, pyarrow.ArrowException) as error:
        raise RowsError(f"{path}: {error}") from error
