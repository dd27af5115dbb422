"""Generate the quickstart's repair tasks: SWE-bench v5 rows with repositories and hidden tests.

    python -m rl.quickstart.tasks --out DIR --seed S [--train 64 --heldout 32]

The result is DIR/train.parquet, DIR/heldout.parquet and DIR/repos/<instance_id>/. Each repository has one module with
one function that returns the wrong one of four expressions of its arguments; the problem statement says which one is
wanted. The (gold, bug) pairs are spread evenly over both splits, and no (module, function) pair is in both. Of all that
an agent sees only the statement tells the gold expression; the tests exist only in eval_script.

The same seed gives the same bytes (parquet files, commit ids). The hidden tests are chosen so that every wrong
expression fails one of those that the bug fails. Before anything is moved to its final place, every task is graded in a
sandbox: the gold patch must resolve it, and a patch that keeps the bug must not.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet

from rewards.grade import grade
from rewards.task import Task
from rewards.verdict import Outcome
from rl.data.make import edits
from rl.data.make.hidden import eval_script
from rl.data.make.repositories import write_repositories
from rl.run.journal import run_all
from rollout import program
from rollout.sandbox.local.box import boot_local

CANDIDATES: dict[str, str] = {
    "sum": "a + b",
    "difference": "a - b",
    "larger": "max(a, b)",
    "smaller": "min(a, b)",
}
"""The expression that solves a task, by the cue in its problem statement."""

# No name is a module of the standard library: the tests import the task's module after those. There are few names
# because the policy must copy them, which is most of what the warm start has to teach.
# fmt: off
MODULES = ("basket", "bridge", "candle", "garden", "hammer", "lamp", "mirror", "river")
FUNCTIONS = (
    "align", "bind", "blend", "chart", "craft", "fold", "fuse", "gauge", "grade", "join", "judge",
    "level", "mark", "match", "merge", "mix", "pick", "rank", "score", "shift", "solve", "tally",
    "trace", "weigh",
)
# fmt: on

_MEANING: dict[str, Callable[[int, int], int]] = {
    "a + b": lambda a, b: a + b,
    "a - b": lambda a, b: a - b,
    "max(a, b)": max,
    "min(a, b)": min,
}
_ARGUMENTS = range(-9, 10)
_TIMEOUT_S = 60.0
# This patch changes no code. It is needed because an empty patch is never run, and the bug must be seen to fail.
_NOTE_PATCH = """\
diff --git a/NOTE b/NOTE
new file mode 100644
--- /dev/null
+++ b/NOTE
@@ -0,0 +1 @@
+note
"""


@dataclass(frozen=True)
class Case:
    """A case is one hidden test: function(a, b) must be `expected`."""

    a: int
    b: int
    expected: int

    def name(self, function: str) -> str:
        """Return the test's name, as it is in FAIL_TO_PASS or PASS_TO_PASS."""
        return f"{function}({self.a}, {self.b}) is {self.expected}"


@dataclass(frozen=True)
class Puzzle:
    """A puzzle is one task before it is written.

    cue: the word for the gold expression. bug: the wrong expression in the repository. failing: the cases that the bug
    fails. passing: a case that the bug passes.
    """

    instance_id: str
    module: str
    function: str
    cue: str
    bug: str
    failing: tuple[Case, Case]
    passing: Case

    @property
    def gold(self) -> str:
        """Return the expression that solves the task."""
        return CANDIDATES[self.cue]

    def source(self, expression: str) -> str:
        """Return the module's source with `expression` in it."""
        return f"def {self.function}(a, b):\n    return {expression}\n"

    def files(self) -> dict[str, str]:
        """Return the texts of the repository's files, by name."""
        return {"README.md": f"The {self.module} module.\n", f"{self.module}.py": self.source(self.bug)}

    def patch(self) -> str:
        """Return the git patch that solves the task."""
        name = f"{self.module}.py"
        return edits.patch({name: self.source(self.bug)}, {name: self.source(self.gold)})


def make_tasks(out: Path, seed: int, n_train: int = 64, n_heldout: int = 32) -> None:
    """Write and verify both splits, as the module's docstring describes. Existing files are replaced.

    Raises ValueError if a split is empty or there are not enough names, RuntimeError if a task fails verification.
    """
    train, heldout = _puzzles(random.Random(seed), n_train, n_heldout)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=out) as name:
        building = Path(name)
        commits = write_repositories(building / "repos", {p.instance_id: p.files() for p in [*train, *heldout]})
        for split, puzzles in (("train", train), ("heldout", heldout)):
            tasks = [_task(p, commits, building) for p in puzzles]
            write_tasks(building / f"{split}.parquet", tasks)
            asyncio.run(verify(tasks))
        shutil.rmtree(out / "repos", ignore_errors=True)
        for entry in ("repos", "train.parquet", "heldout.parquet"):
            (building / entry).replace(out / entry)


def _puzzles(rng: random.Random, n_train: int, n_heldout: int) -> tuple[list[Puzzle], list[Puzzle]]:
    names = list(itertools.product(MODULES, FUNCTIONS))
    total = n_train + n_heldout
    if min(n_train, n_heldout) < 1 or total > len(names):
        raise ValueError(f"each split needs a task, and there are names for {len(names)} tasks, not for {total}")
    rng.shuffle(names)
    pairs = [*_spread(rng, n_train), *_spread(rng, n_heldout)]
    numbers = list(range(total))
    rng.shuffle(numbers)  # a task's number must not reveal its split or its expressions
    puzzles = [
        _puzzle(rng, f"quickstart__{module}-{number:04d}", module, function, cue, bug)
        for (module, function), (cue, bug), number in zip(names, pairs, numbers, strict=False)
    ]
    return puzzles[:n_train], puzzles[n_train:]


def _spread(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """Return `count` (cue, bug) pairs in random order. The twelve pairs occur equally often, or some once more."""
    pairs = [(cue, bug) for cue, gold in CANDIDATES.items() for bug in CANDIDATES.values() if bug != gold]
    rng.shuffle(pairs)
    chosen = list(itertools.islice(itertools.cycle(pairs), count))
    rng.shuffle(chosen)
    return chosen


def _puzzle(rng: random.Random, instance_id: str, module: str, function: str, cue: str, bug: str) -> Puzzle:
    gold = CANDIDATES[cue]
    right, planted = _MEANING[gold], _MEANING[bug]
    wrong = [meaning for expression, meaning in _MEANING.items() if expression != gold]
    points = [(a, b) for a, b in itertools.product(_ARGUMENTS, repeat=2) if (a, b) != (0, 0)]
    rng.shuffle(points)
    agreeing = next(point for point in points if right(*point) == planted(*point))
    telling = [(a, b) for a, b in points if a != b and right(a, b) != planted(a, b)]
    failing = next(
        (first, second)
        for first, second in itertools.combinations(telling, 2)
        if min(first) < 0
        and min(second) < 0 < max(second)
        and all(any(right(*point) != other(*point) for point in (first, second)) for other in wrong)
    )
    cases = [Case(*point, right(*point)) for point in (*failing, agreeing)]
    return Puzzle(instance_id, module, function, cue, bug, failing=(cases[0], cases[1]), passing=cases[2])


def _task(puzzle: Puzzle, commits: dict[str, str], base_dir: Path) -> Task:
    cases = [*puzzle.failing, puzzle.passing]
    tests = [(case.name(puzzle.function), f"{puzzle.function}({case.a}, {case.b})", case.expected) for case in cases]
    row = {
        "instance_id": puzzle.instance_id,
        "image": f"dir:repos/{puzzle.instance_id}",
        "repo": f"quickstart/{puzzle.module}",
        "version": "1",
        "base_commit": commits[puzzle.instance_id],
        "problem_statement": (
            f"{puzzle.function}(a, b) in {puzzle.module}.py must return the {puzzle.cue} of a and b."
        ),
        "FAIL_TO_PASS": [case.name(puzzle.function) for case in puzzle.failing],
        "PASS_TO_PASS": [puzzle.passing.name(puzzle.function)],
        "log_parser": "parse_log_django",
        "eval_type": "pass_and_fail",
        "eval_script": eval_script(puzzle.module, tests),
        "patch": puzzle.patch(),
    }
    return Task.from_row(row, base_dir)


def write_tasks(path: Path, tasks: list[Task]) -> None:
    """Write a parquet file of tasks."""
    rows = [task.to_row() for task in tasks]
    schema = pyarrow.schema([(name, pyarrow.string()) for name in rows[0]])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), path)


async def verify(tasks: Sequence[Task]) -> None:
    """Grade the gold patch and a patch that keeps the bug, for each task. Raises RuntimeError for a wrong verdict."""

    async def check(piece: tuple[Task, str, Outcome]) -> None:
        task, patch, wanted = piece
        boot = functools.partial(boot_local, task.snapshot)
        verdict = await grade(task, patch.encode(), boot, timeout_s=_TIMEOUT_S)
        if verdict.outcome is not wanted:
            raise RuntimeError(
                f"{task.instance_id} should be {wanted}, but is {verdict.outcome} ({verdict.reason}: {verdict.detail}) "
                f"with\n{patch}\n{verdict.log_tail}"
            )

    gold = [(task, task.patch or "", Outcome.RESOLVED) for task in tasks]
    kept = [(task, _NOTE_PATCH, Outcome.UNRESOLVED) for task in tasks]
    await run_all([*gold, *kept], os.cpu_count() or 1, check)


def main() -> None:
    """Run the command."""
    parser = program.parser("python -m rl.quickstart.tasks", __doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory to write to")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--train", type=int, default=64, help="number of training tasks")
    parser.add_argument("--heldout", type=int, default=32, help="number of held-out tasks")
    options = parser.parse_args()
    make_tasks(options.out, options.seed, options.train, options.heldout)
    print(f"{options.train} + {options.heldout} tasks in {options.out}")


if __name__ == "__main__":
    program.end(main)
