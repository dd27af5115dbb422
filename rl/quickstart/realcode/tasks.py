"""Make repair tasks of small functions of real packages: SWE-bench rows with repositories and hidden tests.

    python -m rl.quickstart.realcode.tasks NAME==VERSION ... --out DIR --heldout-packages NAME==VERSION ... [--seed S]

Each repository has one function of a package, in which one word or operator was exchanged for its counterpart, and
`check.py`, which runs one call that shows it. The statement says what that call gives and should give. The hidden tests
are other calls that the package's own tests make, with what they return. They are chosen so that every exchange after
which such a call is wrong fails one of them. Only reading the file tells which exchanges exist, and only trying tells
which one is right. No function of a held-out package is trained on, nor one that is nearly the same.

The result is DIR/train.parquet, DIR/heldout.parquet and DIR/repos/<instance_id>/. The same arguments give the same
bytes. Every task is graded before anything is moved to its place, as in rl.quickstart.tasks. The packages come from the
index that pip uses; their code runs in bubblewrap's boxes.
"""

from __future__ import annotations

import ast
import asyncio
import random
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rewards.task import Task
from rl.make import edits
from rl.make.overlap import overlaps
from rl.make.prepare import prepare
from rl.make.runs import Bench
from rl.make.sources import MakeError
from rl.quickstart.realcode.functions import Function, harvest, observed
from rl.quickstart.realcode.swaps import Swap, swaps
from rl.quickstart.tasks import verify, write_repositories, write_tasks
from rollout import program
from rollout.sandbox import SandboxError

FILE = "module.py"
"""The file with the function, of each task."""

CHECK = "python3 check.py"
"""The command that shows an agent whether the call of the statement gives what it should."""

_FEWEST_SWAPS, _MOST_SWAPS = 2, 10
_OF_A_FUNCTION = 6  # tasks
_LONGEST_SHOWN = 48  # characters of a result
_LONGEST_STATEMENT = 130
_HIDDEN = 3  # failing calls, and as many passing ones, at least, as far as there are

_CHECK_FILE = """\
import sys
from module import {name}

try:
    got = "gives " + repr({call})
except Exception as error:
    got = "raises " + type(error).__name__
if got == "gives " + {want!r}:
    print("ok")
else:
    sys.exit({call!r} + " " + got[:{most}])
"""

# As in rl.quickstart.tasks.
_EVAL_SCRIPT = """\
#!/bin/bash
set -uxo pipefail
: '>>>>> Start Test Output'
python3 -I -S -B - -v <<'END_OF_TESTS'
import os, sys, unittest
sys.path.append(os.getcwd())

class Hidden(unittest.TestCase):
    def check(self, call, expected):
        import module
        self.assertEqual(eval(call, vars(module)), expected)
{tests}
unittest.main()
END_OF_TESTS
: '>>>>> End Test Output'
"""
_TEST = '''
    def test_{number}(self):
        """{name}"""
        self.check({call!r}, {want})
'''


@dataclass(frozen=True)
class Puzzle:
    """A puzzle is one task before it is written.

    ``fix``: the swap of ``source`` that repairs it. ``shown``: (call, what it should return, what it gives).
    ``failing``, ``passing``: hidden cases that the bug fails and passes.
    """

    function: Function
    source: str
    fix: Swap
    shown: tuple[str, str, str]
    failing: tuple[tuple[str, str], ...]
    passing: tuple[tuple[str, str], ...]

    @property
    def statement(self) -> str:
        """Return what the agent is told."""
        call, want, got = self.shown
        got = got if got.startswith("raises ") else f"gives {got}"
        return f"{call} {got[:_LONGEST_SHOWN]}, not {want[:_LONGEST_SHOWN]}."

    def files(self) -> dict[str, str]:
        """Return the texts of the repository's files, by name."""
        call, want, _ = self.shown
        check = _CHECK_FILE.format(name=self.function.name, call=call, want=want, most=_LONGEST_SHOWN)
        return {FILE: self.source, "check.py": check}

    def patch(self) -> str:
        """Return the git patch that repairs it."""
        return edits.patch({FILE: self.source}, {FILE: self.fix.applied(self.source)})


async def puzzles_of(function: Function, bench: Bench, rng: random.Random) -> list[Puzzle]:
    """Return the puzzles of a function. bench: boxes to run it in. Raises SandboxError."""
    places = swaps(function.source)
    if not _FEWEST_SWAPS <= len(places) <= _MOST_SWAPS:
        return []
    rng.shuffle(places)
    calls = [call for call, _ in function.cases]
    wrong = {swap: swap.applied(function.source) for swap in places}
    repairs = {swap: [(one, one.applied(source)) for one in swaps(source)] for swap, source in wrong.items()}
    sources = [source for swap in places for source in (wrong[swap], *(text for _, text in repairs[swap]))]
    answers = dict(zip(sources, (await observed(bench, [(sources, calls)]))[0], strict=True))
    found = []
    for swap in places[:_OF_A_FUNCTION]:
        others = [answers[text] for _, text in repairs[swap] if text != function.source]
        fix = [one for one, text in repairs[swap] if text == function.source]
        got = answers[wrong[swap]]
        if got is not None and len(fix) == 1:
            found.append(_puzzle(function, wrong[swap], fix[0], got, others))
    return [one for one in found if one is not None]


def _puzzle(
    function: Function, source: str, fix: Swap, got: Sequence[str], others: Sequence[Sequence[str] | None]
) -> Puzzle | None:
    """Return the puzzle with cases that tell the right repair from the others, None if there are none.

    got: what the function with the bug gives. others: what it gives after each other repair; None: it does not run.
    """
    cases = sorted(range(len(function.cases)), key=lambda n: (sum(map(len, function.cases[n])) + len(got[n]), n))
    failing = [n for n in cases if not _equal(got[n], function.cases[n][1])]
    if len(failing) < 2:
        return None
    shown, *hidden = failing
    chosen = dict.fromkeys([*hidden[:_HIDDEN], *[n for n in cases if n not in failing][:_HIDDEN]])
    for answers in others:
        if answers is None:
            continue
        telling = [n for n in cases if n != shown and not _equal(answers[n], function.cases[n][1])]
        if telling and not chosen.keys() & set(telling):  # else this repair is as good as the right one
            chosen[telling[0]] = None
    call, want = function.cases[shown]
    kept = {True: [n for n in chosen if n in failing], False: [n for n in chosen if n not in failing]}
    puzzle = Puzzle(
        function,
        source,
        fix,
        (call, want, got[shown]),
        tuple(function.cases[n] for n in kept[True]),
        tuple(function.cases[n] for n in kept[False]),
    )
    same = want[:_LONGEST_SHOWN] == got[shown][:_LONGEST_SHOWN]
    return puzzle if not same and len(puzzle.statement) <= _LONGEST_STATEMENT else None


def _equal(one: str, other: str) -> bool:
    """Tell whether two results, as source, are equal for the hidden tests: so are 1, 1.0 and True."""
    if one == other:
        return True
    try:
        return bool(ast.literal_eval(one) == ast.literal_eval(other))
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return False


def task_of(puzzle: Puzzle, number: int, commit: str, base_dir: Path) -> Task:
    """Return the row of a puzzle. base_dir: the directory with the task file."""
    function = puzzle.function
    names = [f"{function.name} {n}" for n in range(len(puzzle.failing) + len(puzzle.passing))]
    cases = [*puzzle.failing, *puzzle.passing]
    tests = "".join(
        _TEST.format(number=n, name=name, call=call, want=want)
        for n, (name, (call, want)) in enumerate(zip(names, cases, strict=True))
    )
    row = {
        "instance_id": instance_id(number),
        "image": f"dir:repos/{instance_id(number)}",
        "repo": f"pypi/{function.package.rpartition('-')[0]}",
        "version": function.package.rpartition("-")[2],
        "base_commit": commit,
        "problem_statement": puzzle.statement,
        "FAIL_TO_PASS": names[: len(puzzle.failing)],
        "PASS_TO_PASS": names[len(puzzle.failing) :],
        "log_parser": "parse_log_django",
        "eval_type": "pass_and_fail",
        "eval_script": _EVAL_SCRIPT.format(tests=tests),
        "patch": puzzle.patch(),
    }
    return Task.from_row(row, base_dir)


def instance_id(number: int) -> str:
    """Return a task's name, which tells nothing of it."""
    return f"realcode__{number:04d}"


def puzzles(specs: Iterable[str], directory: Path, seed: int, tell=lambda text: None) -> list[Puzzle]:
    """Return the puzzles of packages, in a random order. directory: keeps the packages.

    tell: is called with a line about each package. Raises MakeError, SandboxError.
    """
    found: list[Puzzle] = []
    for spec in specs:
        functions = harvest(spec, directory)
        prepared = prepare(spec, directory, copies=True)
        bench = Bench(prepared.package.tree, prepared.venv)
        rng = random.Random(f"{seed}:{spec}")

        async def all_of(functions: list[Function] = functions, bench: Bench = bench, rng=rng) -> list[list[Puzzle]]:
            return [await puzzles_of(one, bench, rng) for one in functions]

        made = [puzzle for some in asyncio.run(all_of()) for puzzle in some]
        tell(f"{prepared.package.label}: {len(made)} tasks of {len({p.function.name for p in made})} functions")
        found += made
    random.Random(seed).shuffle(found)
    return found


def make_tasks(
    out: Path,
    seed: int,
    train: Sequence[str],
    heldout: Sequence[str],
    counts: tuple[int, int],
    packages: Path,
    tell=lambda text: None,
) -> None:
    """Write and verify both splits, as the module's docstring describes. Existing files are replaced.

    train, heldout: packages. counts: the most tasks of each split. packages: where they are kept. Raises MakeError,
    SandboxError, RuntimeError if a task fails verification.
    """
    splits = [puzzles(specs, packages, seed, tell) for specs in (train, heldout)]
    splits[0] = _apart(splits[0], splits[1])
    chosen = [found[:count] for found, count in zip(splits, counts, strict=True)]
    for found, name in zip(chosen, ("training", "held-out"), strict=True):
        if not found:
            raise MakeError(f"no {name} task can be made of these packages; name others, with small functions")
    numbers = list(range(sum(map(len, chosen))))
    random.Random(seed).shuffle(numbers)  # a task's number must not reveal its split
    numbered = list(zip(numbers, [*chosen[0], *chosen[1]], strict=True))
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=out) as name:
        building = Path(name)
        commits = write_repositories(building / "repos", {instance_id(n): one.files() for n, one in numbered})
        tasks = [task_of(one, n, commits[instance_id(n)], building) for n, one in numbered]
        asyncio.run(verify(tasks))
        write_tasks(building / "train.parquet", tasks[: len(chosen[0])])
        write_tasks(building / "heldout.parquet", tasks[len(chosen[0]) :])
        shutil.rmtree(out / "repos", ignore_errors=True)
        for entry in ("repos", "train.parquet", "heldout.parquet"):
            (building / entry).replace(out / entry)


def _apart(train: list[Puzzle], heldout: list[Puzzle]) -> list[Puzzle]:
    """Return the training puzzles that are not nearly the same as a held-out one."""

    def row(puzzle: Puzzle, number: int) -> dict[str, str]:
        package = puzzle.function.package
        said = {"patch": puzzle.patch(), "problem_statement": puzzle.statement}
        return {"instance_id": str(number), "repo": package, **said}

    held = {one.function.source for one in heldout} | {one.function.name for one in heldout}
    rows = [row(one, n) for n, one in enumerate(train)]
    near = {one.instance_id for one in overlaps(rows, [row(one, n) for n, one in enumerate(heldout)])}
    return [
        one
        for n, one in enumerate(train)
        if str(n) not in near and one.function.source not in held and one.function.name not in held
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = program.parser("python -m rl.quickstart.realcode.tasks", __doc__)
    parser.add_argument("packages", nargs="+", metavar="NAME==VERSION")
    parser.add_argument("--heldout-packages", nargs="+", metavar="NAME==VERSION", required=True)
    parser.add_argument("--out", type=Path, required=True, help="directory to write to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=int, default=96, help="training tasks, at most (default: 96)")
    parser.add_argument("--heldout", type=int, default=64, help="held-out tasks, at most (default: 64)")
    args = parser.parse_args(arguments)
    try:
        counts = args.train, args.heldout
        kept = args.out.with_name(f"{args.out.name}.packages")
        make_tasks(args.out, args.seed, args.packages, args.heldout_packages, counts, kept, print)
    except (MakeError, RuntimeError, SandboxError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"tasks in {args.out}")
    return 0


if __name__ == "__main__":
    program.end(main)
