"""Fine-tuning data: the format of parquet files of token ids, in rows (for SFT) or in preference pairs (for DPO).

``rl.sft.episodes`` makes them of episodes, and ``rl.ingest sft`` of recorded conversations and of teachers' replies.
They are used as they are: nothing is decoded, templated or encoded again.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.compute
import pyarrow.parquet

from rollout import files
from rollout.proxy.garbage import keep_imports

ROWS = ("input_ids", "loss_mask")
PAIRS = ("prompt_ids", "chosen_ids", "rejected_ids")  # TRL's names
NAME = "state_id"  # the column that says what a row was made of
_TYPES = {NAME: pyarrow.string(), "loss_mask": pyarrow.list_(pyarrow.int8())}
_IDS = pyarrow.list_(pyarrow.int32())

TOKENIZER = b"tokenizer"  # the key of ``digest`` in a file's metadata
_AT_ONCE = 64

Row = tuple[list[int], ...]  # the columns of ROWS or PAIRS


class RowsError(ValueError):
    """Data cannot be trained on. The message is one line that says which, why, and what to do."""


def digest(tokenizer: Any) -> str:
    """Return a digest of a Hugging Face tokenizer's vocabulary, by which ids are known to be its own."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def length(row: Row) -> int:
    """Return how many tokens a model reads at once: those of a row, or of a pair's prompt and its longer reply."""
    first, *replies = row
    return len(first) if len(row) == len(ROWS) else len(first) + max(map(len, replies))


def write(path: Path, names: Sequence[str], rows: Iterable[Sequence[Any]], tokenizer: Any = None) -> int:
    """Write rows with the columns ``names`` to a parquet file, in one step; return how many.

    tokenizer: the one that made the ids, so that ``read`` knows. If ``rows`` raises, no file is made.
    """
    metadata = None if tokenizer is None else {TOKENIZER: digest(tokenizer)}
    schema = pyarrow.schema([(name, _TYPES.get(name, _IDS)) for name in names], metadata)
    made, left = 0, iter(rows)
    with (
        files.replacing(path, synced=True) as new,
        pyarrow.parquet.ParquetWriter(new, schema, compression="zstd") as writer,
    ):
        while some := list(itertools.islice(left, _AT_ONCE)):
            columns = map(pyarrow.array, zip(*some, strict=True), schema.types)
            writer.write_table(pyarrow.table(list(columns), schema=schema))
            made += len(some)
    return made


def check_columns(path: Path, names: Sequence[str]) -> None:
    """Raise RowsError unless ``path`` is a parquet file with these columns of token ids or masks."""
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


def read(path: Path, names: Sequence[str], tokenizer: Any) -> Iterator[Row]:
    """Yield the rows (ROWS) or pairs (PAIRS) of a file. tokenizer: the one of the policy that will be trained.

    Raises RowsError if they are not there, cannot be read or trained on, or were made with another tokenizer.
    """
    check_columns(path, names)
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if (file.schema_arrow.metadata or {}).get(TOKENIZER) != digest(tokenizer).encode():
                raise RowsError(
                    f"{path}: its ids are not of the policy's tokenizer; make it with `python -m rl.ingest sft "
                    "--tokenizer POLICY`"
                )
            number = 0
            for batch in file.iter_batches(_AT_ONCE, columns=list(names)):
                for row in zip(*(batch.column(name).to_pylist() for name in names), strict=True):
                    number += 1
                    if names == ROWS and not _trainable(*row):
                        raise RowsError(
                            f"{path}: row {number}: the mask does not fit the ids, or makes the first one a target"
                        )
                    yield row
    except (OSError, pyarrow.ArrowException) as error:
        raise RowsError(f"{path}: {error}") from error


def _trainable(ids: list[int], mask: list[int]) -> bool:
    return bool(ids and mask) and len(ids) == len(mask) and not mask[0]


# Once per process. verl collects garbage after every update; with all that its trainer imports, that takes 0.16 s of a
# core, which for a model of a few million parameters is more than the update.
_keep_imports = functools.cache(keep_imports)


class TokenRows:
    """This dataset has the columns ``input_ids`` and ``loss_mask`` of parquet files, for verl's ``data.custom_cls``.

    The signature is verl's. Items are tensors ``[tokens]``: input_ids, position_ids, loss_mask.

    Raises:
        ValueError: a row is empty or longer than ``data.max_length``, its mask has another length, or the mask of its
            first token is 1 (no token predicts the first one).
    """

    def __init__(self, parquet_files, tokenizer, config, processor=None, max_samples: int = -1):
        table = pyarrow.parquet.read_table(parquet_files, columns=list(ROWS))
        if max_samples > 0:
            table = table.slice(0, max_samples)
        # Arrays, not lists: a Python integer takes seven times as much memory as a token.
        self.ids, self.masks = table["input_ids"], table["loss_mask"]
        count = functools.partial(pyarrow.compute.call_function, "list_value_length")
        lengths, masks = (count([column]).to_numpy() for column in (self.ids, self.masks))
        for i, (length, masked) in enumerate(zip(lengths, masks, strict=True)):
            if not 0 < length <= config.max_length:
                raise ValueError(f"row {i}: {length} tokens, allowed are 1 to {config.max_length}")
            if masked != length:
                raise ValueError(f"row {i}: {length} tokens but a mask of {masked}")
            if self.masks[i][0].as_py():
                raise ValueError(f"row {i}: the first token cannot be a target")

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        _keep_imports()
        long = functools.partial(torch.tensor, dtype=torch.long)
        ids, mask = (column[index].values.to_numpy(zero_copy_only=False) for column in (self.ids, self.masks))
        return {"input_ids": long(ids), "position_ids": torch.arange(len(ids)), "loss_mask": long(mask)}
