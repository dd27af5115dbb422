"""Let other models answer recorded states: preference pairs, and replies to distil. docs/ingest.md

    python -m rl.teachers STATES --out DIR --max-cost DOLLARS \\
        --teacher name=N,url=URL,model=M[,protocol=messages][,key_env=VARIABLE][,price_in=3,price_out=15] ...

A teacher is an endpoint of chat completions (URL/chat/completions) or, with protocol=messages, of Anthropic's Messages
API (URL/v1/messages). Prices are dollars per million tokens. Other keys of a teacher: concurrency=4, max_tokens=4096,
temperature, patience_s=300. Its key comes from the environment variable that is named, and is written nowhere.

    --max-cost DOLLARS   needed if a price is given; without it the estimate is shown, and nobody is asked
    --same-family        teachers of the recorded model's own family are asked, too
    --limit N            only the first states

The same command continues what was stopped. Exit status: 0 all were answered, 1 not all, 2 the command is wrong, 130
interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from rl.batch import Journal
from rl.ingest.asking import Budget, Survey, answers_of, ask_all, identify, limited, opened
from rl.ingest.endpoints import Endpoint
from rl.ingest.evaluate import compared, shown
from rl.ingest.states import State
from rl.screen import Screen, this_command
from rl.teachers import outcome
from rl.teachers.families import family_of
from rl.teachers.given import estimate, teacher_of
from rollout import files, program


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(program.plain(__doc__))
        return 0 if arguments else 2
    parser = argparse.ArgumentParser(prog="python -m rl.teachers", allow_abbrev=False)
    parser.add_argument("states", type=Path, metavar="STATES", help="a states file: .jsonl or .jsonl.zst")
    parser.add_argument("--teacher", action="append", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-cost", type=float)
    parser.add_argument("--same-family", action="store_true")
    parser.add_argument("--limit", type=int)
    given = parser.parse_args(arguments)
    screen = Screen()
    try:
        teachers = [teacher_of(text) for text in given.teacher]
        if len({one.name for one in teachers}) < len(teachers):
            raise ValueError("two teachers have the same name")
        return teach(given.states, teachers, given.out, given.max_cost, given.same_family, given.limit, screen)
    except (OSError, ValueError) as error:
        screen.clear()
        print(f"teachers: {' '.join(str(error).split())}", file=sys.stderr)
        return 1 if isinstance(error, OSError) or error.__cause__ is not None else 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        screen.next(("continue", this_command()))
        return 130


def teach(
    source: Path,
    teachers: Sequence[Endpoint],
    out: Path,
    most: float | None,
    same_family: bool,
    limit: int | None,
    screen: Screen,
) -> int:
    """Ask the teachers what was not asked before, write the results to ``out``, and return the exit status.

    most: dollars in all, earlier runs included. Raises ValueError (StatesError and JournalError among them), OSError.
    """

    def wanted(teacher: Endpoint, state: State) -> bool:
        return same_family or family_of(teacher.model) != family_of(state.source_model)

    survey = Survey.of(source, teachers, wanted, limit)
    states = sum(survey.models.values())
    models = ", ".join(f"{model or 'unknown'} ({count})" for model, count in sorted(survey.models.items()))
    screen.say(f"{states} states of {models}")
    for one in teachers:
        if (left := states - survey.asked[one.name]) > 0:
            own = f"{one.name} is of the family {family_of(one.model)}, as the model of {left} states: "
            screen.say(f"{own}it is left out there (--same-family asks it)")
    if (unnamed := survey.models.get("", 0)) and not same_family:
        they = "1 state doesn't name its model" if unnamed == 1 else f"{unnamed} states don't name their model"
        screen.say(f"{they}, so teachers of its family are asked there, too")
    estimate(survey, teachers, most, screen)
    identify(source, out, teachers)
    journal = opened(out)
    try:
        names = {one.name for one in teachers}
        mine = {key for key in journal.finished("state", "endpoint") if key[1] in names}
        total = sum(survey.asked.values())
        spent = sum(one["cost"] for one in journal.records)
        budget = Budget(most, spent)
        screen.say(f"{total - len(mine)} answers to ask for, {len(mine)} are there, which have cost ${spent:.4f}")
        gone = asyncio.run(ask_all(source, teachers, journal, budget, wanted, limit, screen, total - len(mine)))
        report = _report(source, teachers, journal, survey, limit, out)
    finally:
        journal.close()
    report |= {"given_up": gone, "cap_reached": budget.reached, "cost": budget.spent}
    files.write(out / "report.json", json.dumps(report, indent=1), synced=True)
    screen.print(_table(report))
    for what, count in report["states"].items():
        screen.print(f"{count:>7,}  {what}")
    screen.print(f"cost: ${budget.spent:.4f}")
    whole = all(one["answered"] + one["refused"] == one["wanted"] for one in report["teachers"].values())
    more = [] if whole else [("ask the rest", this_command())]
    screen.next(*more, *((name, str(out / name)) for name in ("pairs.jsonl", "distill.jsonl", "report.json")))
    return 0 if whole else 1


def _report(
    source: Path, teachers: Sequence[Endpoint], journal: Journal, survey: Survey, limit: int | None, out: Path
) -> dict[str, Any]:
    inside = {state.state_id for state in limited(source, limit)}
    answers = {key: one for key, one in answers_of(journal).items() if key[0] in inside}
    refused = [one["endpoint"] for one in journal.records if "refused" in one and one["state"] in inside]
    about = {
        one.name: {
            "model": one.model,
            "family": family_of(one.model),
            "wanted": survey.asked[one.name],
            "answered": sum(name == one.name for _, name in answers),
            "refused": refused.count(one.name),
            **compared(source, limit, answers, one.name),
        }
        for one in teachers
    }
    names = [one.name for one in teachers]
    return {"models": survey.models, "teachers": about, "states": outcome.write(source, limit, names, answers, out)}


def _table(report: dict[str, Any]) -> Table:
    table = Table("teacher", "answered", "refused", "replies as the student", "p50", "p95", "cost")
    for name, one in report["teachers"].items():
        times = ["-" if one[key] is None else f"{one[key]:.1f} s" for key in ("p50_s", "p95_s")]
        done = f"{one['answered']} of {one['wanted']}"
        table.add_row(name, done, str(one["refused"]), shown(one["same_call"]), *times, f"${one['cost']:.4f}")
    return table


if __name__ == "__main__":
    program.end(lambda: main(sys.argv[1:]))
