"""This module names the kinds of boxes that the tests in this directory are run against.

To add a kind: a class here that boots its boxes and says what they can do, and its line in `KINDS`. The fixture `kind`
(conftest.py) then runs every verb against it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from apptainer_boxes.box import ApptainerSandbox, boot_apptainer
from apptainer_boxes.images import Cache
from rollout.sandbox import Limits, Sandbox, directory
from rollout.sandbox.docker.box import DockerSandbox, boot_docker
from rollout.sandbox.docker.engine import get_engine
from rollout.sandbox.docker.fleet import Fleet, Host, boot_elsewhere
from rollout.sandbox.local.box import Isolation, LocalSandbox, boot_local
from rollout.sandbox.sealing import Source
from tests.boxes.apptainer_kit import IMAGE, Stub
from tests.docker_kit import base_image, left, small_image
from tests.kube_kit import POD_PROCESSES
from tests.own_engine import used
from tests.sandboxes import BWRAP
from tests.ssh_kit import fleet_of

TIGHT = Limits(memory_bytes=256 * 2**20, processes=128, disk_bytes=48 * 2**20, cpu_s=60, file_bytes=8 * 2**20)
"""Limits of a box that may be attacked: a hole does no harm to this machine."""


class BoxKit:
    """A BoxKit boots boxes of one kind, and says what tests may expect of them.

    repository: the work tree that boxes have (`tests.sandboxes.history`). directory: for files of the kit's own.
    isolated: boxes see no file, process or network of the machine. own_system: a box's whole file system is its own, to
    be written to. renews: directories at its root can be made anew. serial: programs of a box run one after another.
    processes: how many the box as a whole may have, with the limits `TIGHT`; 0: nothing refuses more. mounted: what of
    a box of its own system may be written to and is a mount. path: a regular expression for PATH in it.
    sets: variables that a box's programs get besides HOME, TMPDIR, LANG and PATH. image: the name of the image that
    boxes are made from, whose history is to be sealed.
    moments: seconds after the start of an exec at which to cancel it, from before its program starts to after that.
    """

    isolated: ClassVar[bool] = True
    own_system: ClassVar[bool] = False
    renews: ClassVar[bool] = False
    serial: bool = False
    processes: ClassVar[int] = 0
    mounted: ClassVar[set[str]] = set()
    path: ClassVar[str] = r".*/usr/bin:/sbin:/bin"
    sets: ClassVar[dict[str, str]] = {}
    image: str
    moments: ClassVar[tuple[float, ...]] = (0, 0.001, 0.003, 0.01, 0.02, 0.03)

    def __init__(self, name: str, repository: Path, directory: Path) -> None:
        self.name, self.repository, self.directory = name, repository, directory

    @contextlib.contextmanager
    def ready(self, request: pytest.FixtureRequest) -> Iterator[None]:
        """Set up this process for boxes of this kind."""
        yield

    async def boot(self, snapshot: Path | None = None, **options: Any) -> Sandbox:
        """Boot a box on the repository, or on a snapshot. options: limits, binds, socket_dir; for kinds with images
        also source, in place of the repository's."""
        raise NotImplementedError

    async def kill(self, box: Sandbox) -> None:
        """End a box from outside while it runs a program, as a crash would."""
        raise NotImplementedError

    def left(self) -> list[str]:
        """Return what is left of this process's boxes; nothing once all are closed."""
        workspace = directory._workspace(os.getpid())
        return [name for name in os.listdir(workspace) if name != "lock"]


class Local(BoxKit):
    """Directories and processes of this machine, with bubblewrap or without."""

    path = rf"{sys.prefix}/bin:.*"

    def __init__(self, name: str, repository: Path, directory: Path) -> None:
        super().__init__(name, repository, directory)
        self.isolation: Isolation = "bwrap" if name == "bwrap" else "none"
        self.isolated = self.isolation == "bwrap"
        self.serial = not self.isolated

    async def boot(self, snapshot: Path | None = None, **options: Any) -> LocalSandbox:
        return await boot_local(snapshot or self.repository, isolation=self.isolation, **options)

    async def kill(self, box: Sandbox) -> None:
        assert isinstance(box, LocalSandbox)
        kill_where(b"bwrap", os.fsencode(box.root / "tree"))


class Docker(BoxKit):
    """Containers of the machine's Docker engine."""

    own_system = serial = renews = True
    processes, mounted = TIGHT.processes, {"/etc/hostname"}
    sets: ClassVar[dict[str, str]] = {"HOSTNAME": "sandbox"}
    moments = (0, 0.02, 0.1, 0.3)

    @functools.cached_property
    def image(self) -> str:
        return small_image()

    async def boot(self, snapshot: Path | None = None, source: Source | None = None, **options: Any) -> DockerSandbox:
        if source is None:
            source = Source(await asyncio.to_thread(base_image if snapshot else small_image))
        return await boot_docker(source, snapshot=snapshot, **options)

    async def kill(self, box: Sandbox) -> None:
        assert isinstance(box, DockerSandbox)
        await asyncio.to_thread(get_engine().client.kill, box.container)

    def left(self) -> list[str]:
        return left(get_engine())


class Podman(Docker):
    """Containers of a podman of the test's own."""

    sets: ClassVar[dict[str, str]] = {"HOSTNAME": "sandbox", "container": "podman", "TERM": "xterm"}

    @contextlib.contextmanager
    def ready(self, request: pytest.FixtureRequest) -> Iterator[None]:
        with used(request.getfixturevalue("own_podman")):
            yield


class Ssh(Docker):
    """Containers of the machine's Docker engine, which is reached through an SSH server; some are warm."""

    fleet: Fleet

    @contextlib.contextmanager
    def ready(self, request: pytest.FixtureRequest) -> Iterator[None]:
        with fleet_of(*request.getfixturevalue("own_sshd")) as self.fleet:
            yield

    async def boot(self, snapshot: Path | None = None, source: Source | None = None, **options: Any) -> DockerSandbox:
        if source is None:
            source = Source(await asyncio.to_thread(base_image if snapshot else small_image))
        return await boot_elsewhere(self.fleet, source, snapshot=snapshot, warm=2, **options)

    def left(self) -> list[str]:
        for engine in filter(None, map(Host.up, self.fleet.hosts)):
            left(engine)
        return super().left()


class Kubernetes(BoxKit):
    """Pods of a cluster of the test's own."""

    own_system = serial = True
    processes, mounted = POD_PROCESSES, {"/testbed", "/home/agent", "/tmp", "/dev/termination-log"}
    mounted |= {f"/etc/{name}" for name in ("hostname", "hosts", "resolv.conf")}
    sets: ClassVar[dict[str, str]] = {"HOSTNAME": "sandbox"}
    moments = (0, 0.05, 0.3)

    @functools.cached_property
    def image(self) -> str:
        return small_image()

    @contextlib.contextmanager
    def ready(self, request: pytest.FixtureRequest) -> Iterator[None]:
        self.cluster = request.getfixturevalue("own_cluster")
        yield

    async def boot(self, snapshot: Path | None = None, source: Source | None = None, **options: Any) -> Sandbox:
        from kubernetes_boxes.box import boot_pod

        if source is None:
            source = Source(await asyncio.to_thread(base_image if snapshot else small_image))
        return await boot_pod(source, self.cluster.pods(), snapshot=snapshot, **options)

    async def kill(self, box: Sandbox) -> None:
        await asyncio.to_thread(self.cluster.api, f"api/v1/namespaces/boxes/pods/{box.name}", {}, "DELETE")  # type: ignore[attr-defined]

    def left(self) -> list[str]:
        return self.cluster.names()


class Apptainer(BoxKit):
    """Boxes of the stand-in for apptainer, with or without what it may be unable to do."""

    serial = True
    path = r".*/usr/bin:/bin"
    sets: ClassVar[dict[str, str]] = {"FROM_IMAGE": "1"}
    image = IMAGE
    moments = (0, 0.01, 0.05, 0.3)

    def __init__(self, name: str, repository: Path, directory: Path) -> None:
        super().__init__(name, repository, directory)
        self._stub, self._cache = Stub(directory / "bin", repository), Cache(directory.parent / "sif")
        self._stub.cannot(**({"overlay": True, "limits": True} if name == "apptainer-less" else {}))

    @contextlib.contextmanager
    def ready(self, request: pytest.FixtureRequest) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch, self._stub.first(patch):
            yield

    async def boot(
        self, snapshot: Path | None = None, source: Source | None = None, **options: Any
    ) -> ApptainerSandbox:
        return await boot_apptainer(source or Source(IMAGE), self._cache, snapshot=snapshot, **options)

    async def kill(self, box: Sandbox) -> None:
        assert isinstance(box, ApptainerSandbox)
        kill_where(b"apptainer\0--quiet\0exec", os.fsencode(box.root))


def kill_where(*words: bytes) -> None:
    """Kill the processes of this machine whose command line has all of these words."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            command = Path("/proc", name, "cmdline").read_bytes()
            if all(word in command for word in words):
                os.kill(int(name), signal.SIGKILL)


_DOCKER = (pytest.mark.docker, pytest.mark.timeout(900))  # the first test of all may have to make the base image
KINDS: dict[str, tuple[type[BoxKit], tuple[pytest.MarkDecorator, ...]]] = {
    "plain": (Local, ()),
    "bwrap": (Local, tuple(BWRAP.marks)),
    "docker": (Docker, _DOCKER),
    "podman": (Podman, (*_DOCKER, pytest.mark.podman, pytest.mark.xdist_group("podman"))),
    "ssh": (Ssh, _DOCKER),
    "kubernetes": (Kubernetes, (*_DOCKER, pytest.mark.xdist_group("kubernetes"))),
    "apptainer": (Apptainer, (pytest.mark.bwrap,)),
    "apptainer-less": (Apptainer, (pytest.mark.bwrap,)),
}


def kinds(*names: str) -> pytest.MarkDecorator:
    """Run a test, or all of a module, against these kinds only."""
    return pytest.mark.parametrize("kind", [param(name) for name in names], indirect=True)


def param(name: str, *more: Any) -> Any:
    """Return the parameter set of a kind, and of `more` values, with the kind's marks."""
    return pytest.param(name, *more, marks=KINDS[name][1])
