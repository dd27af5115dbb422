"""Bring rows of a public set to SWE-bench v5 rows, which the trainer reads: from local files or the hub.

    python -m rl.data.convert SET [SOURCE] --out tasks.parquet [filters]

SET is one of swe-bench, swe-bench-lite, swe-bench-verified, swe-bench-multilingual, swe-smith, swe-gym, swe-rebench,
r2e-gym. SOURCE is a .parquet, .jsonl or .json file, a directory of such, or a dataset on the hub (the set's own unless
given). What cannot be mapped is refused, each row with its reason: a table on the screen, and row by row in a JSON file
beside the output. Exit status: 0 rows were written, 1 no row could be mapped, 2 source, options or filters are wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from rewards.task import COLUMNS, OPTIONAL, Task, TaskError
from rl.data.select import Selection, split
from rl.data.sets import SETS, Options, Refused, Row, Why
from rl.data.source import SourceError, read_rows
from rollout.files import replacing, write

# Beside what a task has: the set that a row is from.
_SCHEMA = pyarrow.schema([(name, pyarrow.string()) for name in (*COLUMNS, *OPTIONAL, "set")])
_ROW_GROUP = 500  # rows; a column of a group must stay under 2 GiB


@dataclass(frozen=True)
class Refusal:
    """One refused row. number: its place in the source, from 0."""

    number: int
    instance_id: str
    why: Why
    detail: str


def convert(rows: Iterable[Row], name: str, options: Options) -> tuple[list[dict[str, Any]], list[Refusal]]:
    """The v5 rows of a set, in its order, with lists as lists, and the rows that were refused."""
    converted: dict[str, dict[str, Any]] = {}
    refused = []
    for number, row in enumerate(rows):
        try:
            made = {"difficulty": None, **SETS[name].convert(row, options), "set": name}
            _check(made)
            if made["instance_id"] in converted:
                raise Refused(Why.TWICE)
            converted[made["instance_id"]] = made
        except Refused as refusal:
            known = row.get("instance_id") or row.get("commit_hash")
            refused.append(Refusal(number, str(known or ""), refusal.why, refusal.detail))
    return list(converted.values()), refused


def _check(row: Row) -> None:
    """Refuse what the trainer would refuse at load."""
    try:
        Task.from_row(row, Path())
    except TaskError as error:
        why = Why.NO_PARSER if ": log_parser: " in str(error) else Why.INVALID
        raise Refused(why, str(error).removeprefix(f"{row['instance_id']}: ")) from error


def write_tasks(path: Path, rows: Sequence[Row]) -> None:
    """Write rows with lists as JSON texts. The same rows give the same bytes; the file appears whole or not at all."""
    with replacing(path) as new, pyarrow.parquet.ParquetWriter(new, _SCHEMA) as file:
        for start in range(0, len(rows), _ROW_GROUP):
            texts = [_texts(row) for row in rows[start : start + _ROW_GROUP]]
            file.write_table(pyarrow.Table.from_pylist(texts, schema=_SCHEMA))


def _texts(row: Row) -> dict[str, Any]:
    return {name: json.dumps(value) if isinstance(value, list | tuple) else value for name, value in row.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    info = SETS[args.set]
    source = args.source or info.hub
    try:
        recipes = {}
        if args.recipes:
            recipes = {row.get("instance_id"): row for row in read_rows(args.recipes, None, info.split)}
        options = Options(recipes=recipes, regression=args.regression)
        rows, refused = convert(read_rows(source, args.split, info.split), args.set, options)
        selection = _selection(args)
        chosen, dropped = selection.apply(rows)
        if rows and not chosen:
            raise SourceError(f"the filters leave none of {len(rows)} rows: {_counts(dropped)}")
        if missing := set(selection.instance_ids) - {row["instance_id"] for row in rows}:
            raise SourceError(f"--instance-ids: not mapped: {', '.join(sorted(missing))}")
    except SourceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    files = {args.out: chosen}
    if args.heldout_share is not None:
        training, heldout = split(chosen, args.heldout_share, args.heldout_by, args.split_seed)
        files = {args.out: training, args.out.with_name(f"{args.out.stem}.heldout{args.out.suffix}"): heldout}
    files = {path: part for path, part in files.items() if part}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for path, part in files.items():
        write_tasks(path, part)
    report = args.out.with_name(f"{args.out.stem}.convert.json")
    summary = {
        "set": args.set,
        "source": source,
        "read": len(rows) + len(refused),
        "mapped": len(rows),
        "refused": dict(Counter(refusal.why for refusal in refused)),
        "dropped": dict(dropped),
        "written": {path.name: len(part) for path, part in files.items()},
        "rows": [vars(refusal) for refusal in refused],
    }
    write(report, json.dumps(summary, indent=1) + "\n")
    _show(summary, refused)
    print(f"{' '.join(map(str, files)) or 'nothing written'}; every refused row: {report}")
    return 0 if rows else 1


def _show(summary: Mapping[str, Any], refused: Sequence[Refusal]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "rows", "for example", title=f"{summary['set']} from {summary['source']}", title_justify="left")
    table.add_row("read", str(summary["read"]))
    for why, count in sorted(summary["refused"].items(), key=lambda item: -item[1]):
        first = next(refusal for refusal in refused if refusal.why == why)
        table.add_row(f"refused: {why}", str(count), f"{first.instance_id or f'row {first.number}'}: {first.detail}")
    for name, count in summary["dropped"].items():
        table.add_row(f"dropped: {name}", str(count))
    for name, count in summary["written"].items():
        table.add_row(f"written: {name}", str(count))
    Console(highlight=False).print(table)


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} drops {count}" for name, count in counter.items())


def _selection(args: argparse.Namespace) -> Selection:
    ids: set[str] = set()
    for value in args.instance_ids:
        if value.startswith("@"):
            try:
                ids |= set(Path(value[1:]).read_text().split())
            except OSError as error:
                raise SourceError(f"--instance-ids {value}: {error}") from error
        else:
            ids.add(value)
    return Selection(
        repos=args.repo,
        instance_ids=ids,
        difficulties=args.difficulty,
        min_failing=args.min_failing,
        max_failing=args.max_failing,
        min_statement=args.min_statement,
        max_statement=args.max_statement,
        shuffle=args.shuffle,
        limit=args.limit,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rl.data.convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("set", choices=SETS, metavar="SET")
    add("source", nargs="?", metavar="SOURCE", help="file, directory or hub dataset; else the set's own on the hub")
    add("--out", type=Path, required=True, help="the parquet file to write")
    add("--split", help="of the source; else all of a file or directory, the set's usual one on the hub")
    add("--recipes", help="SWE-bench v5 rows (as SOURCE) that complete rows from before version 5, by instance id")
    add(
        "--regression",
        choices=("all", "same-files"),
        default="all",
        help="SWE-smith: PASS_TO_PASS tests of all files, or of those that have a FAIL_TO_PASS test (faster)",
    )
    filters = parser.add_argument_group("filters")
    add = filters.add_argument
    add("--repo", nargs="+", default=[], metavar="PATTERN", help='e.g. django/django or "pydata/*"')
    add("--instance-ids", nargs="+", default=[], metavar="ID", help="or @FILE with ids; each must be there")
    add("--difficulty", nargs="+", default=[], metavar="VALUE", help='in the set\'s words, e.g. "<15 min fix"')
    add("--min-failing", type=int, metavar="N", help="FAIL_TO_PASS tests, at least")
    add("--max-failing", type=int, metavar="N", help="FAIL_TO_PASS tests, at most")
    add("--min-statement", type=int, metavar="N", help="characters of the problem statement, at least")
    add("--max-statement", type=int, metavar="N", help="characters of the problem statement, at most")
    add("--shuffle", type=int, metavar="SEED", help="a random order, the same for the same seed and rows")
    add("--limit", type=int, metavar="N", help="the first N rows that pass the filters")
    heldout = parser.add_argument_group("held-out rows, in a second file OUT.heldout.parquet")
    add = heldout.add_argument
    add("--heldout-share", type=_share, metavar="X", help="about this share, 0 to 1")
    add("--heldout-by", choices=("repo", "instance"), default="repo", help="hold out whole repositories, or instances")
    add("--split-seed", type=int, default=0, metavar="SEED", help="another seed gives another split")
    return parser


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
