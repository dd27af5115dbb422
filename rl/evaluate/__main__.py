"""Evaluate a policy on a set of tasks. docs/evaluation.md

    python -m rl.evaluate policy=DIR [tasks=FILE] [samples=N] [key=value ...]
    python -m rl.evaluate endpoint=URL tasks=FILE [model=NAME] [protocol=messages] [key_env=VARIABLE] [key=value ...]
    python -m rl.evaluate compare A B [--common]

All keys: configs/evaluate.yaml. The same command continues an evaluation that was stopped, and tries anew what was lost
to the infrastructure. Exit status: 0 every episode has a verdict, 1 not all have, 2 the config is wrong, 130 it was
interrupted.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rewards.grade import warm_up
from rewards.task import Task
from rl.batch import JournalError, Progress
from rl.boxes import prepare_images
from rl.config import ConfigError
from rl.evaluate import compare, config, results, serve
from rl.evaluate.config import Weights
from rl.evaluate.play import Evaluation, Line, LostError
from rl.run.scratch import remove_socket_directory, socket_directory
from rl.run.vllm_server import SERVED_AS, VllmServer
from rl.screen import Screen, this_command
from rl.setup import load_policy, make_setup
from rollout import files
from rollout.episode import Setup
from rollout.proxy.forward import SideEndpoint
from rollout.proxy.passthrough import PassThrough
from rollout.proxy.render import generation_config
from rollout.proxy.server import ProxyServer
from rollout.proxy.session import Policy
from rollout.sandbox import SandboxError

# For a hosted model, whose window is not known: what Claude Code takes for a model that it does not know.
_HOSTED_CONTEXT = 200_000
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


async def evaluate(cfg: DictConfig, weights: Weights | None, tasks: list[Task], screen: Screen) -> int:
    """Bring an evaluation to its end; returns the exit status. Raises ConfigError, JournalError, ServeError, LostError,
    SandboxError and OSError."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _me().cancel)
    served = await _ask(cfg)
    name = config.name_of(cfg, weights)
    identity = config.identity(cfg, weights, tasks)
    directory = Path(cfg.out or Path(cfg.root) / f"{name}-{config.digest(identity)}").absolute()
    evaluation = Evaluation(directory, identity)
    rows = {
        task.instance_id: {"row": config.row_hash(task), "repo": task.repo, "difficulty": task.difficulty}
        for task in tasks[: cfg.limit]
    }
    try:
        files.write(directory / "config.yaml", OmegaConf.to_yaml(cfg, resolve=True), synced=True)
        wanted = evaluation.wanted(tasks[: cfg.limit], cfg.samples)
        there = len(rows) * cfg.samples - len(wanted)
        screen.say(f"{len(wanted)} episodes to play{f', {there} are there' if there else ''}, in {directory}")
        if wanted:
            try:
                screen.redirect(directory / "evaluate.log")
                await _play(cfg, weights, served, evaluation, wanted, screen)
            finally:
                screen.restore()
    finally:
        found = results.results(name, rows, cfg.samples, evaluation.lines)
        results.write_all(directory, found, evaluation.lines)
        evaluation.close()
    for table in results.tables(found):
        screen.print(table)
    _hints(cfg, directory, found, screen)
    return 0 if found["complete"] else 1


async def _ask(cfg: DictConfig) -> serve.Served | None:
    """Of an endpoint: that it is there and has the model. Takes over the model's name. None for a policy."""
    if cfg.policy:
        return None
    if cfg.protocol == "messages":
        await serve.ask_endpoint(SideEndpoint(cfg.endpoint, cfg.model, config.key(cfg)))
        return serve.Served(cfg.model, "", _HOSTED_CONTEXT)
    served = await serve.ask_server(cfg.endpoint, cfg.model, config.key(cfg))
    cfg.model = served.name
    return served


async def _play(
    cfg: DictConfig,
    weights: Weights | None,
    served: serve.Served | None,
    evaluation: Evaluation,
    wanted: Sequence[tuple[Task, int]],
    screen: Screen,
) -> None:
    out = evaluation.dir
    count = functools.partial(screen.show, "images")
    await asyncio.to_thread(prepare_images, cfg.sandbox, out, [task for task, _ in wanted], screen.say, count)
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
            server = serve.start_server(weights.model, cfg.max_context, cfg.serve, out / "vllm.log")
            stack.callback(server.close)
        screen.show("loading")
        warming = asyncio.create_task(asyncio.to_thread(warm_up))
        if cfg.protocol == "messages":
            setup = _forwarded(cfg, out)
        else:
            setup = await _by_tokens(cfg, weights, served, server, out, stack)
        await warming
        await setup.proxy.start()
        stack.push_async_callback(setup.proxy.stop)
        screen.say(f"playing, {cfg.sandbox.concurrency} at the same time")
        progress = Progress(screen, "episodes", len(wanted))

        def done(line: Line) -> None:
            outcome = "resolved" if line["resolved"] else line["reason"]
            progress.count(f"lost ({outcome})" if line["infra"] else outcome, final=not line["infra"])
            if line["infra"] or not screen.is_terminal:
                place = f"{progress.done}/{progress.total} {line['task']} #{line['sample']}"
                detail = f" ({' '.join(line['detail'].split())[:200]})" if line["infra"] else ""
                screen.say(f"{place}: {outcome}{detail}  {line['turns']} turns  {line['wall_s']:.1f} s")

        model = cfg.model if cfg.protocol == "messages" else _tokenizer(cfg, weights, served)
        await evaluation.play(
            setup,
            wanted,
            concurrency=cfg.sandbox.concurrency,
            step=weights.step if weights else 0,
            model=model,
            done=done,
            check=server.check if server is not None else lambda: None,
        )


def _forwarded(cfg: DictConfig, out: Path) -> Setup:
    """Return the set-up in which all calls of the agent go on to the endpoint as they are."""
    settings = config.settings(cfg, cfg.max_context or _HOSTED_CONTEXT, out)
    proxy = PassThrough(SideEndpoint(cfg.endpoint, cfg.model, config.key(cfg)), settings.side_endpoint)
    return make_setup(settings, proxy.policy, proxy)


def _tokenizer(cfg: DictConfig, weights: Weights | None, served: serve.Served | None) -> str:
    if cfg.tokenizer or weights is None:
        return str(cfg.tokenizer or (served.root if served else ""))
    return str(weights.sharded / "huggingface") if weights.sharded else weights.model


async def _by_tokens(
    cfg: DictConfig,
    weights: Weights | None,
    served: serve.Served | None,
    server: VllmServer | None,
    out: Path,
    stack: contextlib.AsyncExitStack,
) -> Setup:
    """Return the set-up in which the proxy asks a vLLM server by token ids. Slow imports are done while it starts."""
    from rollout.proxy.vllm_http import VllmHttpEngine

    url, model = (server.url, SERVED_AS) if server else (str(cfg.endpoint), str(cfg.model))
    engine = VllmHttpEngine(url, model, config.key(cfg) if server is None else None)
    stack.push_async_callback(engine.close)
    policy = await asyncio.to_thread(_load, cfg, _tokenizer(cfg, weights, served), engine, out)
    if server is not None:
        await asyncio.to_thread(server.wait, cfg.serve.timeout_s)
        served = await serve.ask_server(url, model, None)
    assert served is not None
    if policy.side_endpoint is not None:
        stack.push_async_callback(policy.side_endpoint.close)
    settings = config.settings(cfg, min(cfg.max_context or served.max_context, served.max_context), out)
    policy = replace(policy, max_context=settings.max_context, max_tokens=settings.max_tokens)
    return make_setup(settings, policy, ProxyServer())


def _load(cfg: DictConfig, tokenizer: str, engine: Any, out: Path) -> Policy:
    """Return the policy with its sampling parameters; the server will tell its context length. Raises ConfigError."""
    from transformers import AutoConfig, AutoTokenizer

    settings = config.settings(cfg, cfg.max_context or _HOSTED_CONTEXT, out)
    try:
        text_tools = AutoTokenizer.from_pretrained(tokenizer)
        model_type = AutoConfig.from_pretrained(tokenizer).model_type
    except (OSError, ValueError) as error:
        raise ConfigError(f"tokenizer: {tokenizer} cannot be loaded: {' '.join(str(error).split())}") from error
    try:
        policy = load_policy(settings, tokenizer, text_tools, model_type, engine)
    except ValueError as error:  # a parser or chat template that is not known
        raise ConfigError(f"{tokenizer}: {' '.join(str(error).split())}") from error
    said = generation_config(tokenizer)
    sampling = {name: said[name] for name in _SAMPLING if said.get(name) is not None}
    sampling |= {name: value for name, value in cfg.sampling.items() if value is not None}
    return replace(policy, sampling=sampling)


def _hints(cfg: DictConfig, directory: Path, found: dict[str, Any], screen: Screen) -> None:
    python = sys.orig_argv[0]
    hints = []
    if not found["complete"]:
        hints.append(("try the rest", this_command()))
    hints += [
        ("results", str(directory / "results.json")),
        ("read an episode", f"{python} -m rollout.records {directory} EPISODE"),
        ("compare", f"{python} -m rl.evaluate compare {directory} OTHER"),
        ("to SWE-bench", f"sb-cli submit SUBSET SPLIT --predictions_path {directory / 'preds.json'} --run_id RUN"),
    ]
    screen.next(*hints)


def _me() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


def main(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print((__doc__ or "").strip())
        return 0 if arguments else 2
    # Seconds to import, and their errors are the user's typing.
    import hydra.errors
    import omegaconf.errors

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    screen = Screen()
    try:
        if arguments[0] == "compare":
            return compare.main(arguments[1:])
        cfg, weights = config.compose_evaluation(arguments)
        tasks = config.check_evaluation(cfg)
        return asyncio.run(evaluate(cfg, weights, tasks, screen))
    except (ConfigError, JournalError, hydra.errors.HydraException, omegaconf.errors.OmegaConfBaseException) as error:
        print(f"config: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except (serve.ServeError, LostError, SandboxError, OSError) as error:
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
