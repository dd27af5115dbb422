"""This program prints the plan of a config: ``python -m rl.plan +experiment=NAME key=value ...`` (see ``rl.plan``)."""

import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from rl.config import CONFIGS, register_resolvers
from rl.plan import plan
from rl.plan.layout import MODEL, select
from rl.plan.model import ModelUnknown
from rl.plan.tables import show

register_resolvers()


@hydra.main(version_base=None, config_path=str(CONFIGS), config_name="train")
def main(config: DictConfig) -> None:
    """Print the plan of the command line's config, and exit with 2 if something does not fit."""
    path = f"{MODEL}.path"
    try:
        if config.prepare and not Path(select(config, path, "")).expanduser().is_dir():
            made_by = f"{config.prepare} makes this experiment's model when it runs"
            raise ModelUnknown(f"{path}: {made_by}; give a directory or name")
        made = plan(config)
    except ModelUnknown as error:
        print(f"plan: {error}", file=sys.stderr)
        sys.exit(2)
    show(made, config)
    for problem in made.problems:
        print(f"plan: {problem}", file=sys.stderr)
    sys.exit(2 if made.problems else 0)


if __name__ == "__main__":
    main()
