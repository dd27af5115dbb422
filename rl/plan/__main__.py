"""Print the plan of a config: ``python -m rl.plan [from=RUN] +experiment=NAME key=value ...`` (see ``rl.plan``).

With from=RUN alone it is the run's own config.
"""

import sys
from pathlib import Path

from rl.config.command import read_command
from rl.config.compose import ConfigError
from rl.plan import plan
from rl.plan.cpu import machine
from rl.plan.fit import apply, fitted, own_config
from rl.plan.layout import MODEL, select
from rl.plan.tables import show, show_fitted
from rl.run.weights import adopt
from rollout import program

FROM = "from="


def main() -> None:
    """Print the plan of the command line's config, and exit with 2 if something does not fit."""
    about = "Print what a run takes: GPU memory, time, disk. from=RUN: with what a run tells."
    others = [word for word in sys.argv[1:] if not word.startswith(FROM)]
    runs = [Path(word.removeprefix(FROM)).expanduser() for word in sys.argv[1:] if word.startswith(FROM)]
    path = f"{MODEL}.path"
    try:
        alone = runs and not others
        config = own_config(runs[0]) if alone else read_command("rl.plan", about, others)
        adopt(config)
        if config.prepare and not alone and not Path(select(config, path, "?")).expanduser().is_dir():
            made_by = f"{config.prepare} makes this experiment's model when it runs"
            raise ConfigError(f"{path}: {made_by}; give a directory or name")
        for run in runs:
            found = fitted(run)
            show_fitted(found, config, run.name)
            apply(config, found)
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
