"""Judge each task by its gradings in an admission, and write the report for people and programs."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Record = Mapping[str, Any]


class Judgement(StrEnum):
    """Each member is a judgement of a task.

    PASS: the gold patch resolves it every time, and the untouched tree never does.
    FLAKY: the same grading had different outcomes.
    BROKEN: the gold patch never resolves it, there is none, or the untouched tree already passes.
    UNDECIDED: gradings are missing because the infrastructure failed.
    """

    PASS = "pass"
    FLAKY = "flaky"
    BROKEN = "broken"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Finding:
    """A finding is the judgement of one task and what it rests on.

    gold, empty: how often each outcome ("resolved" or the reason) occurred, with the gold patch and without a patch.
    seconds, slowest: the mean and the longest time of one grading.
    failures: infrastructure failures by cause, including those that a retry made up for.
    configures: files of a local work tree that would configure an agent; images.json has those of images.
    """

    instance_id: str
    status: Judgement
    why: str
    gold: Mapping[str, int]
    empty: Mapping[str, int]
    seconds: float
    slowest: float
    failures: Mapping[str, int]
    configures: tuple[str, ...] = ()


_LACKS = "a task brings the packages that it needs, in its image or in an environment in its work tree"


def finding(instance_id: str, records: Sequence[Record], tries: int, no_gold: bool = False) -> Finding:
    """Judge a task by its records.

    tries: gradings wanted of each kind. With fewer the task is undecided, unless those that exist prove it flaky or
    broken. no_gold: the task has no gold patch.
    """
    graded = [record for record in records if not record["infra"]]
    outcomes = {
        kind: Counter(record["reason"] or "resolved" for record in graded if record["kind"] == kind)
        for kind in ("gold", "empty")
    }
    failures = Counter(f"{record['reason']}: {record['detail']}" for record in records if record["infra"])
    status, why = _judge(outcomes["gold"], outcomes["empty"], tries)
    if no_gold:
        status, why = Judgement.BROKEN, "no gold patch"
    elif status is Judgement.UNDECIDED:
        why = "; ".join(failures) or "not graded"
    elif status is not Judgement.PASS:
        failed = [record for record in graded if record["kind"] == "gold" and record["reason"]]
        tails = (record["log_tail"] for record in failed)
        if lacks := {name for tail in tails for name in re.findall(r"No module named '([\w.]+)'", tail)}:
            why += f"; the box has no {', '.join(sorted(lacks))}: {_LACKS}"
        elif details := [record["detail"] for record in failed if record["detail"]]:
            why += f" ({' '.join(details[0].split())[:200]})"
    seconds = [record["seconds"] for record in graded]
    return Finding(
        instance_id,
        status,
        why,
        dict(outcomes["gold"]),
        dict(outcomes["empty"]),
        sum(seconds) / max(1, len(seconds)),
        max(seconds, default=0.0),
        dict(failures),
    )


def _judge(gold: Counter[str], empty: Counter[str], tries: int) -> tuple[Judgement, str]:
    if 0 < gold["resolved"] < gold.total():
        return Judgement.FLAKY, f"gold patch: {_times(gold)}"
    if 0 < empty["resolved"] < empty.total():
        return Judgement.FLAKY, f"no patch: {_times(empty)}"
    if gold and not gold["resolved"]:
        return Judgement.BROKEN, f"gold patch: {_times(gold)}"
    if empty["resolved"]:
        return Judgement.BROKEN, "the tests pass without a patch"
    if gold.total() < tries or empty.total() < tries:
        return Judgement.UNDECIDED, ""
    return Judgement.PASS, ""


def _times(outcomes: Counter[str]) -> str:
    return ", ".join(f"{outcome} {count}x" for outcome, count in outcomes.most_common())


def to_dict(source: str, tries: int, findings: Sequence[Finding], seconds: float) -> dict[str, Any]:
    """Return the report as JSON values. seconds: the time of all gradings together."""
    return {
        "source": source,
        "tries": tries,
        "counts": _counts(findings),
        "grading_seconds": seconds,
        "tasks": [vars(found) for found in findings],
    }


def to_markdown(source: str, tries: int, findings: Sequence[Finding], seconds: float) -> str:
    """Return the report as Markdown: counts, every task that is not admitted with its reason, the slowest tasks."""
    head = f"Each task was to be graded {tries} times with its gold patch and {tries} times without a patch."
    lines = [f"# Admission of {source}", "", head, "", *_table(("status", "tasks"), _counts(findings).items())]
    times = [found.seconds for found in findings if found.seconds]
    median = statistics.median_high(times) if times else 0.0
    lines += ["", f"Grading time: {seconds:.0f} s in total; the median task takes {median:.1f} s per grading."]
    for status in (Judgement.FLAKY, Judgement.BROKEN, Judgement.UNDECIDED):
        some = [found for found in findings if found.status is status]
        if some:
            lines += ["", f"## {status.capitalize()}", ""]
            lines += _table(("task", "why"), [(found.instance_id, found.why) for found in some])
    retried = [(found.instance_id, cause, count) for found in findings for cause, count in found.failures.items()]
    if retried:
        lines += ["", "## Infrastructure failures", ""]
        lines += _table(("task", "cause", "times"), retried)
    if telling := [(found.instance_id, ", ".join(found.configures)) for found in findings if found.configures]:
        lines += ["", "## Settings for the agent, which are not loaded by default", ""]
        lines += _table(("task", "files"), telling)
    slowest = sorted((found for found in findings if found.slowest), key=lambda found: -found.slowest)[:10]
    if slowest:
        lines += ["", "## Slowest", ""]
        lines += _table(
            ("task", "mean s", "longest s"),
            [(found.instance_id, f"{found.seconds:.1f}", f"{found.slowest:.1f}") for found in slowest],
        )
    return "\n".join(lines) + "\n"


def _counts(findings: Sequence[Finding]) -> dict[str, int]:
    counts = Counter(found.status for found in findings)
    return {status.value: counts[status] for status in Judgement}


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    def line(cells: Sequence[Any]) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return [line(head), line(["---"] * len(head)), *map(line, rows)]
