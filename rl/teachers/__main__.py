"""Let other models answer recorded states: preference pairs, and replies to distil. docs/traces.md

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
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from rl.run.screen import Screen, ended
from rl.teachers import outcome
from rl.teachers.arguments import ask, teacher_of, told
from rl.teachers.families import family_of
from rl.traces.ingest.asking import AskingResult, Survey, limited
from rl.traces.ingest.endpoints import Endpoint
from rl.traces.ingest.evaluate import compared, shown
from rl.traces.ingest.states import State
from rollout import files, program


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = program.parser("python -m rl.teachers", __doc__)
    parser.add_argument("states", type=Path, metavar="STATES", help="a states file: .jsonl or .jsonl.zst")
    parser.add_argument("--teacher", action="append", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-cost", type=float)
    parser.add_argument("--same-family", action="store_true")
    parser.add_argument("--limit", type=int)
    given = parser.parse_args(arguments)
    return ended("teachers", lambda screen: teach(given, screen))


def teach(given: argparse.Namespace, screen: Screen) -> int:
    """Ask the teachers what was not asked before, write the results to --out, and return the exit status.

    Raises ValueError (StatesError and JournalError among them), OSError.
    """
    teachers = [teacher_of(text) for text in given.teacher]
    if len({one.name for one in teachers}) < len(teachers):
        raise ValueError("two teachers have the same name")

    def wants(teacher: Endpoint, state: State) -> bool:
        return given.same_family or family_of(teacher.model) != family_of(state.source_model)

    survey = Survey(given.states, teachers, given.limit, wants)
    states = survey.models.total()
    models = ", ".join(f"{model or 'unknown'} ({count})" for model, count in sorted(survey.models.items()))
    screen.say(f"{states} states of {models}")
    for one in teachers:
        if (left := states - len(survey.wanted[one.name])) > 0:
            own = f"{one.name} is of the family {family_of(one.model)}, as the model of {left} states: "
            screen.say(f"{own}it is left out there (--same-family asks it)")
    if (unnamed := survey.models[""]) and not given.same_family:
        they = "1 state doesn't name its model" if unnamed == 1 else f"{unnamed} states don't name their model"
        screen.say(f"{they}, so teachers of its family are asked there, too")
    survey.tell(screen)
    asked = ask(survey, given.out, given.max_cost, screen)
    report = _report(survey, asked, given.out)
    files.write(given.out / "report.json", json.dumps(report, indent=1), synced=True)
    screen.print(_table(report))
    made = ((name, str(given.out / name)) for name in ("pairs.jsonl", "distill.jsonl", "report.json"))
    return told(asked, report["states"], screen, *made)


def _report(survey: Survey, asked: AskingResult, out: Path) -> dict[str, Any]:
    source, limit = survey.source, survey.limit
    about = {
        one.name: {
            "model": one.model,
            "family": family_of(one.model),
            "wanted": len(survey.wanted[one.name]),
            "answered": sum(name == one.name for _, name in asked.answers),
            "refused": sum(name == one.name for _, name in asked.refused),
            **compared(limited(source, limit), asked.answers, one.name),
        }
        for one in survey.endpoints
    }
    states = outcome.write(source, limit, [*about], asked.answers, out)
    ended = {"given_up": asked.given_up, "cap_reached": asked.cap_reached, "cost": asked.cost}
    return {"models": survey.models, "teachers": about, "states": states, **ended}


def _table(report: dict[str, Any]) -> Table:
    table = Table("teacher", "answered", "refused", "replies as the student", "p50", "p95", "cost")
    for name, one in report["teachers"].items():
        times = ["-" if one[key] is None else f"{one[key]:.1f} s" for key in ("p50_s", "p95_s")]
        done = f"{one['answered']} of {one['wanted']}"
        table.add_row(name, done, str(one["refused"]), shown(one["same_call"]), *times, f"${one['cost']:.4f}")
    return table


if __name__ == "__main__":
    program.end(main)
