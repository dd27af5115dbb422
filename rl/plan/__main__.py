"""Prints the plan of a config: ``python -m rl.plan +experiment=NAME key=value ...`` (see ``rl.plan``)."""

import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from rl.config import CONFIGS, register_resolvers
from rl.plan import plan
from rl.plan.layout import REF, select
from rl.plan.model import ModelUnknown
from rl.plan.tables import show

register_resolvers()


@hydra.main(version_base=None, config_path=str(CONFIGS), config_name="train")
def main(cfg: DictConfig) -> None:

    path = f"{REF}.model.path"
    try:
        if cfg.prepare and not Path(select(cfg, path, "")).expanduser().is_dir():
            raise ModelUnknown(
                f"{path}: {cfg.prepare} makes this experiment's model when it runs; give a directory or name"
            )
        made = plan(cfg)
    except ModelUnknown as error:
        print(f"plan: {error}", file=sys.stderr)
        sys.exit(2)
    show(made, cfg)
    for problem in made.problems:
        print(f"plan: {problem}", file=sys.stderr)
    sys.exit(2 if made.problems else 0)


if __name__ == "__main__":
    main()
