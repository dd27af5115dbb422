"""Convert rows of a public set, from local files or the hub, to the SWE-bench v5 rows that the trainer reads.

    python -m rl.data.convert SET [SOURCE] --out tasks.parquet [filters]

SET is one of swe-bench, swe-bench-lite, swe-bench-verified, swe-bench-multilingual, swe-bench-pro, swe-bench-live,
swe-smith, swe-gym, swe-rebench, swe-rebench-v2, r2e-gym, harbor, or module:attribute, a task source of another package.
SOURCE is a .parquet, .jsonl or .json file, a directory of such files (or of Harbor's tasks), or a dataset on the hub
(default: the set's own). A row that cannot be converted is refused with a reason: the screen shows how many for each
reason, and a JSON file beside the output lists them. Exit status: 0 rows were converted, 1 no row could be converted, 2
the source, the options or the filters are wrong.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from rewards.patch import PatchError
from rewards.task import COLUMNS, OPTIONAL, Task, TaskError
from rl.data.card import write_card
from rl.data.fields import Row, RowError, Why, label
from rl.data.filters import Selection, share_of, split
from rl.data.rates import other_than
from rl.data.sets import ConversionOptions, source_named
from rl.data.source import SourceError, read_rows
from rollout import program
from rollout.files import replacing, write

# A task's columns, and the set that a row is from.
_SCHEMA = pyarrow.schema([(name, pyarrow.string()) for name in (*COLUMNS, *OPTIONAL, "set")])
_LONGEST = 300  # characters of a refusal's detail
_ROW_GROUP = 500  # rows; each column of a row group must stay under 2 GiB


@dataclass(frozen=True)
class Refusal:
    """A refused row is reported with its number in the source (from 0), its id ("" if unknown) and the reason."""

    number: int
    instance_id: str
    why: Why
    detail: str


def convert(rows: Iterable[Row], name: str, options: ConversionOptions) -> tuple[list[dict[str, Any]], list[Refusal]]:
    """Return the tasks of the source `name`, in its order and with lists as lists, and the rows that were refused."""
    source = source_named(name)
    converted: dict[str, dict[str, Any]] = {}
    refused = []
    for number, row in enumerate(rows):
        try:
            made: dict[str, Any] = {"difficulty": None, "FAIL_TO_PASS": [], **source.convert(row, options), "set": name}
            _check(made, options.out)
            if made["instance_id"] in converted:
                raise RowError(Why.TWICE)
            converted[made["instance_id"]] = made
        except Exception as error:
            if not isinstance(error, RowError | PatchError) and ":" not in name:
                raise
            refusal = error if isinstance(error, RowError) else RowError(*_why(error))
            known = label(row.get("instance_id")) or label(row.get("commit_hash")) or ""
            refused.append(Refusal(number, _line(known), refusal.why, _line(refusal.detail)))
    return list(converted.values()), refused


def _why(error: Exception) -> tuple[Why, str]:
    """Return the reason for which a row is refused. Another package's source may raise anything."""
    if isinstance(error, PatchError):
        return Why.BAD_PATCH, str(error)
    return Why.INVALID, f"{type(error).__name__}: {error}"


def _line(text: str) -> str:
    """Return a text as one line that can be printed, and that people read to its end."""
    return " ".join(text[:_LONGEST].encode(errors="backslashreplace").decode().split())


def _check(row: Row, base_dir: Path) -> None:
    """Raise RowError for a row that the trainer would reject at load."""
    try:
        Task.from_row(row, base_dir)
    except TaskError as error:
        why = Why.NO_PARSER if ": log_parser: " in str(error) else Why.INVALID
        raise RowError(why, str(error).removeprefix(f"{row.get('instance_id')}: ")) from error


def write_tasks(path: Path, rows: Sequence[Row], more: Iterable[str] = ()) -> None:
    """Write rows to a parquet file, with lists as JSON texts. The same rows give the same bytes, and the file appears
    whole or not at all. more: names of further columns of texts."""
    schema = pyarrow.schema([*_SCHEMA, *((name, pyarrow.string()) for name in more)])
    with replacing(path) as new, pyarrow.parquet.ParquetWriter(new, schema) as file:
        for start in range(0, len(rows), _ROW_GROUP):
            texts = [_texts(row) for row in rows[start : start + _ROW_GROUP]]
            file.write_table(pyarrow.Table.from_pylist(texts, schema=schema))


def write_parts(parts: Mapping[Path, Sequence[Row]], did: str, more: Iterable[str] = (), **told: Any) -> None:
    """Write task files, each with a card: of the first, which says what was done, and of rows that are held out.

    An empty part has no file: an older one would be mistaken for this command's. more, told: as for `write_tasks` and
    `write_card`.
    """
    for path, rows in parts.items():
        if rows:
            write_tasks(path, rows, more)
            write_card(path, did, **told)
        else:
            path.unlink(missing_ok=True)
        did = "held out"


def _texts(row: Row) -> dict[str, Any]:
    return {name: json.dumps(value) if isinstance(value, list | tuple | dict) else value for name, value in row.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = _parser()
    args = parser.parse_args(arguments)
    try:
        info = source_named(args.set)
    except ValueError as error:
        parser.error(f"SET {error}")
    source, heldout = args.source or info.hub, args.out.with_name(f"{args.out.stem}.heldout{args.out.suffix}")
    if not source:
        parser.error(f"SOURCE is missing: {args.set} is not on the hub")
    for out in (args.out, heldout):
        other_than(parser, Path(source), out)
    try:
        recipes: dict[str, Any] = {}
        if args.recipes:
            recipes = {str(row.get("instance_id")): row for row in read_rows(args.recipes, None, info.split)}
        options = ConversionOptions(
            recipes, args.regression, args.out.parent, args.without_network, args.reward, args.threshold, args.scripts
        )
        rows, refused = convert(info.read(source, args.split), args.set, options)
        args.instance_ids = _ids(args.instance_ids)
        selection = Selection(**{field.name: getattr(args, field.name) for field in fields(Selection)})
        chosen, dropped = selection.apply(rows)
        if rows and not chosen:
            drops = ", ".join(f"{name} drops {count}" for name, count in dropped.items())
            raise SourceError(f"the filters leave none of {len(rows)} rows: {drops}")
        if missing := set(selection.instance_ids) - {row["instance_id"] for row in rows}:
            raise SourceError(f"--instance-ids: not in the source, or refused: {', '.join(sorted(missing))}")
    except SourceError as error:
        return program.failed(f"error: {error}", 2)
    files = {args.out: chosen}
    if args.heldout_share is not None:
        training, rest = split(chosen, args.heldout_share, args.heldout_by, args.split_seed)
        files = {args.out: training, heldout: rest}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    whys = Counter(one.why for one in refused)
    write_parts(files, "converted", set=args.set, source_of_rows=source, refused=whys)
    files = {path: part for path, part in files.items() if part}
    report = args.out.with_name(f"{args.out.stem}.convert.json")
    summary = {
        "set": args.set,
        "source": source,
        "read": len(rows) + len(refused),
        "mapped": len(rows),
        "refused": dict(whys),
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


def _ids(values: Sequence[str]) -> set[str]:
    """Return the instance ids in `values`, where @FILE stands for the ids in a file. Raises SourceError."""
    try:
        return {
            id_ for value in values for id_ in (Path(value[1:]).read_text().split() if value[:1] == "@" else [value])
        }
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"--instance-ids: {error}") from error


def _parser() -> argparse.ArgumentParser:
    parser = program.parser("python -m rl.data.convert", __doc__)
    add = parser.add_argument
    add("set", metavar="SET")
    add(
        "source", nargs="?", metavar="SOURCE", help="file, directory or hub dataset (default: the set's own on the hub)"
    )
    add("--out", type=Path, required=True, help="the parquet file to write")
    add("--split", help="default: all of a file or directory, the set's usual split on the hub")
    add("--recipes", help="SWE-bench v5 rows (as SOURCE) that complete rows from before version 5, by instance id")
    add(
        "--regression",
        choices=("all", "same-files"),
        default="all",
        help="SWE-smith: keep the PASS_TO_PASS tests of all files, or of those with a FAIL_TO_PASS test (faster)",
    )
    add("--scripts", type=Path, metavar="DIR", help="SWE-bench Pro: a checkout of scaleapi/SWE-bench_Pro-os")
    add("--without-network", action="store_true", help="Harbor: convert tasks that want a network, and give them none")
    add("--reward", default="reward", metavar="KEY", help="Harbor: the key of reward.json that counts (reward)")
    add("--threshold", type=share_of, default=1.0, metavar="X", help="Harbor: the reward that resolves (1)")
    add = parser.add_argument_group("filters").add_argument
    add("--repo", dest="repos", nargs="+", default=[], metavar="PATTERN", help='e.g. django/django or "pydata/*"')
    add("--instance-ids", nargs="+", default=[], metavar="ID", help="ids that must be there, or @FILE with such ids")
    add("--difficulty", dest="difficulties", nargs="+", default=[], metavar="VALUE", help='e.g. "<15 min fix"')
    add("--min-failing", type=int, metavar="N", help="FAIL_TO_PASS tests, at least")
    add("--max-failing", type=int, metavar="N", help="FAIL_TO_PASS tests, at most")
    add("--min-statement", type=int, metavar="N", help="characters of the problem statement, at least")
    add("--max-statement", type=int, metavar="N", help="characters of the problem statement, at most")
    add("--shuffle", type=int, metavar="SEED", help="a random order, the same for the same seed and rows")
    add("--limit", type=int, metavar="N", help="the first N rows that pass the filters")
    add = parser.add_argument_group("held-out rows, in a second file OUT.heldout.parquet").add_argument
    add("--heldout-share", type=share_of, metavar="X", help="about this share, between 0 and 1")
    add("--heldout-by", choices=("repo", "instance"), default="repo", help="hold out whole repositories, or instances")
    add("--split-seed", type=int, default=0, metavar="SEED", help="another seed gives another split")
    return parser


if __name__ == "__main__":
    program.end(main)
