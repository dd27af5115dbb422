"""The nodes of a job: what each does before Ray starts, and all that a node other than the head does."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig

from rl.checks import check
from rl.checks.data import check_tasks
from rl.checks.machine import check_disk
from rl.cluster.environment import set_up
from rl.cluster.link import JobPosition, Link, NodeError
from rl.cluster.network import node_address
from rl.cluster.preflight import answer
from rl.cluster.ray import RayNode
from rl.cluster.stage import stage
from rl.config.compose import ConfigError
from rl.episodes.boxes import kind_of, prepare_images
from rl.run import stop
from rl.run.scratch import local_directory
from rl.train import starts
from rollout import files
from rollout.sandbox import SandboxError

Say = Callable[[str], None]
T = TypeVar("T")


def check_node(config: DictConfig, plays: bool) -> str:
    """Return what is wrong with this node or with the config, "" if nothing is. Blocks.

    ``plays``: boxes run on this node.
    """
    try:
        if config.cluster.local_dir is not None:
            local_directory(config.cluster.local_dir)
        check(config, plays)
    except (ConfigError, OSError) as error:
        return str(error)
    return ""


def judge(problems: Mapping[str, str], config: DictConfig, plays: bool) -> None:
    """Raise ConfigError if all nodes have found the same fault (the config's), else NodeError for those that found one.

    ``problems``: what ``check_node`` has returned, by node. ``plays``: boxes run on this node. Something that only a
    machine can lack is always a fault of the node. Blocks.
    """
    bad = {node: text for node, text in problems.items() if text}
    if not bad:
        return
    if len(bad) == len(problems) and len(set(bad.values())) == 1 and not _lacks_something(config, plays):
        raise ConfigError(*next(iter(bad.values())).splitlines())
    lines = [f"{node}: {line}" for node, text in sorted(bad.items()) for line in text.splitlines()]
    raise NodeError("\ncluster: node ".join(lines))


def _lacks_something(config: DictConfig, plays: bool) -> bool:
    """Return whether this machine has no room, no disk or, if boxes run on it, no container engine for the config."""
    try:
        if config.cluster.local_dir is not None:
            local_directory(config.cluster.local_dir)
        if plays:
            kind_of(config.sandbox).check()
        check_disk(config)
    except ConfigError:
        return True
    return False


def prepare_node(config: DictConfig, plays: bool, logs: Path, say: Say) -> dict[str, Any]:
    """Fetch what this node needs, and return the config keys to set, the same on every node. Blocks.

    ``plays``: boxes run on this node, so it needs their images. With ``config.prepare`` set, rl.train makes data and
    model later, on the head and the shared disk.
    Raises ConfigError, SandboxError.
    """
    if config.prepare:
        return {}
    if plays and kind_of(config.sandbox).from_images and config.data.custom_cls.path == "pkg://rl.train.dataset":

        def count(ready: int, wanted: int) -> None:
            files.write(logs / starts.IMAGES, f"{ready}\n")
            # A line for each tenth; the last one is said in any case.
            if ready < wanted and 10 * ready // wanted > 10 * (ready - 1) // wanted:
                say(f"images: {ready} of {wanted} ready")

        prepare_images(config.sandbox, logs, check_tasks(config), say, count)  # each node reports on its own images
    return stage(config, say) if config.cluster.stage_dir else {}


def log_directory(run_dir: Path, node: str) -> Path:
    """Return the directory of a node's logs in the run directory; it is made if it is missing."""
    directory = run_dir / "logs" / node
    directory.mkdir(parents=True, exist_ok=True)
    return directory


async def unless(guards: Iterable[asyncio.Future[Any]], work: Awaitable[T]) -> T:
    """Return the result of ``work``, unless one of the guards fails first: then raise what it failed with."""
    task, guards = asyncio.ensure_future(work), list(guards)
    await asyncio.wait([task, *guards], return_when=asyncio.FIRST_COMPLETED)
    for guard in guards:
        if guard.done():
            task.cancel()
            guard.result()
    return await task


async def member(place: JobPosition, config: DictConfig, run_dir: Path, low: list[str]) -> None:
    """Run a node that is not the head until the head hangs up. Raises NodeError if the head cannot be reached.

    ``low``: lines for the user about this node.
    """
    link = await Link.open(place, config.cluster.start_timeout_s)
    loop = asyncio.get_running_loop()
    for number in stop.SIGNALS:
        loop.add_signal_handler(number, lambda: None)  # the head decides, and hangs up

    def say(text: str) -> None:
        asyncio.run_coroutine_threadsafe(link.send(say=text), loop)

    for line in low:
        say(line)
    heard = asyncio.ensure_future(link.receive())
    ray: RayNode | None = None
    try:
        set_up(config)
        await link.send(checked=await asyncio.to_thread(check_node, config, place.plays))
        if await heard is None:
            return
        logs = log_directory(run_dir, place.node)  # not before: the run directory may be another job's
        ray = RayNode(place, config, logs, say)
        if config.cluster.preflight and not await answer(link, config, logs):
            return
        heard = asyncio.ensure_future(link.receive())
        preparing = asyncio.ensure_future(asyncio.to_thread(prepare_node, config, place.plays, logs, say))
        await asyncio.wait([preparing, heard], return_when=asyncio.FIRST_COMPLETED)
        if not preparing.done():
            return
        stamp = secrets.token_hex(8)
        (logs / "stamp").write_text(stamp)
        await link.send(ready={"keys": preparing.result(), "stamp": stamp})
        message = await heard
        if message is None:
            return
        ended = await ray.start(node_address(config, link.address), f"--address={message['ray']}")
        heard = asyncio.ensure_future(link.receive())
        await unless([ended], asyncio.shield(heard))
    except (ConfigError, NodeError, SandboxError, OSError) as error:
        await link.send(problem=str(error).removeprefix(f"{place.node}: "))
        await (link.receive() if heard.done() else heard)
    finally:
        if ray is not None:
            await ray.stop()
        await link.close()
