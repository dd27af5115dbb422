"""Admit the tasks that grade right: the gold patch resolves them, each time, and no patch does not.

    python -m rl.data.admit tasks.parquet --out admitted.parquet [--tries 3] [--jobs N] [sandbox=... key=value ...]

Every task is graded so many times with its gold patch and as often on its untouched tree, in boxes of the config's
sandbox group (configs/sandbox) and with its grading.timeout_s. Beside the output lie a report (OUT.admission.md and
.json) and the journal of all gradings: a command that was killed continues where it was. An infrastructure failure is
tried again (episode.infra_retries) and says nothing about the task: if it stays, the task is undecided, is not
admitted, and the next run of the same command grades it again. Exit status: 0 tasks were admitted, 1 none was, 2 the
input or the options are wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from rewards import grade as grading
from rewards.rules import Rules
from rewards.task import Task, TaskError, load_tasks
from rl.batch import Journal, JournalError, workers
from rl.data import findings as report
from rl.data.findings import Finding, Status
from rl.screen import Screen, this_command
from rollout import files
from rollout.episode import Boot

Done = Callable[[dict[str, Any]], None]


async def grade_tasks(
    tasks: Sequence[Task],
    boot: Boot,
    journal: Journal,
    *,
    tries: int,
    jobs: int,
    timeout_s: float,
    rules: Rules,
    infra_retries: int,
    settings: str = "",
    done: Done = lambda record: None,
) -> None:
    """Bring the journal to `tries` gradings of each kind for every task, `jobs` of them at the same time.

    rules: those of training, so that a gold patch that they would drop shows here. settings: what decides how a
    grading ends, e.g. the sandbox; gradings under others do not count.
    done: called with each new record. Raises JournalError.
    """
    wanted = iter(_wanted(tasks, journal, tries, settings))

    async def work() -> None:
        for task, kind, number in wanted:  # shared by the workers
            patch = (task.patch or "").encode() if kind == "gold" else None
            for attempt in range(infra_retries + 1):
                if attempt:
                    await asyncio.sleep(0.2 * 2**attempt)
                fresh = functools.partial(boot, task, None)
                verdict = await grading.grade(task, patch, fresh, timeout_s=timeout_s, rules=rules)
                unexpected = verdict.is_infra or (verdict.reason is None) != (kind == "gold")
                record = {
                    "task": task.instance_id,
                    "key": _key(task, settings),
                    "kind": kind,
                    "number": number,
                    "reason": verdict.reason and verdict.reason.value,
                    "detail": verdict.detail,
                    "infra": verdict.is_infra,
                    "seconds": round(verdict.seconds, 3),
                    # To see why; it names hidden tests, as everything in the trainer's files may.
                    "log_tail": verdict.log_tail if unexpected else "",
                }
                journal.append(record)
                done(record)
                if not verdict.is_infra:
                    break

    await workers(jobs, work)


def _wanted(tasks: Sequence[Task], journal: Journal, tries: int, settings: str) -> list[tuple[Task, str, int]]:
    """The gradings that the journal lacks. First one of each task, so that a run shows early what it is about."""
    there = {(r["task"], r["key"], r["kind"], r["number"]) for r in journal.records if not r["infra"]}
    return [
        (task, kind, number)
        for number in range(tries)
        for task in tasks
        if task.patch
        for kind in ("gold", "empty")
        if (task.instance_id, _key(task, settings), kind, number) not in there
    ]


@functools.cache
def _key(task: Task, settings: str) -> str:
    """Of everything that decides how the task is graded: a changed row is graded anew."""
    row = {name: value for name, value in task.to_row().items() if name != "difficulty"}
    text = json.dumps([row, settings], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def findings(tasks: Sequence[Task], journal: Journal, tries: int, settings: str) -> list[Finding]:
    """What the journal says about each task, in their order."""
    by_task: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in journal.records:
        if record["number"] < tries:
            by_task.setdefault((record["task"], record["key"]), []).append(record)
    return [
        report.finding(
            task.instance_id, by_task.get((task.instance_id, _key(task, settings)), []), tries, no_gold=not task.patch
        )
        for task in tasks
    ]


def write_admitted(source: Path, out: Path, tasks: Sequence[Task], admitted: set[str]) -> None:
    """Write the admitted rows with all their columns; snapshots in directories are named from the new place."""
    table = pyarrow.parquet.read_table(source)
    images = [
        f"dir:{os.path.relpath(task.snapshot, out.parent.resolve())}" if task.image.startswith("dir:") else task.image
        for task in tasks
    ]
    table = table.set_column(table.column_names.index("image"), "image", [images])
    table = table.filter(pyarrow.array([task.instance_id in admitted for task in tasks]))
    with files.replacing(out) as new:
        pyarrow.parquet.write_table(table, new)


class Progress:
    """Counts gradings as they are done and shows them."""

    def __init__(self, screen: Screen, total: int) -> None:
        self.total, self.done, self.outcomes, self._screen = total, 0, Counter[str](), screen

    def __call__(self, record: dict[str, Any]) -> None:
        self.done += not record["infra"]
        good = (record["reason"] is None) == (record["kind"] == "gold")
        self.outcomes["infrastructure" if record["infra"] else "as wanted" if good else "otherwise"] += 1
        note = ", ".join(f"{count} {outcome}" for outcome, count in self.outcomes.items())
        self._screen.show("gradings", self.done, self.total, note)


def admit(
    source: Path,
    out: Path,
    boot: Boot,
    *,
    tries: int,
    jobs: int,
    timeout_s: float,
    rules: Rules,
    infra_retries: int,
    settings: str,
    screen: Screen,
) -> list[Finding]:
    """Grade the tasks of `source`, write `out` and the reports. Raises TaskError, JournalError."""
    tasks = load_tasks(source)
    out.parent.mkdir(parents=True, exist_ok=True)
    journal = Journal(out.with_name(f"{out.stem}.admission.jsonl"))
    try:
        progress = Progress(screen, len(_wanted(tasks, journal, tries, settings)))
        if progress.total:
            grading.warm_up()  # imports, in which an interrupt can be lost
            screen.say(f"{progress.total} gradings of {len(tasks)} tasks, {jobs} at a time")
            asyncio.run(
                grade_tasks(
                    tasks,
                    boot,
                    journal,
                    tries=tries,
                    jobs=jobs,
                    timeout_s=timeout_s,
                    rules=rules,
                    infra_retries=infra_retries,
                    settings=settings,
                    done=progress,
                )
            )
        found = findings(tasks, journal, tries, settings)
    finally:
        journal.close()
    seconds = sum(record["seconds"] for record in journal.records)
    for suffix, text in (
        ("json", json.dumps(report.to_dict(str(source), tries, found, seconds), indent=1) + "\n"),
        ("md", report.to_markdown(str(source), tries, found, seconds)),
    ):
        files.write(out.with_name(f"{out.stem}.admission.{suffix}"), text)
    admitted = {one.instance_id for one in found if one.status is Status.PASS}
    if admitted:
        write_admitted(source, out, tasks, admitted)
    else:  # an older one would pass for this run's
        out.unlink(missing_ok=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m rl.data.admit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", type=Path, help="a parquet file of tasks")
    parser.add_argument("--out", type=Path, required=True, help="the parquet file of admitted tasks")
    parser.add_argument("--tries", type=int, default=3, help="gradings of each kind per task (3)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="gradings at the same time (cores)")
    parser.add_argument("overrides", nargs="*", help="of the config, e.g. sandbox=docker grading.timeout_s=900")
    args = parser.parse_intermixed_args(arguments)  # overrides may stand behind options
    if min(args.tries, args.jobs) < 1:
        parser.error("--tries and --jobs must be at least 1")
    if args.out.resolve() == args.tasks.resolve():
        parser.error("--out would overwrite the tasks")
    # Both take seconds to import: after the options are known to be right.
    import hydra.errors
    import omegaconf.errors

    from rl.boxes import kind_of
    from rl.config import compose
    from rl.setup import rules_from

    screen = Screen(every_s=10.0)
    try:
        config = compose(args.overrides)
        decides = {"sandbox": config.sandbox, "timeout_s": config.grading.timeout_s, "drop": config.grading.drop}
        settings = json.dumps(omegaconf.OmegaConf.to_container(omegaconf.OmegaConf.create(decides)), sort_keys=True)
        found = admit(
            args.tasks,
            args.out,
            kind_of(config.sandbox).boot(Path(os.devnull)),  # boxes for grading: no agent is bound into them
            tries=args.tries,
            jobs=args.jobs,
            timeout_s=config.grading.timeout_s,
            rules=rules_from(config),
            infra_retries=config.episode.infra_retries,
            settings=settings,
            screen=screen,
        )
    except (TaskError, JournalError, hydra.errors.HydraException, omegaconf.errors.OmegaConfBaseException) as error:
        screen.clear()
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except BaseException as error:  # the journal has what was graded, whatever happened
        screen.next(("continue", this_command()))
        if not isinstance(error, KeyboardInterrupt):
            raise
        return 130
    screen.clear()
    counts = Counter(one.status for one in found)
    print(", ".join(f"{counts[status]} {status}" for status in Status), flush=True)
    screen.next(*_next(args.out, counts))
    return 0 if counts[Status.PASS] else 1


def _next(out: Path, counts: Counter[Status]) -> list[tuple[str, str]]:
    commands = [("why", f"less {out.with_name(f'{out.stem}.admission.md')}")]
    if counts[Status.UNDECIDED]:
        commands.append(("the undecided again", this_command()))
    if counts[Status.PASS]:
        commands.append(("train on them", f"{sys.orig_argv[0]} -m rl.train +experiment=NAME data.train_files=[{out}]"))
    return commands


if __name__ == "__main__":
    sys.exit(main())
