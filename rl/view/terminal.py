"""Look at runs in the terminal, read-only: their episodes, and one of them whole. docs/records.md

    python -m rollout.records RUN [WORD...]     list the episodes whose lines have these words, or figures: turns=20:
    python -m rollout.records RUN EPISODE       read one: what was asked, said and answered, verdict, patch

RUN is the directory of a training run, an evaluation, a collection, rounds or a selection, or one record file. EPISODE
is a name, or the beginning of one that no other has. ``python -m rollout.view`` shows more, in a browser.

Exit status: 0 something was shown, 1 nothing was, or a record is broken, 2 RUN does not exist.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from rl.view.index import Index, IndexEntry, caches
from rl.view.runs import FILTERS, FilterError, RunView, chosen
from rl.view.texts import cut
from rl.view.turns import EpisodeReading, Part, Turn, read
from rollout import program
from rollout.records.reading import CorruptRecordError

_HEAD = ("episode", "split", "step", "verdict", "reward", "turns", "rows", "sampled", "seconds", "flags")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = program.parser("python -m rollout.records", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory, or one record file")
    parser.add_argument("words", nargs="*", metavar="EPISODE|WORD", help="an episode, or what lines must have")
    args = parser.parse_args(arguments)
    try:
        index = Index(args.run, caches())
        index.extend()
        entries = index.entries
        found = [one for one in entries if args.words and one.name.startswith(args.words[0])]
        exact = [one for one in found if one.name == args.words[0]] or found
        if len(args.words) == 1 and len(exact) == 1:
            print("\n".join(episode(read(index.record(exact[0])))))
        else:
            found = fitting(entries, args.words, RunView(index).masked)
            for line in listing(found):
                print(line)
    except FileNotFoundError as error:
        return program.failed(f"records: {error}", 2)
    except (FilterError, CorruptRecordError, OSError) as error:
        return program.failed(f"records: {error}")
    for said in (*index.torn, *index.damage):
        print(f"records: {said}", file=sys.stderr)
    if not found:
        return program.failed(f"records: nothing found under {args.run}")
    return 1 if index.damage else 0


def fitting(entries: Sequence[IndexEntry], words: Sequence[str], masked: bool = False) -> list[IndexEntry]:
    """Return the episodes that have all words in their lines; NAME=VALUE is a filter of the viewer's list. masked: as
    the run is. Raises FilterError."""
    query = dict(word.split("=", 1) for word in words if "=" in word)
    if unknown := query.keys() - FILTERS:
        raise FilterError(f"{min(unknown)}=: no filter; there are {', '.join(sorted(FILTERS))}")
    plain = [word.lower() for word in words if "=" not in word]
    kept = {id(one) for one in chosen(entries, query, masked)}
    return [one for one in entries if id(one) in kept and all(word in " ".join(_cells(one)).lower() for word in plain)]


def listing(entries: Sequence[IndexEntry]) -> Iterator[str]:
    """Yield a line per episode below a heading, in columns."""
    rows = [_HEAD, *map(_cells, entries)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    for row in rows if entries else ():
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


def _cells(entry: IndexEntry) -> tuple[str, ...]:
    one = entry.facts
    reward = "-" if one["reward"] is None else f"{one['reward']:.3g}"
    figures = [str(one[name]) for name in ("turns", "rows", "tokens_sampled")] + [str(round(one["wall_s"]))]
    flags = " ".join(map(str, one["flags"]))
    return entry.name, one["split"], str(one["step"]), one["verdict"], reward, *figures, flags


def episode(reading: EpisodeReading) -> Iterator[str]:
    """Yield the lines of an episode as a person reads it."""
    record = reading.record
    yield f"{record.episode}  task {record.task}  {record.split} step {record.step}  attempt {record.attempt}"
    for turn in reading.main:
        yield from _turn(turn)
    yield f"\n--- patch\n{record.patch.decode('utf-8', 'replace')}"
    verdict = {key: value for key, value in record.verdict.items() if key != "log_tail"}
    for name, value in (("agent", record.agent), ("verdict", verdict), ("seconds", record.timing)):
        yield f"--- {name:<9} {json.dumps(value)}"
    yield f"--- ended     {reading.ending}"
    rows = ", ".join(f"{row.prompt_tokens}+{row.response_tokens}" for row in record.rows)
    yield f"--- rows      {len(record.rows)} ({rows} tokens)"
    yield from (f"--- finding   {finding}" for finding in reading.findings)


def _turn(turn: Turn) -> Iterator[str]:
    told = [f"turn {turn.number}", turn.kind.replace("main", ""), f"{turn.tokens} tokens" if turn.tokens else ""]
    told += [turn.stop, f"row {turn.rows[0]}" if turn.rows else f"not trained: {turn.untrained}"]
    yield f"\n--- {', '.join(one for one in told if one)}"
    yield from (f"    {turn.notice}" for _ in [0] if turn.notice)
    for role, text in [*turn.asked, *(("user", text) for text in turn.told)]:
        yield textwrap.indent(_cut(text), f"    {role}> ", lambda line: True)
    for part in turn.parts:
        yield from _part(part)


def _part(part: Part) -> Iterator[str]:
    yield f"    ({part.text})" if part.kind == "thinking" else part.written
    for turn in part.inner:
        yield from (textwrap.indent(line, "        ") for line in _turn(turn))
    if part.result:
        yield textwrap.indent(_cut(part.result.text), "    => ", lambda line: True)


def _cut(text: str) -> str:
    shown = cut(text)
    return f"{shown.head}\n[{shown.left_out:,} more characters]\n{shown.tail}" if shown.left_out else shown.head
