"""Admit tasks that are graded correctly: the gold patch resolves them every time, and the untouched tree never does.

    python -m rl.data.admit tasks.parquet --out admitted.parquet [--tries 3] [--jobs N] [sandbox=... key=value ...]
    python -m rl.data.admit tasks.parquet --out admitted.parquet --shard 3/16 ...      # one part of the tasks
    python -m rl.data.admit tasks.parquet --out admitted.parquet --merge ...           # grades nothing

Every task is graded `--tries` times with its gold patch and as often on its untouched tree, in boxes of the config's
sandbox group (configs/sandbox) and with its grading.timeout_s; after the first grading with an unexpected outcome it is
not graded any more. A report (OUT.admission.md and .json) and a journal of all gradings are written beside the output:
the same command continues one that was killed. A shard writes its journal only, and every command reads the journals of
all shards. An infrastructure failure is retried (episode.infra_retries) and says nothing about the task: if it stays,
the task is undecided and not admitted, and the next run of the same command grades it again. If many attempts in a row
fail for one cause, the command ends. Exit status: 0 tasks were admitted (a shard: its tasks are decided), 1 none was,
or it ended early, 2 the input or the options are wrong, 130 interrupted.
"""

from __future__ import annotations

import asyncio
import functools
import glob
import hashlib
import json
import os
import re
import signal
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rewards import grade as grading
from rewards import graders
from rewards.rules import Rules
from rewards.swebench import warm_up
from rewards.task import Task, TaskError, load_tasks
from rewards.verdict import Reason
from rl.data import verdicts as report
from rl.data.card import beside, write_card
from rl.data.rates import other_than, write_rows
from rl.data.verdicts import Finding, Judgement
from rl.run.array_job import Shard
from rl.run.journal import Journal, JournalError, Losses, LostError, Progress, estimate, read_journal, run_all
from rl.run.screen import Screen, this_command
from rollout import files, program
from rollout.episode import Boot
from rollout.sandbox.sealing import configuring


@dataclass(frozen=True)
class AdmissionPlan:
    """A plan says how often and how the tasks of an admission are graded.

    boot: boots a box for grading.
    tries: gradings of each kind (with the gold patch, on the untouched tree) per task.
    jobs: gradings at the same time.
    timeout_s: seconds for the tests of one grading.
    infra_retries: further attempts at a grading that the infrastructure failed.
    rules, second_opinion: training's, so that a gold patch that they would reject is found here.
    settings: everything else that decides how a grading ends, e.g. the sandbox. Gradings under other settings do not
    count.
    """

    boot: Boot
    tries: int
    jobs: int
    timeout_s: float
    infra_retries: int
    rules: Rules = field(default_factory=Rules)
    second_opinion: bool = False
    settings: str = ""

    def missing(self, tasks: Sequence[Task], records: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[str, int]]]:
        """Return the gradings ("gold" or "empty", number) that the records lack, by the ids of tasks that lack some.

        A task with an unexpected outcome needs none: it cannot be admitted.
        """
        graded: dict[tuple[str, str], set[tuple[str, int]]] = {}
        decided = set()
        for record in records:
            if not record["infra"]:
                graded.setdefault((record["task"], record["key"]), set()).add((record["kind"], record["number"]))
                if not as_expected(record):
                    decided.add((record["task"], record["key"]))
        every = [(kind, number) for number in range(self.tries) for kind in ("gold", "empty")]
        found = {}
        for task in tasks:
            key = task.instance_id, _key(task, self.settings)
            left = [one for one in every if one not in graded.get(key, ())]
            if solvable(task) and left and key not in decided:
                found[task.instance_id] = left
        return found


def solvable(task: Task) -> bool:
    """Tell whether a solution of a task is known."""
    return graders.named(task.grader).solvable(task)


def as_expected(record: Mapping[str, Any]) -> bool:
    """Tell whether a grading ended as it must: the gold patch resolves, no patch does not."""
    return (record["reason"] is None) == (record["kind"] == "gold")


async def grade_tasks(
    tasks: Sequence[Task],
    plan: AdmissionPlan,
    journal: Journal,
    done: Callable[[dict[str, Any]], None] = lambda record: None,
    others: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Add the gradings that are missing to the journal, and call `done` with each new record.

    `plan.jobs` gradings run at the same time. Tasks of one image follow each other, and the first grading of a task
    comes before its others. others: records of other journals. Raises JournalError, and LostError if many attempts in a
    row were lost for one cause.
    """
    missing = plan.missing(tasks, [*journal.records, *others])
    slots = asyncio.Semaphore(plan.jobs)
    losses = Losses(3 * max(plan.jobs, 3), apart=_OF_A_TASK)

    async def attempt(task: Task, kind: str, number: int) -> dict[str, Any]:
        boot = functools.partial(plan.boot, task, None)
        how: dict[str, Any] = {"timeout_s": plan.timeout_s, "rules": plan.rules, "second_opinion": plan.second_opinion}
        if kind == "gold":
            verdict = await grading.grade_gold(task, boot, **how)
        else:
            verdict = await grading.grade(task, None, boot, **how)
        record = {
            "task": task.instance_id,
            "key": _key(task, plan.settings),
            "kind": kind,
            "number": number,
            "reason": verdict.reason and verdict.reason.value,
            "detail": verdict.detail,
            "infra": verdict.is_infra,
            "seconds": round(verdict.seconds, 3),
            "log_tail": "",
            "not_passing": sorted(verdict.not_passing),
        }
        if verdict.is_infra or not as_expected(record):
            # Kept for diagnosis. It names hidden tests, as any of the trainer's files may.
            record["log_tail"] = verdict.log_tail
        journal.append(record)
        done(record)
        losses.count(record["reason"] if verdict.is_infra else None, verdict.detail)
        return record

    async def work(task: Task) -> None:
        decided = False

        async def one(kind: str, number: int) -> bool:
            """Return whether the grading has a verdict, or is not needed any more."""
            nonlocal decided
            for again in range(plan.infra_retries + 1):
                if again:
                    await asyncio.sleep(0.2 * 2**again)
                async with slots:
                    if decided:
                        return True
                    record = await attempt(task, kind, number)
                if not record["infra"]:
                    decided = decided or not as_expected(record)
                    return True
            return False

        first, *rest = missing[task.instance_id]
        if await one(*first):  # else the others would be lost too, most likely, and the task stays undecided anyway
            await run_all(rest, len(rest), lambda piece: one(*piece))

    images = {task.image: place for place, task in reversed([*enumerate(tasks)])}  # the place of each one's first task
    wanted = [task for task in tasks if task.instance_id in missing]
    await run_all(sorted(wanted, key=lambda task: images[task.image]), plan.jobs, work)


# Causes that may concern single tasks; a whole repository may lack its images.
_OF_A_TASK = (Reason.MISSING_IMAGE, Reason.MISSING_SNAPSHOT, Reason.SEAL_FAILED, Reason.TASK_INVALID)


@functools.cache
def _key(task: Task, settings: str) -> str:
    """Return a hash of everything that decides how the task is graded, so that a changed row is graded anew."""
    row = {name: value for name, value in task.to_row().items() if name not in ("difficulty", "agent")}
    text = json.dumps([row, settings], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def findings(tasks: Sequence[Task], plan: AdmissionPlan, records: Iterable[Mapping[str, Any]]) -> list[Finding]:
    """Judge each task, in order, by the records of the plan's tries and settings."""
    by_task: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for record in records:
        if record["number"] < plan.tries:
            by_task.setdefault((record["task"], record["key"]), []).append(record)
    found = []
    for task in tasks:
        key = task.instance_id, _key(task, plan.settings)
        one = report.finding(task.instance_id, by_task.get(key, []), plan.tries, no_gold=not solvable(task))
        local = task.image.startswith("dir:") and task.snapshot.is_dir()
        found.append(replace(one, configures=configuring(task.snapshot)) if local else one)
    return found


def _not_passing(task: Task, plan: AdmissionPlan, records: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the tests that did neither pass nor fail with the gold patch, as JSON; None if nobody wrote it."""
    key = task.instance_id, _key(task, plan.settings)
    gold = [one for one in records if (one["task"], one["key"]) == key and one["kind"] == "gold" and not one["infra"]]
    if not gold or any("not_passing" not in one for one in gold):  # a journal of an earlier version
        return None
    return json.dumps(sorted({test for one in gold for test in one["not_passing"]}))


def journals(out: Path) -> Iterator[Path]:
    """Yield the journals that exist of an admission to `out`: its own and those of its shards."""
    for path in sorted(out.parent.glob(f"{glob.escape(out.stem)}.*admission.jsonl")):
        if re.fullmatch(r"\.(\d+-of-\d+\.)?admission\.jsonl", path.name.removeprefix(out.stem)):
            yield path


def admit(
    source: Path, out: Path, plan: AdmissionPlan, screen: Screen, shard: Shard | None = None, merge: bool = False
) -> list[Finding]:
    """Grade the tasks of `source`, write `out` and the reports, and return the findings.

    If no task is admitted, there is no `out`. With `shard`, its part of the tasks is graded, and only its journal is
    written. With `merge`, nothing is graded. Raises TaskError, JournalError, LostError.
    """
    tasks = load_tasks(source)
    mine = shard.of(tasks, lambda task: task.image) if shard else tasks
    out.parent.mkdir(parents=True, exist_ok=True)
    path = out.with_name(f"{out.stem}.{shard}.admission.jsonl" if shard else f"{out.stem}.admission.jsonl")
    journal = Journal(path)
    try:
        others = [record for one in journals(out) if one != path for record in read_journal(one)[0]]
        missing = plan.missing(mine, [*journal.records, *others])
        if missing and not merge:
            _grade(mine, plan, journal, others, screen, {task: len(left) for task, left in missing.items()})
        records = [*journal.records, *others]
    finally:
        journal.close()
    found = findings(mine, plan, records)
    if shard:
        return found
    seconds = sum(record["seconds"] for record in records)
    told = str(source), plan.tries, found, seconds
    files.write(beside(out, "admission.json"), json.dumps(report.to_dict(*told), indent=1) + "\n")
    files.write(beside(out, "admission.md"), report.to_markdown(*told))
    admitted = {one.instance_id for one in found if one.status is Judgement.PASS}
    if admitted:
        known = [_not_passing(task, plan, records) for task in tasks if task.instance_id in admitted]
        write_rows(source, out, tasks, admitted, {"not_passing": known})
        counts = Counter(one.status.value for one in found)
        write_card(out, "admitted", source, tries=plan.tries, tasks=counts)
    else:  # an older file would be mistaken for this run's
        out.unlink(missing_ok=True)
    return found


def _grade(
    tasks: Sequence[Task],
    plan: AdmissionPlan,
    journal: Journal,
    others: Sequence[dict[str, Any]],
    screen: Screen,
    left: dict[str, int],
) -> None:
    """Grade what is missing, and show how far it is and how long it takes. left: how many gradings each task lacks."""
    warm_up()  # now, because an interrupt can get lost in these imports
    wanted = sum(left.values())
    screen.say(f"{wanted} gradings of {len(tasks)} tasks, {plan.jobs} at a time")
    progress = Progress(screen, "gradings", wanted)
    times = [record["seconds"] for record in [*journal.records, *others] if not record["infra"]]
    few = min(wanted, max(plan.jobs, _FEW))
    decided = set()

    def tell() -> None:
        screen.say(f"at most {estimate(progress.total - progress.done, statistics.fmean(times), plan.jobs)}")

    def done(record: dict[str, Any]) -> None:
        task, good = record["task"], as_expected(record)
        if not record["infra"]:
            left[task] -= 1
            if task in decided:  # it was running when another grading decided the task
                progress.total += 1
            elif not good:
                decided.add(task)
                progress.total -= left[task]
        outcome = "infrastructure failures" if record["infra"] else "as expected" if good else "unexpected"
        progress.count(outcome, final=not record["infra"])
        if not record["infra"]:
            times.append(record["seconds"])
            if len(times) == few and progress.done < progress.total:
                tell()

    if len(times) >= few:
        tell()
    asyncio.run(grade_tasks(tasks, plan, journal, done, others))


_FEW = 8  # gradings, after which their time is known well enough


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = program.parser("python -m rl.data.admit", __doc__)
    parser.add_argument("tasks", type=Path, help="a parquet file of tasks")
    parser.add_argument("--out", type=Path, required=True, help="the parquet file of admitted tasks")
    parser.add_argument("--tries", type=int, default=3, help="gradings of each kind per task (default: 3)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="gradings at a time (default: cores)")
    parser.add_argument("--shard", metavar="I/N", help="grade only part I of N; whole images, the same parts each time")
    parser.add_argument("--merge", action="store_true", help="judge what all shards have graded; grade nothing")
    parser.add_argument("overrides", nargs="*", help="config overrides, e.g. sandbox=docker grading.timeout_s=900")
    args = parser.parse_intermixed_args(arguments)  # overrides may follow options
    if min(args.tries, args.jobs) < 1:
        parser.error("--tries and --jobs must be at least 1")
    other_than(parser, args.tasks, args.out)
    if args.shard and args.merge:
        parser.error("--merge is for all shards; leave out --shard")
    try:
        shard = Shard.parse(args.shard) if args.shard else None
    except ValueError as error:
        parser.error(f"--shard: {error}")
    # These take seconds to import, so the options are checked first.
    from omegaconf import OmegaConf

    from rl.checks import check_values
    from rl.checks.episodes import check_boxes
    from rl.config.compose import ConfigError, check_all, compose
    from rl.episodes.boxes import kind_of
    from rl.episodes.setup import rules_from

    screen = Screen(every_s=10.0)
    try:
        config = compose(args.overrides, check=check_values)
        check_values(config)
        if not args.merge:
            check_all(config, check_boxes)
            if not (boxes := kind_of(config.sandbox)).from_images:
                boxes.check_tasks(load_tasks(args.tasks))
        quicker = kind_of(config.sandbox).speed_only
        decides = {"sandbox": {key: one for key, one in config.sandbox.items() if key not in quicker}} | {
            key: config.grading[key] for key in ("timeout_s", "second_opinion", "needs_second_opinion", "drop")
        }
        plan = AdmissionPlan(
            boot=kind_of(config.sandbox).boot(),
            tries=args.tries,
            jobs=args.jobs,
            timeout_s=config.grading.timeout_s,
            infra_retries=config.episode.infra_retries,
            rules=rules_from(config),
            second_opinion=config.grading.second_opinion,
            settings=json.dumps(OmegaConf.to_container(OmegaConf.create(decides)), sort_keys=True),
        )
        found = admit(args.tasks, args.out, plan, screen, shard, args.merge)
    except ConfigError as error:
        screen.clear()
        error.tell()
        return 2
    except (TaskError, JournalError) as error:
        screen.clear()
        return program.failed(f"error: {' '.join(str(error).split())}", 2)
    except LostError as error:
        screen.clear()
        print(f"stopped: {error}", file=sys.stderr)
        screen.next(("continue", this_command()))
        return 1
    except BaseException as error:  # whatever happened, the journal has what was graded
        screen.next(("continue", this_command()))
        if not isinstance(error, KeyboardInterrupt):
            raise
        return 130
    screen.clear()
    counts = Counter(one.status for one in found)
    print(", ".join(f"{counts[status]} {status}" for status in Judgement), flush=True)
    if shard:
        return 1 if counts[Judgement.UNDECIDED] else 0
    screen.next(*_next(args.out, counts))
    return 0 if counts[Judgement.PASS] else 1


def _next(out: Path, counts: Counter[Judgement]) -> list[tuple[str, str]]:
    commands = [("why", f"less {beside(out, 'admission.md')}")]
    if counts[Judgement.UNDECIDED]:
        commands.append(("grade the undecided again", this_command()))
    if counts[Judgement.PASS]:
        commands.append(("train on them", f"{sys.orig_argv[0]} -m rl.train +experiment=NAME data.train_files=[{out}]"))
    return commands


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SLURM's; boxes are closed as after an interrupt
    program.end(main)
