"""The head of a job: it brings the nodes together, runs rl.train and ends everything in order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from rl.cluster import early
from rl.cluster.environment import set_up
from rl.cluster.link import ROLES, JobPosition, Listener, NodeError
from rl.cluster.member import Say, check_node, judge, log_directory, prepare_node, unless
from rl.cluster.network import node_address
from rl.cluster.preflight import preflight
from rl.cluster.ray import RayNode, gpu_nodes, joined
from rl.config.compose import ConfigError
from rl.run import slurm, stop
from rl.run.directory import RunDirectory
from rl.run.fork_server import ON_NODES
from rl.run.lease import POLL_S, RunLease
from rl.run.programs import free_port, tied
from rl.train import starts
from rollout.sandbox import SandboxError

UNAVAILABLE = os.EX_UNAVAILABLE  # 69, sysexits.h
_STOP_S = 60.0  # for a node to end what it runs
_FAIL_S = 60.0  # for rl.train to fail by itself, and say how, when a node is lost
_OTHERS_S = 60.0  # for the other nodes to call when this one has failed
_LOOK_S = 0.5
_SHARED_S = 90.0  # for a file to be seen on another node: NFS clients remember for 60 s that it was not there


class StartStopped(Exception):
    """A signal ended the job before the training began; the message is the signal's name."""


def check_job(config: DictConfig, parts: Sequence[int], left_s: float | None = None) -> None:
    """Raise ConfigError if the config cannot be run on these nodes (``JobPosition.parts``), in the job's time.

    ``left_s``: seconds until the job's time limit, None if that is not known.
    """
    if len(parts) > len(ROLES):
        raise ConfigError(f"the job has {len(parts)} parts; there are at most {len(ROLES)}: {', '.join(ROLES)}")
    if (nodes := parts[0]) < (wanted := gpu_nodes(config)):
        raise ConfigError(
            f"the config asks for {wanted} nodes (trainer.nnodes={config.trainer.nnodes}), the job has {nodes}; "
            f"sbatch --nodes={wanted}, or change the config"
        )
    if left_s is not None and left_s <= config.run.grace_s:
        raise ConfigError(
            f"run.grace_s={config.run.grace_s:.0f} is not less than the {left_s:.0f} s that the job has: the warning "
            "would come when it starts; give a longer --time, or a shorter run.grace_s with a --signal to fit, such as "
            "--signal=B:USR1@300 with run.grace_s=240"
        )
    if config.prepare and config.cluster.stage_dir:
        raise ConfigError("cluster.stage_dir: this experiment makes its data and model itself (prepare); leave it out")


class Signals:
    """This passes SIGUSR1 and SIGTERM to the trainer, each once. Before the trainer runs, the first ends the start."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.process: asyncio.subprocess.Process | None = None
        loop = asyncio.get_running_loop()
        self.early: asyncio.Future[None] = loop.create_future()
        self.asked: asyncio.Future[None] = loop.create_future()  # done when the first has come
        self.install()
        for number in early.seen:
            self._on(number)

    async def watch(self, warning: Path) -> None:
        """Treat the batch script's warning as SIGUSR1. It is a file, which unlike a signal cannot come too early."""
        while not warning.is_file():
            await asyncio.sleep(_LOOK_S)
        self._on(signal.SIGUSR1)

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
        """Return the job's exit code for the trainer's ``returncode``."""
        # A trainer that SIGUSR1 or the first signal killed had not begun: nothing is lost.
        if returncode < 0:
            begun = -returncode != signal.SIGUSR1 and [-returncode] != self.seen
            return 128 - returncode if begun or -returncode not in self.seen else stop.STOPPED
        return returncode


async def head(place: JobPosition, config: DictConfig, overrides: list[str], run_dir: Path, say: Say) -> int:
    """Start the nodes, train, stop, and return the job's exit code.

    Raises ConfigError, NodeError, StartStopped, and what RunLease.take and starts.note raise.
    """
    lease = RunLease(run_dir, say)
    run = RunDirectory(run_dir, Path(config.trainer.default_local_dir), place.attempt > 0, lease)
    prepared = Path(config.run.root) / "prepared"
    starts.check(run, place.job, place.attempt, prepared)
    left_s = (slurm.job_end() or 0) - time.time()
    check_job(config, place.parts, left_s if left_s > 0 else None)
    try:
        more = set_up(config)
    except ConfigError as error:
        raise NodeError(f"{place.node}: {error}") from error
    for override in more:
        say(override)
    overrides = [*overrides, *more, *place.resources]
    signals, nodes = Signals(), Listener(place, say)
    warning = Path(os.environ.get("RL_WARNING") or os.devnull).absolute()
    if not warning.parent.is_dir():  # a path of the host; this may be a container
        advice = "bind the host's (RL_BIND), where the batch script warns"
        raise NodeError(f"{place.node}: no {warning.parent.parent} here: {advice}")
    watching = asyncio.ensure_future(signals.watch(warning))
    guards = [signals.early, nodes.failed]
    ray: RayNode | None = None
    try:
        await unless(guards, _checked(nodes, config))
        run_dir.mkdir(parents=True, exist_ok=True)
        await unless(guards, _leased(lease))
        lease.renew(lambda text: print(f"cluster: {text}", file=sys.stderr, flush=True))
        starts.note(run, place.job, place.attempt, prepared)
        logs = log_directory(run_dir, place.node)
        ray = RayNode(place, config, logs, say)
        say(f"{place.nodes} nodes, run directory {run_dir}" + (f", start {place.attempt + 1}" if place.attempt else ""))
        for peer in nodes.peers.values():
            await peer.send(go=True)
        if config.cluster.preflight:
            await unless(guards, preflight(nodes, config, logs, say))
        keys = await unless(guards, _prepared(nodes, config, run_dir, logs, say))
        own, port = node_address(config, nodes.address), free_port()
        address, how = f"{own}:{port}", ("--include-dashboard=false", f"--ray-client-server-port={free_port()}")
        ended = await ray.start(own, "--head", f"--port={port}", *how)
        guards.append(ended)
        await unless(guards, ray.up())
        for peer in nodes.peers.values():
            await peer.send(ray=address)
        await unless(guards, joined(address, [place.node, *nodes.peers], config))
        signals.install()
        say(f"all nodes are there; starting {config.cluster.program}")
        overrides += [f"{key}={json.dumps(value)}" for key, value in {"run.dir": str(run_dir), **keys}.items()]
        environment = {"RAY_ADDRESS": address, "RL_RUN_LEASE": lease.token}
        if config.trainer.device == "cpu":
            environment[ON_NODES] = "1"
        return await _train(config.cluster.program, environment, overrides, signals, [nodes.failed, ended], say)
    finally:
        watching.cancel()
        await asyncio.gather(nodes.close(_STOP_S), *([ray.stop()] if ray else []))
        lease.release()


async def _checked(nodes: Listener, config: DictConfig) -> None:
    """Wait until each node has checked itself. Raises NodeError, or ConfigError if all find the same fault."""
    place = nodes.place
    await nodes.listen()
    own = await asyncio.to_thread(check_node, config, place.plays)
    problems = {place.node: own}
    # A node that does not come at all must not hide what is wrong here.
    with contextlib.suppress(NodeError) if own else contextlib.nullcontext():
        await nodes.complete(_OTHERS_S if own else config.cluster.start_timeout_s)
        for peer in nodes.peers.values():
            problems[peer.name] = await peer.checked
    await asyncio.to_thread(judge, problems, config, place.plays)


async def _leased(lease: RunLease) -> None:
    while not lease.tried():
        await asyncio.sleep(POLL_S)


async def _prepared(nodes: Listener, config: DictConfig, run_dir: Path, logs: Path, say: Say) -> dict[str, Any]:
    """Wait until each node has prepared itself; return the config keys to set. Raises NodeError."""
    place = nodes.place
    workers = config.actor_rollout_ref.rollout.agent.num_workers
    playing = place.parts[0 if place.role is None else 1]
    if workers < playing:
        say(f"episodes on {workers} of {playing} nodes: actor_rollout_ref.rollout.agent.num_workers is {workers}")
    try:
        keys = await asyncio.to_thread(prepare_node, config, place.plays, logs, say)
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
    program: str,
    environment: dict[str, str],
    overrides: list[str],
    signals: Signals,
    guards: list[asyncio.Future[Any]],
    say: Say,
) -> int:
    """Run the program (rl.train) to its end and return the job's exit code.

    When a node is lost, that is said at once; rl.train is then given time to say what it lost.
    """
    process = await asyncio.create_subprocess_exec(
        *tied(sys.executable, "-m", program, *overrides),
        env=os.environ | environment,
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
        # A trainer that lost a node has nothing to save. After a signal SLURM gives little time (KillWait).
        await asyncio.wait([ended, signals.asked], timeout=_FAIL_S, return_when=asyncio.FIRST_COMPLETED)
        return UNAVAILABLE
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
