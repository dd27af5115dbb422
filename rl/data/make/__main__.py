"""Make tasks from Python packages: bugs are planted in a source distribution, and its own tests are the hidden tests.

    python -m rl.data.make NAME==VERSION ... --out tasks.parquet [--limit 50] [--seed 0] [options]

A package is fetched from the index that pip uses, and all its code runs in bubblewrap's boxes. Beside the output are
written: OUT.repos/ (a repository per task), OUT.packages/ (sources and environments), OUT.card.md and .json (what it
was made of, yields), and a journal (OUT.make.jsonl): the same command continues one that was killed. Exit status: 0
tasks were made, 1 none was, or it ended early, 2 the packages or the options are wrong, 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl.checks.alike import in_verified, overlaps
from rl.data.card import beside
from rl.data.convert import write_parts
from rl.data.filters import share_of, split
from rl.data.make import made_card as cards
from rl.data.make.candidates import FIX, NAMES, WRITTEN, Candidate
from rl.data.make.history import fixes
from rl.data.make.prepare import PreparedPackage, prepare
from rl.data.make.sources import MakeError, name_of
from rl.data.make.statement import LEVELS
from rl.data.make.trials import at_level
from rl.data.make.work import Order, TaskMaker
from rl.data.make.written import bugs
from rl.run.journal import Journal, JournalError
from rl.run.screen import Screen, this_command
from rollout import program
from rollout.sandbox import SandboxError

_MORE = ("maker", "licence", "shown", *(f"statement_{level}" for level in LEVELS))


def make(args: argparse.Namespace, order: Order, screen: Screen) -> int:
    """Make the tasks of all packages, write the files, and return how many tasks there are.

    Raises MakeError if nothing can be made of any package; JournalError, SandboxError, OSError.
    """
    out: Path = args.out
    out.parent.mkdir(parents=True, exist_ok=True)
    journal = Journal(out.with_name(f"{out.stem}.make.jsonl"))
    try:
        made, refused = [], []
        for spec in args.packages:
            try:
                made.append(_of_package(spec, args, order, journal, screen))
            except MakeError as error:
                if len(args.packages) == 1:
                    raise
                refused.append(str(error))
                screen.say(f"left out: {error}")
    finally:
        journal.close()
    rows = [at_level(row, args.level) for _, maker in made for row in maker.rows]
    kept = {out: rows}
    if args.heldout_share is not None:
        training, heldout = split(rows, args.heldout_share, "repo", order.seed)
        found = {one.instance_id: one for one in overlaps(training, heldout) if one.kind in ("diff", "statement")}
        refused += [f"{one.instance_id}: its {one.kind} is that of {one.other}" for one in found.values()]
        training = [row for row in training if row["instance_id"] not in found]
        kept = {out: training, out.with_name(f"{out.stem}.heldout{out.suffix}"): heldout}
    told = _told(args, order, made, refused)
    write_parts(kept, "made", _MORE, text=cards.to_markdown(told), **told)
    return len(rows)


def _of_package(
    spec: str, args: argparse.Namespace, order: Order, journal: Journal, screen: Screen
) -> tuple[PreparedPackage, TaskMaker]:
    out: Path = args.out

    def check(name: str) -> None:
        if in_verified(f"pypi/{name}") and not args.allow_verified:
            raise MakeError(f"{spec}: SWE-bench Verified has tasks of it; choose another package, or --allow-verified")

    check(name_of(spec))

    def doing(what: str, done: int | None = None, total: int | None = None) -> None:
        screen.show(f"{spec}: {what}", done, total)

    directory = out.with_name(f"{out.stem}.packages")
    prepared = prepare(spec, directory, args.requires, args.allow_copies, doing)
    check(prepared.package.name)  # of a repository, whose directory has any name
    why = "".join(f"; {count} not: {reason}" for reason, count in [*prepared.unused.items()][:3])
    screen.say(
        f"{prepared.package.label}: {len(prepared.stable)} of {len(prepared.order)} tests pass each time, "
        f"{prepared.seconds:.0f} s{why}"
    )
    for where, why in prepared.broken[:3]:
        screen.say(f"{prepared.package.label}: not collected: {where}: {why.strip().splitlines()[-1:]}")

    def tell(tasks: int, tried: int) -> None:
        screen.show(f"{prepared.package.label}: tasks", tasks, order.limit, f"{tried} edits tried")

    def first(sources: Mapping[str, str]) -> Iterator[Candidate]:
        if FIX in order.makers and Path(spec).is_dir():
            yield from fixes(Path(spec), prepared, sources)
        if WRITTEN in order.makers and args.bugs:
            yield from bugs(args.bugs, prepared, sources)

    maker = TaskMaker(prepared, out.with_name(f"{out.stem}.repos"), order, journal, tell, first)
    tell(0, 0)
    asyncio.run(maker.run())
    screen.say(f"{prepared.package.label}: {len(maker.rows)} tasks of {len(maker.records)} edits")
    return prepared, maker


def _told(
    args: argparse.Namespace, order: Order, made: Sequence[tuple[PreparedPackage, TaskMaker]], refused: Sequence[str]
) -> dict[str, Any]:
    """Return what cards tell of this command."""
    tasks = sum(len(maker.rows) for _, maker in made)
    seconds = sum(maker.seconds for _, maker in made) / order.jobs
    card: dict[str, Any] = {
        "seed": order.seed,
        "level": args.level,
        "limit": order.limit,
        "jobs": order.jobs,
        "python": sys.version.split()[0],
        "minutes_per_100_tasks": round(seconds / 60 / tasks * 100, 1) if tasks else None,
        "refused": list(refused),
        "packages": [cards.of_package(prepared, maker.records, maker.rows) for prepared, maker in made],
    }
    card["summary"] = cards.summary(card)
    return card


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    args = _parser().parse_args(arguments)
    if min(args.limit, args.jobs) < 1:
        _parser().error("--limit and --jobs must be at least 1")
    from rl.config.compose import compose  # takes seconds
    from rl.episodes.setup import rules_from

    order = Order(args.limit, args.seed, args.makers, args.jobs, rules_from(compose([])))
    screen = Screen(every_s=10.0)
    try:
        tasks = make(args, order, screen)
    except (MakeError, JournalError) as error:
        screen.clear()
        return program.failed(f"error: {error}", 2)
    except (SandboxError, OSError) as error:
        screen.clear()
        print(f"stopped: {' '.join(str(error).split())}", file=sys.stderr)
        screen.next(("continue", this_command()))
        return 1
    except KeyboardInterrupt:  # the journal has what was done
        screen.next(("continue", this_command()))
        return 130
    screen.clear()
    if not tasks:
        return program.failed("no task was made: see what became of the edits in the journal")
    if args.out.exists():  # all can be held out
        admitted = args.out.with_name(f"{args.out.stem}.admitted{args.out.suffix}")
        screen.next(
            ("what was made", f"less {beside(args.out, 'card.md')}"),
            ("admit", f"{sys.orig_argv[0]} -m rl.data.admit {args.out} --out {admitted}"),
        )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = program.parser("python -m rl.data.make", __doc__)
    add = parser.add_argument
    add(
        "packages",
        nargs="+",
        metavar="NAME==VERSION",
        help="or the path of a source distribution (.tar.gz), or of a git repository, whose fixes are undone",
    )
    add("--out", type=Path, required=True, help="the parquet file to write")
    add("--limit", type=int, default=50, metavar="N", help="tasks of each package, at most (default: 50)")
    add("--seed", type=int, default=0, help="another seed tries other edits (default: 0)")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="boxes at a time (default: cores)")
    add("--makers", nargs="+", choices=NAMES, default=NAMES, metavar="MAKER", help=f"of {', '.join(NAMES)}")
    add(
        "--level",
        type=int,
        choices=LEVELS,
        default=LEVELS[1],
        help="how much statements say; 1: one sentence (default: 2)",
    )
    add("--requires", nargs="+", default=[], metavar="REQ", help="what tests need beside what the packages name")
    add("--bugs", type=Path, metavar="FILE", help="bugs that another model has written (rl.teachers.bugs)")
    add("--heldout-share", type=share_of, metavar="X", help="hold out about this share of packages, in a second file")
    add("--allow-verified", action="store_true", help="take packages of SWE-bench Verified's repositories, too")
    add("--allow-copies", action="store_true", help="take packages that a local box has another copy of, too")
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SLURM's; boxes are closed as after an interrupt
    program.end(main)
