"""Let another model word the problem statements of made tasks: it reads the statement alone, and its words are checked.

    python -m rl.teachers.restate made.parquet --out restated.parquet [--level 2] [--max-cost DOLLARS] \\
        --teacher name=N,url=URL,model=M[,protocol=messages][,key_env=VARIABLE][,price_in=3,price_out=15]

A statement is taken if it keeps every program and every value that was observed, shows no other code, and tells neither
a hidden test nor a line of the gold patch; else the task keeps the one that it has. What was answered is in
OUT.restated/, so the same command continues what was stopped. Exit status: 0 all were answered, 1 not all, 2 the
command is wrong, 130 interrupted. docs/data.md
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet

from rewards.task import load_tasks
from rl.data.card import write_card
from rl.data.make.statement import LEVELS, leaks
from rl.data.rates import write_rows
from rl.run.screen import Screen, ended
from rl.teachers.arguments import ask, teacher_of, told
from rl.traces.ingest.asking import Survey
from rl.traces.ingest.states import Message, writing
from rollout import program
from rollout.proxy.blocks import blocks_of, text_in

_SYSTEM = (
    "You word bug reports. You get a report about a Python package and reply with the same report as a user of the "
    "package would write it, in your own words. Keep every code block and every value in backquotes exactly as it is. "
    "Add no other code, no cause, no fix and no guess, and nothing that the report does not say. Reply with the report "
    "alone."
)
_FENCED = re.compile(r"^```[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_QUOTED = re.compile(r"``(.+?)``|`([^`\n]+)`")
_LONGEST = 3  # times the length of the old statement; ``_MORE`` characters are added
_MORE = 400


def wrong(old: str, new: str, tests: Sequence[str], gold: str) -> str:
    """Return why a statement cannot replace another, in a word or two; "" if it can.

    tests: pytest's names of hidden tests. gold: the patch.
    """
    if not new.strip() or any(not (char.isprintable() or char in "\n\t") for char in new):
        return "no text"
    if len(new) > _LONGEST * len(old) + _MORE:
        return "too long"
    if leaks(new, tests, gold):
        return "tells the answer"
    mine, other = (_FENCED.findall(text) for text in (old, new))
    if Counter(other) != Counter(mine):
        return "other code"
    rest, said = (_FENCED.sub("", text) for text in (old, new))
    if any((value := first or second) not in said for first, second in _QUOTED.findall(rest)):
        return f"lost {value[:40]}"
    return ""


def restate(args: argparse.Namespace, screen: Screen) -> int:
    """Ask for what was not asked for before, write the task file, and return the exit status.

    Raises ValueError (TaskError and JournalError among them), OSError.
    """
    source, out, teacher = args.tasks, args.out, teacher_of(args.teacher)
    tasks = load_tasks(source)
    column = f"statement_{args.level}"
    if column not in pyarrow.parquet.read_schema(source).names:
        raise ValueError(f"{source}: has no column {column}; only tasks of rl.data.make have it")
    old = [str(text) for text in pyarrow.parquet.read_table(source, columns=[column]).column(column).to_pylist()]
    directory = out.with_name(f"{out.stem}.restated")
    directory.mkdir(parents=True, exist_ok=True)
    states = directory / "states.jsonl"
    with writing(states) as writer:
        for task, text in zip(tasks, old, strict=True):
            writer.begin(task.instance_id, "statement")
            tip = writer.tip([{"role": "user", "content": text}])
            said: Message = {"role": "assistant", "content": text}
            writer.state(task.instance_id, writer.head(_SYSTEM, []), tip, said, "rl.data.make")
    asked = ask(Survey(states, [teacher]), directory, args.max_cost, screen)
    counts, statements, by = Counter[str](), [], []
    for task, text in zip(tasks, old, strict=True):
        answer = asked.answers.get((task.instance_id, teacher.name))
        new = text_of(answer["action"]) if answer else ""
        # Tests that pass with the bug, too, are in the agent's copy: only the names of the others are hidden.
        why = wrong(text, new, task.FAIL_TO_PASS, task.patch or "") if answer else "no answer"
        counts["statements replaced" if not why else f"kept as it was: {why}"] += 1
        statements.append(new if not why else text)
        by.append("" if why else teacher.model)
    everything = {task.instance_id for task in tasks}
    write_rows(source, out, tasks, everything, {"problem_statement": statements, "stated_by": by})
    write_card(out, "restated", source, stated_by=Counter(by))
    return told(asked, dict(counts.most_common()), screen, ("tasks", str(out)))


def text_of(action: Message) -> str:
    """Return the text of a reply without thinking; "" if it makes calls."""
    blocks = blocks_of(action["content"])
    return "" if any(block["type"] == "tool_use" for block in blocks) else text_in(blocks).strip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = program.parser("python -m rl.teachers.restate", __doc__)
    parser.add_argument("tasks", type=Path, help="a task file of rl.data.make")
    parser.add_argument("--out", type=Path, required=True, help="the parquet file to write")
    parser.add_argument("--teacher", required=True, help="name=N,url=URL,model=M[,...]: as for rl.teachers")
    parser.add_argument("--level", type=int, choices=LEVELS, default=LEVELS[1], help="which statement (default: 2)")
    parser.add_argument("--max-cost", type=float, metavar="DOLLARS", help="needed if a price is given")
    args = parser.parse_args(arguments)
    return ended("restate", lambda screen: restate(args, screen))


if __name__ == "__main__":
    program.end(main)
