"""This module is the head of a job: it brings the nodes together, runs rl.train and ends everything in order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from rl.checks import check
from rl.cluster.link import Listener, NodeError, Place
from rl.cluster.member import Say, log_directory, prepare_node, unless
from rl.cluster.ray import RayNode, answers, gpu_nodes, joined, reachable
from rl.config import ConfigError
from rl.run import stop
from rl.run.programs import free_port, tied
from rollout.sandbox import SandboxError

UNAVAILABLE = os.EX_UNAVAILABLE  # 69, sysexits.h
_STOP_S = 60.0  # for a node to end what it runs
_FAIL_S = 60.0  # for rl.train to fail by itself, and say how, when a node is lost
_SHARED_S = 90.0  # for a file to be seen on another node: NFS clients remember for 60 s that it was not there


class StartStopped(Exception):
    """A signal ended the job before the training began; the message is the signal's name."""


def check_job(config: DictConfig, nodes: int) -> None:
    """Raise ConfigError if the config cannot be run on this number of nodes."""
    if nodes < (wanted := gpu_nodes(config)):
        raise ConfigError(
            f"the config asks for {wanted} nodes (trainer.nnodes={config.trainer.nnodes}), the job has {nodes}; "
            f"sbatch --nodes={wanted}, or change the config"
        )
    if config.prepare and config.cluster.stage_dir:
        raise ConfigError("cluster.stage_dir: this experiment makes its data and model itself (prepare); leave it out")


class Signals:
    """SIGUSR1 and SIGTERM to the job: each is passed to the trainer once; before it runs, the first ends the start."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.process: asyncio.subprocess.Process | None = None
        loop = asyncio.get_running_loop()
        self.early: asyncio.Future[None] = loop.create_future()
        self.asked: asyncio.Future[None] = loop.create_future()  # done when the first has come
        self.install()

    def install(self) -> None:
        """Install the handlers; call it again after Ray was used in this process.

        ray.shutdown sets SIGTERM to the kernel's default, which ends the process at once.
        """
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
                self.early.set_exception(StartStopped(signal.Signals(number).name))
        elif self.process.returncode is None:
            self.process.send_signal(number)

    def hand_to(self, process: asyncio.subprocess.Process) -> None:
        """Pass signals to ``process`` from now on, and those that came since the start was over."""
        self.process = process
        for number in self.seen:
            process.send_signal(number)

    def exit_code(self, returncode: int) -> int:
        """Return the job's exit code for the trainer's."""
        if returncode < 0:  # a trainer that the first signal killed had not begun: nothing is lost
            return stop.STOPPED if [-returncode] == self.seen else 128 - returncode
        return returncode


async def head(place: Place, config: DictConfig, overrides: list[str], run_dir: Path, say: Say) -> int:
    """Start the nodes, train, stop, and return the job's exit code. Raises ConfigError, NodeError, StartStopped."""
    check_job(config, place.nodes)
    check(config)
    signals, nodes = Signals(), Listener(place, say)
    logs = log_directory(run_dir, place.node)
    ray = RayNode(place, config, logs)
    guards = [signals.early, nodes.failed]
    try:
        await nodes.listen()
        say(f"{place.nodes} nodes, run directory {run_dir}" + (f", start {place.attempt + 1}" if place.attempt else ""))
        keys = await unless(guards, _prepared(nodes, config, run_dir, logs, say))
        address = f"{reachable(nodes.address)}:{free_port()}"
        own, _, port = address.rpartition(":")
        ended = await ray.start(
            own, "--head", f"--port={port}", "--include-dashboard=false", f"--ray-client-server-port={free_port()}"
        )
        guards.append(ended)
        await unless(guards, answers(own, int(port), config.cluster.start_timeout_s))
        for peer in nodes.peers.values():
            await peer.send(ray=address)
        await unless(guards, joined(address, [place.node, *nodes.peers], config))
        signals.install()
        say("all nodes are there; starting rl.train")
        overrides = [*overrides, *_as_overrides({"run.dir": str(run_dir), **keys})]
        return await _train(address, overrides, signals, [nodes.failed, ended], say)
    finally:
        await asyncio.gather(nodes.close(_STOP_S), ray.stop())


async def _prepared(nodes: Listener, config: DictConfig, run_dir: Path, logs: Path, say: Say) -> dict[str, Any]:
    """Wait until each node has checked and prepared itself; return the config keys to set. Raises NodeError."""
    place = nodes.place
    workers = config.actor_rollout_ref.rollout.agent.num_workers
    if workers < place.nodes:
        say(f"episodes on {workers} of {place.nodes} nodes: actor_rollout_ref.rollout.agent.num_workers is {workers}")
    try:
        keys, _ = await asyncio.gather(
            asyncio.to_thread(prepare_node, config, logs, say), nodes.complete(config.cluster.start_timeout_s)
        )
    except (ConfigError, SandboxError) as error:
        raise NodeError(f"{place.node}: {error}") from error
    for peer in nodes.peers.values():
        ready = await peer.ready
        if ready["keys"] != keys:
            raise NodeError(f"{peer.name}: its files differ from those of {place.node}: {ready['keys']}, not {keys}")
        await _shared(run_dir, place.node, peer.name, ready["stamp"])
    return keys


async def _shared(run_dir: Path, own: str, node: str, stamp: str) -> None:
    """Wait until what a node has written to the run directory is seen here. Raises NodeError."""
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
    """Run rl.train to its end and return the job's exit code.

    When a node is lost, that is said at once; rl.train is then given time to say what it lost.
    """
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
        # Without its node it has nothing to save. After a signal SLURM gives little time (KillWait).
        await asyncio.wait([ended, signals.asked], timeout=_FAIL_S, return_when=asyncio.FIRST_COMPLETED)
        return UNAVAILABLE
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _as_overrides(keys: dict[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in keys.items()]
