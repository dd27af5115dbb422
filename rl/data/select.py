"""Choose episodes by what was measured of them: a part of what runs have recorded, as data for training.

    python -m rl.data.select RUN... --out OUT [rules]
    python -m rl.data.select RUN... --tasks tasks.parquet --tasks-out FILE --rate 0.1:0.9 [rules]

RUN is the directory of a training run, an evaluation, a collection or another selection, or one record file. OUT reads
like a run: OUT/episodes/*.cep holds the chosen records, so rollout.records, rollout.audit, rl.export and every other
reader of runs works on it. OUT/selection.json names the sources and the rules, and how many episodes each rule removed.

Rules are applied in the order of this help. Without any, only these episodes are left out: second
copies, those in which the audit (without its check of texts, which needs the tokenizer) finds something, and those that
the infrastructure failed. With --tasks, the tasks that --rate and --min-episodes leave are written, too, with their
measured resolve rate and its interval in columns; without --out nothing else is. A broken record is a line on stderr
and is left out.

Exit status: 0 something was chosen, 1 nothing was or the disk failed, 2 the input or the options are wrong, 130
interrupted. A command that fails leaves nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import re
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from rewards.task import Task, TaskError, load_tasks
from rl.data.card import write_card
from rl.data.choice import ALIKE, PATTERNS, Choice, ChoiceRules, SelectError, choose
from rl.data.rates import write_rated
from rl.run.screen import Screen
from rollout import files, program
from rollout.records import SELECTION, VERSION, RecordWriter
from rollout.records.reading import CorruptRecordError, payload_at


def summary(chosen: Choice) -> dict[str, Any]:
    """Return what selection.json holds."""
    counts = Counter(entry.path for entry in chosen.entries)
    sources: dict[Path, dict[str, Any]] = {}
    for path, read in chosen.read.items():
        run = path.parent.parent if path.parent.name == "episodes" else path.parent
        source = sources.setdefault(run, {"run": str(run), **about(run), "files": []})
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        file = {"file": str(path.relative_to(run)), "sha256": digest, "read": read, "chosen": counts[path]}
        source["files"].append(file)
    return {
        "episodes": len(chosen.entries),
        "tasks": len({entry.task for entry in chosen.entries}),
        "resolved": sum(entry.facts["resolved"] for entry in chosen.entries),
        "models": dict(Counter(entry.facts["model"] for entry in chosen.entries).most_common()),
        "read": sum(chosen.read.values()),
        "left_out": chosen.damage,
        "taken": [{"rule": rule, "episodes": count} for rule, count in chosen.taken],
        "rules": asdict(chosen.rules),
        "versions": {"claude-code-rl": version("claude-code-rl"), "records": VERSION},
        "sources": list(sources.values()),
    }


def about(run: Path) -> dict[str, Any]:
    """Return what a directory says of itself: its kind, key and experiment; of a selection, its sources."""
    for kind in ("run", "evaluation", "collection", "preparation", "selection"):
        try:
            data = (run / f"{kind}.json").read_bytes()
            told = msgspec.json.decode(data, type=dict)
        except (OSError, msgspec.MsgspecError):
            continue
        if kind == "selection":
            return {"kind": kind, "sources": told.get("sources")}
        key = told.get("key") or hashlib.sha256(data).hexdigest()[:16]
        return {"kind": "training" if kind == "run" else kind, "key": key, **_experiment(run / "config.yaml")}
    return {"kind": "records"}


def _experiment(config: Path) -> dict[str, str]:
    if not config.exists():
        return {}
    found = re.search(r"^  experiment_name: (.+)$|^name: (.+)$", config.read_text(errors="replace"), re.MULTILINE)
    return {"experiment": found[1] or found[2]} if found else {}


def write(chosen: Choice, told: Mapping[str, Any], out: Path) -> None:
    """Write a selection and its ``summary`` into the directory ``out``: a record file for each file of the sources, and
    selection.json. Raises CorruptRecordError if a record has changed since it was chosen."""
    places = defaultdict(list)
    for entry in chosen.entries:
        places[entry.path].append(entry.offset)
    for number, (path, offsets) in enumerate(places.items()):
        writer = RecordWriter(out / "episodes", f"{number:05d}-{path.stem}", synced=False)
        try:
            for offset in offsets:
                writer.copy(payload_at(path, offset))
        finally:
            writer.close()
    said = [msgspec.json.encode(label).decode() for entry in chosen.entries for label in entry.labels]
    if said:
        (out / "labels").mkdir()
        files.write(out / "labels" / "selection.jsonl", "".join(f"{line}\n" for line in said))
    text = msgspec.json.format(msgspec.json.encode(told), indent=1).decode()
    files.write(out / SELECTION, text + "\n", synced=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    args = _parser().parse_args(arguments)
    given: dict[str, Any] = {one.name: getattr(args, one.name) for one in fields(ChoiceRules)}
    given["ranges"] = dict(args.ranges)
    rules = ChoiceRules(**given)
    return status_of(lambda screen: _select(args, rules, screen), SelectError, TaskError)


def status_of(command: Callable[[Screen], int], *wrong: type[Exception]) -> int:
    """Run a command that writes all or nothing, and return its exit status.

    wrong: what it raises for wrong input or options.
    """
    try:
        with Screen() as screen:
            return command(screen)
    except (*wrong, FileNotFoundError) as error:
        return program.failed("\n".join(f"error: {line}" for line in str(error).splitlines()), 2)
    except (OSError, CorruptRecordError) as error:
        return program.failed(f"stopped: {error}; nothing was written")
    except KeyboardInterrupt:
        return program.failed("interrupted; nothing was written", 130)


def inside(out: Path, runs: Sequence[Path]) -> bool:
    """Tell whether a directory is one of the runs, or inside of one."""
    return any(run.resolve() in (out.resolve(), *out.resolve().parents) for run in runs)


def _check(args: argparse.Namespace) -> None:
    """Raise SelectError for options that do not go together, and for an OUT that must not be written."""
    out = args.out
    if not out and not args.tasks:
        raise SelectError("neither --out, for episodes, nor --tasks, for tasks, is given")
    if args.tasks and not (out or args.tasks_out):
        raise SelectError("--tasks needs --tasks-out FILE, or --out")
    if args.tasks_out and not args.tasks:
        raise SelectError("--tasks-out needs --tasks FILE: the tasks to choose from")
    if out and inside(out, args.runs):
        raise SelectError(
            f"--out {out} is inside of a RUN, which would have its episodes twice then; name another place"
        )
    if out and out.exists() and not (args.overwrite and (out / SELECTION).exists()):
        how = "is no selection, so it stays; move it away" if args.overwrite else "is there already; add --overwrite"
        raise SelectError(f"--out {out} {how}, or name another one")


def _select(args: argparse.Namespace, rules: ChoiceRules, screen: Screen) -> int:
    """Choose, show and write; return the exit status."""
    _check(args)
    tasks = load_tasks(args.tasks) if args.tasks else []
    chosen = choose(args.runs, rules, lambda done, total: screen.show("reading", done >> 20, total >> 20, "MiB"))
    screen.show("writing")
    told = summary(chosen)
    screen.clear()
    for finding in chosen.damage:
        print(f"warning: {finding}", file=sys.stderr)
    screen.print("\n".join(_lines(told)))
    commands = []
    if tasks:
        found = sum(task.instance_id in chosen.rates for task in tasks)
        screen.print(f"{found:>7} of {len(tasks)} tasks were measured and fit")
        place = args.tasks_out or args.out / "tasks.parquet"
        commands.append(("train on the tasks", f"data.train_files=[{place}]"))
        if not found:
            return program.failed("error: no task is left; nothing was written")
    if args.out and not chosen.entries:
        return program.failed("error: the rules leave no episode; nothing was written")
    if args.out:
        with files.making(args.out, args.overwrite) as new:
            write(chosen, told, new)
            if tasks and not args.tasks_out:
                _write_tasks(args.tasks, new / "tasks.parquet", tasks, chosen)
        commands += [
            (what, f"{sys.orig_argv[0]} -m rollout.{what} {args.out}") for what in ("view", "records", "audit")
        ]
    if args.tasks_out:
        args.tasks_out.parent.mkdir(parents=True, exist_ok=True)
        _write_tasks(args.tasks, args.tasks_out, tasks, chosen)
    screen.next(*commands)
    return 0


def _write_tasks(source: Path, out: Path, tasks: Sequence[Task], chosen: Choice) -> None:
    write_rated(source, out, tasks, chosen.rates)
    write_card(out, "chosen by rate", source, runs=sorted({str(path.parent) for path in chosen.read}))


def _lines(told: dict[str, Any]) -> Iterator[str]:
    yield f"{told['read']:>7} episodes read"
    yield from (f"{one['episodes']:>7} taken by: {one['rule']}" for one in told["taken"])
    yield f"{told['episodes']:>7} chosen, of {told['tasks']} tasks, {told['resolved']} of them resolved"
    yield from (f"{count:>7} by {model}" for model, count in told["models"].items())


def _parser() -> argparse.ArgumentParser:
    parser = program.parser("python -m rl.data.select", __doc__)
    add = parser.add_argument
    add("runs", type=Path, nargs="+", metavar="RUN", help="directory of a run, or one record file")
    add("--out", type=Path, help="the directory to write")
    add("--overwrite", action="store_true", help="replace OUT if it is there")
    add("--tasks", type=Path, metavar="FILE", help="task file to choose from; its rows go to OUT/tasks.parquet")
    add("--tasks-out", type=Path, metavar="FILE", help="write them to this file instead")
    add = parser.add_argument_group("rules").add_argument
    add("--no-audit", dest="audited", action="store_false", help="keep episodes in which the audit finds something")
    for flag, (name, _) in PATTERNS.items():
        add(flag, dest=name, nargs="+", default=[], metavar="PATTERN", help=f"{name} to choose from")
    for flag, which in (("--label", "labels"), ("--no-label", "not_labels")):
        text = f"labels that people have given, {'one of which it must have' if which == 'labels' else 'none of which'}"
        add(flag, dest=which, nargs="+", default=[], metavar="PATTERN", help=text)
    text = "tasks with a measured resolve rate between these, neither included; of graded episodes that are left here"
    add("--rate", type=_range, metavar="LOW:HIGH", help=text)
    text = "tasks with at least so many graded episodes (default: %(default)s)"
    add("--min-episodes", type=int, default=1, metavar="N", help=text)
    either = parser._action_groups[-1].add_mutually_exclusive_group()
    either.add_argument("--resolved", action="store_true", default=None, help="resolved ones only")
    either.add_argument("--unresolved", dest="resolved", action="store_false", help="graded and not resolved ones only")
    add("--no-flags", dest="unflagged", action="store_true", help="without anything suspicious in the patch")
    text = "figures within bounds, both included: turns=:20 tokens_sampled=500:8000 cut_replies=:0 (docs/traces.md)"
    add("--range", dest="ranges", nargs="+", type=_named_range, default=[], metavar="FIGURE=LOW:HIGH", help=text)
    text = "one of those of a task with the same patch and the same sampled ids (said), or with the same patch"
    add("--dedup", dest="same", choices=list(ALIKE), help=text)
    text = "the best N of each task: by reward, then without flags, then by fewest turns, then by fewest sampled tokens"
    add("--best", type=_count, metavar="N", help=text)
    add("--per-task", type=_count, metavar="N", help="N of each task, by lot")
    add("--limit", type=_count, metavar="N", help="N in all, by lot")
    add("--seed", type=int, default=0, metavar="SEED", help="of the lot (default: %(default)s)")
    return parser


def _range(text: str) -> tuple[float, float]:
    low, colon, high = text.partition(":")
    try:
        bounds = float(low or -math.inf), float(high or math.inf)
    except ValueError:
        bounds = (1.0, 0.0)
    if not colon or not bounds[0] <= bounds[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is no range; write LOW:HIGH, of which one may be left out")
    return bounds


def _named_range(text: str) -> tuple[str, tuple[float, float]]:
    name, equals, bounds = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: write FIGURE=LOW:HIGH")
    return name, _range(bounds)


def _count(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return int(text)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    program.end(main)
