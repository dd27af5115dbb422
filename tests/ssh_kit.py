"""This module starts SSH servers of a test's own, on this machine's loopback, with keys made for the test."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from rollout.sandbox.docker.engine import get_engine
from rollout.sandbox.docker.fleet import Fleet, Host
from tests.lacks import lacks


class Sshd:
    """An SSH server that lets this user in, by one key, and a config by which ssh finds key and server.

    Several servers of a directory share the key and the config.
    """

    def __init__(self, directory: Path) -> None:
        self.directory, self.config = directory, directory / "config"
        self.key, self.known = directory / "key", directory / "known_hosts"
        if not self.key.exists():
            for name in (self.key, directory / "host"):
                subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", name], check=True)
            options = {"IdentityFile": self.key, "IdentitiesOnly": "yes", "GlobalKnownHostsFile": os.devnull}
            options["UserKnownHostsFile"] = self.known
            self.config.write_text("Host *\n" + "".join(f"  {key} {value}\n" for key, value in options.items()))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.name, self.keys = f"127.0.0.1:{self.port}", directory / f"keys-{self.port}"
        self.accept()
        with open(self.known, "a") as known:
            known.write(f"[127.0.0.1]:{self.port} {(directory / 'host.pub').read_text()}")
        self.start()

    def start(self, *more: str) -> None:
        """Start it and wait until it answers. more: lines of its config."""
        lines = [f"ListenAddress {self.name}", f"HostKey {self.directory}/host", f"AuthorizedKeysFile {self.keys}"]
        lines += ["PidFile none", "StrictModes no", "UsePAM no", "PasswordAuthentication no", "MaxStartups 100", *more]
        config = self.directory / f"sshd-{self.port}"
        config.write_text("\n".join(lines) + "\n")
        with open(self.directory / "log", "ab") as log:
            self.process = psutil.Popen([shutil.which("sshd", path=_PATH), "-D", "-e", "-f", config], stderr=log)
        while True:
            assert self.process.poll() is None, (self.directory / "log").read_text()[-1000:]
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            time.sleep(0.02)

    def accept(self, key: bool = True) -> None:
        """Accept the key, or no more."""
        self.keys.write_text((self.directory / "key.pub").read_text() if key else "")

    def all(self) -> list[psutil.Process]:
        """Return the server and all that it has started and that still belongs to it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return [self.process, *self.process.children(recursive=True)]
        return []

    def signal(self, number: int) -> None:
        """Send a signal to the server and all that it has started."""
        for process in self.all():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def end(self) -> None:
        """Kill it, with all that it has started, as a machine that loses its power would."""
        self.signal(signal.SIGKILL)
        self.process.wait()


_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"


@contextlib.contextmanager
def servers(count: int) -> Iterator[list[Sshd]]:
    """Run SSH servers; a skip where that is not possible."""
    if missing := [name for name in ("ssh", "ssh-keygen", "sshd") if shutil.which(name, path=_PATH) is None]:
        lacks(f"{', '.join(missing)} (Debian: openssh-server, openssh-client)")
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where it leaves root's powers; Debian's service makes it
    with tempfile.TemporaryDirectory(prefix="cc-ssh-") as directory:
        started: list[Sshd] = []
        try:
            for _ in range(count):
                started.append(Sshd(Path(directory)))
            yield started
        finally:
            for one in started:
                one.end()


@contextlib.contextmanager
def fleet_of(*hosts: Sshd, sockets: tuple[str, ...] = (), per_host: int = 16) -> Iterator[Fleet]:
    """Use these hosts. sockets: of their engines; without them, all have this machine's."""
    ours = get_engine().url.removeprefix("unix://")
    names = [f"{host.name}{place}" for host, place in zip(hosts, sockets or [ours] * len(hosts), strict=True)]
    fleet = Fleet(names, hosts[0].config, per_host)
    try:
        yield fleet
    finally:
        close(fleet)


def close(fleet: Fleet) -> None:
    """End the connections; what is left of boxes is removed on the hosts."""
    for host in filter(Host.up, fleet.hosts):
        host.engine().link.close()
