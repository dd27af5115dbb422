"""Fine-tune a policy on episodes, once or in rounds. docs/fine-tuning.md

    python -m rl.sft +experiment=NAME data=[DIR,...] [policy=DIR] [key=value ...]
    python -m rl.sft +experiment=NAME rounds=N [policy=DIR] [key=value ...]

DIR is a selection (rl.data.select), a collection, an evaluation or a run, or a file NAME.parquet of rl.ingest sft. Keys
of the group sft (configs/sft) may be given without `sft.`; all others are those of rl.train. The same command continues
a run that was stopped. Exit status: 0 done, 1 failed, 2 the config is wrong, 130 interrupted.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from rl.checks import check_values
from rl.checks.data import check_tasks
from rl.checks.model import check_family
from rl.config.command import read_command
from rl.config.compose import CONFIGS, ConfigError, check_all
from rl.evaluate.player import changed
from rl.evaluate.run import run
from rl.run.directory import open_run
from rl.run.screen import Screen
from rl.run.weights import adopt
from rl.sft.checks import check_policy, check_sft
from rl.sft.fine_tune import tune
from rl.sft.rounds import play_rounds
from rl.traces.rows import RowsError
from rl.train.__main__ import merge_policy, prepare, set_environment
from rollout import files, program


def spelled_out(arguments: Sequence[str]) -> list[str]:
    """Return the command line with ``sft.`` before the keys of that group."""
    own = yaml.safe_load((CONFIGS / "sft" / "default.yaml").read_text())
    # `data=[DIR]`, but not `data.train_files=[FILE]`
    return [
        f"sft.{text}" if text.partition("=")[0] in own or text.startswith("select.") else text for text in arguments
    ]


def work(config: DictConfig, screen: Screen) -> int:
    """Check the config, make what the experiment prepares, and fine-tune; return the exit status.

    Raises ConfigError, RowsError, RuntimeError, JournalError, SandboxError and OSError.
    """
    check_sft(config)
    config.trainer.experiment_name += "-sft"  # its runs are not those of rl.train
    try:
        opened = open_run(config)
    except RuntimeError as error:
        raise ConfigError(str(error)) from error  # in use
    began = time.monotonic()
    screen.say(f"{'continuing' if opened.resumed else 'new run'} in {opened.dir}")
    set_environment(config, opened)
    opened.lease.renew(screen.say)
    weights = adopt(config)
    screen.redirect(opened.dir / "run.log")
    try:
        screen.show("preparing")
        prepare(config, screen)
        merge_policy(config, weights, opened, screen)
        check_all(config, check_policy, *([check_tasks, check_family] if config.sft.rounds else []))
    finally:
        screen.restore()
    known = opened.dir / "config.yaml"
    if known.exists() and (other := changed(_decides(OmegaConf.load(known)), _decides(config))):
        raise ConfigError(f"run.dir: {opened.dir} belongs to another fine-tuning ({other}); give another directory")
    files.write(known, OmegaConf.to_yaml(config, resolve=True), synced=True)
    model = config.actor_rollout_ref.model.path
    if config.sft.rounds:
        play_rounds(config, model, opened.dir, screen)
    else:
        tune(config, model, [Path(one).expanduser() for one in config.sft.data], opened.dir, config.seed, screen)
    opened.finish()
    screen.say(f"done after {(time.monotonic() - began) / 60:.1f} min")
    python, name = sys.orig_argv[0], config.trainer.experiment_name.removesuffix("-sft")
    screen.next(
        ("policy", str(opened.dir)),
        *([("look", f"{python} -m rollout.view {opened.dir}")] if config.sft.rounds else []),
        ("evaluate", f"{python} -m rl.evaluate policy={opened.dir}"),
        ("train", f"{python} -m rl.train +experiment={name} policy={opened.dir}"),
    )
    return 0


def _decides(config: Any) -> dict[str, Any]:
    """Return what a fine-tuned policy comes of. More rounds may be asked for later."""
    sft: Any = OmegaConf.to_container(config.sft, resolve=True)
    model = OmegaConf.to_container(config.actor_rollout_ref.model, resolve=True)
    return {"sft": {**sft, "rounds": bool(config.sft.rounds)}, "model": model, "seed": config.seed}


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    config = read_command("rl.sft", (__doc__ or "").strip(), spelled_out(arguments), check_values)
    screen = Screen()
    return run(screen, lambda: work(config, screen), (RowsError, RuntimeError))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    program.end(lambda: main(sys.argv[1:]))
