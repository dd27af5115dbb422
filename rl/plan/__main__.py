"""This program prints the plan of a config: ``python -m rl.plan +experiment=NAME key=value ...`` (see ``rl.plan``)."""

import sys
from pathlib import Path

from rl.command import read_command
from rl.config import ConfigError
from rl.plan import plan
from rl.plan.cpu import machine
from rl.plan.layout import MODEL, select
from rl.plan.tables import show
from rl.run.weights import adopt
from rollout import program


def main() -> None:
    """Print the plan of the command line's config, and exit with 2 if something does not fit."""
    config = read_command("rl.plan", "Print what a run takes: GPU memory, time, disk.", sys.argv[1:])
    path = f"{MODEL}.path"
    try:
        adopt(config)
        if config.prepare and not Path(select(config, path, "")).expanduser().is_dir():
            made_by = f"{config.prepare} makes this experiment's model when it runs"
            raise ConfigError(f"{path}: {made_by}; give a directory or name")
        made = plan(config)
    except ConfigError as error:
        error.tell("plan")
        sys.exit(2)
    show(made, machine(config))
    for problem in made.problems:
        print(f"plan: {problem}", file=sys.stderr)
    sys.exit(2 if made.problems else 0)


if __name__ == "__main__":
    program.end(main)
