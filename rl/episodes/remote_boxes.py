"""Boxes on other nodes of the Ray cluster, in which patches are graded: ``cluster.grading_resource``.

Everything else stays as it is: the grader of ``rewards.grade`` runs beside the episode, and what it does with its box
is done by a ``Host``, a Ray actor on a node that has the resource. Each process that plays episodes has its own hosts,
which end with it; their boxes are swept like those of any process.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from omegaconf import DictConfig
from ray.exceptions import RayActorError, RayTaskError, TaskCancelledError

from rewards.task import Task
from rl.episodes.boxes import kind_of
from rl.run.nodes import places
from rollout.episode import Boot
from rollout.sandbox import OUTPUT_CAP, ExecResult, Sandbox, SandboxError


class Host:
    """A host has boxes for grading, by number. Each method may raise what a box's verb raises."""

    def __init__(self, sandbox: DictConfig, run: str) -> None:
        self._boot = kind_of(sandbox).boot(run=run)
        self._boxes: dict[int, Sandbox] = {}
        self._numbers = itertools.count()

    async def boot(self, task: Task) -> tuple[int, str, str, str]:
        """Boot a box; return its number, workdir, home and tmpdir."""
        box = await self._boot(task, None)
        number = next(self._numbers)
        self._boxes[number] = box
        return number, box.workdir, box.home, box.tmpdir

    async def do(self, number: int, verb: str, *args: Any, **kwargs: Any) -> Any:
        """Call a verb of a box, and return what it returns."""
        return await getattr(self._boxes[number], verb)(*args, **kwargs)

    async def close(self, number: int) -> None:
        """Close a box and forget it."""
        await self._boxes.pop(number).close()


class FarBox:
    """A FarBox stands for a box of a ``Host``, with the verbs of ``rollout.sandbox.Sandbox``."""

    relays = False

    def __init__(self, host: Any, number: int, workdir: str, home: str, tmpdir: str) -> None:
        self.workdir, self.home, self.tmpdir = workdir, home, tmpdir
        self._host, self._number, self._closed = host, number, False

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout_s: float,
        stdin: bytes = b"",
        output_cap: int = OUTPUT_CAP,
    ) -> ExecResult:
        """Run a program; see `Sandbox.exec`."""
        limits = {"timeout_s": timeout_s, "stdin": stdin, "output_cap": output_cap}
        return await self._do("exec", list(argv), env=dict(env), **limits)

    async def put(self, path: str, data: bytes) -> None:
        """Write a file; see `Sandbox.put`."""
        await self._do("put", path, data)

    async def renew(self, path: str, files: Mapping[str, bytes]) -> None:
        """Make a directory anew; see `Sandbox.renew`."""
        await self._do("renew", path, dict(files))

    async def get(self, path: str) -> bytes:
        """Read a file; see `Sandbox.get`."""
        return await self._do("get", path)

    async def diff(self) -> bytes:
        """Return all changes to the work tree; see `Sandbox.diff`."""
        return await self._do("diff")

    async def close(self) -> None:
        """End all processes and delete all files. Never raises."""
        if not self._closed:
            self._closed = True
            await asyncio.gather(_answer(self._host.close.remote(self._number), "box_killed"), return_exceptions=True)

    async def _do(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        if self._closed:
            raise SandboxError("closed", f"{verb} after close")
        return await _answer(self._host.do.remote(self._number, verb, *args, **kwargs), "box_killed")


def far_boots(near: Mapping[str, Boot], config: DictConfig) -> dict[str, Boot]:
    """Return Boots that make boxes for grading on the nodes with ``cluster.grading_resource``, others with ``near``.

    Raises RuntimeError if no node of the cluster has the resource.
    """
    resource, run = config.cluster.grading_resource, Path(config.run.dir or "").name
    hosts: list[Any] = [
        ray.remote(Host).options(max_concurrency=1000, **place).remote(config.sandbox, run)
        for place in places(resource)
    ]
    turns = itertools.cycle(hosts)

    async def boot(name: str, task: Task, socket_dir: Path | None) -> Sandbox:
        if socket_dir is not None:
            return await near[name](task, socket_dir)
        host = next(turns)
        return FarBox(host, *await _answer(host.boot.remote(task), "boot_failed"))

    return {name: functools.partial(boot, name) for name in near}


async def _answer(reference: Any, cause: str) -> Any:
    """Return what the host's method returns, or raise what it raises; ``cause`` is reported if the host has died."""
    try:
        return await reference
    except asyncio.CancelledError:
        ray.cancel(reference)
        raise
    except RayTaskError as error:
        raise error.cause from None
    except (RayActorError, TaskCancelledError) as error:
        raise SandboxError(cause, f"the node that grades: {str(error).splitlines()[0]}") from None
