"""Fine-tune a policy on episodes, once or in rounds. docs/fine-tuning.md

    python -m rl.sft +experiment=NAME data=[DIR,...] [policy=DIR] [key=value ...]
    python -m rl.sft +experiment=NAME rounds=N [policy=DIR] [key=value ...]

DIR is a selection (rl.data.select), a collection, an evaluation or a run, or a file NAME.parquet of rl.ingest sft. Keys
of the group sft (configs/sft) may be given without `sft.`; all others are those of rl.train. The same command continues
a run that was stopped. Exit status: 0 done, 1 failed, 2 the config is wrong, 130 interrupted.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf

from rl.batch import JournalError, LostError
from rl.checks.data import check_tasks
from rl.checks.model import check_family
from rl.command import read_command
from rl.config import CONFIGS, ConfigError, check_all
from rl.run.directory import Run, open_run
from rl.run.vllm_server import ServeError
from rl.run.weights import adopt
from rl.screen import Screen, this_command
from rl.sft.checks import check_policy, check_sft, check_values
from rl.sft.rounds import play_rounds
from rl.sft.tune import tune
from rl.train import merge_policy, prepare, set_environment
from rl.tune.rows import RowsError
from rollout import files, program
from rollout.sandbox import SandboxError

_FAILURES = (RowsError, RuntimeError, JournalError, LostError, ServeError, SandboxError, OSError)


def spelled_out(arguments: Sequence[str]) -> list[str]:
    """Return the command line with ``sft.`` before the keys of that group."""
    own = yaml.safe_load((CONFIGS / "sft" / "default.yaml").read_text())

    def is_own(key: str) -> bool:  # `data=[DIR]`, but not `data.train_files=[FILE]`
        return key in own or (key.partition(".")[0] == "select" and "." in key)

    return [f"sft.{text}" if is_own(text.partition("=")[0]) else text for text in arguments]


def work(config: DictConfig, run: Run, screen: Screen) -> None:
    """Make what the experiment prepares, and fine-tune. Raises ConfigError and what ``_FAILURES`` has."""
    weights = adopt(config)
    screen.redirect(run.dir / "run.log")
    try:
        screen.show("preparing")
        prepare(config, screen)
        merge_policy(config, weights, run, screen)
        check_all(config, check_policy, *([check_tasks, check_family] if config.sft.rounds else []))
    finally:
        screen.restore()
    files.write(run.dir / "config.yaml", OmegaConf.to_yaml(config, resolve=True), synced=True)
    model = config.actor_rollout_ref.model.path
    if config.sft.rounds:
        play_rounds(config, model, run.dir, screen)
    else:
        tune(config, model, [Path(one).expanduser() for one in config.sft.data], run.dir, config.seed, screen)


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    config = read_command("rl.sft", (__doc__ or "").strip(), spelled_out(arguments), check_values)
    screen = Screen()
    try:
        check_sft(config)
        config.trainer.experiment_name += "-sft"  # its runs are not those of rl.train
        run = open_run(config)
    except ConfigError as error:
        error.tell()
        return 2
    except RuntimeError as error:  # in use
        print(f"config: {error}", file=sys.stderr)
        return 2
    began = time.monotonic()
    screen.say(f"{'continuing' if run.resumed else 'new run'} in {run.dir}")
    set_environment(config, run)
    run.lease.renew(screen.say)
    try:
        work(config, run, screen)
    except ConfigError as error:
        error.tell()
        return 2
    except _FAILURES as error:
        screen.clear()
        print(f"stopped: {' '.join(str(error).split())}", file=sys.stderr)
        screen.next(("continue", this_command()))
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        screen.clear()
        print("interrupted", file=sys.stderr)
        screen.next(("continue", this_command()))
        return 130
    finally:
        screen.restore()
    run.finish()
    screen.say(f"done after {(time.monotonic() - began) / 60:.1f} min")
    python, name = sys.orig_argv[0], config.trainer.experiment_name.removesuffix("-sft")
    screen.next(
        ("policy", str(run.dir)),
        ("evaluate", f"{python} -m rl.evaluate policy={run.dir}"),
        ("train", f"{python} -m rl.train +experiment={name} policy={run.dir}"),
    )
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    program.end(lambda: main(sys.argv[1:]))
