"""Make repair tasks of small functions of Python packages: SWE-bench rows with repositories and hidden tests.

    python -m rl.data.functions NAME==VERSION ... --heldout-packages NAME==VERSION ... --out DIR [--seed 0] [options]

Each repository has one function of a package that can stand alone, with what it needs, in which one word or operator
was exchanged for its counterpart, and check.py, which makes a few calls. The statement is a report of a wrong call; the
hidden tests are other calls that the package's own tests make. No function of a held-out package is trained on, nor one
that is nearly the same.

Packages come from the index that pip uses, and their code runs in bubblewrap's boxes. The result is DIR/train.parquet,
DIR/heldout.parquet, a card of each, and DIR/repos/; DIR.packages keeps sources and environments. The same arguments
give the same bytes. Admit both files next (rl.data.admit). Exit status: 0 done, 2 no tasks can be made.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from rl.checks.alike import in_verified
from rl.data.card import write_card
from rl.data.convert import write_tasks
from rl.data.make.puzzles import FunctionPuzzle, apart, puzzles
from rl.data.make.repositories import write_repositories
from rl.data.make.sources import MakeError, name_of
from rollout import files, program
from rollout.sandbox import SandboxError


def make(
    out: Path,
    train: Sequence[str],
    heldout: Sequence[str],
    seed: int = 0,
    counts: tuple[int, int] = (800, 300),
    tell: Callable[[str], object] = print,
) -> None:
    """Write both splits, as the module's docstring describes. Existing files are replaced.

    train, heldout: packages. counts: the most tasks of each split. tell: is called with a line about each package.
    Raises MakeError if a split has no task, SandboxError, OSError.
    """

    def made(specs: Sequence[str]) -> list[FunctionPuzzle]:
        found: list[FunctionPuzzle] = []
        for spec in specs:
            try:
                some = puzzles(spec, out.with_name(f"{out.name}.packages"), seed)
            except MakeError as error:
                tell(f"left out: {error}")
                continue
            tell(f"{spec}: {len(some)} tasks of {len({one.function.name for one in some})} functions")
            found += some
        random.Random(seed).shuffle(found)
        return found

    held = made(heldout)
    splits = {"train": apart(made(train), held)[: counts[0]], "heldout": held[: counts[1]]}
    for name, found in splits.items():
        if not found:
            raise MakeError(f"no task for {name} can be made of these packages; name others, with small functions")
    numbers = list(range(sum(map(len, splits.values()))))
    random.Random(seed).shuffle(numbers)  # a task's number must not reveal its split
    ids = iter(f"function__{number:04d}" for number in numbers)
    named = {name: {next(ids): one for one in found} for name, found in splits.items()}
    with files.making(out, overwrite=True) as new:
        trees = {id: one.files() for some in named.values() for id, one in some.items()}
        commits = write_repositories(new / "repos", trees)
        for name, some in named.items():
            rows = [{**one.row(id, commits[id]), "image": f"dir:repos/{id}"} for id, one in some.items()]
            write_tasks(new / f"{name}.parquet", rows, ("licence",))
            functions = Counter(one.function.package for one in {p.function: p for p in some.values()}.values())
            write_card(new / f"{name}.parquet", "made", seed=seed, functions=dict(functions.most_common()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = program.parser("python -m rl.data.functions", __doc__)
    parser.add_argument("packages", nargs="+", metavar="NAME==VERSION")
    parser.add_argument("--heldout-packages", nargs="+", metavar="NAME==VERSION", required=True)
    parser.add_argument("--out", type=Path, required=True, help="directory to write to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=int, default=800, help="training tasks, at most (default: 800)")
    parser.add_argument("--heldout", type=int, default=300, help="held-out tasks, at most (default: 300)")
    args = parser.parse_args(arguments)
    if known := [one for one in (*args.packages, *args.heldout_packages) if in_verified(f"pypi/{name_of(one)}")]:
        parser.error(f"SWE-bench Verified has tasks of {known[0]}; choose another package")
    try:
        make(args.out, args.packages, args.heldout_packages, args.seed, (args.train, args.heldout))
    except (MakeError, SandboxError, OSError) as error:
        return program.failed(f"error: {error}", 2)
    print(f"tasks in {args.out}")
    return 0


if __name__ == "__main__":
    program.end(main)
