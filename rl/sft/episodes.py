"""Training rows and preference pairs, made of the records of episodes or given in files.

A row is a training row of its record, with mask 1 on exactly the tokens that the policy sampled and that the agent has
read; sub-agents and compacted threads have rows of their own. A pair is two replies of the policy to the same tokens,
one in a resolved episode of a task and one in an unresolved one. What comes after the two replies is left out: the
policy has not said all of it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewards.verdict import Outcome
from rl.data.choice import ChoiceRules, choose, paired
from rl.traces.rows import PAIRS, ROWS, Row, RowsError, length, read, write
from rollout.audit import audit_tokens
from rollout.proxy.engine import TextCodec
from rollout.records import Record, path_of, unpack_ids
from rollout.records.reading import CorruptRecordError, Reader, record_at


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

    def kept() -> Iterator[Row]:
        for record, found in _found(sources, tokenizer):
            rows = [row for row in found if length(row) <= max_length]
            if record is None:
                counts.given += len(rows)
            else:
                counts.episodes += 1
                counts.resolved += record.verdict["outcome"] == Outcome.RESOLVED
                counts.without += not rows
            counts.too_long += len(found) - len(rows)
            counts.rows += len(rows)
            counts.tokens += sum(map(length, rows))
            counts.trained += sum(sum(mask) for _, mask in rows)
            counts.longest = max([counts.longest, *map(length, rows)])
            yield from rows
            show(counts)
        if not counts.rows:
            if counts.too_long:
                raise RowsError(f"all {counts.too_long} rows are longer than {max_length} tokens (sft.max_length)")
            raise RowsError(f"there is no row; {counts.episodes} episodes have a verdict")

    write(path, ROWS, kept())
    return counts


def _found(sources: Sequence[Path], tokenizer: Any) -> Iterator[tuple[Record | None, list[Row]]]:
    """Yield each episode with its rows, and None with each given row."""
    seen = set[str]()
    for source in sources:
        if source.suffix == ".parquet":
            yield from ((None, [row]) for row in read(source, ROWS, tokenizer))
            continue
        try:
            for record in Reader(source):
                if record.episode not in seen and record.verdict["outcome"] != Outcome.INFRA_FAILURE:
                    seen.add(record.episode)
                    _check(record, tokenizer)
                    yield record, list(rows_of(record))
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


# --- preference pairs


def parting(chosen: Record, rejected: Record) -> Row | None:
    """Return prompt, chosen and rejected ids where the first threads of two episodes part; None if nowhere.

    They part in a reply, and both replies are trained on; up to there all tokens are the same.
    """
    prompt: list[int] = []
    for one, other in zip(_thread(chosen), _thread(rejected), strict=False):
        ids, others = (unpack_ids(record.nodes[number].ids) for record, number in ((chosen, one), (rejected, other)))
        if ids != others:
            said = one in _trained(chosen) and other in _trained(rejected)
            return (prompt, ids, others) if said else None
        prompt += ids
    return None


def _thread(record: Record) -> list[int]:
    """Return the nodes of the first conversation: the path to the end of the first row."""
    return path_of(record.nodes, max(record.rows[0].nodes)) if record.rows else []


def _trained(record: Record) -> set[int]:
    return {number for row in record.rows for number in row.nodes}


def pairs_of(sources: Sequence[Path], tokenizer: TextCodec | None = None) -> Iterator[Row]:
    """Yield the pairs of all sources, none that says the same as another. Raises FileNotFoundError, and RowsError for
    the records for which ``write_rows`` does."""
    seen = set()

    @functools.lru_cache(64)
    def stored(path: Path, offset: int) -> Record:
        record = record_at(path, offset)
        _check(record, tokenizer)
        return record

    entries = choose(sources, ChoiceRules()).entries
    for *_, pair in paired(entries, lambda a, b: parting(stored(a.path, a.offset), stored(b.path, b.offset))):
        if pair is not None and (key := tuple(map(tuple, pair))) not in seen:
            seen.add(key)
            yield pair


def write_pairs(sources: Sequence[Path], path: Path, max_length: int, tokenizer: Any = None) -> tuple[int, int]:
    """Write the pairs to a parquet file, in one step; return how many, and how many were longer than ``max_length``
    tokens and left out. A source that is a .parquet file gives pairs as they are. All must be of the policy's
    ``tokenizer``.

    Raises RowsError for a file that does not have them, for the records for which ``write_rows`` does, and if no pair
    is left; FileNotFoundError.
    """
    too_long = 0

    def kept() -> Iterator[Row]:
        nonlocal too_long
        given = (read(one, PAIRS, tokenizer) for one in sources if one.suffix == ".parquet")
        none = True
        for pair in itertools.chain(*given, pairs_of([one for one in sources if one.suffix != ".parquet"], tokenizer)):
            if length(pair) <= max_length:
                none = False
                yield pair
            else:
                too_long += 1
        if none:
            left = f"{too_long} pairs are longer than {max_length} tokens" if too_long else "there is no pair"
            raise RowsError(
                f"{left}: DPO needs resolved and unresolved episodes of a task that part in a reply to the same tokens"
            )

    return write(path, PAIRS, kept()), too_long
