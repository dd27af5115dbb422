"""One training run over the nodes of a SLURM job: ``srun ... python -m rl.cluster key=value ...``, one task per node.

``scripts/slurm/train.sbatch`` starts it; docs/cluster.md is the guide. The first task is the head. In order:

1. each node checks itself (``rl.checks``: config, data files, container engine, disk), copies model and task files to
   its own disk where ``cluster.stage_dir`` asks for it, and pulls and seals the sandbox images;
2. the head starts Ray, the others join it, and the head sees that each node is there with its GPUs;
3. the head runs ``python -m rl.train`` with RAY_ADDRESS, and hands SIGUSR1 and SIGTERM on to it;
4. every node stops what it started, and puts Ray's logs under ``logs/<node>/`` in the run directory.

A node that fails is named in one line, and the job ends. The run directory is named by the job, so a requeued job goes
on in it. Exit code: rl.train's (0 done, 1 failed, 2 the config is wrong, 75 ended by a signal with nothing lost, 143
cut short), or 69: a node failed its check, did not join, or was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from rl.boxes import kind_of, prepare_images
from rl.checks import check
from rl.checks.data import check_tasks
from rl.cluster.link import Head, Link, NodeError, Place
from rl.cluster.ray import RayNode, answers, gpu_nodes, joined, reachable
from rl.cluster.stage import stage
from rl.config import ConfigError, compose
from rl.run import stop
from rl.run.programs import free_port, tied
from rollout.sandbox import SandboxError

Say = Callable[[str], None]
T = TypeVar("T")

UNAVAILABLE = os.EX_UNAVAILABLE  # 69, sysexits.h
_STOP_S = 60.0  # for a node to end what it runs
_FAIL_S = 60.0  # for rl.train to fail by itself, and say how, when a node is lost
_SHARED_S = 90.0  # for a file to be seen on another node: NFS clients remember for 60 s that it was not there


class Stopped(Exception):
    """A signal ended the start."""


def run_directory(cfg: DictConfig, job: str) -> Path:
    """Absolute. Named by the job, whose number stays when it is requeued."""
    return Path(cfg.run.dir or Path(cfg.run.root, cfg.trainer.experiment_name, f"slurm-{job}")).absolute()


def sweep_line(file: Path, task: str | None) -> list[str]:
    """The overrides of one task of an array job: the line of ``file`` with its number, from 1; empty lines don't count.

    Raises:
        ConfigError: the job is no array job, or the file has no such line.
    """
    if task is None:
        raise ConfigError("--sweep needs an array job: sbatch --array=1-N ...")
    if not file.is_file():
        raise ConfigError(f"--sweep: no file {file.absolute()}")
    lines = [shlex.split(line) for line in file.read_text().splitlines() if line.strip()]
    if not 1 <= int(task) <= len(lines):
        raise ConfigError(
            f"--sweep: {file} has {len(lines)} lines and none for array task {task}; --array=1-{len(lines)}"
        )
    return lines[int(task) - 1]


def check_job(cfg: DictConfig, nodes: int) -> None:
    """The config can be run on so many nodes. Raises ConfigError."""
    if nodes < (wanted := gpu_nodes(cfg)):
        raise ConfigError(
            f"the config asks for {wanted} nodes (trainer.nnodes={cfg.trainer.nnodes}), the job has {nodes}; "
            f"sbatch --nodes={wanted}, or change the config"
        )
    if cfg.prepare and cfg.cluster.stage_dir:
        raise ConfigError("cluster.stage_dir: this experiment makes its data and model itself (prepare); leave it out")


# --- what every node does


def prepare_node(cfg: DictConfig, logs: Path, say: Say) -> dict[str, Any]:
    """Check this node and fetch what it needs; config keys to set, the same on every node. Blocks.

    With ``cfg.prepare`` set, data and model are made later, by rl.train on the head, on the shared disk.
    Raises ConfigError, SandboxError.
    """
    check(cfg)
    if cfg.prepare:
        return {}
    if kind_of(cfg.sandbox).from_images and cfg.data.custom_cls.path == "pkg://rl.dataset":
        prepare_images(cfg.sandbox, logs, check_tasks(cfg), say)  # each node reports on its own images
    return stage(cfg, say) if cfg.cluster.stage_dir else {}


def log_directory(run_dir: Path, node: str) -> Path:
    directory = run_dir / "logs" / node
    directory.mkdir(parents=True, exist_ok=True)
    return directory


# --- the head


class Signals:
    """SIGUSR1 and SIGTERM: each is handed to the trainer once; before there is one, the first ends the start."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.process: asyncio.subprocess.Process | None = None
        loop = asyncio.get_running_loop()
        self.early: asyncio.Future[None] = loop.create_future()
        self.asked: asyncio.Future[None] = loop.create_future()  # the first has come
        self.install()

    def install(self) -> None:
        """To be called again when Ray was used in this process: ray.shutdown leaves SIGTERM to the kernel, which ends
        the process where it is (ray 2.58)."""
        for number in stop.SIGNALS:
            # scancel reaches this process twice: from SLURM and from the batch script.
            asyncio.get_running_loop().add_signal_handler(number, self._on, number)

    def _on(self, number: int) -> None:
        if number in self.seen:
            return
        self.seen.append(number)
        if not self.asked.done():
            self.asked.set_result(None)
        if self.process is None:
            if not self.early.done():
                self.early.set_exception(Stopped(signal.Signals(number).name))
        elif self.process.returncode is None:
            self.process.send_signal(number)

    def hand_to(self, process: asyncio.subprocess.Process) -> None:
        """From now on, and what has come since the start was over."""
        self.process = process
        for number in self.seen:
            process.send_signal(number)

    def exit_code(self, returncode: int) -> int:
        """Of the job, by the trainer's. One that a first signal killed had not begun, so nothing is lost."""
        if returncode < 0:
            return stop.STOPPED if [-returncode] == self.seen else 128 - returncode
        return returncode


async def head(place: Place, cfg: DictConfig, overrides: list[str], run_dir: Path, say: Say) -> int:
    """Start, train and stop; the job's exit code. Raises ConfigError, NodeError, Stopped."""
    check_job(cfg, place.nodes)
    check(cfg)
    signals, nodes = Signals(), Head(place, say)
    logs = log_directory(run_dir, place.node)
    ray = RayNode(place, cfg, logs)
    guards = [signals.early, nodes.failed]
    try:
        await nodes.listen()
        say(f"{place.nodes} nodes, run directory {run_dir}" + (f", start {place.attempt + 1}" if place.attempt else ""))
        keys = await unless(guards, _prepared(nodes, cfg, run_dir, logs, say))
        address = f"{reachable(nodes.address)}:{free_port()}"
        own, _, port = address.rpartition(":")
        ended = await ray.start(
            own, "--head", f"--port={port}", "--include-dashboard=false", f"--ray-client-server-port={free_port()}"
        )
        guards.append(ended)
        await unless(guards, answers(own, int(port), cfg.cluster.start_timeout_s))
        for peer in nodes.peers.values():
            await peer.send(ray=address)
        await unless(guards, joined(address, [place.node, *nodes.peers], cfg))
        signals.install()
        say("all nodes are there; starting rl.train")
        overrides = [*overrides, *_as_overrides({"run.dir": str(run_dir), **keys})]
        return await _train(address, overrides, signals, [nodes.failed, ended], say)
    finally:
        await asyncio.gather(nodes.close(_STOP_S), ray.stop())


async def unless(guards: Iterable[asyncio.Future[Any]], work: Awaitable[T]) -> T:
    """The work's result, unless a guard fails first."""
    task, guards = asyncio.ensure_future(work), list(guards)
    await asyncio.wait([task, *guards], return_when=asyncio.FIRST_COMPLETED)
    for guard in guards:
        if guard.done():
            task.cancel()
            guard.result()
    return await task


async def _prepared(nodes: Head, cfg: DictConfig, run_dir: Path, logs: Path, say: Say) -> dict[str, Any]:
    """Wait until each node has checked itself; the config keys to set. Raises NodeError."""
    place = nodes.place
    workers = cfg.actor_rollout_ref.rollout.agent.num_workers
    if workers < place.nodes:
        say(f"episodes on {workers} of {place.nodes} nodes: actor_rollout_ref.rollout.agent.num_workers is {workers}")
    try:
        keys, _ = await asyncio.gather(
            asyncio.to_thread(prepare_node, cfg, logs, say), nodes.complete(cfg.cluster.start_timeout_s)
        )
    except (ConfigError, SandboxError) as error:
        raise NodeError(f"{place.node}: {error}") from error
    for peer in nodes.peers.values():
        ready = await peer.ready
        if ready["keys"] != keys:
            raise NodeError(
                f"{peer.name}: its files are others than those of {place.node}: {ready['keys']}, not {keys}"
            )
        await _shared(run_dir, place.node, peer.name, ready["stamp"])
    return keys


async def _shared(run_dir: Path, own: str, node: str, stamp: str) -> None:
    """What a node has written to the run directory is there. Raises NodeError."""
    end = time.monotonic() + _SHARED_S
    while True:
        with contextlib.suppress(OSError):
            if (run_dir / "logs" / node / "stamp").read_text() == stamp:
                return
        if time.monotonic() > end:
            raise NodeError(f"{node}: {run_dir} is not the one of {own}; put run.root on a disk that all nodes share")
        await asyncio.sleep(0.5)


async def _train(
    address: str, overrides: list[str], signals: Signals, guards: list[asyncio.Future[Any]], say: Say
) -> int:
    """Run rl.train to its end; the job's exit code. When a node is lost, that is said at once; rl.train may still say
    what it lost."""
    process = await asyncio.create_subprocess_exec(
        *tied(sys.executable, "-m", "rl.train", *overrides),
        env=os.environ | {"RAY_ADDRESS": address},
        stdin=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    signals.hand_to(process)
    ended = asyncio.ensure_future(process.wait())
    try:
        await asyncio.wait([ended, *guards], return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            return signals.exit_code(ended.result())
        say(f"node {next(guard.exception() for guard in guards if guard.done())}")
        # Without its node it has nothing to save; SLURM leaves who was asked to end little time (KillWait).
        await asyncio.wait([ended, signals.asked], timeout=_FAIL_S, return_when=asyncio.FIRST_COMPLETED)
        return UNAVAILABLE
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _as_overrides(keys: dict[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in keys.items()]


# --- the other nodes


async def member(place: Place, cfg: DictConfig, run_dir: Path) -> None:
    """What a node does that is not the head. Raises NodeError when the head cannot be reached."""
    link = await Link.open(place, cfg.cluster.start_timeout_s)
    loop = asyncio.get_running_loop()
    for number in stop.SIGNALS:
        loop.add_signal_handler(number, lambda: None)  # the head decides, and hangs up

    def say(text: str) -> None:
        asyncio.run_coroutine_threadsafe(link.send(say=text), loop)

    logs = log_directory(run_dir, place.node)
    ray = RayNode(place, cfg, logs)
    heard = asyncio.ensure_future(link.receive())
    try:
        preparing = asyncio.ensure_future(asyncio.to_thread(prepare_node, cfg, logs, say))
        await asyncio.wait([preparing, heard], return_when=asyncio.FIRST_COMPLETED)
        if not preparing.done():
            return
        stamp = secrets.token_hex(8)
        (logs / "stamp").write_text(stamp)
        await link.send(ready={"keys": preparing.result(), "stamp": stamp})
        message = await heard
        if message is None:
            return
        ended = await ray.start(reachable(link.address), f"--address={message['ray']}")
        heard = asyncio.ensure_future(link.receive())
        await unless([ended], asyncio.shield(heard))
    except (ConfigError, SandboxError, OSError) as error:
        await link.send(problem=str(error))
        await heard
    except NodeError as error:
        await link.send(problem=str(error).removeprefix(f"{place.node}: "))
        await heard
    finally:
        await ray.stop()
        await link.close()


async def _main(place: Place, cfg: DictConfig, overrides: list[str], run_dir: Path) -> None:
    def say(text: str) -> None:
        print(f"cluster: {text}", flush=True)

    code = 0
    try:
        if place.rank:
            await member(place, cfg, run_dir)
        else:
            code = await head(place, cfg, overrides, run_dir, say)
    except Stopped as error:
        say(f"stopped by {error} before the training began")
        code = stop.STOPPED
    except ConfigError as error:
        print(f"config: {error}", file=sys.stderr)
        code = 2
    except NodeError as error:
        print(f"cluster: node {error}", file=sys.stderr)
        code = UNAVAILABLE
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that still pull images cannot be told to end


def main(argv: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(prog="python -m rl.cluster", description="Train on the nodes of a SLURM job.")
    options.add_argument("--sweep", type=Path, help="file with a line of overrides for each task of an array job")
    options.add_argument("overrides", nargs="*", help="as for rl.train")
    args = options.parse_args(argv)
    if int(os.environ.get("SLURM_PROCID", 0)) > 0:
        # When the head ends before it listens, SLURM ends the others; the exit code is the head's to give.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    try:
        place = Place.of(os.environ)
        more = sweep_line(args.sweep, place.array_task) if args.sweep else []
        overrides = [*args.overrides, *more]
        cfg = compose(overrides)
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        if int(os.environ.get("SLURM_PROCID", 0)) > 0:
            return 0  # the head says it
        print(f"config: {error}", file=sys.stderr)
        return 2
    run_dir = run_directory(cfg, place.job)
    cfg.run.dir = str(run_dir)
    asyncio.run(_main(place, cfg, overrides, run_dir))
    return 0


if __name__ == "__main__":
    sys.exit(main())
