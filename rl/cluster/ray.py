"""Ray on a node of a job: start it, end it, and let the head wait until all nodes have joined."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
from omegaconf import DictConfig

from rl.cluster.link import ROLES, JobPosition, NodeError
from rl.config.compose import workers_environment
from rl.run.fork_server import ForkServer
from rl.run.programs import end_of_log, end_processes, free_port, tied
from rl.run.scratch import ray_directory, remove_socket_directory, socket_directory
from rollout.sandbox import directory

# For Ray to end by itself. A cancelled job has 30 s by default (SLURM's KillWait) for all that is done then.
_STOP_S = 12.0
# What `ray start` prints when the node is up, and when it was not in 30 s, a constant of Ray's, as on a busy machine or
# where Python's modules come from a slow disk. The second try finds them in memory.
_STARTED, _TOO_SLOW = b"Ray runtime started.", "The current node timed out during startup."


class RayNode:
    """A RayNode is Ray's processes on one node. Signals to the job's tasks miss them: they have their own session."""

    def __init__(self, place: JobPosition, config: DictConfig, logs: Path, say: Callable[[str], None]) -> None:
        self._place, self._config, self._logs, self._say = place, config, logs, say
        self._note = logs / "ray_dir"
        self._sockets = socket_directory(self._note, config.cluster.local_dir)
        self._forks = _fork_server(config, self._sockets, logs) if config.trainer.device == "cpu" else None
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Future[None] | None = None
        self._up = asyncio.Event()

    async def start(self, address: str, *how: str) -> asyncio.Future[None]:
        """Start Ray and return a future that fails with a NodeError when Ray ends.

        Args:
            address: this node's.
            how: --head with its port, or --address of the head.
        """
        if self._forks is not None:
            try:
                await asyncio.to_thread(self._forks.wait)
            except RuntimeError as error:
                raise NodeError(f"{self._place.node}: {error} {self._logs / 'forks.log'}") from error
        given, role = self._config.ray_kwargs.ray_init, self._place.role
        options = {
            "node-ip-address": address,
            "node-name": self._place.node,
            "temp-dir": ray_directory(self._sockets),
            # Any free ports: other jobs and other nodes may be on the same machine.
            "min-worker-port": 0,
            "max-worker-port": 0,
            "dashboard-agent-listen-port": free_port(),
            "num-cpus": given.num_cpus,
            "num-gpus": 0 if role in ROLES[1:] else given.num_gpus,
            "resources": json.dumps({role: 1}) if role in ROLES[1:] else None,
            "object-store-memory": given.get("object_store_memory"),
        }
        arguments = [f"--{name}={value}" for name, value in options.items() if value is not None]
        environment = os.environ | {
            "RAY_worker_niceness": "0",  # as in rl.train
            # When Ray is told to end, no work is left that it would have to drain.
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        }
        command = tied(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *how, *arguments)
        self._watch = asyncio.ensure_future(self._lives(command, environment))
        return self._watch

    async def up(self) -> None:
        """Wait until Ray is up on this node. Raises NodeError after config.cluster.start_timeout_s."""
        seconds = self._config.cluster.start_timeout_s
        try:
            await asyncio.wait_for(self._up.wait(), seconds)
        except TimeoutError as error:
            log = self._logs / "ray-start.log"
            raise NodeError(f"{self._place.node}: Ray is not up in {seconds:.0f} s; see {log}") from error

    async def _lives(self, command: list[str], environment: dict[str, str]) -> None:
        log = self._logs / "ray-start.log"
        end = time.monotonic() + self._config.cluster.start_timeout_s
        while True:
            with open(log, "ab") as file:
                begin = file.tell()
                self._process = await asyncio.create_subprocess_exec(
                    *command,
                    env=environment,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
            ended = asyncio.ensure_future(self._process.wait())
            while not ended.done() and not self._up.is_set():
                await asyncio.wait([ended], timeout=0.2)
                if _STARTED in log.read_bytes()[begin:]:
                    self._up.set()
            code, said = await ended, log.read_bytes()[begin:].decode(errors="replace")
            if self._up.is_set() or _TOO_SLOW not in said or time.monotonic() > end:
                why = _cause(said) or end_of_log(log)
                raise NodeError(f"{self._place.node}: Ray has ended (exit code {code}: {why}); see {log}")
            self._say(f"{self._place.node}: Ray took over 30 s to start, which is its own limit; starting it again")

    async def stop(self) -> None:
        """End all of Ray's processes, sweep their sandboxes, and copy the logs under the attempt's number."""
        if self._watch:
            self._watch.cancel()
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                started = psutil.Process(self._process.pid).children(recursive=True)
                self._process.terminate()
                try:
                    await asyncio.wait_for(self._process.wait(), _STOP_S)
                except TimeoutError:
                    self._process.kill()
                await asyncio.to_thread(end_processes, started, 5)
        if self._forks is not None:
            self._forks.close()
        await asyncio.to_thread(directory.sweep)  # sandboxes of workers that were killed
        with contextlib.suppress(OSError, shutil.Error):  # Ray may still write; a shared disk may be full
            for session in Path(ray_directory(self._sockets)).glob("session_2*"):
                shutil.copytree(session / "logs", self._logs / f"ray-{self._place.attempt}", dirs_exist_ok=True)
        for _ in range(20):  # if Ray has ended by itself, what it started ends a little later and writes until then
            shutil.rmtree(self._sockets, ignore_errors=True)
            await asyncio.sleep(0.25)
            if not Path(self._sockets).exists():
                break
        remove_socket_directory(self._note)


def _cause(said: str) -> str:
    """Return what Ray has told last of an error or of a process that ended, at most 300 characters; "" if nothing."""
    plain = re.sub(r"(?m)^.*\.py:\d+ -- ", "", re.sub(r"\x1b\[[\d;]*m", "", said))  # without time, place and colours
    told = [" ".join(line.split()) for line in plain.splitlines() if re.search(r"\[exit code=|Error|Exception", line)]
    return "; ".join(told[-2:])[:300]


def _fork_server(config: DictConfig, sockets: str, logs: Path) -> ForkServer:
    """Start the server that this node's workers are forked from; it imports their modules while the node is tested."""
    with open(logs / "forks.log", "ab") as log:
        return ForkServer(sockets, environment={**workers_environment(config), **os.environ}, log=log)


def gpu_nodes(config: DictConfig) -> int:
    """Return on how many nodes trainer and engines run; a job may have more, which run episodes only."""
    separate = config.trainer.v1.trainer_mode == "separate_async"
    return config.trainer.nnodes + (config.actor_rollout_ref.rollout.nnodes if separate else 0)


def reachable(address: str) -> str:
    """Return an address that Ray accepts: it refuses the loopback's, even if all nodes are one machine."""
    import ray.util

    return ray.util.get_node_ip_address() if address.startswith("127.") else address


async def joined(address: str, names: list[str], config: DictConfig) -> None:
    """Wait until the named nodes are in the Ray cluster and enough have their GPUs. Raises NodeError."""
    over = threading.Event()
    try:
        await asyncio.to_thread(_watch_nodes, address, names, config, over)
    finally:
        over.set()


def _watch_nodes(address: str, names: list[str], config: DictConfig, over: threading.Event) -> None:
    import ray

    end = time.monotonic() + config.cluster.start_timeout_s
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError) as error:
        raise NodeError(f"{names[0]}: Ray does not let its own node in: {error}") from error
    try:
        while True:
            found = {node["NodeName"]: node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"]}
            missing = sorted(set(names) - set(found))
            if not missing or over.wait(0.5):
                break
            if time.monotonic() > end:
                seconds = config.cluster.start_timeout_s
                raise NodeError(f"{', '.join(missing)}: not in the Ray cluster in {seconds:.0f} s")
    finally:
        ray.shutdown()
    if not over.is_set():
        check_gpus(config, found)


def check_gpus(config: DictConfig, found: Mapping[str, float]) -> None:
    """Raise NodeError if too few nodes have their GPUs. ``found``: number of GPUs by node."""
    wanted = config.trainer.n_gpus_per_node
    few = {name: count for name, count in found.items() if count < wanted}
    if len(found) - len(few) < gpu_nodes(config):
        counts = ", ".join(f"{name}: {count:.0f} GPUs" for name, count in sorted(few.items()))
        raise NodeError(f"{counts}; trainer.n_gpus_per_node is {wanted}, on {gpu_nodes(config)} nodes")
