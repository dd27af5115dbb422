"""This module makes rows for supervised fine-tuning from the records of episodes, and takes those that are given.

Rows are ids and masks and are used as they are: nothing is decoded, templated or encoded again. Each is a training row
of its record, with mask 1 on exactly the tokens that the policy sampled and that the agent has read; sub-agents and
compacted threads have rows of their own. Given rows are those of recorded conversations (``rl.ingest sft``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.compute
import pyarrow.parquet

from rewards.verdict import Outcome
from rl.tune.given import ROWS, RowsError, read_given
from rollout import files
from rollout.audit import audit_tokens
from rollout.proxy.collector import keep_imports
from rollout.proxy.engine import TextCodec
from rollout.records import CorruptRecordError, Reader, Record, path_of, unpack_ids

_SCHEMA = pyarrow.schema([("input_ids", pyarrow.list_(pyarrow.int32())), ("loss_mask", pyarrow.list_(pyarrow.int8()))])
_AT_ONCE = 64  # episodes, or given rows


Row = tuple[list[int], list[int]]  # ids and mask


@dataclass
class Counts:
    """Counts are what was made of episodes. ``tokens``: of all rows; ``trained``: those with mask 1; ``longest``:
    tokens of the longest row; ``too_long``: rows that were left out; ``without``: episodes that have no row (left);
    ``given``: rows that come from no episode."""

    episodes: int = 0
    resolved: int = 0
    rows: int = 0
    tokens: int = 0
    trained: int = 0
    longest: int = 0
    too_long: int = 0
    without: int = 0
    given: int = 0


def rows_of(record: Record) -> Iterator[Row]:
    """Yield ids and mask of each training row of an episode."""
    for row in record.rows:
        path = path_of(record.nodes, max(row.nodes))
        pieces = [(unpack_ids(record.nodes[number].ids), int(number in row.nodes)) for number in path]
        yield [token for ids, _ in pieces for token in ids], [trained for ids, trained in pieces for _ in ids]


def write_rows(
    sources: Sequence[Path],
    path: Path,
    *,
    max_length: int,
    tokenizer: TextCodec | None = None,
    show: Callable[[Counts], object] = lambda counts: None,
) -> Counts:
    """Write the rows of all episodes that ``sources`` have recorded to a parquet file, in one step.

    A source that is a .parquet file gives rows. An episode that is there twice counts once, one that the infrastructure
    failed not at all. Rows with more than ``max_length`` tokens are left out, never cut. tokenizer: the policy's; with
    it the sampled tokens must spell what the record says, and the given rows must have been made with it. show: is
    called with what was counted so far.

    Raises RowsError for a record that is damaged, has none of the engine's tokens, or those of another tokenizer, for
    such given rows, and if no row is left; FileNotFoundError for a source that is not there.
    """
    counts = Counts()
    with files.replacing(path, synced=True) as new, pyarrow.parquet.ParquetWriter(new, _SCHEMA) as writer:
        batch: list[Row] = []
        for number, (record, found) in enumerate(_found(sources, tokenizer), 1):
            rows = [row for row in found if len(row[0]) <= max_length]
            if record is None:
                counts.given += len(rows)
            else:
                counts.episodes += 1
                counts.resolved += record.verdict["outcome"] == Outcome.RESOLVED
                counts.without += not rows
            counts.too_long += len(found) - len(rows)
            counts.rows += len(rows)
            counts.tokens += sum(len(ids) for ids, _ in rows)
            counts.trained += sum(sum(mask) for _, mask in rows)
            counts.longest = max([counts.longest, *(len(ids) for ids, _ in rows)])
            batch += rows
            if number % _AT_ONCE == 0:
                writer.write_table(_table(batch))
                batch = []
                show(counts)
        writer.write_table(_table(batch))
        if not counts.rows:
            raise RowsError(_nothing(counts, max_length))
    return counts


def _found(sources: Sequence[Path], tokenizer: Any) -> Iterator[tuple[Record | None, list[Row]]]:
    """Yield each episode with its rows, and None with each given row."""
    seen = set[str]()
    for source in sources:
        if source.suffix == ".parquet":
            yield from ((None, [row]) for row in _given(source, tokenizer))
            continue
        for record in _records(source):
            if record.episode not in seen and record.verdict["outcome"] != Outcome.INFRA_FAILURE:
                seen.add(record.episode)
                _check(record, tokenizer)
                yield record, list(rows_of(record))


def _given(source: Path, tokenizer: Any) -> Iterator[Row]:
    for number, (ids, mask) in enumerate(read_given(source, ROWS, tokenizer), 1):
        if not ids or not mask or len(ids) != len(mask) or mask[0]:
            raise RowsError(f"{source}: row {number}: the mask does not fit the ids, or makes the first one a target")
        yield ids, mask


def _nothing(counts: Counts, max_length: int) -> str:
    if counts.too_long:
        return f"all {counts.too_long} rows are longer than {max_length} tokens (sft.max_length)"
    return f"there is no row; {counts.episodes} episodes have a verdict"


def _records(source: Path) -> Iterator[Record]:
    try:
        yield from Reader(source)
    except CorruptRecordError as error:
        raise RowsError(f"{error}; `python -m rl.data.select` leaves out what is damaged") from error


def _check(record: Record, tokenizer: TextCodec | None) -> None:
    """Raise RowsError unless the record's rows are what the engine and the trainer have seen."""
    sampled = [node for node in record.nodes if node.logprobs is not None]
    if not sampled and record.agent.get("turns"):
        raise RowsError(f"{record.episode}: a hosted model's episode has no token ids; export its text (rl.export)")
    for finding in audit_tokens(record):
        raise RowsError(f"{record.episode}: {finding}; `python -m rl.data.select` leaves such episodes out")
    if tokenizer is not None and sampled:
        node = max(sampled, key=lambda one: one.length)
        ids = unpack_ids(node.ids)
        if tokenizer.decode(ids[:-1] if node.ended else ids, skip_special_tokens=False) != node.text:
            raise RowsError(
                f"{record.episode}: its tokens are those of {record.model}, which the policy's tokenizer reads as "
                "something else; fine-tune a policy with the same tokenizer"
            )


def _table(rows: Sequence[Row]) -> pyarrow.Table:
    columns = [[ids for ids, _ in rows], [mask for _, mask in rows]]
    return pyarrow.table([pyarrow.array(c, f.type) for c, f in zip(columns, _SCHEMA, strict=True)], schema=_SCHEMA)


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
        files = [parquet_files] if isinstance(parquet_files, str) else list(parquet_files)
        table = pyarrow.concat_tables(pyarrow.parquet.read_table(file, schema=_SCHEMA) for file in files)
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
