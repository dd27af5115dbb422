"""Boxes on other machines: hosts that are reached by SSH, each with a container engine (`link.Link`).

A `Fleet` chooses the host of each box. A host that does not answer, or whose disk is full, is left out for `RETRY_S`;
the boxes that it had fail with the cause that the engine's failure has, and what is tried again goes to another host.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import logging
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rollout.sandbox import SandboxError, infrastructure
from rollout.sandbox.docker import images
from rollout.sandbox.docker.box import DockerSandbox, boot_docker
from rollout.sandbox.docker.engine import PROJECT, ContainerEngine, cache_dir, checked, get_engine
from rollout.sandbox.docker.link import Link
from rollout.sandbox.sealing import Source, digest

LEASE = f"{PROJECT}.lease"
RETRY_S = 60.0

logger = logging.getLogger(__name__)


class HostEngine(ContainerEngine):
    """This is the engine of a host. failed: when it did not answer or had no space last, by `time.monotonic`."""

    relays = True

    def __init__(self, link: Link) -> None:
        self.link, self.failed = link, -RETRY_S
        super().__init__(f"unix://{link.engine()}", link)

    async def call(self, function: Callable[..., Any], *args: Any, cause: str = "docker_failed", **options: Any) -> Any:
        """Run a blocking function in the thread pool, as `ContainerEngine.call` does; errors name the host."""
        try:
            return await super().call(function, *args, cause=cause, **options)
        except SandboxError as error:
            cause = error.cause if self.link.alive else "no_engine"
            if cause in ("no_engine", "no_space"):
                self.failed = time.monotonic()
            why = str(error) if self.link.alive else f"the host is lost: {self.link.problem()}"
            raise SandboxError(cause, f"{self.name}: {why}") from error

    def labels(self, run: str = "") -> dict[str, str]:
        """Return the labels of a new container, by which the host finds it when the connection has ended."""
        return {**super().labels(run), LEASE: self.link.lease}

    def remove(self, container: str) -> None:
        """Delete a container; the host itself does so if it cannot be reached."""
        if self.link.alive:
            super().remove(container)

    def cache(self, kind: str) -> Path:
        """Return a directory of this machine for what is worth keeping about this engine."""
        return cache_dir(f"hosts/{digest(self.name)}/{kind}")

    def fetch(self, image: str) -> bool:
        """Copy an image from this machine's engine, if there is one that has it."""
        try:
            here = get_engine()
            if images.missing(here, [image]):
                return False
        except SandboxError:
            return False
        logger.info("copying the image %s to %s", image, self.name)
        checked("missing_image", self.client.load_image, here.client.get_image(image))
        return True


class Host:
    """A Host is one of a fleet's machines, connected or not. error: why it is not. tried: whether that was tried.

    booting: boxes that are being made. boxes: those that are there or were. images: those that were asked for on it.
    """

    def __init__(self, name: str, config: Path | None) -> None:
        self.name, self.error, self.tried = name, "", False
        self.booting, self.boxes = 0, weakref.WeakSet[DockerSandbox]()
        self.images, self.cpus = set[str](), 1
        self._config, self._again_at = config, 0.0
        self._connecting: concurrent.futures.Future[None] | None = None
        self._engine: HostEngine | None = None

    def up(self) -> HostEngine | None:
        """Return its engine if it is connected."""
        return self._engine if self._engine and self._engine.link.alive else None

    def engine(self) -> HostEngine:
        """Return its engine. Raises SandboxError no_engine."""
        if (engine := self.up()) is None:
            raise SandboxError("no_engine", self.error or f"{self.name} is lost")
        return engine

    def usable(self) -> bool:
        """Return whether it is connected, and has not failed lately."""
        engine = self.up()
        return engine is not None and time.monotonic() - engine.failed >= RETRY_S

    def load(self) -> int:
        """Return the number of boxes that this process has on it."""
        return self.booting + sum(bool(box.container) for box in self.boxes)

    def wake(self, pool: concurrent.futures.Executor, now: bool) -> concurrent.futures.Future[None] | None:
        """Connect to it in a thread, `now` or when it is time to try again; return what is in progress or was last."""
        idle = self._connecting is None or self._connecting.done()
        if idle and self.up() is None and (now or time.monotonic() >= self._again_at):
            self._connecting = pool.submit(self._connect)
        return self._connecting

    def _connect(self) -> None:
        if self._engine is not None:
            logger.warning("%s is lost, and its boxes with it: %s", self.name, self._engine.link.problem())
            self._engine.link.close()
        self._engine, link = None, None
        try:
            link = Link(self.name, self._config)
            self._engine, self.error, self.cpus = HostEngine(link), "", link.cpus
        except (SandboxError, OSError) as error:
            if link is not None:
                link.close()
            self.error = f"{self.name}: {str(error).removeprefix('no_engine: ')}"
            self._again_at = time.monotonic() + RETRY_S
        self.tried = True

    def has(self, image: str) -> bool | None:
        """Return whether it has an image, None if it does not answer; then it is left out for a while."""
        try:
            return not images.missing(self.engine(), [image])
        except SandboxError as error:
            logger.warning("%s does not answer: %s", self.name, error)
            if (engine := self.up()) is not None:
                engine.failed = time.monotonic()
            return None


class Fleet:
    """A Fleet has several hosts, and chooses one for each box; its methods block.

    config: a file in place of ssh's own. per_host: as many boxes of this process a host has before others are taken for
    an image that only it has.
    """

    def __init__(self, names: Sequence[str], config: Path | None, per_host: int) -> None:
        self.hosts = [Host(name, config) for name in names]
        self._per_host, self._lock = per_host, threading.Lock()
        self._pool = concurrent.futures.ThreadPoolExecutor(max(1, len(names)), thread_name_prefix="hosts")
        self.choosing = concurrent.futures.ThreadPoolExecutor(16, thread_name_prefix="choosing")

    def connected(self) -> list[Host]:
        """Return the hosts that are connected. Others are tried meanwhile; if there are none, that is waited for."""
        for now in (False, True):
            with self._lock:
                trying = [(host, host.wake(self._pool, now)) for host in self.hosts]
            concurrent.futures.wait([future for host, future in trying if future and (now or not host.tried)])
            if up := [host for host in self.hosts if host.up()]:
                return up
        return []

    def problems(self) -> list[str]:
        """Return a line for each host that cannot be used."""
        self.connected()
        return [host.error for host in self.hosts if host.error]

    def choose(self, image: str) -> Host:
        """Return the host for a box, which counts as its own until `done`. Raises SandboxError no_engine."""
        connected = self.connected()
        asked = {host: host.has(image) for host in [host for host in connected if host.usable()] or connected}
        with self._lock:
            if not (up := [host for host, had in asked.items() if had is not None and host.up()]):
                told = "; ".join(host.error or f"{host.name} is lost" for host in self.hosts)
                raise SandboxError("no_engine", f"no host answers: {told}")

            def rank(host: Host) -> tuple[bool, float, int, float]:
                having = asked[host] or image in host.images  # others of a group come where its first one has
                preferred = having and host.load() < self._per_host
                return not preferred, host.load() / host.cpus, len(host.images), random.random()

            host = min(up, key=rank)
            host.booting += 1
            host.images.add(image)
        return host

    def done(self, host: Host) -> None:
        """Note that a box that a host was chosen for is booted, or will never be."""
        with self._lock:
            host.booting -= 1

    def engine_for(self, image: str) -> ContainerEngine:
        """Return the engine of the host that is to have an image. Raises SandboxError no_engine."""
        host = self.choose(image)
        self.done(host)
        return host.engine()

    def missing(self, wanted: Iterable[str]) -> list[str]:
        """Return the images that no host has, and that cannot be copied to one from this machine's engine."""
        up = self.connected()
        left = [image for image in sorted(set(wanted)) if not any(host.has(image) for host in up)]
        try:
            return images.missing(get_engine(), left)
        except SandboxError:
            return left


@functools.cache
def fleet_for(pid: int, names: tuple[str, ...], config: Path | None, per_host: int) -> Fleet:
    """Return the fleet of these hosts of a process (a forked child connects by itself); see `Fleet`."""
    return Fleet(names, config, per_host)


@infrastructure("boot_failed")
async def boot_elsewhere(fleet: Fleet, source: Source, **options: Any) -> DockerSandbox:
    """Return a fresh sandbox on a host; see `boot_docker`, also for the options. Raises SandboxError."""
    loop = asyncio.get_running_loop()
    choosing = loop.run_in_executor(fleet.choosing, fleet.choose, source.image)
    try:
        host = await asyncio.shield(choosing)
    except asyncio.CancelledError:
        choosing.add_done_callback(lambda done: done.exception() or fleet.done(done.result()))
        raise
    try:
        box = await boot_docker(source, engine=host.engine(), **options)
        host.boxes.add(box)
        return box
    except SandboxError as error:
        if error.cause == "missing_image":
            host.images.discard(source.image)
        raise
    finally:
        fleet.done(host)
