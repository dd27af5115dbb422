"""The kind of box that ``sandbox=ssh`` names: containers on other machines, whose engines are reached by SSH."""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rewards.task import Task
from rl.config.compose import ConfigError
from rl.episodes.boxes import Docker
from rollout.sandbox import Sandbox
from rollout.sandbox.docker.engine import ContainerEngine
from rollout.sandbox.docker.fleet import Fleet, boot_elsewhere, fleet_for


class Ssh(Docker):
    """Boxes are containers of Docker or podman on hosts that ``ssh`` reaches."""

    numbers = (*Docker.numbers, "per_host")
    speed_only = (*Docker.speed_only, "hosts", "ssh_config", "per_host")

    @property
    def fleet(self) -> Fleet:
        """Return this process's connections to the hosts."""
        box = self.sandbox
        config = Path(box.ssh_config).expanduser() if box.ssh_config else None
        return fleet_for(os.getpid(), tuple(box.hosts), config, box.per_host)

    def check(self) -> None:
        """Raise ConfigError, with a line for each host that cannot be used, or if the base image cannot be had."""
        if shutil.which("ssh") is None:
            raise ConfigError("sandbox=ssh: there is no program ssh on this machine; install openssh-client")
        if not self.sandbox.hosts:
            raise ConfigError("sandbox.hosts is empty; give the hosts of boxes, as in [user@host-a,host-b:2222]")
        if problems := self.fleet.problems():
            raise ConfigError(*(f"sandbox.hosts: {problem}" for problem in problems))
        super().check()

    def engine_for(self, image: str) -> ContainerEngine:
        """Return the engine of the host that has, or is to have, an image."""
        return self.fleet.engine_for(image)

    def lacking(self, images: Iterable[str]) -> list[str]:
        """Return the images that neither a host has nor this machine's engine, from which they are copied."""
        return self.fleet.missing(images)

    async def boot_box(self, task: Task, grading: bool, run: str, **common: Any) -> Sandbox:
        """Boot a container of the task's sealed image on a host; see ``Kind.boot_box``."""
        return await boot_elsewhere(self.fleet, **self.made_from(task, grading), **self.how(run), **common)

    def store(self) -> None:
        """Return None: images are kept on other machines."""
