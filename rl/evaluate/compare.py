"""Compare two evaluations over the same tasks, task by task.

    python -m rl.evaluate compare A B [--common]

A and B are directories of evaluations. The difference of their resolve rates comes with an interval and an exact test.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from rich.table import Table

from rl.config.compose import ConfigError
from rl.evaluate.results import share
from rl.evaluate.statistics import difference, estimate, sign_flip_p
from rl.run.screen import Screen
from rollout import program

_SHOWN = 20


def load(directory: Path) -> dict[str, Any]:
    """Return the results of an evaluation's directory. Raises ConfigError."""
    path = directory / "results.json"
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{directory} has no results.json; give the directory of an evaluation that ended") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def compare(a: Mapping[str, Any], b: Mapping[str, Any], common: bool) -> dict[str, Any]:
    """Compare the results A and B over the tasks that were graded in both. The difference is B's pass@1 minus A's.

    Raises ConfigError if the task sets differ, unless ``common`` is set, which compares the tasks that are the same in
    both; and if no task was graded in both.
    """
    first, second = a["by_task"], b["by_task"]
    same = [task for task, row in first.items() if second.get(task, {}).get("row") == row["row"]]
    other = len({*first, *second}) - len(same)
    if other and not common:
        raise ConfigError(
            f"the task sets differ: {len(same)} tasks are the same, {other} are in only one or have other rows; "
            "--common compares those that are the same"
        )
    both = [task for task in same if first[task]["episodes"] and second[task]["episodes"]]
    if not both:
        raise ConfigError("no task was graded in both")
    counts = [[(row[task]["episodes"], row[task]["resolved"]) for task in both] for row in (first, second)]
    gaps = [Fraction(d, m) - Fraction(c, n) for (n, c), (m, d) in zip(*counts, strict=True)]
    gap = {task: float(one) for task, one in zip(both, gaps, strict=True)}
    solved = [{task for task in both if row[task]["resolved"]} for row in (first, second)]
    single = all(n == 1 for of in counts for n, _ in of)
    return {
        "a": a["name"],
        "b": b["name"],
        "tasks": len(both),
        "left_out": {"other_tasks": other, "without_verdict": len(same) - len(both)},
        "pass_at_1": [vars(found) for of in counts if (found := estimate(of)) is not None],
        "difference": vars(difference(gaps)),
        "p": sign_flip_p(gaps),
        "test": "McNemar, exact" if single else "permutation over tasks, exact",
        "only_a": sorted(solved[0] - solved[1]),
        "only_b": sorted(solved[1] - solved[0]),
        "both": len(solved[0] & solved[1]),
        "neither": len(both) - len(solved[0] | solved[1]),
        "gap_by_task": {task: one for task, one in sorted(gap.items(), key=lambda item: item[1]) if one},
    }


def show(found: Mapping[str, Any], screen: Screen) -> None:
    """Print a comparison."""
    table = Table(title=f"A: {found['a']}   B: {found['b']}", show_header=False)
    for name, one in zip("AB", found["pass_at_1"], strict=True):
        table.add_row(f"pass@1 {name}", share(one))
    table.add_row("B - A", share(found["difference"], "{:+.3f}".format))
    table.add_row(found["test"], f"p = {found['p']:.4g}")
    table.add_row("tasks compared", str(found["tasks"]))
    left = found["left_out"]
    if any(left.values()):
        table.add_row("left out", f"{left['other_tasks']} not the same, {left['without_verdict']} without a verdict")
    table.add_row("solved by both, by neither", f"{found['both']}, {found['neither']}")
    screen.print(table)
    for name in "ab":
        only = found[f"only_{name}"]
        more = f" and {len(only) - _SHOWN} more (--json has all)" if len(only) > _SHOWN else ""
        screen.print(f"solved by {name.upper()} only, {len(only)}: {', '.join(only[:_SHOWN]) or '-'}{more}")


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status. Raises ConfigError."""
    parser = program.parser("python -m rl.evaluate compare", __doc__)
    parser.add_argument("a", type=Path, help="directory of an evaluation")
    parser.add_argument("b", type=Path, help="directory of another one")
    parser.add_argument("--common", action="store_true", help="if the task sets differ, compare the tasks in both")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    args = parser.parse_args(arguments)
    a, b = load(args.a), load(args.b)
    found = compare(a, b, args.common)
    if args.json:  # first: whoever reads the screen may close it
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    with Screen() as screen:
        for name, one in (("A", a), ("B", b)):
            if not one["complete"]:
                screen.print(f"note: {name} is not complete: {one['infra']['episodes']} episodes have no verdict yet")
        show(found, screen)
    return 0
