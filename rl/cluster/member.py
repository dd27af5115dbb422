"""This module does what every node of a job does before Ray starts, and all that a node does which is not the head."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig

from rl.boxes import kind_of, prepare_images
from rl.checks import check
from rl.checks.data import check_tasks
from rl.cluster.link import Link, NodeError, Place
from rl.cluster.ray import RayNode, reachable
from rl.cluster.stage import stage
from rl.config import ConfigError
from rl.run import stop
from rollout.sandbox import SandboxError

Say = Callable[[str], None]
T = TypeVar("T")


def prepare_node(config: DictConfig, logs: Path, say: Say) -> dict[str, Any]:
    """Check this node, fetch what it needs, and return the config keys to set, the same on every node. Blocks.

    With ``config.prepare`` set, rl.train makes data and model later, on the head and the shared disk.
    Raises ConfigError, SandboxError.
    """
    check(config)
    if config.prepare:
        return {}
    if kind_of(config.sandbox).from_images and config.data.custom_cls.path == "pkg://rl.dataset":
        prepare_images(config.sandbox, logs, check_tasks(config), say)  # each node reports on its own images
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


async def member(place: Place, config: DictConfig, run_dir: Path) -> None:
    """Run a node that is not the head until the head hangs up. Raises NodeError if the head cannot be reached."""
    link = await Link.open(place, config.cluster.start_timeout_s)
    loop = asyncio.get_running_loop()
    for number in stop.SIGNALS:
        loop.add_signal_handler(number, lambda: None)  # the head decides, and hangs up

    def say(text: str) -> None:
        asyncio.run_coroutine_threadsafe(link.send(say=text), loop)

    logs = log_directory(run_dir, place.node)
    ray = RayNode(place, config, logs)
    heard = asyncio.ensure_future(link.receive())
    try:
        preparing = asyncio.ensure_future(asyncio.to_thread(prepare_node, config, logs, say))
        await asyncio.wait([preparing, heard], return_when=asyncio.FIRST_COMPLETED)
        if not preparing.done():
            return
        stamp = secrets.token_hex(8)
        (logs / "stamp").write_text(stamp)
        await link.send(ready={"keys": preparing.result(), "stamp": stamp})
        message = await heard
        if message is None:
            return
        ended = await ray.start(reachable(link.address), f"--address={message['ray']}")
        heard = asyncio.ensure_future(link.receive())
        await unless([ended], asyncio.shield(heard))
    except (ConfigError, SandboxError, OSError) as error:
        await link.send(problem=str(error))
        await heard
    except NodeError as error:
        await link.send(problem=str(error).removeprefix(f"{place.node}: "))
        await heard
    finally:
        await ray.stop()
        await link.close()
