"""This module makes preference pairs from records: two replies of the policy to the same tokens, one in a resolved
episode of a task and one in an unresolved one.

As in rows, nothing is encoded again. What comes after the two replies is left out: the policy has not said all of it.
Pairs that are given (``rl.ingest sft`` makes them of teachers' answers) are taken as they are.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from rl.data.choice import Entry, Rules, choose
from rl.tune.given import PAIRS, read_given
from rollout import files
from rollout.records import Record, path_of, unpack_ids

_IDS = pyarrow.list_(pyarrow.int32())
_SCHEMA = pyarrow.schema([(name, _IDS) for name in PAIRS])

Pair = tuple[list[int], list[int], list[int]]


def parting(chosen: Record, rejected: Record) -> Pair | None:
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


def pairs_of(sources: Sequence[Path]) -> Iterator[Pair]:
    """Yield the pairs of all sources: each resolved episode with an unresolved one of its task, none of them twice, and
    none that says the same as another. Raises FileNotFoundError."""
    tasks: dict[str, list[Entry]] = defaultdict(list)
    for entry in choose(sources, Rules()).entries:
        if entry.graded:
            tasks[entry.task].append(entry)
    for entries in tasks.values():
        bad = [entry.record() for entry in entries if not entry.facts["resolved"]]
        seen = set()
        for entry in (entry for entry in entries if entry.facts["resolved"]):
            good = entry.record()
            for other in bad:
                pair = parting(good, other)
                if pair is not None and (key := tuple(map(tuple, pair))) not in seen:
                    seen.add(key)
                    bad.remove(other)
                    yield pair
                    break


def write_pairs(sources: Sequence[Path], path: Path, max_length: int, tokenizer: Any = None) -> tuple[int, int]:
    """Write the pairs to a parquet file with TRL's columns, in one step; return how many, and how many were longer than
    ``max_length`` tokens and left out. A source that is a .parquet file gives pairs as they are, which must be of the
    policy's ``tokenizer``.

    Raises RowsError for a file that does not have them, and FileNotFoundError.
    """
    given = [read_given(one, PAIRS, tokenizer) for one in sources if one.suffix == ".parquet"]
    kept, too_long = [], 0
    for pair in itertools.chain(pairs_of([one for one in sources if one.suffix != ".parquet"]), *given):
        fits = len(pair[0]) + max(len(pair[1]), len(pair[2])) <= max_length
        too_long += not fits
        kept += [pair] if fits else []
    columns = [pyarrow.array([pair[n] for pair in kept], _IDS) for n in range(3)]
    with files.replacing(path, synced=True) as new:
        pyarrow.parquet.write_table(pyarrow.table(columns, schema=_SCHEMA), new)
    return len(kept), too_long
