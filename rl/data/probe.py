"""Measure how often a policy resolves each task, and write the rate with its interval into the rows.

    python -m rl.data.probe tasks.parquet --out rated.parquet [--episodes 8] policy=DIR [key=value ...]
    python -m rl.data.probe tasks.parquet --out rated.parquet [--episodes 8] endpoint=URL [key=value ...]

It is an evaluation (rl.evaluate, with all of its keys) whose results go into columns: resolve_rate, resolve_rate_low
and _high (Wilson's interval at 95 %) and episodes. Tasks without a verdict are left out. The evaluation's directory is
OUT.probe/ unless out=DIR names another one; the same command continues it, and a higher --episodes adds to a
finished one.
`rl.data.select --rate` chooses tasks of such a file, and `curriculum.by_rate` starts from its rates.

Exit status: 0 every episode has a verdict, 1 not all have, 2 the config is wrong, 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

from rewards.task import load_tasks
from rl.config.compose import ConfigError
from rl.data.card import beside, write_card
from rl.data.rates import ResolveRate, other_than, write_rated
from rl.evaluate.config import check_evaluation, compose_evaluation
from rl.evaluate.run import Purpose, play_all, run
from rl.run.screen import Screen
from rollout import program


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = _parser()
    args = parser.parse_intermixed_args(arguments)  # keys may follow options
    other_than(parser, args.tasks, args.out)
    screen = Screen()

    def work() -> int:
        own = {"tasks": args.tasks.absolute(), "samples": args.episodes}
        if wrong := [text for text in args.keys if text.lstrip("+~").partition("=")[0] in own]:
            raise ConfigError(*(f"{text}: leave it out; FILE and --episodes say it" for text in wrong))
        place = (
            []
            if any(text.startswith("out=") for text in args.keys)
            else [f"out={beside(args.out, 'probe').absolute()}"]
        )
        settings = [*place, *(f"{key}={value}" for key, value in own.items())]
        config, weights = compose_evaluation([*settings, *args.keys])
        tasks = check_evaluation(config)
        status = asyncio.run(play_all(config, weights, tasks, screen, Purpose()))
        if config.shard is None:
            _write(args.tasks, args.out, Path(config.out), screen)
        return status

    return run(screen, work)


def _write(source: Path, out: Path, directory: Path, screen: Screen) -> None:
    """Write the rows with the rates that an evaluation's directory has."""
    found = json.loads((directory / "results.json").read_text())["by_task"]
    rates = {task: ResolveRate(one["episodes"], one["resolved"]) for task, one in found.items() if one["episodes"]}
    tasks = load_tasks(source)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_rated(source, out, tasks, rates)
    write_card(out, "rated", source, episodes=sum(one.episodes for one in rates.values()), evaluation=directory.name)
    some = sum(0 < one.resolved < one.episodes for one in rates.values())
    screen.say(f"{out}: {len(rates)} of {len(tasks)} tasks have a rate; {some} were resolved sometimes, not always")


def _parser() -> argparse.ArgumentParser:
    parser = program.parser("python -m rl.data.probe", __doc__)
    add = parser.add_argument
    add("tasks", type=Path, metavar="FILE", help="the task file to measure")
    add("keys", nargs="*", metavar="key=value", help="keys of rl.evaluate; policy or endpoint must be among them")
    add("--out", type=Path, required=True, help="the parquet file to write")
    add("--episodes", type=int, default=8, metavar="N", help="episodes of each task (default: %(default)s)")
    return parser


if __name__ == "__main__":
    program.end(main)
