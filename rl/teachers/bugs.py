"""Let another model write bugs for tasks: it reads functions of packages, one at a time, and its replies are checked.

    python -m rl.teachers.bugs NAME==VERSION ... --out made.bugs.jsonl [--limit 20] [--max-cost DOLLARS] \\
        --teacher name=N,url=URL,model=M[,protocol=messages][,key_env=VARIABLE][,price_in=3,price_out=15]
    python -m rl.data.make NAME==VERSION ... --out made.parquet --bugs made.bugs.jsonl

A reply is taken if it is the same function with other code. What was answered is in made.bugs/, and packages are
prepared in made.packages/, where rl.data.make finds them; the same command continues what was stopped. Exit status: 0
all were answered, 1 not all, 2 the command is wrong, 130 interrupted. docs/data.md
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rl.config.compose import compose
from rl.data.make.prepare import prepare
from rl.data.make.work import editable
from rl.data.make.written import SYSTEM, edit_of, questions, to_line
from rl.episodes.setup import rules_from
from rl.run.screen import Screen, ended
from rl.teachers.arguments import ask, teacher_of, told
from rl.teachers.restate import text_of
from rl.traces.ingest.asking import Survey
from rl.traces.ingest.states import writing
from rollout import files, program
from rollout.sandbox import SandboxError


def write(args: argparse.Namespace, screen: Screen) -> int:
    """Ask for what was not asked for before, write the bugs, and return the exit status.

    Raises ValueError (MakeError and JournalError among them), OSError.
    """
    out, teacher, rules = args.out, teacher_of(args.teacher), rules_from(compose([]))
    directory = out.with_name(out.name.removesuffix(".jsonl"))
    directory.mkdir(parents=True, exist_ok=True)
    packages, asked_of = out.with_name(f"{out.name.partition('.')[0]}.packages"), []
    with writing(directory / "states.jsonl") as writer:
        for spec in args.packages:
            screen.show(f"{spec}: preparing it")
            try:
                prepared = prepare(spec, packages, args.requires, args.allow_copies)
            except SandboxError as error:
                raise OSError(str(error)) from error
            sources = editable(prepared.package, rules)
            for one in questions(prepared, sources, f"{args.seed}:{prepared.package.label}", args.limit):
                name = f"{prepared.package.label}:{one.id}"
                asked_of.append((name, prepared, one, sources[one.path]))
                writer.begin(name, "function")
                tip = writer.tip([{"role": "user", "content": f"```python\n{one.text}```"}])
                writer.state(
                    name, writer.head(SYSTEM, []), tip, {"role": "assistant", "content": one.text}, "rl.teachers.bugs"
                )
    asked = ask(Survey(directory / "states.jsonl", [teacher]), directory, args.max_cost, screen)
    counts, lines = Counter[str](), []
    for name, prepared, one, source in asked_of:
        answer = asked.answers.get((name, teacher.name))
        edit = edit_of(one, source, text_of(answer["action"])) if answer else "no answer"
        counts[f"not taken: {edit}" if isinstance(edit, str) else "bugs to try"] += 1
        lines += [] if isinstance(edit, str) else [to_line(prepared, edit, teacher.model)]
    files.write(out, "".join(lines))
    return told(asked, dict(counts.most_common()), screen, ("bugs", str(out)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = program.parser("python -m rl.teachers.bugs", __doc__)
    parser.add_argument("packages", nargs="+", metavar="NAME==VERSION", help="as for rl.data.make")
    parser.add_argument("--out", type=Path, required=True, help="the file of bugs to write (.jsonl)")
    parser.add_argument("--teacher", required=True, help="name=N,url=URL,model=M[,...]: as for rl.teachers")
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="functions of each package (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="another seed takes other functions (default: 0)")
    parser.add_argument("--max-cost", type=float, metavar="DOLLARS", help="needed if a price is given")
    parser.add_argument("--requires", nargs="+", default=[], metavar="REQ", help="as for rl.data.make")
    parser.add_argument("--allow-copies", action="store_true", help="as for rl.data.make")
    args = parser.parse_args(arguments)
    return ended("bugs", lambda screen: write(args, screen))


if __name__ == "__main__":
    program.end(main)
