"""The kind of box that ``sandbox=apptainer`` names: what its config group means, and what this machine lacks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from apptainer_boxes import cli, images
from apptainer_boxes.box import boot_apptainer
from rewards.task import Task
from rl.config.compose import ConfigError
from rl.episodes.boxes import FromImages, writable
from rollout.sandbox import Sandbox, SandboxError
from rollout.sandbox.sealing import Wanted


class Apptainer(FromImages):
    """Boxes are containers of apptainer or SingularityCE, without an engine and without root."""

    speed_only = (*FromImages.speed_only, "cache_dir")

    @property
    def cache(self) -> images.Cache:
        """Return the directory of .sif files and its budget."""
        directory = Path(self.sandbox.cache_dir).expanduser().absolute()
        return images.Cache(directory, self.budget_bytes, self.pulls)

    def missing(self, wanted: Sequence[Wanted]) -> list[str]:
        """Return the images that are not in the cache, neither sealed nor as they were pulled."""
        return images.missing(self.cache, [one.source for one in wanted])

    def store(self) -> Path | None:
        """Return the cache's directory, or the one in which it will be made. Raises ConfigError."""
        return writable(self.cache.directory, "sandbox.cache_dir", "give a directory that all nodes of the run share")

    def check(self) -> None:
        """Raise ConfigError if the program is missing or too old, or if the base image or the cache cannot be used."""
        try:
            cli.program()
        except SandboxError as error:
            raise ConfigError(
                f"sandbox=apptainer: {error}; install apptainer, load its module or choose another sandbox"
            ) from error
        base = self.sandbox.base_image
        if base is not None and base.endswith(".sif") and "://" not in base and not Path(base).is_file():
            raise ConfigError(f"sandbox.base_image: no file {base}")
        self.store()

    async def boot_box(self, task: Task, grading: bool, run: str, **common: Any) -> Sandbox:
        """Boot a box on the task's sealed image; see ``Kind.boot_box``."""
        cache = replace(self.cache, pulls=replace(self.pulls, patience_s=0))
        return await boot_apptainer(**self.made_from(task, grading), cache=cache, **common)

    async def seal(self, wanted: Sequence[Wanted], **how: Any) -> dict[str, dict]:
        """Pull and seal images into the cache; see ``FromImages.seal``."""
        return await images.prepare(self.cache, wanted, **how)
