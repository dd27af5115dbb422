"""Evaluate a policy on a set of tasks. docs/evaluation.md

    python -m rl.evaluate policy=DIR [tasks=FILE] [samples=N] [key=value ...]
    python -m rl.evaluate endpoint=URL tasks=FILE [model=NAME] [protocol=messages] [key_env=VARIABLE] [key=value ...]
    python -m rl.evaluate policy=DIR ... shard=3/16       # one part of the tasks
    python -m rl.evaluate policy=DIR ... merge=true       # the results of all parts; plays nothing
    python -m rl.evaluate compare A B [--common]

All keys: configs/evaluate.yaml. The same command continues an evaluation that was stopped, and retries the episodes
that were lost to the infrastructure. Exit status: 0 every episode has a verdict, 1 not all have, 2 the config is wrong,
130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Sequence

from rl.evaluate import compare
from rl.evaluate.config import check_evaluation, compose_evaluation
from rl.evaluate.run import Purpose, play_all, run
from rl.run.screen import Screen
from rollout import program


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(program.plain(__doc__))
        return 0 if arguments else 2
    screen = Screen()

    def work() -> Awaitable[int] | int:
        if arguments[0] == "compare":
            return compare.main(arguments[1:])
        config, weights = compose_evaluation(arguments)
        return play_all(config, weights, check_evaluation(config), screen, Purpose())

    return run(screen, work)


if __name__ == "__main__":
    program.end(lambda: main(sys.argv[1:]))
