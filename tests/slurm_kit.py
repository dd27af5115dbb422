"""This module starts a real SLURM on one machine: slurmctld and one slurmd per node, all in a directory of their own.

Without munge (`auth/none`): nobody else is on it. Needs root, for slurmd.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from rl.run.programs import free_ports

KILL_WAIT_S = 90  # how long SLURM waits for a job that it ends, before it kills it
CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
SlurmctldPidFile={dir}/slurmctld.pid
SlurmdPidFile={dir}/slurmd-%n.pid
StateSaveLocation={dir}/state
SlurmdSpoolDir={spool}/%n
SlurmctldLogFile={dir}/slurmctld.log
SlurmdLogFile={dir}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait={kill_wait}
MinJobAge=3600
TaskProlog={dir}/prolog
GresTypes=gpu
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName={} NodeHostname={} NodeAddr=127.0.0.1 Port={} CPUs=2 RealMemory=1000 Gres=gpu:h100:2\n"


class Slurm:
    """A SLURM has the nodes n1, n2 and so on, in one partition."""

    def __init__(self, directory: Path, spool: str, nodes: int) -> None:
        self.directory, self.spool = directory, spool
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        self.conf = directory / "slurm.conf"
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "WANDB"))
        }
        self.environment["SLURM_CONF"] = str(self.conf)
        self.environment["PATH"] += ":/usr/sbin:/sbin"
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        (self.directory / "state").mkdir(parents=True)
        for node in self.nodes:
            self.disk(node).mkdir()
        # Two devices that every machine has stand for GPUs, so that these can be asked for.
        (self.directory / "gres.conf").write_text("Name=gpu Type=h100 File=/dev/tty[0-1]\n")
        prolog = self.directory / "prolog"
        prolog.write_text(f"#!/bin/sh\necho export NODE_DISK={self.directory}/disk-$SLURMD_NODENAME\n")
        prolog.chmod(0o755)
        host, (port, *ports) = socket.gethostname(), free_ports(1 + len(self.nodes))
        lines = [NODE.format(node, host, own) for node, own in zip(self.nodes, ports, strict=True)]
        self.conf.write_text(
            "".join(
                [*lines, CONF.format(host=host, port=port, dir=self.directory, spool=self.spool, kill_wait=KILL_WAIT_S)]
            )
        )
        self._daemon("slurmctld", "-D", "-i")
        for node in self.nodes:
            self._daemon("slurmd", "-D", "-N", node)
        end = time.monotonic() + 180
        while self.run("sinfo", "--noheader", "--format=%t", check=False).split() != ["idle"]:
            if time.monotonic() > end or any(daemon.poll() is not None for daemon in self._daemons):
                logs = {path.name: path.read_text()[-2000:] for path in self.directory.glob("*.log")}
                raise AssertionError(f"SLURM did not start: {logs}")
            time.sleep(0.5)

    def disk(self, node: str) -> Path:
        """A directory that only one node knows: NODE_DISK in the environment of its tasks."""
        return self.directory / f"disk-{node}"

    def _daemon(self, *argv: str) -> None:
        with open(self.directory / f"{argv[0]}-{argv[-1]}.out", "wb") as out:
            self._daemons.append(
                subprocess.Popen(argv, env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
            )

    def run(self, *argv: str, check: bool = True, cwd: Path | None = None) -> str:
        done = subprocess.run(argv, env=self.environment, cwd=cwd, text=True, capture_output=True)
        assert not check or done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, job: str) -> dict[str, str]:
        """Return what `scontrol show job` says, by name."""
        said = self.run("scontrol", "--oneliner", "show", "job", job)
        return dict(word.split("=", 1) for word in said.split() if "=" in word)

    def wait(self, job: str, *states: str, seconds: float) -> dict[str, str]:
        """Until the job is in one of the states; what is known of it then."""
        end = time.monotonic() + seconds
        while (found := self.job(job))["JobState"] not in states:
            assert time.monotonic() < end, f"job {job} is {found['JobState']}, not {' or '.join(states)}"
            time.sleep(0.5)
        return found

    def processes(self, **wanted: str) -> list[psutil.Process]:
        """Return the processes that jobs have started, by what is in their environment."""
        wanted |= {"SLURM_CONF": str(self.conf)}
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                environment = process.environ()
                if "SLURM_JOB_ID" in environment and wanted.items() <= environment.items():
                    found.append(process)
        return found

    def stop(self) -> None:
        """End all jobs, then the daemons."""
        self.run("scancel", "--user=root", check=False)
        end = time.monotonic() + 120
        while self.run("squeue", "--noheader", check=False).strip() and time.monotonic() < end:
            time.sleep(0.5)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


@contextlib.contextmanager
def slurm(directory: Path, nodes: int = 2) -> Iterator[Slurm]:
    """Start a SLURM whose files are in ``directory``, yield it, and end it."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as spool:  # for sockets: it must be short
        cluster = Slurm(directory, spool, nodes)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()
