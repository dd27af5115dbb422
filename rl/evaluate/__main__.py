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

import asyncio
import contextlib
import functools
import logging
import signal
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from rewards.grade import warm_up
from rewards.task import Task
from rl.batch import JournalError, LostError, Progress, estimate
from rl.boxes import prepare_images
from rl.config import ConfigError
from rl.evaluate import compare, results, serve, setup
from rl.evaluate.config import check_evaluation, compose_evaluation, digest, identity_of, name_of, shard_of
from rl.evaluate.play import Evaluation, Line
from rl.evaluate.weights import Weights
from rl.run.scratch import remove_socket_directory, socket_directory
from rl.run.vllm_server import ServeError
from rl.screen import Screen, this_command
from rollout import files
from rollout.sandbox import SandboxError


async def evaluate(config: DictConfig, weights: Weights | None, tasks: list[Task], screen: Screen) -> int:
    """Play the episodes that the evaluation lacks, write its results, and return the exit status.

    weights: those of the policy, None for an endpoint. tasks: all of them, regardless of ``limit``. Raises ConfigError,
    JournalError, ServeError, LostError, SandboxError and OSError.
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
    evaluation = Evaluation(directory, identity)
    rows = {
        task.instance_id: {"row": digest(task.to_row()), "repo": task.repo, "difficulty": task.difficulty}
        for task in limited
    }
    try:
        files.write(directory / "config.yaml", OmegaConf.to_yaml(config, resolve=True), synced=True)
        wanted = [] if config.merge else evaluation.wanted(limited, config.samples)
        there = len(rows) * config.samples - len(evaluation.wanted(limited, config.samples))
        screen.say(f"{len(wanted)} episodes to play{f', {there} are there' if there else ''}, in {directory}")
        if wanted:
            try:
                screen.redirect(directory / "evaluate.log")
                await _play(config, weights, served, evaluation, wanted, screen)
            finally:
                screen.restore()
    finally:
        found = results.results(name, rows, config.samples, evaluation.lines)
        results.write_all(directory, found, evaluation.lines)
        evaluation.close()
    for table in results.tables(found):
        screen.print(table)
    screen.next(*_hints(directory, found["complete"]))
    return 0 if found["complete"] else 1


async def _play(
    config: DictConfig,
    weights: Weights | None,
    served: serve.Served | None,
    evaluation: Evaluation,
    wanted: Sequence[tuple[Task, int]],
    screen: Screen,
) -> None:
    out = evaluation.dir
    count = functools.partial(screen.show, "images")
    await asyncio.to_thread(prepare_images, config.sandbox, out, [task for task, _ in wanted], screen.say, count)
    async with contextlib.AsyncExitStack() as stack:
        sockets = out / "socket_dir"
        socket_directory(sockets)
        stack.callback(remove_socket_directory, sockets)
        server = None
        if weights is not None:
            if weights.sharded is not None:
                screen.show("merging the checkpoint's shards")
                await asyncio.to_thread(serve.merge, weights.sharded, Path(weights.model), out / "merge.log")
            screen.say("starting the vLLM server (its output: vllm.log)")
            server = serve.start_server(weights.model, config.max_context, config.serve, out / "vllm.log")
            stack.callback(server.close)
        screen.show("loading")
        warming = asyncio.create_task(asyncio.to_thread(warm_up))
        model = setup.model_of(config, weights, served)
        if config.protocol == "messages":
            episodes = setup.forwarding_setup(config, out.name)
        else:
            episodes = await setup.token_setup(config, model, served, server, out.name, stack)
        await warming
        await episodes.proxy.start()
        stack.push_async_callback(episodes.proxy.stop)
        jobs = config.sandbox.concurrency
        screen.say(f"playing, {jobs} at the same time")
        progress = Progress(screen, "episodes", len(wanted))
        times = [line["wall_s"] for line in evaluation.lines if not line["infra"]]
        few = min(len(wanted), jobs)

        def tell() -> None:
            screen.say(estimate(len(wanted) - progress.done, statistics.fmean(times), jobs))

        if len(times) >= few:
            tell()

        def done(line: Line) -> None:
            outcome = "resolved" if line["resolved"] else line["reason"]
            progress.count(f"lost ({outcome})" if line["infra"] else outcome, final=not line["infra"])
            if not line["infra"]:
                times.append(line["wall_s"])
                if len(times) == few and progress.done < progress.total:
                    tell()
            if line["infra"] or not screen.is_terminal:
                place = f"{progress.done}/{progress.total} {line['task']} #{line['sample']}"
                detail = f" ({' '.join(line['detail'].split())[:200]})" if line["infra"] else ""
                screen.say(f"{place}: {outcome}{detail}  {line['turns']} turns  {line['wall_s']:.1f} s")

        await evaluation.play(
            episodes,
            wanted,
            concurrency=jobs,
            step=weights.step if weights else 0,
            model=model,
            done=done,
            check=server.check if server is not None else lambda: None,
        )


def _hints(directory: Path, complete: bool) -> list[tuple[str, str]]:
    python = sys.orig_argv[0]
    return [
        *([] if complete else [("try the rest", this_command())]),
        ("results", str(directory / "results.json")),
        ("read an episode", f"{python} -m rollout.records {directory} EPISODE"),
        ("compare", f"{python} -m rl.evaluate compare {directory} OTHER"),
        ("to SWE-bench", f"sb-cli submit SUBSET SPLIT --predictions_path {directory / 'preds.json'} --run_id RUN"),
    ]


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print((__doc__ or "").strip())
        return 0 if arguments else 2
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    screen = Screen()
    try:
        if arguments[0] == "compare":
            return compare.main(arguments[1:])
        config, weights = compose_evaluation(arguments)
        tasks = check_evaluation(config)
        return asyncio.run(evaluate(config, weights, tasks, screen))
    except ConfigError as error:
        error.tell()
        return 2
    except JournalError as error:
        print(f"config: {error}", file=sys.stderr)
        return 2
    except (ServeError, LostError, SandboxError, OSError) as error:
        print(f"stopped: {' '.join(str(error).split())}", file=sys.stderr)
        screen.next(("continue", this_command()))
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("interrupted", file=sys.stderr)
        screen.next(("continue", this_command()))
        return 130
    finally:
        screen.restore()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
