"""This module starts container engines of a test's own, Docker's and podman's, beside the machine's: to break them,
or to have another.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import docker
import pytest
from docker.errors import DockerException

from rollout.sandbox.docker import engine as docker_engine
from rollout.sandbox.docker import images
from tests.docker_kit import left


class OwnEngine:
    """A Docker engine that keeps all that it has and leaves in one directory, on a file system that it may fill."""

    def __init__(self, directory: Path, data_mb: int) -> None:
        self.directory, self.url = directory, f"unix://{directory}/s"
        self.data = directory / "data"
        self.data.mkdir()
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={data_mb}m", "none", self.data], check=True, capture_output=True
        )
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        with open(self.directory / "log", "ab") as log:
            self.process = subprocess.Popen(
                self.command(), cwd=self.directory, stdout=log, stderr=log, start_new_session=True
            )
        for _ in range(600):
            with contextlib.suppress(DockerException):
                docker.APIClient(self.url, version="auto", timeout=5).close()
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise RuntimeError((self.directory / "log").read_text()[-1500:])

    def command(self) -> list[str]:
        """Return the command line of an engine that shares nothing with other engines."""
        name = f"faults-{os.getpid()}"  # in case all engines share one containerd
        (self.directory / "none.json").write_text("{}")
        command = ["dockerd", "--host", self.url, "--data-root", f"{self.data}"]
        command += ["--exec-root", f"{self.directory}/exec", "--pidfile", f"{self.directory}/pid"]
        command += ["--config-file", f"{self.directory}/none.json"]
        command += ["--containerd-namespace", name, "--containerd-plugins-namespace", f"{name}-plugins"]
        return [*command, "--iptables=false", "--ip6tables=false", "--bridge=none", "--shutdown-timeout=2"]

    def stop(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        self.process.wait(60)

    def fill(self, room: int = 0) -> None:
        """Fill the disk that holds its images and containers, but for `room` bytes."""
        with open(self.data / "filler", "wb", buffering=0) as file:
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(2**16))
            file.truncate(file.tell() - room)

    def make_room(self) -> None:
        (self.data / "filler").unlink()

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def load(self, *images: str) -> None:
        """Copy images from the machine's engine."""
        source = docker_engine.ContainerEngine().client
        target = docker.APIClient(self.url, version="auto", timeout=120)
        for image in images:
            target.load_image(source.get_image(image))
        target.close()

    def end(self) -> None:
        """Stop it and what it started, and unmount its file systems."""
        if self.process is not None and self.process.poll() is None:
            self.stop()
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with contextlib.suppress(OSError):
                if os.fsencode(self.directory) in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        for place in reversed([place for place in mounts if place.startswith(f"{self.directory}/")]):
            subprocess.run(["umount", "-l", place], check=True)


class OwnPodman(OwnEngine):
    """A podman that serves Docker's API."""

    _CONFIGURATION = """\
[engine]
exit_command_delay = 10
cgroup_manager = "cgroupfs"
events_logger = "file"
lock_type = "file"
tmp_dir = "{directory}/tmp"
"""

    def command(self) -> list[str]:
        # By default all podmans of a machine share their locks, and crun may not know this machine's control groups.
        configuration = self.directory / "containers.conf"
        configuration.write_text(self._CONFIGURATION.format(directory=self.directory))
        runtime = ["--runtime", runc] if (runc := shutil.which("runc")) else []
        roots = ["--root", f"{self.data}", "--runroot", f"{self.directory}/run"]
        service = ["podman", *roots, *runtime, "system", "service", "--time=0", self.url]
        return ["env", f"CONTAINERS_CONF={configuration}", *service]


Own = TypeVar("Own", bound=OwnEngine)


@contextlib.contextmanager
def running(kind: type[Own], *images: str, data_mb: int) -> Iterator[Own]:
    """Run an engine that has these images, in a temporary directory."""
    with tempfile.TemporaryDirectory(prefix="cc-engine-") as directory:
        own = kind(Path(directory), data_mb=data_mb)
        try:
            own.start()
            own.load(*images)
            yield own
        finally:
            own.end()


@contextlib.contextmanager
def used(own: OwnEngine) -> Iterator[None]:
    """Let this process use that engine in place of the machine's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_HOST", own.url)
        patch.setattr(docker_engine, "_engine", functools.cache(lambda pid: docker_engine.ContainerEngine()))
        patch.setattr(images, "_known", {})
        yield
        assert left(docker_engine.get_engine()) == []
