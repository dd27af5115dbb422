"""The kinds of boxes (``sandbox.kind``), as the framework knows them: a class per kind, all in ``KINDS``.

A class reads the config group ``sandbox`` of its kind; the boxes themselves are in the kind's folder below
``rollout/sandbox``. A package beside this one brings a kind by a class derived from ``Kind`` or ``FromImages``
(docs/sandboxes.md). ``rl.boxes`` is the command.
"""

import asyncio
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from omegaconf import DictConfig

from rewards import graders
from rewards.task import Task
from rl.config import plugins
from rl.config.compose import ConfigError
from rollout.agent import Agent
from rollout.episode import Boot
from rollout.sandbox import WORKDIR, Limits, Sandbox, SandboxError, registry
from rollout.sandbox.docker import images as docker_images
from rollout.sandbox.docker.box import boot_docker
from rollout.sandbox.docker.engine import ContainerEngine, checked, get_engine
from rollout.sandbox.local import bwrap
from rollout.sandbox.local.box import boot_local
from rollout.sandbox.pulls import Pulls, refused_for_now
from rollout.sandbox.sealing import Source, Wanted

Say = Callable[[str], None]
Count = Callable[[int, int], None]


class Kind:
    """A kind of box implements ``boot_box``, and overrides of the others what it needs; this class has no images.

    sandbox: the config group. numbers: its keys that must be numbers above 0. speed_only: its keys that change how fast
    episodes run, but not how they end. from_images: boxes are made from container images, which are pulled and sealed
    before a run. renews: whether boxes can make directories at their root anew (``Sandbox.renew``).
    """

    numbers: ClassVar[tuple[str, ...]] = ("cpu_s", "file_mb", "concurrency")
    speed_only: ClassVar[tuple[str, ...]] = ("concurrency",)
    from_images: ClassVar[bool] = False
    renews: ClassVar[bool] = False

    def __init__(self, sandbox: DictConfig) -> None:
        self.sandbox = sandbox

    @property
    def name(self) -> str:
        """Return the class's name in small letters, which is what is written after ``sandbox=``."""
        return type(self).__name__.lower()

    def check(self) -> None:
        """Raise ConfigError if this machine cannot make such boxes."""

    def check_tasks(self, tasks: Sequence[Task]) -> None:
        """Raise ConfigError if it is already known that a task's image cannot be had, or its tests cannot be run."""
        for task in tasks:
            if not self.from_images and not is_snapshot(task):
                raise ConfigError(
                    f"{task.instance_id} needs boxes made from its image, as sandbox=docker makes them, not {self.name}"
                )
            if not self.renews and graders.named(task.grader).renews:
                raise ConfigError(
                    f"{task.instance_id}: the grader {task.grader} cannot put its tests into boxes of "
                    f"sandbox={self.name}; take sandbox=docker"
                )

    def boot(self, agent: Agent | None = None, run: str = "") -> Boot:
        """Return the function that boots a task's boxes.

        agent: its programs have the same paths in an agent's box as on this machine; None: all boxes are for grading.
        run: the name of the run, for kinds that label their boxes.
        """
        limits = self.limits()
        shown = {path: str(path) for path in agent.programs} if agent else {}
        if agent and self.from_images:
            shown |= agent.covers

        async def boot(task: Task, socket_dir: Path | None) -> Sandbox:
            binds = shown if socket_dir else None
            grading = socket_dir is None
            enough = _at_least(limits, task.limits)
            return await self.boot_box(task, grading, run, limits=enough, binds=binds, socket_dir=socket_dir)

        return boot

    async def boot_box(self, task: Task, grading: bool, run: str, **common: Any) -> Sandbox:
        """Boot a fresh box on a task's repository; the caller closes it. Raises SandboxError.

        grading: it is for grading, not for an agent. run: the name of the run. common: limits (Limits), binds (host
        path -> path inside, read-only, or None) and socket_dir (a host directory that appears at its own path inside,
        or None), which the boot functions of all kinds have.
        """
        raise NotImplementedError

    def limits(self) -> Limits:
        """Return the limits that the group names; a kind's group has the keys of those that it enforces."""
        box = self.sandbox
        sizes = {f"{name}_bytes": box[f"{name}_mb"] << 20 for name in ("memory", "disk", "file") if f"{name}_mb" in box}
        return Limits(**sizes, **{name: box[name] for name in ("cpus", "processes", "cpu_s") if name in box})

    def need_base_image(self, snapshots: str) -> None:
        """Raise ConfigError if boxes need an image for tasks that are local snapshots and none is configured.

        snapshots: which tasks these are, as the start of the message.
        """


class Local(Kind):
    """Boxes are directories and processes of this machine, isolated by bubblewrap where it works."""

    numbers = (*Kind.numbers, "memory_mb", "processes", "disk_mb")

    def check(self) -> None:
        """Raise ConfigError if bubblewrap was asked for and does not work; ``auto`` decides for itself."""
        if self.sandbox.isolation != "bwrap":
            return
        if problem := bwrap.problem():
            raise ConfigError(f"sandbox.isolation=bwrap, but {problem}; or set sandbox.isolation=auto")

    async def boot_box(self, task: Task, grading: bool, run: str, **common: Any) -> Sandbox:
        """Boot a box on a copy of the task's snapshot; see ``Kind.boot_box``."""
        return await boot_local(task.snapshot, isolation=self.sandbox.isolation, **common)


class FromImages(Kind):
    """A kind of box that starts from a task's image implements ``boot_box``, ``seal``, ``missing`` and ``store``.

    base_hint: how to get a base image, for messages.
    """

    from_images = True
    numbers = (*Kind.numbers, "memory_mb", "cpus", "processes", "pull_parallel")
    speed_only = (*Kind.speed_only, "pull_parallel", "image_budget_gb", "registry_mirror", "pull_patience_s")
    base_hint: ClassVar[str] = ""

    @property
    def budget_bytes(self) -> int | None:
        """Return how many bytes of disk images may take, None without a limit."""
        budget = self.sandbox.image_budget_gb
        return None if budget is None else int(budget * 2**30)

    def check_tasks(self, tasks: Sequence[Task]) -> None:
        """Raise ConfigError if a task is a local snapshot and there is no image to run it in; see ``Kind``."""
        super().check_tasks(tasks)
        for task in filter(is_snapshot, tasks):
            self.need_base_image(f"{task.instance_id} is a local snapshot")

    def need_base_image(self, snapshots: str) -> None:
        """Raise ConfigError if ``sandbox.base_image`` is not set."""
        if self.sandbox.base_image is None:
            raise ConfigError(f"{snapshots}, for which sandbox={self.name} needs sandbox.base_image{self.base_hint}")

    @property
    def pulls(self) -> Pulls:
        """Return where images are pulled from ahead of a run, and with what patience. A box that boots during a run
        never waits for a registry: its episode is retried, and the other episodes of the step would wait for it."""
        return Pulls(self.sandbox.registry_mirror, self.sandbox.pull_patience_s)

    async def prepare(self, wanted: Sequence[Wanted], say: Say, count: Count | None = None) -> dict[str, dict]:
        """Pull and seal images ahead; see ``seal``."""
        return await self.seal(wanted, parallel=self.sandbox.pull_parallel, say=say, count=count)

    async def seal(self, wanted: Sequence[Wanted], **how: Any) -> dict[str, dict]:
        """Pull and seal images; return a report per instance id. how: for ``sealing.ahead``. Raises SandboxError."""
        raise NotImplementedError

    def missing(self, wanted: Sequence[Wanted]) -> list[str]:
        """Return the images that have to be pulled. Blocks. Raises SandboxError."""
        raise NotImplementedError

    def store(self) -> Path | None:
        """Return the directory on whose disk images are kept, None if it is on another machine."""
        raise NotImplementedError

    def made_from(self, task: Task, grading: bool) -> dict[str, Any]:
        """Return the parameters of the boot functions that name the image; a snapshot is copied into the base image."""
        if is_snapshot(task):
            return {"source": Source(self.sandbox.base_image), "snapshot": task.snapshot}
        return {"source": source_of(task, grading=grading)}


class Docker(FromImages):
    """Boxes are containers of Docker or podman."""

    numbers = (*FromImages.numbers, "disk_mb")
    speed_only = (*FromImages.speed_only, "warm")
    renews = True
    base_hint = "; scripts/task_images.py --base makes one and prints its name"

    def engine_for(self, image: str) -> ContainerEngine:
        """Return the engine that has, or is to have, an image. Blocks. Raises SandboxError."""
        return get_engine()

    def lacking(self, images: Iterable[str]) -> list[str]:
        """Return the images that are nowhere but perhaps in a registry. Blocks. Raises SandboxError."""
        return docker_images.missing(get_engine(), images)

    def check(self) -> None:
        """Raise ConfigError if no engine answers or it does not have the base image."""
        base = self.sandbox.base_image
        try:
            if self.lacking([base] if base else []):
                raise ConfigError(f"sandbox.base_image: no image {base}{self.base_hint}")
        except SandboxError as error:
            advice = "start the engine, set DOCKER_HOST or choose sandbox=local"
            raise ConfigError(f"sandbox={self.name}: {error}; {advice}") from error

    def check_tasks(self, tasks: Sequence[Task]) -> None:
        """Raise ConfigError if a snapshot has no image to run in, or if the first missing image cannot be pulled.

        The other missing images are only found out when they are pulled, before the run starts. With podman that is so
        for all images, because podman cannot ask a registry without pulling.
        """
        super().check_tasks(tasks)
        try:
            lost = self.lacking(task.image for task in tasks if not is_snapshot(task))
            engine = self.engine_for(lost[0]) if lost else None
            if engine and not engine.podman:
                checked("missing_image", engine.client.inspect_distribution, self.pulls.address(lost[0]))
        except SandboxError as error:
            if not (self.pulls.patience_s and refused_for_now(str(error))):
                raise ConfigError(f"sandbox={self.name}: an image is not here and cannot be pulled: {error}") from error

    def how(self, run: str) -> dict[str, Any]:
        """Return the boot function's parameters that are the same for all tasks of a run."""
        common = {"run": run, "budget_bytes": self.budget_bytes, "pulls": replace(self.pulls, patience_s=0)}
        return {**common, "warm": self.sandbox.get("warm", 0), "scratch": os.environ.get("RL_SOCKET_DIR")}

    async def boot_box(self, task: Task, grading: bool, run: str, **common: Any) -> Sandbox:
        """Boot a container of the task's sealed image; see ``Kind.boot_box``."""
        return await boot_docker(**self.made_from(task, grading), **self.how(run), **common)

    async def seal(self, wanted: Sequence[Wanted], **how: Any) -> dict[str, dict]:
        """Pull and seal images in the engine; see ``FromImages.seal``."""
        return await docker_images.prepare(
            wanted, engine_for=self.engine_for, budget_bytes=self.budget_bytes, pulls=self.pulls, **how
        )

    def missing(self, wanted: Sequence[Wanted]) -> list[str]:
        """Return the images that have to be pulled. Blocks. Raises SandboxError."""
        return self.lacking(one.source.image for one in wanted)

    def store(self) -> Path | None:
        """Return the engine's directory. Blocks. Raises SandboxError."""
        place = Path(checked("docker_failed", get_engine().client.info).get("DockerRootDir") or "/none")
        return place if place.is_dir() else None


KINDS: dict[str, type[Kind]] = {"local": Local, "docker": Docker}


def kind_of(sandbox: DictConfig) -> Kind:
    """Return the kind of box that a config group ``sandbox`` describes. Raises ConfigError."""
    try:
        kind = plugins.named(sandbox.kind, KINDS)
    except ValueError as error:
        raise ConfigError(f"sandbox.kind {error}") from error
    return kind(sandbox)


def prepare_images(
    sandbox: DictConfig, run_dir: Path, tasks: Iterable[Task], say: Say, count: Count | None = None
) -> None:
    """Pull and seal the images of a run's tasks, if its boxes are made from images.

    Whatever was found in them that could give away an answer is written to images.json in the run directory. ``say`` is
    given lines for the user; ``count`` is given how many images are ready and how many there are. Raises SandboxError.
    """
    kind = kind_of(sandbox)
    wanted = wanted_of(tasks)
    if not wanted or not isinstance(kind, FromImages):
        return
    reports = asyncio.run(kind.prepare(wanted, say, count))
    (run_dir / "images.json").write_text(json.dumps(reports, indent=1) + "\n")
    if telling := sum(bool(report["residue"]) for report in reports.values()):
        say(f"images: {telling} have what could tell the answer or configure an agent in them; see images.json")


def _at_least(limits: Limits, wanted: Mapping[str, float]) -> Limits:
    """Return the limits, raised to what a task wants."""
    mb = {f"{name}_bytes": int(wanted.get(f"{name}_mb", 0)) << 20 for name in ("memory", "disk")}
    higher = {name: max(getattr(limits, name), value) for name, value in mb.items()}
    return replace(limits, **higher, cpus=max(limits.cpus, wanted.get("cpus", 0)))


def is_snapshot(task: Task) -> bool:
    """Return whether a task's image is a directory of this machine."""
    return task.image.startswith("dir:")


def source_of(task: Task, *, grading: bool) -> Source:
    """Return what a task's box is made from; only a box for grading has the paths that are hidden from agents."""
    hide = () if grading else task.hidden_paths
    return Source(task.image, task.base_commit, task.setup_patch or "", hide, task.workdir or WORKDIR)


def wanted_of(tasks: Iterable[Task]) -> list[Wanted]:
    """Return the sealed images that tasks need: for each task the agent's, and the one for grading if it differs."""
    wanted = []
    for task in tasks:
        if not is_snapshot(task):
            agent, grading = (source_of(task, grading=grading) for grading in (False, True))
            wanted.append(Wanted(task.instance_id, agent, task.FAIL_TO_PASS))
            if agent != grading:
                wanted.append(Wanted(f"{task.instance_id} (grading)", grading))
    return wanted


def writable(wanted: Path, key: str, advice: str) -> Path:
    """Return ``wanted`` if it exists, else the nearest existing directory above it, in which it will be made.

    Raises:
        ConfigError: that directory cannot be written. ``key`` and ``advice`` are for the message.
    """
    place = next(p for p in (wanted, *wanted.parents) if p.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"{key}: cannot write in {place}; {advice}")
    return place


# Bytes on disk per compressed byte that is pulled. Docker unpacks layers into files, others into a sealed copy
# beside the image. The factor is assumed: what pip and apt install compresses to about a third of its size.
_ON_DISK = 3.0


def check_room(kind: FromImages, wanted: Sequence[Wanted], say: Say) -> None:
    """Say how large the images are that have to be pulled. Raises ConfigError if the disk has no room for them.

    If the registry does not report sizes, ``say`` is told so and nothing is checked. Raises SandboxError.
    """
    lost = kind.missing(wanted)
    if not lost:
        return
    try:
        found = registry.estimate(lost, lambda image: registry.layers(image, kind.pulls))
    except OSError as error:
        say(f"images: {len(lost)} to pull, of unknown size: {error}")
        return
    need = min(found.compressed * _ON_DISK, kind.budget_bytes or math.inf)
    sizes = f"{found.compressed / 2**30:.1f} GiB to transfer, {need / 2**30:.1f} GiB on disk"
    say(f"images: {len(lost)} to pull; about {sizes}, by the sizes of {found.asked}")
    if (store := kind.store()) is not None and (free := shutil.disk_usage(store).free) < need:
        raise ConfigError(
            f"{store} has {free / 2**30:.1f} GiB free, and the images need about {need / 2**30:.1f}; make room, take "
            "fewer tasks, or set sandbox.image_budget_gb"
        )
