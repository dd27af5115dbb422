"""The program behind ``rl.evaluate`` and ``rollout.collect``, which play episodes in the same way.

They keep different things of them: a ``Purpose`` says which.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import statistics
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rewards.swebench import warm_up
from rewards.task import Task
from rl.config.compose import ConfigError
from rl.episodes.boxes import prepare_images
from rl.evaluate import results, serve, setup
from rl.evaluate.config import digest, identity_of, name_of, shard_of
from rl.evaluate.player import Player
from rl.metrics.episodes import Line
from rl.run.journal import JournalError, LostError, Progress, estimate
from rl.run.scratch import remove_socket_directory, socket_directory
from rl.run.screen import Screen, this_command
from rl.run.store import storing
from rl.run.vllm_server import ServeError, VllmServer
from rl.run.weights import Weights, merge
from rollout import files
from rollout.episode import Episode, Setup
from rollout.records import Record
from rollout.records.reading import CorruptRecordError
from rollout.sandbox import SandboxError


class Purpose:
    """A purpose says what episodes are played for, and so what is kept of them. This one is an evaluation's."""

    split = "eval"
    log = "evaluate.log"
    pause_s = 0.0  # after each episode
    quiet = False  # whether others show the results

    def begin(self, directory: Path, setup: Setup) -> Setup:
        """Return the set-up to play with. ``directory``: where everything is kept."""
        self._setup = setup
        return setup

    def setup_of(self, task: Task, sample: int) -> Setup:
        """Return the set-up of an episode."""
        return self._setup

    def kept(self, episode: Episode, record: Record) -> None:
        """Keep what is kept of an attempt besides its record. The record is written next, and may be added to here."""

    def hints(self, directory: Path) -> list[tuple[str, str]]:
        """Return what can be done with the result, as (label, command or path)."""
        python = sys.orig_argv[0]
        predictions = directory / "preds.json"
        return [
            ("results", str(directory / "results.json")),
            ("look", f"{python} -m rollout.view {directory}"),
            ("read an episode", f"{python} -m rollout.records {directory} EPISODE"),
            ("compare", f"{python} -m rl.evaluate compare {directory} OTHER"),
            ("to SWE-bench", f"sb-cli submit SUBSET SPLIT --predictions_path {predictions} --run_id RUN"),
        ]


async def play_all(
    config: DictConfig,
    weights: Weights | None,
    tasks: list[Task],
    screen: Screen,
    purpose: Purpose,
    server: VllmServer | None = None,
) -> int:
    """Play the episodes that the directory lacks, write its results, and return the exit status.

    weights: those of the policy, None for an endpoint. tasks: all of them, regardless of ``limit``. server: one that
    serves the weights; None: one is started and ended. Raises ConfigError, JournalError, ServeError, LostError,
    SandboxError and OSError.
    """
    this_task = asyncio.current_task()
    assert this_task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this_task.cancel)
    served = None if config.merge and config.model else await setup.ask(config)
    name = name_of(config, weights)
    identity = identity_of(config, weights, tasks)
    directory = Path(config.out or Path(config.root) / f"{name}-{digest(identity)[:8]}").absolute()
    limited = tasks[: config.limit]
    if shard := shard_of(config):
        directory, limited = directory / "shards" / str(shard), shard.of(limited, lambda task: task.image)
    player = Player(directory, identity, purpose.split)
    rows = {
        task.instance_id: {"row": digest(task.to_row()), "repo": task.repo, "difficulty": task.difficulty}
        for task in limited
    }
    try:
        files.write(directory / "config.yaml", OmegaConf.to_yaml(config, resolve=True), synced=True)
        wanted = [] if config.merge else player.wanted(limited, config.samples)
        there = len(rows) * config.samples - len(player.wanted(limited, config.samples))
        screen.say(f"{len(wanted)} episodes to play{f', {there} are there' if there else ''}, in {directory}")
        if wanted:
            try:
                screen.redirect(directory / purpose.log)
                with storing(directory, config.store, screen.say):
                    await _play(config, weights, served, player, wanted, screen, purpose, server)
            finally:
                screen.restore()
    finally:
        found = results.results(name, rows, config.samples, player.lines)
        results.write_all(directory, found, player.lines)
        player.close()
    screen.clear()
    if not purpose.quiet:
        for table in results.tables(found):
            screen.print(table)
        more = [] if found["complete"] else [("try the rest", this_command())]
        screen.next(*more, *purpose.hints(directory))
    return 0 if found["complete"] else 1


async def _play(
    config: DictConfig,
    weights: Weights | None,
    served: serve.ServedModel | None,
    player: Player,
    wanted: Sequence[tuple[Task, int]],
    screen: Screen,
    purpose: Purpose,
    server: VllmServer | None,
) -> None:
    out = player.dir
    count = functools.partial(screen.show, "images")
    await asyncio.to_thread(prepare_images, config.sandbox, out, [task for task, _ in wanted], screen.say, count)
    async with contextlib.AsyncExitStack() as stack:
        sockets = out / "socket_dir"
        socket_directory(sockets)
        stack.callback(remove_socket_directory, sockets)
        if weights is not None and server is None and config.protocol == "tokens":
            if weights.sharded is not None:
                screen.show("merging the checkpoint's shards")
                await asyncio.to_thread(merge, weights.sharded, Path(weights.model), out / "merge.log")
            screen.say("starting the vLLM server (its output: vllm.log)")
            server = serve.start_server(weights.model, config.max_context, config.serve, out / "vllm.log")
            stack.callback(server.close)
        screen.show("loading")
        warming = asyncio.create_task(asyncio.to_thread(warm_up))
        model = setup.model_of(config, weights, served)
        if config.protocol == "tokens":
            episodes = await setup.token_setup(config, model, served, server, out.name, stack)
        elif config.protocol == "expert":
            episodes = setup.scripted_setup(config, model, out.name)
        else:
            episodes = setup.forwarding_setup(config, out.name)
        episodes = purpose.begin(out, episodes)
        await warming
        await episodes.proxy.start()
        stack.push_async_callback(episodes.proxy.stop)
        jobs = config.sandbox.concurrency
        screen.say(f"playing, {jobs} at the same time")
        progress = Progress(screen, "episodes", len(wanted))
        times = [line["wall_s"] for line in player.lines if not line["infra"]]
        few = min(len(wanted), jobs)

        def tell() -> None:
            screen.say(estimate(len(wanted) - progress.done, statistics.fmean(times) + purpose.pause_s, jobs))

        if len(times) >= few:
            tell()

        def done(line: Line) -> None:
            outcome = "resolved" if line["resolved"] else line["reason"]
            progress.count(f"lost ({outcome})" if line["infra"] else outcome, final=not line["infra"])
            if not line["infra"]:
                times.append(line["wall_s"])
                if len(times) == few and progress.done < progress.total:
                    tell()
            missing = f"  missing: {'; '.join(line['missing'])}" if line["missing"] else ""
            if line["infra"] or missing or not screen.is_terminal:
                place = f"{progress.done}/{progress.total} {line['task']} #{line['sample']}"
                detail = f" ({' '.join(line['detail'].split())[:200]})" if line["infra"] else ""
                screen.say(f"{place}: {outcome}{detail}  {line['turns']} turns  {line['wall_s']:.1f} s{missing}")

        await player.play(
            episodes,
            wanted,
            concurrency=jobs,
            step=weights.step if weights else 0,
            model=model,
            done=done,
            check=server.check if server is not None else lambda: None,
            kept=purpose.kept,
            setup_of=purpose.setup_of,
            pause_s=purpose.pause_s,
        )


def run(screen: Screen, work: Callable[[], Awaitable[int] | int], failures: tuple[type[Exception], ...] = ()) -> int:
    """Return the exit status of a program, after a line on stderr if it fails.

    ``work`` composes the config and returns ``play_all``'s awaitable, or a status. failures: what else it may raise if
    the config is right.
    """
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        with screen:
            made: Any = work()
            return made if isinstance(made, int) else asyncio.run(made)
    except ConfigError as error:
        error.tell()
        return 2
    except (JournalError, CorruptRecordError, ServeError, LostError, SandboxError, OSError, *failures) as error:
        said = " ".join(str(error).split())
        if isinstance(error, JournalError) and not error.__cause__:  # in use or damaged; else the disk is full
            print(f"config: {said}", file=sys.stderr)
            return 2
        print(f"stopped: {said}", file=sys.stderr)
        screen.next(("continue", this_command()))
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("interrupted", file=sys.stderr)
        screen.next(("continue", this_command()))
        return 130
