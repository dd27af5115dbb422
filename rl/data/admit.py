"""Admit tasks that are graded correctly: the gold patch resolves them every time, and the untouched tree never does.

    python -m rl.data.admit tasks.parquet --out admitted.parquet [--tries 3] [--jobs N] [sandbox=... key=value ...]

Every task is graded `--tries` times with its gold patch and as often on its untouched tree, in boxes of the config's
sandbox group (configs/sandbox) and with its grading.timeout_s. A report (OUT.admission.md and .json) and a journal of
all gradings are written beside the output: the same command continues one that was killed. An infrastructure failure is
retried (episode.infra_retries) and says nothing about the task: if it stays, the task is undecided and not admitted,
and the next run of the same command grades it again. Exit status: 0 tasks were admitted, 1 none was, 2 the input or the
options are wrong, 130 interrupted.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from rewards import grade as grading
from rewards.rules import Rules
from rewards.task import Task, TaskError, load_tasks
from rl.batch import Journal, JournalError, Progress, run_all
from rl.data import findings as report
from rl.data.findings import Finding, Status
from rl.screen import Screen, this_command
from rollout import files
from rollout.episode import Boot


@dataclass(frozen=True)
class Plan:
    """A plan says how often and how the tasks of an admission are graded.

    boot: boots a box for grading.
    tries: gradings of each kind (with the gold patch, on the untouched tree) per task.
    jobs: gradings at the same time.
    timeout_s: seconds for the tests of one grading.
    infra_retries: further attempts at a grading that the infrastructure failed.
    rules: training's, so that a gold patch that they would reject is found here.
    settings: everything else that decides how a grading ends, e.g. the sandbox. Gradings under other settings do not
    count.
    """

    boot: Boot
    tries: int
    jobs: int
    timeout_s: float
    infra_retries: int
    rules: Rules = field(default_factory=Rules)
    settings: str = ""

    def missing(self, tasks: Sequence[Task], journal: Journal) -> list[tuple[Task, str, int]]:
        """Return the gradings (task, "gold" or "empty", number) that the journal lacks.

        The first ones of all tasks come first, so that a run shows early what to expect.
        """
        graded = journal.finished("task", "key", "kind", "number")
        return [
            (task, kind, number)
            for number in range(self.tries)
            for task in tasks
            if task.patch
            for kind in ("gold", "empty")
            if (task.instance_id, _key(task, self.settings), kind, number) not in graded
        ]


async def grade_tasks(
    tasks: Sequence[Task], plan: Plan, journal: Journal, done: Callable[[dict[str, Any]], None] = lambda record: None
) -> None:
    """Add the gradings that are missing to the journal, and call `done` with each new record. Raises JournalError."""

    async def work(piece: tuple[Task, str, int]) -> None:
        task, kind, number = piece
        patch = (task.patch or "").encode() if kind == "gold" else None
        boot = functools.partial(plan.boot, task, None)
        for attempt in range(plan.infra_retries + 1):
            if attempt:
                await asyncio.sleep(0.2 * 2**attempt)
            verdict = await grading.grade(task, patch, boot, timeout_s=plan.timeout_s, rules=plan.rules)
            unexpected = verdict.is_infra or (verdict.reason is None) != (kind == "gold")
            record = {
                "task": task.instance_id,
                "key": _key(task, plan.settings),
                "kind": kind,
                "number": number,
                "reason": verdict.reason and verdict.reason.value,
                "detail": verdict.detail,
                "infra": verdict.is_infra,
                "seconds": round(verdict.seconds, 3),
                # Kept for diagnosis. It names hidden tests, as any of the trainer's files may.
                "log_tail": verdict.log_tail if unexpected else "",
            }
            journal.append(record)
            done(record)
            if not verdict.is_infra:
                break

    await run_all(plan.missing(tasks, journal), plan.jobs, work)


@functools.cache
def _key(task: Task, settings: str) -> str:
    """Return a hash of everything that decides how the task is graded, so that a changed row is graded anew."""
    row = {name: value for name, value in task.to_row().items() if name != "difficulty"}
    text = json.dumps([row, settings], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def findings(tasks: Sequence[Task], plan: Plan, journal: Journal) -> list[Finding]:
    """Judge each task, in order, by the journal's records of the plan's tries and settings."""
    by_task: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in journal.records:
        if record["number"] < plan.tries:
            by_task.setdefault((record["task"], record["key"]), []).append(record)
    return [
        report.finding(
            task.instance_id,
            by_task.get((task.instance_id, _key(task, plan.settings)), []),
            plan.tries,
            no_gold=not task.patch,
        )
        for task in tasks
    ]


def write_admitted(source: Path, out: Path, tasks: Sequence[Task], admitted: set[str]) -> None:
    """Write the rows of the admitted tasks with all their columns. Snapshot directories are named relative to `out`."""
    table = pyarrow.parquet.read_table(source)
    images = [
        f"dir:{os.path.relpath(task.snapshot, out.parent.resolve())}" if task.image.startswith("dir:") else task.image
        for task in tasks
    ]
    table = table.set_column(table.column_names.index("image"), "image", [images])
    table = table.filter(pyarrow.array([task.instance_id in admitted for task in tasks]))
    with files.replacing(out) as new:
        pyarrow.parquet.write_table(table, new)


def admit(source: Path, out: Path, plan: Plan, screen: Screen) -> list[Finding]:
    """Grade the tasks of `source`, write `out` and the reports, and return the findings. Without an admitted task there
    is no `out`. Raises TaskError, JournalError."""
    tasks = load_tasks(source)
    out.parent.mkdir(parents=True, exist_ok=True)
    journal = Journal(out.with_name(f"{out.stem}.admission.jsonl"))
    try:
        if missing := len(plan.missing(tasks, journal)):
            grading.warm_up()  # now, because an interrupt can get lost in these imports
            screen.say(f"{missing} gradings of {len(tasks)} tasks, {plan.jobs} at a time")
            progress = Progress(screen, "gradings", missing)

            def done(record: dict[str, Any]) -> None:
                good = (record["reason"] is None) == (record["kind"] == "gold")
                outcome = "infrastructure failures" if record["infra"] else "as expected" if good else "unexpected"
                progress.count(outcome, final=not record["infra"])

            asyncio.run(grade_tasks(tasks, plan, journal, done))
        found = findings(tasks, plan, journal)
    finally:
        journal.close()
    seconds = sum(record["seconds"] for record in journal.records)
    for suffix, text in (
        ("json", json.dumps(report.to_dict(str(source), plan.tries, found, seconds), indent=1) + "\n"),
        ("md", report.to_markdown(str(source), plan.tries, found, seconds)),
    ):
        files.write(out.with_name(f"{out.stem}.admission.{suffix}"), text)
    admitted = {one.instance_id for one in found if one.status is Status.PASS}
    if admitted:
        write_admitted(source, out, tasks, admitted)
    else:  # an older file would be taken for this run's
        out.unlink(missing_ok=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m rl.data.admit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", type=Path, help="a parquet file of tasks")
    parser.add_argument("--out", type=Path, required=True, help="the parquet file of admitted tasks")
    parser.add_argument("--tries", type=int, default=3, help="gradings of each kind per task (default: 3)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="gradings at a time (default: cores)")
    parser.add_argument("overrides", nargs="*", help="config overrides, e.g. sandbox=docker grading.timeout_s=900")
    args = parser.parse_intermixed_args(arguments)  # overrides may follow options
    if min(args.tries, args.jobs) < 1:
        parser.error("--tries and --jobs must be at least 1")
    if args.out.resolve() == args.tasks.resolve():
        parser.error("--out would overwrite the tasks")
    # These take seconds to import, so the options are checked first.
    import hydra.errors
    import omegaconf.errors

    from rl.boxes import kind_of
    from rl.config import compose
    from rl.setup import rules_from

    screen = Screen(every_s=10.0)
    try:
        config = compose(args.overrides)
        decides = {"sandbox": config.sandbox, "timeout_s": config.grading.timeout_s, "drop": config.grading.drop}
        plan = Plan(
            boot=kind_of(config.sandbox).boot(Path(os.devnull)),  # no agent is bound into a box for grading
            tries=args.tries,
            jobs=args.jobs,
            timeout_s=config.grading.timeout_s,
            infra_retries=config.episode.infra_retries,
            rules=rules_from(config),
            settings=json.dumps(omegaconf.OmegaConf.to_container(omegaconf.OmegaConf.create(decides)), sort_keys=True),
        )
        found = admit(args.tasks, args.out, plan, screen)
    except (TaskError, JournalError, hydra.errors.HydraException, omegaconf.errors.OmegaConfBaseException) as error:
        screen.clear()
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except BaseException as error:  # whatever happened, the journal has what was graded
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
        commands.append(("grade the undecided again", this_command()))
    if counts[Status.PASS]:
        commands.append(("train on them", f"{sys.orig_argv[0]} -m rl.train +experiment=NAME data.train_files=[{out}]"))
    return commands


if __name__ == "__main__":
    sys.exit(main())
